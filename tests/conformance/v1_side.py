"""Commands of a v1 process: functions for :meth:`tests.conformance.side.Side.run`, whose first argument it is."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from llm_datadist_ray import (
    CacheDesc,
    CacheTask,
    DataType,
    KvCache,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from llm_datadist_ray._native import LinkInfo, NativeEngine, Path
from llm_datadist_ray.kv_cache import KvCacheManager, V1Runtime
from tests.conformance.memory import fill
from tests.conformance.side import Side

PAGE_BYTES = 1 << 16


class Named(str):
    """In the arguments of a command: the cache of that name."""


class State:
    def __init__(self) -> None:
        self.caches: dict[str, KvCache] = {}
        self.host_memories: dict[str, list[np.ndarray]] = {}
        self.tasks: dict[str, tuple[CacheTask, Steps]] = {}
        self.manager: KvCacheManager | None = None
        self.options: dict[str, str] = {}


class Steps(LayerSynchronizer):
    """Says what it is told to, as soon as it is told."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._answers: dict[int, Any] = {}
        self._told = threading.Condition()

    def tell(self, layer: int, answer: Any) -> None:
        with self._told:
            self._answers[layer] = answer
            self._told.notify_all()

    def wait_asked(self, num_layers: int) -> bool:
        with self._told:
            return self._told.wait_for(lambda: len(self.asked) >= num_layers, 20.0)

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        assert timeout_in_millis is None
        with self._told:
            self.asked.append(layer_index)
            self._told.notify_all()
            self._told.wait_for(lambda: layer_index in self._answers)
            answer = self._answers[layer_index]
        if isinstance(answer, Exception):
            raise answer
        return answer


def state_of(side: Side) -> State:
    if not hasattr(side, "v1_state"):
        side.v1_state = State()  # type: ignore[attr-defined]
    return side.v1_state  # type: ignore[attr-defined]


def engines_of(side: Side) -> Sequence[NativeEngine]:
    """By device index."""
    runtime = side.dist._runtime
    assert isinstance(runtime, V1Runtime)
    return runtime._devices.engines


def manager_of(side: Side) -> KvCacheManager:
    return side.dist.kv_cache_manager


# Life


def init(side: Side, role: LLMRole, cluster_id: int, options: dict[str, str]) -> list[int]:
    """The ports at which its devices listen."""
    side._dist = LLMDataDist(role, cluster_id)
    before = dict(options)
    side.dist.init(options)
    assert options == before
    state_of(side).options = before
    return ports(side)


def forget(side: Side) -> None:
    state_of(side).__init__()  # type: ignore[misc]
    gc.collect()


def ports(side: Side) -> list[int]:
    return [engine.info().listen_port for engine in engines_of(side)]


def links(side: Side) -> list[list[LinkInfo]]:
    return [engine.links() for engine in engines_of(side)]


def used_bytes(side: Side) -> list[int]:
    return [engine.pool_info(Placement.DEVICE).used_bytes for engine in engines_of(side)]


def paths_used(side: Side) -> list[set[Path]]:
    infos = [engine.info() for engine in engines_of(side)]
    return [{path for path in Path if info.bytes_pulled.get(path) or info.bytes_pushed.get(path)} for info in infos]


def check_link_status(side: Side, cluster_id: Any) -> None:
    side.dist.check_link_status(cluster_id)


def of_dist(side: Side, member: str, *args: Any) -> None:
    """A method, or a property, of LLMDataDist."""
    found = getattr(side.dist, member)
    if args:
        found(*args)


def init_again(side: Side) -> None:
    """finalize and init of the same object with the same options."""
    options = state_of(side).options
    side.dist.finalize()
    side.dist.init(options)


def while_pulling(side: Side, key: Any, cache: Named, info: LLMClusterInfo, other_key: Any) -> dict[str, Any]:
    """What else can be done while the pull waits for its peer: status codes and results."""
    target = state_of(side).caches[cache]
    manager = manager_of(side)

    def code_of(action: Callable[[], None]) -> LLMStatusCode:
        try:
            action()
        except LLMException as error:
            return error.status_code
        return LLMStatusCode.LLM_SUCCESS

    with ThreadPoolExecutor(1) as threads:
        pull = threads.submit(code_of, lambda: manager.pull_cache(key, target))
        while not engines_of(side)[0].info().num_ops_in_flight and not pull.done():
            pass
        outcome: dict[str, Any] = {
            "pull_cache": code_of(lambda: manager.pull_cache(key, target)),
            "check_link_status": code_of(lambda: side.dist.check_link_status(key.cluster_id)),
            "unlink_clusters": side.dist.unlink_clusters([info], 300),
            "forced": side.dist.unlink_clusters([info], 300, True),
            "other link": code_of(lambda: manager.pull_cache(other_key, target)),
        }
        assert not pull.done()
        return {"pull": pull.result(), **outcome}


# Caches


def allocate(
    side: Side, name: str, num_tensors: int, shape: list[int], seed: int, *, blocks: bool = False, key: Any = None
) -> int:
    """Filled from ``seed``, whole pages: what lies behind a tensor is nobody's, and is looked at as well."""
    desc = CacheDesc(num_tensors, shape, DataType.DT_UINT8)
    manager = manager_of(side)
    cache = manager.allocate_blocks_cache(desc, key) if blocks else manager.allocate_cache(desc, key or ())
    for device, addrs in enumerate(cache.per_device_tensor_addrs):
        for tensor, addr in enumerate(addrs):
            fill(pages_at(addr, desc.size), seed_of(seed, device, tensor))
    state_of(side).caches[name] = cache
    return cache.cache_id


def allocate_host(side: Side, name: str, num_tensors: int, shape: list[int], seed: int, num_devices: int) -> None:
    desc = CacheDesc(num_tensors, shape, DataType.DT_UINT8, Placement.HOST)
    memories = [np.empty((num_tensors, padded(desc.size)), np.uint8) for _ in range(num_devices)]
    for device, memory in enumerate(memories):
        for tensor in range(num_tensors):
            fill(memory[tensor], seed_of(seed, device, tensor))
    addrs = [[memory[tensor].ctypes.data for tensor in range(num_tensors)] for memory in memories]
    state_of(side).host_memories[name] = memories
    state_of(side).caches[name] = KvCache.create_cpu_cache(desc, addrs if num_devices > 1 else addrs[0])


def seed_of(seed: int, device: int, tensor: int) -> int:
    return seed + 100 * device + tensor


def padded(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def pages_at(addr: int, size_bytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * padded(size_bytes)).from_address(addr), np.uint8)


def read(side: Side, name: str) -> list[list[bytes]]:
    """``[device][tensor]``, whole pages."""
    cache = state_of(side).caches[name]
    size = cache.cache_desc.size
    return [[pages_at(addr, size).tobytes() for addr in addrs] for addrs in cache.per_device_tensor_addrs]


def free_on_device(side: Side, device: int, name: str) -> None:
    """Behind the manager's back: as if it had not been allocated there."""
    engines_of(side)[device].unregister_cache(state_of(side).caches[name].cache_id)


def keep_manager(side: Side) -> None:
    state_of(side).manager = manager_of(side)


def kept_manager_says(side: Side) -> tuple[bool, LLMStatusCode]:
    manager = state_of(side).manager
    assert manager is not None
    try:
        manager.allocate_cache(CacheDesc(1, [1], DataType.DT_UINT8))
    except LLMException as error:
        return manager.is_initialized(), error.status_code
    raise AssertionError("a manager allocates after finalize")


def addresses(side: Side, name: str) -> list[list[int]]:
    return state_of(side).caches[name].per_device_tensor_addrs


def drop(side: Side, name: str) -> None:
    """The last reference."""
    del state_of(side).caches[name]


def tensors(side: Side, name: str, *args: Any) -> list[tuple[str, list[int], bytes]]:
    found = manager_of(side).get_cache_tensors(state_of(side).caches[name], *args)
    return [(tensor.tensor_desc.dtype.name, tensor.tensor_desc.shape, tensor.numpy().tobytes()) for tensor in found]


def call(side: Side, method: str, *args: Any, **kwargs: Any) -> None:
    """Of the manager."""
    getattr(manager_of(side), method)(*[_resolved(side, arg) for arg in args], **kwargs)


def _resolved(side: Side, value: Any) -> Any:
    return state_of(side).caches[value] if isinstance(value, Named) else value


# Layer-wise pushes


def start_push(side: Side, task: str, cache: str, configs: Any, *args: Any) -> None:
    steps = Steps()
    started = manager_of(side).transfer_cache_async(state_of(side).caches[cache], steps, configs, *args)
    state_of(side).tasks[task] = started, steps


def tell(side: Side, task: str, answers: dict[int, Any]) -> None:
    for layer, answer in answers.items():
        state_of(side).tasks[task][1].tell(layer, answer)


def wait_asked(side: Side, task: str, num_layers: int) -> None:
    """Until the layers before the last of them have been sent."""
    assert state_of(side).tasks[task][1].wait_asked(num_layers)


def asked(side: Side, task: str) -> list[int]:
    return state_of(side).tasks[task][1].asked


def outcome(side: Side, task: str, timeout_ms: int | None = 20_000) -> tuple[LLMStatusCode, list[LLMStatusCode | None]]:
    running = state_of(side).tasks[task][0]
    return running.synchronize(timeout_ms), running.get_results(timeout_ms)
