"""Tensor and TensorDesc (spec api-types §11)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llm_datadist_ray.errors import LLMException, LLMStatusCode
from llm_datadist_ray.types import DataType, Tensor, TensorDesc, data_type

_NUMERIC = [dtype for dtype in DataType if dtype not in (DataType.DT_STRING, DataType.DT_BF16)]


def test_11_desc() -> None:
    shape = [2, 3]
    desc = TensorDesc(DataType.DT_INT8, shape)
    shape.append(4)
    desc.shape.append(5)
    assert (desc.dtype, desc.shape) == (DataType.DT_INT8, [2, 3])
    assert TensorDesc(DataType.DT_INT8, (2, 3)).shape == [2, 3]
    assert str(desc) == "TensorDesc(dtype=DataType.DT_INT8, shape=[2, 3])"


@pytest.mark.parametrize("args", [(2, [1]), (None, [1]), (DataType.DT_INT8, None), (DataType.DT_INT8, ["1"])], ids=str)
def test_11_desc_violations(args: Any) -> None:
    with pytest.raises(TypeError):
        TensorDesc(*args)


@pytest.mark.parametrize("dtype", _NUMERIC, ids=lambda dtype: f"11-{dtype.name}")
def test_11_array_without_desc(dtype: DataType) -> None:
    array = np.arange(6).astype(data_type.dtype_to_np_dtype[dtype]).reshape(2, 3)
    tensor = Tensor(array)
    assert (tensor.tensor_desc.dtype, tensor.tensor_desc.shape) == (dtype, [2, 3])
    view, copied = tensor.numpy(), tensor.numpy(copy=True)
    assert view.dtype == array.dtype
    array[0, 0] = 1
    assert view[0, 0] == 1
    assert copied[0, 0] == 0
    np.testing.assert_array_equal(view, array)


def test_11_tensor_is_copied_deeply() -> None:
    array = np.zeros(3, np.float32)
    twin = Tensor(Tensor(array))
    array[:] = 7
    np.testing.assert_array_equal(twin.numpy(), np.zeros(3, np.float32))


@pytest.mark.parametrize("data", [None, [1], "1", 1.5], ids=str)
def test_11_data_types(data: Any) -> None:
    with pytest.raises(TypeError):
        Tensor(data)


def test_11_handle_needs_a_desc_and_desc_type_is_checked() -> None:
    with pytest.raises(TypeError, match="tensor_desc"):
        Tensor(4096)
    with pytest.raises(TypeError, match="tensor_desc"):
        Tensor(np.zeros(1), [1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("array", "desc"),
    [
        (np.zeros((2, 3), np.int8), TensorDesc(DataType.DT_INT8, [3, 2])),
        (np.zeros((2, 3), np.int8), TensorDesc(DataType.DT_UINT8, [2, 3])),
        (np.zeros((2, 3), np.float32), TensorDesc(DataType.DT_BF16, [2, 3])),
        (np.zeros((2, 3), np.int8).T, None),
        (np.zeros(3, np.complex64), None),
        (np.zeros(3, ">f4"), None),
        (np.array(["a", None]), None),
    ],
    ids=["shape", "dtype", "bf16-from-f32", "strided", "complex", "big-endian", "object"],
)
def test_11_array_violations(array: np.ndarray, desc: TensorDesc | None) -> None:
    with pytest.raises(RuntimeError) as caught:
        Tensor(array, desc)
    assert not isinstance(caught.value, LLMException)


@pytest.mark.parametrize("array", [np.array(["a", "bcd"]), np.array([b"a", b"bcd"])], ids=["str", "bytes"])
def test_11_strings(array: np.ndarray) -> None:
    tensor = Tensor(array, TensorDesc(DataType.DT_STRING, [2]))
    assert Tensor(array).tensor_desc.dtype is DataType.DT_STRING
    with pytest.raises(RuntimeError, match="copy=True"):
        tensor.numpy()
    np.testing.assert_array_equal(tensor.numpy(copy=True), array)


@pytest.mark.parametrize("copy", [None, 1, "yes"], ids=str)
def test_11_copy_is_a_bool(copy: Any) -> None:
    with pytest.raises(TypeError):
        Tensor(np.zeros(1)).numpy(copy)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_11_bf16_comes_back_as_float32(shape: tuple[int, ...]) -> None:
    floats = np.array([1.5, -2.0, 0.0, 3.3895314e38], np.float32).reshape(shape)
    bits = (floats.view(np.uint32) >> 16).astype(np.uint16)
    tensor = Tensor(bits.view(np.float16), TensorDesc(DataType.DT_BF16, shape))
    assert tensor.numpy().dtype == np.float32
    np.testing.assert_array_equal(tensor.numpy(), floats)


def test_11_from_tensor_tuple_views_the_memory() -> None:
    memory = np.arange(6, dtype=np.int32)
    tensor = Tensor.from_tensor_tuple((memory.ctypes.data, DataType.DT_INT32.value, (2, 3)))
    memory[5] = -1
    np.testing.assert_array_equal(tensor.numpy(), [[0, 1, 2], [3, 4, -1]])
    tensor.numpy()[0, 0] = 9
    assert memory[0] == 9


def test_11_from_tensor_tuple_violations() -> None:
    with pytest.raises(ValueError):
        Tensor.from_tensor_tuple((4096, 5, [1]))
    with pytest.raises(LLMException) as caught:
        Tensor.from_tensor_tuple((4096, DataType.DT_STRING.value, [1]))
    assert caught.value.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    with pytest.raises(LLMException) as caught:
        Tensor.from_tensor_tuple((0, DataType.DT_INT8.value, [1]))
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
