"""Rows of the option dictionary, v2 and both interfaces (spec api-config §2 - §4): what ``init`` makes of each key."""

from __future__ import annotations

import json
import os
import socket
import stat
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

from llm_datadist_ray import (
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LLMClusterInfo,
    LLMStatusCode,
    Placement,
    RegisterMemStatus,
)
from llm_datadist_ray._native import alloc_shared
from tests.conformance.collective import final_status, free_port, local_table, rank_table
from tests.conformance.option_checks import LISTEN, REMOTE, SMALL, V1_PROMPT, V2, check_v1, check_v2, tensor_of
from tests.conformance.pair import HOST_IP
from tests.conformance.row_checks import MIB, init_refused, initialised, is_listening, refused
from tests.conformance.status import FAILED, FEATURE_NOT_ENABLED, PARAM_INVALID, SUCCESS

OUT_OF_MEMORY = LLMStatusCode.LLM_OUT_OF_MEMORY


def test_option_llm_enablecachemanager() -> None:
    """Chooses between the interfaces; each refuses the other's manager (spec api-datadist §1)."""
    with initialised(V2) as dist:
        assert dist.cache_manager.register_cache(tensor_of(8), [4096]).cache_id == 1
        refused(PARAM_INVALID, lambda: dist.kv_cache_manager)
        refused(PARAM_INVALID, dist.check_link_status, 2)
    for extra in ({}, {"llm.EnableCacheManager": "0"}, {"llm.EnableCacheManager": "true"}):
        with initialised({**V1_PROMPT, **extra}) as dist:
            assert dist.kv_cache_manager.is_initialized()
            refused(PARAM_INVALID, lambda dist=dist: dist.cache_manager)
            refused(PARAM_INVALID, dist.link, "name", {1: 0, 2: 1}, "{}")


def test_option_llm_enableremotecacheaccessible() -> None:
    """Pushing exists with it only."""
    check_v2(V2)
    check_v2({**V2, "llm.EnableRemoteCacheAccessible": "0"})
    check_v2(REMOTE, remote_access=True)
    for text in ("2", "", "true"):
        init_refused(PARAM_INVALID, {**V2, "llm.EnableRemoteCacheAccessible": text})


@pytest.mark.logs("exactly one")
def test_option_llm_localcommres() -> None:
    """Implies manager and remote access (spec §4, rules 1 - 3); resources that are given need no local address."""
    for text in ("", '{"version": "1.3"}', "anything"):
        check_v2({"llm.LocalCommRes": text}, remote_access=True)
        check_v2({"llm.LocalCommRes": text, "llm.EnableRemoteCacheAccessible": "0"})
        init_refused(PARAM_INVALID, {"llm.LocalCommRes": text, "llm.EnableCacheManager": "0"})
    info = LLMClusterInfo()
    info.remote_cluster_id = 2
    with initialised({"llm.LocalCommRes": ""}) as dist:
        assert "local_ip_info_list is empty" in refused(PARAM_INVALID, dist.link_clusters, [info])
    with initialised({"llm.LocalCommRes": '{"version": "1.3"}'}) as dist:
        assert dist.link_clusters([info]) == (PARAM_INVALID, [PARAM_INVALID])  # the remote address is missing
    check_self_link()


def check_self_link() -> None:
    """Upstream's tests link a process with itself (client-patterns §4)."""
    port = free_port()
    info = LLMClusterInfo()
    info.remote_cluster_id = 2
    info.append_remote_ip_info("127.0.0.1", port)
    with initialised({"llm.LocalCommRes": "{}", "llm.listenIpInfo": f"127.0.0.1:{port}"}, cluster_id=2) as dist:
        memory = alloc_shared(32).reshape(2, 2, 8)  # which every path reaches
        memory[:] = np.arange(32).reshape(2, 2, 8)
        cache = dist.cache_manager.register_cache(SMALL, [memory[0].ctypes.data, memory[1].ctypes.data])
        assert dist.link_clusters([info]) == (SUCCESS, [SUCCESS])
        refused(PARAM_INVALID, dist.cache_manager.pull_cache, CacheKeyByIdAndIndex(2, 1), cache)
        dist.cache_manager.push_cache(CacheKeyByIdAndIndex(2, 1, 1), cache)
        assert (memory[:, 1] == memory[:, 0]).all()
        assert dist.unlink_clusters([info]) == (SUCCESS, [SUCCESS])


def test_option_llm_transferbackend() -> None:
    """Only "hixl", and only with manager, remote access and a listener (spec §4, rules 4 - 7)."""
    hixl = {**V2, **LISTEN, "llm.TransferBackend": "hixl"}
    check_v2(hixl, remote_access=True)
    with initialised(hixl) as dist:
        refused(FEATURE_NOT_ENABLED, dist.link, "name", {1: 0, 2: 1}, "{}")
        refused(FEATURE_NOT_ENABLED, dist.unlink, 1)
        refused(FEATURE_NOT_ENABLED, dist.query_register_mem_status, 1)
    for text in ("", "HIXL", "comm"):
        init_refused(PARAM_INVALID, {**hixl, "llm.TransferBackend": text})
    without_manager = {**hixl, "llm.EnableCacheManager": "0"}
    assert "EnableCacheManager" in init_refused(PARAM_INVALID, without_manager)
    without_access = {**hixl, "llm.EnableRemoteCacheAccessible": "0"}
    assert "EnableRemoteCacheAccessible" in init_refused(PARAM_INVALID, without_access)
    del hixl["llm.listenIpInfo"]
    assert "listenIpInfo" in init_refused(PARAM_INVALID, hixl)


def test_option_llm_globalresourceconfig() -> None:
    """Passed to the hixl engine, which refuses what it cannot read; the comm backend does not look at it."""
    for text in ("", "{}", "{not json"):
        check_v2({**REMOTE, "llm.GlobalResourceConfig": text}, remote_access=True)
    hixl = {**REMOTE, **LISTEN, "llm.TransferBackend": "hixl"}
    check_v2({**hixl, "llm.GlobalResourceConfig": "{}"}, remote_access=True)
    init_refused(PARAM_INVALID, {**hixl, "llm.GlobalResourceConfig": "{not json"})


def test_option_llm_listenipinfo() -> None:
    port = free_port()
    assert not is_listening(port)
    options = {**V2, "llm.listenIpInfo": f"127.0.0.1:{port}"}
    with initialised(options):
        assert is_listening(port)
    assert not is_listening(port)
    for text in ("127.0.0.1", "127.0.0.1:1:2", "::1:26000", "", "nowhere:26000"):
        init_refused(PARAM_INVALID, {**V2, "llm.listenIpInfo": text})
    init_refused(ValueError, {**V2, "llm.listenIpInfo": "127.0.0.1:http"})
    with socket.create_server(("127.0.0.1", 0)) as other:
        init_refused(FAILED, {**V2, "llm.listenIpInfo": f"127.0.0.1:{other.getsockname()[1]}"})
    missing = dict(V1_PROMPT)
    del missing["llm.listenIpInfo"]
    init_refused(PARAM_INVALID, missing)
    init_refused(PARAM_INVALID, {**V1_PROMPT, "llm.listenIpInfo": "127.0.0.1:0;127.0.0.1:0"})
    with initialised({**V1_PROMPT, "llm.listenIpInfo": f"127.0.0.1:{port}"}):
        assert is_listening(port)


def check_pool(key: str, desc: CacheDesc) -> None:
    """Spec §3.1. ``desc`` is a tensor of 1 MiB, which is the whole pool."""
    fitting = {"memory_size": MIB, "page_shift": 12, "unknown": 1}
    with initialised({**V2, key: json.dumps(fitting)}) as dist:
        cache = dist.cache_manager.allocate_cache(desc)
        assert cache.tensor_addrs[0] % 4096 == 0
        refused(OUT_OF_MEMORY, dist.cache_manager.allocate_cache, desc)
    with initialised({**V2, key: ""}) as dist:
        refused(PARAM_INVALID, dist.cache_manager.allocate_cache, desc)
        refused(FEATURE_NOT_ENABLED, dist.cache_manager.deallocate_cache, cache)
    for wrong in (
        {},
        {"memory_size": -1},
        {"memory_size": "1048576"},
        {"memory_size": 1.5},
        {"memory_size": 65535},
        {"memory_size": MIB, "page_shift": 9},
        {"memory_size": MIB, "page_shift": 31},
        {"memory_size": MIB, "page_shift": "16"},
        {"memory_size": (2**32 - 1) << 10, "page_shift": 10},
    ):
        init_refused(PARAM_INVALID, {**V2, key: json.dumps(wrong)})
    for text in ("{", "[]", "1"):
        init_refused(PARAM_INVALID, {**V2, key: text})
    init_refused(OUT_OF_MEMORY, {**V2, key: json.dumps({"memory_size": 2**60, "page_shift": 30})})


def test_option_llm_mempoolconfig() -> None:
    check_pool("llm.MemPoolConfig", tensor_of(MIB))


def test_option_llm_hostmempoolconfig() -> None:
    check_pool("llm.HostMemPoolConfig", CacheDesc(1, [1, MIB], DataType.DT_INT8, Placement.HOST))


def test_option_llm_synckvcachewaittime() -> None:
    """That a transfer ends with it is ``test_status_timeout`` and, in v1, ``test_status_wait_process_timeout``."""
    for options, check in ((V2, check_v2), (V1_PROMPT, check_v1)):
        check({**options, "llm.SyncKvCacheWaitTime": "3000"})
        for text in ("", "-1", "1.5", "1s", " 1"):
            init_refused(PARAM_INVALID, {**options, "llm.SyncKvCacheWaitTime": text})


@pytest.mark.logs("link")
def test_option_llm_linktotaltime() -> None:
    """How long ``link()`` tries to reach the others; without it, 120 s."""
    check_v2({**V2, "llm.LinkTotalTime": "0"})
    for text in ("", "-1", "1.5", "soon"):
        init_refused(PARAM_INVALID, {**V2, "llm.LinkTotalTime": text})
    with initialised({**V2, "llm.LinkTotalTime": "1"}) as dist:
        comm_id = dist.link("alone", {1: 0, 2: 1}, local_table(2))
        assert dist.query_register_mem_status(comm_id) is RegisterMemStatus.PREPARING
        assert final_status(SimpleNamespace(dist=dist), comm_id) is RegisterMemStatus.FAILED  # type: ignore[arg-type]
        dist.unlink(comm_id)


@pytest.mark.logs("link")
def test_option_llm_linkretrycount() -> None:
    """Into how many tries ``link()`` divides its time: at somebody who never answers."""
    check_v2({**V2, "llm.LinkRetryCount": "80"})
    for text in ("0", "101", "-1", "", "many"):
        init_refused(PARAM_INVALID, {**V2, "llm.LinkRetryCount": text})
    assert num_tries("1") < num_tries("5")


def num_tries(retry_count: str) -> int:
    options = {**V2, "llm.LinkTotalTime": "1", "llm.LinkRetryCount": retry_count}
    with socket.create_server((HOST_IP, 0)) as silent, initialised(options) as dist:
        addresses = ({"host_ip": HOST_IP, "device_port": silent.getsockname()[1]}, {})
        comm_id = dist.link("alone", {2: 0, 1: 1}, rank_table(*addresses))
        assert final_status(SimpleNamespace(dist=dist), comm_id) is RegisterMemStatus.FAILED  # type: ignore[arg-type]
        silent.setblocking(False)
        tries = 0
        with suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
                tries += 1
        return tries


def check_number_text(key: str, level: int, option: int) -> None:
    """A number, which TCP sockets take over where it means something to them: in this process, linked with itself."""
    for text in ("0", "4294967295"):
        check_v2({**V2, key: text})
    for text in ("", "-1", "high", "1.0"):
        init_refused(PARAM_INVALID, {**V2, key: text})
    port = free_port()
    info = LLMClusterInfo()
    info.remote_cluster_id = 1
    info.append_local_ip_info("127.0.0.1", 0)
    info.append_remote_ip_info("127.0.0.1", port)
    for text, is_set in ((None, False), ("4", True)):
        options = {**V2, "llm.listenIpInfo": f"127.0.0.1:{port}"} | ({key: text} if text else {})
        with initialised(options) as dist:
            assert dist.link_clusters([info]) == (SUCCESS, [SUCCESS])
            assert (4 in own_socket_options(level, option)) is is_set


def own_socket_options(level: int, option: int) -> set[int]:
    """Of the IPv4 sockets of this process."""
    values = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the listing's own is gone
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as own:
                    if own.family == socket.AF_INET:
                        values.add(own.getsockopt(level, option))
    return values


@pytest.mark.logs("has no counterpart on TCP")  # one of the numbers
def test_option_llm_rdmatrafficclass() -> None:
    check_number_text("llm.RdmaTrafficClass", socket.IPPROTO_IP, socket.IP_TOS)


@pytest.mark.logs("has no counterpart on TCP")  # one of the numbers
def test_option_llm_rdmaservicelevel() -> None:
    check_number_text("llm.RdmaServiceLevel", socket.SOL_SOCKET, socket.SO_PRIORITY)
