"""One pair of processes per path and mode for a run; every test starts with fresh engines on both ends."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from llm_datadist_ray._native import parse_paths
from tests.conformance.pair import Pair
from tests.conformance.rows import rows_with_tests

PATHS = [str(path) for path in parse_paths(os.environ.get("LDR_PATHS"))]
MODES = ["two-sided", "remote-access"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pair_processes" in metafunc.fixturenames:
        cases = [(path, mode) for path in PATHS for mode in MODES]
        marker = metafunc.definition.get_closest_marker("mode")
        if marker:
            cases = [case for case in cases if case[1] == marker.args[0]]
        ids = [f"{path}-{mode}" for path, mode in cases]
        metafunc.parametrize("pair_processes", cases, ids=ids, indirect=True, scope="session")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Every row of the interface lists with its test, and how often that passed in this run."""
    passed: dict[str, int] = {}
    failed: set[str] = set()
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            if not isinstance(report, pytest.TestReport) or "tests/conformance/" not in report.nodeid:
                continue
            name = report.nodeid.rpartition("::")[2].partition("[")[0]
            if outcome == "passed":
                passed[name] = passed.get(name, 0) + 1
            else:
                failed.add(name)
    rows = rows_with_tests()
    if not any(name.removeprefix("test_") in rows for name in passed):
        return
    terminalreporter.section("rows of the interface lists")
    for row, test in rows.items():
        name = f"test_{row}"
        if test is None:
            state = "MISSING"
        elif name in failed:
            state = "FAILED"
        else:
            state = f"{passed[name]} passed" if name in passed else "not run"
        terminalreporter.write_line(f"{row:58} {state:10}  {test or ''}")


@pytest.fixture(autouse=True)
def leaves_nothing(no_leaks: None) -> None:
    """Every test of this directory runs under the check for leaks; the processes of a pair have one of their own."""


@pytest.fixture(scope="session")
def pair_processes(request: pytest.FixtureRequest) -> Iterator[Pair]:
    path, mode = request.param
    pair = Pair(path, mode)
    yield pair
    pair.stop()


@pytest.fixture
def idle_pair(pair_processes: Pair) -> Iterator[Pair]:
    """Two processes without engines. After the test every byte of every cache must be what the oracle says."""
    yield pair_processes
    try:
        pair_processes.check_memory()
    finally:
        pair_processes.reset()


@pytest.fixture
def pair(idle_pair: Pair) -> Pair:
    """Both initialised, not linked."""
    idle_pair.init()
    return idle_pair


@pytest.fixture
def linked_pair(pair: Pair) -> Pair:
    """Linked before anything is registered, which works here and is more than the spec asks for (spec §5.7)."""
    pair.link()
    return pair
