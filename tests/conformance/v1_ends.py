"""A v1 PROMPT and a v1 DECODER in two processes, of one or more devices, and the oracle for every byte of their caches.

The fixtures are in :mod:`tests.conformance.v1_fixtures`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from llm_datadist_ray import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMClusterInfo, LLMRole
from llm_datadist_ray._native import Path
from tests.conformance import v1_side
from tests.conformance.conftest import PATHS
from tests.conformance.memory import fill
from tests.conformance.pair import HOST_IP, SUCCESS, side_env
from tests.conformance.side_process import SideProcess
from tests.conformance.v1_side import Named
from tests.process_counts import ProcessCounts

INVALID_ID = 2**64 - 1


@dataclass(frozen=True)
class V1Cache:
    """``expected[device][tensor]`` is the oracle's copy of its pages; what a transfer should do is done to it."""

    end: V1End
    name: str
    cache_id: int
    num_entries: int
    entry_bytes: int
    expected: list[np.ndarray]

    def tensor(self, tensor: int, device: int = 0) -> np.ndarray:
        """View ``[entries, entry_bytes]``."""
        size = self.num_entries * self.entry_bytes
        return self.expected[device][tensor][:size].reshape(self.num_entries, self.entry_bytes)

    @property
    def num_tensors(self) -> int:
        return len(self.expected[0])

    @property
    def named(self) -> Named:
        return Named(self.name)

    def key(self, batch_index: int = 0) -> CacheKeyByIdAndIndex:
        return CacheKeyByIdAndIndex(self.end.cluster_id, self.cache_id, batch_index)


class V1End:
    def __init__(self, process: SideProcess, cluster_id: int, role: LLMRole) -> None:
        self.process = process
        self.cluster_id = cluster_id
        self.role = role
        self.num_devices = 1
        self.ports: list[int] = []
        self._caches: dict[str, V1Cache] = {}
        self._next_seed = 10_000 * cluster_id
        self._idle_counts: tuple[int, ProcessCounts] | None = None  # of the process with that id

    def init(self, *, role: LLMRole | None = None, num_devices: int = 1, **options: str) -> None:
        """``options``: of the option dictionary, with ``__`` for ``.``"""
        self.num_devices = num_devices
        role = self.role if role is None else role
        given = {
            "ge.exec.deviceId": ";".join(map(str, range(num_devices))),
            "ge.flowGraphMemMaxSize": str(32 << 20),
            "llm.MemoryUtilization": "1.0",
            "llm.SyncKvCacheWaitTime": "20000",
            **({"llm.listenIpInfo": ";".join([f"{HOST_IP}:0"] * num_devices)} if role == LLMRole.PROMPT else {}),
            **{name.replace("__", "."): value for name, value in options.items()},
        }
        self.ports = self.run(v1_side.init, role, self.cluster_id, given)

    def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return self.process.run(function, *args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Of the manager; a V1Cache among the arguments is its own cache."""
        self.run(v1_side.call, method, *[arg.named if isinstance(arg, V1Cache) else arg for arg in args], **kwargs)

    def cache(
        self,
        name: str,
        *,
        tensors: int = 4,
        entries: int = 6,
        entry_bytes: int = 96,
        blocks: bool = False,
        key: Any = None,
    ) -> V1Cache:
        seed = self._seed()
        shape = [entries, entry_bytes]
        cache_id = self.run(v1_side.allocate, name, tensors, shape, seed, blocks=blocks, key=key)
        return self._remember(name, cache_id, tensors, shape, seed)

    def host_cache(self, name: str, *, tensors: int = 4, entries: int = 6, entry_bytes: int = 96) -> V1Cache:
        seed = self._seed()
        shape = [entries, entry_bytes]
        self.run(v1_side.allocate_host, name, tensors, shape, seed, self.num_devices)
        return self._remember(name, -1, tensors, shape, seed)

    def _seed(self) -> int:
        self._next_seed += 1000
        return self._next_seed

    def _remember(self, name: str, cache_id: int, num_tensors: int, shape: list[int], seed: int) -> V1Cache:
        num_bytes = v1_side.padded(shape[0] * shape[1])
        expected = [np.empty((num_tensors, num_bytes), np.uint8) for _ in range(self.num_devices)]
        for device, memory in enumerate(expected):
            for tensor in range(num_tensors):
                fill(memory[tensor], v1_side.seed_of(seed, device, tensor))
        self._caches[name] = V1Cache(self, name, cache_id, shape[0], shape[1], expected)
        return self._caches[name]

    def forget(self, cache: V1Cache) -> None:
        """Its memory is no longer looked at."""
        del self._caches[cache.name]

    def deallocate(self, cache: V1Cache) -> None:
        self.call("deallocate_cache", cache)
        self.forget(cache)

    def used_bytes(self) -> list[int]:
        return self.run(v1_side.used_bytes)

    def info(self, cluster_id: int | None = None) -> LLMClusterInfo:
        """How the other end would link with this one, or unlink it."""
        info = LLMClusterInfo()
        info.remote_cluster_id = self.cluster_id if cluster_id is None else cluster_id
        for port in self.ports:
            info.append_local_ip_info(HOST_IP, 0)
            info.append_remote_ip_info(HOST_IP, port)
        return info

    def check_memory(self) -> None:
        for cache in self._caches.values():
            for device, tensors in enumerate(self.run(v1_side.read, cache.name)):
                for tensor, actual in enumerate(tensors):
                    wrong = np.flatnonzero(np.frombuffer(actual, np.uint8) != cache.expected[device][tensor])
                    assert not len(wrong), (
                        f"{len(wrong)} bytes of cache {cache.name!r} of cluster {self.cluster_id}, device {device}, "
                        f"tensor {tensor} are not what they should be, from offset {wrong[0]} to {wrong[-1]} (the "
                        f"tensor has {cache.num_entries} entries of {cache.entry_bytes} bytes)"
                    )

    def reset(self) -> None:
        """No engine, no caches, and the process holds no more than when it was idle for the first time."""
        self.process.recover()
        self.process.reset()
        self.run(v1_side.forget)
        self._caches.clear()
        self.process.check_stderr()
        if self._idle_counts is None or self._idle_counts[0] != self.process.pid:
            self._idle_counts = self.process.pid, self.process.counts()
            return
        idle = self._idle_counts[1]
        if self.process.counts().exceed(idle):
            counts = self.process.settled_counts(idle)
            assert not counts.exceed(idle), f"process {self.process.pid} leaked: {counts}, and {idle} before"


class V1Ends:
    def __init__(self, path: str) -> None:
        self.path = path
        self.prompt = V1End(SideProcess(side_env(path)), 1, LLMRole.PROMPT)
        self.decoder = V1End(SideProcess(side_env(path)), 2, LLMRole.DECODER)

    def init(self, num_devices: int = 1, **options: str) -> None:
        self.prompt.init(num_devices=num_devices, **options)
        self.decoder.init(num_devices=num_devices, **options)

    def link(self) -> None:
        assert self.decoder.process.link_clusters([self.prompt.info()], 5000) == (SUCCESS, [SUCCESS])

    def check_only_path_used(self, end: V1End) -> None:
        assert end.run(v1_side.paths_used) == [{Path[self.path.upper()]}] * end.num_devices

    def check_memory(self) -> None:
        self.prompt.check_memory()
        self.decoder.check_memory()

    def reset(self) -> None:
        self.prompt.reset()
        self.decoder.reset()

    def stop(self) -> None:
        self.prompt.process.stop()
        self.decoder.process.stop()


one_path = pytest.mark.parametrize("v1_processes", PATHS[-1:], indirect=True, scope="session")
"""For tests that the data path makes no difference to."""

two_devices = pytest.mark.parametrize("v1_num_devices", [2])


def request_key(req_id: int, model_id: int = 0) -> CacheKey:
    """Of the PROMPT."""
    return CacheKey(1, req_id, model_id)


def prefix_key(prefix_id: int, model_id: int = 0) -> CacheKey:
    return CacheKey(1, INVALID_ID, model_id, prefix_id)


def blocks_key(model_id: int = 0) -> BlocksCacheKey:
    return BlocksCacheKey(1, model_id)


def copy_entry(
    dst: V1Cache,
    dst_batch: int,
    src: V1Cache,
    src_batch: int,
    *,
    size: int | None = None,
    pairs: list[tuple[int, int]] | None = None,
    dst_offset: int = 0,
    src_offset: int = 0,
) -> None:
    """In the oracle, on all devices; ``pairs`` of tensors (dst, src)."""
    size = dst.entry_bytes - dst_offset if size is None else size
    pairs = [(tensor, tensor) for tensor in range(dst.num_tensors)] if pairs is None else pairs
    for device in range(len(dst.expected)):
        for dst_tensor, src_tensor in pairs:
            target, source = dst.tensor(dst_tensor, device), src.tensor(src_tensor, device)
            target[dst_batch, dst_offset : dst_offset + size] = source[src_batch, src_offset : src_offset + size]


def copy_blocks(dst: V1Cache, dst_blocks: list[int], src: V1Cache, src_blocks: list[int], pairs: Any = None) -> None:
    """In the oracle, on all devices."""
    pairs = [(tensor, tensor) for tensor in range(dst.num_tensors)] if pairs is None else pairs
    for device in range(len(dst.expected)):
        for dst_tensor, src_tensor in pairs:
            dst.tensor(dst_tensor, device)[dst_blocks] = src.tensor(src_tensor, device)[src_blocks]
