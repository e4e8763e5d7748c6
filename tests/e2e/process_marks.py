"""Finds the processes that a test started, however deep: all with its mark in their command line or environment."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

END_DEADLINE_S = 30.0


@contextmanager
def marked_processes(mark: str) -> Iterator[dict[int, int]]:
    """Process id -> its descriptor, which names that very process also when the id is used again."""
    with ExitStack() as stack:
        fds = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid() and _has_mark(entry, mark.encode()):
                try:
                    fds[int(entry.name)] = os.pidfd_open(int(entry.name))
                except ProcessLookupError:
                    continue
                stack.callback(os.close, fds[int(entry.name)])
        yield fds


def _has_mark(entry: Path, mark: bytes) -> bool:
    try:
        return any(mark in (entry / name).read_bytes() for name in ("cmdline", "environ"))
    except OSError:  # it has ended, or is somebody else's
        return False


def wait_until_ended(fds: dict[int, int], deadline_s: float = END_DEADLINE_S) -> list[int]:
    """Waits for processes that were told to end; kills those that did not within the deadline, and returns them."""
    deadline = time.monotonic() + deadline_s
    survivors = []
    for pid, fd in fds.items():
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            survivors.append(pid)
    return survivors
