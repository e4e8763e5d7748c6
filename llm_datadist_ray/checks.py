"""Argument checks, written once for the whole package (spec api-types §2).

Wrong type is TypeError with ``only support`` in its text, a number outside its width is ValueError, and a broken rule
between values is ``LLMException`` with ``LLM_PARAM_INVALID``. Checks return nothing. Lists are checked by C-speed
passes over the whole list; only a failing one is walked in Python, to name the element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llm_datadist_ray.errors import raise_if_false

Classes = type | tuple[type, ...]


def check_isinstance(
    name: str, value: Any, classes: Classes, inner_classes: Classes | None = None, *, allow_none: bool = True
) -> None:
    """TypeError unless ``value`` is one of ``classes``, and its elements (a dict's keys) are of ``inner_classes``.

    ``allow_none=True`` is the spec's "optional" form, which lets None pass; ``False`` is the "strict" one.
    """
    if value is None and allow_none:
        return
    accepted = isinstance(value, classes)
    if not accepted:
        raise TypeError(f"{name} only support {_names(classes)}, but got {type(value).__name__}")
    if inner_classes is not None:
        check_inner(name, value, inner_classes)


def check_inner(name: str, values: Iterable[Any], classes: Classes) -> None:
    """TypeError, naming the first culprit, unless every element (of a dict: key) is of ``classes``."""
    if all(issubclass(found, classes) for found in set(map(type, values))):
        return
    for index, value in enumerate(values):
        if not isinstance(value, classes):
            raise TypeError(
                f"{name} inner type only support {_names(classes)}, but element {index} is {type(value).__name__}"
            )


def check_dict(
    name: str, value: Any, key_classes: Classes, value_classes: Classes, value_inner_classes: Classes | None = None
) -> None:
    """TypeError unless ``value`` is a dict with keys, values and (for containers) value elements of these classes.

    None is AttributeError: the spec has it pass the type check and fail at its first use.
    """
    check_isinstance(name, value, dict)
    items = value.items()
    check_inner(f"{name} keys", value, key_classes)
    check_inner(f"{name} values", value.values(), value_classes)
    if value_inner_classes is not None:
        for key, inner in items:
            check_inner(f"{name}[{key!r}]", inner, value_inner_classes)


def check_in_range(name: str, value: Any, low: int, high: int) -> None:
    """TypeError unless an int (bool is one, None is not), ValueError unless ``low <= value <= high``."""
    check_isinstance(name, value, int, allow_none=False)
    if not low <= value <= high:
        raise ValueError(f"{name} should be in range [{low}, {high}], but got {value}")


def check_list_in_range(name: str, values: Any, low: int, high: int, *, allow_none: bool = True) -> None:
    """``values`` is a list or tuple and every element satisfies :func:`check_in_range`."""
    check_isinstance(name, values, (list, tuple), int, allow_none=allow_none)
    if values and not (low <= min(values) and max(values) <= high):
        for index, value in enumerate(values):
            check_in_range(f"{name}[{index}]", value, low, high)


IntCheck = Callable[[str, Any], None]


def _width_check(rule: Callable[[str, Any, int, int], None], bits: int, *, signed: bool) -> IntCheck:
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)

    def check(name: str, value: Any) -> None:
        rule(name, value, low, high)

    check.__doc__ = f":func:`{rule.__name__}` with the range [{low}, {high}] (spec api-types §2)."
    return check


check_uint8 = _width_check(check_in_range, 8, signed=False)
check_uint16 = _width_check(check_in_range, 16, signed=False)
check_uint32 = _width_check(check_in_range, 32, signed=False)
check_uint64 = _width_check(check_in_range, 64, signed=False)
check_int32 = _width_check(check_in_range, 32, signed=True)
check_int64 = _width_check(check_in_range, 64, signed=True)
check_list_int32 = _width_check(check_list_in_range, 32, signed=True)
check_list_int64 = _width_check(check_list_in_range, 64, signed=True)
check_list_uint64 = _width_check(check_list_in_range, 64, signed=False)


def check_positive_or_set_default(name: str, value: int | None, default: int) -> int:
    """``default`` for None, else the value, which must be an int (TypeError) above zero (LLM_PARAM_INVALID)."""
    if value is None:
        return default
    check_isinstance(name, value, int)
    raise_if_false(value > 0, f"{name} should be greater than zero, but got {value}")
    return value


def check_layer_range(name: str, value: Any, *, allow_none: bool = True) -> None:
    """The strict layer-range rule (spec api-types §10.2): a ``range`` (TypeError) with step 1 and
    ``0 <= start < stop`` (LLM_PARAM_INVALID). The pull methods use a looser one."""
    check_isinstance(name, value, range, allow_none=allow_none)
    if value is not None:
        raise_if_false(
            value.step == 1 and 0 <= value.start < value.stop,
            f"{name} should be a non-empty range of layers from 0 up with step 1, but got {value}",
        )


def num_layers(layers: range) -> int:
    """``len`` of a layer range of step 1, which itself raises OverflowError beyond 63 bits."""
    return max(0, layers.stop - layers.start)


def _names(classes: Classes) -> str:
    members: Sequence[type] = classes if isinstance(classes, tuple) else (classes,)
    return " or ".join(member.__name__ for member in members)
