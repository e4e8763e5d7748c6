"""LLMStatusCode, LLMException, Status and the raising helpers (spec api-types §2, §3.2, §4)."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from llm_datadist_ray.errors import (
    LLMException,
    LLMStatusCode,
    Status,
    code_2_status,
    handle_llm_status,
    raise_if_false,
    raise_if_true,
)

_BASE = 1343270912
_VALUES = {
    "LLM_SUCCESS": 0,
    "LLM_FAILED": 4294967295,
    "LLM_WAIT_PROCESS_TIMEOUT": _BASE + 1,
    "LLM_KV_CACHE_NOT_EXIST": _BASE + 2,
    "LLM_REPEAT_REQUEST": _BASE + 3,
    "LLM_REQUEST_ALREADY_COMPLETED": _BASE + 4,
    "LLM_PARAM_INVALID": 1343270917,
    "LLM_ENGINE_FINALIZED": _BASE + 6,
    "LLM_NOT_YET_LINK": _BASE + 7,
    "LLM_ALREADY_LINK": _BASE + 8,
    "LLM_LINK_FAILED": _BASE + 9,
    "LLM_UNLINK_FAILED": _BASE + 10,
    "LLM_NOTIFY_PROMPT_UNLINK_FAILED": _BASE + 11,
    "LLM_CLUSTER_NUM_EXCEED_LIMIT": _BASE + 12,
    "LLM_PROCESSING_LINK": _BASE + 13,
    "LLM_DEVICE_OUT_OF_MEMORY": _BASE + 14,
    "LLM_PREFIX_ALREADY_EXIST": _BASE + 15,
    "LLM_PREFIX_NOT_EXIST": _BASE + 16,
    "LLM_SEQ_LENOVERLIMIT": _BASE + 17,
    "LLM_NO_FREE_BLOCK": _BASE + 18,
    "LLM_BLOCKS_OUT_OF_MEMORY": _BASE + 19,
    "LLM_EXIST_LINK": _BASE + 24,
    "LLM_FEATURE_NOT_ENABLED": _BASE + 25,
    "LLM_TIMEOUT": _BASE + 26,
    "LLM_LINK_BUSY": _BASE + 27,
    "LLM_OUT_OF_MEMORY": _BASE + 28,
    "LLM_DEVICE_MEM_ERROR": 507053,
    "LLM_SUSPECT_REMOTE_ERROR": 507057,
    "LLM_UNKNOWN_ERROR": -1,
}


def test_status_codes_are_exactly_those_of_3_2() -> None:
    assert {code.name: code.value for code in LLMStatusCode} == _VALUES


@pytest.mark.parametrize("code", LLMStatusCode, ids=lambda code: f"3.2-{code.name}")
def test_status_code_is_an_int_that_prints_its_name(code: LLMStatusCode) -> None:
    assert code == _VALUES[code.name]
    assert isinstance(code, int)
    assert str(code) == f"{code}" == f"LLMStatusCode.{code.name}"
    assert f"{code:#x}" == hex(code.value)
    assert pickle.loads(pickle.dumps(code)) is code


def test_4_exception_is_a_runtime_error_with_success_as_default() -> None:
    error = LLMException("boom", 7)
    assert isinstance(error, RuntimeError)
    assert error.status_code is LLMStatusCode.LLM_SUCCESS
    assert error.args == ("boom", 7)
    assert str(LLMException("boom")) == "boom"


def test_4_status_code_is_read_only() -> None:
    error: Any = LLMException("x", status_code=LLMStatusCode.LLM_TIMEOUT)
    with pytest.raises(AttributeError):
        error.status_code = LLMStatusCode.LLM_FAILED


def test_4_text_ends_with_the_name_of_the_code() -> None:
    assert str(LLMException("no link to 7", status_code=LLMStatusCode.LLM_NOT_YET_LINK)) == (
        "no link to 7 [LLM_NOT_YET_LINK]"
    )


@pytest.mark.parametrize("clone", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_4_exception_survives_pickling_with_its_code(clone: Any) -> None:
    error = LLMException("a", {"b": 1}, status_code=LLMStatusCode.LLM_LINK_FAILED)
    got = clone(error)
    assert type(got) is LLMException
    assert (got.args, got.status_code, str(got)) == (error.args, LLMStatusCode.LLM_LINK_FAILED, str(error))


def test_4_status() -> None:
    assert Status(LLMStatusCode.LLM_SUCCESS).is_ok()
    failed = Status(LLMStatusCode.LLM_FAILED)
    assert not failed.is_ok()
    assert failed.status_code is LLMStatusCode.LLM_FAILED


@pytest.mark.parametrize("offset", [20, 21, 22, 23, 29])
def test_3_2_native_codes_without_a_name_are_failed(offset: int) -> None:
    assert code_2_status(_BASE + offset) is LLMStatusCode.LLM_FAILED


@pytest.mark.parametrize("code", LLMStatusCode, ids=lambda code: code.name)
def test_2_known_codes_map_to_themselves(code: LLMStatusCode) -> None:
    assert code_2_status(int(code)) is code


def test_2_native_success_raises_nothing() -> None:
    handle_llm_status(0, "pull_cache")


def test_2_native_failure_says_step_detail_and_code() -> None:
    with pytest.raises(LLMException) as caught:
        handle_llm_status(_BASE + 2, "pull_cache from cluster 7", "no such key {1}")
    assert caught.value.args == ("pull_cache from cluster 7 failed: no such key {1}",)
    assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_2_native_failure_without_a_name_shows_the_number() -> None:
    with pytest.raises(LLMException, match=str(_BASE + 21)) as caught:
        handle_llm_status(_BASE + 21, "allocate_cache")
    assert caught.value.status_code is LLMStatusCode.LLM_FAILED


@pytest.mark.parametrize("message", ["plain", "a dict {'a': 1}", "{", "{0} {name!r}", "100%s"])
def test_2_predicates_use_the_message_as_it_is(message: str) -> None:
    with pytest.raises(LLMException) as caught:
        raise_if_false(False, message)
    assert caught.value.args == (message,)
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    with pytest.raises(LLMException) as caught:
        raise_if_true(True, message, LLMStatusCode.LLM_FEATURE_NOT_ENABLED)
    assert caught.value.args == (message,)
    assert caught.value.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    raise_if_false(True, message)
    raise_if_true(False, message)
