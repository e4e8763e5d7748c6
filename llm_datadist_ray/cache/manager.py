"""CacheManager: registration, pulling and pushing of caches (spec api-cachemanager)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llm_datadist_ray._native import (
    BlockList,
    CacheKind,
    Direction,
    KeyKind,
    Move,
    NativeEngine,
    NativeError,
    NativeKey,
    NativeStatus,
    Transfer,
)
from llm_datadist_ray.cache.arguments import (
    check_block_list,
    check_cache,
    check_not_empty,
    check_pull_size,
    check_push_size,
)
from llm_datadist_ray.cache.not_enabled import not_enabled_method
from llm_datadist_ray.cache.registration import check_desc_and_addrs, check_shape, resolve_remote_accessible
from llm_datadist_ray.cache.remote import check_cache_key, native_keys, push_target_fields, remote_fields
from llm_datadist_ray.cache.selection import (
    DEFAULT_TENSORS_PER_LAYER,
    Selection,
    check_pull_range,
    check_tensors_per_layer,
    pull_selection,
    push_selection,
)
from llm_datadist_ray.checks import check_int64, check_isinstance, check_uint32
from llm_datadist_ray.errors import param_invalid, raise_if_false
from llm_datadist_ray.options import EngineOptions
from llm_datadist_ray.types import BlocksCacheKey, Cache, CacheDesc, CacheKey, CacheKeyByIdAndIndex


class CacheManager:
    """The caches of one initialised :class:`LLMDataDist`, which makes it; see ``LLMDataDist.cache_manager``.

    Any thread may call. Transfers block the caller, at most ``sync_kv_timeout`` (a push: for each of its layers, as one
    sum) from the moment when the link is theirs; those on one link queue up. Each is one native call however many
    pieces it has. Failures are LLMException: LLM_PARAM_INVALID, LLM_KV_CACHE_NOT_EXIST, LLM_NOT_YET_LINK, LLM_TIMEOUT
    (link again), LLM_FEATURE_NOT_ENABLED, LLM_FAILED (also after ``finalize``); the text says which peer, which step,
    how far (spec §11).
    """

    def __init__(self, engine: NativeEngine, options: EngineOptions) -> None:
        self._engine = engine
        self._is_remote_access = options.remote_accessible
        self._timeout_s = options.sync_kv_timeout_ms / 1000
        self._is_call_linked = False

    def set_is_call_linked(self) -> None:
        """``link()`` succeeded: from now on nothing can be registered remote accessible (spec §3.3)."""
        self._is_call_linked = True

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """LLMException(LLM_PARAM_INVALID) unless exactly one of ``req_id`` and ``prefix_id`` is valid (spec §5.2)."""
        check_cache_key(cache_key)

    # Registration (spec §3)

    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        cache_keys: Sequence[CacheKey] = (),
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Registers caller-owned memory as contiguous cache: one address per tensor of shape ``(entries, …)``.

        ``cache_keys[i]`` names entry ``i``; a key that is bound already is ignored. The memory is not touched, and must
        stay until ``unregister_cache`` or ``finalize``. Register before linking (spec §3.4).
        """
        check_desc_and_addrs(cache_desc, addrs)
        check_isinstance("cache_keys", cache_keys, (list, tuple), CacheKey, allow_none=False)
        is_accessible = self._resolve_accessible(cache_desc, remote_accessible)
        num_entries = cache_desc.shape[0]
        raise_if_false(
            len(cache_keys) <= num_entries, f"{len(cache_keys)} cache_keys are more than the {num_entries} entries"
        )
        return self._register(CacheKind.CONTIGUOUS, cache_desc, addrs, native_keys(cache_keys), is_accessible)

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        """As :meth:`register_cache` for tensors of shape ``(blocks, …)``. The newest cache of a ``model_id`` is the one
        that peers find; without a key none finds it by one."""
        check_desc_and_addrs(cache_desc, addrs)
        check_isinstance("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        is_accessible = self._resolve_accessible(cache_desc, remote_accessible)
        keys = [] if blocks_cache_key is None else [NativeKey(KeyKind.BLOCKS, 0, blocks_cache_key.model_id)]
        return self._register(CacheKind.BLOCKS, cache_desc, addrs, keys, is_accessible)

    def unregister_cache(self, cache_id: int) -> None:
        """Forgets a cache and its keys; who still reads it fails. An unknown id is success (spec §3.5)."""
        check_int64("cache_id", cache_id)
        self._engine.unregister_cache(cache_id)

    def _resolve_accessible(self, cache_desc: CacheDesc, remote_accessible: bool | None) -> bool:
        """The last checks that both registrations share, in the order of spec §3.1."""
        is_accessible = resolve_remote_accessible(
            remote_accessible, cache_desc.placement, is_call_linked=self._is_call_linked
        )
        check_shape(cache_desc)
        return is_accessible

    def _register(
        self,
        kind: CacheKind,
        cache_desc: CacheDesc,
        addrs: list[int],
        keys: list[NativeKey],
        is_accessible: bool,
    ) -> Cache:
        cache_id = self._engine.register_cache(
            kind=kind,
            placement=cache_desc.placement,
            remote_accessible=is_accessible,
            num_entries=cache_desc.shape[0],
            tensor_bytes=cache_desc.size,
            addresses=addrs,
            keys=keys,
        )
        return Cache(cache_id, cache_desc, addrs, self, True, kind == CacheKind.BLOCKS)

    # Pulling (spec §5)

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
        :class:`CacheKeyByIdAndIndex` names the source.
        """
        key_classes = (CacheKeyByIdAndIndex,) if self._is_remote_access else (CacheKey, CacheKeyByIdAndIndex)
        check_isinstance("cache_key", cache_key, key_classes)
        if isinstance(cache_key, CacheKey):
            check_cache_key(cache_key)
        check_cache("cache", cache, is_blocks=False)
        check_uint32("batch_index", batch_index)
        check_pull_size(size)
        per_layer = _tensors_per_layer_of(kwargs)
        self._transfer(
            Direction.PULL,
            Move.ENTRY,
            cache,
            remote_fields(cache_key),
            _pull_selection_of(kwargs, cache, per_layer),
            local_batch_index=batch_index,
            size_bytes=size,
        )

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

        Block lists are lists or tuples of int, or int32 / int64 arrays. Keywords as :meth:`pull_cache`.
        """
        check_isinstance("src_cache_key", src_cache_key, (CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey))
        check_cache("dst_cache", dst_cache, is_blocks=True)
        check_block_list("src_blocks", src_blocks)
        check_block_list("dst_blocks", dst_blocks)
        check_not_empty("dst_blocks", dst_blocks)
        per_layer = _tensors_per_layer_of(kwargs)
        remote = remote_fields(src_cache_key)
        if isinstance(src_cache_key, BlocksCacheKey):
            check_not_empty("src_blocks", src_blocks)
            move = Move.BLOCKS
        else:
            if isinstance(src_cache_key, CacheKey):
                check_cache_key(src_cache_key)
            raise_if_false(len(src_blocks) == 0, f"src_blocks should be empty when the source is {src_cache_key}")
            move = Move.ENTRY_TO_BLOCKS
        self._transfer(
            Direction.PULL,
            move,
            dst_cache,
            remote,
            _pull_selection_of(kwargs, dst_cache, per_layer),
            src_blocks=src_blocks,
            dst_blocks=dst_blocks,
        )

    # Pushing (spec §7)

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
        self._check_can_push("push_cache")
        check_isinstance("dst_cache_key", dst_cache_key, CacheKeyByIdAndIndex, allow_none=False)
        check_cache("src_cache", src_cache, is_blocks=False, allow_none=False)
        check_uint32("src_batch_index", src_batch_index)
        check_tensors_per_layer(tensor_num_per_layer)
        num_tensors = src_cache.cache_desc.num_tensors
        selection = push_selection(src_layer_range, dst_layer_range, num_tensors, tensor_num_per_layer)
        check_push_size(size)
        target = push_target_fields(dst_cache_key)
        if selection is not None:
            self._transfer(Direction.PUSH, Move.ENTRY, src_cache, target, selection, local_batch_index=src_batch_index)

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
        self._check_can_push("push_blocks")
        check_isinstance("dst_cache_key", dst_cache_key, BlocksCacheKey)
        check_cache("src_cache", src_cache, is_blocks=True)
        src_blocks = () if src_blocks is None else src_blocks
        check_block_list("src_blocks", src_blocks)
        check_block_list("dst_blocks", dst_blocks)
        check_not_empty("dst_blocks", dst_blocks)
        check_tensors_per_layer(tensor_num_per_layer)
        num_tensors = src_cache.cache_desc.num_tensors
        selection = push_selection(src_layer_range, dst_layer_range, num_tensors, tensor_num_per_layer)
        target = remote_fields(dst_cache_key)
        if selection is not None:
            self._transfer(
                Direction.PUSH,
                Move.BLOCKS,
                src_cache,
                target,
                selection,
                src_blocks=src_blocks,
                dst_blocks=dst_blocks,
            )

    def _check_can_push(self, method: str) -> None:
        raise_if_false(
            self._is_remote_access,
            f"{method} needs enable_remote_cache_accessible=True (llm.EnableRemoteCacheAccessible) at init",
        )

    def _transfer(
        self,
        direction: Direction,
        move: Move,
        local_cache: Cache,
        remote: dict[str, Any],
        selection: Selection,
        **fields: Any,
    ) -> None:
        transfer = Transfer(
            direction=direction,
            move=move,
            local_cache_id=local_cache.cache_id,
            local_tensors=selection.local,
            remote_tensors=selection.remote,
            timeout_s=self._timeout_s * selection.num_layers,
            **remote,
            **fields,
        )
        try:
            self._engine.transfer(transfer)
        except NativeError as error:
            if selection.flaw is not None and error.native_status == NativeStatus.INVALID:
                raise param_invalid(selection.flaw) from error
            raise

    # Not in this version

    allocate_cache = not_enabled_method("allocate_cache", "memory pools")
    allocate_blocks_cache = not_enabled_method("allocate_blocks_cache", "memory pools")
    deallocate_cache = not_enabled_method("deallocate_cache", "memory pools")
    deallocate_blocks_cache = not_enabled_method("deallocate_blocks_cache", "memory pools")
    remove_cache_key = not_enabled_method("remove_cache_key", "memory pools")
    copy_cache = not_enabled_method("copy_cache", "local copies")
    copy_blocks = not_enabled_method("copy_blocks", "local copies")
    swap_blocks = not_enabled_method("swap_blocks", "local copies")
    transfer_cache_async = not_enabled_method("transfer_cache_async", "layer-wise background transfers")
    remap_registered_memory = not_enabled_method("remap_registered_memory", "remappings of registered memory")


def _tensors_per_layer_of(kwargs: dict[str, Any]) -> int:
    """A keyword extra of the pull methods (spec §5.1); any keyword that is not looked at is ignored."""
    per_layer = kwargs.get("tensor_num_per_layer", DEFAULT_TENSORS_PER_LAYER)
    check_tensors_per_layer(per_layer)
    return per_layer


def _pull_selection_of(kwargs: dict[str, Any], dst_cache: Cache, per_layer: int) -> Selection:
    src_layers = check_pull_range("src_layer_range", kwargs.get("src_layer_range"))
    dst_layers = check_pull_range("dst_layer_range", kwargs.get("dst_layer_range"))
    return pull_selection(src_layers, dst_layers, dst_cache.cache_desc.num_tensors, per_layer)
