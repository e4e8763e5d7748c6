"""Checks of ``register_cache`` and ``register_blocks_cache`` (spec api-cachemanager §3)."""

from __future__ import annotations

from typing import Any

from llm_datadist_ray.checks import check_isinstance
from llm_datadist_ray.errors import raise_if_false
from llm_datadist_ray.types import CacheDesc, Placement

_MAX_RANK = 31


def check_desc_and_addrs(cache_desc: Any, addrs: Any) -> None:
    """TypeError; AttributeError for None; LLMException(LLM_PARAM_INVALID) for a number of addresses other than that of
    tensors, or an address 0."""
    check_isinstance("cache_desc", cache_desc, CacheDesc)
    num_tensors = cache_desc.num_tensors
    check_isinstance("addrs", addrs, list, int, allow_none=False)
    raise_if_false(len(addrs) > 0, "addrs should not be empty")
    raise_if_false(
        len(addrs) == num_tensors, f"addrs should have one address for each of {num_tensors} tensors, not {len(addrs)}"
    )
    raise_if_false(all(addrs), "addrs should not contain 0")


def resolve_remote_accessible(value: Any, placement: Placement, *, is_call_linked: bool) -> bool:
    """Checks the argument and applies the default of spec §3.3: device memory only, and nothing after ``link()``."""
    check_isinstance("remote_accessible", value, bool)
    raise_if_false(not (value and is_call_linked), "remote_accessible=True is not supported after link() was called")
    if value is None:
        return placement == Placement.DEVICE and not is_call_linked
    return bool(value)


def check_shape(cache_desc: CacheDesc) -> None:
    """LLMException(LLM_PARAM_INVALID) unless 1 to 31 dimensions, all positive."""
    rank = len(cache_desc.shape)
    raise_if_false(1 <= rank <= _MAX_RANK, f"shape should have 1 to {_MAX_RANK} dimensions, but has {rank}")
    raise_if_false(
        min(cache_desc.shape) > 0, f"every dimension of shape {cache_desc.shape} should be greater than zero"
    )
