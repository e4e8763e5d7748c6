"""KvCacheManager: the v1 manager (spec api-kvcachemanager)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llm_datadist_ray._native import CacheKind, Direction, Move, NativeEngine, NativeError, NativeKey, Transfer
from llm_datadist_ray.cache.arguments import check_pull_size, check_shape
from llm_datadist_ray.cache.local_copies import check_swap, flatten_copy_block_info
from llm_datadist_ray.cache.remote import check_cache_key, native_blocks_keys, native_key, native_keys, remote_fields
from llm_datadist_ray.cache.selection import explained, pull_selection
from llm_datadist_ray.checks import check_int32, check_isinstance, check_uint32, check_uint64
from llm_datadist_ray.errors import LLMException, LLMStatusCode, raise_if_false
from llm_datadist_ray.kv_cache.arguments import (
    check_block_bytes,
    check_block_lists,
    check_cache_offset,
    check_copied_blocks,
    check_desc,
    check_device_cache,
    check_kv_cache,
    check_num_devices,
)
from llm_datadist_ray.kv_cache.busy_links import BusyLinks
from llm_datadist_ray.kv_cache.devices import Devices
from llm_datadist_ray.kv_cache.layers import LayerPush, check_layer_push
from llm_datadist_ray.kv_cache.local_caches import LocalCaches
from llm_datadist_ray.types import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    KvCache,
    LayerSynchronizer,
    LLMRole,
    Placement,
    TransferConfig,
)

if TYPE_CHECKING:
    from llm_datadist_ray.types import Tensor


class KvCacheManager:
    """The caches of one process that was initialised in v1; see ``LLMDataDist.kv_cache_manager``.

    What may be called depends on the role, which ``switch_role`` changes; the role is checked first. Any thread may
    call. Pulls block the caller, at most ``sync_kv_timeout``; a link that is in use is not waited for
    (LLM_LINK_BUSY). Every operation applies to all devices of the process, and the first device that fails decides.

    Failures are LLMException: LLM_PARAM_INVALID (arguments, role), LLM_KV_CACHE_NOT_EXIST, LLM_NOT_YET_LINK,
    LLM_LINK_BUSY, LLM_WAIT_PROCESS_TIMEOUT (link again), LLM_DEVICE_OUT_OF_MEMORY, LLM_FAILED (a key is bound already;
    also everything after ``finalize``).
    """

    def __init__(self, devices: Devices, busy_links: BusyLinks, role: LLMRole, timeout_ms: int) -> None:
        self._devices = devices
        self._busy_links = busy_links
        self._timeout_s = timeout_ms / 1000
        self._caches = LocalCaches(devices)
        self._role = role
        self._is_initialized = True

    def is_initialized(self) -> bool:
        """False after ``finalize``."""
        return self._is_initialized

    @property
    def role(self) -> LLMRole:
        return self._role

    def set_role(self, role: LLMRole) -> None:
        """For ``switch_role``."""
        self._role = role

    def set_finalized(self) -> None:
        """For ``finalize``, before the engines go."""
        self._is_initialized = False

    # Allocation and release (spec §3)

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> KvCache:
        """A contiguous cache of shape ``(entries, …)`` in the device pool; contents are whatever was there before.

        ``cache_keys[i]`` names entry ``i`` (PROMPT only); of a key given twice the last entry is the one, and keys
        beyond the last entry name nothing. The cache is deallocated when its last reference goes.
        """
        self._check_initialized("allocate_cache")
        check_isinstance("cache_keys", cache_keys, (list, tuple), CacheKey, allow_none=False)
        check_desc(cache_desc)
        if cache_keys:
            self._check_role("allocate_cache with cache_keys", LLMRole.PROMPT)
        check_shape(cache_desc)
        named = native_keys(cache_keys[: cache_desc.shape[0]])
        last_of_each = {(key.kind, key.id, key.model_id): key for key in named}
        return self._allocate(CacheKind.CONTIGUOUS, cache_desc, list(last_of_each.values()))

    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None) -> KvCache:
        """As :meth:`allocate_cache` for tensors of shape ``(blocks, …)``. The key is not for a DECODER."""
        self._check_initialized("allocate_blocks_cache")
        check_isinstance("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        check_desc(cache_desc)
        if blocks_cache_key is not None:
            self._check_role("allocate_blocks_cache with blocks_cache_key", LLMRole.PROMPT, LLMRole.MIX)
        check_shape(cache_desc)
        return self._allocate(CacheKind.BLOCKS, cache_desc, native_blocks_keys(blocks_cache_key))

    def _allocate(self, kind: CacheKind, cache_desc: CacheDesc, keys: Sequence[NativeKey]) -> KvCache:
        cache = self._caches.allocate(kind, cache_desc, keys)
        return KvCache(cache.cache_id, cache_desc, cache.addresses, self)

    def deallocate_cache(self, cache: KvCache) -> None:
        """Drops the id. Contiguous memory goes back when no key is bound to it any more, blocks at once."""
        self._check_initialized("deallocate_cache")
        check_device_cache("cache", cache)
        self._caches.deallocate(cache.id_for(self))
        cache.mark_deallocated()

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Unbinds a key, and releases the memory if nothing else holds it. PROMPT. An unknown key: nothing."""
        self._check_can("remove_cache_key", LLMRole.PROMPT)
        check_isinstance("cache_key", cache_key, CacheKey, allow_none=False)
        key = native_key(cache_key)
        self._devices.each(lambda engine: engine.remove_cache_key(key))

    # Pulling (spec §4, §5)

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        kv_cache: KvCache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> None:
        """Copies ``size`` bytes (-1: what follows the offset) of one entry of a PROMPT's cache into entry
        ``batch_index`` of a local one, in all tensors. DECODER.

        Keywords: ``src_layer_range``, ``dst_layer_range``, ``tensor_num_per_layer`` (2); ``src_cache_offset``,
        ``dst_cache_offset``: bytes inside the entries. Others are ignored. Success consumes the request key of the
        entry, unless one of the offsets was given, be it 0; with layers: once all tensors have been pulled.
        """
        self._check_can("pull_cache", LLMRole.DECODER)
        check_isinstance("cache_key", cache_key, (CacheKey, CacheKeyByIdAndIndex), allow_none=False)
        if isinstance(cache_key, CacheKey):
            check_cache_key(cache_key)
        check_device_cache("kv_cache", kv_cache)
        check_uint32("batch_index", batch_index)
        check_pull_size(size)
        selection = pull_selection(kv_cache, kwargs)
        src_offset = check_cache_offset("src_cache_offset", kwargs.get("src_cache_offset"))
        dst_offset = check_cache_offset("dst_cache_offset", kwargs.get("dst_cache_offset"))
        transfer = Transfer(
            direction=Direction.PULL,
            move=Move.ENTRY,
            local_cache_id=kv_cache.id_for(self),
            local_batch_index=batch_index,
            local_tensors=selection.local,
            remote_tensors=selection.remote,
            size_bytes=size,
            local_offset_bytes=dst_offset or 0,
            remote_offset_bytes=src_offset or 0,
            keep_key=src_offset is not None or dst_offset is not None,
            timeout_s=self._timeout_s,
            **remote_fields(cache_key),
        )
        self._pull("pull_cache", cache_key.cluster_id, transfer, selection.flaw)

    def pull_blocks(
        self,
        prompt_cache_key: BlocksCacheKey,
        decoder_kv_cache: KvCache,
        prompt_blocks: list[int],
        decoder_blocks: list[int],
        **kwargs: Any,
    ) -> None:
        """Copies block ``prompt_blocks[k]`` of a PROMPT's blocks cache to block ``decoder_blocks[k]``, in all tensors.
        DECODER. Keywords as :meth:`pull_cache`, without the offsets; nothing is consumed."""
        self._check_can("pull_blocks", LLMRole.DECODER)
        check_isinstance("prompt_cache_key", prompt_cache_key, BlocksCacheKey, allow_none=False)
        check_device_cache("decoder_kv_cache", decoder_kv_cache)
        check_block_lists(prompt_blocks, decoder_blocks)
        selection = pull_selection(decoder_kv_cache, kwargs)
        check_block_bytes(decoder_kv_cache.cache_desc)
        transfer = Transfer(
            direction=Direction.PULL,
            move=Move.BLOCKS,
            local_cache_id=decoder_kv_cache.id_for(self),
            local_tensors=selection.local,
            remote_tensors=selection.remote,
            src_blocks=prompt_blocks,
            dst_blocks=decoder_blocks,
            timeout_s=self._timeout_s,
            **remote_fields(prompt_cache_key),
        )
        self._pull("pull_blocks", prompt_cache_key.cluster_id, transfer, selection.flaw)

    def _pull(self, method: str, cluster_id: int, transfer: Transfer, flaw: str | None) -> None:
        """``flaw``: what the tensor selection has that the native core refuses."""

        def pull(engine: NativeEngine) -> None:
            try:
                engine.transfer(transfer)
            except NativeError as error:
                raise explained(error, flaw) from None

        with self._busy_links.use(cluster_id, method):
            self._devices.at_once(pull)

    # Pushing (spec §7)

    def transfer_cache_async(
        self,
        src_cache: KvCache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[TransferConfig],
        src_block_indices: Sequence[int] | None = None,
        dst_block_indices: Sequence[int] | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Pushes layer after layer in a thread of its own, each when the synchronizer says that it is ready. PROMPT.

        Goes to ``dst_addrs`` of each config, which must lie inside a cache of that peer: entry ``src_batch_index``, or
        with block lists block ``src_block_indices[k]`` to ``dst_addrs + dst_block_indices[k]`` × block bytes. Each
        layer may take ``sync_kv_timeout``. LLMException(LLM_FEATURE_NOT_ENABLED) on several devices.
        """
        self._check_can("transfer_cache_async", LLMRole.PROMPT)
        raise_if_false(
            len(self._devices) == 1,
            f"transfer_cache_async is for one device, this process has {len(self._devices)}",
            LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )
        check_layer_push(
            src_cache,
            layer_synchronizer,
            transfer_configs,
            src_block_indices,
            dst_block_indices,
            dst_block_memory_size,
        )
        cache_id = src_cache.id_for(self)
        cache = self._caches.find(cache_id)
        push = LayerPush(
            engine=self._devices.first,
            busy_links=self._busy_links,
            source=src_cache,
            cache_id=cache_id,
            is_blocks=cache is not None and cache.kind == CacheKind.BLOCKS,
            src_blocks=tuple(src_block_indices or ()),
            dst_blocks=tuple(dst_block_indices or ()),
            dst_block_bytes=dst_block_memory_size or 0,
            timeout_s=self._timeout_s,
        )
        job = push.start(layer_synchronizer, transfer_configs)
        return CacheTask(job, timeout_code=LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)

    # Local operations (spec §6)

    def copy_cache(
        self,
        dst: KvCache,
        src: KvCache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """Copies bytes ``offset`` to ``offset + size`` (-1: to the end) of entry ``src_batch_index`` of ``src`` to the
        same place in entry ``dst_batch_index`` of ``dst``, in all tensors. The destination comes first."""
        self._check_initialized("copy_cache")
        check_device_cache("dst", dst)
        check_device_cache("src", src)
        check_uint32("dst_batch_index", dst_batch_index)
        check_uint32("src_batch_index", src_batch_index)
        check_uint64("offset", offset)
        check_pull_size(size)
        check_isinstance("req_id", req_id, int)
        self._devices.each(
            lambda engine: engine.copy_entry(
                src_cache_id=src.id_for(self),
                dst_cache_id=dst.id_for(self),
                src_batch_index=src_batch_index,
                dst_batch_index=dst_batch_index,
                offset_bytes=offset,
                size_bytes=size,
            )
        )

    def copy_blocks(self, cache: KvCache, copy_block_info: dict[int, list[int]]) -> None:
        """Copies block ``s`` to every block listed under ``s``, in all tensors of one cache."""
        self._check_initialized("copy_blocks")
        check_device_cache("cache", cache)
        src_blocks, dst_blocks = flatten_copy_block_info(copy_block_info)
        check_copied_blocks(src_blocks, dst_blocks)
        if src_blocks:
            self._devices.each(
                lambda engine: engine.copy_blocks(
                    cache_id=cache.id_for(self), src_blocks=src_blocks, dst_blocks=dst_blocks
                )
            )

    def swap_blocks(self, src: KvCache, dst: KvCache, src_to_dst: dict[int, int]) -> None:
        """Copies block ``s`` of ``src`` to block ``src_to_dst[s]`` of ``dst``, in all tensors: one way, whatever the
        name says, between a host cache (``KvCache.create_cpu_cache``) and a device cache."""
        self._check_initialized("swap_blocks")
        check_kv_cache("src", src)
        check_kv_cache("dst", dst)
        block_bytes = check_swap(("src", "dst"), src, dst, src_to_dst)
        check_num_devices("src", src, len(self._devices))
        check_num_devices("dst", dst, len(self._devices))
        if not src_to_dst:
            return
        self._check_unchanged(src if src.cache_desc.placement == Placement.DEVICE else dst)
        addresses = zip(src.per_device_tensor_addrs, dst.per_device_tensor_addrs, strict=True)
        for engine, (src_addrs, dst_addrs) in zip(self._devices.engines, addresses, strict=True):
            try:
                engine.copy_raw_blocks(
                    src_addresses=src_addrs,
                    dst_addresses=dst_addrs,
                    block_bytes=block_bytes,
                    src_blocks=list(src_to_dst),
                    dst_blocks=list(src_to_dst.values()),
                )
            except NativeError as error:
                raise LLMException(str(error.args[0]), status_code=LLMStatusCode.LLM_FAILED) from error

    def _check_unchanged(self, cache: KvCache) -> None:
        """Sizes of raw copies come from the description, which is the caller's and has an ``update_dim``."""
        allocated, described = self._caches.get(cache.id_for(self)).tensor_bytes, cache.cache_desc.size
        raise_if_false(
            allocated == described,
            f"the tensors of {cache} were allocated with {allocated} bytes, and its cache_desc says {described} now",
        )

    def get_cache_tensors(self, cache: KvCache, tensor_index: int = 0) -> list[Tensor]:
        """Tensor ``tensor_index`` of the cache, once per device: views of its memory, not copies. They do not keep it:
        hold the cache while they are used."""
        self._check_initialized("get_cache_tensors")
        check_kv_cache("cache", cache)
        check_int32("tensor_index", tensor_index)
        num_tensors = cache.cache_desc.num_tensors
        raise_if_false(
            0 <= tensor_index < num_tensors,
            f"tensor_index should be in range [0, {num_tensors}), but got {tensor_index}",
        )
        from llm_datadist_ray.types import Tensor, TensorDesc  # they need NumPy, and nothing else here does

        held = self._caches.get(cache.id_for(self))
        desc = TensorDesc(held.data_type, held.shape)
        return [Tensor(addresses[tensor_index], desc) for addresses in held.addresses]

    # What every method begins with (spec §2)

    def _check_can(self, method: str, *roles: LLMRole) -> None:
        self._check_initialized(method)
        self._check_role(method, *roles)

    def _check_initialized(self, method: str) -> None:
        raise_if_false(
            self._is_initialized, f"{method}: LLMDataDist was finalized, init it again", LLMStatusCode.LLM_FAILED
        )

    def _check_role(self, what: str, *roles: LLMRole) -> None:
        names = " or ".join(role.name for role in roles)
        raise_if_false(self._role in roles, f"{what} is for {names}, and this is a {self._role.name}")
