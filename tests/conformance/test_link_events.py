"""LLMDataDist.on_link_change and link_states (design section 4: ours, not upstream's)."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from llm_datadist_ray import LLMDataDist, LLMRole
from llm_datadist_ray._native import NativeEngine
from tests.conformance.collective import call, end_watch, next_change, watch
from tests.conformance.conftest import MODES, PATHS
from tests.conformance.pair import Pair
from tests.conformance.status import SUCCESS

TIMEOUT_S = 10.0


@pytest.fixture(scope="module", params=MODES)
def processes(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(PATHS[0], request.param)
    yield pair
    pair.stop()


@pytest.fixture
def pair(processes: Pair) -> Iterator[Pair]:
    processes.init()
    yield processes
    processes.reset()


@pytest.fixture
def watched_pair(pair: Pair) -> Pair:
    """Linked; both have been told."""
    for end in (pair.a, pair.b):
        end.process.run(watch)
    pair.link()
    for end, other in ((pair.a, pair.b), (pair.b, pair.a)):
        change = end.process.run(next_change)
        incarnation = other.process.info().incarnation
        assert (change.cluster_id, change.incarnation, change.is_up, change.reason) == (
            other.cluster_id,
            incarnation,
            True,
            "",
        )
    return pair


def test_unlinked_by_both(watched_pair: Pair) -> None:
    a, b = watched_pair.a, watched_pair.b
    assert a.process.unlink_clusters([b.info()], 5000)[0] == SUCCESS
    for end, other in ((a, b), (b, a)):
        change = end.process.run(next_change)
        assert (change.cluster_id, change.is_up, change.reason) == (other.cluster_id, False, "unlinked")
    watched_pair.link()
    assert [end.process.run(next_change).is_up for end in (a, b)] == [True, True]


def test_dropped_by_the_other(watched_pair: Pair) -> None:
    """With force nobody asked us."""
    a, b = watched_pair.a, watched_pair.b
    assert b.process.unlink_clusters([a.info(remote=False)], 5000, force=True)[0] == SUCCESS
    assert b.process.run(next_change).reason == "unlinked"
    change = a.process.run(next_change)
    assert (change.cluster_id, change.is_up, change.reason) == (2, False, "link broken")


def test_the_peer_dies(watched_pair: Pair) -> None:
    watched_pair.b.process.restart()
    watched_pair.b.forget()
    change = watched_pair.a.process.run(next_change)
    assert (change.cluster_id, change.is_up, change.reason) == (2, False, "link broken")
    (state,) = watched_pair.a.process.run(call, "link_states")
    assert (state.cluster_id, state.is_ready) == (2, False)


def test_the_end_of_a_watch(watched_pair: Pair) -> None:
    a, b = watched_pair.a, watched_pair.b
    a.process.run(end_watch)
    assert a.process.unlink_clusters([b.info()], 5000)[0] == SUCCESS
    assert b.process.run(next_change).reason == "unlinked"
    assert a.process.run(next_change, 0.0) is None


def test_states(watched_pair: Pair) -> None:
    for end, other in ((watched_pair.a, watched_pair.b), (watched_pair.b, watched_pair.a)):
        (state,) = end.process.run(call, "link_states")
        assert (state.cluster_id, state.is_ready, state.is_inbound) == (other.cluster_id, True, False)
        assert state.peer_pid == other.process.pid


class TestInThisProcess:
    @pytest.fixture
    def dist(self) -> Iterator[LLMDataDist]:
        dist = LLMDataDist(LLMRole.PROMPT, 1)
        dist.init({"llm.EnableCacheManager": "1", "llm.listenIpInfo": "127.0.0.1:0"})
        yield dist
        dist.finalize()

    def link(self, dist: LLMDataDist) -> None:
        """A peer that links and goes."""
        with NativeEngine(cluster_id=2, remote_access=False) as peer:
            peer.link(ip="127.0.0.1", port=dist.native_engine.info().listen_port, timeout_s=TIMEOUT_S)

    @pytest.mark.logs("failed for LinkChange")
    @pytest.mark.parametrize("error", [ValueError("cannot handle it"), SystemExit(1)], ids=repr)
    def test_a_callback_that_fails_is_logged_and_alone(self, dist: LLMDataDist, error: BaseException) -> None:
        seen, has_seen_end = [], threading.Event()

        def fail(change: object) -> None:
            raise error

        def record(change: object) -> None:
            seen.append(change.is_up)
            if not change.is_up:
                has_seen_end.set()

        dist.on_link_change(fail)
        dist.on_link_change(record)
        self.link(dist)
        assert has_seen_end.wait(TIMEOUT_S)
        assert seen == [True, False]

    def test_in_its_own_thread_which_finalize_ends(self, dist: LLMDataDist) -> None:
        threads, told = [], threading.Event()

        def record(change: object) -> None:
            threads.append(threading.current_thread())
            told.set()

        assert not [thread for thread in threading.enumerate() if thread.name.startswith("ldr-events")]
        dist.on_link_change(record)
        self.link(dist)
        assert told.wait(TIMEOUT_S)
        assert threads[0].name == "ldr-events-1"
        dist.finalize()
        assert not threads[0].is_alive()
