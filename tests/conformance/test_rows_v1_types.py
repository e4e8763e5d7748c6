"""Rows of types, KvCache and LLMClusterInfo of the v1 list (spec api-types): the same classes as in v2, by what v1 does
with them."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest

from llm_datadist_ray import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist_ray.types import INVALID_ID
from tests.conformance.row_checks import bytes_at, is_read_only, parameters, refused, v1, v1_name, v2_name
from tests.conformance.status import FAILED, KV_CACHE_NOT_EXIST, PARAM_INVALID, SUCCESS

DESC = CacheDesc(2, [4, 8], DataType.DT_INT8)
HOST_DESC = CacheDesc(2, [4, 8], DataType.DT_INT8, Placement.HOST)


def is_one_class(name: str, cls: type) -> bool:
    """One family of classes for both interfaces (spec §1, quirk "two class families")."""
    return v1_name(name) is cls and v2_name(name) is cls


def test_v1_types_llm_role() -> None:
    """Gates methods: keys are for PROMPT, pulling is for DECODER (api-kvcachemanager §2)."""
    assert is_one_class("LLMRole", LLMRole)
    for role in LLMRole:
        with v1(role) as dist:
            manager = dist.kv_cache_manager
            cache = manager.allocate_cache(DESC)
            calls: dict[LLMRole, tuple[Any, ...]] = {
                LLMRole.PROMPT: (manager.remove_cache_key, CacheKey(1, 0)),
                LLMRole.DECODER: (manager.pull_cache, CacheKey(1, 0, 0, 0), cache),
            }
            for allowed, (method, *args) in calls.items():
                if allowed != role:
                    assert allowed.name in refused(PARAM_INVALID, method, *args)
            if role == LLMRole.PROMPT:
                manager.remove_cache_key(CacheKey(1, 0))
            if role == LLMRole.DECODER:
                assert "req_id" in refused(PARAM_INVALID, manager.pull_cache, CacheKey(1, 0, 0, 0), cache)


def test_v1_types_placement() -> None:
    """DEVICE only; HOST exists for ``create_cpu_cache`` (api-kvcachemanager §1)."""
    assert is_one_class("Placement", Placement)
    with v1() as dist:
        manager = dist.kv_cache_manager
        assert manager.allocate_cache(DESC).cache_desc.placement is Placement.DEVICE
        refused(PARAM_INVALID, manager.allocate_cache, HOST_DESC)
        refused(PARAM_INVALID, manager.allocate_blocks_cache, HOST_DESC)
    refused(PARAM_INVALID, KvCache.create_cpu_cache, DESC, [16, 32])


def test_v1_types_cache_desc() -> None:
    """As v1 clients call it: a tuple and ``seq_len_dim_index`` (client-patterns §2.1)."""
    assert is_one_class("CacheDesc", CacheDesc)
    desc = CacheDesc(3, (2, 16, 4), DataType.DT_FLOAT16, seq_len_dim_index=1)
    assert (desc.num_tensors, desc.shape, desc.seq_len_dim_index, desc.size) == (3, (2, 16, 4), 1, 256)
    for index in (-2, 3):
        refused(PARAM_INVALID, CacheDesc, 3, (2, 16, 4), DataType.DT_FLOAT16, seq_len_dim_index=index)
    with v1() as dist:
        cache = dist.kv_cache_manager.allocate_cache(desc)
        assert cache.cache_desc is desc
        first, second, third = (bytes_at(address, desc.size) for address in cache.per_device_tensor_addrs[0])
        first[:], second[:], third[:] = 1, 2, 3
        assert (set(first), set(second), set(third)) == ({1}, {2}, {3}), "they do not overlap"


def test_v1_types_cache_key() -> None:
    """Placeholders, request and prefix keys on one cache; the two tables are separate (spec §6.1)."""
    assert is_one_class("CacheKey", CacheKey)
    with v1() as dist:
        manager = dist.kv_cache_manager
        placeholder = CacheKey(prompt_cluster_id=1, req_id=INVALID_ID, model_id=0)
        manager.allocate_cache(DESC, [placeholder, placeholder, CacheKey(1, 5), CacheKey(1, 0, 0, 5)])
        manager.allocate_cache(DESC, [placeholder, CacheKey(1, 5, 1)])
        refused(FAILED, manager.allocate_cache, DESC, [CacheKey(9, 5)])  # whatever the cluster
        refused(FAILED, manager.allocate_cache, DESC, [CacheKey(1, 77, 0, 5)])
        manager.remove_cache_key(CacheKey(1, 5))
        manager.allocate_cache(DESC, [CacheKey(1, 5)])
        refused(FAILED, manager.allocate_cache, DESC, [CacheKey(1, 77, 0, 5)])


def test_v1_types_cache_key_by_id_and_index() -> None:
    """Names the source of ``pull_cache``; blocks cannot be named so (api-kvcachemanager §4, §5)."""
    assert is_one_class("CacheKeyByIdAndIndex", CacheKeyByIdAndIndex)
    key = CacheKeyByIdAndIndex(2, 4, 0)
    assert (key.cluster_id, key.cache_id, key.batch_index) == (2, 4, 0)
    with v1(LLMRole.DECODER) as dist:
        manager = dist.kv_cache_manager
        cache = manager.allocate_cache(DESC)
        refused(LLMStatusCode.LLM_NOT_YET_LINK, manager.pull_cache, key, cache, 0)
        refused(TypeError, manager.pull_blocks, key, cache, [0], [0])


def test_v1_types_blocks_cache_key() -> None:
    """One blocks cache per model; not for a DECODER (api-kvcachemanager §3.2)."""
    assert is_one_class("BlocksCacheKey", BlocksCacheKey)
    with v1() as dist:
        manager = dist.kv_cache_manager
        kept = manager.allocate_blocks_cache(DESC, BlocksCacheKey(1, 3))
        other = manager.allocate_blocks_cache(DESC, BlocksCacheKey(1, 4))
        refused(FAILED, manager.allocate_blocks_cache, DESC, BlocksCacheKey(prompt_cluster_id=1, model_id=3))
        manager.deallocate_cache(kept)
        assert manager.allocate_blocks_cache(DESC, BlocksCacheKey(1, 3)).cache_id > other.cache_id
    with v1(LLMRole.DECODER) as dist:
        refused(PARAM_INVALID, dist.kv_cache_manager.allocate_blocks_cache, DESC, BlocksCacheKey(1, 3))


class Ready(LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


def test_v1_types_layer_synchronizer() -> None:
    assert is_one_class("LayerSynchronizer", LayerSynchronizer)
    refused(TypeError, LayerSynchronizer)
    with v1() as dist:
        cache = dist.kv_cache_manager.allocate_cache(DESC)
        for wrong in (None, object(), Ready):
            refused(TypeError, dist.kv_cache_manager.transfer_cache_async, cache, wrong, [])
        assert dist.kv_cache_manager.transfer_cache_async(cache, Ready(), []).synchronize() is SUCCESS


def test_v1_types_transfer_config() -> None:
    """The only form that v1 takes, with two addresses per layer (api-kvcachemanager §7)."""
    assert is_one_class("TransferConfig", TransferConfig)
    with v1() as dist:
        transfer = dist.kv_cache_manager.transfer_cache_async
        cache = dist.kv_cache_manager.allocate_cache(CacheDesc(4, [4, 8], DataType.DT_INT8))
        for wrong in (
            TransferConfig(2, [1, 2, 3, 4], range(1)),
            TransferConfig(2, [1, 2], range(2, 3)),
            TransferConfig(2, []),
        ):
            refused(PARAM_INVALID, transfer, cache, Ready(), [wrong])
        refused(TypeError, transfer, cache, Ready(), [None])


def test_v1_types_transfer_with_cache_key_config() -> None:
    """Importable, and of no use here (api-kvcachemanager §7)."""
    assert is_one_class("TransferWithCacheKeyConfig", TransferWithCacheKeyConfig)
    config = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, 1), range(1, 3), range(2))
    assert (config.dst_cluster_id, config.src_layer_range, config.dst_layer_range) == (2, range(1, 3), range(2))
    refused(PARAM_INVALID, TransferWithCacheKeyConfig, CacheKeyByIdAndIndex(2, 1), range(2, 4), range(3))
    with v1() as dist:
        cache = dist.kv_cache_manager.allocate_cache(CacheDesc(6, [4, 8], DataType.DT_INT8))
        refused(TypeError, dist.kv_cache_manager.transfer_cache_async, cache, Ready(), [config])


def test_v1_types_llm_exception() -> None:
    """What a v1 client catches to try again (client-patterns §2.2)."""
    assert is_one_class("LLMException", LLMException)
    with v1() as dist:
        too_large = CacheDesc(1, [1, 2**30], DataType.DT_INT8)
        with pytest.raises(RuntimeError) as caught:
            dist.kv_cache_manager.allocate_cache(too_large)
    assert isinstance(caught.value, LLMException)
    assert caught.value.status_code == LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
    copy = pickle.loads(pickle.dumps(LLMException("text", status_code=LLMStatusCode.LLM_LINK_BUSY)))
    assert (copy.status_code, copy.args) == (LLMStatusCode.LLM_LINK_BUSY, ("text",))


def test_v1_types_llm_status_code() -> None:
    assert is_one_class("LLMStatusCode", LLMStatusCode)
    for name in (
        "LLM_REPEAT_REQUEST",
        "LLM_CLUSTER_NUM_EXCEED_LIMIT",
        "LLM_PROCESSING_LINK",
        "LLM_DEVICE_OUT_OF_MEMORY",
        "LLM_WAIT_PROCESS_TIMEOUT",
        "LLM_LINK_BUSY",
    ):
        code = getattr(v1_name("LLMStatusCode"), name)
        assert 0x5010B000 < code < 0x5010B000 + 29
        assert str(code) == f"LLMStatusCode.{name}"


def test_v1_types_data_type() -> None:
    """``get_cache_tensors`` shows a cache in its type."""
    assert is_one_class("DataType", DataType)
    with v1() as dist:
        for dtype, np_name in ((DataType.DT_FLOAT16, "float16"), (DataType.DT_INT64, "int64")):
            cache = dist.kv_cache_manager.allocate_cache(CacheDesc(1, [2, 3], dtype))
            (tensor,) = dist.kv_cache_manager.get_cache_tensors(cache)
            assert (str(tensor.numpy().dtype), tensor.tensor_desc.dtype) == (np_name, dtype)


def test_v1_kv_cache_constructor() -> None:
    """Internal; the manager's, and given back when the last reference goes (spec §7)."""
    assert v1_name("KvCache") is KvCache
    assert parameters(KvCache) == ["cache_id", "cache_desc", "per_device_tensor_addrs", "kv_cache_manager"]
    refused(ValueError, KvCache, 2**63, DESC, [[1, 2]], None)
    half = CacheDesc(1, [1, 3 * 2**20], DataType.DT_INT8)
    with v1() as dist:
        for _ in range(3):  # each needs more than half of the pool
            cache = dist.kv_cache_manager.allocate_cache(half)
            assert isinstance(cache, KvCache)
            del cache
            gc.collect()
        kept = dist.kv_cache_manager.allocate_cache(half)
        assert kept.cache_id == 4
        refused(LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY, dist.kv_cache_manager.allocate_cache, half)


def test_v1_kv_cache_cache_id() -> None:
    """From 1 on in the order of allocation: clients count on it (client-patterns §2.1)."""
    with v1() as dist:
        manager = dist.kv_cache_manager
        caches = [manager.allocate_cache(DESC), manager.allocate_blocks_cache(DESC), manager.allocate_cache(DESC)]
        assert [cache.cache_id for cache in caches] == [1, 2, 3]
        assert is_read_only(caches[0], "cache_id")


def test_v1_kv_cache_cache_desc() -> None:
    with v1() as dist:
        cache = dist.kv_cache_manager.allocate_blocks_cache(DESC)
        assert cache.cache_desc is DESC
        assert is_read_only(cache, "cache_desc")


def test_v1_kv_cache_per_device_tensor_addrs() -> None:
    """Addresses that can be used at once, per device; ``[]`` after deallocation (api-kvcachemanager §9)."""
    with v1(LLMRole.DECODER, device_id=[0, 1]) as dist:
        cache = dist.kv_cache_manager.allocate_cache(DESC)
        views = [bytes_at(address, DESC.size) for addrs in cache.per_device_tensor_addrs for address in addrs]
        for value, view in enumerate(views):
            view[:] = value
        assert [sorted(set(view)) for view in views] == [[0], [1], [2], [3]]
        assert is_read_only(cache, "per_device_tensor_addrs")
        dist.kv_cache_manager.deallocate_cache(cache)
        assert cache.per_device_tensor_addrs == []
        refused(KV_CACHE_NOT_EXIST, dist.kv_cache_manager.deallocate_cache, cache)


def test_v1_kv_cache_create_cpu_cache() -> None:
    """One list of addresses, or one per device (spec §7)."""
    cache = KvCache.create_cpu_cache(cache_desc=HOST_DESC, addrs=[16, 32])
    assert (cache.cache_id, cache.per_device_tensor_addrs) == (-1, [[16, 32]])
    nested = [[16, 32], [48, 64]]
    assert KvCache.create_cpu_cache(HOST_DESC, nested).per_device_tensor_addrs == nested
    for wrong in ([], [16, [32]], [16], [[16, 32], [48]], [[]]):
        refused(PARAM_INVALID, KvCache.create_cpu_cache, HOST_DESC, wrong)
    for wrong_type in ((16, 32), ["16", "32"], None, [["16", "32"]]):
        refused(TypeError, KvCache.create_cpu_cache, HOST_DESC, wrong_type)
    with v1() as dist:
        refused(PARAM_INVALID, dist.kv_cache_manager.deallocate_cache, cache)
        assert dist.kv_cache_manager.allocate_cache(DESC).cache_id == 1


def test_v1_llm_cluster_info_constructor() -> None:
    assert is_one_class("LLMClusterInfo", LLMClusterInfo)
    assert parameters(LLMClusterInfo) == []
    info = LLMClusterInfo()
    assert (info.remote_cluster_id, info.local_ip_info_list, info.remote_ip_info_list) == (None, [], [])


def test_v1_llm_cluster_info_remote_cluster_id() -> None:
    """Not set is a TypeError when linking (api-datadist §9)."""
    info = LLMClusterInfo()
    info.append_local_ip_info("127.0.0.1", 0)
    info.append_remote_ip_info("127.0.0.1", 1)
    with v1(LLMRole.DECODER) as dist:
        refused(TypeError, dist.link_clusters, [info])
    info.remote_cluster_id = 2**64 - 1
    assert info.remote_cluster_id == 2**64 - 1
    for wrong, error in ((2**64, ValueError), (-1, ValueError), ("1", TypeError), (None, TypeError)):
        refused(error, setattr, info, "remote_cluster_id", wrong)


def check_one_per_device(missing: str) -> None:
    """Both lists need an entry for each device, else the whole call is rejected (api-datadist §9)."""
    info = LLMClusterInfo()
    info.remote_cluster_id = 2
    with v1(LLMRole.DECODER, device_id=[0, 1]) as dist:
        for method in {"append_local_ip_info", "append_remote_ip_info"} - {missing}:
            getattr(info, method)("127.0.0.1", 1)
            getattr(info, method)("127.0.0.1", 2)
        for _ in range(4):  # none, one, two, and then one too many
            enough = len(info.local_ip_info_list) == len(info.remote_ip_info_list)
            overall, codes = dist.unlink_clusters([info])
            assert (overall, codes) == ((SUCCESS, [LLMStatusCode.LLM_NOT_YET_LINK]) if enough else (PARAM_INVALID, []))
            getattr(info, missing)("127.0.0.1", 3)
        refused(RuntimeError, getattr(info, missing), "::1", 1)
        refused(ValueError, getattr(info, missing), "127.0.0.1", 65536)
        refused(TypeError, getattr(info, missing), "127.0.0.1", None)


@pytest.mark.logs("one local and one remote address per device")
def test_v1_llm_cluster_info_append_local_ip_info() -> None:
    check_one_per_device("append_local_ip_info")


@pytest.mark.logs("one local and one remote address per device")
def test_v1_llm_cluster_info_append_remote_ip_info() -> None:
    check_one_per_device("append_remote_ip_info")
