"""Argument checks of the v1 manager (spec api-kvcachemanager §3 - §6)."""

from __future__ import annotations

from typing import Any

from llm_datadist_ray.checks import check_isinstance, check_list_in_range, check_uint64
from llm_datadist_ray.errors import raise_if_false
from llm_datadist_ray.types import CacheDesc, KvCache, Placement

_MAX_UINT64 = 2**64 - 1
_MAX_BLOCK_BYTES = 2**31 - 1


def check_desc(cache_desc: Any) -> None:
    """Of what is to be allocated: TypeError; LLMException(LLM_PARAM_INVALID) without tensors or on the host."""
    check_isinstance("cache_desc", cache_desc, CacheDesc, allow_none=False)
    raise_if_false(cache_desc.num_tensors > 0, "num_tensors of cache_desc should be greater than zero")
    raise_if_false(
        cache_desc.placement == Placement.DEVICE,
        f"v1 allocates on {Placement.DEVICE} only, but the placement of cache_desc is {cache_desc.placement}",
    )


def check_kv_cache(name: str, cache: Any) -> None:
    """TypeError unless a KvCache."""
    check_isinstance(name, cache, KvCache, allow_none=False)


def check_device_cache(name: str, cache: Any) -> None:
    """TypeError unless a KvCache; LLMException(LLM_PARAM_INVALID) for one that describes host memory."""
    check_kv_cache(name, cache)
    placement = cache.cache_desc.placement
    raise_if_false(
        placement == Placement.DEVICE, f"the placement of {name} should be {Placement.DEVICE}, not {placement}"
    )


def check_cache_offset(name: str, value: Any) -> int | None:
    """TypeError unless None or an int, ValueError for a negative one; the value."""
    if value is not None:
        check_uint64(name, value)
    return value


def check_block_lists(prompt_blocks: Any, decoder_blocks: Any) -> None:
    """TypeError unless lists of int; LLMException(LLM_PARAM_INVALID) unless as many in both, and some."""
    for name, blocks in (("prompt_blocks", prompt_blocks), ("decoder_blocks", decoder_blocks)):
        check_isinstance(name, blocks, list, int, allow_none=False)
        raise_if_false(blocks, f"{name} should not be empty")
    raise_if_false(
        len(prompt_blocks) == len(decoder_blocks),
        f"prompt_blocks has {len(prompt_blocks)} blocks and decoder_blocks {len(decoder_blocks)}, not equally many",
    )


def check_block_bytes(cache_desc: CacheDesc) -> None:
    block_bytes = cache_desc.size // cache_desc.shape[0]
    raise_if_false(
        block_bytes <= _MAX_BLOCK_BYTES, f"a block of {block_bytes} bytes is larger than {_MAX_BLOCK_BYTES}, the limit"
    )


def check_copied_blocks(src_blocks: list[int], dst_blocks: list[int]) -> None:
    """ValueError for a number that is no uint64."""
    check_list_in_range("copy_block_info", [*src_blocks, *dst_blocks], 0, _MAX_UINT64)


def check_num_devices(name: str, cache: KvCache, num_devices: int) -> None:
    """LLMException(LLM_PARAM_INVALID) unless the cache is on each device of the process."""
    found = len(cache.per_device_tensor_addrs)
    raise_if_false(
        found == num_devices, f"{name} is on {found} devices (0: deallocated), this process has {num_devices}"
    )
