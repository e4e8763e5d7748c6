"""Argument checks that the parts of the cache manager share (spec api-cachemanager §3.1, §5.2, §7)."""

from __future__ import annotations

from typing import Any

from llm_datadist_ray._native.blocks import BlockList, array_in_c
from llm_datadist_ray.checks import check_int64, check_isinstance, check_list_uint64
from llm_datadist_ray.errors import param_invalid, raise_if_false
from llm_datadist_ray.types import Cache, CacheDesc

_MAX_RANK = 31
_PYTHON_LISTS = (list, tuple)


def check_cache(name: str, cache: Any, *, is_blocks: bool, allow_none: bool = True) -> None:
    """TypeError unless a :class:`Cache`, LLMException(LLM_PARAM_INVALID) for the other kind; None in the optional form
    passes the type check and is AttributeError."""
    if not isinstance(cache, Cache):
        check_isinstance(name, cache, Cache, allow_none=allow_none)
    if cache.is_blocks_cache != is_blocks:
        wanted, found = ("blocks", "contiguous") if is_blocks else ("contiguous", "blocks")
        raise param_invalid(f"{name} should be a {wanted} cache, but {cache} is {found}")


def check_block_list(name: str, blocks: Any) -> None:
    """A list, a tuple or an array (told by its ``dtype``); the rest is checked in native code on their way, TypeError
    there too."""
    if not isinstance(blocks, _PYTHON_LISTS) and not hasattr(blocks, "dtype"):
        raise TypeError(f"{name} only support list, tuple or numpy.ndarray, but got {type(blocks).__name__}")


def check_block_lists(src_blocks: Any, dst_blocks: Any) -> None:
    """Both as :func:`check_block_list`; LLMException(LLM_PARAM_INVALID) without a destination."""
    # The usual classes without a call for each: small transfers notice it.
    if type(src_blocks) is not list and not hasattr(src_blocks, "dtype"):
        check_block_list("src_blocks", src_blocks)
    if type(dst_blocks) is not list and not hasattr(dst_blocks, "dtype"):
        check_block_list("dst_blocks", dst_blocks)
    if not len(dst_blocks):
        raise param_invalid("dst_blocks should not be empty")


def own_block_indices(name: str, blocks: Any) -> BlockList:
    """A checked copy, for which None is no blocks. Elements of a list or tuple: int (TypeError) of 64 bits without sign
    (ValueError); an array: one dimension of int32 or int64 (TypeError)."""
    if blocks is None:
        return ()
    if isinstance(blocks, _PYTHON_LISTS):
        check_list_uint64(name, blocks)
        return tuple(blocks)
    return array_in_c(name, blocks).copy()


def check_pull_size(size: Any) -> None:
    check_int64("size", size)
    raise_if_false(size == -1 or size > 0, f"size should be -1 (the whole entry) or greater than zero, but got {size}")


def check_push_size(size: Any) -> None:
    check_int64("size", size)
    raise_if_false(size == -1, f"size should be -1, nothing else can be pushed than whole entries, but got {size}")


def check_shape(cache_desc: CacheDesc) -> None:
    """LLMException(LLM_PARAM_INVALID) unless 1 to 31 dimensions, all positive."""
    rank = len(cache_desc.shape)
    raise_if_false(1 <= rank <= _MAX_RANK, f"shape should have 1 to {_MAX_RANK} dimensions, but has {rank}")
    raise_if_false(
        min(cache_desc.shape) > 0, f"every dimension of shape {cache_desc.shape} should be greater than zero"
    )
