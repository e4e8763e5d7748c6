"""Rows of LLMDataDist and CacheTask in v1 (spec api-datadist §2, §6.2, §8, §9; api-types §10.5)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from llm_datadist_ray import (
    CacheDesc,
    CacheKey,
    CacheTask,
    DataType,
    LLMClusterInfo,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    TransferConfig,
)
from llm_datadist_ray.kv_cache import KvCacheManager
from tests.conformance import row_side
from tests.conformance.collective import free_port
from tests.conformance.pair import HOST_IP, End, Pair
from tests.conformance.pool_cache import PoolCache, call, on_dist
from tests.conformance.row_checks import init_refused, is_listening, parameters, refused, v1, v1_name, v1_options, v2
from tests.conformance.status import (
    ALREADY_LINK,
    EXIST_LINK,
    FAILED,
    FEATURE_NOT_ENABLED,
    LINK_FAILED,
    NOT_YET_LINK,
    PARAM_INVALID,
    SUCCESS,
    UNLINK_FAILED,
)
from tests.conformance.v1_pair import LINK_TIMEOUT_MS, V1Pair, init_v1

WAIT_PROCESS_TIMEOUT = LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
REPEAT_REQUEST = LLMStatusCode.LLM_REPEAT_REQUEST
CLUSTER_NUM_EXCEED_LIMIT = LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT
OK = (SUCCESS, [SUCCESS])
DESC = CacheDesc(2, [4, 8], DataType.DT_INT8)
two_sided = pytest.mark.mode("two-sided")


@pytest.fixture
def ends(idle_pair: Pair) -> Iterator[V1Pair]:
    """Initialised, not linked."""
    yield init_v1(idle_pair)


def nobody(cluster_id: int = 9, num_addresses: int = 1) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    for _ in range(num_addresses):
        info.append_local_ip_info(HOST_IP, 0)
        info.append_remote_ip_info(HOST_IP, free_port())
    return info


def link(ends: V1Pair, *clusters: LLMClusterInfo) -> Any:
    return on_dist(ends.decoder, "link_clusters", list(clusters), LINK_TIMEOUT_MS)


def unlink(end: End, *clusters: LLMClusterInfo, **kwargs: Any) -> Any:
    return on_dist(end, "unlink_clusters", list(clusters), LINK_TIMEOUT_MS, **kwargs)


def check_link(ends: V1Pair) -> None:
    """Raises what the probe raises."""
    on_dist(ends.decoder, "check_link_status", ends.prompt.cluster_id)


def test_v1_llm_datadist_constructor() -> None:
    assert v1_name("LLMDataDist") is LLMDataDist
    assert parameters(LLMDataDist) == ["role", "cluster_id"]
    refused(TypeError, LLMDataDist, 2, 1)
    refused(ValueError, LLMDataDist, LLMRole.DECODER, -1)
    dist = LLMDataDist(role=LLMRole.DECODER, cluster_id=3)
    assert dist.cluster_id == 3
    refused(RuntimeError, lambda: dist.kv_cache_manager)
    refused(RuntimeError, dist.check_link_status, 1)


def test_v1_llm_datadist_init() -> None:
    """Options as a client writes them by hand; the dict stays as it is (client-patterns §2.1, spec §2.2)."""
    port = free_port()
    options = {
        "llm.SyncKvCacheWaitTime": "1000",
        "ge.exec.deviceId": "0",
        "ge.flowGraphMemMaxSize": "1048576",
        "llm.listenIpInfo": f"{HOST_IP}:{port}",
    }
    given = dict(options)
    dist, other = LLMDataDist(LLMRole.PROMPT, 1), LLMDataDist(LLMRole.DECODER, 2)
    dist.init(options)
    try:
        assert options == given
        assert is_listening(port)
        assert dist.kv_cache_manager.allocate_cache(DESC).cache_id == 1
        dist.init({})
        assert dist.kv_cache_manager.allocate_cache(DESC).cache_id == 2
        refused(FAILED, other.init, v1_options(LLMRole.DECODER))
    finally:
        dist.finalize()
    del options["ge.exec.deviceId"]
    init_refused(PARAM_INVALID, options)
    with socket.create_server((HOST_IP, 0)) as taken:
        init_refused(FAILED, v1_options(LLMRole.PROMPT, listen_ip_info=f"{HOST_IP}:{taken.getsockname()[1]}"))
    dist.init(given)
    dist.finalize()


def test_v1_llm_datadist_finalize() -> None:
    """Not listening, manager dead, ids from 1 on after the next init; twice is once (spec §2.3)."""
    port = free_port()
    options = v1_options(LLMRole.PROMPT, listen_ip_info=f"{HOST_IP}:{port}")
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    dist.finalize()
    for _ in range(2):
        dist.init(options)
        cache = dist.kv_cache_manager.allocate_cache(DESC, [CacheKey(1, 0)])
        assert cache.cache_id == 1
        manager = dist.kv_cache_manager
        dist.finalize()
        dist.finalize()
        assert not is_listening(port)
        assert not manager.is_initialized()
        refused(FAILED, manager.deallocate_cache, cache)
        refused(RuntimeError, lambda: dist.kv_cache_manager)
        assert LLMDataDist.llm_engine_instance is None


@two_sided
def test_v1_llm_datadist_link_clusters(ends: V1Pair) -> None:
    """DECODER only; the overall code says little, the list says all (spec §9)."""
    info = ends.prompt.info()
    repeated = ends.prompt.info()
    assert link(ends, info, repeated) == (SUCCESS, [SUCCESS, REPEAT_REQUEST])
    check_link(ends)
    assert link(ends, info) == (SUCCESS, [ALREADY_LINK])
    assert link(ends, nobody(), info) == (LINK_FAILED, [LINK_FAILED, ALREADY_LINK])
    assert link(ends) == (PARAM_INVALID, [])
    assert link(ends, nobody(num_addresses=2)) == (PARAM_INVALID, [])
    assert link(ends, ends.prompt.info(local=False)) == (PARAM_INVALID, [])
    elsewhere = LLMClusterInfo()
    elsewhere.remote_cluster_id = 8
    elsewhere.append_local_ip_info("10.0.0.1", 0)
    elsewhere.append_remote_ip_info(HOST_IP, free_port())
    assert link(ends, nobody(), elsewhere) == (PARAM_INVALID, [])
    assert link(ends, *(nobody(cluster_id) for cluster_id in range(20, 37))) == (CLUSTER_NUM_EXCEED_LIMIT, [])
    assert on_dist(ends.prompt, "link_clusters", [nobody()]) == (PARAM_INVALID, [])
    refused(TypeError, on_dist, ends.decoder, "link_clusters", info)
    nameless = LLMClusterInfo()
    nameless.append_local_ip_info(HOST_IP, 0)
    nameless.append_remote_ip_info(HOST_IP, 1)
    refused(TypeError, link, ends, nameless)


@two_sided
def test_v1_llm_datadist_unlink_clusters(ends: V1Pair) -> None:
    """A DECODER cleans both sides, a PROMPT its own, ``force`` the own one (spec §9)."""
    info = ends.prompt.info()
    src, dst = PoolCache(ends.prompt, "src"), PoolCache(ends.decoder, "dst")
    assert unlink(ends.decoder, info) == (SUCCESS, [NOT_YET_LINK])
    ends.link()
    moved = nobody(ends.prompt.cluster_id)
    assert unlink(ends.decoder, moved) == (UNLINK_FAILED, [PARAM_INVALID])
    check_link(ends)
    assert unlink(ends.decoder, info, force=False) == OK
    refused(NOT_YET_LINK, call, ends.decoder, "pull_cache", src.key(), dst)
    ends.link()
    assert unlink(ends.decoder, info, force=True) == OK
    refused(NOT_YET_LINK, check_link, ends)
    ends.link()
    visitor = nobody(ends.decoder.cluster_id)
    assert unlink(ends.prompt, visitor) == OK
    assert unlink(ends.prompt, visitor) == (SUCCESS, [NOT_YET_LINK])
    assert unlink(ends.decoder, info, force=True)[0] == SUCCESS
    ends.link()
    call(ends.decoder, "pull_cache", src.key(1), dst, 0)
    dst.expected[:, 0] = src.expected[:, 1]
    dst.check()
    assert unlink(ends.decoder) == (PARAM_INVALID, [])
    assert unlink(ends.decoder, ends.prompt.info(local=False)) == (PARAM_INVALID, [])
    refused(TypeError, on_dist, ends.decoder, "unlink_clusters", [info], LINK_TIMEOUT_MS, 1)


@two_sided
def test_v1_llm_datadist_check_link_status(ends: V1Pair) -> None:
    """A probe that is answered (spec §8)."""
    assert parameters(LLMDataDist.check_link_status) == ["remote_cluster_id"]
    refused(NOT_YET_LINK, check_link, ends)
    ends.link()
    assert check_link(ends) is None  # type: ignore[func-returns-value]
    refused(NOT_YET_LINK, on_dist, ends.decoder, "check_link_status", 77)
    refused(PARAM_INVALID, on_dist, ends.prompt, "check_link_status", ends.decoder.cluster_id)
    refused(TypeError, on_dist, ends.decoder, "check_link_status", "2")
    refused(ValueError, on_dist, ends.decoder, "check_link_status", -1)
    with v2() as dist:
        refused(PARAM_INVALID, dist.check_link_status, 2)


def test_v1_llm_datadist_kv_cache_manager() -> None:
    with v1() as dist:
        assert type(dist.kv_cache_manager) is KvCacheManager
        assert dist.kv_cache_manager is dist.kv_cache_manager
        refused(PARAM_INVALID, lambda: dist.cache_manager)
    with v2() as dist:
        refused(PARAM_INVALID, lambda: dist.kv_cache_manager)


@two_sided
def test_v1_llm_datadist_switch_role(idle_pair: Pair) -> None:
    """Needs the option; both change sides and then move bytes the other way (spec §6.2)."""
    ends = init_v1(idle_pair, enable_switch_role=True)
    ends.link()
    for end, role in ((ends.prompt, LLMRole.DECODER), (ends.decoder, LLMRole.PROMPT)):
        port = free_port()
        listen = {"llm.listenIpInfo": f"{HOST_IP}:{port}"}
        refused(EXIST_LINK, on_dist, end, "switch_role", role, listen)
    assert unlink(ends.decoder, ends.prompt.info()) == OK
    refused(PARAM_INVALID, on_dist, ends.prompt, "switch_role", LLMRole.PROMPT, listen)
    refused(PARAM_INVALID, on_dist, ends.decoder, "switch_role", LLMRole.PROMPT)
    refused(TypeError, on_dist, ends.decoder, "switch_role", 1, listen)
    on_dist(ends.prompt, "switch_role", LLMRole.DECODER)
    assert not is_listening(ends.prompt.port)
    on_dist(ends.decoder, "switch_role", LLMRole.PROMPT, listen)
    swapped = V1Pair(prompt=ends.decoder, decoder=ends.prompt)
    swapped.prompt.port = port
    src = PoolCache(swapped.prompt, "src", keys=[CacheKey(1, 4)])
    dst = PoolCache(swapped.decoder, "dst")
    swapped.link()
    call(swapped.decoder, "pull_cache", CacheKey(1, 4), dst)
    dst.expected[:, 0] = src.expected[:, 0]
    dst.check()
    with v1(LLMRole.DECODER) as dist:
        refused(FEATURE_NOT_ENABLED, dist.switch_role, LLMRole.PROMPT, listen)
    with v1(LLMRole.DECODER, device_id=[0, 1], enable_switch_role=True) as dist:
        refused(FEATURE_NOT_ENABLED, dist.switch_role, LLMRole.PROMPT, listen)


def start(ends: V1Pair, configs: list[TransferConfig], **kwargs: Any) -> None:
    ends.prompt.process.run(row_side.start_transfer, "src", configs, **kwargs)


@two_sided
def test_v1_cache_task_constructor(ends: V1Pair) -> None:
    """Made by transfer_cache_async only; nothing to do is success."""
    assert v1_name("CacheTask") is CacheTask
    PoolCache(ends.prompt, "src")
    start(ends, [])
    run = ends.prompt.process.run
    assert run(row_side.synchronize) is SUCCESS
    assert run(row_side.get_results) == []
    assert run(row_side.layer_calls) == []


@two_sided
def test_v1_cache_task_synchronize(ends: V1Pair) -> None:
    """WAIT_PROCESS_TIMEOUT while it runs (api-types §10.5)."""
    src, dst = PoolCache(ends.prompt, "src"), PoolCache(ends.decoder, "dst")
    ends.link()
    run = ends.prompt.process.run
    start(ends, [TransferConfig(ends.decoder.cluster_id, dst.addrs(), None, 3)], closed=True)
    assert run(row_side.synchronize, 1) is WAIT_PROCESS_TIMEOUT
    assert run(row_side.synchronize, timeout_in_millis=0) is WAIT_PROCESS_TIMEOUT
    refused(TypeError, run, row_side.synchronize, "1")
    refused(ValueError, run, row_side.synchronize, 2**32)
    run(row_side.open_gate)
    assert run(row_side.synchronize) is SUCCESS
    assert run(row_side.synchronize, 20_000) is SUCCESS
    dst.expected[:, 0] = src.expected[:, 3]
    dst.check()
    start(ends, [TransferConfig(77, dst.addrs())])
    assert run(row_side.synchronize) is NOT_YET_LINK


@two_sided
def test_v1_cache_task_get_results(ends: V1Pair) -> None:
    """In the order of the configs; None for what never ended because the job had stopped."""
    src, dst = PoolCache(ends.prompt, "src"), PoolCache(ends.decoder, "dst")
    ends.link()
    run, addrs = ends.prompt.process.run, dst.addrs()
    first = TransferConfig(ends.decoder.cluster_id, addrs[:2], range(1))
    start(ends, [first, TransferConfig(77, addrs[2:], range(1, 2))], closed=True)
    assert run(row_side.get_results, 1) == [WAIT_PROCESS_TIMEOUT, WAIT_PROCESS_TIMEOUT]
    run(row_side.open_gate)
    assert run(row_side.get_results) == [SUCCESS, NOT_YET_LINK]
    dst.expected[:2, 0] = src.expected[:2, 0]
    dst.check()
    start(ends, [TransferConfig(ends.decoder.cluster_id, addrs), TransferConfig(77, addrs[:2], range(1))])
    assert run(row_side.get_results, timeout_in_millis=20_000) == [None, NOT_YET_LINK]
    refused(TypeError, run, row_side.get_results, 1.0)
    refused(ValueError, run, row_side.get_results, -1)
    dst.expected[:2, 0] = src.expected[:2, 0]
    dst.check()
