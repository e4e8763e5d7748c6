"""CacheDesc (spec api-types §5)."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from llm_datadist_ray.errors import LLMException, LLMStatusCode
from llm_datadist_ray.types import CacheDesc, DataType, Placement

_GOOD: dict[str, Any] = {"num_tensors": 2, "shape": [4, 8], "data_type": DataType.DT_FLOAT16}


def _desc(**changes: Any) -> CacheDesc:
    return CacheDesc(**{**_GOOD, **changes})


def test_defaults_and_properties() -> None:
    shape = [4, 8]
    desc = CacheDesc(2, shape, DataType.DT_FLOAT16)
    assert (desc.num_tensors, desc.data_type, desc.placement) == (2, DataType.DT_FLOAT16, Placement.DEVICE)
    assert desc.shape is shape
    assert (desc.batch_dim, desc.batch_size, desc.seq_len_dim_index, desc.kv_tensor_format) == (0, 4, -1, None)
    assert desc.size == 4 * 8 * 2


def test_positional_order_of_all_seven() -> None:
    desc = CacheDesc(0, (4, 8), DataType.DT_INT8, Placement.HOST, 1, 0, "ND")
    assert (desc.batch_dim, desc.batch_size, desc.seq_len_dim_index) == (1, 8, 0)
    assert repr(desc) == (
        "CacheDesc(num_tensors=0, shape=(4, 8), data_type=DataType.DT_INT8, placement=Placement.HOST, "
        "batch_dim_index=1, seq_len_dim_index=0, kv_tensor_format='ND')"
    )


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_tensors": None}, TypeError),
        ({"num_tensors": "2"}, TypeError),
        ({"num_tensors": -1}, ValueError),
        ({"num_tensors": 2**32}, ValueError),
        ({"shape": None}, TypeError),
        ({"shape": 4}, TypeError),
        ({"shape": [4, "8"]}, TypeError),
        ({"shape": [4, 2**63]}, ValueError),
        ({"data_type": 1}, TypeError),
        ({"placement": 1}, TypeError),
        ({"placement": "DEVICE"}, TypeError),
        ({"batch_dim_index": "0"}, TypeError),
        ({"batch_dim_index": None}, TypeError),
        ({"batch_dim_index": 2}, LLMException),
        ({"batch_dim_index": -1}, LLMException),
        ({"shape": []}, LLMException),
        ({"seq_len_dim_index": None}, TypeError),
        ({"seq_len_dim_index": 2**31}, ValueError),
        ({"seq_len_dim_index": 2}, LLMException),
        ({"seq_len_dim_index": -2}, LLMException),
        ({"kv_tensor_format": 1}, TypeError),
        # Order: types of later arguments, then the index ranges, then the elements of shape.
        ({"batch_dim_index": 9, "kv_tensor_format": 1}, TypeError),
        ({"shape": [2**63], "batch_dim_index": 9}, LLMException),
        ({"num_tensors": -1, "shape": None}, ValueError),
    ],
    ids=lambda value: f"5-{value}" if isinstance(value, dict) else value.__name__,
)
def test_violations(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        _desc(**changes)
    assert type(caught.value) is error
    if isinstance(caught.value, LLMException):
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [4, 0]},
        {"shape": [4, -8]},
        {"shape": [2**62, 2]},
        {"shape": [2**63 - 1, 2**63 - 1]},
        {"data_type": None},
    ],
    ids=str,
)
def test_size_failures(changes: dict[str, Any]) -> None:
    desc = _desc(**changes)
    with pytest.raises(LLMException) as caught:
        _ = desc.size
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


def test_size_of_the_largest_tensor() -> None:
    assert _desc(shape=[2**63 - 1], data_type=DataType.DT_INT8).size == 2**63 - 1


@pytest.mark.parametrize("dtype", DataType, ids=lambda dtype: dtype.name)
def test_size_by_element_type(dtype: DataType) -> None:
    assert _desc(shape=[3, 5], data_type=dtype).size == 15 * dtype.item_bytes


def test_size_is_cached_until_update_dim_and_batch_size_stays() -> None:
    shape = [4, 8]
    desc = _desc(shape=shape)
    assert desc.size == 64
    shape[1] = 16
    assert desc.size == 64
    desc.update_dim(0, 5)
    assert (shape, desc.size, desc.batch_size) == ([5, 16], 5 * 16 * 2, 4)


def test_update_dim_of_a_tuple() -> None:
    with pytest.raises(TypeError):
        _desc(shape=(4, 8)).update_dim(0, 5)


def test_no_equality_but_pickles() -> None:
    desc = _desc()
    assert desc != _desc()
    assert repr(pickle.loads(pickle.dumps(desc))) == repr(desc)


@pytest.mark.parametrize("name", ["num_tensors", "shape", "data_type", "placement", "size", "batch_size", "batch_dim"])
def test_properties_are_read_only(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(_desc(), name, 1)
