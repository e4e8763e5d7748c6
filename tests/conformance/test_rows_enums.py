"""Rows of enumeration values (spec api-types §3.1, §3.3, §3.4): one test for each value."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any

import numpy as np

from llm_datadist_ray import CacheDesc, DataType, LLMDataDist, LLMRole, MemInfo, Memtype, Placement, RegisterMemStatus
from llm_datadist_ray.options import EngineOptions
from llm_datadist_ray.types import data_type
from tests.conformance.row_checks import refused, v1_name, v1_options, v2_name
from tests.conformance.status import PARAM_INVALID


def check_role(role: LLMRole, value: int, native_name: str) -> None:
    assert isinstance(role, IntEnum)
    assert role == value
    assert LLMRole(value) is role
    assert str(role) == f"{role}" == f"LLMRole.{role.name}"
    assert LLMDataDist._role_to_str(role) == native_name
    for package in (v1_name, v2_name):
        assert getattr(package("LLMRole"), role.name) is role


def test_enum_llm_role_prompt() -> None:
    """The one v1 role that has to say where it listens."""
    check_role(LLMRole.PROMPT, 1, "Prompt")
    options = v1_options(LLMRole.PROMPT, listen_ip_info="127.0.0.1:26000")
    parsed = EngineOptions.parse(options, role=LLMRole.PROMPT, cluster_id=1)
    assert parsed.listen_addresses == (("127.0.0.1", 26000),)
    del options["llm.listenIpInfo"]
    refused(PARAM_INVALID, EngineOptions.parse, options, role=LLMRole.PROMPT, cluster_id=1)


def test_enum_llm_role_decoder() -> None:
    check_role(LLMRole.DECODER, 2, "Decoder")
    parsed = EngineOptions.parse(v1_options(LLMRole.DECODER), role=LLMRole.DECODER, cluster_id=1)
    assert (parsed.role, parsed.listen_addresses) == (LLMRole.DECODER, ())


def test_enum_llm_role_mix() -> None:
    check_role(LLMRole.MIX, 3, "Mix")
    assert EngineOptions.parse(v1_options(LLMRole.MIX), role=LLMRole.MIX, cluster_id=1).role is LLMRole.MIX


def check_placement(placement: Placement, value: int) -> None:
    assert isinstance(placement, IntEnum)
    assert placement == value
    assert Placement(value) is placement
    assert str(placement) == f"Placement.{placement.name}"
    assert CacheDesc(1, [1], DataType.DT_INT8, placement).placement is placement
    for package in (v1_name, v2_name):
        assert getattr(package("Placement"), placement.name) is placement


def test_enum_placement_host() -> None:
    check_placement(Placement.HOST, 0)


def test_enum_placement_device() -> None:
    """The default of a CacheDesc."""
    check_placement(Placement.DEVICE, 1)
    assert CacheDesc(1, [1], DataType.DT_INT8).placement is Placement.DEVICE


def check_enum(member: Enum, value: int, text: str) -> None:
    assert not isinstance(member, int)
    assert member.value == value
    assert type(member)(value) is member
    assert str(member) == text
    assert getattr(v2_name(type(member).__name__), member.name) is member


def test_enum_memtype_mem_type_device() -> None:
    """Memtype and Placement count in opposite orders."""
    check_enum(Memtype.MEM_TYPE_DEVICE, 0, "Memtype.MEM_TYPE_DEVICE")
    assert Memtype.MEM_TYPE_DEVICE.value != Placement.DEVICE
    assert MemInfo(Memtype.MEM_TYPE_DEVICE, 1, 2).mem_type is Memtype.MEM_TYPE_DEVICE


def test_enum_memtype_mem_type_host() -> None:
    check_enum(Memtype.MEM_TYPE_HOST, 1, "Memtype.MEM_TYPE_HOST")
    assert Memtype.MEM_TYPE_HOST.value != Placement.HOST
    assert MemInfo(Memtype.MEM_TYPE_HOST, 1, 2).mem_type is Memtype.MEM_TYPE_HOST


def test_enum_register_mem_status_ok() -> None:
    check_enum(RegisterMemStatus.OK, 0, "RegisterMemStatus.OK")


def test_enum_register_mem_status_preparing() -> None:
    check_enum(RegisterMemStatus.PREPARING, 1, "RegisterMemStatus.PREPARING")


def test_enum_register_mem_status_failed() -> None:
    check_enum(RegisterMemStatus.FAILED, 2, "RegisterMemStatus.FAILED")


def check_data_type(
    dtype: DataType, value: int, item_bytes: int, np_type: Any, *, back: DataType | None = None
) -> None:
    """``back`` is what the NumPy type maps to when that is another one."""
    check_enum(dtype, value, f"DataType.{dtype.name}")
    assert v1_name("DataType") is DataType
    assert CacheDesc(1, [3, 5], dtype).size == 15 * item_bytes
    assert data_type.dtype_to_np_dtype[dtype] is np_type
    assert np_type in data_type.valid_np_dtypes
    assert data_type.np_dtype_to_dtype[np.dtype(np_type)] is (back or dtype)
    code = data_type.python_dtype_2_dwrapper_dtype[dtype]
    assert data_type.get_python_dtype_from_wrapper_dtype(code) is dtype


def test_enum_data_type_dt_float() -> None:
    check_data_type(DataType.DT_FLOAT, 0, 4, np.float32)


def test_enum_data_type_dt_float16() -> None:
    check_data_type(DataType.DT_FLOAT16, 1, 2, np.float16)


def test_enum_data_type_dt_int8() -> None:
    check_data_type(DataType.DT_INT8, 2, 1, np.int8)


def test_enum_data_type_dt_int32() -> None:
    check_data_type(DataType.DT_INT32, 3, 4, np.int32)


def test_enum_data_type_dt_uint8() -> None:
    check_data_type(DataType.DT_UINT8, 4, 1, np.uint8)


def test_enum_data_type_dt_int16() -> None:
    """Value 5 is nobody's."""
    check_data_type(DataType.DT_INT16, 6, 2, np.int16)
    refused(ValueError, DataType, 5)
    refused(ValueError, data_type.get_python_dtype_from_wrapper_dtype, 5)


def test_enum_data_type_dt_uint16() -> None:
    check_data_type(DataType.DT_UINT16, 7, 2, np.uint16)


def test_enum_data_type_dt_uint32() -> None:
    check_data_type(DataType.DT_UINT32, 8, 4, np.uint32)


def test_enum_data_type_dt_int64() -> None:
    check_data_type(DataType.DT_INT64, 9, 8, np.int64)


def test_enum_data_type_dt_uint64() -> None:
    check_data_type(DataType.DT_UINT64, 10, 8, np.uint64)


def test_enum_data_type_dt_double() -> None:
    check_data_type(DataType.DT_DOUBLE, 11, 8, np.float64)


def test_enum_data_type_dt_bool() -> None:
    check_data_type(DataType.DT_BOOL, 12, 1, np.bool_)


def test_enum_data_type_dt_string() -> None:
    check_data_type(DataType.DT_STRING, 13, 16, np.bytes_)


def test_enum_data_type_dt_bf16() -> None:
    """NumPy has none: its bits travel as float16, which maps back to DT_FLOAT16."""
    check_data_type(DataType.DT_BF16, 27, 2, np.float16, back=DataType.DT_FLOAT16)
