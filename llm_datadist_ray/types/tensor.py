"""NumPy faces of v1 cache tensors (spec api-types §11). The only file of this package that imports NumPy."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np

from llm_datadist_ray.checks import check_isinstance
from llm_datadist_ray.errors import LLMException, LLMStatusCode, raise_if_false
from llm_datadist_ray.types import data_type
from llm_datadist_ray.types.enums import DataType

_STRING_KINDS = "SU"


class TensorDesc:
    """Element type and shape of a :class:`Tensor` (spec api-types §11). TypeError for anything else."""

    def __init__(self, dtype: DataType, shape: Sequence[int]) -> None:
        check_isinstance("dtype", dtype, DataType, allow_none=False)
        check_isinstance("shape", shape, (list, tuple), int, allow_none=False)
        self._dtype = dtype
        self._shape = list(shape)

    @property
    def dtype(self) -> DataType:
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """A copy."""
        return list(self._shape)

    def __repr__(self) -> str:
        return f"TensorDesc(dtype={self._dtype}, shape={self._shape})"


class Tensor:
    """A typed view of C-contiguous memory (spec api-types §11).

    ``data`` is an ``np.ndarray`` (viewed, not copied), another Tensor (copied), or, internally, the address of memory
    that this process can read and that the caller keeps alive, in which case ``tensor_desc`` is needed. TypeError for
    other types; RuntimeError for an array that is not C-contiguous, has an unsupported dtype, or differs from
    ``tensor_desc``. Arrays of text or bytes are ``DT_STRING``. An array for ``DT_BF16`` is float16 by name and holds
    bfloat16 bits.
    """

    def __init__(self, data: np.ndarray | Tensor | int, tensor_desc: TensorDesc | None = None) -> None:
        check_isinstance("data", data, (np.ndarray, Tensor, int), allow_none=False)
        check_isinstance("tensor_desc", tensor_desc, TensorDesc)
        self._array: np.ndarray
        self._desc: TensorDesc
        if isinstance(data, Tensor):
            self._array, self._desc = data._array.copy(), data._desc
        elif isinstance(data, np.ndarray):
            self._array, self._desc = data, _checked_desc(data, tensor_desc)
        else:
            check_isinstance("tensor_desc of memory at an address", tensor_desc, TensorDesc, allow_none=False)
            assert tensor_desc is not None
            self._array, self._desc = _array_at(data, tensor_desc), tensor_desc

    @classmethod
    def from_tensor_tuple(cls, tensor_tuple: tuple[int, int, Sequence[int]]) -> Tensor:
        """Internal: from (address, data type code, shape). ValueError for an unknown code."""
        address, dtype_code, shape = tensor_tuple
        return cls(address, TensorDesc(data_type.get_python_dtype_from_wrapper_dtype(dtype_code), list(shape)))

    @property
    def tensor_desc(self) -> TensorDesc:
        return self._desc

    def numpy(self, copy: bool = False) -> np.ndarray:
        """The content: a view, or with ``copy=True`` a copy; ``DT_BF16`` always becomes a new float32 array.

        TypeError unless ``copy`` is a bool; RuntimeError for a string tensor without ``copy=True``.
        """
        check_isinstance("copy", copy, bool, allow_none=False)
        if self._desc.dtype is DataType.DT_BF16:
            return _bf16_to_float32(self._array)
        if self._desc.dtype is DataType.DT_STRING and not copy:
            raise RuntimeError("a string tensor has no view: call numpy(copy=True)")
        result: np.ndarray = self._array.copy() if copy else self._array.view()
        return result

    def __repr__(self) -> str:
        return f"Tensor({self._array}, tensor_desc={self._desc})"


def _checked_desc(array: np.ndarray, desc: TensorDesc | None) -> TensorDesc:
    """The description of the array, which agrees with ``desc`` where one is given; else RuntimeError."""
    if not array.flags.c_contiguous:
        raise RuntimeError("a Tensor needs a C-contiguous array; make one with np.ascontiguousarray")
    found = _dtype_of(array)
    if desc is None:
        return TensorDesc(found, list(array.shape))
    if list(array.shape) != desc.shape:
        raise RuntimeError(f"the array's shape {list(array.shape)} differs from {desc}")
    # DT_BF16 travels in float16 arrays, so a description may refine float16.
    if found is not desc.dtype and not (found is DataType.DT_FLOAT16 and desc.dtype is DataType.DT_BF16):
        raise RuntimeError(f"the array's dtype {array.dtype} differs from {desc}")
    return desc


def _dtype_of(array: np.ndarray) -> DataType:
    if array.dtype.kind in _STRING_KINDS:
        return DataType.DT_STRING
    known = data_type.np_dtype_to_dtype
    if array.dtype not in known:
        raise RuntimeError(f"dtype {array.dtype} is not supported, only {[str(dtype) for dtype in known]} are")
    return known[array.dtype]


def _array_at(address: int, desc: TensorDesc) -> np.ndarray:
    if desc.dtype is DataType.DT_STRING:
        raise LLMException(
            "a string tensor cannot be read from an address", status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED
        )
    raise_if_false(address > 0, "the address of a tensor should be greater than zero")
    dtype = np.dtype(data_type.dtype_to_np_dtype[desc.dtype])
    size_bytes = dtype.itemsize * math.prod(desc.shape)
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    array: np.ndarray = np.ndarray(desc.shape, dtype, buffer=memory)
    return array


def _bf16_to_float32(array: np.ndarray) -> np.ndarray:
    # A bfloat16 is the upper half of a float32.
    bits = array.view(np.uint16).astype(np.uint32)
    bits <<= 16
    floats: np.ndarray = bits.view(np.float32)
    return floats
