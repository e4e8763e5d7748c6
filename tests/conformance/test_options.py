"""What the options of v2 do beyond being parsed (spec api-config §2, §3)."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from llm_datadist_ray import LLMConfig, LLMDataDist, LLMRole, Placement
from llm_datadist_ray._native import NativeEngine, NativeStatus
from tests.conformance.collective import free_port
from tests.conformance.pair import HOST_IP
from tests.conformance.status import FAILED, OUT_OF_MEMORY, PARAM_INVALID, raises
from tests.process_counts import ProcessCounts, settled_counts

MIB = 1 << 20
TIMEOUT_S = 10.0
HUGE = json.dumps({"memory_size": 1 << 46, "page_shift": 16})


@pytest.fixture
def dist() -> Iterator[LLMDataDist]:
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    yield dist
    dist.finalize()


def options(**config: Any) -> dict[str, str]:
    llm_config = LLMConfig()
    llm_config.enable_cache_manager = True
    for name, value in config.items():
        setattr(llm_config, name, value)
    return llm_config.generate_options()


class TestPools:
    def test_3_1_both_are_reserved(self, dist: LLMDataDist) -> None:
        device = json.dumps({"memory_size": 3 * MIB + 1, "page_shift": 12})
        dist.init(options(mem_pool_cfg=device, host_mem_pool_cfg=json.dumps({"memory_size": 2 * MIB})))
        pools = [dist.native_engine.pool_info(placement) for placement in (Placement.DEVICE, Placement.HOST)]
        assert [(pool.page_bytes, pool.used_bytes) for pool in pools] == [(4096, 0), (65536, 0)]
        assert [pool.size_bytes // pool.page_bytes for pool in pools] == [768, 32]

    def test_3_1_none_is_there_unless_configured(self, dist: LLMDataDist) -> None:
        dist.init({**options(mem_pool_cfg=json.dumps({"memory_size": MIB})), "llm.HostMemPoolConfig": ""})
        assert dist.native_engine.pool_info(Placement.DEVICE).size_bytes == MIB
        with pytest.raises(RuntimeError) as caught:
            dist.native_engine.pool_info(Placement.HOST)
        assert caught.value.native_status == NativeStatus.NOT_FOUND  # type: ignore[attr-defined]

    @pytest.mark.parametrize("key", ["mem_pool_cfg", "host_mem_pool_cfg"])
    def test_3_1_too_much_for_this_machine(self, dist: LLMDataDist, key: str) -> None:
        """LLM_OUT_OF_MEMORY for both, "Do"; nobody could connect meanwhile, and nothing stays behind."""
        before = ProcessCounts.of()
        port = free_port()
        small = {"mem_pool_cfg": json.dumps({"memory_size": MIB})}
        with raises(OUT_OF_MEMORY, "MemPoolConfig"):
            dist.init(options(**{**small, key: HUGE, "listen_ip_info": f"{HOST_IP}:{port}"}))
        assert LLMDataDist.llm_engine_instance is None
        assert not settled_counts(before).exceed(before)
        with socket.create_server((HOST_IP, port)):
            pass  # the port is free
        dist.init(options(**small, listen_ip_info=f"{HOST_IP}:{port}"))

    def test_a_port_in_use_leaves_no_pool_behind(self, dist: LLMDataDist) -> None:
        before = ProcessCounts.of()
        pool = json.dumps({"memory_size": 8 * MIB})
        with socket.create_server((HOST_IP, 0)) as other, raises(FAILED):
            dist.init(options(mem_pool_cfg=pool, listen_ip_info=f"{HOST_IP}:{other.getsockname()[1]}"))
        assert not settled_counts(before).exceed(before)
        dist.init(options(mem_pool_cfg=pool))


class TestRdma:
    """Numbers of the network card, as far as TCP has something like them."""

    def accepted_marks(self, dist: LLMDataDist, monkeypatch: pytest.MonkeyPatch, **config: int) -> set[tuple[int, int]]:
        """(IP_TOS, SO_PRIORITY) of the sockets that the listener has accepted from a peer."""
        monkeypatch.setenv("LDR_PATHS", "tcp")
        dist.init(options(listen_ip_info=f"{HOST_IP}:0", **config))
        port = dist.native_engine.info().listen_port
        with NativeEngine(cluster_id=2, remote_access=False, paths="tcp") as peer:
            peer.link(ip=HOST_IP, port=port, timeout_s=TIMEOUT_S)
            return set(marks_of_accepted(port))

    def test_both_fit(self, dist: LLMDataDist, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.accepted_marks(dist, monkeypatch, rdma_traffic_class=100, rdma_service_level=5) == {(100, 5)}

    def test_unset(self, dist: LLMDataDist, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.accepted_marks(dist, monkeypatch) == {(0, 0)}

    @pytest.mark.logs("llm.RdmaServiceLevel 100 has no counterpart on TCP")
    def test_what_does_not_fit_is_said_and_harmless(self, dist: LLMDataDist, monkeypatch: pytest.MonkeyPatch) -> None:
        """Upstream's own test gives 100 for both (client-patterns §4)."""
        assert self.accepted_marks(dist, monkeypatch, rdma_traffic_class=100, rdma_service_level=100) == {(100, 0)}

    @pytest.mark.logs("llm.RdmaTrafficClass 4294967295 has no counterpart")
    def test_any_uint32(self, dist: LLMDataDist) -> None:
        dist.init(options(rdma_traffic_class=2**32 - 1, rdma_service_level=0))


def marks_of_accepted(port: int) -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = os.dup(int(name))
        except OSError:
            continue  # the directory's own
        try:
            found = socket.socket(fileno=fd)
        except OSError:
            os.close(fd)
            continue
        with found:
            if found.family == socket.AF_INET and found.getsockname()[1] == port and not is_listening(found):
                yield (
                    found.getsockopt(socket.IPPROTO_IP, socket.IP_TOS),
                    found.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY),
                )


def is_listening(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


@pytest.mark.parametrize("text", ["", "{}", '{"version": "1.0"}', '{"version": "1.3"}', "anything at all", "\0"])
def test_3_4_any_local_comm_res(dist: LLMDataDist, text: str) -> None:
    dist.init({"llm.LocalCommRes": text})
    assert dist.native_engine.remote_access


HIXL = {"local_comm_res": "", "transfer_backend": "hixl", "listen_ip_info": f"{HOST_IP}:0"}


@pytest.mark.parametrize("text", ["", "{}", '{"any": [1, 2]}'])
def test_2_global_resource_config_with_hixl(dist: LLMDataDist, text: str) -> None:
    dist.init(options(**HIXL, global_resource_config=text))


@pytest.mark.parametrize("text", ["{", "[]", "1", "text"])
def test_2_bad_global_resource_config(dist: LLMDataDist, text: str) -> None:
    with raises(PARAM_INVALID, "llm.GlobalResourceConfig"):
        dist.init(options(**HIXL, global_resource_config=text))
    dist.init(options(global_resource_config=text))  # the comm backend does not look at it


@pytest.mark.parametrize("backend", ["", "HIXL", "comm"])
def test_2_no_other_backend(dist: LLMDataDist, backend: str) -> None:
    with raises(PARAM_INVALID, "llm.TransferBackend"):
        dist.init(options(**{**HIXL, "transfer_backend": backend}))
