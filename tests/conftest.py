"""What every test runs under: a watchdog that outlives a hang in native code, and a check for leaks on request."""

from __future__ import annotations

import faulthandler
import gc
import os
from collections.abc import Iterator

import pytest

from tests.process_counts import ProcessCounts, settled_counts

_DEFAULT_TIMEOUT_S = 300.0
_GRACE_S = 20.0
_stderr_fd = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr_fd] = os.dup(2)  # the real one: output is not captured yet


def pytest_unconfigure(config: pytest.Config) -> None:
    faulthandler.cancel_dump_traceback_later()
    os.close(config.stash[_stderr_fd])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """pytest-timeout fails a test whose Python code can still be interrupted. This is for the one that hangs in native
    code with the interpreter lock in its hands: stacks of all threads, and the end of the run."""
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0]) if marker and marker.args else _DEFAULT_TIMEOUT_S
    faulthandler.dump_traceback_later(limit_s + _GRACE_S, exit=True, file=item.config.stash[_stderr_fd])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails a test after which this process holds more descriptors, threads or mappings than before."""
    gc.collect()
    before = ProcessCounts.of()
    yield
    gc.collect()
    assert settled_counts(before) == before
