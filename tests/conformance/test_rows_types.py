"""Rows "others" of the v2 list: types, and what each must accept and refuse (spec api-types §3 - §10)."""

from __future__ import annotations

import pickle
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import pytest

from llm_datadist_ray import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    MemType,
    Memtype,
    Placement,
    RegisterMemStatus,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist_ray.errors import code_2_status
from llm_datadist_ray.types import INVALID_ID
from tests.conformance.row_checks import POOL, is_read_only, parameters, refused, v2, v2_name
from tests.conformance.status import PARAM_INVALID


def test_v2_types_llm_role() -> None:
    """Only a label: every role can listen, register and change (spec §3.1)."""
    assert {role.name: int(role) for role in v2_name("LLMRole")} == {"PROMPT": 1, "DECODER": 2, "MIX": 3}
    assert issubclass(LLMRole, IntEnum)
    memory = np.zeros(64, np.uint8)
    for role in LLMRole:
        with v2(role, listen_ip_info="127.0.0.1:0") as dist:
            desc = CacheDesc(1, [4, 16], DataType.DT_INT8)
            keys = [CacheKey(1, 0)]
            assert dist.cache_manager.register_cache(desc, [memory.ctypes.data], keys).cache_id == 1
            dist.switch_role(role)
    refused(TypeError, LLMDataDist, 1, 1)
    refused(TypeError, LLMDataDist, "PROMPT", 1)


def test_v2_types_register_mem_status() -> None:
    assert v2_name("RegisterMemStatus") is RegisterMemStatus
    assert {status.name: status.value for status in RegisterMemStatus} == {"OK": 0, "PREPARING": 1, "FAILED": 2}
    assert RegisterMemStatus.OK != 0, "an Enum, not an IntEnum (spec §3.4)"
    assert pickle.loads(pickle.dumps(RegisterMemStatus.PREPARING)) is RegisterMemStatus.PREPARING


def test_v2_types_placement() -> None:
    """Chooses the pool (spec api-cachemanager §4.1)."""
    assert {placement.name: int(placement) for placement in v2_name("Placement")} == {"HOST": 0, "DEVICE": 1}
    host, device = (CacheDesc(1, [4, 16], DataType.DT_INT8, placement) for placement in Placement)
    for pool, fits, other in (("mem_pool_cfg", device, host), ("host_mem_pool_cfg", host, device)):
        with v2(**{pool: POOL}) as dist:
            refused(PARAM_INVALID, dist.cache_manager.allocate_cache, other)
            refused(PARAM_INVALID, dist.cache_manager.allocate_blocks_cache, other)
            cache = dist.cache_manager.allocate_cache(fits)
            assert (cache.cache_desc.placement, len(cache.tensor_addrs)) == (fits.placement, 1)
    refused(TypeError, CacheDesc, 1, [1], DataType.DT_INT8, 1)


def test_v2_types_cache_desc() -> None:
    """Spec §5."""
    assert parameters(CacheDesc) == [
        "num_tensors",
        "shape",
        "data_type",
        ("placement", Placement.DEVICE),
        ("batch_dim_index", 0),
        ("seq_len_dim_index", -1),
        ("kv_tensor_format", None),
    ]
    shape = [2, 3, 4]
    desc = CacheDesc(num_tensors=6, shape=shape, data_type=DataType.DT_FLOAT16)
    assert (desc.num_tensors, desc.shape, desc.data_type, desc.placement) == (6, shape, DataType.DT_FLOAT16, 1)
    assert desc.shape is shape
    assert (desc.batch_dim, desc.batch_size, desc.size) == (0, 2, 48)
    other = CacheDesc(6, shape, DataType.DT_FLOAT16)
    assert desc != other
    assert hash(desc) != hash(other)
    for args, error in (
        ((-1, [1], DataType.DT_INT8), ValueError),
        ((2**32, [1], DataType.DT_INT8), ValueError),
        (("1", [1], DataType.DT_INT8), TypeError),
        ((1, None, DataType.DT_INT8), TypeError),
        ((1, ["1"], DataType.DT_INT8), TypeError),
        ((1, [2**63], DataType.DT_INT8), ValueError),
        ((1, [], DataType.DT_INT8), PARAM_INVALID),
        ((1, [1], 2), TypeError),
        ((1, [1], DataType.DT_INT8, 1), TypeError),
        ((1, [1], DataType.DT_INT8, Placement.HOST, 1), PARAM_INVALID),
        ((1, [1], DataType.DT_INT8, Placement.HOST, -1), PARAM_INVALID),
        ((1, [1], DataType.DT_INT8, Placement.HOST, 0, 1), PARAM_INVALID),
        ((1, [1], DataType.DT_INT8, Placement.HOST, 0, 2**31), ValueError),
        ((1, [1], DataType.DT_INT8, Placement.HOST, 0, -1, 1), TypeError),
    ):
        refused(error, CacheDesc, *args)


def test_v2_types_mem_type() -> None:
    """One class under both spellings (spec §1, §3.4)."""
    assert MemType is Memtype is v2_name("MemType") is v2_name("Memtype")
    assert {kind.name: kind.value for kind in MemType} == {"MEM_TYPE_DEVICE": 0, "MEM_TYPE_HOST": 1}
    assert issubclass(MemType, Enum)
    assert not issubclass(MemType, int)


def test_v2_types_mem_info() -> None:
    """Spec §9."""
    assert parameters(MemInfo) == ["mem_type", "addr", "size"]
    info = MemInfo(mem_type=Memtype.MEM_TYPE_DEVICE, addr=4096, size=8192)
    assert (info.mem_type, info.addr, info.size) == (Memtype.MEM_TYPE_DEVICE, 4096, 8192)
    assert is_read_only(info, "mem_type", "addr", "size")
    for value in ("MEM_TYPE_DEVICE", "4096", "8192"):
        assert value in str(info)
        assert value in repr(info)
    for args in ((0, 1, 1), (Memtype.MEM_TYPE_HOST, "1", 1), (Memtype.MEM_TYPE_HOST, 1, 1.0), (Placement.HOST, 1, 1)):
        refused(TypeError, MemInfo, *args)
    MemInfo(Memtype.MEM_TYPE_HOST, 0, -1)  # only types are looked at here


def test_v2_types_cache_key() -> None:
    """Spec §6.1."""
    key = CacheKey(1, 2, 3, 4)
    assert (key.cluster_id, key.prompt_cluster_id, key.req_id, key.model_id, key.prefix_id) == (1, 1, 2, 3, 4)
    assert is_read_only(key, "cluster_id", "prompt_cluster_id", "req_id", "model_id", "prefix_id")
    assert repr(key).index("req_id=2") < repr(key).index("prefix_id=4") < repr(key).index("model_id=3")
    key = CacheKey(prompt_cluster_id=5, req_id=6)
    assert (key.cluster_id, key.req_id, key.model_id, key.prefix_id) == (5, 6, 0, INVALID_ID)
    assert CacheKey(cluster_id=1, prompt_cluster_id=2, req_id=3).cluster_id == 1
    assert CacheKey(1, 2, cluster_id=7, req_id=8).req_id == 2, "a positional value wins"
    assert CacheKey(1, 2) != CacheKey(1, 2)
    assert "Unsupported" in refused(PARAM_INVALID, CacheKey, 1, 2, request=3)
    assert "cluster_id is required" in refused(PARAM_INVALID, CacheKey, req_id=1)
    assert "req_id is required" in refused(PARAM_INVALID, CacheKey, cluster_id=1)
    refused(PARAM_INVALID, CacheKey, 1, 2, 3, 4, 5)
    refused(PARAM_INVALID, CacheKey, 1, 2, 3, model_id=4, prefix_id=5)
    for index in range(4):
        values: list[Any] = [1, 2, 3, 4]
        values[index] = "1"
        refused(TypeError, CacheKey, *values)
        values[index] = None
        refused(TypeError, CacheKey, *values)
        for out_of_range in (-1, 2**64):
            values[index] = out_of_range
            refused(ValueError, CacheKey, *values)


def test_v2_types_cache_key_by_id_and_index() -> None:
    """Spec §6.2."""
    assert parameters(CacheKeyByIdAndIndex) == ["cluster_id", "cache_id", ("batch_index", 0)]
    key = CacheKeyByIdAndIndex(cluster_id=2**64 - 1, cache_id=-(2**63), batch_index=2**32 - 1)
    assert (key.cluster_id, key.cache_id, key.batch_index) == (2**64 - 1, -(2**63), 2**32 - 1)
    assert is_read_only(key, "cluster_id", "cache_id", "batch_index")
    for part in ("cluster_id=1", "cache_id=2", "batch_index=3"):
        assert part in repr(CacheKeyByIdAndIndex(1, 2, 3))
    assert CacheKeyByIdAndIndex(1, 2) != CacheKeyByIdAndIndex(1, 2)
    for args in ((-1, 1, 0), (2**64, 1, 0), (1, 2**63, 0), (1, -(2**63) - 1, 0), (1, 1, -1), (1, 1, 2**32)):
        refused(ValueError, CacheKeyByIdAndIndex, *args)
    for args in (("1", 1, 0), (1, None, 0), (1, 1, 0.0)):
        refused(TypeError, CacheKeyByIdAndIndex, *args)


def test_v2_types_blocks_cache_key() -> None:
    """Spec §6.3: as CacheKey, but without a range check."""
    key = BlocksCacheKey(3, 4)
    assert (key.cluster_id, key.prompt_cluster_id, key.model_id) == (3, 3, 4)
    assert BlocksCacheKey(cluster_id=1).model_id == 0
    assert is_read_only(key, "cluster_id", "prompt_cluster_id", "model_id")
    assert repr(BlocksCacheKey(prompt_cluster_id=7, model_id=1)) == "BlocksCacheKey(prompt_cluster_id=7, model_id=1)"
    assert repr(BlocksCacheKey(cluster_id=7)) == "BlocksCacheKey(cluster_id=7, model_id=0)"
    assert BlocksCacheKey(1) != BlocksCacheKey(1)
    assert BlocksCacheKey(-1, 2**70).model_id == 2**70
    assert BlocksCacheKey(None).cluster_id is None
    assert "cluster_id is required" in refused(PARAM_INVALID, BlocksCacheKey, model_id=1)
    assert "Unsupported" in refused(PARAM_INVALID, BlocksCacheKey, 1, req_id=1)
    refused(PARAM_INVALID, BlocksCacheKey, 1, 2, 3)
    assert "only support" in refused(TypeError, BlocksCacheKey, "1")
    assert "only support" in refused(TypeError, BlocksCacheKey, 1, "0")


class Ready(LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


def test_v2_types_layer_synchronizer() -> None:
    """Spec §10.1; that it is called per layer is shown by the rows of transfer_cache_async."""
    refused(TypeError, LayerSynchronizer)
    assert parameters(LayerSynchronizer.synchronize_layer) == ["layer_index", "timeout_in_millis"]
    assert Ready().synchronize_layer(layer_index=0, timeout_in_millis=None) is True
    assert isinstance(Ready(), v2_name("LayerSynchronizer"))
    refused(TypeError, type("Unfinished", (LayerSynchronizer,), {}))


@pytest.mark.logs("no link to cluster 2")
def test_v2_types_transfer_config() -> None:
    """Spec §10.3; every assignment is checked. A range left out is filled in by the transfer."""
    assert parameters(TransferConfig) == [
        "dst_cluster_id",
        "dst_addrs",
        ("src_layer_range", None),
        ("src_batch_index", 0),
    ]
    config = TransferConfig(dst_cluster_id=2, dst_addrs=(16, 2**64 - 1), src_layer_range=range(1, 2), src_batch_index=3)
    assert (config.dst_cluster_id, config.dst_addrs, config.src_layer_range) == (2, (16, 2**64 - 1), range(1, 2))
    assert (config.src_batch_index, config.dst_layer_range) == (3, None)
    for name in ("dst_cluster_id=2", "dst_addrs", "src_layer_range=range(1, 2)", "src_batch_index=3"):
        assert name in repr(config)
    config.dst_cluster_id, config.src_layer_range = 7, None
    assert (config.dst_cluster_id, config.src_layer_range) == (7, None)
    for name, value, error in (
        ("dst_cluster_id", None, TypeError),
        ("dst_cluster_id", 2**64, ValueError),
        ("dst_addrs", None, TypeError),
        ("dst_addrs", "16", TypeError),
        ("dst_addrs", [-1], ValueError),
        ("src_layer_range", (0, 1), TypeError),
        ("src_layer_range", range(0, 4, 2), PARAM_INVALID),
        ("src_layer_range", range(2, 2), PARAM_INVALID),
        ("src_layer_range", range(-1, 2), PARAM_INVALID),
        ("src_batch_index", 2**32, ValueError),
        ("src_batch_index", None, TypeError),
    ):
        refused(error, setattr, config, name, value)
        fields = {"dst_cluster_id": 1, "dst_addrs": [16], name: value}
        refused(error, TransferConfig, **fields)
    config = TransferConfig(2, [4096, 8192, 4096, 8192])
    with v2() as dist:
        cache = dist.cache_manager.register_cache(CacheDesc(4, [2, 8], DataType.DT_INT8), [16, 32, 48, 64])
        task = dist.cache_manager.transfer_cache_async(cache, Ready(), [config])
        assert task.get_results() == [LLMStatusCode.LLM_NOT_YET_LINK]
    assert config.src_layer_range == range(2)


def test_v2_types_transfer_with_cache_key_config() -> None:
    """Spec §10.4."""
    assert parameters(TransferWithCacheKeyConfig) == [
        "cache_key",
        ("src_layer_range", None),
        ("dst_layer_range", None),
        ("src_batch_index", 0),
    ]
    by_id, blocks = CacheKeyByIdAndIndex(5, 1), BlocksCacheKey(6)
    config = TransferWithCacheKeyConfig(by_id, range(2), range(3, 5), 7)
    assert (config.cache_key, config.src_layer_range, config.dst_layer_range) == (by_id, range(2), range(3, 5))
    assert (config.src_batch_index, config.dst_cluster_id) == (7, 5)
    config.cache_key = blocks
    assert config.dst_cluster_id == 5, "the setter leaves it (spec §10.4)"
    config.cache_key, config.src_layer_range, config.dst_layer_range = None, None, range(9)  # type: ignore[assignment]
    for args, error in (
        ((None, range(1), range(1)), TypeError),
        ((CacheKey(1, 2), range(1), range(1)), TypeError),
        ((by_id,), TypeError),
        ((by_id, range(1)), TypeError),
        ((by_id, range(2), range(1)), PARAM_INVALID),
        ((by_id, range(0, 2, 2), range(1)), PARAM_INVALID),
        ((blocks, range(1), range(1), 1), PARAM_INVALID),
        ((by_id, range(1), range(1), 2**32), ValueError),
    ):
        refused(error, TransferWithCacheKeyConfig, *args)
    config = TransferWithCacheKeyConfig(blocks, range(1), range(1))
    refused(PARAM_INVALID, setattr, config, "src_batch_index", 1)
    refused(TypeError, setattr, config, "cache_key", CacheKey(1, 2))


def test_v2_types_llm_exception() -> None:
    """Spec §4."""
    assert v2_name("LLMException") is LLMException
    assert issubclass(LLMException, RuntimeError)
    error = LLMException("what", 7, status_code=LLMStatusCode.LLM_TIMEOUT)
    assert (error.args, error.status_code) == (("what", 7), LLMStatusCode.LLM_TIMEOUT)
    assert LLMException("what").status_code is LLMStatusCode.LLM_SUCCESS
    assert is_read_only(error, "status_code")
    refused(LLMStatusCode.LLM_TIMEOUT, _raise, error)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.args, copy.status_code) == (error.args, error.status_code)


def _raise(error: Exception) -> None:
    raise error


def test_v2_types_llm_status_code() -> None:
    """Spec §3.2: integers, which clients compare with other integers (client-patterns §3.2)."""
    assert v2_name("LLMStatusCode") is LLMStatusCode
    assert issubclass(LLMStatusCode, IntEnum)
    assert len(LLMStatusCode) == 29
    assert LLMStatusCode.LLM_PARAM_INVALID == 1343270917
    assert LLMStatusCode(1343270917) is LLMStatusCode.LLM_PARAM_INVALID
    assert {1343270917: "known"}[LLMStatusCode.LLM_PARAM_INVALID] == "known"
    assert str(LLMStatusCode.LLM_PARAM_INVALID) == "LLMStatusCode.LLM_PARAM_INVALID"
    for unnamed in range(0x5010B000 + 20, 0x5010B000 + 24):
        refused(ValueError, LLMStatusCode, unnamed)
        assert code_2_status(unnamed) is LLMStatusCode.LLM_FAILED


def test_v2_types_data_type() -> None:
    """Spec §3.3: sizes of a cache's tensors follow from it, and nothing else."""
    assert v2_name("DataType") is DataType
    sizes = {dtype.name: CacheDesc(1, [8], dtype).size // 8 for dtype in DataType}
    assert sizes == {
        "DT_FLOAT": 4,
        "DT_FLOAT16": 2,
        "DT_INT8": 1,
        "DT_INT32": 4,
        "DT_UINT8": 1,
        "DT_INT16": 2,
        "DT_UINT16": 2,
        "DT_UINT32": 4,
        "DT_INT64": 8,
        "DT_UINT64": 8,
        "DT_DOUBLE": 8,
        "DT_BOOL": 1,
        "DT_STRING": 16,
        "DT_BF16": 2,
    }
    refused(TypeError, CacheDesc, 1, [8], 1)
    refused(PARAM_INVALID, lambda: CacheDesc(1, [8], None).size)  # type: ignore[arg-type]
