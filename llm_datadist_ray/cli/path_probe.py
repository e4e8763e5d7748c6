"""Tries each data path between two processes: links, pulls blocks, compares every byte and takes the time.

Two processes and not two engines in one, because that is what decides: a process may always read its own memory.
"""

from __future__ import annotations

import json
import secrets
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from llm_datadist_ray._native import NativeEngine, Path

LOOPBACK = "127.0.0.1"
SOURCE_CLUSTER_ID = 1
NUM_BLOCKS = 2048
BLOCK_BYTES = 16 * 1024
_SINK_CLUSTER_ID = 100
_NUM_PULLS = 3
_SOURCE_DEADLINE_S = 30.0
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class PathProbe:
    """``error`` is empty when the path works; then ``gb_per_s`` is the best of some pulls."""

    name: str
    gb_per_s: float = 0.0
    error: str = ""


class ProbeFailed(RuntimeError):
    """Not a path that is missing: the other process did not start, or a path moved wrong bytes."""


def probe_paths() -> Iterator[PathProbe]:
    """One result per data path, each as soon as it is known. Needs the compiled module. Raises ProbeFailed."""
    from llm_datadist_ray._native import DATA_PATHS

    secret = secrets.token_bytes(32)
    with _source_process(secret) as source:
        for path in DATA_PATHS:
            yield _probe(path, source, secret)


def _probe(path: Path, source: dict[str, Any], secret: bytes) -> PathProbe:
    from llm_datadist_ray._native import NativeEngine, NativeError

    blocks = make_blocks()
    try:
        with NativeEngine(
            cluster_id=_SINK_CLUSTER_ID + path, remote_access=True, paths=str(path), secret=secret
        ) as sink:
            sink.link(ip=LOOPBACK, port=source["port"], timeout_s=_TIMEOUT_S)
            return PathProbe(str(path), gb_per_s=_pull(sink, blocks, path, source["cache_id"]))
    except NativeError as error:
        return PathProbe(str(path), error=str(error))


def _pull(sink: NativeEngine, blocks: np.ndarray, path: Path, remote_cache_id: int) -> float:
    """The best rate in GB/s. NativeError when a pull fails, ProbeFailed when one lies about its path or its bytes."""
    from llm_datadist_ray._native import Direction, Move, RemoteBy, Transfer

    cache_id = register(sink, blocks)
    expected = pattern()
    order = list(range(NUM_BLOCKS))
    transfer = Transfer(
        direction=Direction.PULL,
        cluster_id=SOURCE_CLUSTER_ID,
        local_cache_id=cache_id,
        move=Move.BLOCKS,
        remote_by=RemoteBy.CACHE_ID,
        remote_cache_id=remote_cache_id,
        src_blocks=order,
        dst_blocks=order[::-1],
        timeout_s=_TIMEOUT_S,
    )
    best_gb_per_s = 0.0
    for _ in range(_NUM_PULLS):
        blocks[:] = 0
        result = sink.transfer(transfer)
        if result.path != path or not (blocks[::-1] == expected).all():
            raise ProbeFailed(f"a pull over {path} said that it succeeded over {result.path}, but brought wrong bytes")
        best_gb_per_s = max(best_gb_per_s, result.num_bytes / result.latency_s / 1e9)
    return best_gb_per_s


def make_blocks() -> np.ndarray:
    """``uint8[NUM_BLOCKS, BLOCK_BYTES]`` of zeros that every path can reach; must outlive the engine that knows it."""
    from llm_datadist_ray._native import alloc_shared

    return alloc_shared(NUM_BLOCKS * BLOCK_BYTES).reshape(NUM_BLOCKS, BLOCK_BYTES)


def register(engine: NativeEngine, blocks: np.ndarray) -> int:
    from llm_datadist_ray._native import CacheKind
    from llm_datadist_ray.types import Placement

    return engine.register_cache(
        kind=CacheKind.BLOCKS,
        placement=int(Placement.DEVICE),
        remote_accessible=True,
        num_entries=NUM_BLOCKS,
        tensor_bytes=blocks.nbytes,
        addresses=[blocks.ctypes.data],
    )


def pattern() -> np.ndarray:
    """What the source holds: the same bytes in every process, different in every block."""
    import numpy as np

    return np.random.default_rng(seed=1).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)


@contextmanager
def _source_process(secret: bytes) -> Iterator[dict[str, Any]]:
    """What the source said about itself; it ends when its standard input does."""
    command = [sys.executable, "-m", "llm_datadist_ray.cli.probe_source"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin and process.stdout and process.stderr
        try:
            process.stdin.write(secret.hex().encode() + b"\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], _SOURCE_DEADLINE_S)
            line = process.stdout.readline() if ready else b""
            if not line:
                process.kill()
                reason = process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
                raise ProbeFailed(reason or f"the source process said nothing within {_SOURCE_DEADLINE_S:.0f} s")
            yield json.loads(line)
        finally:
            process.stdin.close()
            try:
                process.wait(_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
