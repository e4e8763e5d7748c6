"""Registration of caller-owned memory as caches (spec api-cachemanager §3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llm_datadist_ray._native import CacheKind, NativeKey
from llm_datadist_ray.cache.arguments import check_shape
from llm_datadist_ray.cache.operation import ManagerPart
from llm_datadist_ray.cache.remote import native_blocks_keys, native_keys
from llm_datadist_ray.checks import check_int64, check_isinstance
from llm_datadist_ray.errors import raise_if_false
from llm_datadist_ray.types import BlocksCacheKey, Cache, CacheDesc, CacheKey, Placement


class Registration(ManagerPart):
    """Part of :class:`CacheManager`."""

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
        _check_desc_and_addrs(cache_desc, addrs)
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
        _check_desc_and_addrs(cache_desc, addrs)
        check_isinstance("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        is_accessible = self._resolve_accessible(cache_desc, remote_accessible)
        return self._register(CacheKind.BLOCKS, cache_desc, addrs, native_blocks_keys(blocks_cache_key), is_accessible)

    def unregister_cache(self, cache_id: int) -> None:
        """Forgets a cache and its keys; who still reads it fails. An unknown id is success. The id of an allocated
        cache: its memory goes back to the pool (spec §3.5)."""
        check_int64("cache_id", cache_id)
        self._engine.unregister_cache(cache_id)

    def set_is_call_linked(self) -> None:
        """``link()`` succeeded: from now on nothing can be registered remote accessible (spec §3.3)."""
        self._is_call_linked = True

    def _resolve_accessible(self, cache_desc: CacheDesc, remote_accessible: Any) -> bool:
        """The last checks that both registrations share, in the order of spec §3.1, and the default of §3.3: device
        memory only, and nothing after ``link()``."""
        is_linked = self._is_call_linked
        check_isinstance("remote_accessible", remote_accessible, bool)
        raise_if_false(
            not (remote_accessible and is_linked), "remote_accessible=True is not supported after link() was called"
        )
        check_shape(cache_desc)
        if remote_accessible is None:
            return cache_desc.placement == Placement.DEVICE and not is_linked
        return bool(remote_accessible)

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


def _check_desc_and_addrs(cache_desc: Any, addrs: Any) -> None:
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
