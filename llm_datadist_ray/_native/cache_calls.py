"""Caches, pools and local copies of a native engine (spec api-cachemanager §2 - §4, §9)."""

from __future__ import annotations

from collections.abc import Sequence

from llm_datadist_ray._native._ldr import ffi, lib
from llm_datadist_ray._native.blocks import BlockList, fill_block_list
from llm_datadist_ray._native.cache import CacheKind, NativeKey, cache_to_c, key_to_c
from llm_datadist_ray._native.engine_calls import EngineCalls
from llm_datadist_ray._native.pool import PoolInfo, pool_info_from_c
from llm_datadist_ray._native.status import NativeError, NativeStatus, check
from llm_datadist_ray._native.transfer import Move

_MAX_TENSORS = 65_536  # of one cache, in the native core


class CacheCalls(EngineCalls):
    """Part of :class:`NativeEngine`."""

    def register_cache(
        self,
        *,
        kind: CacheKind,
        placement: int,
        remote_accessible: bool,
        num_entries: int,
        tensor_bytes: int,
        addresses: Sequence[int],
        keys: Sequence[NativeKey] = (),
    ) -> int:
        """The id of a new cache: 1, 2, 3 …, never re-used. The memory is the caller's and is not touched here; it must
        stay until :meth:`unregister_cache`. ``addresses`` has one per tensor of ``tensor_bytes`` bytes."""
        params, keep_alive = cache_to_c(kind, placement, remote_accessible, num_entries, tensor_bytes, addresses, keys)
        cache_id_p = ffi.new("int64_t *")
        check(lib.ldr_cache_register(self._native.pointer, params, cache_id_p))
        del keep_alive
        return cache_id_p[0]

    def unregister_cache(self, cache_id: int) -> None:
        """Who still reads it fails with NO_CACHE. An unknown id is success."""
        check(lib.ldr_cache_unregister(self._native.pointer, cache_id))

    def create_pool(self, *, placement: int, size_bytes: int, page_shift: int, is_lazy: bool = False) -> None:
        """Reserves memory for :meth:`allocate_cache`, in pages of ``2**page_shift`` bytes: once for each placement, for
        the life of the engine. ``is_lazy`` leaves it to the first touch of each page to take real memory.

        NativeError NO_MEMORY (LLM_OUT_OF_MEMORY), INVALID.
        """
        params = ffi.new("ldr_pool_params_t *")
        params.struct_size = ffi.sizeof("ldr_pool_params_t")
        params.placement = placement
        params.size_bytes = size_bytes
        params.page_shift = page_shift
        params.flags = lib.LDR_POOL_LAZY if is_lazy else 0
        check(lib.ldr_pool_create(self._native.pointer, params))

    def pool_info(self, placement: int) -> PoolInfo:
        """NativeError NOT_FOUND when there is no pool for that placement."""
        info = ffi.new("ldr_pool_info_t *")
        check(lib.ldr_pool_info(self._native.pointer, placement, info))
        return pool_info_from_c(info)

    def allocate_cache(
        self,
        *,
        kind: CacheKind,
        placement: int,
        num_entries: int,
        tensor_bytes: int,
        num_tensors: int,
        keys: Sequence[NativeKey] = (),
    ) -> tuple[int, list[int]]:
        """The id of a new cache in the pool of its placement, and the address of each tensor. Contents are whatever the
        memory held before. NativeError POOL_FULL, KEY_BOUND, INVALID: nothing is kept."""
        if num_tensors > _MAX_TENSORS:  # before their addresses take memory
            raise NativeError(
                f"{num_tensors} tensors are more than the {_MAX_TENSORS} that a cache can have", NativeStatus.POOL_FULL
            )
        params, keep_alive = cache_to_c(kind, placement, True, num_entries, tensor_bytes, None, keys)
        params.num_tensors = num_tensors
        cache_id_p = ffi.new("int64_t *")
        addresses = ffi.new("uint64_t[]", num_tensors)
        check(lib.ldr_cache_allocate(self._native.pointer, params, cache_id_p, addresses))
        del keep_alive
        return cache_id_p[0], list(addresses)

    def deallocate_cache(self, cache_id: int) -> None:
        """Gives the id back; the memory follows when no key and no two-sided pull holds it (spec §2.4).

        NativeError NO_CACHE for an unknown id or one given back before; nothing happens to a registered cache.
        """
        check(lib.ldr_cache_deallocate(self._native.pointer, cache_id))

    def remove_cache_key(self, key: NativeKey) -> None:
        """Unbinds a request or prefix key of an allocated cache. An unknown one is success."""
        c_key = key_to_c(key)
        check(lib.ldr_cache_remove_key(self._native.pointer, c_key))

    def copy_entry(
        self,
        *,
        src_cache_id: int,
        dst_cache_id: int,
        src_batch_index: int,
        dst_batch_index: int,
        offset_bytes: int,
        size_bytes: int,
    ) -> None:
        """Copies bytes of one entry of a local cache into one of another, in all tensors; ``size_bytes`` -1 is what
        follows the offset in the source. The calling thread does it. NativeError NO_CACHE, INVALID."""
        params = ffi.new("ldr_local_copy_params_t *")
        params.struct_size = ffi.sizeof("ldr_local_copy_params_t")
        params.move = Move.ENTRY
        params.src_cache_id = src_cache_id
        params.dst_cache_id = dst_cache_id
        params.src_batch_index = src_batch_index
        params.dst_batch_index = dst_batch_index
        params.offset_bytes = offset_bytes
        params.size_bytes = size_bytes
        check(lib.ldr_cache_copy(self._native.pointer, params))

    def copy_blocks(self, *, cache_id: int, src_blocks: BlockList, dst_blocks: BlockList) -> None:
        """Copies block ``src_blocks[k]`` to block ``dst_blocks[k]`` of one local cache, in all tensors. The calling
        thread does it. TypeError for a wrong list; NativeError NO_CACHE, INVALID."""
        params = ffi.new("ldr_local_copy_params_t *")
        params.struct_size = ffi.sizeof("ldr_local_copy_params_t")
        params.move = Move.BLOCKS
        params.src_cache_id = params.dst_cache_id = cache_id
        keep_alive = (
            fill_block_list(params.src_blocks, "src_blocks", src_blocks),
            fill_block_list(params.dst_blocks, "dst_blocks", dst_blocks),
        )
        check(lib.ldr_cache_copy(self._native.pointer, params))
        del keep_alive

    def copy_raw_blocks(
        self,
        *,
        src_addresses: Sequence[int],
        dst_addresses: Sequence[int],
        block_bytes: int,
        src_blocks: BlockList,
        dst_blocks: BlockList,
    ) -> None:
        """Copies block ``src_blocks[k]`` of every source tensor to block ``dst_blocks[k]`` of its destination tensor.

        The calling thread does it. Nothing is known of the memory but what is given here; that of the engine's pools
        stays until the end, and everything else is the caller's to keep. TypeError for lists of other than block
        numbers and for an address that is no unsigned number of 64 bits; NativeError INVALID.
        """
        try:
            c_sources = ffi.new("uint64_t[]", list(src_addresses))
            c_targets = ffi.new("uint64_t[]", list(dst_addresses))
        except OverflowError as error:
            raise TypeError(f"addresses only support unsigned 64-bit integers: {error}") from error
        params = ffi.new("ldr_raw_copy_params_t *")
        params.struct_size = ffi.sizeof("ldr_raw_copy_params_t")
        params.num_tensors = len(src_addresses)
        params.src_addresses = c_sources
        params.dst_addresses = c_targets
        params.block_bytes = block_bytes
        keep_alive = (
            fill_block_list(params.src_blocks, "src_blocks", src_blocks),
            fill_block_list(params.dst_blocks, "dst_blocks", dst_blocks),
        )
        check(lib.ldr_raw_copy(self._native.pointer, params))
        del keep_alive
