"""The hixl backend: links are of use to the side that made them (spec api-datadist §4.4, §5, §6.1)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from llm_datadist_ray import CacheKeyByIdAndIndex, LLMClusterInfo, LLMRole
from tests.conformance.collective import call, free_port, links_when_peers_have_gone
from tests.conformance.pair import HOST_IP, CacheRef, End, Pair
from tests.conformance.status import (
    ALREADY_LINK,
    FAILED,
    FEATURE_NOT_ENABLED,
    NOT_YET_LINK,
    PARAM_INVALID,
    SUCCESS,
    TIMEOUT,
    raises,
)

pytestmark = pytest.mark.mode("remote-access")

LINK_TIMEOUT_MS = 5000
HIXL = {"local_comm_res": "", "transfer_backend": "hixl"}


@pytest.fixture
def pair(idle_pair: Pair) -> Iterator[Pair]:
    """Both listen, as they must; a cache ``mem`` on each; not linked."""
    for end in (idle_pair.a, idle_pair.b):
        end.init(listen=True, **HIXL)
        end.cache("mem")
        end.blocks("paged")
    return idle_pair


def one(code: object) -> tuple[object, list[object]]:
    return code, [code]


def link(client: End, server: End, **info: Any) -> None:
    assert client.process.link_clusters([server.info(**info)], LINK_TIMEOUT_MS) == one(SUCCESS)


def only_id(end: End) -> LLMClusterInfo:
    """As the sample unlinks: ``remote_cluster_id`` and nothing else."""
    return end.info(remote=False, local=False)


def pull_and_push(client: End, server: End, *, known_as: int | None = None) -> None:
    """Entry 1 of the server's cache comes to entry 0 here, entry 2 of the client's goes to entry 3 there."""
    here, there = client.cache_ref("mem"), server.cache_ref("mem")
    cluster_id = server.cluster_id if known_as is None else known_as
    client.process.pull_cache(CacheKeyByIdAndIndex(cluster_id, there.cache_id, 1), "mem", 0)
    client.process.push_cache(CacheKeyByIdAndIndex(cluster_id, there.cache_id, 3), "mem", 2)
    for tensor in range(4):
        here.tensor(tensor)[0] = there.tensor(tensor)[1]
        there.tensor(tensor)[3] = here.tensor(tensor)[2]


def cannot(client: End, server: End) -> None:
    for method in ("pull_cache", "push_cache"):
        with raises(NOT_YET_LINK, str(server.cluster_id)):
            getattr(client.process, method)(server.cache_ref("mem").key(), "mem")


class TestDirection:
    def test_only_the_caller_can_use_its_link(self, pair: Pair) -> None:
        link(pair.a, pair.b)
        pull_and_push(pair.a, pair.b)
        cannot(pair.b, pair.a)
        pair.check_only_path_used()

    def test_two_links_are_independent(self, pair: Pair) -> None:
        a, b = pair.a, pair.b
        link(a, b)
        link(b, a)
        pull_and_push(a, b)
        pull_and_push(b, a)
        assert a.process.unlink_clusters([only_id(b)], LINK_TIMEOUT_MS) == one(SUCCESS)
        cannot(a, b)
        pull_and_push(b, a)
        link(a, b)
        pull_and_push(a, b)

    def test_the_sample(self, pair: Pair) -> None:
        """Upstream's hixl_transfer_backend_sample: one pulls while the other pushes, both unlink, both link states
        end (client-patterns §1)."""
        a, b = pair.a, pair.b
        link(a, b)
        link(b, a)
        on_a, on_b = a.cache_ref("paged"), b.cache_ref("paged")
        for _ in range(10):
            a.process.begin("pull_blocks", b.blocks_key(), "paged", [2], [2])
            b.process.begin("push_blocks", a.blocks_key(), "paged", [0, 1], [0, 1])
            assert (a.process.end(), b.process.end()) == (None, None)
        copy_blocks(on_b, on_a, [2, 0, 1])
        for end, other in ((a, b), (b, a)):
            assert end.process.unlink_clusters([only_id(other)], LINK_TIMEOUT_MS) == one(SUCCESS)
        # One's own link has gone with the call; what the other one had made follows it.
        assert [link for end in (a, b) for link in end.process.links() if not link.is_inbound] == []
        assert [end.process.run(links_when_peers_have_gone) for end in (a, b)] == [[], []]

    def test_link_states_tell_which_is_whose(self, pair: Pair) -> None:
        link(pair.a, pair.b)
        (ours,) = pair.a.process.run(call, "link_states")
        (theirs,) = pair.b.process.run(call, "link_states")
        assert (ours.cluster_id, ours.is_inbound, ours.is_ready) == (2, False, True)
        assert (theirs.cluster_id, theirs.is_inbound, theirs.is_ready) == (1, True, True)


def copy_blocks(source: CacheRef, sink: CacheRef, blocks: list[int]) -> None:
    for tensor in range(4):
        sink.tensor(tensor)[blocks] = source.tensor(tensor)[blocks]


class TestLink:
    def test_filed_under_the_id_that_was_asked_for(self, pair: Pair) -> None:
        link(pair.a, pair.b, cluster_id=77)
        pull_and_push(pair.a, pair.b, known_as=77)
        cannot(pair.a, pair.b)
        assert pair.a.process.unlink_clusters([only_id(pair.b)], LINK_TIMEOUT_MS) == one(SUCCESS)  # 2 is not linked
        pull_and_push(pair.a, pair.b, known_as=77)

    def test_an_address_that_is_linked(self, pair: Pair) -> None:
        link(pair.a, pair.b)
        for cluster_id in (2, 77):
            again = [pair.b.info(cluster_id=cluster_id)]
            assert pair.a.process.link_clusters(again, LINK_TIMEOUT_MS) == one(ALREADY_LINK)
        pull_and_push(pair.a, pair.b)

    def test_the_own_address(self, pair: Pair) -> None:
        assert pair.a.process.link_clusters([pair.a.info()], LINK_TIMEOUT_MS) == one(PARAM_INVALID)
        assert pair.a.process.link_clusters([pair.a.info(cluster_id=9)], LINK_TIMEOUT_MS) == one(PARAM_INVALID)
        assert pair.a.process.links() == []

    def test_addresses(self, pair: Pair) -> None:
        """Local ones are demanded and not looked at; there is exactly one remote one."""
        with raises(PARAM_INVALID, "local_ip_info_list is empty"):
            pair.a.process.link_clusters([pair.b.info(local=False)], LINK_TIMEOUT_MS)
        two = pair.b.info()
        two.append_remote_ip_info(HOST_IP, 1)
        for info in (two, pair.b.info(remote=False)):
            assert pair.a.process.link_clusters([info], LINK_TIMEOUT_MS) == one(PARAM_INVALID)
        info = pair.b.info()
        info.append_local_ip_info("10.1.2.3", 99)
        assert pair.a.process.link_clusters([info], LINK_TIMEOUT_MS) == one(SUCCESS)

    def test_nobody_listens(self, pair: Pair) -> None:
        """The backend has no code of its own for it."""
        assert pair.a.process.link_clusters([info_of(free_port())], LINK_TIMEOUT_MS) == one(FAILED)

    def test_no_answer(self, pair: Pair) -> None:
        with socket.create_server((HOST_IP, 0)) as silent:
            assert pair.a.process.link_clusters([info_of(silent.getsockname()[1])], 300) == one(TIMEOUT)

    def test_another_protocol(self, pair: Pair) -> None:
        with socket.create_server((HOST_IP, 0)) as listener:
            pair.a.process.begin("link_clusters", [info_of(listener.getsockname()[1])], LINK_TIMEOUT_MS)
            connection, _ = listener.accept()
            with connection, suppress(OSError):  # it may hang up at the first bytes
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
                connection.shutdown(socket.SHUT_WR)
            assert pair.a.process.end() == one(FAILED)

    @pytest.mark.parametrize("client", ["hixl", "comm"])
    def test_the_other_backend(self, pair: Pair, client: str) -> None:
        pair.b.reset()
        pair.b.init(listen=True)
        ends = (pair.a, pair.b) if client == "hixl" else (pair.b, pair.a)
        assert ends[0].process.link_clusters([ends[1].info()], LINK_TIMEOUT_MS) == one(PARAM_INVALID)
        assert [end.process.links() for end in ends] == [[], []]

    def test_many(self, pair: Pair) -> None:
        """One good, one dead, one empty: codes in order, the good one stays."""
        infos = [info_of(free_port()), pair.b.info(), pair.a.info(remote=False)]
        codes = [FAILED, SUCCESS, PARAM_INVALID]
        assert pair.a.process.link_clusters(infos, LINK_TIMEOUT_MS) == (PARAM_INVALID, codes)
        pull_and_push(pair.a, pair.b)


def info_of(port: int) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = 2
    info.append_local_ip_info(HOST_IP, 0)
    info.append_remote_ip_info(HOST_IP, port)
    return info


class TestUnlink:
    @pytest.mark.parametrize("force", [False, True])
    def test_needs_no_address(self, pair: Pair, force: bool) -> None:
        link(pair.a, pair.b)
        assert pair.a.process.unlink_clusters([only_id(pair.b)], LINK_TIMEOUT_MS, force=force) == one(SUCCESS)
        cannot(pair.a, pair.b)
        assert pair.a.process.links() == []

    def test_an_address_is_not_looked_at(self, pair: Pair) -> None:
        link(pair.a, pair.b)
        two = pair.b.info()
        two.append_remote_ip_info(HOST_IP, 1)
        assert pair.a.process.unlink_clusters([two], LINK_TIMEOUT_MS) == one(SUCCESS)
        cannot(pair.a, pair.b)

    @pytest.mark.parametrize("force", [False, True])
    def test_the_passive_side_has_none(self, pair: Pair, force: bool) -> None:
        """Success, and the other side's link stays (client-patterns §1, push_blocks_sample)."""
        link(pair.a, pair.b)
        assert pair.b.process.unlink_clusters([only_id(pair.a)], LINK_TIMEOUT_MS, force=force) == one(SUCCESS)
        pull_and_push(pair.a, pair.b)

    def test_again_and_again(self, pair: Pair) -> None:
        for _ in range(5):
            link(pair.a, pair.b)
            pull_and_push(pair.a, pair.b)
            assert pair.a.process.unlink_clusters([only_id(pair.b)], LINK_TIMEOUT_MS) == one(SUCCESS)

    def test_no_clusters(self, pair: Pair) -> None:
        assert pair.a.process.link_clusters([]) == (PARAM_INVALID, [])
        assert pair.a.process.unlink_clusters([]) == (PARAM_INVALID, [])


class TestPeerRestart:
    def test_server(self, pair: Pair) -> None:
        link(pair.a, pair.b)
        pair.b.process.restart()
        pair.b.forget()
        assert pair.a.process.wait_for_link_down(2, 5.0)
        pair.b.init(listen=True, **HIXL)
        pair.b.cache("mem")
        cannot(pair.a, pair.b)
        link(pair.a, pair.b)
        pull_and_push(pair.a, pair.b)

    def test_client(self, pair: Pair) -> None:
        """Its old link does not stand in the way of the new one, nor of ours to it."""
        link(pair.a, pair.b)
        link(pair.b, pair.a)
        pair.a.process.restart()
        pair.a.forget()
        assert pair.b.process.wait_for_link_down(1, 5.0)
        pair.a.init(listen=True, **HIXL)
        pair.a.cache("mem")
        link(pair.a, pair.b)
        link(pair.b, pair.a)
        pull_and_push(pair.a, pair.b)
        pull_and_push(pair.b, pair.a)


def test_no_collective_links(pair: Pair) -> None:
    for method, args in (
        ("link", ("name", {1: 0, 2: 1}, "{}")),
        ("unlink", (1,)),
        ("query_register_mem_status", (1,)),
    ):
        with raises(FEATURE_NOT_ENABLED, method):
            pair.a.process.run(call, method, *args)


class TestSwitchRole:
    def test_links_and_listener_stay(self, pair: Pair) -> None:
        link(pair.a, pair.b)
        for end in (pair.a, pair.b):
            end.process.switch_role(LLMRole.MIX)
            assert end.process.port() == end.port
        pull_and_push(pair.a, pair.b)
        link(pair.b, pair.a)

    def test_the_same_address(self, pair: Pair) -> None:
        """That of init, or the port that it came to."""
        for port in (0, pair.a.port):
            pair.a.process.switch_role(LLMRole.DECODER, {"llm.listenIpInfo": f"{HOST_IP}:{port}"})
        assert pair.a.process.port() == pair.a.port

    @pytest.mark.parametrize("address", ["127.0.0.2:0", f"{HOST_IP}:1"])
    def test_another_address(self, pair: Pair, address: str) -> None:
        with raises(FEATURE_NOT_ENABLED, "listenIpInfo"):
            pair.a.process.switch_role(LLMRole.DECODER, {"llm.listenIpInfo": address})
        assert pair.a.process.port() == pair.a.port
        link(pair.b, pair.a)
