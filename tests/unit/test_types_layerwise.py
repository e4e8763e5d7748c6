"""Layer-wise transfer types and CacheTask (spec api-types §10)."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest

from llm_datadist_ray.errors import LLMException, LLMStatusCode
from llm_datadist_ray.types import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    LayerSynchronizer,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

_OK = LLMStatusCode.LLM_SUCCESS
_BAD = LLMStatusCode.LLM_PARAM_INVALID
_LATE = LLMStatusCode.LLM_TIMEOUT
_BY_ID = CacheKeyByIdAndIndex(5, 1)
_BLOCKS = BlocksCacheKey(6)


def test_10_1_synchronizer_is_abstract() -> None:
    with pytest.raises(TypeError):
        LayerSynchronizer()  # type: ignore[abstract]

    class Ready(LayerSynchronizer):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            return True

    assert Ready().synchronize_layer(0, None)


def test_10_3_transfer_config() -> None:
    config = TransferConfig(1, [16, 32])
    assert (config.dst_cluster_id, config.dst_addrs, config.src_layer_range, config.src_batch_index) == (
        1,
        [16, 32],
        None,
        0,
    )
    assert config.dst_layer_range is None
    config = TransferConfig(dst_cluster_id=1, dst_addrs=(16,), src_layer_range=range(1, 2), src_batch_index=3)
    assert str(config) == (
        "TransferConfig(dst_cluster_id=1, dst_addrs=(16,), src_layer_range=range(1, 2), src_batch_index=3)"
    )
    assert repr(pickle.loads(pickle.dumps(config))) == repr(config)


_FIELD_VIOLATIONS = [
    ("dst_cluster_id", None, TypeError),
    ("dst_cluster_id", -1, ValueError),
    ("dst_addrs", None, TypeError),
    ("dst_addrs", "16", TypeError),
    ("dst_addrs", ["16"], TypeError),
    ("dst_addrs", [2**64], ValueError),
    ("src_layer_range", [0, 1], TypeError),
    ("src_layer_range", range(0, 4, 2), LLMException),
    ("src_layer_range", range(0), LLMException),
    ("src_batch_index", None, TypeError),
    ("src_batch_index", 2**32, ValueError),
]


@pytest.mark.parametrize(("field", "value", "error"), _FIELD_VIOLATIONS, ids=str)
def test_10_3_checked_in_constructor_and_setter(field: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        TransferConfig(**{"dst_cluster_id": 1, "dst_addrs": [16], field: value})
    config = TransferConfig(1, [16])
    before = getattr(config, field)
    with pytest.raises(error):
        setattr(config, field, value)
    assert getattr(config, field) == before


def test_10_3_setters_assign() -> None:
    config = TransferConfig(1, [16], range(1))
    config.dst_cluster_id, config.dst_addrs, config.src_layer_range, config.src_batch_index = 2, (32, 48), None, 4
    assert (config.dst_cluster_id, config.dst_addrs, config.src_layer_range, config.src_batch_index) == (
        2,
        (32, 48),
        None,
        4,
    )


def test_10_4_with_cache_key() -> None:
    config = TransferWithCacheKeyConfig(_BY_ID, range(2), range(3, 5), 7)
    assert (config.cache_key, config.dst_cluster_id, config.src_batch_index) == (_BY_ID, 5, 7)
    assert (config.src_layer_range, config.dst_layer_range) == (range(2), range(3, 5))
    assert TransferWithCacheKeyConfig(_BLOCKS, range(1), range(1)).dst_cluster_id == 6
    huge = range(2**70)
    assert TransferWithCacheKeyConfig(_BY_ID, huge, huge).src_layer_range == huge


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((None, range(1), range(1)), TypeError),
        ((CacheKey(1, 2), range(1), range(1)), TypeError),
        ((_BY_ID,), TypeError),
        ((_BY_ID, range(1)), TypeError),
        ((_BY_ID, None, range(1)), TypeError),
        ((_BY_ID, [0], range(1)), TypeError),
        ((_BY_ID, range(2), range(1)), LLMException),
        ((_BY_ID, range(2, 3), range(3)), LLMException),
        ((_BY_ID, range(0), range(0)), LLMException),
        ((_BY_ID, range(1), range(1), -1), ValueError),
        ((_BY_ID, range(1), range(1), None), TypeError),
        ((_BLOCKS, range(1), range(1), 1), LLMException),
    ],
    ids=str,
)
def test_10_4_violations(args: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        TransferWithCacheKeyConfig(*args)
    if isinstance(caught.value, LLMException):
        assert caught.value.status_code is _BAD


def test_10_4_setters() -> None:
    config = TransferWithCacheKeyConfig(_BY_ID, range(1), range(1))
    config.src_layer_range = range(9)
    assert config.dst_layer_range == range(1)
    config.src_layer_range = config.dst_layer_range = None
    config.cache_key = _BLOCKS
    assert config.dst_cluster_id == 5
    with pytest.raises(LLMException):
        config.src_batch_index = 1
    config.cache_key = None
    config.src_batch_index = 1
    assert config.src_batch_index == 1
    with pytest.raises(TypeError):
        config.cache_key = 1  # type: ignore[assignment]


class _Job:
    """A job that has ended, or never will."""

    def __init__(self, results: Sequence[LLMStatusCode | None], *, ended: bool = True) -> None:
        self._results = results
        self._ended = ended
        self.waits: list[int | None] = []

    @property
    def num_configs(self) -> int:
        return len(self._results)

    def wait(self, timeout_ms: int | None) -> bool:
        self.waits.append(timeout_ms)
        return self._ended

    def results(self) -> Sequence[LLMStatusCode | None]:
        assert self._ended, "results asked of a running job"
        return self._results


@pytest.mark.parametrize(
    ("results", "outcome"),
    [
        ([], _OK),
        ([_OK, _OK], _OK),
        ([_OK, None], _OK),
        ([None, None], _OK),
        ([_OK, _BAD, LLMStatusCode.LLM_FAILED], _BAD),
        ([None, LLMStatusCode.LLM_FAILED, _BAD], LLMStatusCode.LLM_FAILED),
    ],
    ids=str,
)
def test_10_5_outcome_of_an_ended_job(results: list[LLMStatusCode | None], outcome: LLMStatusCode) -> None:
    job = _Job(results)
    task = CacheTask(job)
    assert task.synchronize() is outcome
    assert task.synchronize(timeout_in_millis=5) is outcome
    assert task.get_results(0) == results
    assert job.waits == [None, 5, 0]


@pytest.mark.parametrize("code", [_LATE, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT], ids=["10.5-v2", "10.5-v1"])
def test_10_5_running_job(code: LLMStatusCode) -> None:
    task = CacheTask(_Job([_OK, None], ended=False), timeout_code=code)
    assert task.synchronize(0) is code
    assert task.get_results(0) == [code, code]


def test_10_5_v2_is_the_default() -> None:
    assert CacheTask(_Job([], ended=False)).synchronize(1) is _LATE


@pytest.mark.parametrize(
    ("value", "error"), [("1", TypeError), (1.5, TypeError), (-1, ValueError), (2**32, ValueError)]
)
def test_10_5_timeout_checks(value: Any, error: type[Exception]) -> None:
    task = CacheTask(_Job([_OK]))
    for method in (task.synchronize, task.get_results):
        with pytest.raises(error):
            method(value)
