"""A local cache as the managers hand it out: :class:`Cache` (v2) and :class:`KvCache` (v1) (spec api-types §7)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from llm_datadist_ray.checks import check_inner, check_int64, check_isinstance
from llm_datadist_ray.errors import LLMException, raise_if_false
from llm_datadist_ray.types.cache_desc import CacheDesc
from llm_datadist_ray.types.enums import Placement

CPU_CACHE_ID = -1
"""Id of a cache that exists only as a description of the caller's host memory."""
_NO_CACHE_ID = 0

_log = logging.getLogger("llm_datadist_ray.types.cache")


class Cache:
    """A cache of the v2 manager; made by it or by :meth:`create_cpu_cache`, never by users (spec api-types §7).

    Nothing happens when it is garbage collected: memory is freed by the manager's ``deallocate_*`` methods only.
    """

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        tensor_addrs: list[int],
        cache_manager: Any,
        is_registered: bool,
        is_blocks_cache: bool,
    ) -> None:
        check_int64("cache_id", cache_id)
        check_isinstance("cache_desc", cache_desc, CacheDesc, allow_none=False)
        check_isinstance("tensor_addrs", tensor_addrs, list, int, allow_none=False)
        self._cache_id = cache_id
        self._cache_desc = cache_desc
        self._tensor_addrs = tensor_addrs
        self._cache_manager = cache_manager
        self._is_registered = is_registered
        self._is_blocks_cache = is_blocks_cache

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int]) -> Cache:
        """Describes host memory of the caller for ``swap_blocks``: one address per tensor; registers nothing.

        TypeError unless ``addrs`` is a list of int; LLMException(LLM_PARAM_INVALID) unless the placement is HOST and
        there are ``num_tensors`` addresses.
        """
        check_isinstance("addrs", addrs, list, int, allow_none=False)
        _check_cpu_desc(cache_desc)
        _check_num_addrs("addrs", addrs, cache_desc)
        return cls(CPU_CACHE_ID, cache_desc, addrs, None, False, True)

    @property
    def cache_id(self) -> int:
        """1, 2, 3 … in the order of registration and allocation; -1 for a CPU cache."""
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        return self._cache_desc

    @property
    def tensor_addrs(self) -> list[int]:
        """Base address of every tensor; empty once deallocated."""
        return self._tensor_addrs

    @property
    def is_blocks_cache(self) -> bool:
        return self._is_blocks_cache

    @property
    def is_registered(self) -> bool:
        """The memory is the caller's and not from a pool."""
        return self._is_registered

    def id_for(self, cache_manager: object) -> int:
        """For the manager: the id there, or 0, which no cache has, when an earlier one has made this cache: after each
        ``init`` ids begin anew."""
        maker = self._cache_manager
        return self._cache_id if maker is cache_manager or maker is None else _NO_CACHE_ID

    def mark_deallocated(self) -> None:
        """For the manager: the addresses are no longer this cache's. Repeatable."""
        self._tensor_addrs = []

    def __repr__(self) -> str:
        return (
            f"Cache(cache_id={self._cache_id}, num_tensor_addrs={len(self._tensor_addrs)}, "
            f"is_blocks_cache={self._is_blocks_cache})"
        )


class KvCacheOwner(Protocol):
    """What a :class:`KvCache` needs of its manager."""

    def is_initialized(self) -> bool: ...

    def deallocate_cache(self, cache: KvCache) -> None: ...


class KvCache:
    """A cache of the v1 manager, once per device of the process (spec api-types §7).

    Dropping the last reference to a valid one deallocates it while the manager is initialised, in whatever thread that
    happens.
    """

    # Class-level, so that __del__ of an object whose constructor raised finds nothing to do.
    _is_valid = False
    _kv_cache_manager: KvCacheOwner | None = None

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        per_device_tensor_addrs: list[list[int]],
        kv_cache_manager: KvCacheOwner | None,
    ) -> None:
        check_int64("cache_id", cache_id)
        check_isinstance("cache_desc", cache_desc, CacheDesc, allow_none=False)
        check_isinstance("per_device_tensor_addrs", per_device_tensor_addrs, list, list, allow_none=False)
        for device, addrs in enumerate(per_device_tensor_addrs):
            check_inner(f"per_device_tensor_addrs[{device}]", addrs, int)
        self._cache_id = cache_id
        self._cache_desc = cache_desc
        self._per_device_tensor_addrs = per_device_tensor_addrs
        self._kv_cache_manager = kv_cache_manager
        self._is_valid = True

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int] | list[list[int]]) -> KvCache:
        """Describes host memory of the caller for ``swap_blocks``: a list of addresses, or one such list per device.

        TypeError for other element types; LLMException(LLM_PARAM_INVALID) for an empty or mixed list, a placement other
        than HOST, or a number of addresses other than ``num_tensors``.
        """
        check_isinstance("addrs", addrs, list, (int, list), allow_none=False)
        raise_if_false(addrs, "addrs should not be empty")
        nested = [item for item in addrs if isinstance(item, list)]
        raise_if_false(
            len(nested) in (0, len(addrs)),
            f"the element types of addrs should be consistent: {len(nested)} of {len(addrs)} elements are lists",
        )
        per_device: list[list[int]] = nested or [addrs]  # type: ignore[list-item]
        for device, device_addrs in enumerate(per_device):
            check_inner(f"addrs[{device}]", device_addrs, int)
        _check_cpu_desc(cache_desc)
        for device, device_addrs in enumerate(per_device):
            _check_num_addrs(f"addrs[{device}]" if nested else "addrs", device_addrs, cache_desc)
        return cls(CPU_CACHE_ID, cache_desc, per_device, None)

    @property
    def cache_id(self) -> int:
        """1, 2, 3 … in the order of allocation; -1 for a CPU cache."""
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        return self._cache_desc

    @property
    def per_device_tensor_addrs(self) -> list[list[int]]:
        """Base address ``[device][tensor]``; empty once deallocated."""
        return self._per_device_tensor_addrs

    @property
    def is_valid(self) -> bool:
        """Not deallocated yet."""
        return self._is_valid

    def id_for(self, kv_cache_manager: object) -> int:
        """As :meth:`Cache.id_for`."""
        maker = self._kv_cache_manager
        return self._cache_id if maker is kv_cache_manager or maker is None else _NO_CACHE_ID

    def mark_deallocated(self) -> None:
        """For the manager: the addresses are no longer this cache's. Repeatable."""
        self._is_valid = False
        self._per_device_tensor_addrs = []

    def __del__(self) -> None:
        manager = self._kv_cache_manager
        if not self._is_valid or manager is None or not manager.is_initialized():
            return
        try:
            manager.deallocate_cache(self)
        except LLMException as error:
            # A finaliser has no caller to raise to; a leak must still be visible somewhere.
            _log.warning("cache %d was garbage collected but could not be deallocated: %s", self._cache_id, error)

    def __repr__(self) -> str:
        return f"KvCache(cache_id={self._cache_id}, num_devices={len(self._per_device_tensor_addrs)})"


def _check_cpu_desc(cache_desc: CacheDesc) -> None:
    check_isinstance("cache_desc", cache_desc, CacheDesc, allow_none=False)
    raise_if_false(
        cache_desc.placement == Placement.HOST,
        f"create_cpu_cache needs a cache_desc with placement {Placement.HOST}, but got {cache_desc.placement}",
    )


def _check_num_addrs(name: str, addrs: Sequence[int], cache_desc: CacheDesc) -> None:
    raise_if_false(
        len(addrs) == cache_desc.num_tensors,
        f"{name} should have one address for each of {cache_desc.num_tensors} tensors, but has {len(addrs)}",
    )
