"""Links of v1 between two processes: codes, unlinking, busy links, time-outs, roles (api-datadist §6.2, §8, §9)."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llm_datadist_ray import CacheKeyByIdAndIndex, LLMClusterInfo, LLMException, LLMRole
from tests.conformance import v1_side
from tests.conformance.pair import HOST_IP
from tests.conformance.status import (
    ALREADY_LINK,
    EXIST_LINK,
    FAILED,
    FEATURE_NOT_ENABLED,
    KV_CACHE_NOT_EXIST,
    LINK_FAILED,
    NOT_YET_LINK,
    PARAM_INVALID,
    SUCCESS,
    UNLINK_FAILED,
    raises,
)
from tests.conformance.v1_ends import V1End, V1Ends, copy_entry, one_path, request_key, two_devices
from tests.conformance.v1_status import (
    LINK_BUSY,
    NOTIFY_PROMPT_UNLINK_FAILED,
    OUT_OF_MEMORY,
    REPEAT_REQUEST,
    WAIT_PROCESS_TIMEOUT,
)

pytest_plugins = ["tests.conformance.v1_fixtures"]
pytestmark = one_path

TIMEOUT_MS = 5000
CAN_SWITCH = {"llm__EnableSwitchRole": "1"}
both_device_counts = pytest.mark.parametrize("v1_num_devices", [1, 2])


def one(overall: object, code: object | None = None) -> tuple[object, list[object]]:
    return overall, [overall if code is None else code]


def num_links(end: V1End) -> list[int]:
    return [sum(link.is_ready for link in links) for links in end.run(v1_side.links)]


def pull_works(ends: V1Ends) -> None:
    src, dst = ends.prompt.cache("src"), ends.decoder.cache("dst")
    ends.decoder.call("pull_cache", src.key(1), dst)
    copy_entry(dst, 0, src, 1)


def not_linked(end: V1End, cluster_id: int) -> None:
    with raises(NOT_YET_LINK):
        end.run(v1_side.check_link_status, cluster_id)


@contextmanager
def stopped(end: V1End) -> Iterator[None]:
    end.process.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        end.process.signal(signal.SIGCONT)


def nobody(cluster_id: int) -> LLMClusterInfo:
    """An address at which nobody listens."""
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_local_ip_info(HOST_IP, 0)
    with socket.socket() as unused:
        unused.bind((HOST_IP, 0))
        info.append_remote_ip_info(HOST_IP, unused.getsockname()[1])
    return info


class TestLink:
    @both_device_counts
    def test_link_check_unlink(self, v1_unlinked: V1Ends) -> None:
        prompt, decoder = v1_unlinked.prompt, v1_unlinked.decoder
        not_linked(decoder, 1)
        assert decoder.process.link_clusters([prompt.info()], TIMEOUT_MS) == one(SUCCESS)
        assert num_links(decoder) == num_links(prompt) == [1] * decoder.num_devices
        decoder.run(v1_side.check_link_status, 1)
        pull_works(v1_unlinked)
        assert decoder.process.link_clusters([prompt.info()], TIMEOUT_MS) == one(SUCCESS, ALREADY_LINK)
        assert decoder.process.unlink_clusters([prompt.info()], TIMEOUT_MS) == one(SUCCESS)
        assert num_links(decoder) == num_links(prompt) == [0] * decoder.num_devices
        not_linked(decoder, 1)
        assert decoder.process.unlink_clusters([prompt.info()], TIMEOUT_MS) == one(SUCCESS, NOT_YET_LINK)
        v1_unlinked.link()
        decoder.run(v1_side.check_link_status, 1)

    def test_devices_are_linked_in_order(self, v1_idle: V1Ends) -> None:
        v1_idle.init(2)
        v1_idle.link()
        addresses = [[link.peer_address for link in links] for links in v1_idle.decoder.run(v1_side.links)]
        assert addresses == [[f"{HOST_IP}:{port}"] for port in v1_idle.prompt.ports]

    def test_many_outcomes_in_one_call(self, v1_unlinked: V1Ends) -> None:
        prompt, decoder = v1_unlinked.prompt, v1_unlinked.decoder
        clusters = [nobody(7), prompt.info(), prompt.info(), prompt.info(9)]
        overall, codes = decoder.process.link_clusters(clusters, TIMEOUT_MS)
        assert overall == LINK_FAILED
        assert codes[0] == LINK_FAILED
        # Whoever of the two comes first finds the peer or finds it linked.
        assert codes[1] in (SUCCESS, ALREADY_LINK)
        assert codes[2] == REPEAT_REQUEST
        assert codes[3] in (PARAM_INVALID, ALREADY_LINK)

    def test_wrong_cluster_id(self, v1_unlinked: V1Ends) -> None:
        assert v1_unlinked.decoder.process.link_clusters([v1_unlinked.prompt.info(9)], TIMEOUT_MS) == one(
            SUCCESS, PARAM_INVALID
        )
        assert num_links(v1_unlinked.decoder) == num_links(v1_unlinked.prompt) == [0]
        v1_unlinked.link()

    def test_a_listener_that_never_answers(self, v1_unlinked: V1Ends) -> None:
        with socket.create_server((HOST_IP, 0)) as listener:
            info = nobody(7)
            info.remote_ip_info_list[0] = (info.remote_ip_info_list[0][0], listener.getsockname()[1])
            assert v1_unlinked.decoder.process.link_clusters([info], 300) == one(LINK_FAILED, WAIT_PROCESS_TIMEOUT)

    def test_one_device_of_two_cannot(self, v1_idle: V1Ends) -> None:
        """Nothing of that cluster stays."""
        prompt, decoder = v1_idle.prompt, v1_idle.decoder
        v1_idle.init(2)
        info = prompt.info()
        info.remote_ip_info_list[1] = nobody(1).remote_ip_info_list[0]
        assert decoder.process.link_clusters([info], TIMEOUT_MS) == one(LINK_FAILED)
        assert num_links(decoder) == num_links(prompt) == [0, 0]
        v1_idle.link()

    def test_a_peer_of_v2_with_remote_access(self, v1_idle: V1Ends) -> None:
        prompt, decoder = v1_idle.prompt, v1_idle.decoder
        prompt.ports = [prompt.process.init(1, listen=True, remote_access=True)]
        decoder.init()
        assert decoder.process.link_clusters([prompt.info()], TIMEOUT_MS) == one(SUCCESS, PARAM_INVALID)

    def test_a_two_sided_peer_of_v2(self, v1_idle: V1Ends) -> None:
        """The transfer core is one: it links, and serves."""
        prompt, decoder = v1_idle.prompt, v1_idle.decoder
        prompt.ports = [prompt.process.init(1, listen=True, remote_access=False)]
        decoder.init()
        v1_idle.link()
        decoder.run(v1_side.check_link_status, 1)

    def test_roles(self, v1_idle: V1Ends) -> None:
        for role in (LLMRole.PROMPT, LLMRole.MIX):
            v1_idle.prompt.init(role=role)
            info = nobody(7)
            assert v1_idle.prompt.process.link_clusters([info], TIMEOUT_MS) == (PARAM_INVALID, [])
            with raises(PARAM_INVALID):
                v1_idle.prompt.run(v1_side.check_link_status, 7)
            v1_idle.prompt.process.finalize()

    def test_v2_members_are_not_there(self, v1_unlinked: V1Ends) -> None:
        for member, args in (("link", ("a", {1: 0, 2: 1}, "")), ("unlink", (1,)), ("query_register_mem_status", (1,))):
            with raises(PARAM_INVALID):
                v1_unlinked.decoder.run(v1_side.of_dist, member, *args)
        with raises(PARAM_INVALID):
            v1_unlinked.decoder.run(v1_side.of_dist, "cache_manager")


class TestUnlink:
    @both_device_counts
    def test_of_the_prompt(self, v1_linked: V1Ends) -> None:
        """Its own side, matched by address; the decoder finds out, and cleans up."""
        prompt, decoder = v1_linked.prompt, v1_linked.decoder
        visitor = decoder.info()
        assert prompt.process.unlink_clusters([visitor], TIMEOUT_MS) == one(SUCCESS)
        assert num_links(prompt) == [0] * prompt.num_devices
        assert prompt.process.unlink_clusters([visitor], TIMEOUT_MS) == one(SUCCESS, NOT_YET_LINK)
        assert decoder.process.unlink_clusters([prompt.info()], TIMEOUT_MS) in (
            one(SUCCESS),
            one(SUCCESS, NOT_YET_LINK),
        )
        v1_linked.link()
        pull_works(v1_linked)

    def test_of_a_prompt_that_is_linked_from_elsewhere(self, v1_linked: V1Ends) -> None:
        visitor = nobody(2)
        visitor.remote_ip_info_list[0] = (0x0200007F, 0)
        assert v1_linked.prompt.process.unlink_clusters([visitor], TIMEOUT_MS) == one(UNLINK_FAILED, PARAM_INVALID)
        assert num_links(v1_linked.prompt) == [1]

    def test_other_addresses(self, v1_linked: V1Ends) -> None:
        assert v1_linked.decoder.process.unlink_clusters([nobody(1)], TIMEOUT_MS) == one(UNLINK_FAILED, PARAM_INVALID)
        pull_works(v1_linked)

    def test_force(self, v1_linked: V1Ends) -> None:
        prompt, decoder = v1_linked.prompt, v1_linked.decoder
        assert decoder.process.unlink_clusters([nobody(1)], TIMEOUT_MS, True) == one(SUCCESS)
        not_linked(decoder, 1)
        assert decoder.process.unlink_clusters([prompt.info()], TIMEOUT_MS, True) == one(SUCCESS, NOT_YET_LINK)
        v1_linked.link()
        pull_works(v1_linked)

    @both_device_counts
    def test_a_dead_prompt(self, v1_linked: V1Ends) -> None:
        """Whether its death has been noticed or not: it cannot be told, and this side is clean."""
        prompt, decoder = v1_linked.prompt, v1_linked.decoder
        info = prompt.info()
        prompt.process.restart()
        assert decoder.process.unlink_clusters([info], TIMEOUT_MS) == one(UNLINK_FAILED, NOTIFY_PROMPT_UNLINK_FAILED)
        assert decoder.process.unlink_clusters([info], TIMEOUT_MS) == one(SUCCESS, NOT_YET_LINK)
        prompt.init(num_devices=decoder.num_devices)
        v1_linked.link()
        pull_works(v1_linked)

    def test_a_prompt_that_does_not_answer(self, v1_linked: V1Ends) -> None:
        prompt, decoder = v1_linked.prompt, v1_linked.decoder
        with stopped(prompt):
            result = decoder.process.unlink_clusters([prompt.info()], 300)
            assert result == one(UNLINK_FAILED, WAIT_PROCESS_TIMEOUT)
            assert decoder.process.unlink_clusters([prompt.info()], 300, True) == one(SUCCESS)


class TestBusyAndTimeOuts:
    def test_transfer_and_check_time_out(self, v1_idle: V1Ends) -> None:
        """``sync_kv_timeout`` bounds both; never LLM_TIMEOUT."""
        v1_idle.init(llm__SyncKvCacheWaitTime="300")
        v1_idle.link()
        src, dst = v1_idle.prompt.cache("src"), v1_idle.decoder.cache("dst")
        with stopped(v1_idle.prompt):
            with raises(WAIT_PROCESS_TIMEOUT):
                v1_idle.decoder.run(v1_side.check_link_status, 1)
            with raises(WAIT_PROCESS_TIMEOUT):
                v1_idle.decoder.call("pull_cache", src.key(), dst)

    def test_busy_link(self, v1_idle: V1Ends) -> None:
        """While a pull waits for a prompt that is stopped: everything else on that link is refused at once."""
        v1_idle.init(llm__SyncKvCacheWaitTime="1500")
        v1_idle.link()
        prompt, decoder = v1_idle.prompt, v1_idle.decoder
        src, dst = prompt.cache("src"), decoder.cache("dst")
        info = prompt.info()
        with stopped(prompt):
            outcome = decoder.run(v1_side.while_pulling, src.key(), dst.named, info, CacheKeyByIdAndIndex(9, 1))
        assert outcome == {
            "pull": WAIT_PROCESS_TIMEOUT,
            "pull_cache": LINK_BUSY,
            "check_link_status": LINK_BUSY,
            "unlink_clusters": one(UNLINK_FAILED, LINK_BUSY),
            "forced": one(UNLINK_FAILED, LINK_BUSY),
            "other link": NOT_YET_LINK,
        }

    def test_a_prompt_that_dies_in_use(self, v1_linked: V1Ends) -> None:
        src, dst = v1_linked.prompt.cache("src"), v1_linked.decoder.cache("dst")
        v1_linked.prompt.forget(src)
        v1_linked.prompt.process.restart()
        with pytest.raises(LLMException) as caught:
            v1_linked.decoder.call("pull_cache", src.key(), dst)
        assert caught.value.status_code in (FAILED, NOT_YET_LINK)  # noticed during it, or before
        v1_linked.prompt.init()
        v1_linked.link()
        with raises(KV_CACHE_NOT_EXIST):
            v1_linked.decoder.call("pull_cache", src.key(), dst)


class TestSwitchRole:
    def test_sides_change(self, v1_idle: V1Ends) -> None:
        first, second = v1_idle.prompt, v1_idle.decoder
        v1_idle.init(**CAN_SWITCH)
        v1_idle.link()
        for end in (first, second):
            with raises(EXIST_LINK):
                end.process.switch_role(LLMRole.MIX)
        assert second.process.unlink_clusters([first.info()], TIMEOUT_MS) == one(SUCCESS)
        on_first = first.cache("on_first")
        first.process.switch_role(LLMRole.DECODER)
        assert first.run(v1_side.ports) == [0]
        second.process.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": f"{HOST_IP}:0"})
        second.ports = second.run(v1_side.ports)
        on_second = second.cache("on_second", key=[request_key(4)])  # allowed now
        assert first.process.link_clusters([second.info()], TIMEOUT_MS) == one(SUCCESS)
        first.call("pull_cache", on_second.key(), on_first, 2)
        copy_entry(on_first, 2, on_second, 0)
        with raises(PARAM_INVALID):
            first.call("remove_cache_key", request_key(4))
        with raises(PARAM_INVALID):
            second.call("pull_cache", on_first.key(), on_second)

    def test_mix_to_both(self, v1_idle: V1Ends) -> None:
        """Initialised with a device only (client-patterns §4)."""
        end = v1_idle.decoder
        end.init(role=LLMRole.MIX, **CAN_SWITCH)
        end.process.switch_role(LLMRole.DECODER)
        with raises(PARAM_INVALID):
            end.process.switch_role(LLMRole.DECODER)
        end.process.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": f"{HOST_IP}:0"})
        assert end.run(v1_side.ports) != [0]

    @pytest.mark.parametrize(("num_devices", "options"), [(1, {}), (2, CAN_SWITCH)])
    def test_not_enabled(self, v1_idle: V1Ends, num_devices: int, options: dict) -> None:
        v1_idle.decoder.init(num_devices=num_devices, **options)
        with raises(FEATURE_NOT_ENABLED):
            v1_idle.decoder.process.switch_role(LLMRole.MIX)
        with raises(PARAM_INVALID):
            v1_idle.decoder.process.switch_role(LLMRole.PROMPT)

    def test_a_port_in_use(self, v1_idle: V1Ends) -> None:
        v1_idle.decoder.init(**CAN_SWITCH)
        with socket.create_server((HOST_IP, 0)) as other, raises(FAILED):
            address = f"{HOST_IP}:{other.getsockname()[1]}"
            v1_idle.decoder.process.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": address})
        with raises(PARAM_INVALID):
            v1_idle.decoder.process.switch_role(LLMRole.DECODER)


class TestInit:
    @pytest.mark.parametrize("num_devices", [1, 2])
    def test_a_port_in_use(self, v1_idle: V1Ends, num_devices: int) -> None:
        """Nothing stays of the devices that could; the next try works."""
        with socket.create_server((HOST_IP, 0)) as other:
            taken = f"{HOST_IP}:{other.getsockname()[1]}"
            listen = ";".join([f"{HOST_IP}:0"] * (num_devices - 1) + [taken])
            with raises(FAILED):
                v1_idle.prompt.init(num_devices=num_devices, llm__listenIpInfo=listen)
        v1_idle.prompt.init(num_devices=num_devices)

    def test_more_memory_than_there_is(self, v1_idle: V1Ends) -> None:
        with raises(OUT_OF_MEMORY):
            v1_idle.decoder.init(ge__flowGraphMemMaxSize=str(1 << 44))
        v1_idle.decoder.init()

    @two_devices
    def test_again_on_the_same_object(self, v1_linked: V1Ends) -> None:
        v1_linked.decoder.run(v1_side.init_again)
        assert num_links(v1_linked.decoder) == [0, 0]
        v1_linked.link()
        pull_works(v1_linked)
