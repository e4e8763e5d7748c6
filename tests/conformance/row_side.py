"""Functions that the tests of the rows run in a process of a pair: ``end.process.run(function, ...)``."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from llm_datadist_ray import (
    Cache,
    CacheDesc,
    CacheTask,
    DataType,
    KvCache,
    LayerSynchronizer,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from llm_datadist_ray.cache import CacheManager

if TYPE_CHECKING:
    from tests.conformance.side import Side


@dataclass(frozen=True)
class Named:
    """Stands for the cache of that name in the arguments of :func:`manager_call`."""

    name: str


def pattern(seed: int, tensors: int, entries: int, entry_bytes: int) -> np.ndarray:
    """``[tensors, entries, entry_bytes]``, the same in every process."""
    return np.random.default_rng(seed).integers(0, 256, (tensors, entries, entry_bytes), np.uint8)


def manager_call(side: Side, method: str, *args: Any, **kwargs: Any) -> Any:
    """A method of the cache manager, or of the v1 one."""
    given = [side._caches[arg.name] if isinstance(arg, Named) else arg for arg in args]
    return _portable(getattr(_manager(side), method)(*given, **kwargs))


def _manager(side: Side) -> Any:
    try:
        return side.dist.cache_manager
    except LLMException:
        return side.dist.kv_cache_manager


def _portable(value: Any) -> Any:
    if isinstance(value, (Cache, KvCache)):
        return value.cache_id
    return value


def init_with(side: Side, role: LLMRole, cluster_id: int, options: dict[str, str]) -> None:
    """For v1, which :meth:`Side.init` does not know."""
    side._dist = LLMDataDist(role, cluster_id)
    side.dist.init(options)


# Caches of a pool


def allocate(
    side: Side,
    name: str,
    seed: int,
    shape: tuple[int, int, int],
    *,
    blocks: bool,
    keys: Any,
    placement: Placement = Placement.DEVICE,
) -> int:
    """``shape`` is tensors, entries, bytes of an entry; ``keys`` a list, or the key of a blocks cache."""
    tensors, entries, entry_bytes = shape
    desc = CacheDesc(tensors, [entries, entry_bytes], DataType.DT_UINT8, placement)
    manager = _manager(side)
    cache = manager.allocate_blocks_cache(desc, keys) if blocks else manager.allocate_cache(desc, keys)
    side._caches[name] = cache
    for view, content in zip(_views(cache), pattern(seed, *shape), strict=True):
        view[:] = content
    return int(cache.cache_id)


def contents(side: Side, name: str) -> bytes:
    return b"".join(view.tobytes() for view in _views(side._caches[name]))


def tensor_addrs(side: Side, name: str) -> list[int]:
    return list(_addrs(side._caches[name]))


def _addrs(cache: Any) -> list[int]:
    """``[]`` once deallocated."""
    if isinstance(cache, Cache):
        return cache.tensor_addrs
    return cache.per_device_tensor_addrs[0] if cache.per_device_tensor_addrs else []


def _views(cache: Any) -> list[np.ndarray]:
    shape, size = cache.cache_desc.shape, cache.cache_desc.size
    return [
        np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8).reshape(shape)
        for address in _addrs(cache)
    ]


def forget(side: Side, name: str) -> None:
    """Drops what may be the last reference."""
    del side._caches[name]


# CPU caches


def cpu_cache(side: Side, name: str, seed: int, shape: tuple[int, int, int]) -> None:
    tensors, entries, entry_bytes = shape
    memory = pattern(seed, *shape)
    side._kept.append(memory)
    desc = CacheDesc(tensors, [entries, entry_bytes], DataType.DT_UINT8, Placement.HOST)
    addrs = [memory[tensor].ctypes.data for tensor in range(tensors)]
    cls: Any = Cache if isinstance(_manager(side), CacheManager) else KvCache
    side._caches[name] = cls.create_cpu_cache(desc, addrs)


# Layer-wise transfers


_TRANSFER = "the task of start_transfer"  # among the caches, and so gone with them


class Layers(LayerSynchronizer):
    """Ready, but for layers ``refuse`` and ``fail``; ``gate`` is waited for before the first layer."""

    def __init__(self, refuse: int | None, fail: int | None, gate: threading.Event) -> None:
        self.calls: list[tuple[int, int | None]] = []
        self._refuse = refuse
        self._fail = fail
        self._gate = gate

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self._gate.wait()
        self.calls.append((layer_index, timeout_in_millis))
        if layer_index == self._fail:
            raise ValueError("the model has ended")
        return layer_index != self._refuse


def start_transfer(
    side: Side,
    name: str,
    configs: list[Any],
    *args: Any,
    refuse: int | None = None,
    fail: int | None = None,
    closed: bool = False,
) -> None:
    """``closed``: no layer is ready before :func:`open_gate`."""
    gate = threading.Event()
    if not closed:
        gate.set()
    layers = Layers(refuse, fail, gate)
    task = _manager(side).transfer_cache_async(side._caches[name], layers, configs, *args)
    assert isinstance(task, CacheTask)
    side._caches[_TRANSFER] = task, layers, gate  # type: ignore[assignment]


def _transfer(side: Side) -> Any:
    return side._caches[_TRANSFER]


def open_gate(side: Side) -> None:
    _transfer(side)[2].set()


def synchronize(side: Side, *args: Any, **kwargs: Any) -> LLMStatusCode:
    return _transfer(side)[0].synchronize(*args, **kwargs)


def get_results(side: Side, *args: Any, **kwargs: Any) -> list[LLMStatusCode | None]:
    return _transfer(side)[0].get_results(*args, **kwargs)


def layer_calls(side: Side) -> list[tuple[int, int | None]]:
    return _transfer(side)[1].calls


def codes_of_pulls_at_once(side: Side, key: Any, name: str, num_pulls: int) -> list[LLMStatusCode]:
    """How that many pulls ended that began together, one thread each."""
    barrier = threading.Barrier(num_pulls)

    def pull(_: int) -> LLMStatusCode:
        barrier.wait()
        try:
            _manager(side).pull_cache(key, side._caches[name])
        except LLMException as error:
            return error.status_code
        return LLMStatusCode.LLM_SUCCESS

    with ThreadPoolExecutor(num_pulls) as pool:
        return list(pool.map(pull, range(num_pulls)))
