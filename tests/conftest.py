"""What every test runs under: a watchdog that outlives a hang in native code, and a check of what was logged; a check
for leaks where a directory asks for it."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
from collections.abc import Iterator

import pytest

from tests.process_counts import ProcessCounts, settled_counts

_LOGGERS = ("LLM_DATADIST", "llm_datadist_ray")
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


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.name} {record.levelname}: {record.getMessage()}")


@pytest.fixture(autouse=True)
def no_unexpected_logs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test during which this process logged a warning or an error, unless it is marked ``logs``: then at
    least one must contain the marker's text."""
    records = _Records()
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(records)
        if logger.getEffectiveLevel() > logging.WARNING:
            logger.setLevel(logging.WARNING)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(records)
        logger.setLevel(level)
    marker = request.node.get_closest_marker("logs")
    if marker is None:
        assert not records.texts
    else:
        assert any(marker.args[0] in text for text in records.texts), records.texts


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test after which this process holds more descriptors, threads or mappings than before."""
    before = ProcessCounts.of()
    yield
    request.node.funcargs.clear()  # what the fixtures made, and nobody needs any more
    if not ProcessCounts.of().exceed(before):
        return
    gc.collect()  # slow in a test process, and so only when it matters
    after = settled_counts(before)
    assert not after.exceed(before), f"leaked: {after} after the test, {before} before it"
