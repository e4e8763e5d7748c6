"""The argument checks (spec api-types §2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llm_datadist_ray import checks
from llm_datadist_ray.errors import LLMException, LLMStatusCode

_RANGES = {
    "uint8": (0, 2**8 - 1),
    "uint16": (0, 2**16 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
}
_CHECKS = [(getattr(checks, f"check_{name}"), *bounds) for name, bounds in _RANGES.items()]
_LIST_CHECKS = [(getattr(checks, f"check_list_{name}"), *_RANGES[name]) for name in ("int32", "int64", "uint64")]


@pytest.mark.parametrize(("check", "low", "high"), _CHECKS, ids=[f"2-{name}" for name in _RANGES])
def test_int_checks(check: Callable[[str, Any], None], low: int, high: int) -> None:
    for good in (low, high, 0, True):
        check("n", good)
    for bad in (low - 1, high + 1):
        with pytest.raises(ValueError, match=f"n should be in range .*{bad}"):
            check("n", bad)
    for wrong in (None, "1", 1.0, [1]):
        with pytest.raises(TypeError, match="n only support int"):
            check("n", wrong)


@pytest.mark.parametrize(("check", "low", "high"), _LIST_CHECKS, ids=["2-int32", "2-int64", "2-uint64"])
def test_list_checks(check: Callable[[str, Any], None], low: int, high: int) -> None:
    for good in ([], (), [low, high], (0, True), None):
        check("l", good)
    for bad in ([0, low - 1], (0, high + 1, 0)):
        with pytest.raises(ValueError, match=r"l\[1\] should be in range"):
            check("l", bad)
    for wrong in ([0, "1"], [None], "12", 1, {1}):
        with pytest.raises(TypeError, match="only support"):
            check("l", wrong)


def test_2_type_check_optional_and_strict() -> None:
    checks.check_isinstance("x", None, int)
    checks.check_isinstance("x", "a", (int, str))
    with pytest.raises(TypeError, match="x only support int, but got NoneType"):
        checks.check_isinstance("x", None, int, allow_none=False)
    with pytest.raises(TypeError, match="x only support int or str, but got float"):
        checks.check_isinstance("x", 1.0, (int, str))


def test_2_type_check_of_elements_names_the_first_culprit() -> None:
    checks.check_isinstance("x", [1, True], list, int)
    checks.check_isinstance("x", {1: "a"}, dict, int)
    with pytest.raises(TypeError, match="x inner type only support int, but element 2 is str"):
        checks.check_isinstance("x", [1, 2, "3", None], list, int)
    with pytest.raises(TypeError, match="inner type only support"):
        checks.check_isinstance("x", {"a": 1}, dict, int)


def test_2_dict_check() -> None:
    checks.check_dict("d", {}, int, int)
    checks.check_dict("d", {1: [2, 3]}, int, list, int)
    for wrong in ({"1": [2]}, {1: 2}, {1: ["2"]}, [1]):
        with pytest.raises(TypeError, match="only support"):
            checks.check_dict("d", wrong, int, list, int)
    with pytest.raises(AttributeError):
        checks.check_dict("d", None, int, int)


def test_2_positive_or_default() -> None:
    assert checks.check_positive_or_set_default("p", None, 5) == 5
    assert checks.check_positive_or_set_default("p", 3, 5) == 3
    with pytest.raises(TypeError):
        checks.check_positive_or_set_default("p", "3", 5)  # type: ignore[arg-type]
    with pytest.raises(LLMException, match="greater than zero") as caught:
        checks.check_positive_or_set_default("p", 0, 5)
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


@pytest.mark.parametrize("bad", [range(0, 1, -1), range(0, 5, 2), range(4, 1), range(0), range(-1, 2)], ids=str)
def test_10_2_layer_range_violations(bad: range) -> None:
    with pytest.raises(LLMException) as caught:
        checks.check_layer_range("r", bad)
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


def test_10_2_layer_range_types() -> None:
    checks.check_layer_range("r", None)
    checks.check_layer_range("r", range(1))
    checks.check_layer_range("r", range(3, 9))
    for wrong in ([0, 1], (0,), 1, "0"):
        with pytest.raises(TypeError, match="only support range"):
            checks.check_layer_range("r", wrong)
    with pytest.raises(TypeError):
        checks.check_layer_range("r", None, allow_none=False)
