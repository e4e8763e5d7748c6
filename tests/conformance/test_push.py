"""Pushes, byte by byte, and their checks (spec api-cachemanager §7)."""

from __future__ import annotations

import numpy as np
import pytest

from llm_datadist_ray import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from tests.conformance.pair import CacheRef, Pair
from tests.conformance.status import KV_CACHE_NOT_EXIST, NOT_YET_LINK, PARAM_INVALID, raises

remote_access_only = pytest.mark.mode("remote-access")


def same(num: int) -> list[tuple]:
    return [(index, index) for index in range(num)]


def expect_entry(dst: CacheRef, dst_batch: int, src: CacheRef, src_batch: int, pairs: list[tuple]) -> None:
    size = src.layout.entry_bytes
    for dst_tensor, src_tensor in pairs:
        dst.tensor(dst_tensor)[dst_batch, :size] = src.tensor(src_tensor)[src_batch]


@pytest.mark.mode("two-sided")
def test_two_sided_mode_has_no_pushes(linked_pair: Pair) -> None:
    linked_pair.a.cache("c")
    linked_pair.a.blocks("b")
    with raises(PARAM_INVALID, "enable_remote_cache_accessible"):
        linked_pair.a.process.push_cache(CacheKeyByIdAndIndex(2, 1), "c")
    with raises(PARAM_INVALID, "enable_remote_cache_accessible"):
        linked_pair.a.process.push_blocks(BlocksCacheKey(2), "b", [0], [0])


@remote_access_only
class TestPushCache:
    @pytest.mark.parametrize(("src_batch", "dst_batch"), [(0, 0), (5, 1), (2, 5)])
    def test_batches(self, linked_pair: Pair, src_batch: int, dst_batch: int) -> None:
        src, dst = linked_pair.a.cache("src"), linked_pair.b.cache("dst")
        linked_pair.a.process.push_cache(dst.key(dst_batch), "src", src_batch)
        expect_entry(dst, dst_batch, src, src_batch, same(4))

    @pytest.mark.parametrize(
        ("kwargs", "pairs"),
        [
            ({"src_layer_range": range(1, 2), "dst_layer_range": range(1)}, [(0, 2), (1, 3)]),
            ({"src_layer_range": range(2, 3), "dst_layer_range": range(3, 4), "tensor_num_per_layer": 1}, [(3, 2)]),
            ({"src_layer_range": range(2)}, same(4)),
            ({"tensor_num_per_layer": 1}, same(4)),
            ({"tensor_num_per_layer": 4}, same(4)),
        ],
    )
    def test_layers(self, linked_pair: Pair, kwargs: dict, pairs: list[tuple]) -> None:
        src, dst = linked_pair.a.cache("src"), linked_pair.b.cache("dst")
        linked_pair.a.process.push_cache(dst.key(1), "src", 3, **kwargs)
        expect_entry(dst, 1, src, 3, pairs)

    def test_smaller_entries_fill_the_front_of_larger_ones(self, linked_pair: Pair) -> None:
        src, dst = linked_pair.a.cache("src", entry_bytes=50), linked_pair.b.cache("dst")
        linked_pair.a.process.push_cache(dst.key(2), "src", 1)
        expect_entry(dst, 2, src, 1, same(4))

    def test_fewer_tensors_than_a_layer_move_nothing(self, pair: Pair) -> None:
        """Silent success, without a link even (upstream's own tests)."""
        pair.a.cache("src", tensors=1)
        pair.a.process.push_cache(CacheKeyByIdAndIndex(2, 1), "src")

    def test_id_zero_is_the_request_key_zero(self, linked_pair: Pair) -> None:
        src, dst = linked_pair.a.cache("src"), linked_pair.b.cache("dst", key=[CacheKey(2, 0, 0)])
        linked_pair.a.process.push_cache(CacheKeyByIdAndIndex(2, 0), "src", 1)
        expect_entry(dst, 0, src, 1, same(4))

    def test_large(self, linked_pair: Pair) -> None:
        src = linked_pair.a.cache("src", tensors=2, entries=2, entry_bytes=2_500_003)
        dst = linked_pair.b.cache("dst", tensors=2, entries=2, entry_bytes=2_500_003)
        linked_pair.a.process.push_cache(dst.key(0), "src", 1)
        expect_entry(dst, 0, src, 1, same(2))
        linked_pair.check_only_path_used()

    def test_the_server_of_a_link_can_push(self, linked_pair: Pair) -> None:
        src, dst = linked_pair.b.cache("src"), linked_pair.a.cache("dst")
        linked_pair.b.process.push_cache(dst.key(0), "src", 1)
        expect_entry(dst, 0, src, 1, same(4))


@remote_access_only
class TestPushBlocks:
    @pytest.mark.parametrize("form", [list, np.int32, np.int64])
    @pytest.mark.parametrize(
        ("src_blocks", "dst_blocks"), [([5, 0, 3], [1, 4, 2]), ([0, 1, 2], [3, 4, 5]), ([2, 2], [0, 5])]
    )
    def test_blocks(self, linked_pair: Pair, src_blocks: list, dst_blocks: list, form: type) -> None:
        src, dst = linked_pair.a.blocks("src", model_id=None), linked_pair.b.blocks("dst")
        given = [blocks if form is list else np.array(blocks, form) for blocks in (src_blocks, dst_blocks)]
        linked_pair.a.process.push_blocks(linked_pair.b.blocks_key(), "src", *given)
        for tensor in range(4):
            dst.tensor(tensor)[dst_blocks] = src.tensor(tensor)[src_blocks]

    def test_layers(self, linked_pair: Pair) -> None:
        src, dst = linked_pair.a.blocks("src"), linked_pair.b.blocks("dst", tensors=6)
        linked_pair.a.process.push_blocks(
            linked_pair.b.blocks_key(), "src", [1, 2], [0, 5], range(2), range(4, 6), tensor_num_per_layer=1
        )
        for src_tensor, dst_tensor in ((0, 4), (1, 5)):
            dst.tensor(dst_tensor)[[0, 5]] = src.tensor(src_tensor)[[1, 2]]

    def test_many_blocks(self, linked_pair: Pair) -> None:
        rng = np.random.default_rng(6)
        src = linked_pair.a.blocks("src", tensors=2, entries=3000, entry_bytes=777)
        dst = linked_pair.b.blocks("dst", tensors=2, entries=3000, entry_bytes=777)
        src_blocks, dst_blocks = rng.integers(0, 3000, 2500), rng.permutation(3000)[:2500]
        linked_pair.a.process.push_blocks(linked_pair.b.blocks_key(), "src", src_blocks, dst_blocks)
        for tensor in range(2):
            dst.tensor(tensor)[dst_blocks] = src.tensor(tensor)[src_blocks]

    def test_fewer_tensors_than_a_layer_move_nothing(self, pair: Pair) -> None:
        pair.a.blocks("src", tensors=1)
        pair.a.process.push_blocks(pair.b.blocks_key(), "src", [0], [0])


@remote_access_only
class TestPushChecks:
    """Engine checks of spec §7, in its order. Nothing moves."""

    def test_local_cache_is_gone(self, linked_pair: Pair) -> None:
        linked_pair.a.cache("src")
        dst = linked_pair.b.cache("dst")
        linked_pair.a.process.unregister("src")
        with raises(KV_CACHE_NOT_EXIST):
            linked_pair.a.process.push_cache(dst.key(), "src")

    def test_not_linked(self, pair: Pair) -> None:
        pair.a.cache("src")
        pair.a.blocks("src_blocks")
        with raises(NOT_YET_LINK):
            pair.a.process.push_cache(CacheKeyByIdAndIndex(2, 1), "src")
        with raises(NOT_YET_LINK):
            pair.a.process.push_blocks(pair.b.blocks_key(), "src_blocks", [0], [0])

    @pytest.mark.parametrize(
        ("blocks", "kwargs"),
        [([], {}), (None, {}), ([0], {"tensor_num_per_layer": 3}), ([0], {"src_layer_range": range(2**64)})],
    )
    def test_link_and_caches_before_lists_and_tensors(self, pair: Pair, blocks: list | None, kwargs: dict) -> None:
        pair.a.blocks("src")
        kwargs = {**kwargs, "dst_layer_range": kwargs.get("src_layer_range")}
        push = pair.b.blocks_key(), "src", blocks, [0]
        with raises(NOT_YET_LINK):
            pair.a.process.push_blocks(*push, **kwargs)
        pair.link()
        with raises(KV_CACHE_NOT_EXIST):
            pair.a.process.push_blocks(*push, **kwargs)
        pair.b.blocks("dst")
        with raises(PARAM_INVALID):
            pair.a.process.push_blocks(*push, **kwargs)
        pair.a.process.unregister("src")
        with raises(KV_CACHE_NOT_EXIST):
            pair.a.process.push_blocks(*push, **kwargs)

    def test_not_linked_with_itself(self, pair: Pair) -> None:
        src = pair.a.cache("src")
        with raises(NOT_YET_LINK):
            pair.a.process.push_cache(src.key(), "src")

    @pytest.mark.parametrize(("local", "remote"), [(False, True), (True, False)])
    def test_accessible(self, linked_pair: Pair, local: bool, remote: bool) -> None:
        linked_pair.a.cache("src", remote_accessible=local)
        dst = linked_pair.b.cache("dst", remote_accessible=remote)
        with raises(PARAM_INVALID):
            linked_pair.a.process.push_cache(dst.key(), "src")

    def test_remote_cache_unknown(self, linked_pair: Pair) -> None:
        linked_pair.a.cache("src")
        linked_pair.a.blocks("src_blocks")
        with raises(KV_CACHE_NOT_EXIST):
            linked_pair.a.process.push_cache(CacheKeyByIdAndIndex(2, 7), "src")
        with raises(KV_CACHE_NOT_EXIST):
            linked_pair.a.process.push_cache(CacheKeyByIdAndIndex(2, 0), "src")
        with raises(KV_CACHE_NOT_EXIST):
            linked_pair.a.process.push_blocks(linked_pair.b.blocks_key(3), "src_blocks", [0], [0])

    def test_remote_layer_beyond_the_cache(self, linked_pair: Pair) -> None:
        linked_pair.a.cache("src")
        dst = linked_pair.b.cache("dst", tensors=2)
        with raises(PARAM_INVALID):
            linked_pair.a.process.push_cache(dst.key(), "src")

    def test_local_layer_beyond_the_cache(self, linked_pair: Pair) -> None:
        linked_pair.a.cache("src", tensors=2)
        dst = linked_pair.b.cache("dst")
        with raises(PARAM_INVALID):
            linked_pair.a.process.push_cache(dst.key(), "src", 0, range(1, 2), range(1, 2))

    def test_tensors_per_layer_does_not_divide(self, linked_pair: Pair) -> None:
        linked_pair.a.cache("src", tensors=3)
        dst = linked_pair.b.cache("dst", tensors=4)
        with raises(PARAM_INVALID):
            linked_pair.a.process.push_cache(dst.key(), "src")

    def test_batches_beyond_the_caches(self, linked_pair: Pair) -> None:
        linked_pair.a.cache("src")
        dst = linked_pair.b.cache("dst")
        with raises(PARAM_INVALID):
            linked_pair.a.process.push_cache(dst.key(6), "src")
        with raises(PARAM_INVALID):
            linked_pair.a.process.push_cache(dst.key(), "src", 6)

    def test_entries_larger_than_the_destination(self, linked_pair: Pair) -> None:
        linked_pair.a.cache("src", entry_bytes=97)
        dst = linked_pair.b.cache("dst")
        with raises(PARAM_INVALID):
            linked_pair.a.process.push_cache(dst.key(), "src")

    @pytest.mark.parametrize(
        ("src_blocks", "dst_blocks"), [([0], [6]), ([6], [0]), ([0, 1], [0]), ([], [0]), (np.array([-1]), [0])]
    )
    def test_block_lists(self, linked_pair: Pair, src_blocks: list, dst_blocks: list) -> None:
        linked_pair.a.blocks("src")
        linked_pair.b.blocks("dst")
        with raises(PARAM_INVALID):
            linked_pair.a.process.push_blocks(linked_pair.b.blocks_key(), "src", src_blocks, dst_blocks)

    def test_block_sizes_differ(self, linked_pair: Pair) -> None:
        linked_pair.a.blocks("src", entry_bytes=64)
        linked_pair.b.blocks("dst")
        with raises(PARAM_INVALID):
            linked_pair.a.process.push_blocks(linked_pair.b.blocks_key(), "src", [0], [0])
