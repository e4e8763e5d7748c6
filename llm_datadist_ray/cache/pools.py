"""Caches in the engine's own memory pools, and their life (spec api-cachemanager §2.3, §2.4, §4)."""

from __future__ import annotations

from collections.abc import Sequence

from llm_datadist_ray import option_keys
from llm_datadist_ray._native import CacheKind, NativeError, NativeKey, NativeStatus, PoolInfo
from llm_datadist_ray.cache.arguments import check_cache, check_shape
from llm_datadist_ray.cache.operation import ManagerPart
from llm_datadist_ray.cache.remote import native_blocks_keys, native_key, native_keys
from llm_datadist_ray.checks import check_isinstance
from llm_datadist_ray.errors import LLMException, LLMStatusCode, param_invalid, raise_if_false
from llm_datadist_ray.pool_config import PoolConfig
from llm_datadist_ray.types import BlocksCacheKey, Cache, CacheDesc, CacheKey, Placement

_POOL_OPTIONS = {
    Placement.DEVICE: ("mem_pool_cfg", option_keys.MEM_POOL_CONFIG),
    Placement.HOST: ("host_mem_pool_cfg", option_keys.HOST_MEM_POOL_CONFIG),
}


class Pools(ManagerPart):
    """Part of :class:`CacheManager`."""

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> Cache:
        """A new contiguous cache in the pool of its placement; ``cache_keys[i]`` names entry ``i``.

        Contents are not initialised. The memory stays until :meth:`deallocate_cache` was called and every key is gone:
        pulled in two-sided mode, or removed. LLMException: LLM_OUT_OF_MEMORY (nothing is kept), LLM_PARAM_INVALID (no
        pool for that placement, a key that is bound already, a key twice, more keys than entries, the shape).
        """
        check_isinstance("cache_desc", cache_desc, CacheDesc)
        check_isinstance("cache_keys", cache_keys, (list, tuple), CacheKey, allow_none=False)
        self._check_can_allocate(cache_desc)
        num_entries = cache_desc.shape[0]
        if len(cache_keys) <= num_entries:
            return self._allocate(CacheKind.CONTIGUOUS, cache_desc, native_keys(cache_keys))
        # Memory is looked for before keys are counted (spec §4.1).
        cache = self._allocate(CacheKind.CONTIGUOUS, cache_desc, [])
        self._engine.unregister_cache(cache.cache_id)
        raise param_invalid(f"{len(cache_keys)} cache_keys are more than the {num_entries} entries")

    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None) -> Cache:
        """As :meth:`allocate_cache` for tensors of shape ``(blocks, …)``. Without a key no peer finds it by one."""
        check_isinstance("cache_desc", cache_desc, CacheDesc)
        check_isinstance("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        self._check_can_allocate(cache_desc)
        return self._allocate(CacheKind.BLOCKS, cache_desc, native_blocks_keys(blocks_cache_key))

    def deallocate_cache(self, cache: Cache) -> None:
        """Gives up an allocated contiguous cache; peers still find it while it has keys (spec §2.4).

        A registered cache, one that was deallocated before or made before ``finalize``, and a CPU cache: nothing is
        freed. ``cache.tensor_addrs``
        becomes ``[]``. LLMException: LLM_PARAM_INVALID for a blocks cache, LLM_FEATURE_NOT_ENABLED without a pool.
        """
        self._deallocate("deallocate_cache", cache, is_blocks=False)

    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Frees an allocated blocks cache at once, together with its key; otherwise as :meth:`deallocate_cache`."""
        self._deallocate("deallocate_blocks_cache", cache, is_blocks=True)

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Unbinds a key of an allocated cache, by its prefix id when that is valid, else by its request id. The last
        key frees a cache that was deallocated. An unknown key, a placeholder and one of a registered cache are success
        without effect. LLMException(LLM_FEATURE_NOT_ENABLED) without a pool."""
        check_isinstance("cache_key", cache_key, CacheKey)
        key, is_placeholder = native_key(cache_key), cache_key.is_placeholder
        self._check_has_pool("remove_cache_key")
        if is_placeholder:
            self._check_open()
        else:
            self._engine.remove_cache_key(key)

    def pool_status(self, placement: Placement = Placement.DEVICE) -> PoolInfo:
        """How full the pool of that placement is, and in how many pieces. LLMException(LLM_FEATURE_NOT_ENABLED) when
        there is none."""
        check_isinstance("placement", placement, Placement, allow_none=False)
        if self._pool(placement) is None:
            raise LLMException(_no_pool_text(placement), status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED)
        return self._engine.pool_info(placement)

    def _pool(self, placement: Placement) -> PoolConfig | None:
        return self._options.mem_pool if placement == Placement.DEVICE else self._options.host_mem_pool

    def _check_can_allocate(self, cache_desc: CacheDesc) -> None:
        """In the order of spec §4.1."""
        raise_if_false(cache_desc.num_tensors > 0, "cache_desc should have num_tensors greater than zero, but got 0")
        placement = cache_desc.placement
        raise_if_false(self._pool(placement) is not None, _no_pool_text(placement))
        check_shape(cache_desc)

    def _check_has_pool(self, method: str) -> None:
        raise_if_false(
            self._options.mem_pool is not None or self._options.host_mem_pool is not None,
            f"{method} needs a memory pool, and init had neither mem_pool_cfg nor host_mem_pool_cfg",
            LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )

    def _allocate(self, kind: CacheKind, cache_desc: CacheDesc, keys: Sequence[NativeKey]) -> Cache:
        cache_id, addresses = self._engine.allocate_cache(
            kind=kind,
            placement=cache_desc.placement,
            num_entries=cache_desc.shape[0],
            tensor_bytes=cache_desc.size,
            num_tensors=cache_desc.num_tensors,
            keys=keys,
        )
        return Cache(cache_id, cache_desc, addresses, self, False, kind == CacheKind.BLOCKS)

    def _deallocate(self, method: str, cache: Cache, *, is_blocks: bool) -> None:
        check_cache("cache", cache, is_blocks=is_blocks)
        self._check_has_pool(method)
        try:
            self._engine.deallocate_cache(cache.id_for(self))
        except NativeError as error:
            if error.native_status != NativeStatus.NO_CACHE:
                raise
        cache.mark_deallocated()


def _no_pool_text(placement: Placement) -> str:
    name, key = _POOL_OPTIONS[placement]
    return f"there is no memory pool for {placement}: init had no {name} ({key})"
