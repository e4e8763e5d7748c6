"""The engine's checks of a pull, in their order, and that nothing moves (spec api-cachemanager §5.4, §5.6, §5.7)."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from llm_datadist_ray import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
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


class TestTimeout:
    def test_a_stopped_peer(self, idle_pair: Pair) -> None:
        """Where the peer has a part in a pull, its silence is TIMEOUT; linking anew repairs it (spec §5.4, §11)."""
        idle_pair.a.init(listen=False, sync_kv_timeout=300)
        idle_pair.b.init(listen=True)
        idle_pair.link()
        src, dst = idle_pair.b.cache("src", entry_bytes=300_000), idle_pair.a.cache("dst", entry_bytes=300_000)
        idle_pair.b.process.signal(signal.SIGSTOP)
        try:
            needs_peer = not idle_pair.remote_access or idle_pair.path in ("unix", "tcp")
            if needs_peer:
                with raises(TIMEOUT, "2"):
                    idle_pair.a.process.pull_cache(src.key(), "dst")
        finally:
            idle_pair.b.process.signal(signal.SIGCONT)
        assert idle_pair.a.process.unlink_clusters([idle_pair.b.info()], 5000, True)[0] == SUCCESS
        idle_pair.link()
        idle_pair.a.process.pull_cache(src.key(1), "dst", 0)
        for tensor in range(4):
            dst.tensor(tensor)[0] = src.tensor(tensor)[1]


def test_after_finalize(pair: Pair) -> None:
    """The earlier manager and its caches are dead: LLM_FAILED, whatever the method (spec §1, §11)."""
    pair.a.cache("dst")
    pair.a.process.keep_manager()
    pair.a.process.finalize()
    with raises(FAILED):
        pair.a.process.use_kept_manager("pull_cache", CacheKeyByIdAndIndex(2, 1), "dst")
    with raises(FAILED):
        pair.a.process.use_kept_manager("unregister_cache", 1)
