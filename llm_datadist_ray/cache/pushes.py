"""Pushing: from a local cache into a peer's, in remote-access mode (spec api-cachemanager §7)."""

from __future__ import annotations

from typing import Any

from llm_datadist_ray._native import BlockList, Direction, Move, Transfer
from llm_datadist_ray.cache.arguments import check_block_lists, check_cache, check_push_size
from llm_datadist_ray.cache.operation import ManagerPart, Operation
from llm_datadist_ray.cache.remote import push_target_fields, remote_fields
from llm_datadist_ray.cache.selection import (
    DEFAULT_TENSORS_PER_LAYER,
    check_tensors_per_layer,
    push_selection,
)
from llm_datadist_ray.cache.task import TransferTask
from llm_datadist_ray.checks import check_isinstance, check_uint32
from llm_datadist_ray.errors import raise_if_false
from llm_datadist_ray.types import BlocksCacheKey, Cache, CacheKeyByIdAndIndex


class Pushes(ManagerPart):
    """Part of :class:`CacheManager`."""

    def push_cache(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        size: int = -1,
        tensor_num_per_layer: int = DEFAULT_TENSORS_PER_LAYER,
    ) -> None:
        """Copies entry ``src_batch_index`` of a local contiguous cache into an entry of a peer's. Remote-access mode.

        A range left out is that of all local layers; when the cache has fewer tensors than a layer, nothing is moved
        and that is success. Nobody is notified.
        """
        operation = self._entry_push(
            dst_cache_key, src_cache, src_batch_index, src_layer_range, dst_layer_range, size, tensor_num_per_layer
        )
        self._run_unless_empty(operation)

    def push_cache_async(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        size: int = -1,
        tensor_num_per_layer: int = DEFAULT_TENSORS_PER_LAYER,
    ) -> TransferTask:
        """:meth:`push_cache` in the background. What is wrong before the peer is asked is raised here."""
        operation = self._entry_push(
            dst_cache_key, src_cache, src_batch_index, src_layer_range, dst_layer_range, size, tensor_num_per_layer
        )
        return self._start_unless_empty(operation, dst_cache_key.cluster_id)

    def push_blocks(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: BlockList = (),
        dst_blocks: BlockList = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = DEFAULT_TENSORS_PER_LAYER,
    ) -> None:
        """Copies block ``src_blocks[k]`` of a local blocks cache to block ``dst_blocks[k]`` of a peer's. Remote-access
        mode; ranges as :meth:`push_cache`, block lists as :meth:`pull_blocks`."""
        operation = self._blocks_push(
            dst_cache_key, src_cache, src_blocks, dst_blocks, src_layer_range, dst_layer_range, tensor_num_per_layer
        )
        self._run_unless_empty(operation)

    def push_blocks_async(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: BlockList = (),
        dst_blocks: BlockList = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = DEFAULT_TENSORS_PER_LAYER,
    ) -> TransferTask:
        """:meth:`push_blocks` in the background. What is wrong before the peer is asked is raised here."""
        operation = self._blocks_push(
            dst_cache_key, src_cache, src_blocks, dst_blocks, src_layer_range, dst_layer_range, tensor_num_per_layer
        )
        return self._start_unless_empty(operation, dst_cache_key.cluster_id)

    def _entry_push(
        self,
        key: Any,
        src_cache: Cache,
        src_batch_index: int,
        src_layers: Any,
        dst_layers: Any,
        size: int,
        per_layer: int,
    ) -> Operation | None:
        """Checks of spec §7, "push_cache"; None when there is nothing to move."""
        self._check_can_push("push_cache")
        check_isinstance("dst_cache_key", key, CacheKeyByIdAndIndex, allow_none=False)
        check_cache("src_cache", src_cache, is_blocks=False, allow_none=False)
        check_uint32("src_batch_index", src_batch_index)
        check_tensors_per_layer(per_layer)
        selection = push_selection(src_layers, dst_layers, src_cache.cache_desc.num_tensors, per_layer)
        check_push_size(size)
        target = push_target_fields(key)
        if selection is None:
            return None
        transfer = Transfer(
            direction=Direction.PUSH,
            move=Move.ENTRY,
            local_cache_id=src_cache.id_for(self),
            local_batch_index=src_batch_index,
            local_tensors=selection.local,
            remote_tensors=selection.remote,
            timeout_s=self._timeout_s * selection.num_layers,
            **target,
        )
        return transfer, selection.flaw

    def _blocks_push(
        self,
        key: Any,
        src_cache: Cache,
        src_blocks: BlockList | None,
        dst_blocks: BlockList,
        src_layers: Any,
        dst_layers: Any,
        per_layer: int,
    ) -> Operation | None:
        """Checks of spec §7, "push_blocks"; None when there is nothing to move."""
        self._check_can_push("push_blocks")
        check_isinstance("dst_cache_key", key, BlocksCacheKey)
        check_cache("src_cache", src_cache, is_blocks=True)
        src_blocks = () if src_blocks is None else src_blocks
        check_block_lists(src_blocks, dst_blocks)
        check_tensors_per_layer(per_layer)
        selection = push_selection(src_layers, dst_layers, src_cache.cache_desc.num_tensors, per_layer)
        if selection is None:
            return None
        transfer = Transfer(
            direction=Direction.PUSH,
            move=Move.BLOCKS,
            local_cache_id=src_cache.id_for(self),
            local_tensors=selection.local,
            remote_tensors=selection.remote,
            src_blocks=src_blocks,
            dst_blocks=dst_blocks,
            timeout_s=self._timeout_s * selection.num_layers,
            **remote_fields(key),
        )
        return transfer, selection.flaw

    def _run_unless_empty(self, operation: Operation | None) -> None:
        if operation is None:
            self._check_open()
        else:
            self._run(operation)

    def _start_unless_empty(self, operation: Operation | None, cluster_id: int) -> TransferTask:
        if operation is None:
            self._check_open()
            return TransferTask.nothing_to_do(self._engine, cluster_id)
        return self._start(operation)

    def _check_can_push(self, method: str) -> None:
        raise_if_false(
            self._is_remote_access,
            f"{method} needs enable_remote_cache_accessible=True (llm.EnableRemoteCacheAccessible) at init",
        )
