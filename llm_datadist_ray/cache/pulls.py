"""Pulling: from a peer's cache into a local one (spec api-cachemanager §5, §6)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from llm_datadist_ray._native import BlockList, Direction, Move, RemoteBy, Transfer
from llm_datadist_ray.cache.arguments import check_block_lists, check_cache, check_pull_size
from llm_datadist_ray.cache.operation import ManagerPart, Operation
from llm_datadist_ray.cache.remote import check_cache_key, pull_source_fields
from llm_datadist_ray.cache.selection import EVERYTHING, Selection, pull_selection
from llm_datadist_ray.cache.task import TransferTask
from llm_datadist_ray.checks import check_isinstance, check_uint32
from llm_datadist_ray.errors import param_invalid
from llm_datadist_ray.types import BlocksCacheKey, Cache, CacheKey, CacheKeyByIdAndIndex

_PULL = Direction.PULL
_ENTRY, _BLOCKS, _ENTRY_TO_BLOCKS = Move.ENTRY, Move.BLOCKS, Move.ENTRY_TO_BLOCKS
_BY_BLOCKS_KEY = RemoteBy.BLOCKS_KEY


class Pulls(ManagerPart):
    """Part of :class:`CacheManager`."""

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> None:
        """Copies one entry of a peer's contiguous cache into entry ``batch_index`` of a local one.

        ``size`` bytes of every tensor, or -1 for the whole local entry. Keywords: ``src_layer_range``,
        ``dst_layer_range``, ``tensor_num_per_layer`` (2); others are ignored. In remote-access mode only
        :class:`CacheKeyByIdAndIndex`. In two-sided mode a request key of an allocated cache is consumed (spec §5.5).
        """
        self._run(self._entry_pull(cache_key, cache, batch_index, size, kwargs))

    def pull_cache_async(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> TransferTask:
        """:meth:`pull_cache` in the background. What is wrong before the peer is asked is raised here."""
        return self._start(self._entry_pull(cache_key, cache, batch_index, size, kwargs))

    def pull_blocks(
        self,
        src_cache_key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: BlockList = (),
        dst_blocks: BlockList = (),
        **kwargs: Any,
    ) -> None:
        """Copies block ``src_blocks[k]`` of a peer's blocks cache to block ``dst_blocks[k]``, for every tensor. With
        a key of a contiguous cache and no ``src_blocks`` it copies piece ``k`` of its entry to ``dst_blocks[k]``.

        Block lists are lists or tuples of int, or int32 / int64 arrays. Keywords and keys as :meth:`pull_cache`.
        """
        self._run(self._blocks_pull(src_cache_key, dst_cache, src_blocks, dst_blocks, kwargs))

    def pull_blocks_async(
        self,
        src_cache_key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: BlockList = (),
        dst_blocks: BlockList = (),
        **kwargs: Any,
    ) -> TransferTask:
        """:meth:`pull_blocks` in the background. What is wrong before the peer is asked is raised here."""
        return self._start(self._blocks_pull(src_cache_key, dst_cache, src_blocks, dst_blocks, kwargs))

    def _entry_pull(
        self, cache_key: Any, cache: Cache, batch_index: int, size: int, kwargs: dict[str, Any]
    ) -> Operation:
        """Checks of spec §5.2, "pull_cache"."""
        key_classes = (CacheKeyByIdAndIndex,) if self._is_remote_access else (CacheKey, CacheKeyByIdAndIndex)
        check_isinstance("cache_key", cache_key, key_classes)
        if isinstance(cache_key, CacheKey):
            check_cache_key(cache_key)
        check_cache("cache", cache, is_blocks=False)
        check_uint32("batch_index", batch_index)
        check_pull_size(size)
        selection = pull_selection(cache, kwargs) if kwargs else EVERYTHING
        transfer = Transfer(
            direction=_PULL,
            move=_ENTRY,
            local_cache_id=cache.id_for(self),
            local_batch_index=batch_index,
            size_bytes=size,
            local_tensors=selection.local,
            remote_tensors=selection.remote,
            timeout_s=self._timeout_s,
            **pull_source_fields(cache_key, is_remote_access=self._is_remote_access),
        )
        return transfer, selection.flaw

    def _blocks_pull(
        self, key: Any, dst_cache: Cache, src_blocks: BlockList, dst_blocks: BlockList, kwargs: dict[str, Any]
    ) -> Operation:
        """Checks of spec §5.2, "pull_blocks"."""
        is_paged = isinstance(key, BlocksCacheKey)
        if not is_paged:
            check_isinstance("src_cache_key", key, (CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey))
        check_cache("dst_cache", dst_cache, is_blocks=True)
        check_block_lists(src_blocks, dst_blocks)
        selection = pull_selection(dst_cache, kwargs) if kwargs else EVERYTHING
        if not is_paged:
            return self._pieces_pull(key, dst_cache, src_blocks, dst_blocks, selection)
        if not len(src_blocks):
            raise param_invalid("src_blocks should not be empty")
        if selection is EVERYTHING:
            frame = _kept_blocks_frame(key.cluster_id, key.model_id, dst_cache.id_for(self), self._timeout_s)
        else:
            frame = _blocks_frame(key.cluster_id, key.model_id, dst_cache.id_for(self), self._timeout_s, selection)
        return frame.with_blocks(src_blocks, dst_blocks), selection.flaw

    def _pieces_pull(
        self, key: Any, dst_cache: Cache, src_blocks: BlockList, dst_blocks: BlockList, selection: Selection
    ) -> Operation:
        """From a contiguous source: its rows of the same table."""
        source = pull_source_fields(key, is_remote_access=self._is_remote_access)
        if isinstance(key, CacheKey):
            check_cache_key(key)
        if len(src_blocks):
            raise param_invalid(f"src_blocks should be empty when the source is {key}")
        transfer = Transfer(
            direction=_PULL,
            move=_ENTRY_TO_BLOCKS,
            local_cache_id=dst_cache.id_for(self),
            local_tensors=selection.local,
            remote_tensors=selection.remote,
            dst_blocks=dst_blocks,
            timeout_s=self._timeout_s,
            **source,
        )
        return transfer, selection.flaw


def _blocks_frame(
    cluster_id: int, model_id: int, cache_id: int, timeout_s: float, selection: Selection = EVERYTHING
) -> Transfer:
    """All of a pull but its blocks. TypeError for a None inside the key."""
    return Transfer(
        _PULL,
        cluster_id,
        cache_id,
        _BLOCKS,
        _BY_BLOCKS_KEY,
        remote_model_id=model_id,
        local_tensors=selection.local,
        remote_tensors=selection.remote,
        timeout_s=timeout_s,
    )


# Pulls of a block each are many, of few caches, and take some microseconds: most of that was this.
_kept_blocks_frame = lru_cache(maxsize=1024)(_blocks_frame)
