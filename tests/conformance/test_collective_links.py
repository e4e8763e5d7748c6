"""link, unlink and query_register_mem_status between two to four processes (spec api-datadist §7)."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llm_datadist_ray import CacheKeyByIdAndIndex, LLMDataDist, LLMRole, RegisterMemStatus
from tests.conformance.collective import (
    call,
    final_status,
    free_port,
    local_table,
    next_change,
    rank_table,
    ranks_of,
    watch,
)
from tests.conformance.conftest import MODES, PATHS
from tests.conformance.pair import HOST_IP, SUCCESS, End, Pair, side_env
from tests.conformance.side_process import SideProcess
from tests.conformance.status import (
    EXIST_LINK,
    KV_CACHE_NOT_EXIST,
    LINK_FAILED,
    NOT_YET_LINK,
    PARAM_INVALID,
    raises,
)
from tests.process_counts import ProcessCounts, settled_counts


# How members find each other is the same on every data path.
@pytest.fixture(scope="module", params=MODES)
def processes(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(PATHS[0], request.param)
    yield pair
    pair.stop()


@pytest.fixture
def idle_pair(processes: Pair) -> Iterator[Pair]:
    yield processes
    try:
        processes.check_memory()
    finally:
        processes.reset()


OK, PREPARING, FAILED = RegisterMemStatus.OK, RegisterMemStatus.PREPARING, RegisterMemStatus.FAILED


def link(end: End, ranks: dict[int, int], table: str, name: str = "pd_comm") -> int:
    return end.process.run(call, "link", name, ranks, table)


def unlink(end: End, comm_id: int) -> None:
    end.process.run(call, "unlink", comm_id)


def status(end: End, comm_id: int) -> RegisterMemStatus:
    return end.process.run(call, "query_register_mem_status", comm_id=comm_id)


def linked_ids(end: End) -> list[int]:
    return sorted(info.cluster_id for info in end.process.links() if info.is_ready)


def link_all(*ends: End, table: str | None = None) -> list[int]:
    table = local_table(len(ends)) if table is None else table
    comm_ids = [link(end, ranks_of(*ends), table) for end in ends]
    assert [end.process.run(final_status, comm_id) for end, comm_id in zip(ends, comm_ids, strict=True)] == [OK] * len(
        ends
    )
    return comm_ids


def pull(source: End, sink: End, dst_index: int = 0) -> None:
    """One entry; the caches ``mem`` of both must be there."""
    src, dst = source.cache_ref("mem"), sink.cache_ref("mem")
    sink.process.pull_cache(src.key(1), "mem", dst_index)
    for tensor in range(4):
        dst.tensor(tensor)[dst_index] = src.tensor(tensor)[1]


@contextmanager
def more_ends(pair: Pair, *cluster_ids: int, **config: object) -> Iterator[list[End]]:
    ends = [End(SideProcess(side_env(pair.path)), number, pair.path, pair.remote_access) for number in cluster_ids]
    try:
        for end in ends:
            end.init(listen=False, **config)
        yield ends
        for end in ends:
            end.check_memory()
    finally:
        for end in ends:
            end.process.stop()


class TestTwo:
    @pytest.mark.parametrize("first", ["lower rank first", "higher rank first"])
    def test_from_link_to_unlink(self, pair: Pair, first: str) -> None:
        """As the samples have it: register, link, wait, pull, unlink (client-patterns §1); in either order."""
        a, b = pair.a, pair.b
        a.cache("mem"), b.cache("mem")
        table, ranks = local_table(2), ranks_of(a, b)
        ends = (a, b) if first == "lower rank first" else (b, a)
        assert link(ends[0], ranks, table) == 1
        assert status(ends[0], 1) == PREPARING
        assert link(ends[1], ranks, table) == 1
        assert [end.process.run(final_status, 1) for end in ends] == [OK, OK]
        pull(a, b)
        pull(b, a)
        for end in ends:
            unlink(end, 1)
            for method in ("unlink", "query_register_mem_status"):
                with raises(NOT_YET_LINK, "1"):
                    end.process.run(call, method, 1)
        assert (linked_ids(a), linked_ids(b)) == ([], [])
        with raises(NOT_YET_LINK):
            a.process.pull_cache(CacheKeyByIdAndIndex(2, 1), "mem")

    def test_again_and_again(self, pair: Pair) -> None:
        """Ids grow; a table used before is as good as a new one."""
        table = local_table(2)
        for expected_id in (1, 2, 3):
            assert link_all(pair.a, pair.b, table=table) == [expected_id, expected_id]
            unlink(pair.a, expected_id)
            unlink(pair.b, expected_id)
        assert (linked_ids(pair.a), linked_ids(pair.b)) == ([], [])

    def test_registering_afterwards_is_not_for_peers(self, pair: Pair) -> None:
        """Spec §7.1: refused for the rest of this life, also after unlink; and the default changes."""
        late = {"name": "late", "remote_accessible": True}
        link_all(pair.a, pair.b)
        pair.a.cache("mem", remote_accessible=None)
        with raises(PARAM_INVALID):
            pair.a.cache(**late)
        unlink(pair.a, 1)
        with raises(PARAM_INVALID):
            pair.a.cache(**late, blocks=True)
        pair.b.cache("mem", remote_accessible=False)

    def test_a_link_that_failed_changes_nothing(self, pair: Pair) -> None:
        with raises(LINK_FAILED):
            link(pair.a, ranks_of(pair.a, pair.b), "{}")
        pair.a.cache("mem", remote_accessible=True)

    def test_before_it_is_ok(self, pair: Pair) -> None:
        """Spec §7.2: transfers before OK are NOT_YET_LINK, although one of the peers is linked already."""
        a, b = pair.a, pair.b
        a.cache("mem"), b.cache("mem")
        a.process.run(watch)
        table = local_table(3)
        for end in (a, b):
            assert link(end, {1: 0, 2: 1, 3: 2}, table) == 1
        assert a.process.run(next_change).is_up
        assert linked_ids(a) == [2]
        with raises(NOT_YET_LINK, "not OK yet"):
            a.process.pull_cache(b.cache_ref("mem").key(), "mem")
        unlink(b, 1)
        unlink(a, 1)
        assert linked_ids(a) == []

    def test_a_link_of_link_clusters_is_not_the_communicators(self, pair: Pair) -> None:
        """It counts, and it stays, on both sides."""
        a, b = pair.a, pair.b
        a.cache("mem"), b.cache("mem")
        pair.link()
        assert link_all(a, b) == [1, 1]
        for end in (a, b):
            unlink(end, 1)
        assert (linked_ids(a), linked_ids(b)) == ([2], [1])
        pull(b, a)
        pull(a, b)

    def test_a_peer_that_is_linked_already(self, pair: Pair) -> None:
        """However its link came about, and without any other step: it counts."""
        a, b = pair.a, pair.b
        a.cache("mem"), b.cache("mem")
        pair.link()
        for end in (b, a):
            assert link(end, ranks_of(a, b), local_table(2)) == 1
            assert end.process.run(final_status, 1) == OK
        pull(a, b)

    def test_switch_role_sees_the_links(self, pair: Pair) -> None:
        link_all(pair.a, pair.b)
        with raises(EXIST_LINK):
            pair.a.process.switch_role(LLMRole.MIX)
        unlink(pair.a, 1)
        unlink(pair.b, 1)
        pair.a.process.switch_role(LLMRole.MIX)

    def test_unlink_knows_its_own_link(self, pair: Pair) -> None:
        """The peer has unlinked and linked again before we unlink: its new link is not dropped with the old one."""
        a, b = pair.a, pair.b
        a.cache("mem"), b.cache("mem")
        table = local_table(2)
        link_all(a, b, table=table)
        unlink(b, 1)
        assert link(b, ranks_of(a, b), table) == 2
        assert b.process.run(final_status, 2) == OK
        unlink(a, 1)
        assert link(a, ranks_of(a, b), table) == 2
        assert a.process.run(final_status, 2) == OK
        pull(a, b)
        pull(b, a)

    def test_the_peer_dies(self, pair: Pair) -> None:
        """OK stays; unlink succeeds; the newcomer can be linked."""
        table = local_table(2)
        link_all(pair.a, pair.b, table=table)
        pair.b.process.restart()
        pair.b.forget()
        assert status(pair.a, 1) == OK
        unlink(pair.a, 1)
        pair.b.init(listen=True)
        comm_ids = link_all(pair.a, pair.b, table=table)
        assert comm_ids == [2, 1]


class TestMore:
    @pytest.mark.parametrize("num_members", [3, 4])
    def test_everybody_reaches_everybody(self, pair: Pair, num_members: int) -> None:
        with more_ends(pair, *range(3, num_members + 1)) as others:
            ends = [pair.a, pair.b, *others]
            for end in ends:
                end.cache("mem")
            assert link_all(*ends) == [1] * num_members
            for end in ends:
                assert linked_ids(end) == sorted(other.cluster_id for other in ends if other is not end)
            for index, end in enumerate(ends):
                pull(ends[index - 1], end, 0)
                pull(ends[(index + 1) % num_members], end, 2)
            for end in ends:
                unlink(end, 1)
            assert [linked_ids(end) for end in ends] == [[]] * num_members

    def test_shared_listener_and_shared_link(self, pair: Pair) -> None:
        """Rank 0 is in three communicators at one address; two of them have a peer in common."""
        with more_ends(pair, 3) as (third,):
            a, b = pair.a, pair.b
            port = {"host_ip": HOST_IP, "device_port": free_port()}
            elsewhere = {"host_ip": HOST_IP, "device_port": free_port()}
            table, three = rank_table(port, {}), rank_table(port, elsewhere, {})
            for end in (a, b, third):
                end.cache("mem")
            assert link_all(a, b, table=table) == [1, 1]
            assert link_all(a, third, table=table) == [2, 1]
            assert link_all(a, b, third, table=three) == [3, 2, 2]
            unlink(a, 1)
            unlink(b, 1)
            pull(a, b)  # communicator 3 has that link, too
            unlink(a, 2)
            pull(a, third)
            unlink(a, 3)
            assert linked_ids(a) == []
            with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
                probe.connect((HOST_IP, int(port["device_port"])))

    def test_the_main_listener_is_shared(self, pair: Pair) -> None:
        """Rank 0's port may be that of ``llm.listenIpInfo``; giving it up leaves the listener alone."""
        table = rank_table({"host_ip": HOST_IP, "device_port": pair.b.port}, {})
        link_all(pair.b, pair.a, table=table)
        unlink(pair.b, 1)
        unlink(pair.a, 1)
        pair.link()

    def test_many_threads(self, pair: Pair) -> None:
        """Any thread may link (client-patterns §2.3): ids are distinct and without gaps."""
        ranks, table = ranks_of(pair.a, pair.b), local_table(2)
        calls = [("run", (call, "link", f"comm {number}", ranks, table), {}) for number in range(8)]
        assert pair.a.process.parallel(calls) == [None] * 8
        assert pair.b.process.parallel(calls) == [None] * 8
        for end in (pair.a, pair.b):
            assert [end.process.run(final_status, comm_id) for comm_id in range(1, 9)] == [OK] * 8
            with raises(NOT_YET_LINK):
                status(end, 9)


class TestAddresses:
    def test_every_candidate_is_tried(self, pair: Pair) -> None:
        """Nobody listens at the first address that the connector knows."""
        port = free_port("127.0.0.2")
        listener = rank_table({"host_ip": "127.0.0.2", "device_port": port}, {})
        connector = rank_table({"device_ip": "127.0.0.3", "host_ip": "127.0.0.2", "device_port": port}, {})
        assert (link(pair.a, {1: 0, 2: 1}, listener), link(pair.b, {1: 0, 2: 1}, connector)) == (1, 1)
        assert [end.process.run(final_status, 1) for end in (pair.a, pair.b)] == [OK, OK]

    def test_past_another_cluster(self, pair: Pair) -> None:
        """A stranger answers at the first address: no link to it is left behind."""
        with more_ends(pair, 3) as (connector,):
            port = pair.b.port
            listener_table = rank_table({"host_ip": "127.0.0.2", "device_port": port}, {})
            table = rank_table({"device_ip": HOST_IP, "host_ip": "127.0.0.2", "device_port": port}, {})
            link(pair.a, {1: 0, 3: 1}, listener_table)
            link(connector, {1: 0, 3: 1}, table)
            assert [end.process.run(final_status, 1) for end in (pair.a, connector)] == [OK, OK]
            assert (linked_ids(connector), linked_ids(pair.a), linked_ids(pair.b)) == ([1], [3], [])

    def test_the_first_local_address_and_the_default_port(self, pair: Pair) -> None:
        """16666 + device_id; an address of another host is passed over (192.0.2.0/24 is nobody's)."""
        device_id = next(number for number in range(200, 2000) if is_free(16666 + number))
        table = rank_table({"device_ip": "192.0.2.1", "host_ip": HOST_IP, "device_id": device_id}, {})
        connector_table = rank_table({"host_ip": HOST_IP, "device_id": device_id}, {}, version="1.0")
        assert (link(pair.a, {1: 0, 2: 1}, table), link(pair.b, {1: 0, 2: 1}, connector_table)) == (1, 1)
        assert [end.process.run(final_status, 1) for end in (pair.a, pair.b)] == [OK, OK]

    def test_a_port_in_use(self, pair: Pair) -> None:
        with socket.create_server((HOST_IP, 0)) as other:
            port = other.getsockname()[1]
            table = rank_table({"host_ip": HOST_IP, "device_port": port}, {})
            with raises(LINK_FAILED, f"host_ip {HOST_IP}, port {port} .device_port"):
                link(pair.a, {1: 0, 2: 1}, table)

    def test_the_highest_rank_needs_no_address(self, pair: Pair) -> None:
        table = rank_table({"host_ip": HOST_IP, "device_port": free_port()}, {"device_ip": "192.0.2.1"})
        link_all(pair.a, pair.b, table=table)

    @pytest.mark.parametrize(
        ("ranks", "table", "what"),
        [
            ({1: 0, 2: 1}, "...", "valid JSON"),
            ({1: 0, 2: 1}, rank_table({"host_ip": HOST_IP}), "rank 1 of cluster 2 is not in the rank table"),
            ({1: 0, 2: 0}, rank_table({"host_ip": HOST_IP}), "two clusters have one rank"),
            ({1: 0, 2: 1}, rank_table({"host_ip": "192.0.2.1"}, {}), "is one of this host"),
            ({1: 0, 2: 1}, rank_table({}, {}), "is one of this host"),
            ({2: 0, 1: 1}, rank_table({}, {}), "no IP address of cluster 2"),
        ],
        ids=["no table", "missing rank", "equal ranks", "foreign", "nothing", "unknown peer"],
    )
    def test_no_communicator(self, pair: Pair, ranks: dict[int, int], table: str, what: str) -> None:
        with raises(LINK_FAILED, what):
            link(pair.a, ranks, table)
        with raises(NOT_YET_LINK):
            status(pair.a, 1)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST_IP, port)) != 0


class TestFailure:
    @pytest.mark.parametrize("ranks", [{1: 0, 2: 1}, {2: 0, 1: 1}], ids=["awaits", "connects"])
    def test_nobody_comes(self, idle_pair: Pair, ranks: dict[int, int]) -> None:
        """FAILED after ``link_total_time``, and for ever; unlink cleans up."""
        a = idle_pair.a
        a.init(listen=False, link_total_time=1, link_retry_count=5)
        table = local_table(2)
        start = time.monotonic()
        assert link(a, ranks, table) == 1
        assert a.process.run(final_status, 1) == FAILED
        assert 0.9 <= time.monotonic() - start < 4
        idle_pair.b.init(listen=False)
        assert link(idle_pair.b, ranks, table) == 1
        a.cache("unused", remote_accessible=False)
        with raises(NOT_YET_LINK):
            a.process.pull_cache(CacheKeyByIdAndIndex(2, 1), "unused")
        assert status(a, 1) == FAILED
        unlink(a, 1)
        with raises(NOT_YET_LINK):
            status(a, 1)

    def test_a_link_that_was_there_works_whatever_becomes_of_the_exchange(self, idle_pair: Pair) -> None:
        """In progress, failed for another member, and unlinked."""
        a, b = idle_pair.a, idle_pair.b
        a.init(listen=False, link_total_time=1)
        b.init(listen=True)
        a.cache("mem"), b.cache("mem")
        idle_pair.link()
        assert link(a, {1: 0, 2: 1, 3: 2}, local_table(3)) == 1
        assert status(a, 1) == PREPARING
        pull(b, a, 0)
        assert a.process.run(final_status, 1) == FAILED
        pull(b, a, 2)
        unlink(a, 1)
        pull(b, a, 3)

    def test_modes_differ(self, idle_pair: Pair) -> None:
        """Spec §4.5: FAILED; the connecting side learns it at once."""
        idle_pair.a.init(listen=False, link_total_time=2)
        idle_pair.b.init(listen=False, remote_access=not idle_pair.remote_access, link_total_time=60)
        table = local_table(2)
        assert link(idle_pair.a, {1: 0, 2: 1}, table) == 1
        assert link(idle_pair.b, {1: 0, 2: 1}, table) == 1
        start = time.monotonic()
        assert idle_pair.b.process.run(final_status, 1) == FAILED
        assert time.monotonic() - start < 5
        assert idle_pair.a.process.run(final_status, 1) == FAILED

    @pytest.mark.parametrize("ranks", [{1: 0, 2: 1}, {2: 0, 1: 1}], ids=["awaits", "connects"])
    def test_unlink_does_not_wait_for_the_time_limit(self, pair: Pair, ranks: dict[int, int]) -> None:
        assert link(pair.a, ranks, local_table(2)) == 1
        start = time.monotonic()
        unlink(pair.a, 1)
        assert time.monotonic() - start < 3
        with raises(NOT_YET_LINK):
            status(pair.a, 1)

    def test_unlink_waits_for_the_try_at_most(self, idle_pair: Pair) -> None:
        """A try ends after ``link_total_time`` / ``link_retry_count``."""
        idle_pair.a.init(listen=False, link_total_time=20, link_retry_count=100)
        with socket.create_server((HOST_IP, 0)) as silent:
            table = rank_table({"host_ip": HOST_IP, "device_port": silent.getsockname()[1]}, {})
            assert link(idle_pair.a, {2: 0, 1: 1}, table) == 1
            connection, _ = silent.accept()
            with connection:
                start = time.monotonic()
                unlink(idle_pair.a, 1)
                assert time.monotonic() - start < 2

    def test_finalize_does_not_either(self, pair: Pair) -> None:
        """Also in the middle of a try: the listener takes the connection and says nothing."""
        with socket.create_server((HOST_IP, 0)) as silent:
            table = rank_table({"host_ip": HOST_IP, "device_port": silent.getsockname()[1]}, {})
            assert link(pair.a, {2: 0, 1: 1}, table) == 1
            connection, _ = silent.accept()
            with connection:
                start = time.monotonic()
                pair.a.reset()
                assert time.monotonic() - start < 3

    def test_a_transfer_of_an_unknown_cache(self, pair: Pair) -> None:
        """The exchange being OK, other errors come through."""
        link_all(pair.a, pair.b)
        pair.a.cache("mem", remote_accessible=False)
        if not pair.remote_access:  # there the local cache would be refused first
            with raises(KV_CACHE_NOT_EXIST):
                pair.a.process.pull_cache(CacheKeyByIdAndIndex(2, 7), "mem")


class TestLimits:
    """In this process; nobody else is needed."""

    @pytest.fixture
    def dist(self) -> Iterator[LLMDataDist]:
        dist = LLMDataDist(LLMRole.PROMPT, 1)
        dist.init({"llm.EnableCacheManager": "1"})
        yield dist
        dist.finalize()

    def test_own_cluster_is_missing(self, dist: LLMDataDist) -> None:
        with raises(PARAM_INVALID, "lacks this process"):
            dist.link("name", {2: 0, 3: 1}, local_table(2))

    def test_512_communicators(self, dist: LLMDataDist) -> None:
        table = local_table(2)
        for number in range(512):
            assert dist.link("name", {1: 0, 2: 1}, table) == number + 1
        with raises(PARAM_INVALID, "512"):
            dist.link("name", {1: 0, 2: 1}, table)
        dist.unlink(300)
        assert dist.link("name", {1: 0, 2: 1}, table) == 513

    @pytest.mark.parametrize("method", ["unlink", "query_register_mem_status"])
    def test_comm_id(self, dist: LLMDataDist, method: str) -> None:
        for bad, error in (("1", TypeError), (None, TypeError), (-1, ValueError), (2**64, ValueError)):
            with pytest.raises(error):
                getattr(dist, method)(bad)
        for unknown in (0, 1, 2**64 - 1):
            with raises(NOT_YET_LINK):
                getattr(dist, method)(unknown)

    def test_threads_end(self, dist: LLMDataDist) -> None:
        """One per exchange, and that of the events, which ends with the engine."""
        before = ProcessCounts.of()
        names = {thread.name for thread in threading.enumerate()}
        table = local_table(2)
        comm_ids = [dist.link(f"comm {number}", {1: 0, 2: 1}, table) for number in range(4)]
        started = {thread.name for thread in threading.enumerate()} - names
        assert started == {"ldr-events-1", *(f"ldr-link-comm {number}" for number in range(4))}
        for comm_id in comm_ids:
            dist.unlink(comm_id)
        assert ({thread.name for thread in threading.enumerate()} - names) == {"ldr-events-1"}
        dist.finalize()
        assert {thread.name for thread in threading.enumerate()} == names
        assert settled_counts(before).threads <= before.threads


def test_unlinked_side_is_told_by_its_next_transfer(pair: Pair) -> None:
    """Local only (spec §7.3): every member unlinks for itself."""
    a, b = pair.a, pair.b
    a.cache("mem"), b.cache("mem")
    link_all(a, b)
    unlink(a, 1)
    with raises(NOT_YET_LINK):
        a.process.pull_cache(b.cache_ref("mem").key(), "mem")
    assert status(b, 1) == OK
    assert b.process.unlink_clusters([a.info(remote=False)], 5000, force=True) == (SUCCESS, [SUCCESS])
    unlink(b, 1)
