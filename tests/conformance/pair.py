"""Two processes and the oracle: what every byte of both sides' memory must be."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from llm_datadist_ray import BlocksCacheKey, CacheKeyByIdAndIndex, LLMClusterInfo, LLMStatusCode, Placement
from llm_datadist_ray._native import Path
from tests.conformance.memory import MemoryLayout, fill
from tests.conformance.side_process import SideProcess
from tests.process_counts import ProcessCounts

HOST_IP = "127.0.0.1"
SUCCESS = LLMStatusCode.LLM_SUCCESS


def side_env(path: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("LLM_DATADIST_")}
    return {**env, "LDR_PATHS": path}


@dataclass(frozen=True)
class CacheRef:
    """A registered cache of one end: ``expected`` is the oracle's copy of its whole memory, gaps included."""

    end: End
    name: str
    cache_id: int
    layout: MemoryLayout
    expected: np.ndarray

    def tensor(self, index: int) -> np.ndarray:
        """The oracle's tensor ``[entries, entry_bytes]``; what a transfer should do is done to it."""
        return self.layout.tensor(self.expected, index)

    def flat(self, index: int) -> np.ndarray:
        return self.tensor(index).reshape(-1)

    def key(self, batch_index: int = 0) -> CacheKeyByIdAndIndex:
        return CacheKeyByIdAndIndex(self.end.cluster_id, self.cache_id, batch_index)


class End:
    """One process with its engine, its caches and what they should hold."""

    def __init__(self, process: SideProcess, cluster_id: int, path: str, remote_access: bool) -> None:
        self.process = process
        self.cluster_id = cluster_id
        self.path = path
        self.remote_access = remote_access
        self.port = 0
        self._caches: dict[str, CacheRef] = {}
        self._next_seed = 1000 * cluster_id
        self._idle_counts: tuple[int, ProcessCounts] | None = None  # of the process with that id

    def init(self, *, listen: bool, remote_access: bool | None = None, **config: Any) -> None:
        """``config``: further properties of LLMConfig, and ``budget_ms``."""
        config.setdefault("sync_kv_timeout", 20_000)
        remote_access = self.remote_access if remote_access is None else remote_access
        self.port = self.process.init(self.cluster_id, listen=listen, remote_access=remote_access, **config)

    def reset(self) -> None:
        """No engine and no memory, whatever the test has left behind."""
        self.process.recover()
        self.process.reset()
        self._caches.clear()

    def check_process(self) -> None:
        """After :meth:`reset`: it has been quiet, and holds no more than when it was idle for the first time."""
        self.process.check_stderr()
        if self._idle_counts is None or self._idle_counts[0] != self.process.pid:
            self._idle_counts = self.process.pid, self.process.counts()
            return
        idle = self._idle_counts[1]
        if self.process.counts().exceed(idle):
            counts = self.process.settled_counts(idle)
            assert not counts.exceed(idle), f"process {self.process.pid} leaked: {counts}, and {idle} before"

    def forget(self) -> None:
        """The process has been replaced by a new one."""
        self._caches.clear()

    def cache(
        self,
        name: str,
        *,
        blocks: bool = False,
        tensors: int = 4,
        entries: int = 6,
        entry_bytes: int = 96,
        key: Any = None,
        placement: Placement = Placement.DEVICE,
        remote_accessible: bool | None = True,
    ) -> CacheRef:
        layout = MemoryLayout(tensors, entries, entry_bytes)
        expected = self._memory(name, layout, shared=self.path == "shm")
        cache_id = self.process.register(
            name, blocks=blocks, key=key, placement=placement, remote_accessible=remote_accessible
        )
        self._caches[name] = CacheRef(self, name, cache_id, layout, expected)
        return self._caches[name]

    def allocate(
        self,
        name: str,
        *,
        blocks: bool = False,
        tensors: int = 4,
        entries: int = 6,
        entry_bytes: int = 96,
        key: Any = None,
        placement: Placement = Placement.DEVICE,
    ) -> CacheRef:
        """A cache of the pool. It is looked at like every other one until :meth:`forget_cache`."""
        layout = MemoryLayout(tensors, entries, entry_bytes, gap_bytes=0)
        self._next_seed += 1
        expected = np.empty(layout.total_bytes, np.uint8)
        fill(expected, self._next_seed)
        cache_id = self.process.allocate(name, layout, self._next_seed, blocks=blocks, key=key, placement=placement)
        self._caches[name] = CacheRef(self, name, cache_id, layout, expected)
        return self._caches[name]

    def cpu_cache(self, name: str, *, tensors: int = 4, entries: int = 6, entry_bytes: int = 96) -> CacheRef:
        """Host memory that the engine does not know, for ``swap_blocks``."""
        layout = MemoryLayout(tensors, entries, entry_bytes)
        expected = self._memory(name, layout, shared=False)
        self.process.cpu_cache(name)
        self._caches[name] = CacheRef(self, name, -1, layout, expected)
        return self._caches[name]

    def forget_cache(self, name: str) -> None:
        """Its memory is somebody else's now."""
        del self._caches[name]

    def _memory(self, name: str, layout: MemoryLayout, *, shared: bool) -> np.ndarray:
        self._next_seed += 1
        self.process.memory(name, layout, self._next_seed, shared=shared)
        expected = np.empty(layout.total_bytes, np.uint8)
        fill(expected, self._next_seed)
        return expected

    def blocks_of(
        self,
        name: str,
        tensors: list[tuple[str, int]],
        *,
        shared: dict[str, bool] | None = None,
        model_id: int = 0,
        remote_accessible: bool = True,
    ) -> dict[str, CacheRef]:
        """A blocks cache whose tensors are picked, ``(memory, index)``, from memories of two tensors each. Those named
        in ``shared`` are made for it; the references to them, by name, tell what they hold."""
        layout = MemoryLayout(2, 6, 96)
        made = {memory: self._memory(memory, layout, shared=is_shared) for memory, is_shared in (shared or {}).items()}
        key = BlocksCacheKey(self.cluster_id, model_id)
        cache_id = self.process.register_tensors(name, tensors, key=key, remote_accessible=remote_accessible)
        refs = {memory: CacheRef(self, memory, cache_id, layout, expected) for memory, expected in made.items()}
        self._caches.update(refs)
        return refs

    def blocks(self, name: str, *, model_id: int | None = 0, **kwargs: Any) -> CacheRef:
        """A blocks cache that peers can name by model, or with None cannot."""
        key = None if model_id is None else BlocksCacheKey(self.cluster_id, model_id)
        return self.cache(name, blocks=True, key=key, **kwargs)

    def cache_ref(self, name: str) -> CacheRef:
        return self._caches[name]

    def blocks_key(self, model_id: int = 0) -> BlocksCacheKey:
        return BlocksCacheKey(self.cluster_id, model_id)

    def info(self, *, remote: bool = True, local: bool = True, cluster_id: int | None = None) -> LLMClusterInfo:
        """How another end would link with this one."""
        info = LLMClusterInfo()
        info.remote_cluster_id = self.cluster_id if cluster_id is None else cluster_id
        if local:
            info.append_local_ip_info(HOST_IP, 0)
        if remote:
            info.append_remote_ip_info(HOST_IP, self.port)
        return info

    def check_memory(self) -> None:
        for cache in self._caches.values():
            actual = np.frombuffer(self.process.read(cache.name), np.uint8)
            wrong = np.flatnonzero(actual != cache.expected)
            assert not len(wrong), (
                f"{len(wrong)} bytes of memory {cache.name!r} of cluster {self.cluster_id} are not what they "
                f"should be, from offset {wrong[0]} to {wrong[-1]} (tensors start at {cache.layout.offset(0)}, "
                f"{cache.layout.tensor_bytes} bytes each)"
            )


class Pair:
    """``a`` initiates and does not listen, ``b`` listens."""

    def __init__(self, path: str, mode: str) -> None:
        self.path = path
        self.mode = mode
        self.remote_access = mode == "remote-access"
        self.a = End(SideProcess(side_env(path)), 1, path, self.remote_access)
        self.b = End(SideProcess(side_env(path)), 2, path, self.remote_access)

    def init(self, **config: Any) -> None:
        self.a.init(listen=False, **config)
        self.b.init(listen=True, **config)

    def link(self) -> None:
        assert self.a.process.link_clusters([self.b.info()], 5000) == (SUCCESS, [SUCCESS])

    def check_memory(self) -> None:
        self.a.check_memory()
        self.b.check_memory()

    def check_only_path_used(self) -> None:
        """All bytes that this end's transfers moved went over the pair's path."""
        info = self.a.process.info()
        moved = {path for path in Path if info.bytes_pulled.get(path, 0) + info.bytes_pushed.get(path, 0)}
        assert moved == {Path[self.path.upper()]}

    def reset(self) -> None:
        """Both as newly started, and nothing is left of the test."""
        self.a.reset()
        self.b.reset()
        self.a.check_process()
        self.b.check_process()

    def stop(self) -> None:
        self.a.process.stop()
        self.b.process.stop()
