"""Local operations of KvCacheManager above fake engines (spec api-kvcachemanager §6)."""

from __future__ import annotations

from typing import Any

import pytest

from llm_datadist_ray.types import CacheDesc, DataType, LLMRole
from tests.conformance.status import KV_CACHE_NOT_EXIST, PARAM_INVALID, raises
from tests.native.kv_cache_process import FakeProcess, cpu_cache

DECODER = LLMRole.DECODER


class TestLocalOperations:
    @pytest.mark.parametrize(
        ("args", "error"),
        [
            (("cache", "host"), PARAM_INVALID),
            (("host", "cache"), PARAM_INVALID),
            (("cache", None), TypeError),
            (("cache", "cache", "0"), TypeError),
            (("cache", "cache", -1), ValueError),
            (("cache", "cache", 0, 2**32), ValueError),
            (("cache", "cache", 0, 0, -1), ValueError),
            (("cache", "cache", 0, 0, None), TypeError),
            (("cache", "cache", 0, 0, 0, 0), PARAM_INVALID),
            (("cache", "cache", 0, 0, 0, -2), PARAM_INVALID),
            (("cache", "cache", 0, 0, 0, 2**63), ValueError),
            (("cache", "cache", 0, 0, 0, 1, "1"), TypeError),
        ],
    )
    def test_copy_cache_arguments(self, args: tuple, error: Any) -> None:
        process = FakeProcess(DECODER)
        caches = {"cache": process.cache(), "host": cpu_cache()}
        args = tuple(caches.get(arg, arg) if isinstance(arg, str) else arg for arg in args)
        with raises(PARAM_INVALID) if error is PARAM_INVALID else pytest.raises(error):
            process.manager.copy_cache(*args)
        assert "copy_entry" not in process.engine.names_called()

    def test_copy_cache(self) -> None:
        process = FakeProcess(DECODER, 2)
        dst, src = process.cache(), process.cache()
        process.manager.copy_cache(dst, src, 1, 2, 3, 4, req_id=-5)
        expected = {
            "src_cache_id": 2, "dst_cache_id": 1, "src_batch_index": 2, "dst_batch_index": 1, "offset_bytes": 3,
            "size_bytes": 4,
        }  # fmt: skip
        assert [engine.calls[-1] for engine in process.engines] == [("copy_entry", expected)] * 2

    @pytest.mark.parametrize(
        ("info", "error"),
        [
            ([(0, 1)], TypeError),
            ({0: 1}, TypeError),
            ({0: (1,)}, TypeError),
            ({"0": [1]}, TypeError),
            ({0: ["1"]}, TypeError),
            ({-1: [1]}, ValueError),
            ({0: [-1]}, ValueError),
            ({0: [2**64]}, ValueError),
            (None, AttributeError),
        ],
    )
    def test_copy_blocks_arguments(self, info: Any, error: type[Exception]) -> None:
        process = FakeProcess(DECODER)
        with pytest.raises(error):
            process.manager.copy_blocks(process.cache(), info)
        with raises(PARAM_INVALID):
            process.manager.copy_blocks(cpu_cache(), {0: [1]})

    def test_copy_blocks(self) -> None:
        process = FakeProcess(DECODER)
        cache = process.cache()
        process.manager.copy_blocks(cache, {0: [1, 2], 3: [], 4: [5]})
        assert process.engine.calls[-1] == (
            "copy_blocks",
            {"cache_id": 1, "src_blocks": [0, 0, 4], "dst_blocks": [1, 2, 5]},
        )
        for empty in ({}, {0: []}):
            process.manager.copy_blocks(cache, empty)
        assert process.engine.names_called().count("copy_blocks") == 1

    @pytest.mark.parametrize(
        ("host", "blocks", "error"),
        [
            ({"tensors": 3}, {0: 0}, PARAM_INVALID),
            ({"shape": (6, 95)}, {0: 0}, PARAM_INVALID),
            ({"devices": 2}, {0: 0}, PARAM_INVALID),
            ({}, {6: 0}, PARAM_INVALID),
            ({}, {0: 6}, PARAM_INVALID),
            ({}, {-1: 0}, PARAM_INVALID),
            ({}, [0], TypeError),
            ({}, {"0": 0}, TypeError),
            ({}, {0: "0"}, TypeError),
            ({}, {0: [0]}, TypeError),
        ],
    )
    def test_swap_blocks_arguments(self, host: dict, blocks: Any, error: Any) -> None:
        process = FakeProcess(DECODER)
        for args in ((process.cache(), cpu_cache(**host)), (cpu_cache(**host), process.cache())):
            with raises(PARAM_INVALID) if error is PARAM_INVALID else pytest.raises(error):
                process.manager.swap_blocks(*args, blocks)

    def test_swap_needs_host_and_device(self) -> None:
        process = FakeProcess(DECODER)
        device, host = process.cache(), cpu_cache()
        for args in ((device, device), (host, host)):
            with raises(PARAM_INVALID):
                process.manager.swap_blocks(*args, {0: 0})
        with pytest.raises(TypeError):
            process.manager.swap_blocks(None, host, {0: 0})  # type: ignore[arg-type]
        process.manager.deallocate_cache(device)
        with raises(PARAM_INVALID, "deallocated"):
            process.manager.swap_blocks(device, host, {0: 0})

    def test_swap_of_a_cache_whose_description_has_changed(self) -> None:
        """The copy is raw: it would leave the memory that was allocated."""
        process = FakeProcess(DECODER)
        desc = CacheDesc(4, [6, 96], DataType.DT_UINT8)
        cache = process.manager.allocate_cache(desc)
        desc.update_dim(1, 192)
        with raises(PARAM_INVALID, "576 bytes, and its cache_desc says 1152"):
            process.manager.swap_blocks(cache, cpu_cache(shape=(6, 192)), {0: 0})

    def test_get_cache_tensors_arguments(self) -> None:
        process = FakeProcess(DECODER)
        cache = process.cache()
        for index in (-1, 4):
            with raises(PARAM_INVALID):
                process.manager.get_cache_tensors(cache, index)
        for wrong, kind in (("0", TypeError), (None, TypeError), (2**31, ValueError)):
            with pytest.raises(kind):
                process.manager.get_cache_tensors(cache, wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            process.manager.get_cache_tensors(None)  # type: ignore[arg-type]
        with raises(KV_CACHE_NOT_EXIST):
            process.manager.get_cache_tensors(cpu_cache())

    def test_get_cache_tensors_are_of_what_was_allocated(self) -> None:
        """Whatever the caller does to its description afterwards."""
        process = FakeProcess(DECODER, 2)
        desc = CacheDesc(1, [2, 3], DataType.DT_INT16)
        cache = process.manager.allocate_cache(desc)
        desc.update_dim(0, 10**9)
        tensors = process.manager.get_cache_tensors(cache)
        assert [tensor.tensor_desc.shape for tensor in tensors] == [[2, 3]] * 2
        assert tensors[0].numpy().ctypes.data == cache.per_device_tensor_addrs[0][0]
