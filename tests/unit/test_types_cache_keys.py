"""The three key classes (spec api-types §6)."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from llm_datadist_ray.errors import LLMException, LLMStatusCode
from llm_datadist_ray.types import INVALID_ID, BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex


def _fields(key: CacheKey) -> tuple[int, int, int, int]:
    assert key.cluster_id == key.prompt_cluster_id
    return key.cluster_id, key.req_id, key.model_id, key.prefix_id


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((1, 2), {}, (1, 2, 0, INVALID_ID)),
        ((1, 2, 3), {}, (1, 2, 3, INVALID_ID)),
        ((1, INVALID_ID, 3, 4), {}, (1, INVALID_ID, 3, 4)),
        ((), {"cluster_id": 1, "req_id": 2}, (1, 2, 0, INVALID_ID)),
        ((), {"prompt_cluster_id": 1, "req_id": 0, "model_id": 0}, (1, 0, 0, INVALID_ID)),
        ((), {"prompt_cluster_id": 9, "cluster_id": 1, "req_id": 2}, (1, 2, 0, INVALID_ID)),
        ((1,), {"prompt_cluster_id": 9, "req_id": 2}, (1, 2, 0, INVALID_ID)),
        ((1, 2), {"cluster_id": 9, "req_id": 9}, (1, 2, 0, INVALID_ID)),
        ((1,), {"req_id": 2, "prefix_id": 4}, (1, 2, 0, 4)),
        ((2**64 - 1, 0), {}, (2**64 - 1, 0, 0, INVALID_ID)),
    ],
    ids=str,
)
def test_6_1_cache_key_arguments(args: tuple[int, ...], kwargs: dict[str, int], expected: tuple[int, ...]) -> None:
    assert _fields(CacheKey(*args, **kwargs)) == expected


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "text"),
    [
        ((1, 2, 3, 4, 5), {}, LLMException, "at most 4"),
        ((1, 2, 3), {"prefix_id": 4, "req_id": 5}, LLMException, "at most 4"),
        ((1, 2), {"request_id": 1}, LLMException, "Unsupported"),
        ((), {"req_id": 1, "nonsense": 1}, LLMException, "Unsupported"),
        ((), {}, LLMException, "cluster_id is required"),
        ((), {"req_id": 1}, LLMException, "cluster_id is required"),
        ((1,), {}, LLMException, "req_id is required"),
        ((), {"prompt_cluster_id": 1}, LLMException, "req_id is required"),
        ((None, 2), {}, TypeError, "only support"),
        (("1", 2), {}, TypeError, "only support"),
        ((1, 2.0), {}, TypeError, "only support"),
        ((1, 2, "3"), {}, TypeError, "only support"),
        ((1, 2, 3, None), {}, TypeError, "only support"),
        ((-1, 2), {}, ValueError, "cluster_id"),
        ((1, 2**64), {}, ValueError, "req_id"),
        ((1, 2, -1), {}, ValueError, "model_id"),
        ((1, 2, 3, 2**64), {}, ValueError, "prefix_id"),
    ],
    ids=str,
)
def test_6_1_cache_key_violations(args: Any, kwargs: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        CacheKey(*args, **kwargs)
    if isinstance(caught.value, LLMException):
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


@pytest.mark.parametrize(
    ("req_id", "prefix_id", "is_prefix", "is_placeholder", "is_pullable"),
    [
        (1, INVALID_ID, False, False, True),
        (INVALID_ID, 1, True, False, True),
        (1, 1, True, False, False),
        (INVALID_ID, INVALID_ID, False, True, False),
        (0, INVALID_ID, False, False, True),
    ],
)
def test_6_1_kinds(req_id: int, prefix_id: int, is_prefix: bool, is_placeholder: bool, is_pullable: bool) -> None:
    key = CacheKey(1, req_id, 0, prefix_id)
    assert (key.is_prefix_key, key.is_placeholder, key.is_pullable) == (is_prefix, is_placeholder, is_pullable)


def test_6_2_by_id_and_index() -> None:
    key = CacheKeyByIdAndIndex(cluster_id=1, cache_id=-5)
    assert (key.cluster_id, key.cache_id, key.batch_index) == (1, -5, 0)
    assert repr(CacheKeyByIdAndIndex(1, 2, 3)) == "CacheKeyByIdAndIndex(cluster_id=1, cache_id=2, batch_index=3)"


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((None, 1), TypeError),
        ((1, "1"), TypeError),
        ((1, 1, None), TypeError),
        ((-1, 1), ValueError),
        ((1, 2**63), ValueError),
        ((1, 1, 2**32), ValueError),
        ((1, 1, -1), ValueError),
    ],
    ids=str,
)
def test_6_2_violations(args: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        CacheKeyByIdAndIndex(*args)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected", "text"),
    [
        ((1,), {}, (1, 0), "BlocksCacheKey(cluster_id=1, model_id=0)"),
        ((1, 2), {}, (1, 2), "BlocksCacheKey(cluster_id=1, model_id=2)"),
        ((), {"cluster_id": 1}, (1, 0), "BlocksCacheKey(cluster_id=1, model_id=0)"),
        ((), {"prompt_cluster_id": 1, "model_id": 2}, (1, 2), "BlocksCacheKey(prompt_cluster_id=1, model_id=2)"),
        ((), {"prompt_cluster_id": 9, "cluster_id": 1}, (1, 0), "BlocksCacheKey(cluster_id=1, model_id=0)"),
        ((-1,), {"model_id": 2**70}, (-1, 2**70), f"BlocksCacheKey(cluster_id=-1, model_id={2**70})"),
        ((None,), {}, (None, 0), "BlocksCacheKey(cluster_id=None, model_id=0)"),
    ],
    ids=str,
)
def test_6_3_blocks_key(args: Any, kwargs: Any, expected: tuple[Any, Any], text: str) -> None:
    key = BlocksCacheKey(*args, **kwargs)
    assert (key.cluster_id, key.model_id) == expected
    assert key.prompt_cluster_id == key.cluster_id
    assert repr(key) == text


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "text"),
    [
        ((1, 2, 3), {}, LLMException, "at most 2"),
        ((1,), {"req_id": 1}, LLMException, "Unsupported"),
        ((), {}, LLMException, "cluster_id is required"),
        ((), {"model_id": 1}, LLMException, "cluster_id is required"),
        (("1",), {}, TypeError, "only support"),
        ((1, "0"), {}, TypeError, "only support"),
    ],
    ids=str,
)
def test_6_3_violations(args: Any, kwargs: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        BlocksCacheKey(*args, **kwargs)


_KEYS = [CacheKey(1, 2, 3, 4), CacheKeyByIdAndIndex(1, 2), BlocksCacheKey(1)]


@pytest.mark.parametrize("key", _KEYS, ids=lambda key: f"6-{type(key).__name__}")
def test_identity_read_only_and_pickle(key: Any) -> None:
    twin = pickle.loads(pickle.dumps(key))
    assert repr(twin) == repr(key)
    assert twin != key
    with pytest.raises(AttributeError):
        key.cluster_id = 5


def test_6_1_repr_order() -> None:
    assert repr(CacheKey(1, 2, 3, 4)) == "CacheKey(cluster_id=1, req_id=2, prefix_id=4, model_id=3)"
