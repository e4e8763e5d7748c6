"""The engine's checks of a pull, in their order, and that nothing moves (spec api-cachemanager §5.4, §5.6, §5.7)."""

from __future__ import annotations

import signal
import time
from types import MappingProxyType

import numpy as np
import pytest

from llm_datadist_ray import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist_ray._native import NativeStatus
from tests.conformance.pair import SUCCESS, CacheRef, Pair
from tests.conformance.status import FAILED, KV_CACHE_NOT_EXIST, NOT_YET_LINK, PARAM_INVALID, TIMEOUT, raises

ABSENT = 99


def test_own_cluster_comes_first(pair: Pair) -> None:
    """Even before the local cache is looked at."""
    pair.a.cache("dst")
    pair.a.blocks("dst_blocks")
    pair.a.process.unregister("dst")
    with raises(PARAM_INVALID, "1"):
        pair.a.process.pull_cache(CacheKeyByIdAndIndex(1, 1), "dst")
    with raises(PARAM_INVALID, "1"):
        pair.a.process.pull_blocks(BlocksCacheKey(1), "dst_blocks", [0], [0])


def test_local_cache_is_gone(pair: Pair) -> None:
    """Before the batch index, the size and the link."""
    pair.a.cache("dst")
    pair.a.process.unregister("dst")
    with raises(KV_CACHE_NOT_EXIST):
        pair.a.process.pull_cache(CacheKeyByIdAndIndex(2, 1), "dst", ABSENT, 10_000)


@pytest.mark.parametrize("batch_index", [6, 2**32 - 1])
def test_local_batch_index(pair: Pair, batch_index: int) -> None:
    """Before the link."""
    pair.a.cache("dst")
    with raises(PARAM_INVALID):
        pair.a.process.pull_cache(CacheKeyByIdAndIndex(2, 1), "dst", batch_index)


def test_local_layout(linked_pair: Pair) -> None:
    """The engine's own check, behind a handle that lies about its kind."""
    src = linked_pair.b.cache("src")
    linked_pair.b.blocks("src_blocks")
    linked_pair.a.cache("contiguous")
    linked_pair.a.blocks("paged")
    linked_pair.a.process.as_other_kind("contiguous", "not_paged")
    linked_pair.a.process.as_other_kind("paged", "not_contiguous")
    with raises(PARAM_INVALID):
        linked_pair.a.process.pull_cache(src.key(), "not_contiguous")
    with raises(PARAM_INVALID):
        linked_pair.a.process.pull_blocks(linked_pair.b.blocks_key(), "not_paged", [0], [0])


def test_size_beyond_the_local_entry(pair: Pair) -> None:
    """Before the link."""
    pair.a.cache("dst")
    with raises(PARAM_INVALID):
        pair.a.process.pull_cache(CacheKeyByIdAndIndex(2, 1), "dst", 0, 97)


@pytest.mark.parametrize(
    "ranges",
    [
        {"dst_layer_range": range(1, 3)},
        {"dst_layer_range": range(2, 3)},
        {"dst_layer_range": range(1), "tensor_num_per_layer": 3},
        {"src_layer_range": range(1), "tensor_num_per_layer": 3},
        {"dst_layer_range": range(2**40, 2**40 + 1)},
    ],
)
def test_local_selection(pair: Pair, ranges: dict) -> None:
    """Before the link."""
    pair.a.cache("dst")
    pair.a.blocks("dst_blocks")
    with raises(PARAM_INVALID):
        pair.a.process.pull_cache(CacheKeyByIdAndIndex(2, 1), "dst", **ranges)
    with raises(PARAM_INVALID):
        pair.a.process.pull_blocks(BlocksCacheKey(2), "dst_blocks", [0], [0], **ranges)


def test_ranges_on_a_one_tensor_cache(pair: Pair) -> None:
    pair.a.cache("dst", tensors=1)
    with raises(PARAM_INVALID):
        pair.a.process.pull_cache(CacheKeyByIdAndIndex(2, 1), "dst", dst_layer_range=range(1))


def test_not_linked(pair: Pair) -> None:
    """Before the destination blocks are looked at."""
    pair.a.cache("dst")
    pair.a.blocks("dst_blocks")
    with raises(NOT_YET_LINK, "2"):
        pair.a.process.pull_cache(CacheKeyByIdAndIndex(2, 1), "dst")
    with raises(NOT_YET_LINK, "2"):
        pair.a.process.pull_blocks(BlocksCacheKey(2), "dst_blocks", [0], [ABSENT])


@pytest.mark.parametrize("block", [6, 2**31, 2**63 - 1, 2**64 - 1])
def test_destination_block(linked_pair: Pair, block: int) -> None:
    """Before the source is looked for. Neither end's bytes change, also not those of the good blocks."""
    linked_pair.a.blocks("dst")
    with raises(PARAM_INVALID):
        linked_pair.a.process.pull_blocks(BlocksCacheKey(2, ABSENT), "dst", [0, 1], [0, block])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_negative_block_in_an_array(linked_pair: Pair, dtype: type) -> None:
    linked_pair.b.blocks("src")
    linked_pair.a.blocks("dst")
    for src_blocks, dst_blocks in (([-1], [0]), ([0], [-1])):
        with raises(PARAM_INVALID):
            linked_pair.a.process.pull_blocks(
                linked_pair.b.blocks_key(), "dst", np.array(src_blocks, dtype), np.array(dst_blocks, dtype)
            )


@pytest.mark.parametrize("cache_id", [ABSENT, 0, -1, 2**63 - 1])
def test_source_id_unknown(linked_pair: Pair, cache_id: int) -> None:
    linked_pair.b.cache("src")
    linked_pair.a.cache("dst")
    linked_pair.a.blocks("dst_blocks")
    with raises(KV_CACHE_NOT_EXIST):
        linked_pair.a.process.pull_cache(CacheKeyByIdAndIndex(2, cache_id), "dst")
    with raises(KV_CACHE_NOT_EXIST):
        linked_pair.a.process.pull_blocks(CacheKeyByIdAndIndex(2, cache_id), "dst_blocks", [], [0])


def test_source_key_unknown(linked_pair: Pair) -> None:
    linked_pair.b.cache("src", key=[CacheKey(2, 1, 1)])
    linked_pair.a.blocks("dst")
    for key in (CacheKey(2, 1, 2), CacheKey(2, 2, 1), CacheKey(2, 2**64 - 1, 1, 1), BlocksCacheKey(2, ABSENT)):
        src_blocks = [0] if isinstance(key, BlocksCacheKey) else []
        with raises(KV_CACHE_NOT_EXIST):
            linked_pair.a.process.pull_blocks(key, "dst", src_blocks, [0])


@pytest.mark.mode("remote-access")
def test_prefix_keys_are_not_found_in_remote_access_mode(linked_pair: Pair) -> None:
    key = CacheKey(2, 2**64 - 1, 0, 4)
    linked_pair.b.cache("src", key=[key])
    linked_pair.a.blocks("dst")
    with raises(KV_CACHE_NOT_EXIST):
        linked_pair.a.process.pull_blocks(key, "dst", [], [0])


def test_source_is_unregistered(linked_pair: Pair) -> None:
    src = linked_pair.b.cache("src")
    linked_pair.b.blocks("src_blocks")
    dst = linked_pair.a.cache("dst")
    dst_blocks = linked_pair.a.blocks("dst_blocks")
    linked_pair.a.process.pull_cache(src.key(), "dst")
    linked_pair.a.process.pull_blocks(linked_pair.b.blocks_key(), "dst_blocks", [1], [0])
    for tensor in range(4):
        dst.tensor(tensor)[0] = src.tensor(tensor)[0]
        dst_blocks.tensor(tensor)[0] = linked_pair.b.cache_ref("src_blocks").tensor(tensor)[1]
    linked_pair.b.process.unregister("src")
    linked_pair.b.process.unregister("src_blocks")
    with raises(KV_CACHE_NOT_EXIST):
        linked_pair.a.process.pull_cache(src.key(), "dst", 1)
    with raises(KV_CACHE_NOT_EXIST):
        linked_pair.a.process.pull_blocks(linked_pair.b.blocks_key(), "dst_blocks", [0], [1])


def test_source_batch_index(linked_pair: Pair) -> None:
    src = linked_pair.b.cache("src", entry_bytes=192)
    linked_pair.a.cache("dst")
    linked_pair.a.blocks("dst_blocks")
    with raises(KV_CACHE_NOT_EXIST):
        linked_pair.a.process.pull_cache(src.key(6), "dst")
    with raises(KV_CACHE_NOT_EXIST):
        linked_pair.a.process.pull_blocks(src.key(6), "dst_blocks", [], [0])


@pytest.mark.parametrize(
    "ranges",
    [
        {},
        {"src_layer_range": range(1)},
        {"dst_layer_range": range(1)},
        {"src_layer_range": range(1), "dst_layer_range": range(2)},
        {"src_layer_range": range(2, 4), "dst_layer_range": range(2)},
    ],
)
def test_tensor_counts(linked_pair: Pair, ranges: dict) -> None:
    src = linked_pair.b.cache("src", tensors=6)
    linked_pair.a.cache("dst")
    with raises(PARAM_INVALID):
        linked_pair.a.process.pull_cache(src.key(), "dst", **ranges)


def test_source_layout(linked_pair: Pair) -> None:
    paged = linked_pair.b.blocks("paged")
    linked_pair.a.cache("dst")
    linked_pair.a.blocks("dst_blocks")
    with raises(PARAM_INVALID):
        linked_pair.a.process.pull_cache(paged.key(), "dst")
    with raises(PARAM_INVALID):
        linked_pair.a.process.pull_blocks(paged.key(), "dst_blocks", [], [0])


def test_source_entry_is_smaller(linked_pair: Pair) -> None:
    src = linked_pair.b.cache("src", entry_bytes=95)
    linked_pair.a.cache("dst")
    for size in (-1, 96):
        with raises(PARAM_INVALID):
            linked_pair.a.process.pull_cache(src.key(), "dst", 0, size)


@pytest.mark.parametrize(("src_blocks", "dst_blocks"), [([6], [0]), ([0, 2**40], [0, 1]), ([0, 1], [0]), ([0], [0, 1])])
def test_source_blocks(linked_pair: Pair, src_blocks: list[int], dst_blocks: list[int]) -> None:
    linked_pair.b.blocks("src")
    linked_pair.a.blocks("dst")
    with raises(PARAM_INVALID):
        linked_pair.a.process.pull_blocks(linked_pair.b.blocks_key(), "dst", src_blocks, dst_blocks)


@pytest.mark.parametrize("entry_bytes", [48, 95, 97, 192])
def test_block_sizes_differ(linked_pair: Pair, entry_bytes: int) -> None:
    linked_pair.b.blocks("src", entry_bytes=entry_bytes)
    linked_pair.a.blocks("dst")
    with raises(PARAM_INVALID):
        linked_pair.a.process.pull_blocks(linked_pair.b.blocks_key(), "dst", [0], [0])


def test_pieces_beyond_the_source_entry(linked_pair: Pair) -> None:
    src = linked_pair.b.cache("src", entry_bytes=192)
    linked_pair.a.blocks("dst")
    with raises(PARAM_INVALID):
        linked_pair.a.process.pull_blocks(src.key(), "dst", [], [0, 1, 2])


class TestAccessibility:
    """Remote-access mode wants both ends accessible, two-sided mode does not care (spec §3.3)."""

    CASES = pytest.mark.parametrize(("local", "remote"), [(False, True), (True, False), (False, False)])

    @staticmethod
    def caches(pair: Pair, local: bool, remote: bool) -> tuple[CacheRef, CacheRef]:
        return pair.b.cache("src", remote_accessible=remote), pair.a.cache("dst", remote_accessible=local)

    @CASES
    @pytest.mark.mode("remote-access")
    def test_remote_access(self, linked_pair: Pair, local: bool, remote: bool) -> None:
        src, _ = self.caches(linked_pair, local, remote)
        with raises(PARAM_INVALID):
            linked_pair.a.process.pull_cache(src.key(), "dst")

    @CASES
    @pytest.mark.mode("two-sided")
    def test_two_sided(self, linked_pair: Pair, local: bool, remote: bool) -> None:
        src, dst = self.caches(linked_pair, local, remote)
        linked_pair.a.process.pull_cache(src.key(), "dst")
        for tensor in range(4):
            dst.tensor(tensor)[0] = src.tensor(tensor)[0]


class TestStoppedPeer:
    """Alive, but without a word (spec §5.4, §11; design section 3, "Liveness")."""

    @staticmethod
    def caches(pair: Pair, **config: int) -> tuple[CacheRef, CacheRef]:
        """Both ends linked; what they serve is too large for one piece."""
        pair.a.init(listen=False, **config)
        pair.b.init(listen=True)
        pair.link()
        return pair.b.cache("src", entry_bytes=300_000), pair.a.cache("dst", entry_bytes=300_000)

    def test_a_pull_that_needs_it(self, idle_pair: Pair) -> None:
        """The first one needs it always, for a look-up or for its table: TIMEOUT. Linking anew repairs it."""
        src, dst = self.caches(idle_pair, sync_kv_timeout=300)
        idle_pair.b.process.signal(signal.SIGSTOP)
        try:
            with raises(TIMEOUT, "2"):
                idle_pair.a.process.pull_cache(src.key(), "dst")
        finally:
            idle_pair.b.process.signal(signal.SIGCONT)
        assert idle_pair.a.process.unlink_clusters([idle_pair.b.info()], 5000, True)[0] == SUCCESS
        idle_pair.link()
        idle_pair.a.process.pull_cache(src.key(1), "dst", 0)
        expect(dst, 0, src, 1)

    @pytest.mark.mode("remote-access")
    def test_a_pull_of_known_memory(self, idle_pair: Pair) -> None:
        """Over shm and cma the peer has no part in it and the bytes arrive, until its silence breaks the link."""
        src, dst = self.caches(idle_pair, sync_kv_timeout=300, budget_ms=1500)
        idle_pair.a.process.pull_cache(src.key(1), "dst", 0)
        expect(dst, 0, src, 1)
        idle_pair.b.process.signal(signal.SIGSTOP)
        try:
            if idle_pair.path in ("shm", "cma"):
                idle_pair.a.process.pull_cache(src.key(2), "dst", 3)
                expect(dst, 3, src, 2)
            else:
                with raises(TIMEOUT, "2"):
                    idle_pair.a.process.pull_cache(src.key(2), "dst", 3)
            assert idle_pair.a.process.wait_for_link_down(2, 5.0)
            with raises(NOT_YET_LINK, "no sign of life"):
                idle_pair.a.process.pull_cache(src.key(2), "dst", 4)
        finally:
            idle_pair.b.process.signal(signal.SIGCONT)

    @pytest.mark.mode("remote-access")
    def test_a_push_has_its_time_for_each_layer(self, idle_pair: Pair) -> None:
        """As one sum (docs/decisions.md): 4 layers of 200 ms."""
        src, _ = self.caches(idle_pair, sync_kv_timeout=200)
        idle_pair.b.process.signal(signal.SIGSTOP)
        try:
            start = time.monotonic()
            with raises(TIMEOUT, "2"):
                idle_pair.a.process.push_cache(src.key(), "dst", 0, tensor_num_per_layer=1)
            assert 0.75 < time.monotonic() - start < 3
        finally:
            idle_pair.b.process.signal(signal.SIGCONT)

    def test_finalize_ends_a_pull_without_a_limit(self, idle_pair: Pair) -> None:
        src, dst = self.caches(idle_pair, budget_ms=60_000)
        if idle_pair.path in ("unix", "tcp"):  # then it is the bytes that are waited for, where a table comes first
            idle_pair.a.process.pull_cache(src.key(1), "dst", 0)
            expect(dst, 0, src, 1)
        idle_pair.b.process.signal(signal.SIGSTOP)
        try:
            outcome = idle_pair.a.process.finalize_during_pull(2, "dst")
        finally:
            idle_pair.b.process.signal(signal.SIGCONT)
        assert outcome["status"] == NativeStatus.CLOSED
        assert outcome["elapsed_s"] < 1, outcome


def expect(dst: CacheRef, dst_batch: int, src: CacheRef, src_batch: int) -> None:
    for tensor in range(4):
        dst.tensor(tensor)[dst_batch] = src.tensor(tensor)[src_batch]


class TestOrder:
    """What is known in Python first has its place among the checks of the engine all the same (spec §5.4)."""

    ODD = MappingProxyType({"dst_layer_range": range(1), "tensor_num_per_layer": 3})

    def test_local_cache_before_its_tensors(self, pair: Pair) -> None:
        pair.a.cache("dst")
        pair.a.blocks("dst_blocks")
        for name in ("dst", "dst_blocks"):
            pair.a.process.unregister(name)
        with raises(KV_CACHE_NOT_EXIST):
            pair.a.process.pull_cache(CacheKeyByIdAndIndex(2, 1), "dst", **self.ODD)
        with raises(KV_CACHE_NOT_EXIST):
            pair.a.process.pull_blocks(pair.b.blocks_key(), "dst_blocks", [0], [0], **self.ODD)

    def test_tensors_before_the_link(self, pair: Pair) -> None:
        pair.a.cache("dst")
        with raises(PARAM_INVALID, "tensor_num_per_layer 3 does not divide"):
            pair.a.process.pull_cache(CacheKeyByIdAndIndex(2, 1), "dst", **self.ODD)
        with raises(PARAM_INVALID, "beyond any cache"):
            pair.a.process.pull_cache(CacheKeyByIdAndIndex(2, 1), "dst", dst_layer_range=range(2**64))

    @pytest.mark.parametrize("layers", [range(2**64), range(2**31, 2**31 + 1), range(2**70, 2**70 + 1)])
    def test_source_tensors_after_the_link_and_the_source(self, pair: Pair, layers: range) -> None:
        pair.a.cache("dst")
        with raises(NOT_YET_LINK):
            pair.a.process.pull_cache(CacheKeyByIdAndIndex(2, 1), "dst", src_layer_range=layers)
        pair.link()
        with raises(KV_CACHE_NOT_EXIST):
            pair.a.process.pull_cache(CacheKeyByIdAndIndex(2, 1), "dst", src_layer_range=layers)
        src = pair.b.cache("src")
        with raises(PARAM_INVALID, "beyond any cache"):
            pair.a.process.pull_cache(src.key(), "dst", src_layer_range=layers)


def test_after_finalize(pair: Pair) -> None:
    """The earlier manager and its caches are dead: LLM_FAILED, whatever the method (spec §1, §11)."""
    pair.a.cache("dst")
    pair.a.process.keep_manager()
    pair.a.process.finalize()
    with raises(FAILED):
        pair.a.process.use_kept_manager("pull_cache", CacheKeyByIdAndIndex(2, 1), "dst")
    with raises(FAILED):
        pair.a.process.use_kept_manager("unregister_cache", 1)
