"""Methods of the transfer API that this version does not have: they say so by name and do nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from llm_datadist_ray.errors import LLMException, LLMStatusCode


def not_enabled(what: str) -> LLMException:
    return LLMException(f"{what} not supported by this version", status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED)


def not_enabled_method(name: str, feature: str) -> Callable[..., NoReturn]:
    """A method that raises LLMException(LLM_FEATURE_NOT_ENABLED) whatever it is given."""

    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise not_enabled(f"{name}: {feature} are")

    method.__name__ = name
    method.__doc__ = f"Raises LLMException(LLM_FEATURE_NOT_ENABLED): {feature} are not supported by this version."
    return method
