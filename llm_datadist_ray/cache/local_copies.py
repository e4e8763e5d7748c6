"""Copies between caches of this process (spec api-cachemanager §9)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, repeat
from typing import Any

from llm_datadist_ray._native import NativeError
from llm_datadist_ray.cache.arguments import check_cache, check_pull_size
from llm_datadist_ray.cache.operation import ManagerPart
from llm_datadist_ray.checks import check_dict, check_uint32, check_uint64
from llm_datadist_ray.errors import LLMException, LLMStatusCode, raise_if_false
from llm_datadist_ray.types import Cache, KvCache, Placement


class LocalCopies(ManagerPart):
    """Part of :class:`CacheManager`. The caller's thread does the work, without the interpreter lock."""

    def copy_cache(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """Copies ``size`` bytes (-1: all that follow ``offset`` in the source) from byte ``offset`` of one entry to
        the same offset of another, in every tensor of two contiguous caches. ``req_id`` says whom it is for.

        LLMException: LLM_KV_CACHE_NOT_EXIST, LLM_PARAM_INVALID (kinds, tensors, entries, bytes that do not fit).
        """
        check_cache("dst", dst, is_blocks=False)
        check_cache("src", src, is_blocks=False)
        check_uint32("dst_batch_index", dst_batch_index)
        check_uint32("src_batch_index", src_batch_index)
        check_uint64("offset", offset)
        check_pull_size(size)
        if req_id is not None:
            check_uint64("req_id", req_id)
        self._engine.copy_entry(
            src_cache_id=src.id_for(self),
            dst_cache_id=dst.id_for(self),
            src_batch_index=src_batch_index,
            dst_batch_index=dst_batch_index,
            offset_bytes=offset,
            size_bytes=size,
        )

    def copy_blocks(self, cache: Cache, copy_block_info: Mapping[int, list[int]]) -> None:
        """Copies block ``s`` to every block of ``copy_block_info[s]``, in all tensors of a blocks cache. The order of
        pairs that overlap is unspecified. LLMException: LLM_KV_CACHE_NOT_EXIST, LLM_PARAM_INVALID for an index that the
        cache does not have."""
        check_cache("cache", cache, is_blocks=True)
        src_blocks, dst_blocks = flatten_copy_block_info(copy_block_info)
        if not dst_blocks:
            self._check_open()
        else:
            self._engine.copy_blocks(cache_id=cache.id_for(self), src_blocks=src_blocks, dst_blocks=dst_blocks)

    def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: Mapping[int, int]) -> None:
        """Copies block ``s`` of every source tensor to block ``src_to_dst[s]`` of the destination tensor; one way,
        whatever its name says. One of the caches is on the host, e.g. of :meth:`Cache.create_cpu_cache`, and one on the
        device. Only ``tensor_addrs`` are used, which must be memory of the caches' size.

        TypeError for an address of more than 64 bits; LLMException: LLM_PARAM_INVALID for caches or blocks that do not
        fit each other, LLM_KV_CACHE_NOT_EXIST (a cache made before ``finalize``), LLM_FAILED.
        """
        check_cache("src_cache", src_cache, is_blocks=True)
        check_cache("dst_cache", dst_cache, is_blocks=True)
        block_bytes = check_swap(("src_cache", "dst_cache"), src_cache, dst_cache, src_to_dst)
        self._check_has_memory("src_cache", src_cache)
        self._check_has_memory("dst_cache", dst_cache)
        try:
            self._engine.copy_raw_blocks(
                src_addresses=src_cache.tensor_addrs,
                dst_addresses=dst_cache.tensor_addrs,
                block_bytes=block_bytes,
                src_blocks=list(src_to_dst),
                dst_blocks=list(src_to_dst.values()),
            )
        except NativeError as error:
            raise LLMException(
                f"swap_blocks of {len(src_to_dst)} blocks from {src_cache} to {dst_cache}: {error.args[0]}",
                status_code=LLMStatusCode.LLM_FAILED,
            ) from error

    def _check_has_memory(self, name: str, cache: Cache) -> None:
        num_addrs, num_tensors = len(cache.tensor_addrs), cache.cache_desc.num_tensors
        raise_if_false(num_addrs == num_tensors, f"{name} {cache} has been deallocated")
        raise_if_false(
            cache.id_for(self),
            f"{name} {cache} was made before finalize, which was its end",
            LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        )


def flatten_copy_block_info(copy_block_info: Any) -> tuple[list[int], list[int]]:
    """``{s: [d, …]}`` as sources and destinations, equally many. TypeError."""
    check_dict("copy_block_info", copy_block_info, int, list, int)
    src_blocks = list(chain.from_iterable(repeat(source, len(targets)) for source, targets in copy_block_info.items()))
    return src_blocks, list(chain.from_iterable(copy_block_info.values()))


def check_swap(names: tuple[str, str], src: Cache | KvCache, dst: Cache | KvCache, src_to_dst: Any) -> int:
    """The bytes of a block, which both caches, of these names, have. TypeError; LLMException(LLM_PARAM_INVALID) unless
    the blocks exist and fit each other, and one cache is on the host and one on the device (spec §9.3; v1, too)."""
    check_dict("src_to_dst", src_to_dst, int, int)
    block_bytes = _block_bytes(src)
    raise_if_false(
        block_bytes == _block_bytes(dst),
        f"blocks of {src} have {block_bytes} bytes, those of {dst} {_block_bytes(dst)}",
    )
    num_tensors, num_dst_tensors = src.cache_desc.num_tensors, dst.cache_desc.num_tensors
    raise_if_false(
        num_tensors == num_dst_tensors,
        f"{names[0]} has {num_tensors} tensors, {names[1]} {num_dst_tensors}: they should be as many",
    )
    _check_blocks("src_to_dst key", src_to_dst.keys(), src)
    _check_blocks("src_to_dst value", src_to_dst.values(), dst)
    placements = {src.cache_desc.placement, dst.cache_desc.placement}
    raise_if_false(
        placements == set(Placement),
        f"swap_blocks copies between {Placement.HOST} and {Placement.DEVICE}, but both caches are "
        f"{src.cache_desc.placement}",
    )
    return block_bytes


def _block_bytes(cache: Cache | KvCache) -> int:
    num_blocks = cache.cache_desc.batch_size
    raise_if_false(num_blocks, f"{cache} has no blocks: batch_size of its cache_desc is 0")
    return cache.cache_desc.size // num_blocks


def _check_blocks(what: str, blocks: Iterable[int], cache: Cache | KvCache) -> None:
    num_blocks = cache.cache_desc.batch_size
    wrong = [block for block in blocks if not 0 <= block < num_blocks]
    raise_if_false(not wrong, f"{what} {wrong[:1]} is not in [0, {num_blocks}), the blocks of {cache}")
