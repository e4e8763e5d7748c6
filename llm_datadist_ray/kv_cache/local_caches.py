"""The caches of a v1 process, each of them once per device under one id (spec api-kvcachemanager §1, §3)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from llm_datadist_ray._native import CacheKind, NativeEngine, NativeError, NativeKey, NativeStatus
from llm_datadist_ray.errors import LLMException, LLMStatusCode
from llm_datadist_ray.kv_cache.devices import Devices
from llm_datadist_ray.kv_cache.errors import v1_codes
from llm_datadist_ray.types import CacheDesc, DataType, Placement


@dataclass(frozen=True, slots=True)
class LocalCache:
    """What was allocated; the caller's CacheDesc may have changed since."""

    cache_id: int
    kind: CacheKind
    data_type: DataType
    shape: tuple[int, ...]
    tensor_bytes: int
    addresses: list[list[int]]
    """``[device][tensor]``"""


class LocalCaches:
    """Any thread. :meth:`deallocate` takes no lock: garbage collection calls it in the middle of anything."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._caches: dict[int, LocalCache] = {}
        # So that all devices count their caches alike.
        self._allocation_lock = threading.Lock()

    def allocate(self, kind: CacheKind, desc: CacheDesc, keys: Sequence[NativeKey]) -> LocalCache:
        """On every device, or on none. LLMException: LLM_DEVICE_OUT_OF_MEMORY, LLM_FAILED (a key is bound already)."""
        found: list[tuple[int, list[int]]] = []
        with self._allocation_lock, v1_codes():
            try:
                for engine in self._devices.engines:
                    found.append(
                        engine.allocate_cache(
                            kind=kind,
                            placement=Placement.DEVICE,
                            num_entries=desc.shape[0],
                            tensor_bytes=desc.size,
                            num_tensors=desc.num_tensors,
                            keys=keys,
                        )
                    )
            except NativeError as error:
                if found:
                    self._give_back([cache_id for cache_id, _ in found])
                if error.native_status == NativeStatus.BUSY:
                    # The core's table is full: as with a full pool, clients wait for other caches to go and try again.
                    raise LLMException(
                        str(error.args[0]), status_code=LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
                    ) from error
                raise
        cache_id = found[0][0]
        assert all(other == cache_id for other, _ in found)
        addresses = [addresses_there for _, addresses_there in found]
        cache = LocalCache(cache_id, kind, desc.data_type, tuple(desc.shape), desc.size, addresses)
        self._caches[cache_id] = cache
        return cache

    def deallocate(self, cache_id: int) -> None:
        """Drops the id on every device. LLMException(LLM_KV_CACHE_NOT_EXIST) when it is not there (any more)."""
        self._devices.each(lambda engine: engine.deallocate_cache(cache_id))
        self._caches.pop(cache_id, None)

    def find(self, cache_id: int) -> LocalCache | None:
        return self._caches.get(cache_id)

    def get(self, cache_id: int) -> LocalCache:
        """LLMException(LLM_KV_CACHE_NOT_EXIST)."""
        cache = self.find(cache_id)
        if cache is None:
            raise LLMException(
                f"there is no cache {cache_id} here, or it was deallocated",
                status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
            )
        return cache

    def _give_back(self, cache_ids: Sequence[int]) -> None:
        """What the first devices have allocated goes, with its keys, and all devices continue with the same id."""
        engines = self._devices.engines
        for engine, cache_id in zip(engines, cache_ids, strict=False):
            engine.unregister_cache(cache_id)
        last_ids = [_use_up_id(engine) for engine in engines]
        for engine, last_id in zip(engines, last_ids, strict=True):
            while last_id < max(last_ids):
                last_id = _use_up_id(engine)


def _use_up_id(engine: NativeEngine) -> int:
    """A registration touches no memory, so the address is as good as any."""
    cache_id = engine.register_cache(
        kind=CacheKind.CONTIGUOUS,
        placement=Placement.DEVICE,
        remote_accessible=False,
        num_entries=1,
        tensor_bytes=1,
        addresses=[1],
    )
    engine.unregister_cache(cache_id)
    return cache_id
