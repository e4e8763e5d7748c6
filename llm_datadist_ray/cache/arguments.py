"""Argument checks that the transfer methods share (spec api-cachemanager §5.2, §7)."""

from __future__ import annotations

import sys
from collections.abc import Sized
from typing import Any

from llm_datadist_ray.checks import check_int64, check_isinstance
from llm_datadist_ray.errors import raise_if_false
from llm_datadist_ray.types import Cache


def check_cache(name: str, cache: Any, *, is_blocks: bool, allow_none: bool = True) -> None:
    """TypeError unless a :class:`Cache`, LLMException(LLM_PARAM_INVALID) for the other kind; None in the optional form
    passes the type check and is AttributeError."""
    check_isinstance(name, cache, Cache, allow_none=allow_none)
    wanted, found = ("blocks", "contiguous") if is_blocks else ("contiguous", "blocks")
    raise_if_false(cache.is_blocks_cache == is_blocks, f"{name} should be a {wanted} cache, but {cache} is {found}")


def check_block_list(name: str, blocks: Any) -> Sized:
    """A list, a tuple or an array; the elements are checked in native code on their way (TypeError there, too)."""
    # An array can only be one if somebody has imported NumPy.
    numpy = sys.modules.get("numpy")
    classes = (list, tuple) if numpy is None else (list, tuple, numpy.ndarray)
    check_isinstance(name, blocks, classes, allow_none=False)
    return blocks


def check_not_empty(name: str, blocks: Sized) -> None:
    raise_if_false(len(blocks) > 0, f"{name} should not be empty")


def check_pull_size(size: Any) -> None:
    check_int64("size", size)
    raise_if_false(size == -1 or size > 0, f"size should be -1 (the whole entry) or greater than zero, but got {size}")


def check_push_size(size: Any) -> None:
    check_int64("size", size)
    raise_if_false(size == -1, f"size should be -1, nothing else can be pushed than whole entries, but got {size}")
