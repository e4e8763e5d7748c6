"""When a collective link's status and its effect become visible, and how its thread ends (spec api-datadist §7.2)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from llm_datadist_ray._native import Event, EventKind, LinkInfo, NativeEngine
from llm_datadist_ray.events import EventDispatcher
from llm_datadist_ray.linking.collective import Communicators
from llm_datadist_ray.options import EngineOptions
from llm_datadist_ray.types import LLMRole, RegisterMemStatus
from tests.native.fake_engine import FakeEngine, link_info

WAIT_S = 20.0
OK, FAILED = RegisterMemStatus.OK, RegisterMemStatus.FAILED
OPTIONS = EngineOptions(
    role=LLMRole.DECODER, cluster_id=1, cache_manager=True, link_total_time_s=int(WAIT_S), link_retry_count=1
)
RANKS = {1: 0, 2: 1, 3: 2}
DEVICES = [{"rank_id": rank, "device_id": rank, "host_ip": "127.0.0.1"} for rank in RANKS.values()]
TABLE = json.dumps({"version": "1.2", "server_list": [{"server_id": "node", "device": DEVICES}]})


class Peers(FakeEngine):
    """An engine whose peers connect when they are told to; the events' dispatcher, too."""

    def __init__(self) -> None:
        super().__init__()
        self._on_link_up: list[Callable[[Event], None]] = []
        self._last_epoch = 0

    def come(self, *cluster_ids: int) -> None:
        for cluster_id in cluster_ids:
            self._last_epoch += 1
            self.linked[cluster_id] = replace(link_info(cluster_id), epoch=self._last_epoch)
            for handler in self._on_link_up:
                handler(cast(Event, _LinkUp(cluster_id)))

    def subscribe(self, kind: EventKind, handler: Callable[[Event], None]) -> Callable[[], None]:
        self._on_link_up.append(handler)
        return lambda: self._on_link_up.remove(handler)

    def listen_also(self, ip: str, port: int) -> None:
        self._enter("listen_also", (ip, port))

    def unlisten(self, ip: str, port: int) -> None:
        self._enter("unlisten", (ip, port))

    def links(self) -> list[LinkInfo]:
        self._enter("links", ())
        return super().links()


class _LinkUp:
    def __init__(self, cluster_id: int) -> None:
        self.id = cluster_id


def communicators_of(peers: Peers, kind: type[Communicators] = Communicators) -> Any:
    return kind(cast(NativeEngine, peers), OPTIONS, cast(EventDispatcher, peers))


def end_of_exchange(communicators: Communicators) -> None:
    for communicator in communicators._all():
        communicator.join()


def test_ok_is_seen_together_with_its_effect() -> None:
    """The thread is held up between the two; who asks meanwhile sees neither, or both."""
    seen: list[tuple[RegisterMemStatus, bool]] = []

    def ask() -> None:
        status = communicators.status(1)
        seen.append((status, 2 in communicators.not_ready))

    class HeldUp(Communicators):
        def _update_not_ready(self) -> None:
            if threading.current_thread().name.startswith("ldr-link"):
                asker.start()
                asker.join(0.1)  # it waits for us, or else has had its answer long before
            super()._update_not_ready()

    asker = threading.Thread(target=ask)
    peers = Peers()
    communicators = communicators_of(peers, HeldUp)
    assert communicators.link("name", RANKS, TABLE) == 1
    assert communicators.not_ready == {2, 3}
    peers.come(2, 3)
    end_of_exchange(communicators)
    asker.join()
    assert seen == [(OK, False)]


@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemExit(1)], ids=repr)
def test_a_defect_ends_in_failed_and_shows(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)

    def fail() -> None:
        if threading.current_thread().name.startswith("ldr-link"):
            raise error

    peers = Peers()
    peers.before["links"] = fail
    communicators = communicators_of(peers)
    comm_id = communicators.link("name", RANKS, TABLE)
    end_of_exchange(communicators)
    assert communicators.status(comm_id) == FAILED
    assert [arguments.exc_value for arguments in shown] == [error]
    peers.before.clear()
    communicators.unlink(comm_id)


def test_earlier_links_stay_usable_and_stay() -> None:
    """Cluster 2 was linked before: neither made to wait for the exchange, nor dropped with the communicator."""
    peers = Peers()
    peers.come(2)
    communicators = communicators_of(peers)
    comm_id = communicators.link("name", RANKS, TABLE)
    assert communicators.not_ready == {3}
    peers.come(3)
    end_of_exchange(communicators)
    assert communicators.status(comm_id) == OK
    communicators.unlink(comm_id)
    assert list(peers.linked) == [2]


def test_a_link_of_communicators_goes_with_the_last_of_them() -> None:
    """Also when that one has found it there."""
    peers = Peers()
    communicators = communicators_of(peers)
    assert communicators.link("first", RANKS, TABLE) == 1
    peers.come(2, 3)
    end_of_exchange(communicators)
    assert communicators.link("second", RANKS, TABLE) == 2
    assert not communicators.not_ready
    end_of_exchange(communicators)
    communicators.unlink(1)
    assert list(peers.linked) == [2, 3]
    communicators.unlink(2)
    assert not peers.linked


def test_a_later_link_than_that_of_the_exchange_stays() -> None:
    peers = Peers()
    communicators = communicators_of(peers)
    comm_id = communicators.link("name", RANKS, TABLE)
    peers.come(2, 3)
    end_of_exchange(communicators)
    peers.come(3)  # anew
    communicators.unlink(comm_id)
    assert list(peers.linked) == [3]
