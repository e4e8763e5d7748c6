"""link_clusters and unlink_clusters between two processes (spec api-datadist §4, §5)."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import suppress

import pytest

from llm_datadist_ray import CacheKeyByIdAndIndex, LLMClusterInfo
from tests.conformance.pair import End, Pair, side_env
from tests.conformance.side_process import SideProcess
from tests.conformance.status import (
    ALREADY_LINK,
    FAILED,
    LINK_FAILED,
    NOT_YET_LINK,
    PARAM_INVALID,
    SUCCESS,
    TIMEOUT,
    UNLINK_FAILED,
    raises,
)

LINK_TIMEOUT_MS = 5000


def one(code: object) -> tuple[object, list[object]]:
    return code, [code]


def pull_works(source: End, sink: End) -> None:
    src, dst = source.cache("src"), sink.cache("dst")
    sink.process.pull_cache(src.key(1), "dst", 0)
    for tensor in range(4):
        dst.tensor(tensor)[0] = src.tensor(tensor)[1]


def pull_gives_not_yet_link(pair: Pair) -> None:
    pair.a.cache("unused")
    with raises(NOT_YET_LINK, "2"):
        pair.a.process.pull_cache(CacheKeyByIdAndIndex(2, 1), "unused")


class TestLink:
    def test_second_link_of_a_live_peer(self, linked_pair: Pair) -> None:
        assert linked_pair.a.process.link_clusters([linked_pair.b.info()], LINK_TIMEOUT_MS) == one(ALREADY_LINK)
        pull_works(linked_pair.b, linked_pair.a)

    def test_the_path_is_the_allowed_one(self, linked_pair: Pair) -> None:
        for end in (linked_pair.a, linked_pair.b):
            assert [[str(path) for path in link.paths] for link in end.process.links()] == [[linked_pair.path]]

    def test_wrong_cluster_id(self, pair: Pair) -> None:
        """Filed under the peer's own id; the wrong one is not linked (spec §4.3)."""
        assert pair.a.process.link_clusters([pair.b.info(cluster_id=77)], LINK_TIMEOUT_MS) == one(SUCCESS)
        pair.a.cache("unused")
        with raises(NOT_YET_LINK, "77"):
            pair.a.process.pull_cache(CacheKeyByIdAndIndex(77, 1), "unused")
        pull_works(pair.b, pair.a)

    @pytest.mark.parametrize(
        ("config", "listen", "num_local", "code"),
        [
            ({}, False, 2, PARAM_INVALID),
            ({"local_comm_res": ""}, False, 2, PARAM_INVALID),
            ({"local_comm_res": ""}, True, 2, SUCCESS),
            ({"local_comm_res": "{}"}, False, 2, SUCCESS),
            ({"local_comm_res": "{}"}, False, 0, SUCCESS),
        ],
    )
    def test_local_addresses(
        self, idle_pair: Pair, config: dict[str, str], listen: bool, num_local: int, code: object
    ) -> None:
        """One, while resources would have to be derived from it (spec §4.2, api-config §3.4)."""
        idle_pair.a.init(listen=listen, **config)
        idle_pair.b.init(listen=True)
        info = idle_pair.b.info(local=False)
        for _ in range(num_local):
            info.append_local_ip_info("127.0.0.1", 0)
        assert idle_pair.a.process.link_clusters([info], LINK_TIMEOUT_MS) == one(code)

    def test_nobody_listens(self, pair: Pair) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            info = LLMClusterInfo()
            info.remote_cluster_id = 2
            info.append_local_ip_info("127.0.0.1", 0)
            info.append_remote_ip_info("127.0.0.1", unused.getsockname()[1])
            assert pair.a.process.link_clusters([info], LINK_TIMEOUT_MS) == one(LINK_FAILED)
        pull_gives_not_yet_link(pair)

    def test_a_listener_that_never_answers(self, pair: Pair) -> None:
        """The whole exchange is bounded by ``timeout`` (spec §4.3)."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            info = LLMClusterInfo()
            info.remote_cluster_id = 2
            info.append_local_ip_info("127.0.0.1", 0)
            info.append_remote_ip_info("127.0.0.1", listener.getsockname()[1])
            start = time.monotonic()
            assert pair.a.process.link_clusters([info], 300) == one(TIMEOUT)
            assert 0.25 <= time.monotonic() - start < 3
        pull_gives_not_yet_link(pair)

    @pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10, b""], ids=["HTTP", "nothing"])
    def test_a_listener_that_speaks_something_else(self, pair: Pair, answer: bytes) -> None:
        """A malformed reply and a closed control connection are FAILED (spec §4.2)."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            info = LLMClusterInfo()
            info.remote_cluster_id = 2
            info.append_local_ip_info("127.0.0.1", 0)
            info.append_remote_ip_info("127.0.0.1", listener.getsockname()[1])
            pair.a.process.begin("link_clusters", [info], LINK_TIMEOUT_MS)
            connection, _ = listener.accept()
            with connection, suppress(OSError):  # it may hang up at the first bytes
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
            assert pair.a.process.end() == one(FAILED)
        pull_gives_not_yet_link(pair)

    def test_a_stranger_at_the_listener(self, pair: Pair) -> None:
        """Garbage on the listening socket neither disturbs the engine nor stays connected."""
        with socket.create_connection(("127.0.0.1", pair.b.port)) as stranger:
            stranger.settimeout(10)
            stranger.sendall(b"\xff" * 64)
            try:
                assert stranger.recv(4096) is not None
                while stranger.recv(4096):
                    pass
            except ConnectionResetError:
                pass
        pair.link()
        pull_works(pair.b, pair.a)

    def test_modes_differ(self, idle_pair: Pair) -> None:
        idle_pair.a.init(listen=False)
        idle_pair.b.init(listen=True, remote_access=not idle_pair.remote_access)
        info = idle_pair.b.info()
        assert idle_pair.a.process.link_clusters([info], LINK_TIMEOUT_MS) == one(PARAM_INVALID)
        assert idle_pair.a.process.links() == []
        assert idle_pair.b.process.links() == []

    @pytest.mark.parametrize(("secret_a", "secret_b"), [("one", "other"), ("one", None), (None, "one")])
    def test_secrets_differ(self, idle_pair: Pair, secret_a: str | None, secret_b: str | None) -> None:
        self.init_with_secrets(idle_pair, secret_a, secret_b)
        assert idle_pair.a.process.link_clusters([idle_pair.b.info()], LINK_TIMEOUT_MS) == one(LINK_FAILED)
        assert idle_pair.b.process.links() == []

    def test_same_secret(self, idle_pair: Pair) -> None:
        self.init_with_secrets(idle_pair, "s3cret", "s3cret")
        idle_pair.link()
        pull_works(idle_pair.b, idle_pair.a)

    @staticmethod
    def init_with_secrets(pair: Pair, secret_a: str | None, secret_b: str | None) -> None:
        for end, secret in ((pair.a, secret_a), (pair.b, secret_b)):
            end.process.set_env("LLM_DATADIST_SECRET", secret)
            try:
                end.init(listen=end is pair.b)
            finally:
                end.process.set_env("LLM_DATADIST_SECRET", None)

    def test_itself(self, idle_pair: Pair) -> None:
        """Upstream's own test: a process links to itself and unlinks again (client-patterns §4)."""
        idle_pair.b.init(listen=True, local_comm_res='{"version": "1.3"}')
        info = idle_pair.b.info(local=False)
        assert idle_pair.b.process.link_clusters([info], LINK_TIMEOUT_MS) == one(SUCCESS)
        src = idle_pair.b.cache("src")
        dst = idle_pair.b.cache("dst")
        with raises(PARAM_INVALID):
            idle_pair.b.process.pull_cache(src.key(), "dst")
        if idle_pair.remote_access:
            idle_pair.b.process.push_cache(dst.key(2), "src", 1)
            for tensor in range(4):
                dst.tensor(tensor)[2] = src.tensor(tensor)[1]
        assert idle_pair.b.process.unlink_clusters([info], LINK_TIMEOUT_MS) == one(SUCCESS)
        assert idle_pair.b.process.links() == []

    def test_both_link_at_once(self, idle_pair: Pair) -> None:
        """Each to the other: one link comes out of it, usable by both, and nobody is refused."""
        idle_pair.a.init(listen=True)
        idle_pair.b.init(listen=True)
        for _ in range(5):
            idle_pair.a.process.begin("link_clusters", [idle_pair.b.info()], LINK_TIMEOUT_MS)
            idle_pair.b.process.begin("link_clusters", [idle_pair.a.info()], LINK_TIMEOUT_MS)
            codes = {idle_pair.a.process.end()[0], idle_pair.b.process.end()[0]}
            assert codes <= {SUCCESS, ALREADY_LINK}
            assert SUCCESS in codes
            assert [len(end.process.links()) for end in (idle_pair.a, idle_pair.b)] == [1, 1]
            assert idle_pair.a.process.unlink_clusters([idle_pair.b.info()], LINK_TIMEOUT_MS) == one(SUCCESS)
            assert [len(end.process.links()) for end in (idle_pair.a, idle_pair.b)] == [0, 0]


class TestManyClusters:
    def test_order_and_overall_code(self, pair: Pair) -> None:
        """Codes in list order; the overall code is the last failure's; the good ones stay (spec §4.2)."""
        with socket.socket() as unused, socket.create_server(("127.0.0.1", 0)) as silent:
            unused.bind(("127.0.0.1", 0))
            refused, unanswered, two_addresses = LLMClusterInfo(), LLMClusterInfo(), pair.b.info()
            for number, (info, port) in enumerate(((refused, unused), (unanswered, silent))):
                info.remote_cluster_id = 50 + number
                info.append_local_ip_info("127.0.0.1", 0)
                info.append_remote_ip_info("127.0.0.1", port.getsockname()[1])
            two_addresses.append_remote_ip_info("127.0.0.1", 1)
            overall, codes = pair.a.process.link_clusters([two_addresses, pair.b.info(), unanswered, refused], 500)
        assert codes == [PARAM_INVALID, SUCCESS, TIMEOUT, LINK_FAILED]
        assert overall == LINK_FAILED
        pull_works(pair.b, pair.a)

    def test_seventeen_in_parallel(self, pair: Pair) -> None:
        """Up to 16 wait at the same time."""
        with socket.create_server(("127.0.0.1", 0), backlog=32) as silent:
            infos = []
            for number in range(17):
                info = LLMClusterInfo()
                info.remote_cluster_id = 100 + number
                info.append_local_ip_info("127.0.0.1", 0)
                info.append_remote_ip_info("127.0.0.1", silent.getsockname()[1])
                infos.append(info)
            start = time.monotonic()
            assert pair.a.process.link_clusters(infos, 400) == (TIMEOUT, [TIMEOUT] * 17)
            assert time.monotonic() - start < 4

    def test_no_clusters(self, pair: Pair) -> None:
        assert pair.a.process.link_clusters([]) == (PARAM_INVALID, [])
        assert pair.a.process.unlink_clusters([]) == (PARAM_INVALID, [])


class TestUnlink:
    def test_drops_both_halves(self, linked_pair: Pair) -> None:
        assert linked_pair.a.process.unlink_clusters([linked_pair.b.info()], LINK_TIMEOUT_MS) == one(SUCCESS)
        assert linked_pair.a.process.links() == []
        assert linked_pair.b.process.links() == []
        pull_gives_not_yet_link(linked_pair)

    def test_not_linked_is_success(self, pair: Pair) -> None:
        assert pair.a.process.unlink_clusters([pair.b.info()], LINK_TIMEOUT_MS) == one(SUCCESS)
        assert pair.a.process.unlink_clusters([pair.b.info(remote=False)], LINK_TIMEOUT_MS, force=True) == one(SUCCESS)

    def test_needs_one_address_unless_forced(self, linked_pair: Pair) -> None:
        nowhere = linked_pair.b.info(remote=False)
        assert linked_pair.a.process.unlink_clusters([nowhere], LINK_TIMEOUT_MS) == one(PARAM_INVALID)
        pull_works(linked_pair.b, linked_pair.a)
        assert linked_pair.a.process.unlink_clusters([nowhere], LINK_TIMEOUT_MS, force=True) == one(SUCCESS)
        pull_gives_not_yet_link(linked_pair)

    def test_unreachable_address_keeps_the_link(self, linked_pair: Pair) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            info = linked_pair.b.info(remote=False)
            info.append_remote_ip_info("127.0.0.1", unused.getsockname()[1])
            overall, codes = linked_pair.a.process.unlink_clusters([info], 1000)
        assert overall in (UNLINK_FAILED, TIMEOUT)
        assert codes == [overall]
        pull_works(linked_pair.b, linked_pair.a)

    def test_forced_by_the_server_and_linked_again(self, linked_pair: Pair) -> None:
        """The side that never linked itself drops its half; the client links anew (client-patterns §1)."""
        info = linked_pair.a.info(remote=False)
        assert linked_pair.b.process.unlink_clusters([info], LINK_TIMEOUT_MS, force=True) == one(SUCCESS)
        assert linked_pair.a.process.unlink_clusters([linked_pair.b.info()], LINK_TIMEOUT_MS, True)[0] == SUCCESS
        linked_pair.link()
        pull_works(linked_pair.b, linked_pair.a)

    def test_forced_by_the_client_and_linked_again(self, linked_pair: Pair) -> None:
        """The server's stale half is replaced silently (spec §4.3)."""
        for _ in range(3):
            assert linked_pair.a.process.unlink_clusters([linked_pair.b.info()], LINK_TIMEOUT_MS, True)[0] == SUCCESS
            linked_pair.link()
            assert len(linked_pair.b.process.links()) == 1
        pull_works(linked_pair.b, linked_pair.a)


class TestRestart:
    def test_of_the_server(self, linked_pair: Pair) -> None:
        """Its death is seen; linking again replaces the broken link, without unlinking first (spec §4.3, "Do")."""
        linked_pair.b.process.kill()
        linked_pair.b.forget()
        assert linked_pair.a.process.wait_for_link_down(2, 5.0)
        pull_gives_not_yet_link(linked_pair)
        linked_pair.b.process.start_process()
        linked_pair.b.init(listen=True)
        linked_pair.link()
        pull_works(linked_pair.b, linked_pair.a)

    def test_of_the_client(self, linked_pair: Pair) -> None:
        linked_pair.a.process.kill()
        linked_pair.a.forget()
        assert linked_pair.b.process.wait_for_link_down(1, 5.0)
        linked_pair.a.process.start_process()
        linked_pair.a.init(listen=False)
        linked_pair.link()
        pull_works(linked_pair.b, linked_pair.a)

    def test_unlink_of_a_dead_peer(self, linked_pair: Pair) -> None:
        info = linked_pair.b.info()
        linked_pair.b.process.restart()
        linked_pair.b.forget()
        assert linked_pair.a.process.wait_for_link_down(2, 5.0)
        assert linked_pair.a.process.unlink_clusters([info], LINK_TIMEOUT_MS) == one(SUCCESS)
        assert linked_pair.a.process.links() == []

    def test_finalize_is_seen_at_once(self, linked_pair: Pair) -> None:
        linked_pair.b.reset()
        assert linked_pair.a.process.wait_for_link_down(2, 1.0)
        linked_pair.b.init(listen=True)
        linked_pair.link()
        pull_works(linked_pair.b, linked_pair.a)

    def test_a_peer_that_is_only_stopped_is_not_dead_at_once(self, linked_pair: Pair) -> None:
        linked_pair.b.process.signal(signal.SIGSTOP)
        try:
            assert not linked_pair.a.process.wait_for_link_down(2, 1.0)
        finally:
            linked_pair.b.process.signal(signal.SIGCONT)
        pull_works(linked_pair.b, linked_pair.a)


def test_three_processes(linked_pair: Pair) -> None:
    """A second source: links are independent of each other."""
    third = End(SideProcess(side_env(linked_pair.path)), 3, linked_pair.path, linked_pair.remote_access)
    try:
        third.init(listen=True)
        assert linked_pair.a.process.link_clusters([third.info()], LINK_TIMEOUT_MS) == one(SUCCESS)
        assert sorted(link.cluster_id for link in linked_pair.a.process.links()) == [2, 3]
        src2, src3, dst = linked_pair.b.cache("src"), third.cache("src"), linked_pair.a.cache("dst")
        calls = [("pull_cache", (src2.key(0), "dst", 0), {}), ("pull_cache", (src3.key(0), "dst", 1), {})]
        assert linked_pair.a.process.parallel(calls) == [None, None]
        for tensor in range(4):
            dst.tensor(tensor)[0] = src2.tensor(tensor)[0]
            dst.tensor(tensor)[1] = src3.tensor(tensor)[0]
        third.check_memory()
    finally:
        third.process.stop()
    assert linked_pair.a.process.wait_for_link_down(3, 5.0)
    pull_works(linked_pair.b, linked_pair.a)
