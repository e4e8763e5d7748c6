"""Enumerations and the dtype maps (spec api-types §3.1, §3.3, §3.4), and what importing costs (§1)."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import llm_datadist_ray.types as api
from llm_datadist_ray.types import DataType, LLMRole, MemType, Memtype, Placement, RegisterMemStatus, data_type

_DTYPES = {
    "DT_FLOAT": (0, 4, np.float32),
    "DT_FLOAT16": (1, 2, np.float16),
    "DT_INT8": (2, 1, np.int8),
    "DT_INT32": (3, 4, np.int32),
    "DT_UINT8": (4, 1, np.uint8),
    "DT_INT16": (6, 2, np.int16),
    "DT_UINT16": (7, 2, np.uint16),
    "DT_UINT32": (8, 4, np.uint32),
    "DT_INT64": (9, 8, np.int64),
    "DT_UINT64": (10, 8, np.uint64),
    "DT_DOUBLE": (11, 8, np.float64),
    "DT_BOOL": (12, 1, np.bool_),
    "DT_STRING": (13, 16, np.bytes_),
    "DT_BF16": (27, 2, np.float16),
}


def test_3_1_roles() -> None:
    assert {role.name: int(role) for role in LLMRole} == {"PROMPT": 1, "DECODER": 2, "MIX": 3}
    assert [role.native_name for role in LLMRole] == ["Prompt", "Decoder", "Mix"]
    assert str(LLMRole.MIX) == f"{LLMRole.MIX}" == "LLMRole.MIX"


def test_3_3_data_types() -> None:
    assert {dtype.name: (dtype.value, dtype.item_bytes) for dtype in DataType} == {
        name: row[:2] for name, row in _DTYPES.items()
    }


def test_3_3_numpy_maps() -> None:
    assert {dtype.name: np_type for dtype, np_type in data_type.dtype_to_np_dtype.items()} == {
        name: row[2] for name, row in _DTYPES.items()
    }
    assert data_type.valid_np_dtypes == list(data_type.dtype_to_np_dtype.values())
    assert data_type.np_dtype_to_dtype[np.dtype(np.float16)] is DataType.DT_FLOAT16
    for np_dtype, dtype in data_type.np_dtype_to_dtype.items():
        assert np.dtype(data_type.dtype_to_np_dtype[dtype]) == np_dtype
    assert set(data_type.np_dtype_to_dtype.values()) == set(DataType) - {DataType.DT_BF16}


def test_3_3_engine_codes() -> None:
    for dtype, code in data_type.python_dtype_2_dwrapper_dtype.items():
        assert data_type.get_python_dtype_from_wrapper_dtype(code) is dtype
    with pytest.raises(ValueError):
        data_type.get_python_dtype_from_wrapper_dtype(5)


def test_3_4_small_enums() -> None:
    assert {p.name: int(p) for p in Placement} == {"HOST": 0, "DEVICE": 1}
    assert str(Placement.HOST) == "Placement.HOST"
    assert {m.name: m.value for m in Memtype} == {"MEM_TYPE_DEVICE": 0, "MEM_TYPE_HOST": 1}
    assert MemType is Memtype
    assert {s.name: s.value for s in RegisterMemStatus} == {"OK": 0, "PREPARING": 1, "FAILED": 2}


@pytest.mark.parametrize(
    "member", [LLMRole.MIX, Placement.HOST, Memtype.MEM_TYPE_HOST, RegisterMemStatus.OK, DataType.DT_BF16], ids=str
)
def test_members_pickle_by_identity(member: object) -> None:
    assert pickle.loads(pickle.dumps(member)) is member


@pytest.mark.parametrize("module", [api, data_type], ids=["1-types", "3.3-data_type"])
def test_unknown_module_attribute(module: object) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        getattr(module, "nonsense")  # noqa: B009
    for name in module.__all__:  # type: ignore[attr-defined]
        assert getattr(module, name) is not None


def test_1_leaf_layer_imports_nothing_heavy() -> None:
    """In a fresh interpreter, past the package's own __init__: neither compiled module nor ray, torch, numpy."""
    package = Path(api.__file__).parent.parent
    program = f"""
import sys, types
package = types.ModuleType("llm_datadist_ray")
package.__path__ = [{str(package)!r}]
sys.modules["llm_datadist_ray"] = package
import llm_datadist_ray.types, llm_datadist_ray.types.data_type
import llm_datadist_ray.errors, llm_datadist_ray.checks, llm_datadist_ray.config, llm_datadist_ray.options
heavy = {{"ray", "torch", "numpy", "cffi", "llm_datadist_ray._native"}} & set(sys.modules)
assert not heavy, heavy
from llm_datadist_ray.types import *
assert "numpy" in sys.modules and Tensor and KvCache
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
