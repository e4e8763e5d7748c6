"""Fixtures of :mod:`tests.conformance.v1_ends`: a pytest plugin, which test modules name in ``pytest_plugins``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.conftest import PATHS
from tests.conformance.v1_ends import V1Ends


@pytest.fixture(scope="session", params=PATHS)
def v1_processes(request: pytest.FixtureRequest) -> Iterator[V1Ends]:
    ends = V1Ends(request.param)
    yield ends
    ends.stop()


@pytest.fixture
def v1_num_devices() -> int:
    return 1


@pytest.fixture
def v1_idle(v1_processes: V1Ends) -> Iterator[V1Ends]:
    """Two processes without engines. After the test every byte of every cache must be what the oracle says."""
    yield v1_processes
    try:
        v1_processes.check_memory()
    finally:
        v1_processes.reset()


@pytest.fixture
def v1_unlinked(v1_idle: V1Ends, v1_num_devices: int) -> V1Ends:
    """Both initialised, not linked."""
    v1_idle.init(v1_num_devices)
    return v1_idle


@pytest.fixture
def v1_linked(v1_unlinked: V1Ends) -> V1Ends:
    v1_unlinked.link()
    return v1_unlinked
