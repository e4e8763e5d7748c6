"""Maps between :class:`DataType`, NumPy dtypes and the engine's codes (spec api-types §1, §3.3).

``dtype_to_np_dtype`` (DT_BF16 maps to float16: NumPy has no bfloat16), ``valid_np_dtypes`` (its values) and
``np_dtype_to_dtype`` (the reverse, keyed by ``np.dtype``) need NumPy and are made on first access, so that importing
this package does not import NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llm_datadist_ray.types.enums import DataType

__all__ = [
    "DataType",
    "dtype_to_np_dtype",
    "get_python_dtype_from_wrapper_dtype",
    "np_dtype_to_dtype",
    "python_dtype_2_dwrapper_dtype",
    "valid_np_dtypes",
]

if TYPE_CHECKING:
    dtype_to_np_dtype: dict[DataType, Any]
    valid_np_dtypes: list[Any]
    np_dtype_to_dtype: dict[Any, DataType]

python_dtype_2_dwrapper_dtype: dict[DataType, int] = {dtype: dtype.value for dtype in DataType}

_NP_NAMES = {
    DataType.DT_FLOAT: "float32",
    DataType.DT_FLOAT16: "float16",
    DataType.DT_INT8: "int8",
    DataType.DT_INT32: "int32",
    DataType.DT_UINT8: "uint8",
    DataType.DT_INT16: "int16",
    DataType.DT_UINT16: "uint16",
    DataType.DT_UINT32: "uint32",
    DataType.DT_INT64: "int64",
    DataType.DT_UINT64: "uint64",
    DataType.DT_DOUBLE: "float64",
    DataType.DT_BOOL: "bool_",
    DataType.DT_STRING: "bytes_",
    DataType.DT_BF16: "float16",
}


def get_python_dtype_from_wrapper_dtype(code: int) -> DataType:
    """The :class:`DataType` of an engine's code; ValueError for an unknown one (spec api-types §3.3)."""
    return DataType(code)


def __getattr__(name: str) -> Any:
    if name not in ("dtype_to_np_dtype", "valid_np_dtypes", "np_dtype_to_dtype"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import numpy as np

    to_np = {dtype: getattr(np, np_name) for dtype, np_name in _NP_NAMES.items()}
    from_np = {np.dtype(np_type): dtype for dtype, np_type in to_np.items() if dtype is not DataType.DT_BF16}
    globals().update(dtype_to_np_dtype=to_np, valid_np_dtypes=list(to_np.values()), np_dtype_to_dtype=from_np)
    return globals()[name]
