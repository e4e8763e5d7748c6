"""Rows of KvCacheManager: allocation and local operations (spec api-kvcachemanager §2, §3, §6)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llm_datadist_ray import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    DataType,
    KvCache,
    LLMRole,
    LLMStatusCode,
    Placement,
    Tensor,
)
from llm_datadist_ray.kv_cache import KvCacheManager
from llm_datadist_ray.types import INVALID_ID
from tests.conformance import row_side
from tests.conformance.pair import Pair
from tests.conformance.pool_cache import PoolCache, call
from tests.conformance.row_checks import V1_POOL_BYTES, bytes_at, parameters, refused, v1, v1_name
from tests.conformance.status import FAILED, KV_CACHE_NOT_EXIST, PARAM_INVALID
from tests.conformance.v1_pair import V1Pair, init_v1

DEVICE_OUT_OF_MEMORY = LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
DESC = CacheDesc(2, [4, 8], DataType.DT_INT8)
HOST_DESC = CacheDesc(2, [4, 8], DataType.DT_INT8, Placement.HOST)
two_sided = pytest.mark.mode("two-sided")


@pytest.fixture
def ends(idle_pair: Pair) -> Iterator[V1Pair]:
    """Initialised, not linked."""
    yield init_v1(idle_pair)


def is_pool_free(prompt_cache: PoolCache) -> bool:
    """Takes three quarters of it and gives them back. The caches of these tests are far smaller than the rest."""
    try:
        PoolCache(prompt_cache.end, "most", tensors=4, entries=1, entry_bytes=V1_POOL_BYTES // 5)
    except RuntimeError as error:
        assert getattr(error, "status_code", None) is DEVICE_OUT_OF_MEMORY, error
        return False
    call(prompt_cache.end, "deallocate_cache", row_side.Named("most"))
    return True


def test_v1_kv_cache_manager_constructor() -> None:
    """Internal; follows the role of the process (spec §2)."""
    assert v1_name("KvCacheManager") is KvCacheManager
    with v1(LLMRole.DECODER, enable_switch_role=True) as dist:
        manager = dist.kv_cache_manager
        assert type(manager) is KvCacheManager
        assert dist.kv_cache_manager is manager
        refused(PARAM_INVALID, manager.allocate_cache, DESC, [CacheKey(1, 0)])
        dist.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:0"})
        assert manager.allocate_cache(DESC, [CacheKey(1, 0)]).cache_id == 1


def test_v1_kv_cache_manager_is_initialized() -> None:
    with v1() as dist:
        manager = dist.kv_cache_manager
        assert manager.is_initialized() is True
    assert manager.is_initialized() is False
    refused(FAILED, manager.allocate_cache, DESC)


@two_sided
def test_v1_kv_cache_manager_allocate_cache(ends: V1Pair) -> None:
    """Ids from 1 on, placeholders as often as one likes, each key by itself (spec §3.1)."""
    assert parameters(KvCacheManager.allocate_cache) == ["cache_desc", ("cache_keys", ())]
    placeholder = CacheKey(2, INVALID_ID)
    keys = [CacheKey(2, 0, 1), placeholder, placeholder, CacheKey(2, 0, 2), CacheKey(2, 0, 0, 6)]
    src, dst = PoolCache(ends.prompt, "src", keys=keys), PoolCache(ends.decoder, "dst")
    assert (src.cache_id, dst.cache_id) == (1, 1)
    assert PoolCache(ends.prompt, "second").cache_id == 2
    ends.link()
    for batch, (key, entry) in enumerate(((keys[0], 0), (keys[3], 3), (CacheKey(2, INVALID_ID, 0, 6), 4))):
        call(ends.decoder, "pull_cache", key, dst, batch)
        dst.expected[:, batch] = src.expected[:, entry]
    dst.check()
    src.check()
    for role in (LLMRole.DECODER, LLMRole.MIX):
        with v1(role) as dist:
            refused(PARAM_INVALID, dist.kv_cache_manager.allocate_cache, DESC, [CacheKey(1, 0)])
            assert dist.kv_cache_manager.allocate_cache(DESC).cache_id == 1
    with v1() as dist:
        allocate = dist.kv_cache_manager.allocate_cache
        held = allocate(DESC, [CacheKey(1, 5)])
        for args, error in (
            ((1,), TypeError),
            ((DESC, CacheKey(1, 0)), TypeError),
            ((DESC, [BlocksCacheKey(1)]), TypeError),
            ((HOST_DESC,), PARAM_INVALID),
            ((CacheDesc(0, [4, 8], DataType.DT_INT8),), PARAM_INVALID),
            ((CacheDesc(2, [1] * 32, DataType.DT_INT8),), PARAM_INVALID),
            ((CacheDesc(2, [4, 0], DataType.DT_INT8),), PARAM_INVALID),
            ((DESC, [CacheKey(1, 5)]), FAILED),
            ((CacheDesc(1, [1, V1_POOL_BYTES + 1], DataType.DT_INT8),), DEVICE_OUT_OF_MEMORY),
        ):
            refused(error, allocate, *args)
        assert allocate(DESC, [CacheKey(1, 6), CacheKey(1, 6)]).cache_id > held.cache_id, "not checked"
        assert allocate(DESC, [CacheKey(1, request) for request in range(10, 16)]).cache_id > held.cache_id, "nor that"


@two_sided
def test_v1_kv_cache_manager_allocate_blocks_cache(ends: V1Pair) -> None:
    assert parameters(KvCacheManager.allocate_blocks_cache) == ["cache_desc", ("blocks_cache_key", None)]
    src = PoolCache(ends.prompt, "src", blocks=True, keys=BlocksCacheKey(2, 3))
    dst = PoolCache(ends.decoder, "dst", blocks=True)
    ends.link()
    call(ends.decoder, "pull_blocks", BlocksCacheKey(2, 3), dst, [0], [5])
    dst.expected[:, 5] = src.expected[:, 0]
    dst.check()
    refused(FAILED, PoolCache, ends.prompt, "again", blocks=True, keys=BlocksCacheKey(2, 3))
    refused(PARAM_INVALID, PoolCache, ends.decoder, "keyed", blocks=True, keys=BlocksCacheKey(1))
    with v1(LLMRole.MIX) as dist:
        allocate = dist.kv_cache_manager.allocate_blocks_cache
        assert allocate(DESC, BlocksCacheKey(1)).cache_id == 1
        refused(TypeError, allocate, DESC, [BlocksCacheKey(1)])
        refused(PARAM_INVALID, allocate, HOST_DESC)
        refused(DEVICE_OUT_OF_MEMORY, allocate, CacheDesc(1, [1, V1_POOL_BYTES + 1], DataType.DT_INT8))


@two_sided
def test_v1_kv_cache_manager_deallocate_cache(ends: V1Pair) -> None:
    """As prefill does it: the key keeps the data until the decoder has pulled it (spec §3.3, client-patterns §2.2)."""
    assert parameters(KvCacheManager.deallocate_cache) == ["cache"]
    big = V1_POOL_BYTES // 20
    src = PoolCache(ends.prompt, "src", entries=2, entry_bytes=big, keys=[CacheKey(2, 7)])
    dst = PoolCache(ends.decoder, "dst", entries=2, entry_bytes=big)
    ends.link()
    call(ends.prompt, "deallocate_cache", src)
    assert ends.prompt.process.run(row_side.tensor_addrs, "src") == []
    refused(KV_CACHE_NOT_EXIST, call, ends.prompt, "deallocate_cache", src)
    refused(KV_CACHE_NOT_EXIST, call, ends.prompt, "copy_cache", src, src)
    assert not is_pool_free(src)
    call(ends.decoder, "pull_cache", CacheKey(2, 7), dst, 1)
    dst.expected[:, 1] = src.expected[:, 0]
    dst.check()
    assert is_pool_free(src)
    call(ends.decoder, "deallocate_cache", dst)
    refused(KV_CACHE_NOT_EXIST, call, ends.decoder, "pull_cache", CacheKey(2, 7), dst)
    refused(TypeError, call, ends.prompt, "deallocate_cache", 1)
    refused(PARAM_INVALID, call, ends.prompt, "deallocate_cache", PoolCache(ends.prompt, "cpu", is_cpu=True))


@two_sided
def test_v1_kv_cache_manager_remove_cache_key(ends: V1Pair) -> None:
    """PROMPT only (spec §3.4)."""
    assert parameters(KvCacheManager.remove_cache_key) == ["cache_key"]
    big = V1_POOL_BYTES // 20
    src = PoolCache(ends.prompt, "src", entries=2, entry_bytes=big, keys=[CacheKey(2, 7)])
    dst = PoolCache(ends.decoder, "dst", entries=2, entry_bytes=big)
    ends.link()
    call(ends.prompt, "deallocate_cache", src)
    for unknown in (CacheKey(2, 8), CacheKey(2, 7, 1), CacheKey(2, 0, 0, 7)):
        call(ends.prompt, "remove_cache_key", unknown)
    assert not is_pool_free(src)
    call(ends.prompt, "remove_cache_key", CacheKey(2, 7))
    assert is_pool_free(src)
    refused(KV_CACHE_NOT_EXIST, call, ends.decoder, "pull_cache", CacheKey(2, 7), dst)
    dst.check()
    refused(PARAM_INVALID, call, ends.decoder, "remove_cache_key", CacheKey(2, 7))
    refused(TypeError, call, ends.prompt, "remove_cache_key", BlocksCacheKey(2))


@two_sided
def test_v1_kv_cache_manager_copy_cache(ends: V1Pair) -> None:
    """Any two device caches, blocks included (spec §6)."""
    assert parameters(KvCacheManager.copy_cache) == [
        "dst",
        "src",
        ("dst_batch_index", 0),
        ("src_batch_index", 0),
        ("offset", 0),
        ("size", -1),
        ("req_id", None),
    ]
    end = ends.decoder
    src, dst = PoolCache(end, "src"), PoolCache(end, "dst", blocks=True)
    fewer, cpu = PoolCache(end, "fewer", tensors=2), PoolCache(end, "cpu", is_cpu=True)

    def copy(*args: Any, **kwargs: Any) -> None:
        call(end, "copy_cache", *args, **kwargs)

    copy(dst, src, 5, 2)
    copy(dst, src, dst_batch_index=1, src_batch_index=3, offset=90, size=-1, req_id=5)
    dst.expected[:, 5] = src.expected[:, 2]
    dst.expected[:, 1, 90:] = src.expected[:, 3, 90:]
    for args, error in (
        ((1, src), TypeError),
        ((dst, 1), TypeError),
        ((cpu, src), PARAM_INVALID),
        ((dst, cpu), PARAM_INVALID),
        ((fewer, src), PARAM_INVALID),
        ((dst, src, 6), PARAM_INVALID),
        ((dst, src, 0, 6), PARAM_INVALID),
        ((dst, src, 0, 0, 96), PARAM_INVALID),
        ((dst, src, 0, 0, 90, 7), PARAM_INVALID),
        ((dst, src, 0, 0, 0, 0), PARAM_INVALID),
        ((dst, src, -1), ValueError),
        ((dst, src, 0, 0, 0, -1, "1"), TypeError),
    ):
        refused(error, copy, *args)
    dst.check()
    call(end, "deallocate_cache", src)
    refused(KV_CACHE_NOT_EXIST, copy, dst, src)


@two_sided
def test_v1_kv_cache_manager_copy_blocks(ends: V1Pair) -> None:
    """Whatever kind of cache (spec §6)."""
    assert parameters(KvCacheManager.copy_blocks) == ["cache", "copy_block_info"]
    end = ends.prompt
    cache, contiguous = PoolCache(end, "cache", blocks=True), PoolCache(end, "contiguous")
    call(end, "copy_blocks", cache, {0: [1, 3], 2: [5]})
    call(end, "copy_blocks", contiguous, {4: [0]})
    cache.expected[:, [1, 3]] = cache.expected[:, [0]]
    cache.expected[:, 5] = cache.expected[:, 2]
    contiguous.expected[:, 0] = contiguous.expected[:, 4]
    for args, error in (
        ((1, {0: [1]}), TypeError),
        ((cache, [0]), TypeError),
        ((cache, {0: ["1"]}), TypeError),
        ((cache, {0: [-1]}), ValueError),
        ((cache, {-1: [0]}), ValueError),
        ((cache, {0: [6]}), PARAM_INVALID),
        ((cache, {6: [0]}), PARAM_INVALID),
        ((PoolCache(end, "cpu", is_cpu=True), {0: [1]}), PARAM_INVALID),
    ):
        refused(error, call, end, "copy_blocks", *args)
    cache.check()
    contiguous.check()


@two_sided
def test_v1_kv_cache_manager_swap_blocks(ends: V1Pair) -> None:
    """One way, between host and device (spec §6, api-cachemanager §9.3)."""
    assert parameters(KvCacheManager.swap_blocks) == ["src", "dst", "src_to_dst"]
    end = ends.decoder
    cpu, device = PoolCache(end, "cpu", is_cpu=True, entries=8), PoolCache(end, "device", blocks=True)
    call(end, "swap_blocks", device, cpu, {0: 7, 5: 6})
    cpu.expected[:, [7, 6]] = device.expected[:, [0, 5]]
    cpu.check()
    call(end, "swap_blocks", cpu, device, {2: 2})
    call(end, "swap_blocks", cpu, device, {})
    device.expected[:, 2] = cpu.expected[:, 2]
    wide = PoolCache(end, "wide", is_cpu=True, entry_bytes=97)
    for args, error in (
        ((1, device, {0: 0}), TypeError),
        ((cpu, device, [0]), TypeError),
        ((cpu, device, {0: "0"}), TypeError),
        ((cpu, device, {8: 0}), PARAM_INVALID),
        ((cpu, device, {0: 6}), PARAM_INVALID),
        ((wide, device, {0: 0}), PARAM_INVALID),
        ((cpu, cpu, {0: 1}), PARAM_INVALID),
        ((device, device, {0: 1}), PARAM_INVALID),
    ):
        refused(error, call, end, "swap_blocks", *args)
    device.check()
    cpu.check()
    with v1(LLMRole.DECODER) as dist:
        two_devices = KvCache.create_cpu_cache(HOST_DESC, [[16, 32], [48, 64]])
        device_cache = dist.kv_cache_manager.allocate_cache(DESC)
        refused(PARAM_INVALID, dist.kv_cache_manager.swap_blocks, two_devices, device_cache, {0: 0})


def test_v1_kv_cache_manager_get_cache_tensors() -> None:
    """One Tensor per device, of the cache's own memory (spec §6)."""
    assert parameters(KvCacheManager.get_cache_tensors) == ["cache", ("tensor_index", 0)]
    with v1(LLMRole.DECODER, device_id=[0, 1]) as dist:
        manager = dist.kv_cache_manager
        cache = manager.allocate_cache(CacheDesc(2, [4, 3], DataType.DT_FLOAT))
        tensors = manager.get_cache_tensors(cache, tensor_index=1)
        assert [type(tensor) for tensor in tensors] == [Tensor, Tensor]
        for device, tensor in enumerate(tensors):
            array = tensor.numpy()
            assert (array.dtype, array.shape) == (np.float32, (4, 3))
            array[:] = device + 1
            memory = bytes_at(cache.per_device_tensor_addrs[device][1], 48).view(np.float32)
            assert (memory == device + 1).all()
        assert len(manager.get_cache_tensors(cache)) == 2
        refused(TypeError, manager.get_cache_tensors, 1)
        refused(TypeError, manager.get_cache_tensors, cache, "0")
        for index in (-1, 2):
            refused(PARAM_INVALID, manager.get_cache_tensors, cache, index)
        manager.deallocate_cache(cache)
        refused(KV_CACHE_NOT_EXIST, manager.get_cache_tensors, cache)
