"""What a process holds that it could leak: descriptors, threads, mappings."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessCounts:
    descriptors: int
    threads: int
    mappings: int
    """Of files and shared memory; not of libraries, which an import brings once, nor the allocator's own ones."""

    @classmethod
    def of(cls, pid: int | None = None) -> ProcessCounts:
        root = Path("/proc") / str(pid or os.getpid())
        maps = (root / "maps").read_text().splitlines()
        return cls(
            descriptors=len(os.listdir(root / "fd")),
            threads=len(os.listdir(root / "task")),
            mappings=sum(1 for line in maps if len(line.split()) > 5 and "[" not in line and ".so" not in line),
        )

    def exceed(self, other: ProcessCounts) -> bool:
        """More of anything."""
        return self.descriptors > other.descriptors or self.threads > other.threads or self.mappings > other.mappings


def settled_counts(expected: ProcessCounts, pid: int | None = None, timeout_s: float = 5.0) -> ProcessCounts:
    """The counts once they equal the expected ones, or what they are when the time is up.

    Threads that have ended and links whose peer has gone are cleared away by others, so the first look may be early.
    """
    deadline = time.monotonic() + timeout_s
    while (counts := ProcessCounts.of(pid)) != expected and time.monotonic() < deadline:
        time.sleep(0.01)  # procfs has no events
    return counts
