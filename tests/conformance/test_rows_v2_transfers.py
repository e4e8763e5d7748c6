"""Rows of CacheManager in v2: registered memory and pulls (spec api-cachemanager §1, §3, §5)."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import pytest

from llm_datadist_ray import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType
from llm_datadist_ray.cache import CacheManager
from llm_datadist_ray.types import INVALID_ID
from tests.conformance.pair import Pair
from tests.conformance.row_checks import FOR_NONE, parameters, refused, v2
from tests.conformance.status import KV_CACHE_NOT_EXIST, NOT_YET_LINK, PARAM_INVALID, raises

DESC = CacheDesc(2, [4, 8], DataType.DT_INT8)
remote_access = pytest.mark.mode("remote-access")


def takes_keywords(function: Any) -> bool:
    return any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature(function).parameters.values())


def test_v2_cache_manager_constructor() -> None:
    """Internal: the engine's owner makes it, and gives the same one each time (spec §1)."""
    with v2() as dist:
        manager = dist.cache_manager
        assert type(manager) is CacheManager
        assert dist.cache_manager is manager
        CacheManager.check_cache_key(CacheKey(1, 0))
        CacheManager.check_cache_key(CacheKey(1, INVALID_ID, 0, 0))
        refused(PARAM_INVALID, CacheManager.check_cache_key, CacheKey(1, 0, 0, 0))
        refused(PARAM_INVALID, CacheManager.check_cache_key, CacheKey(1, INVALID_ID))
        manager.register_cache(DESC, [4096, 8192], remote_accessible=True)
        manager.set_is_call_linked()
        refused(PARAM_INVALID, manager.register_cache, DESC, [4096, 8192], remote_accessible=True)


def check_registration_refusals(method: str, wrong_key: Any) -> None:
    with v2() as dist:
        register = getattr(dist.cache_manager, method)
        _check_registration_refusals(register, wrong_key)
        assert register(DESC, [1, 1]).cache_id >= 1, "nobody looks at the memory"


def _check_registration_refusals(register: Callable[..., Any], wrong_key: Any) -> None:
    for args, error in (
        ((1, [16, 32]), TypeError),
        ((None, [16, 32]), FOR_NONE),
        ((DESC, (16, 32)), TypeError),
        ((DESC, [16, "32"]), TypeError),
        ((DESC, []), PARAM_INVALID),
        ((DESC, [16]), PARAM_INVALID),
        ((DESC, [16, 0]), PARAM_INVALID),
        ((DESC, [16, 2**64]), TypeError),
        ((DESC, [16, 32], wrong_key), TypeError),
        ((CacheDesc(2, [0, 8], DataType.DT_INT8), [16, 32]), PARAM_INVALID),
        ((CacheDesc(2, [1] * 32, DataType.DT_INT8), [16, 32]), PARAM_INVALID),
    ):
        refused(error, register, *args)
    refused(TypeError, register, DESC, [16, 32], remote_accessible=1)


def test_v2_cache_manager_register_cache(linked_pair: Pair) -> None:
    """Memory is not touched, keys name entries; the first binding of a key stays, and the last entry of one call is
    served (spec §2.3, §3.1)."""
    assert parameters(CacheManager.register_cache) == [
        "cache_desc",
        "addrs",
        ("cache_keys", ()),
        ("remote_accessible", None),
    ]
    check_registration_refusals("register_cache", [BlocksCacheKey(2)])
    with v2() as dist:
        five_keys = [CacheKey(1, request) for request in range(5)]
        refused(PARAM_INVALID, dist.cache_manager.register_cache, DESC, [4096, 8192], five_keys)
    a, b = linked_pair.a, linked_pair.b
    keys = [CacheKey(2, 5), CacheKey(2, INVALID_ID), CacheKey(2, 5), CacheKey(2, 6, 7)]
    first, second = b.cache("first", key=keys), b.cache("second", key=[CacheKey(2, 5)])
    dst = a.cache("dst")
    assert (first.cache_id, second.cache_id) == (1, 2)
    a.process.pull_cache(second.key(), "dst", 0)
    for tensor in range(4):
        dst.tensor(tensor)[0] = second.tensor(tensor)[0]
    if not linked_pair.remote_access:
        for batch, (key, entry) in enumerate(((CacheKey(2, 5), 2), (CacheKey(2, 6, 7), 3)), start=1):
            a.process.pull_cache(key, "dst", batch)
            for tensor in range(4):
                dst.tensor(tensor)[batch] = first.tensor(tensor)[entry]
        with raises(KV_CACHE_NOT_EXIST):
            a.process.pull_cache(CacheKey(2, 6), "dst", 0)


def test_v2_cache_manager_register_blocks_cache(linked_pair: Pair) -> None:
    """The newest cache of a model is served; without a key nobody finds it as blocks (spec §2.3, §3.2)."""
    assert parameters(CacheManager.register_blocks_cache) == [
        "cache_desc",
        "addrs",
        ("blocks_cache_key", None),
        ("remote_accessible", None),
    ]
    check_registration_refusals("register_blocks_cache", CacheKey(2, 5))
    a, b = linked_pair.a, linked_pair.b
    b.blocks("old", model_id=3)
    new = b.blocks("new", model_id=3)
    b.blocks("unnamed", model_id=None)
    dst = a.blocks("dst", model_id=None)
    a.process.pull_blocks(BlocksCacheKey(2, 3), "dst", [5, 0], [1, 2])
    for tensor in range(4):
        dst.tensor(tensor)[[1, 2]] = new.tensor(tensor)[[5, 0]]
    with raises(KV_CACHE_NOT_EXIST):
        a.process.pull_blocks(BlocksCacheKey(2), "dst", [0], [0])


def test_v2_cache_manager_unregister_cache(linked_pair: Pair) -> None:
    """Gone for both ends, with its keys; an unknown id is success (spec §3.5)."""
    assert parameters(CacheManager.unregister_cache) == ["cache_id"]
    a, b = linked_pair.a, linked_pair.b
    src, dst = b.blocks("src"), a.blocks("dst", model_id=None)
    a.process.pull_blocks(b.blocks_key(), "dst", [0], [0])
    for tensor in range(4):
        dst.tensor(tensor)[0] = src.tensor(tensor)[0]
    b.process.unregister("src")
    b.process.unregister("src")
    b.process.unregister_id(77)
    with raises(KV_CACHE_NOT_EXIST):
        a.process.pull_blocks(b.blocks_key(), "dst", [0], [0])
    a.process.unregister("dst")
    with raises(KV_CACHE_NOT_EXIST):
        a.process.pull_blocks(b.blocks_key(), "dst", [0], [0])
    with pytest.raises(TypeError):
        b.process.unregister_id("1")
    with pytest.raises(ValueError):
        b.process.unregister_id(2**63)


def test_v2_cache_manager_pull_cache(linked_pair: Pair) -> None:
    """Bytes as spec §5.6 (C2C), selection as §5.3, checks as §5.2 and §5.4."""
    assert parameters(CacheManager.pull_cache)[:4] == ["cache_key", "cache", ("batch_index", 0), ("size", -1)]
    assert takes_keywords(CacheManager.pull_cache)
    a, b = linked_pair.a, linked_pair.b
    src = b.cache("src", tensors=6, key=[CacheKey(2, 9)])
    dst, blocks = a.cache("dst", entry_bytes=64), a.blocks("blocks", model_id=None)
    ranges = {"src_layer_range": range(1, 3), "dst_layer_range": range(2), "tensor_num_per_layer": 2}
    a.process.pull_cache(src.key(4), "dst", batch_index=5, **ranges, unknown="is ignored", src_cache_offset=1)
    a.process.pull_cache(src.key(3), "dst", 1, 10, src_layer_range=range(1, 2), dst_layer_range=range(3, 4),
                         tensor_num_per_layer=1)  # fmt: skip
    for tensor in range(4):
        dst.tensor(tensor)[5] = src.tensor(tensor + 2)[4][:64]
    dst.tensor(3)[1][:10] = src.tensor(1)[3][:10]
    with raises(PARAM_INVALID, "6"):
        a.process.pull_cache(src.key(), "dst")  # six tensors into four
    by_request = CacheKey(2, 9), "dst", 0
    if linked_pair.remote_access:
        with pytest.raises(TypeError):
            a.process.pull_cache(*by_request, **ranges)
    else:
        a.process.pull_cache(*by_request, **ranges)
        for tensor in range(4):
            dst.tensor(tensor)[0] = src.tensor(tensor + 2)[0][:64]
        for key in (CacheKey(2, 9, 0, 1), CacheKey(2, INVALID_ID)):
            with raises(PARAM_INVALID):
                a.process.pull_cache(key, "dst")
    assert blocks.cache_id == 2
    for args, error in (
        ((BlocksCacheKey(2), "dst"), TypeError),
        ((src.key(), "dst", -1), ValueError),
        ((src.key(), "dst", None), TypeError),
        ((src.key(), "dst", 0, "1"), TypeError),
        ((src.key(), "dst", 0, 2**63), ValueError),
        ((src.key(), "dst", 0, 0), PARAM_INVALID),
        ((src.key(), "dst", 0, -2), PARAM_INVALID),
        ((src.key(), "dst", 0, 65), PARAM_INVALID),
        ((src.key(), "dst", 6), PARAM_INVALID),
        ((src.key(), "blocks"), PARAM_INVALID),
        ((CacheKeyByIdAndIndex(1, 1), "dst"), PARAM_INVALID),
        ((CacheKeyByIdAndIndex(7, 1), "dst"), NOT_YET_LINK),
        ((CacheKeyByIdAndIndex(2, 7), "dst"), KV_CACHE_NOT_EXIST),
        ((src.key(6), "dst"), KV_CACHE_NOT_EXIST),
    ):
        refused(error, a.process.pull_cache, *args, **ranges)
    for name, value, error in (
        ("tensor_num_per_layer", 0, PARAM_INVALID),
        ("tensor_num_per_layer", -1, ValueError),
        ("tensor_num_per_layer", None, TypeError),
        ("tensor_num_per_layer", "2", TypeError),
        ("src_layer_range", [0, 1], TypeError),
        ("src_layer_range", range(0, 4, 2), PARAM_INVALID),
        ("src_layer_range", range(-1, 1), PARAM_INVALID),
        ("src_layer_range", range(2, 4), PARAM_INVALID),
        ("src_layer_range", range(3), PARAM_INVALID),
        ("dst_layer_range", range(1, 3), PARAM_INVALID),
    ):
        refused(error, a.process.pull_cache, src.key(), "dst", **{**ranges, name: value})


def test_v2_cache_manager_pull_blocks(linked_pair: Pair) -> None:
    """Blocks to blocks by a blocks key, and an entry to blocks by any other (spec §5.6)."""
    assert parameters(CacheManager.pull_blocks)[:4] == [
        "src_cache_key",
        "dst_cache",
        ("src_blocks", ()),
        ("dst_blocks", ()),
    ]
    assert takes_keywords(CacheManager.pull_blocks)
    a, b = linked_pair.a, linked_pair.b
    src, entries = b.blocks("src", model_id=2), b.cache("entries", entry_bytes=200, key=[CacheKey(2, 1)])
    dst, contiguous = a.blocks("dst", model_id=None), a.cache("contiguous")
    key = BlocksCacheKey(prompt_cluster_id=2, model_id=2)
    a.process.pull_blocks(key, "dst", src_blocks=[4, 4, 1], dst_blocks=(0, 2, 5))
    a.process.pull_blocks(CacheKeyByIdAndIndex(2, entries.cache_id, 3), "dst", src_blocks=[], dst_blocks=[4, 1, 3])
    for tensor in range(4):
        dst.tensor(tensor)[[0, 2, 5]] = src.tensor(tensor)[[4, 4, 1]]
        dst.tensor(tensor)[4] = entries.tensor(tensor)[3][:96]
        dst.tensor(tensor)[1] = entries.tensor(tensor)[3][96:192]
        dst.tensor(tensor)[3][:8] = entries.tensor(tensor)[3][192:]  # the rest of the block stays
    a.process.pull_blocks(CacheKey(2, 1), "dst", dst_blocks=[0])
    for tensor in range(4):
        dst.tensor(tensor)[0] = entries.tensor(tensor)[0][:96]
    by_id = entries.key()
    for args, error in (
        ((2, "dst", [0], [0]), TypeError),
        ((key, "dst", None, [0]), TypeError),
        ((key, "dst", [0], None), TypeError),
        ((key, "dst", [-1], [0]), TypeError),
        ((key, "dst", ["0"], [0]), TypeError),
        ((key, "dst", [], [0]), PARAM_INVALID),
        ((key, "dst", [0], []), PARAM_INVALID),
        ((key, "dst", [0, 1], [0]), PARAM_INVALID),
        ((key, "dst", [6], [0]), PARAM_INVALID),
        ((key, "dst", [0], [6]), PARAM_INVALID),
        ((key, "contiguous", [0], [0]), PARAM_INVALID),
        ((by_id, "dst", [0], [0]), PARAM_INVALID),
        ((by_id, "dst", [], [0, 1, 2, 3]), PARAM_INVALID),
        ((CacheKey(2, 1, 0, 3), "dst", [], [0]), PARAM_INVALID),
        ((BlocksCacheKey(2, 9), "dst", [0], [0]), KV_CACHE_NOT_EXIST),
        ((BlocksCacheKey(7), "dst", [0], [0]), NOT_YET_LINK),
    ):
        refused(error, a.process.pull_blocks, *args)
    assert contiguous.cache_id == 2
