"""Rows of CacheManager in v2: pushes, and remapping (spec api-cachemanager §7, §10)."""

from __future__ import annotations

import pytest

from llm_datadist_ray import BlocksCacheKey, CacheDesc, CacheKeyByIdAndIndex, DataType, MemInfo, Memtype
from llm_datadist_ray.cache import CacheManager
from tests.conformance.pair import Pair
from tests.conformance.pool_cache import call
from tests.conformance.row_checks import parameters, refused
from tests.conformance.status import KV_CACHE_NOT_EXIST, NOT_YET_LINK, PARAM_INVALID

DESC = CacheDesc(2, [4, 8], DataType.DT_INT8)
remote_access = pytest.mark.mode("remote-access")


@remote_access
def test_v2_cache_manager_push_cache(linked_pair: Pair) -> None:
    """Spec §7; in two-sided mode it is refused first of all."""
    assert parameters(CacheManager.push_cache) == [
        "dst_cache_key",
        "src_cache",
        ("src_batch_index", 0),
        ("src_layer_range", None),
        ("dst_layer_range", None),
        ("size", -1),
        ("tensor_num_per_layer", 2),
    ]
    a, b = linked_pair.a, linked_pair.b
    src, dst = a.cache("src"), b.cache("dst", tensors=6)
    single, wide = a.cache("single", tensors=1), a.cache("wide", entry_bytes=97)
    a.blocks("blocks")
    a.process.push_cache(dst.key(2), "src", 5)
    a.process.push_cache(dst.key(4), "src", src_batch_index=1, src_layer_range=range(1, 2), dst_layer_range=range(2, 3))
    a.process.push_cache(dst.key(), "single")  # fewer tensors than a layer: nothing moves
    for tensor in range(4):
        dst.tensor(tensor)[2] = src.tensor(tensor)[5]
    dst.tensor(4)[4], dst.tensor(5)[4] = src.tensor(2)[1], src.tensor(3)[1]
    assert (single.cache_id, wide.cache_id) == (2, 3)
    for args, error in (
        ((None, "src"), TypeError),
        ((BlocksCacheKey(2), "src"), TypeError),
        ((dst.key(), "blocks"), PARAM_INVALID),
        ((dst.key(), "src", -1), ValueError),
        ((dst.key(), "src", 6), PARAM_INVALID),
        ((dst.key(6), "src"), PARAM_INVALID),
        ((dst.key(), "wide"), PARAM_INVALID),
        ((dst.key(), "src", 0, [0]), TypeError),
        ((dst.key(), "src", 0, range(0)), PARAM_INVALID),
        ((dst.key(), "src", 0, range(2), range(1)), PARAM_INVALID),
        ((dst.key(), "src", 0, range(2), range(2, 4)), PARAM_INVALID),
        ((dst.key(), "src", 0, None, None, 96), PARAM_INVALID),
        ((dst.key(), "src", 0, None, None, None), TypeError),
        ((dst.key(), "src", 0, None, None, -1, 3), PARAM_INVALID),
        ((CacheKeyByIdAndIndex(2, -1), "src"), TypeError),
        ((CacheKeyByIdAndIndex(2, 7), "src"), KV_CACHE_NOT_EXIST),
        ((CacheKeyByIdAndIndex(7, 1), "src"), NOT_YET_LINK),
    ):
        refused(error, a.process.push_cache, *args)


@remote_access
def test_v2_cache_manager_push_blocks(linked_pair: Pair) -> None:
    """Spec §7. The server of a link pushes, too."""
    assert parameters(CacheManager.push_blocks) == [
        "dst_cache_key",
        "src_cache",
        ("src_blocks", ()),
        ("dst_blocks", ()),
        ("src_layer_range", None),
        ("dst_layer_range", None),
        ("tensor_num_per_layer", 2),
    ]
    a, b = linked_pair.a, linked_pair.b
    on_a, on_b = a.blocks("on_a"), b.blocks("on_b")
    a.cache("contiguous")
    a.process.push_blocks(b.blocks_key(), "on_a", [0, 3], [5, 1])
    b.process.push_blocks(a.blocks_key(), "on_b", src_blocks=[2], dst_blocks=[2], src_layer_range=range(3, 4),
                          dst_layer_range=range(1), tensor_num_per_layer=1)  # fmt: skip
    on_a.tensor(0)[2] = on_b.tensor(3)[2]
    for tensor in range(4):
        on_b.tensor(tensor)[[5, 1]] = on_a.tensor(tensor)[[0, 3]]
    key = b.blocks_key()
    for args, error in (
        ((on_b.key(), "on_a", [0], [0]), TypeError),
        ((key, "contiguous", [0], [0]), PARAM_INVALID),
        ((key, "on_a", [], [0]), PARAM_INVALID),
        ((key, "on_a", None, [0]), PARAM_INVALID),
        ((key, "on_a", [0], []), PARAM_INVALID),
        ((key, "on_a", [0, 1], [0]), PARAM_INVALID),
        ((key, "on_a", [6], [0]), PARAM_INVALID),
        ((key, "on_a", [0], [6]), PARAM_INVALID),
        ((key, "on_a", "0", [0]), TypeError),
        ((key, "on_a", [0], [0], range(0, 2, 2)), PARAM_INVALID),
        ((b.blocks_key(5), "on_a", [0], [0]), KV_CACHE_NOT_EXIST),
        ((BlocksCacheKey(7), "on_a", [0], [0]), NOT_YET_LINK),
    ):
        refused(error, a.process.push_blocks, *args)


def test_v2_cache_manager_remap_registered_memory(pair: Pair) -> None:
    """Reserved: arguments are checked, then a link is needed, and then nothing happens (spec §10)."""
    assert parameters(CacheManager.remap_registered_memory) == ["mem_infos"]
    info = MemInfo(Memtype.MEM_TYPE_DEVICE, 4096, 8192)
    refused(NOT_YET_LINK, call, pair.a, "remap_registered_memory", info)
    pair.link()
    assert call(pair.a, "remap_registered_memory", info) is None
    assert call(pair.a, "remap_registered_memory", [info, info]) is None
    for wrong in (
        [],
        1,
        None,
        [info, 1],
        MemInfo(Memtype.MEM_TYPE_HOST, 4096, 8192),
        MemInfo(Memtype.MEM_TYPE_DEVICE, 0, 8192),
        MemInfo(Memtype.MEM_TYPE_DEVICE, 4096, 0),
        [info, MemInfo(Memtype.MEM_TYPE_DEVICE, 4096, -1)],
    ):
        refused(PARAM_INVALID, call, pair.a, "remap_registered_memory", wrong)
