"""Rows of CacheManager in v2: pools and local copies (spec api-cachemanager §2, §4, §9), every byte checked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llm_datadist_ray import BlocksCacheKey, Cache, CacheDesc, CacheKey, DataType, LLMStatusCode, Placement
from llm_datadist_ray.cache import CacheManager
from llm_datadist_ray.types import INVALID_ID
from tests.conformance.pair import Pair
from tests.conformance.pool_cache import PoolCache, call
from tests.conformance.row_checks import FOR_NONE, MIB, POOL, parameters, refused, v2
from tests.conformance.row_side import Named
from tests.conformance.status import FEATURE_NOT_ENABLED, KV_CACHE_NOT_EXIST, PARAM_INVALID

OUT_OF_MEMORY = LLMStatusCode.LLM_OUT_OF_MEMORY
DESC = CacheDesc(2, [4, 8], DataType.DT_INT8)
HOST_DESC = CacheDesc(2, [4, 8], DataType.DT_INT8, Placement.HOST)
WHOLE_POOL = (1, 1, MIB)


@pytest.fixture
def pool_pair(idle_pair: Pair) -> Iterator[Pair]:
    """Both with a device pool of 1 MiB in pages of 4 KiB; not linked."""
    idle_pair.a.init(listen=False, mem_pool_cfg=POOL)
    idle_pair.b.init(listen=True, mem_pool_cfg=POOL)
    yield idle_pair


def whole_pool_is_free(cache: PoolCache) -> bool:
    """Takes and gives back all of it, at that end."""
    end = cache.end
    try:
        PoolCache(end, "whole", tensors=1, entries=1, entry_bytes=MIB)
    except RuntimeError as error:
        assert getattr(error, "status_code", None) is OUT_OF_MEMORY, error
        return False
    call(end, "deallocate_cache", Named("whole"))
    return True


def test_v2_cache_manager_allocate_cache(pool_pair: Pair) -> None:
    """Memory of the pool, that peers can pull by key or id; a successful pull consumes its request key, in two-sided
    mode (spec §4.1, §5.5)."""
    assert parameters(CacheManager.allocate_cache) == ["cache_desc", ("cache_keys", ())]
    a, b = pool_pair.a, pool_pair.b
    placeholder = CacheKey(2, INVALID_ID)
    keys = [CacheKey(2, 0, 1), placeholder, CacheKey(2, 0, 2), CacheKey(2, 1, 0, 5), placeholder]
    src, dst = PoolCache(b, "src", keys=keys), PoolCache(a, "dst")
    assert (src.cache_id, dst.cache_id) == (1, 1)
    pool_pair.link()
    call(a, "pull_cache", src.key(4), dst, 0)
    dst.expected[:, 0] = src.expected[:, 4]
    if not pool_pair.remote_access:
        for batch, (key, entry) in enumerate(((keys[0], 0), (keys[2], 2), (keys[3], 3)), start=1):
            call(a, "pull_cache", CacheKey(2, key.req_id, key.model_id) if entry < 3 else CacheKey(2, INVALID_ID, 0, 5),
                 dst, batch)  # fmt: skip
            dst.expected[:, batch] = src.expected[:, entry]
        refused(KV_CACHE_NOT_EXIST, call, a, "pull_cache", CacheKey(2, 0, 1), dst)
        call(a, "pull_cache", CacheKey(2, INVALID_ID, 0, 5), dst, 3)  # prefix keys stay
    dst.check()
    src.check()


def test_v2_cache_manager_allocate_blocks_cache(pool_pair: Pair) -> None:
    assert parameters(CacheManager.allocate_blocks_cache) == ["cache_desc", ("blocks_cache_key", None)]
    a, b = pool_pair.a, pool_pair.b
    src, dst = PoolCache(b, "src", blocks=True, keys=BlocksCacheKey(2, 4)), PoolCache(a, "dst", blocks=True)
    refused(PARAM_INVALID, PoolCache, b, "again", blocks=True, keys=BlocksCacheKey(2, 4))
    pool_pair.link()
    for _ in range(2):  # a blocks key is not consumed
        call(a, "pull_blocks", BlocksCacheKey(2, 4), dst, [5, 0], [1, 2])
    dst.expected[:, [1, 2]] = src.expected[:, [5, 0]]
    dst.check()
    with v2(mem_pool_cfg=POOL) as dist:
        allocate = dist.cache_manager.allocate_blocks_cache
        refused(TypeError, allocate, DESC, [BlocksCacheKey(1)])
        refused(PARAM_INVALID, allocate, CacheDesc(0, [4, 8], DataType.DT_INT8))
        refused(PARAM_INVALID, allocate, HOST_DESC)
        refused(OUT_OF_MEMORY, allocate, CacheDesc(1, [1, MIB + 1], DataType.DT_INT8))
        assert allocate(DESC).is_blocks_cache


def test_v2_cache_manager_allocate_cache_refusals() -> None:
    """Nothing is kept of an allocation that failed (spec §4.1, §2.3)."""
    with v2(mem_pool_cfg=POOL) as dist:
        allocate = dist.cache_manager.allocate_cache
        held = allocate(DESC, [CacheKey(1, 7)])
        key = CacheKey(1, 8)
        for args, error in (
            ((1,), TypeError),
            ((DESC, key), TypeError),
            ((DESC, [BlocksCacheKey(1)]), TypeError),
            ((CacheDesc(0, [4, 8], DataType.DT_INT8),), PARAM_INVALID),
            ((HOST_DESC,), PARAM_INVALID),
            ((CacheDesc(2, [1] * 32, DataType.DT_INT8),), PARAM_INVALID),
            ((CacheDesc(2, [0, 8], DataType.DT_INT8),), PARAM_INVALID),
            ((DESC, [CacheKey(1, request) for request in range(10, 15)]), PARAM_INVALID),
            ((DESC, [key, key]), PARAM_INVALID),
            ((DESC, [key, CacheKey(1, 7)]), PARAM_INVALID),
            ((CacheDesc(2, [1, MIB // 2], DataType.DT_INT8), [key]), OUT_OF_MEMORY),
        ):
            refused(error, allocate, *args)
        assert allocate(DESC, [key]).tensor_addrs
        assert allocate(DESC, [CacheKey(1, INVALID_ID, 0, 7)]).tensor_addrs, "prefix 7 is not request 7"
        dist.cache_manager.deallocate_cache(held)


def test_v2_cache_manager_deallocate_cache(pool_pair: Pair) -> None:
    """The id goes at once, the memory with the last key (spec §2.4, §4.3)."""
    assert parameters(CacheManager.deallocate_cache) == ["cache"]
    a, b = pool_pair.a, pool_pair.b
    src, dst = PoolCache(b, "src", keys=[CacheKey(2, 3)]), PoolCache(a, "dst")
    pool_pair.link()
    call(b, "deallocate_cache", src)
    assert src.addrs() == []
    assert not whole_pool_is_free(src)
    refused(KV_CACHE_NOT_EXIST, call, b, "copy_cache", src, src)
    call(a, "pull_cache", src.key(2), dst, 1)
    dst.expected[:, 1] = src.expected[:, 2]
    if not pool_pair.remote_access:
        call(a, "pull_cache", CacheKey(2, 3), dst, 0)
        dst.expected[:, 0] = src.expected[:, 0]
        assert whole_pool_is_free(src)
        refused(KV_CACHE_NOT_EXIST, call, a, "pull_cache", src.key(2), dst)
    dst.check()
    call(a, "deallocate_cache", dst)
    call(a, "deallocate_cache", dst)
    assert whole_pool_is_free(dst)
    refused(KV_CACHE_NOT_EXIST, call, a, "pull_cache", src.key(), dst)


def test_v2_cache_manager_deallocate_blocks_cache(pool_pair: Pair) -> None:
    """At once, with its key; what is not there is success (spec §4.3)."""
    assert parameters(CacheManager.deallocate_blocks_cache) == ["cache"]
    a, b = pool_pair.a, pool_pair.b
    src, dst = PoolCache(b, "src", blocks=True, keys=BlocksCacheKey(2)), PoolCache(a, "dst", blocks=True)
    call(b, "deallocate_blocks_cache", src)
    assert src.addrs() == []
    assert whole_pool_is_free(src)
    pool_pair.link()
    refused(KV_CACHE_NOT_EXIST, call, a, "pull_blocks", BlocksCacheKey(2), dst, [0], [0])
    dst.check()
    again = PoolCache(b, "again", blocks=True, keys=BlocksCacheKey(2))
    assert again.cache_id > src.cache_id
    call(b, "deallocate_blocks_cache", src)
    again.check()
    contiguous = PoolCache(b, "contiguous")
    refused(PARAM_INVALID, call, b, "deallocate_blocks_cache", contiguous)
    refused(PARAM_INVALID, call, b, "deallocate_cache", again)
    refused(TypeError, call, b, "deallocate_blocks_cache", 1)
    refused(FOR_NONE, call, b, "deallocate_cache", None)
    cpu = Cache.create_cpu_cache(HOST_DESC, [16, 32])
    with v2(mem_pool_cfg=POOL) as dist:
        dist.cache_manager.deallocate_blocks_cache(cpu)
        assert cpu.tensor_addrs == []
    with v2() as dist:
        registered = dist.cache_manager.register_blocks_cache(DESC, [4096, 8192])
        refused(FEATURE_NOT_ENABLED, dist.cache_manager.deallocate_blocks_cache, registered)
        refused(FEATURE_NOT_ENABLED, dist.cache_manager.remove_cache_key, CacheKey(1, 0))


def test_v2_cache_manager_remove_cache_key(pool_pair: Pair) -> None:
    """Unbinds, and frees what only the key has held (spec §4.4)."""
    assert parameters(CacheManager.remove_cache_key) == ["cache_key"]
    a, b = pool_pair.a, pool_pair.b
    b.cache("registered", key=[CacheKey(2, 9)])
    src = PoolCache(b, "src", keys=[CacheKey(2, 3), CacheKey(2, 1, 0, 4)])
    dst = PoolCache(a, "dst")
    pool_pair.link()
    for harmless in (CacheKey(2, 77), CacheKey(2, INVALID_ID), CacheKey(2, 9), CacheKey(2, 3, 1)):
        call(b, "remove_cache_key", harmless)
    call(b, "deallocate_cache", src)
    call(b, "remove_cache_key", CacheKey(2, 3))
    if not pool_pair.remote_access:
        refused(KV_CACHE_NOT_EXIST, call, a, "pull_cache", CacheKey(2, 3), dst)
        call(a, "pull_cache", CacheKey(2, INVALID_ID, 0, 4), dst, 0)
        dst.expected[:, 0] = src.expected[:, 1]
        call(a, "pull_cache", CacheKey(2, 9), dst, 1)
        for tensor in range(4):
            dst.expected[tensor, 1] = b.cache_ref("registered").tensor(tensor)[0]
    dst.check()
    assert not whole_pool_is_free(src)
    call(b, "remove_cache_key", CacheKey(2, 12345, 0, 4))  # by the prefix, which is valid
    assert whole_pool_is_free(src)
    refused(KV_CACHE_NOT_EXIST, call, a, "pull_cache", src.key(), dst)
    refused(TypeError, call, b, "remove_cache_key", BlocksCacheKey(2))


def test_v2_cache_manager_copy_cache(pool_pair: Pair) -> None:
    """Destination first; any mix of registered and allocated (spec §9.1)."""
    assert parameters(CacheManager.copy_cache) == [
        "dst",
        "src",
        ("dst_batch_index", 0),
        ("src_batch_index", 0),
        ("offset", 0),
        ("size", -1),
        ("req_id", None),
    ]
    end = pool_pair.a
    src, dst = end.cache("src", entry_bytes=64), PoolCache(end, "dst")
    short, blocks = PoolCache(end, "short", tensors=2), PoolCache(end, "blocks", blocks=True)
    call(end, "copy_cache", dst, Named("src"), 5, 2)
    call(end, "copy_cache", dst, Named("src"), dst_batch_index=1, src_batch_index=3, offset=8, size=16, req_id=7)
    call(end, "copy_cache", dst, dst, 0, 5)
    call(end, "copy_cache", dst, dst, 0, 0, 4)  # onto itself
    for tensor in range(4):
        dst.expected[tensor, 5, :64] = src.tensor(tensor)[2]
        dst.expected[tensor, 1, 8:24] = src.tensor(tensor)[3][8:24]
    dst.expected[:, 0] = dst.expected[:, 5]
    dst.check()
    named = Named("src")
    for args, error in (
        ((1, named), TypeError),
        ((dst, None), FOR_NONE),
        ((blocks, named), PARAM_INVALID),
        ((dst, blocks), PARAM_INVALID),
        ((dst, named, 0, 6), PARAM_INVALID),
        ((dst, named, 6, 0), PARAM_INVALID),
        ((dst, named, -1), ValueError),
        ((dst, named, 0, "0"), TypeError),
        ((dst, named, 0, 0, 64), PARAM_INVALID),
        ((dst, named, 0, 0, -1), ValueError),
        ((dst, named, 0, 0, 0, 0), PARAM_INVALID),
        ((dst, named, 0, 0, 0, -2), PARAM_INVALID),
        ((dst, named, 0, 0, 0, 65), PARAM_INVALID),
        ((dst, named, 0, 0, 60, 5), PARAM_INVALID),
        ((dst, named, 0, 0, 0, 2**63), ValueError),
        ((dst, named, 0, 0, 0, -1, "1"), TypeError),
        ((dst, named, 0, 0, 0, -1, -1), ValueError),
        ((named, dst), PARAM_INVALID),  # 96 bytes into 64
        ((short, dst), PARAM_INVALID),
    ):
        refused(error, call, end, "copy_cache", *args)
    end.process.unregister("src")
    refused(KV_CACHE_NOT_EXIST, call, end, "copy_cache", dst, named)
    dst.check()
    short.check()


def test_v2_cache_manager_copy_blocks(pool_pair: Pair) -> None:
    """Each block to all that are listed under it, in all tensors (spec §9.2)."""
    assert parameters(CacheManager.copy_blocks) == ["cache", "copy_block_info"]
    end = pool_pair.b
    cache, registered = PoolCache(end, "cache", blocks=True), end.blocks("registered")
    contiguous = PoolCache(end, "contiguous")
    call(end, "copy_blocks", cache, {0: [1, 3], 2: [5]})
    call(end, "copy_blocks", Named("registered"), {4: [0]})
    call(end, "copy_blocks", cache, {})
    cache.expected[:, [1, 3]] = cache.expected[:, [0]]
    cache.expected[:, 5] = cache.expected[:, 2]
    for tensor in range(4):
        registered.tensor(tensor)[0] = registered.tensor(tensor)[4]
    cache.check()
    for args, error in (
        ((1, {0: [1]}), TypeError),
        ((contiguous, {0: [1]}), PARAM_INVALID),
        ((cache, [(0, 1)]), TypeError),
        ((cache, {"0": [1]}), TypeError),
        ((cache, {0: 1}), TypeError),
        ((cache, {0: ["1"]}), TypeError),
        ((cache, {0: [-1]}), TypeError),
        ((cache, {-1: [0]}), TypeError),
        ((cache, {0: [6]}), PARAM_INVALID),
        ((cache, {6: [0]}), PARAM_INVALID),
    ):
        refused(error, call, end, "copy_blocks", *args)
    cache.check()
    call(end, "deallocate_blocks_cache", cache)
    refused(KV_CACHE_NOT_EXIST, call, end, "copy_blocks", cache, {0: [1]})


def test_v2_cache_manager_swap_blocks(pool_pair: Pair) -> None:
    """One way, between host and device, on raw addresses (spec §9.3)."""
    assert parameters(CacheManager.swap_blocks) == ["src_cache", "dst_cache", "src_to_dst"]
    end = pool_pair.a
    cpu, device = PoolCache(end, "cpu", is_cpu=True, entries=8), PoolCache(end, "device", blocks=True)
    call(end, "swap_blocks", device, cpu, {0: 7, 5: 6, 1: 0})
    cpu.expected[:, [7, 6, 0]] = device.expected[:, [0, 5, 1]]
    cpu.check()
    device.check()
    call(end, "swap_blocks", cpu, device, {2: 2, 3: 1})
    call(end, "swap_blocks", cpu, device, {})
    device.expected[:, [2, 1]] = cpu.expected[:, [2, 3]]
    device.check()
    wide = PoolCache(end, "wide", is_cpu=True, entry_bytes=97)
    fewer = PoolCache(end, "fewer", is_cpu=True, tensors=2)
    contiguous = PoolCache(end, "contiguous")
    for args, error in (
        ((1, device, {0: 0}), TypeError),
        ((cpu, contiguous, {0: 0}), PARAM_INVALID),
        ((cpu, device, [(0, 0)]), TypeError),
        ((cpu, device, {"0": 0}), TypeError),
        ((cpu, device, {0: "0"}), TypeError),
        ((cpu, device, {8: 0}), PARAM_INVALID),
        ((cpu, device, {-1: 0}), PARAM_INVALID),
        ((cpu, device, {0: 6}), PARAM_INVALID),
        ((cpu, device, {0: -1}), PARAM_INVALID),
        ((wide, device, {0: 0}), PARAM_INVALID),
        ((fewer, device, {0: 0}), PARAM_INVALID),
        ((cpu, wide, {0: 0}), PARAM_INVALID),
        ((cpu, cpu, {0: 1}), PARAM_INVALID),
        ((device, device, {0: 1}), PARAM_INVALID),
    ):
        refused(error, call, end, "swap_blocks", *args)
    device.check()
    cpu.check()
