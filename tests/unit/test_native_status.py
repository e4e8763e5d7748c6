"""Native statuses and exceptions: one table, the header's (native/include/ldr.h)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from llm_datadist_ray import LLMException, LLMStatusCode
from tests.unit.fake_native import fake_native, header_enums

EXPECTED_CODES = {
    "INVALID": "LLM_PARAM_INVALID",
    "MODE_MISMATCH": "LLM_PARAM_INVALID",
    "NO_CACHE": "LLM_KV_CACHE_NOT_EXIST",
    "TIMEOUT": "LLM_TIMEOUT",
    "NO_PATH": "LLM_FEATURE_NOT_ENABLED",
    "UNSUPPORTED": "LLM_FEATURE_NOT_ENABLED",
    "NOT_LINKED": "LLM_NOT_YET_LINK",
    "ALREADY_LINKED": "LLM_ALREADY_LINK",
    "LINK_FAILED": "LLM_LINK_FAILED",
    "AUTH": "LLM_LINK_FAILED",
    "VERSION": "LLM_LINK_FAILED",
    "LAYOUT": "LLM_LINK_FAILED",
    "UNLINK_FAILED": "LLM_UNLINK_FAILED",
    "HANDSHAKE": "LLM_FAILED",
    "NO_MEMORY": "LLM_OUT_OF_MEMORY",
    "KEY_BOUND": "LLM_PARAM_INVALID",
    "POOL_FULL": "LLM_OUT_OF_MEMORY",
}


@pytest.fixture(scope="module")
def native() -> Iterator[Any]:
    with fake_native() as (module, _, _):
        yield module


def header_errors() -> dict[str, int]:
    return {name.removeprefix("LDR_ERR_"): value for name, value in header_enums().items() if "LDR_ERR_" in name}


def test_statuses_are_the_headers(native: Any) -> None:
    assert {status.name: status.value for status in native.NativeStatus if status} == header_errors()


@pytest.mark.parametrize("name", sorted(header_errors()))
def test_codes(native: Any, name: str) -> None:
    error = native.NativeError("what happened", header_errors()[name])
    assert error.status_code == LLMStatusCode[EXPECTED_CODES.get(name, "LLM_FAILED")]
    assert error.native_status == native.NativeStatus[name]
    assert isinstance(error, LLMException)
    assert str(error).startswith("what happened")


def test_an_unknown_status_is_a_failure(native: Any) -> None:
    error = native.NativeError("?", -12345)
    assert (error.native_status, error.status_code) == (-12345, LLMStatusCode.LLM_FAILED)


@pytest.mark.parametrize(
    ("ours", "prefix"),
    [
        ("Direction", "LDR_"),
        ("RemoteBy", "LDR_BY_"),
        ("Move", "LDR_MOVE_"),
        ("Path", "LDR_PATH_"),
        ("EventKind", "LDR_EVENT_"),
        ("LinkState", "LDR_LINK_"),
        ("CacheKind", "LDR_CACHE_"),
        ("KeyKind", "LDR_KEY_"),
        ("CloseOutcome", "LDR_CLOSE_"),
    ],
)
def test_enums_are_the_headers(native: Any, ours: str, prefix: str) -> None:
    enums = header_enums()
    for member in getattr(native, ours):
        assert enums[prefix + member.name] == member.value
    if prefix != "LDR_":
        assert sum(name.startswith(prefix) for name in enums if name != "LDR_LINK_AS") == len(getattr(native, ours))
