"""link_clusters and unlink_clusters of v1: codes, rejections, roll-back (spec api-datadist §9)."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from llm_datadist_ray._native import NativeStatus
from llm_datadist_ray.errors import LLMStatusCode
from llm_datadist_ray.kv_cache.busy_links import BusyLinks
from llm_datadist_ray.types import LLMClusterInfo, LLMRole
from tests.conformance.status import (
    ALREADY_LINK,
    LINK_FAILED,
    NOT_YET_LINK,
    PARAM_INVALID,
    SUCCESS,
    UNLINK_FAILED,
    raises,
)
from tests.native.fake_engine import link_info
from tests.native.kv_cache_process import FakeProcess

DECODER, PROMPT, MIX = LLMRole.DECODER, LLMRole.PROMPT, LLMRole.MIX
REPEAT_REQUEST = LLMStatusCode.LLM_REPEAT_REQUEST
TOO_MANY = LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT
PROCESSING = LLMStatusCode.LLM_PROCESSING_LINK
WAIT_TIMEOUT = LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
LINK_BUSY = LLMStatusCode.LLM_LINK_BUSY
NOTIFY_FAILED = LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED

logs_link = pytest.mark.logs("link")


def cluster(cluster_id: int | None, *, devices: int = 1, port: int | None = None, local: str = "10.0.0.1") -> Any:
    """The fake engine finds the cluster whose id is the port."""
    info = LLMClusterInfo()
    if cluster_id is not None:
        info.remote_cluster_id = cluster_id
    for _ in range(devices):
        info.append_local_ip_info(local, 0)
        info.append_remote_ip_info("127.0.0.1", cluster_id if port is None else port)
    return info


def without_local(info: LLMClusterInfo) -> LLMClusterInfo:
    info.local_ip_info_list.clear()
    return info


@pytest.fixture
def listening() -> Iterator[int]:
    """A port at which somebody listens: a cluster that can be reached."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


class TestLink:
    def test_success_and_what_is_not_failure(self) -> None:
        process = FakeProcess(DECODER)
        assert process.runtime.link_clusters([cluster(2), cluster(3)]) == (SUCCESS, [SUCCESS, SUCCESS])
        assert process.engine.links() == [link_info(2, "127.0.0.1:2"), link_info(3, "127.0.0.1:3")]

    @logs_link
    def test_overall_success_although_some_are_not(self) -> None:
        process = FakeProcess(DECODER)
        process.runtime.link_clusters([cluster(2)])
        wrong_id = cluster(9, port=4)
        no_address = cluster(5)
        no_address.remote_ip_info_list[0] = (None, 5)  # type: ignore[index]
        result = process.runtime.link_clusters([cluster(2), cluster(3), cluster(3), wrong_id, no_address])
        assert result == (SUCCESS, [ALREADY_LINK, SUCCESS, REPEAT_REQUEST, PARAM_INVALID, PARAM_INVALID])
        assert set(process.engine.linked) == {2, 3}

    @logs_link
    @pytest.mark.parametrize(
        ("status", "code", "overall"),
        [
            (NativeStatus.TIMEOUT, WAIT_TIMEOUT, LINK_FAILED),
            (NativeStatus.LINK_FAILED, LINK_FAILED, LINK_FAILED),
            (NativeStatus.AUTH, LINK_FAILED, LINK_FAILED),
            (NativeStatus.VERSION, LINK_FAILED, LINK_FAILED),
            (NativeStatus.LAYOUT, LINK_FAILED, LINK_FAILED),
            (NativeStatus.HANDSHAKE, LINK_FAILED, LINK_FAILED),
            (NativeStatus.SYSTEM, LINK_FAILED, LINK_FAILED),
            (NativeStatus.NO_MEMORY, LINK_FAILED, LINK_FAILED),
            (NativeStatus.CLOSED, LINK_FAILED, LINK_FAILED),
            (NativeStatus.MODE_MISMATCH, PARAM_INVALID, SUCCESS),
            (NativeStatus.INVALID, PARAM_INVALID, SUCCESS),
            (NativeStatus.ALREADY_LINKED, ALREADY_LINK, SUCCESS),
        ],
    )
    def test_codes(self, status: NativeStatus, code: LLMStatusCode, overall: LLMStatusCode) -> None:
        process = FakeProcess(DECODER)
        process.engine.fail["link"] = status
        assert process.runtime.link_clusters([cluster(2)]) == (overall, [code])

    @logs_link
    @pytest.mark.parametrize("role", [PROMPT, MIX])
    def test_role(self, role: LLMRole) -> None:
        process = FakeProcess(role)
        assert process.runtime.link_clusters([cluster(2)]) == (PARAM_INVALID, [])
        assert "link" not in process.engine.names_called()

    @logs_link
    @pytest.mark.parametrize(
        ("clusters", "code"),
        [
            ([], PARAM_INVALID),
            ([cluster(2, devices=0)], PARAM_INVALID),
            ([cluster(2, devices=2)], PARAM_INVALID),
            ([without_local(cluster(2))], PARAM_INVALID),
            ([cluster(2), cluster(3, local="10.0.0.2")], PARAM_INVALID),
            ([cluster(index) for index in range(2, 19)], TOO_MANY),
        ],
    )
    @pytest.mark.parametrize("method", ["link_clusters", "unlink_clusters"])
    def test_rejected_as_a_whole(self, clusters: list, code: LLMStatusCode, method: str) -> None:
        process = FakeProcess(DECODER)
        assert getattr(process.runtime, method)(clusters) == (code, [])
        assert process.engine.names_called() == ["create_pool"]

    def test_sixteen_are_not_too_many(self) -> None:
        process = FakeProcess(DECODER)
        clusters = [cluster(index) for index in range(2, 18)]
        assert process.runtime.link_clusters(clusters) == (SUCCESS, [SUCCESS] * 16)

    @logs_link
    def test_512_links(self) -> None:
        process = FakeProcess(DECODER)
        process.engine.linked = {index: link_info(index) for index in range(100, 611)}
        assert process.runtime.link_clusters([cluster(2), cluster(3)]) == (TOO_MANY, [])
        assert process.runtime.link_clusters([cluster(2), cluster(100)]) == (SUCCESS, [SUCCESS, ALREADY_LINK])
        assert process.runtime.link_clusters([cluster(3)]) == (TOO_MANY, [])
        process.engine.linked[100] = link_info(100, is_ready=False)
        assert process.runtime.link_clusters([cluster(3)]) == (SUCCESS, [SUCCESS])

    @logs_link
    @pytest.mark.parametrize("method", ["link", "unlink"])
    @pytest.mark.parametrize("second", ["link_clusters", "unlink_clusters"])
    def test_one_call_at_a_time(self, method: str, second: str) -> None:
        process = FakeProcess(DECODER)
        process.engine.linked[2] = link_info(2)
        results = []
        process.engine.before[method] = lambda: results.append(getattr(process.runtime, second)([cluster(3)]))
        cleared = process.engine.before
        if method == "link":
            process.engine.linked.clear()
            process.runtime.link_clusters([cluster(2)])
        else:
            process.runtime.unlink_clusters([cluster(2)], force=True)
        assert results == [(PROCESSING, [])]
        cleared.clear()
        assert process.runtime.link_clusters([cluster(3)]) == (SUCCESS, [SUCCESS])

    @pytest.mark.parametrize("method", ["link_clusters", "unlink_clusters"])
    def test_arguments(self, method: str) -> None:
        link = getattr(FakeProcess(DECODER).runtime, method)
        for clusters, timeout in (
            (cluster(2), 1),
            ([2], 1),
            (None, 1),
            ([cluster(None, port=1)], 1),
            ([cluster(2)], "1"),
        ):
            with pytest.raises(TypeError):
                link(clusters, timeout)
        with pytest.raises(ValueError):
            link([cluster(2)], 2**31)
        for timeout in (0, -1):
            with raises(PARAM_INVALID):
                link([cluster(2)], timeout)


class TestTwoDevices:
    @logs_link
    def test_a_failure_rolls_the_first_device_back(self) -> None:
        process = FakeProcess(DECODER, 2)
        process.engines[1].fail["link"] = NativeStatus.LINK_FAILED
        result = process.runtime.link_clusters([cluster(2, devices=2)])
        assert result == (LINK_FAILED, [LINK_FAILED])
        assert not process.engines[0].linked

    @logs_link
    def test_a_failing_roll_back_says_why(self) -> None:
        process = FakeProcess(DECODER, 2)
        process.engines[1].fail["link"] = NativeStatus.LINK_FAILED
        process.engines[0].fail["unlink"] = NativeStatus.TIMEOUT
        assert process.runtime.link_clusters([cluster(2, devices=2)]) == (WAIT_TIMEOUT, [LINK_FAILED])

    def test_one_that_had_broken_is_repaired(self) -> None:
        process = FakeProcess(DECODER, 2)
        process.runtime.link_clusters([cluster(2, devices=2)])
        process.engines[1].linked[2] = link_info(2, is_ready=False)
        assert process.runtime.link_clusters([cluster(2, devices=2)]) == (SUCCESS, [SUCCESS])
        assert process.engines[1].linked[2].is_ready

    def test_each_device_has_its_own_address(self) -> None:
        process = FakeProcess(DECODER, 2)
        info = cluster(2, devices=2)
        info.remote_ip_info_list[1] = (0x0200007F, 2)
        process.runtime.link_clusters([info])
        assert [engine.calls[-1] for engine in process.engines] == [
            ("link", ("127.0.0.1", 2)),
            ("link", ("127.0.0.2", 2)),
        ]


class TestUnlinkOfDecoder:
    def test_both_sides(self, listening: int) -> None:
        process = FakeProcess(DECODER)
        info = cluster(listening)
        process.runtime.link_clusters([info])
        assert process.runtime.unlink_clusters([info, cluster(3)]) == (SUCCESS, [SUCCESS, NOT_YET_LINK])
        assert process.engine.calls[-1] == ("unlink", (listening, False))
        assert process.runtime.unlink_clusters([info]) == (SUCCESS, [NOT_YET_LINK])

    @logs_link
    def test_unreachable(self, listening: int) -> None:
        process = FakeProcess(DECODER)
        info = cluster(1)
        process.runtime.link_clusters([info])
        assert process.runtime.unlink_clusters([info]) == (UNLINK_FAILED, [NOTIFY_FAILED])
        assert process.engine.calls[-1] == ("unlink", (1, True))
        assert not process.engine.linked

    def test_force_asks_nobody(self) -> None:
        process = FakeProcess(DECODER)
        process.runtime.link_clusters([cluster(1)])
        assert process.runtime.unlink_clusters([cluster(1, port=7)], force=True) == (SUCCESS, [SUCCESS])
        assert process.engine.calls[-1] == ("unlink", (1, True))

    @logs_link
    def test_other_addresses_than_linked(self) -> None:
        process = FakeProcess(DECODER)
        process.runtime.link_clusters([cluster(2)])
        assert process.runtime.unlink_clusters([cluster(2, port=7)]) == (UNLINK_FAILED, [PARAM_INVALID])
        assert 2 in process.engine.linked

    @logs_link
    def test_in_use(self) -> None:
        process = FakeProcess(DECODER)
        process.runtime.link_clusters([cluster(2)])
        results = []
        process.engine.before["probe_link"] = lambda: results.append(
            process.runtime.unlink_clusters([cluster(2)], force=True)
        )
        process.runtime.check_link_status(2)
        assert results == [(UNLINK_FAILED, [LINK_BUSY])]
        assert 2 in process.engine.linked

    @logs_link
    @pytest.mark.parametrize(
        ("status", "code"),
        [
            (NativeStatus.TIMEOUT, WAIT_TIMEOUT),
            (NativeStatus.UNLINK_FAILED, UNLINK_FAILED),
            (NativeStatus.SYSTEM, UNLINK_FAILED),
        ],
    )
    def test_codes(self, listening: int, status: NativeStatus, code: LLMStatusCode) -> None:
        process = FakeProcess(DECODER)
        info = cluster(listening)
        process.runtime.link_clusters([info])
        process.engine.fail["unlink"] = status
        assert process.runtime.unlink_clusters([info]) == (UNLINK_FAILED, [code])

    def test_repeated(self) -> None:
        process = FakeProcess(DECODER)
        process.runtime.link_clusters([cluster(2)])
        result = process.runtime.unlink_clusters([cluster(2), cluster(2)], force=True)
        assert result == (UNLINK_FAILED, [SUCCESS, REPEAT_REQUEST])


class TestUnlinkOfPrompt:
    """Matched by the address that the link comes from; the own side only."""

    @pytest.mark.parametrize("named", [7, 8])
    def test_by_address(self, named: int) -> None:
        process = FakeProcess(PROMPT)
        process.engine.linked = {7: link_info(7, "127.0.0.1:4711"), 9: link_info(9, "10.0.0.3:4711")}
        assert process.runtime.unlink_clusters([cluster(named)]) == (SUCCESS, [SUCCESS])
        assert process.engine.calls[-1] == ("unlink", (7, True))

    def test_several_from_one_address(self) -> None:
        process = FakeProcess(PROMPT)
        process.engine.linked = {index: link_info(index, f"127.0.0.1:{index}") for index in (7, 8)}
        assert process.runtime.unlink_clusters([cluster(8), cluster(9)]) == (SUCCESS, [SUCCESS, NOT_YET_LINK])
        assert list(process.engine.linked) == [7]

    @pytest.mark.parametrize(
        ("named", "codes"),
        [
            ([7, 8], [SUCCESS, NOT_YET_LINK]),
            ([8, 7], [NOT_YET_LINK, SUCCESS]),
            ([8, 9], [SUCCESS, NOT_YET_LINK]),
        ],
    )
    def test_one_link_is_found_once(self, named: list[int], codes: list[LLMStatusCode]) -> None:
        """By who it is first, and then by its address."""
        process = FakeProcess(PROMPT)
        process.engine.linked = {7: link_info(7, "127.0.0.1:4711")}
        together = threading.Barrier(2, timeout=1)
        process.engine.before["unlink"] = lambda: _wait(together)
        assert process.runtime.unlink_clusters([cluster(number) for number in named]) == (SUCCESS, codes)
        assert process.engine.calls_of("unlink") == [(7, True)]

    @logs_link
    def test_an_address_is_not_enough_for_who_is_linked_from_elsewhere(self) -> None:
        process = FakeProcess(PROMPT)
        process.engine.linked = {7: link_info(7, "127.0.0.1:4711"), 9: link_info(9, "10.0.0.3:4711")}
        assert process.runtime.unlink_clusters([cluster(9)]) == (UNLINK_FAILED, [PARAM_INVALID])
        assert set(process.engine.linked) == {7, 9}

    @logs_link
    def test_a_wrong_address_is_its_own_clusters_failure(self) -> None:
        process = FakeProcess(PROMPT)
        process.engine.linked = {7: link_info(7, "127.0.0.1:4711")}
        nowhere = cluster(8)
        nowhere.remote_ip_info_list[0] = (None, 5)  # type: ignore[index]
        assert process.runtime.unlink_clusters([nowhere, cluster(7)]) == (UNLINK_FAILED, [PARAM_INVALID, SUCCESS])

    @logs_link
    def test_nothing_goes_when_another_device_is_linked_from_elsewhere(self) -> None:
        process = FakeProcess(PROMPT, 2)
        process.engines[0].linked = {7: link_info(7, "127.0.0.1:4711")}
        process.engines[1].linked = {7: link_info(7, "10.0.0.3:4711")}
        assert process.runtime.unlink_clusters([cluster(7, devices=2)]) == (UNLINK_FAILED, [PARAM_INVALID])
        assert [list(engine.linked) for engine in process.engines] == [[7], [7]]

    @logs_link
    def test_linked_from_elsewhere(self) -> None:
        process = FakeProcess(PROMPT)
        process.engine.linked = {7: link_info(7, "10.0.0.3:4711")}
        assert process.runtime.unlink_clusters([cluster(7)]) == (UNLINK_FAILED, [PARAM_INVALID])
        assert process.runtime.unlink_clusters([cluster(8)]) == (SUCCESS, [NOT_YET_LINK])

    @logs_link
    def test_mix_cannot(self) -> None:
        assert FakeProcess(MIX).runtime.unlink_clusters([cluster(7)]) == (PARAM_INVALID, [])


class TestCheckLinkStatus:
    def test_every_device(self) -> None:
        process = FakeProcess(DECODER, 2, llm__SyncKvCacheWaitTime="1500")
        process.runtime.link_clusters([cluster(2, devices=2)])
        process.runtime.check_link_status(2)
        assert [engine.calls[-1] for engine in process.engines] == [("probe_link", (2, 1.5))] * 2

    @pytest.mark.parametrize(
        ("status", "code"),
        [
            (NativeStatus.TIMEOUT, WAIT_TIMEOUT),
            (NativeStatus.NOT_LINKED, NOT_YET_LINK),
            (NativeStatus.LINK_BROKEN, LLMStatusCode.LLM_FAILED),
        ],
    )
    def test_codes(self, status: NativeStatus, code: LLMStatusCode) -> None:
        process = FakeProcess(DECODER, 2)
        process.engines[1].fail["probe_link"] = status
        process.runtime.link_clusters([cluster(2, devices=2)])
        with raises(code):
            process.runtime.check_link_status(2)

    def test_busy(self) -> None:
        process = FakeProcess(DECODER)
        process.runtime.link_clusters([cluster(2), cluster(3)])
        process.engine.before["probe_link"] = lambda: _busy_inside(process)
        process.runtime.check_link_status(2)
        assert process.engine.names_called().count("probe_link") == 2

    def test_role_and_arguments(self) -> None:
        for role in (PROMPT, MIX):
            with raises(PARAM_INVALID):
                FakeProcess(role).runtime.check_link_status("2")  # type: ignore[arg-type]
        for value, kind in (("2", TypeError), (None, TypeError), (-1, ValueError)):
            with pytest.raises(kind):
                FakeProcess(DECODER).runtime.check_link_status(value)  # type: ignore[arg-type]


def _wait(barrier: threading.Barrier) -> None:
    """For another one in the same place, who should not come."""
    with suppress(threading.BrokenBarrierError):
        barrier.wait()


class TestBusyLinks:
    def test_a_signal_leaves_no_mark(self) -> None:
        """Handlers run at calls; one that raises is put at each of them in turn."""
        busy_links = BusyLinks()
        for number in range(100):
            calls = _interrupt_at(number, busy_links)
            with busy_links.use(2, "another operation"):
                pass
            if calls < number:
                break
        assert 0 < calls < 20


class _Interrupt(Exception):
    pass


def _interrupt_at(number: int, busy_links: BusyLinks) -> int:
    """Uses a link and raises at a call that :class:`BusyLinks` makes; the number of the calls."""
    calls = 0

    def raise_at_call(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        if frame.f_code.co_filename.endswith("busy_links.py") and event in ("c_call", "c_return"):
            calls += 1
            if calls == number:
                raise _Interrupt

    sys.setprofile(raise_at_call)
    try:
        with suppress(_Interrupt), busy_links.use(2, "operation"):
            pass
    finally:
        sys.setprofile(None)
    return calls


def _busy_inside(process: FakeProcess) -> None:
    process.engine.before.clear()
    with raises(LINK_BUSY, "check_link_status"):
        process.runtime.check_link_status(2)
    process.runtime.check_link_status(3)  # another link is free
