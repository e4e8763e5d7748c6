"""One of the two processes of a pair: an LLMDataDist and memories, driven by commands over a socket.

Run as ``python -m tests.conformance.side FD``. A command is ``(method, args, kwargs)``; the answer is
``(True, value)`` or ``(False, exception)``.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from llm_datadist_ray import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LayerSynchronizer,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from llm_datadist_ray._native import Direction, EventKind, Move, NativeError, Progress, RemoteBy, Transfer, alloc_shared
from llm_datadist_ray.cache import TransferTask
from llm_datadist_ray.membership import Membership
from tests.conformance.memory import MemoryLayout, fill
from tests.process_counts import ProcessCounts, settled_counts


class GatedLayers(LayerSynchronizer):
    """Says when a layer is ready: after :attr:`ready` was released; layer ``refuse`` never."""

    def __init__(self, num_ready: int, refuse: int | None) -> None:
        self.ready = threading.Semaphore(num_ready)
        self.asked: list[int] = []
        self._refuse = refuse

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.asked.append(layer_index)
        return self.ready.acquire(timeout=60.0) and layer_index != self._refuse


class Side:
    def __init__(self) -> None:
        self._dist: LLMDataDist | None = None
        self._memories: dict[str, tuple[MemoryLayout, np.ndarray]] = {}
        self._kept: list[np.ndarray] = []  # a name can be given again while the old memory is registered
        self._caches: dict[str, Cache] = {}
        self._pool_views: dict[str, list[np.ndarray]] = {}

    @property
    def dist(self) -> LLMDataDist:
        assert self._dist is not None
        return self._dist

    # Life

    def init(
        self, cluster_id: int, *, listen: bool, remote_access: bool, budget_ms: int | None = None, **config: Any
    ) -> int:
        """A new LLMDataDist, configured by further properties of LLMConfig; returns the port it listens on, or 0.

        ``budget_ms`` is another liveness budget than that of who is no member of a cluster."""
        self._dist = LLMDataDist(LLMRole.PROMPT if listen else LLMRole.DECODER, cluster_id)
        llm_config = LLMConfig()
        llm_config.enable_cache_manager = True
        llm_config.enable_remote_cache_accessible = remote_access
        if listen:
            llm_config.listen_ip_info = "127.0.0.1:0"
        for name, value in config.items():
            setattr(llm_config, name, value)
        membership = None
        if budget_ms is not None:
            membership = Membership(None, 0, "", paths=os.environ.get("LDR_PATHS"), budget_ms=budget_ms)
        self.dist.init(llm_config.generate_options(), membership=membership)
        return self.port()

    def port(self) -> int:
        return self.dist.native_engine.info().listen_port

    def set_env(self, name: str, value: str | None) -> None:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    def reset(self) -> None:
        """As if newly started: no engine, no memory."""
        if self._dist is not None:
            self._dist.finalize()
        self._dist = None
        self._pool_views.clear()
        self._caches.clear()
        self._memories.clear()
        self._kept.clear()

    def finalize(self) -> None:
        self.dist.finalize()

    def counts(self) -> ProcessCounts:
        return ProcessCounts.of()

    def settled_counts(self, expected: ProcessCounts) -> ProcessCounts:
        return settled_counts(expected)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A function of a module that both processes import, with this object first."""
        return function(self, *args, **kwargs)

    # Memory and caches

    def memory(self, name: str, layout: MemoryLayout, seed: int, *, shared: bool) -> None:
        memory = alloc_shared(layout.total_bytes) if shared else np.empty(layout.total_bytes, np.uint8)
        fill(memory, seed)
        self._memories[name] = layout, memory
        self._kept.append(memory)

    def paint(self, name: str, layout: MemoryLayout, value: int, *, shared: bool) -> None:
        """A memory whose tensor ``t`` is full of ``(value + t) % 256``: quick, for the large ones."""
        memory = alloc_shared(layout.total_bytes) if shared else np.empty(layout.total_bytes, np.uint8)
        for tensor in range(layout.num_tensors):
            layout.tensor(memory, tensor)[:] = (value + tensor) % 256
        self._memories[name] = layout, memory

    def is_painted(self, name: str, value: int) -> bool:
        layout, memory = self._memories[name]
        tensors = range(layout.num_tensors)
        return all(bool((layout.tensor(memory, tensor) == (value + tensor) % 256).all()) for tensor in tensors)

    def read(self, name: str) -> bytes:
        if name in self._pool_views:
            return b"".join(view.tobytes() for view in self._pool_views[name])
        return self._memories[name][1].tobytes()

    def flip_byte(self, name: str, offset: int) -> None:
        self._memories[name][1][offset] ^= 0xFF

    def register(
        self, name: str, *, blocks: bool, key: Any, placement: Placement, remote_accessible: bool | None
    ) -> int:
        layout, memory = self._memories[name]
        desc = CacheDesc(
            layout.num_tensors, [layout.num_entries, layout.entry_bytes], DataType.DT_UINT8, placement=placement
        )
        base = memory.ctypes.data
        addrs = [base + layout.offset(tensor) for tensor in range(layout.num_tensors)]
        manager = self.dist.cache_manager
        if blocks:
            cache = manager.register_blocks_cache(desc, addrs, key, remote_accessible)
        else:
            cache = manager.register_cache(desc, addrs, key or [], remote_accessible)
        self._caches[name] = cache
        return cache.cache_id

    def allocate(
        self, name: str, layout: MemoryLayout, seed: int, *, blocks: bool, key: Any, placement: Placement
    ) -> int:
        """A cache of the pool, filled as one memory of that layout, which has no gaps."""
        desc = CacheDesc(
            layout.num_tensors, [layout.num_entries, layout.entry_bytes], DataType.DT_UINT8, placement=placement
        )
        manager = self.dist.cache_manager
        cache = manager.allocate_blocks_cache(desc, key) if blocks else manager.allocate_cache(desc, key or [])
        self._caches[name] = cache
        self._pool_views[name] = [
            np.frombuffer((ctypes.c_uint8 * layout.tensor_bytes).from_address(addr), np.uint8)
            for addr in cache.tensor_addrs
        ]
        memory = np.empty(layout.total_bytes, np.uint8)
        fill(memory, seed)
        for view, content in zip(self._pool_views[name], memory.reshape(layout.num_tensors, -1), strict=True):
            view[:] = content
        return cache.cache_id

    def cpu_cache(self, name: str) -> None:
        """A description of the memory of that name, for swap_blocks."""
        layout, memory = self._memories[name]
        desc = CacheDesc(
            layout.num_tensors, [layout.num_entries, layout.entry_bytes], DataType.DT_UINT8, placement=Placement.HOST
        )
        addrs = [memory.ctypes.data + layout.offset(tensor) for tensor in range(layout.num_tensors)]
        self._caches[name] = Cache.create_cpu_cache(desc, addrs)

    def tensor_addrs(self, name: str) -> list[int]:
        return self._caches[name].tensor_addrs

    def register_tensors(
        self, name: str, tensors: list[tuple[str, int]], *, key: BlocksCacheKey, remote_accessible: bool
    ) -> int:
        """A blocks cache of tensors of several memories, each ``(memory, index)``, all of one shape."""
        addrs = []
        for memory_name, index in tensors:
            layout, memory = self._memories[memory_name]
            addrs.append(memory.ctypes.data + layout.offset(index))
        desc = CacheDesc(len(addrs), [layout.num_entries, layout.entry_bytes], DataType.DT_UINT8)
        cache = self.dist.cache_manager.register_blocks_cache(desc, addrs, key, remote_accessible)
        self._caches[name] = cache
        return cache.cache_id

    def register_addresses(self, shape: list[int], addrs: list[int]) -> int:
        desc = CacheDesc(len(addrs), shape, DataType.DT_INT8)
        return self.dist.cache_manager.register_blocks_cache(desc, addrs).cache_id

    def unregister(self, name: str) -> None:
        self.dist.cache_manager.unregister_cache(self._caches[name].cache_id)

    def unregister_id(self, cache_id: int) -> None:
        self.dist.cache_manager.unregister_cache(cache_id)

    def manage(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Any method of the cache manager; a text among the arguments is the name of a cache."""
        given = [self._caches[arg] if isinstance(arg, str) else arg for arg in args]
        return getattr(self.dist.cache_manager, method)(*given, **kwargs)

    # Transfers: ``cache`` is the name of a local one

    def pull_cache(self, key: Any, cache: str, *args: Any, **kwargs: Any) -> None:
        self.dist.cache_manager.pull_cache(key, self._caches[cache], *args, **kwargs)

    def pull_blocks(self, key: Any, cache: str, *args: Any, **kwargs: Any) -> None:
        self.dist.cache_manager.pull_blocks(key, self._caches[cache], *args, **kwargs)

    def push_cache(self, key: Any, cache: str, *args: Any, **kwargs: Any) -> None:
        self.dist.cache_manager.push_cache(key, self._caches[cache], *args, **kwargs)

    def push_blocks(self, key: Any, cache: str, *args: Any, **kwargs: Any) -> None:
        self.dist.cache_manager.push_blocks(key, self._caches[cache], *args, **kwargs)

    def as_other_kind(self, name: str, alias: str) -> None:
        """Makes ``alias`` a handle that says the opposite of the truth about its kind."""
        cache = self._caches[name]
        self._caches[alias] = Cache(
            cache.cache_id, cache.cache_desc, cache.tensor_addrs, None, True, not cache.is_blocks_cache
        )

    def keep_manager(self) -> None:
        self._kept_manager = self.dist.cache_manager

    def use_kept_manager(self, method: str, *args: Any) -> None:
        caches = [self._caches[arg] if isinstance(arg, str) else arg for arg in args]
        getattr(self._kept_manager, method)(*caches)

    def parallel(self, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> list[Exception | None]:
        """Runs the calls at once, one thread each; what each raised."""

        def outcome(call: tuple[str, tuple[Any, ...], dict[str, Any]]) -> Exception | None:
            method, args, kwargs = call
            try:
                getattr(self, method)(*args, **kwargs)
            except RuntimeError as error:
                return error
            return None

        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(outcome, calls))

    def finalize_during_pull(self, cluster_id: int, cache: str) -> dict[str, Any]:
        """Pulls without a time limit from a peer that does not answer, and finalizes meanwhile: how long that took and
        what the pull raised."""
        engine = self.dist.native_engine
        transfer = Transfer(
            direction=Direction.PULL,
            cluster_id=cluster_id,
            local_cache_id=self._caches[cache].cache_id,
            move=Move.ENTRY,
            remote_by=RemoteBy.CACHE_ID,
            remote_cache_id=1,
            timeout_s=None,
        )
        with ThreadPoolExecutor(1) as pool:
            pull = pool.submit(engine.transfer, transfer)
            while not engine.info().num_ops_in_flight and not pull.done():
                pass
            start = time.monotonic()
            self.finalize()
            elapsed_s = time.monotonic() - start
            error = pull.exception()
        assert error is None or isinstance(error, NativeError)
        return {"elapsed_s": elapsed_s, "status": None if error is None else error.native_status}

    # Transfers in the background

    def start_task(self, method: str, *args: Any, **kwargs: Any) -> None:
        self._task: TransferTask = self.manage(method, *args, **kwargs)

    def wait_task(self, timeout_s: float | None = 10.0) -> None:
        self._task.wait(timeout_s)

    def cancel_task(self) -> None:
        self._task.cancel()

    def task_state(self) -> tuple[bool, Progress]:
        return self._task.done(), self._task.progress()

    def await_all(self, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> list[Exception | None]:
        """All at once in one event loop; what each raised, at the call or at the ``await``."""

        async def call(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            await self.manage(method, *args, **kwargs)

        async def call_all() -> list[Exception | None]:
            return await asyncio.gather(*(call(*each) for each in calls), return_exceptions=True)

        return asyncio.run(call_all())

    def start_layers(self, cache: str, configs: list[Any], *args: Any, num_ready: int, refuse: int | None) -> None:
        """transfer_cache_async; ``num_ready`` layers are ready now, others by :meth:`release_layers`."""
        self._layers = GatedLayers(num_ready, refuse)
        self._layer_task = self.manage("transfer_cache_async", cache, self._layers, configs, *args)

    def release_layers(self, num: int) -> None:
        self._layers.ready.release(num)

    def layer_results(self, timeout_ms: int) -> tuple[LLMStatusCode, list[LLMStatusCode | None], list[int]]:
        """What ``synchronize`` and ``get_results`` give, and the layers that the synchronizer was asked for."""
        task = self._layer_task
        return task.synchronize(timeout_ms), task.get_results(timeout_ms), self._layers.asked

    # Links

    def link_clusters(self, *args: Any, **kwargs: Any) -> Any:
        return self.dist.link_clusters(*args, **kwargs)

    def unlink_clusters(self, *args: Any, **kwargs: Any) -> Any:
        return self.dist.unlink_clusters(*args, **kwargs)

    def switch_role(self, *args: Any, **kwargs: Any) -> None:
        self.dist.switch_role(*args, **kwargs)

    def links(self) -> Any:
        return self.dist.native_engine.links()

    def info(self) -> Any:
        return self.dist.native_engine.info()

    def wait_for_link_down(self, cluster_id: int, timeout_s: float) -> bool:
        """Until the engine has said so by an event; those before it are taken from the queue."""
        deadline = time.monotonic() + timeout_s
        while (remaining_s := deadline - time.monotonic()) > 0:
            for event in self.dist.native_engine.poll(64, remaining_s):
                if event.kind == EventKind.LINK_DOWN and event.id == cluster_id:
                    return True
        return False

    # Death

    def pull_and_kill(self, cluster_id: int, cache: str, pid: int) -> dict[str, Any]:
        """Pulls all blocks of model 0 and kills ``pid`` when the progress counter has moved.

        Returns the counter at that moment, how the operation ended, and how long after the signal.
        """
        engine = self.dist.native_engine
        layout, _ = self._memories[cache]
        blocks = np.arange(layout.num_entries, dtype=np.int32)
        op_id = engine.submit(
            Transfer(
                direction=Direction.PULL,
                cluster_id=cluster_id,
                local_cache_id=self._caches[cache].cache_id,
                move=Move.BLOCKS,
                remote_by=RemoteBy.BLOCKS_KEY,
                src_blocks=blocks,
                dst_blocks=blocks,
                timeout_s=60.0,
            )
        )
        try:
            while not (progress := engine.progress(op_id)).bytes_done:
                pass
        except NativeError as error:
            return {"too_late": str(error)}
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        while True:
            events = [event for event in engine.poll(64, 10.0) if event.kind == EventKind.OP and event.id == op_id]
            if events:
                break
        return {
            "progress": progress,
            "elapsed_s": time.monotonic() - killed_at,
            "is_ok": events[0].is_ok,
            "text": "" if events[0].is_ok else engine.op_error(op_id),
        }

    # Large caches are filled and compared here, tensor by tensor

    def large_memory(self, name: str, layout: MemoryLayout, seed: int, *, shared: bool) -> None:
        memory = alloc_shared(layout.total_bytes) if shared else np.empty(layout.total_bytes, np.uint8)
        memory[:] = 0xA5
        for tensor in range(layout.num_tensors):
            layout.tensor(memory, tensor)[:] = _large_tensor(layout, seed, tensor)
        self._memories[name] = layout, memory

    def check_large(self, name: str, seed: int, source: tuple[int, np.ndarray, np.ndarray] | None) -> list[str]:
        """What differs from the seed's contents with blocks of ``source`` = (seed, src blocks, dst blocks) put in."""
        layout, memory = self._memories[name]
        differences = []
        for tensor in range(layout.num_tensors):
            expected = _large_tensor(layout, seed, tensor)
            if source is not None:
                source_seed, src_blocks, dst_blocks = source
                expected[dst_blocks] = _large_tensor(layout, source_seed, tensor)[src_blocks]
            wrong = np.flatnonzero((layout.tensor(memory, tensor) != expected).any(axis=1))
            if len(wrong):
                differences.append(f"tensor {tensor}: {len(wrong)} blocks, first {wrong[0]}")
            gap = memory[layout.offset(tensor) - layout.gap_bytes : layout.offset(tensor)]
            if (gap != 0xA5).any():
                differences.append(f"gap before tensor {tensor}")
        if (memory[-layout.gap_bytes :] != 0xA5).any():
            differences.append("gap behind the last tensor")
        return differences


def _large_tensor(layout: MemoryLayout, seed: int, tensor: int) -> np.ndarray:
    rng = np.random.default_rng([seed, tensor])
    return np.frombuffer(bytearray(rng.bytes(layout.tensor_bytes)), np.uint8).reshape(
        layout.num_entries, layout.entry_bytes
    )


def main(fd: int) -> None:
    side = Side()
    connection = Connection(fd)
    connection.send((True, os.getpid()))
    while True:
        try:
            method, args, kwargs = connection.recv()
        except EOFError:
            side.reset()
            return
        try:
            answer = True, getattr(side, method)(*args, **kwargs)
        except Exception as error:  # travels to the test, which raises it
            answer = False, error
        connection.send(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]))
