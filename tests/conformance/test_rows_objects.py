"""Rows of Cache and LLMClusterInfo in v2, and of what the lists leave out (spec api-types §5, §7, §8, §11, §4)."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import llm_datadist_ray
from llm_datadist_ray import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    LLMClusterInfo,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Memtype,
    Placement,
    Status,
    Tensor,
    TensorDesc,
)
from tests.conformance.row_checks import POOL, is_read_only, parameters, refused, v1_name, v2, v2_name
from tests.conformance.status import PARAM_INVALID

HOST_DESC = CacheDesc(2, [4, 8], DataType.DT_INT8, Placement.HOST)
DEVICE_DESC = CacheDesc(2, [4, 8], DataType.DT_INT8)


def registered(dist: LLMDataDist, *, blocks: bool = False) -> SimpleNamespace:
    memory = np.zeros((2, 4, 8), np.uint8)
    addrs = [memory[0].ctypes.data, memory[1].ctypes.data]
    manager = dist.cache_manager
    cache = manager.register_blocks_cache(DEVICE_DESC, addrs) if blocks else manager.register_cache(DEVICE_DESC, addrs)
    return SimpleNamespace(cache=cache, addrs=addrs, memory=memory)


def test_v2_cache_constructor() -> None:
    """Internal; what the managers return. Dropping one frees nothing (spec §7)."""
    assert parameters(Cache)[:6] == [
        "cache_id",
        "cache_desc",
        "tensor_addrs",
        "cache_manager",
        "is_registered",
        "is_blocks_cache",
    ]
    refused(ValueError, Cache, 2**63, DEVICE_DESC, [1, 2], None, True, False)
    refused(TypeError, Cache, 1, DEVICE_DESC, ["1"], None, True, False)
    with v2(mem_pool_cfg=POOL) as dist:
        cache = dist.cache_manager.allocate_cache(DEVICE_DESC)
        assert isinstance(cache, v2_name("Cache"))
        text = f"{cache=}"
        for part in ("cache_id=1", "addrs=2", "is_blocks_cache=False"):
            assert part in text
        address = cache.tensor_addrs[0]
        del cache
        gc.collect()
        assert address not in dist.cache_manager.allocate_cache(DEVICE_DESC).tensor_addrs


def test_v2_cache_cache_id() -> None:
    """One counter for all kinds from 1 on; a new one after finalize (spec api-cachemanager §2.1)."""
    for _ in range(2):
        with v2(mem_pool_cfg=POOL) as dist:
            caches = [
                registered(dist).cache,
                dist.cache_manager.allocate_cache(DEVICE_DESC),
                registered(dist, blocks=True).cache,
                dist.cache_manager.allocate_blocks_cache(DEVICE_DESC),
            ]
            assert [cache.cache_id for cache in caches] == [1, 2, 3, 4]
            dist.cache_manager.deallocate_cache(caches[1])
            dist.cache_manager.unregister_cache(3)
            assert dist.cache_manager.allocate_cache(DEVICE_DESC).cache_id == 5, "ids are not used again"
            assert is_read_only(caches[0], "cache_id")


def test_v2_cache_cache_desc() -> None:
    with v2(mem_pool_cfg=POOL) as dist:
        for cache in (registered(dist).cache, dist.cache_manager.allocate_blocks_cache(DEVICE_DESC)):
            assert cache.cache_desc is DEVICE_DESC
            assert is_read_only(cache, "cache_desc")


def test_v2_cache_tensor_addrs() -> None:
    """The registered addresses, or addresses in the pool that can be written at once; ``[]`` after deallocation."""
    with v2(mem_pool_cfg=POOL) as dist:
        given = registered(dist)
        assert given.cache.tensor_addrs == given.addrs
        cache = dist.cache_manager.allocate_cache(DEVICE_DESC)
        first, second = cache.tensor_addrs
        assert abs(second - first) >= DEVICE_DESC.size
        assert is_read_only(cache, "tensor_addrs")
        for of in (cache, given.cache):
            dist.cache_manager.deallocate_cache(of)
            assert of.tensor_addrs == []


def test_v2_cache_create_cpu_cache() -> None:
    """Describes memory and registers nothing (spec §7)."""
    cache = Cache.create_cpu_cache(cache_desc=HOST_DESC, addrs=[16, 32])
    assert (cache.cache_id, cache.is_blocks_cache, cache.tensor_addrs) == (-1, True, [16, 32])
    assert cache.cache_desc is HOST_DESC
    refused(PARAM_INVALID, Cache.create_cpu_cache, DEVICE_DESC, [16, 32])
    refused(PARAM_INVALID, Cache.create_cpu_cache, HOST_DESC, [16])
    for addrs in ((16, 32), ["16", "32"], 16, [[16, 32]], None):
        refused(TypeError, Cache.create_cpu_cache, HOST_DESC, addrs)
    with v2() as dist:
        assert registered(dist).cache.cache_id == 1


def test_extra_is_blocks_cache() -> None:
    """Follows from the method, also when one CacheDesc serves both (spec §5, quirk "hidden blocks flag")."""
    with v2(mem_pool_cfg=POOL) as dist:
        manager = dist.cache_manager
        blocks = [registered(dist, blocks=True).cache, manager.allocate_blocks_cache(DEVICE_DESC)]
        contiguous = [registered(dist).cache, manager.allocate_cache(DEVICE_DESC)]
        assert [cache.is_blocks_cache for cache in blocks + contiguous] == [True, True, False, False]
        assert is_read_only(blocks[0], "is_blocks_cache")
        refused(PARAM_INVALID, manager.deallocate_cache, blocks[1])
        refused(PARAM_INVALID, manager.deallocate_blocks_cache, contiguous[1])


def test_v2_llm_cluster_info_constructor() -> None:
    assert parameters(LLMClusterInfo) == []
    assert v2_name("LLMClusterInfo") is LLMClusterInfo
    info = LLMClusterInfo()
    assert (info.remote_cluster_id, info.local_ip_info_list, info.remote_ip_info_list) == (None, [], [])
    with v2() as dist:
        info.append_local_ip_info("127.0.0.1", 0)
        refused(TypeError, dist.link_clusters, [info])  # no cluster id yet
        refused(TypeError, dist.unlink_clusters, [info])


def test_v2_llm_cluster_info_remote_cluster_id() -> None:
    """uint64, by full range (client-patterns §3.1)."""
    info = LLMClusterInfo()
    for value in (0, 1, 2**64 - 1):
        info.remote_cluster_id = value
        assert info.remote_cluster_id == value
    refused(ValueError, setattr, info, "remote_cluster_id", -1)
    refused(ValueError, setattr, info, "remote_cluster_id", 2**64)
    refused(TypeError, setattr, info, "remote_cluster_id", "1")
    refused(TypeError, setattr, info, "remote_cluster_id", None)
    assert info.remote_cluster_id == 2**64 - 1


def check_append(method: str, list_name: str) -> None:
    info = LLMClusterInfo()
    append = getattr(info, method)
    assert parameters(append) == ["ip", "port"]
    append(ip="1.2.3.4", port=65535)
    append(0x04030201, 0)
    assert getattr(info, list_name) == [(0x04030201, 65535), (0x04030201, 0)]
    refused(RuntimeError, append, "::1", 1)
    refused(RuntimeError, append, "nowhere", 1)
    refused(TypeError, append, 1.5, 1)
    refused(TypeError, append, "1.2.3.4", "1")
    refused(TypeError, append, "1.2.3.4", None)
    refused(ValueError, append, "1.2.3.4", 65536)
    refused(ValueError, append, "1.2.3.4", -1)
    assert len(getattr(info, list_name)) == 2


@pytest.mark.logs("exactly one remote IP entry")
def test_v2_llm_cluster_info_append_local_ip_info() -> None:
    """Linking demands an entry unless resources are given (spec api-datadist §4.1)."""
    check_append("append_local_ip_info", "local_ip_info_list")
    info = LLMClusterInfo()
    info.remote_cluster_id = 2
    with v2() as dist:
        assert "local_ip_info_list is empty" in refused(PARAM_INVALID, dist.link_clusters, [info])
        info.append_local_ip_info("127.0.0.1", 0)
        assert dist.link_clusters([info]) == (PARAM_INVALID, [PARAM_INVALID])  # only the remote one is missing now


@pytest.mark.logs("exactly one remote IP entry")
def test_v2_llm_cluster_info_append_remote_ip_info() -> None:
    """Exactly one for a link, and for an unlink that asks the peer (spec api-datadist §4.2, §5)."""
    check_append("append_remote_ip_info", "remote_ip_info_list")
    info = LLMClusterInfo()
    info.remote_cluster_id = 2
    info.append_local_ip_info("127.0.0.1", 0)
    with v2() as dist:
        for _ in range(2):  # none, then two
            assert dist.link_clusters([info]) == (PARAM_INVALID, [PARAM_INVALID])
            assert dist.unlink_clusters([info]) == (PARAM_INVALID, [PARAM_INVALID])
            assert dist.unlink_clusters([info], force=True) == (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS])
            info.append_remote_ip_info("127.0.0.1", 1)
            info.append_remote_ip_info("127.0.0.1", 2)


def test_extra_local_ip_info_list() -> None:
    info = LLMClusterInfo()
    info.append_local_ip_info("10.0.0.1", 1)
    assert info.local_ip_info_list == [(0x0100000A, 1)]
    assert info.remote_ip_info_list == []
    assert is_read_only(info, "local_ip_info_list")


def test_extra_remote_ip_info_list() -> None:
    info = LLMClusterInfo()
    info.append_remote_ip_info("10.0.0.1", 2)
    assert info.remote_ip_info_list == [(0x0100000A, 2)]
    assert info.local_ip_info_list == []
    assert is_read_only(info, "remote_ip_info_list")


def test_extra_remote_role_type() -> None:
    """Carried, never used (spec §8)."""
    info = LLMClusterInfo()
    for value in (LLMRole.DECODER, 2, None):
        info.remote_role_type = value
        assert info.remote_role_type == value
    refused(TypeError, setattr, info, "remote_role_type", "DECODER")


def test_extra_status() -> None:
    """Spec §4."""
    assert v1_name("Status") is v2_name("Status") is Status
    assert Status(LLMStatusCode.LLM_SUCCESS).is_ok() is True
    assert Status(LLMStatusCode.LLM_FAILED).is_ok() is False
    assert Status(LLMStatusCode.LLM_TIMEOUT).status_code is LLMStatusCode.LLM_TIMEOUT
    assert is_read_only(Status(LLMStatusCode.LLM_SUCCESS), "status_code")


def test_extra_tensor() -> None:
    """Spec §11."""
    assert parameters(Tensor) == ["data", ("tensor_desc", None)]
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = Tensor(array)
    view = tensor.numpy()
    view[0, 0] = 9
    assert array[0, 0] == 9
    copied, deep = tensor.numpy(copy=True), Tensor(tensor)
    array[0, 1] = 8
    assert (copied[0, 1], deep.numpy()[0, 1]) == (1, 1)
    bf16 = np.array([0x3F80, 0xC000], np.uint16).view(np.float16)
    assert Tensor(bf16, TensorDesc(DataType.DT_BF16, [2])).numpy().tolist() == [1.0, -2.0]
    text = Tensor(np.array([b"ab", b"c"]))
    assert text.numpy(copy=True).tolist() == [b"ab", b"c"]
    refused(RuntimeError, text.numpy)
    refused(TypeError, tensor.numpy, 1)
    refused(TypeError, Tensor, [1, 2])
    refused(RuntimeError, Tensor, array, TensorDesc(DataType.DT_FLOAT, [3, 2]))
    refused(RuntimeError, Tensor, array, TensorDesc(DataType.DT_INT32, [2, 3]))
    refused(RuntimeError, Tensor, array.T)
    refused(RuntimeError, Tensor, np.zeros(2, np.complex64))
    from_tuple = Tensor.from_tensor_tuple((array.ctypes.data, 0, (2, 3)))
    assert np.array_equal(from_tuple.numpy(), array)


def test_extra_tensor_desc() -> None:
    shape = [2, 3]
    desc = TensorDesc(dtype=DataType.DT_INT8, shape=shape)
    shape.append(4)
    assert (desc.dtype, desc.shape) == (DataType.DT_INT8, [2, 3])
    assert "DT_INT8" in str(desc)
    assert "[2, 3]" in str(desc)
    refused(TypeError, TensorDesc, 2, [1])
    refused(TypeError, TensorDesc, DataType.DT_INT8, "12")
    refused(TypeError, TensorDesc, DataType.DT_INT8, [1.0])


def test_extra_cache_desc_properties() -> None:
    """All read-only; ``repr`` shows the constructor's values under their names (spec §5)."""
    desc = CacheDesc(3, (2, 4), DataType.DT_BF16, Placement.HOST, 1, 0, "ND")
    values: dict[str, Any] = {
        "num_tensors": 3,
        "shape": (2, 4),
        "data_type": DataType.DT_BF16,
        "placement": Placement.HOST,
        "batch_dim": 1,
        "batch_size": 4,
        "seq_len_dim_index": 0,
        "kv_tensor_format": "ND",
        "size": 16,
    }
    assert {name: getattr(desc, name) for name in values} == values
    assert is_read_only(desc, *values)
    for part in ("num_tensors=3", "shape=(2, 4)", "batch_dim_index=1", "seq_len_dim_index=0", "kv_tensor_format='ND'"):
        assert part in repr(desc)
    for shape in ([0, 4], [2, -1], [2**62, 4]):
        refused(PARAM_INVALID, lambda shape=shape: CacheDesc(1, shape, DataType.DT_INT8).size)


def test_extra_update_dim() -> None:
    """Assigns into the caller's shape and forgets the size, but not ``batch_size`` (spec §5)."""
    shape = [2, 4]
    desc = CacheDesc(1, shape, DataType.DT_INT32)
    assert desc.size == 32
    desc.update_dim(0, 5)
    assert (shape, desc.size, desc.batch_size) == ([5, 4], 80, 2)
    desc.update_dim(dim_index=1, dim_value=1)
    assert desc.size == 20
    refused(TypeError, CacheDesc(1, (2, 4), DataType.DT_INT32).update_dim, 0, 5)


def test_extra_cluster_id() -> None:
    """Readable before init, and what clients make their keys of (client-patterns §3.1)."""
    dist = LLMDataDist(LLMRole.PROMPT, 2**64 - 1)
    assert dist.cluster_id == 2**64 - 1
    assert is_read_only(dist, "cluster_id")
    assert BlocksCacheKey(dist.cluster_id).cluster_id == CacheKey(dist.cluster_id, 0).cluster_id == 2**64 - 1


def test_extra_llm_engine_instance() -> None:
    """The live instance of the process, or None (spec api-datadist §2.2)."""
    assert LLMDataDist.llm_engine_instance is None
    with v2() as dist:
        assert LLMDataDist.llm_engine_instance is dist
        assert dist.llm_engine_instance is dist
    assert LLMDataDist.llm_engine_instance is None


def test_extra_mem_type_alias() -> None:
    """Both spellings, star import included (spec §1)."""
    assert llm_datadist_ray.MemType is llm_datadist_ray.Memtype is Memtype
    assert {"MemType", "Memtype"} <= set(llm_datadist_ray.__all__)


def test_extra_v2_list() -> None:
    """The 23 eager names; upstream's tests iterate over it (spec §1)."""
    names = llm_datadist_ray.v2_list
    assert len(set(names)) == len(names) == 23
    assert v2_name("v2_list") is names
    for name in names:
        assert isinstance(v2_name(name), type)
    assert {"KvCacheManager", "Tensor", "TensorDesc"} | set(names) == set(v2_name("__all__"))
    assert "has no attribute" in refused(AttributeError, v2_name, "CacheManager")
