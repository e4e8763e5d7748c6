"""What the Python face of the transfer API costs: ``pull_blocks`` against the bare native call for the same transfer.

Two engines in this process, linked over shared memory; the call of the public API and the native one alternate, so
that both see the same machine. The median of their differences, round by round, is what validation and conversion
cost.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from llm_datadist_ray import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    Placement,
)
from llm_datadist_ray._native import (
    CacheKind,
    Direction,
    KeyKind,
    Move,
    NativeEngine,
    NativeKey,
    RemoteBy,
    Transfer,
    alloc_shared,
)
from llm_datadist_ray._native._ldr import ffi, lib
from llm_datadist_ray._native.status import check

NUM_BLOCKS = 16_384
BLOCK_BYTES = 64  # small, so that the copy does not hide the face
_REMOTE, _LOCAL = 2, 1


@dataclass(frozen=True)
class Case:
    """``limit_us``: what the face may cost; medians in microseconds."""

    name: str
    num_blocks: int
    form: str
    limit_us: float


CASES = [
    Case("one block, list", 1, "list", 5.0),
    Case("one block, int32 array", 1, "int32", 5.0),
    Case("16 384 blocks, lists", NUM_BLOCKS, "list", 2000.0),
    Case("16 384 blocks, int32 arrays", NUM_BLOCKS, "int32", 200.0),
    Case("16 384 blocks, int64 arrays", NUM_BLOCKS, "int64", 200.0),
]


@dataclass(frozen=True)
class Result:
    name: str
    public_us: float
    native_us: float
    face_us: float
    face_best_us: float
    limit_us: float
    rounds: int

    @property
    def is_met(self) -> bool:
        return self.face_us <= self.limit_us


class Bench:
    """A public ``pull_blocks`` and its native twin, and the memory that proves what they moved."""

    def __init__(self, datadist: LLMDataDist, peer: NativeEngine) -> None:
        rng = np.random.default_rng(1)
        self.source = alloc_shared(NUM_BLOCKS * BLOCK_BYTES).reshape(NUM_BLOCKS, BLOCK_BYTES)
        self.source[:] = rng.integers(0, 256, self.source.shape, np.uint8)
        self.target = np.zeros_like(self.source)
        peer.register_cache(
            kind=CacheKind.BLOCKS,
            placement=Placement.DEVICE,
            remote_accessible=True,
            num_entries=NUM_BLOCKS,
            tensor_bytes=self.source.nbytes,
            addresses=[self.source.ctypes.data],
            keys=[NativeKey(KeyKind.BLOCKS, 0, 0)],
        )
        self.manager = datadist.cache_manager
        self.engine = datadist.native_engine
        desc = CacheDesc(1, list(self.target.shape), DataType.DT_UINT8)
        self.cache = self.manager.register_blocks_cache(desc, [self.target.ctypes.data])
        self.key = BlocksCacheKey(_REMOTE, 0)

    def lists(self, case: Case) -> tuple[Any, Any]:
        rng = np.random.default_rng(2)
        src = rng.permutation(NUM_BLOCKS)[: case.num_blocks]
        dst = rng.permutation(NUM_BLOCKS)[: case.num_blocks]
        if case.form == "list":
            return src.tolist(), dst.tolist()
        return src.astype(case.form), dst.astype(case.form)

    def native_call(self, src: Any, dst: Any) -> Callable[[], None]:
        transfer = Transfer(
            direction=Direction.PULL,
            cluster_id=_REMOTE,
            local_cache_id=self.cache.cache_id,
            move=Move.BLOCKS,
            remote_by=RemoteBy.BLOCKS_KEY,
            src_blocks=src,
            dst_blocks=dst,
            timeout_s=10.0,
        )
        handle = self.engine._native._pointer

        def call() -> None:
            check(lib.ldr_transfer(handle, transfer.params, ffi.NULL))

        return call

    def run(self, case: Case, rounds: int) -> Result:
        src, dst = self.lists(case)
        native = self.native_call(src, dst)
        manager, key, cache = self.manager, self.key, self.cache

        def public() -> None:
            manager.pull_blocks(key, cache, src, dst)

        self.target[:] = 0
        public()
        expected = np.zeros_like(self.target)
        expected[np.asarray(dst)] = self.source[np.asarray(src)]
        if not np.array_equal(self.target, expected):
            raise click.ClickException(f"{case.name}: the bytes that were moved are wrong")
        batch = 200 if case.num_blocks == 1 else 3
        times: dict[Callable[[], None], list[float]] = {public: [], native: []}
        for _ in range(rounds):
            for call, measured in times.items():
                start = time.perf_counter_ns()
                for _ in range(batch):
                    call()
                measured.append((time.perf_counter_ns() - start) / batch / 1000)
        public_us, native_us = (statistics.median(measured) for measured in times.values())
        differences = [a - b for a, b in zip(times[public], times[native], strict=True)]
        face_us, best_us = statistics.median(differences), min(differences)
        return Result(case.name, public_us, native_us, face_us, best_us, case.limit_us, rounds)


@contextmanager
def linked_bench() -> Iterator[Bench]:
    config = LLMConfig()
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    datadist = LLMDataDist(LLMRole.DECODER, _LOCAL)
    with NativeEngine(cluster_id=_REMOTE, remote_access=True, listen_ip="127.0.0.1", listen_port=0) as peer:
        datadist.init(config.generate_options())
        try:
            datadist.native_engine.link(ip="127.0.0.1", port=peer.info().listen_port, timeout_s=5.0)
            yield Bench(datadist, peer)
        finally:
            datadist.finalize()


@click.command()
@click.option("--rounds", default=31, show_default=True, help="Rounds of each case; the medians are compared.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results there.")
def main(rounds: int, json_path: Path | None) -> None:
    """Measures the Python face of pull_blocks; exit code 1 when a limit is not met."""
    with linked_bench() as bench:
        results = [bench.run(case, rounds) for case in CASES]
    table = Table("medians in us", "public", "native", "face", "its best round", "limit", "")
    for result in results:
        numbers = (result.public_us, result.native_us, result.face_us, result.face_best_us, result.limit_us)
        table.add_row(result.name, *(f"{number:.2f}" for number in numbers), "PASS" if result.is_met else "FAIL")
    Console().print(table)
    if json_path is not None:
        machine = {"machine": platform.machine(), "python": platform.python_version(), "system": platform.release()}
        report = {**machine, "results": [asdict(result) for result in results]}
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    if not all(result.is_met for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
