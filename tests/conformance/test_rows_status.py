"""Rows of status codes (spec api-types §3.2): each is produced by the situation that the spec names."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from llm_datadist_ray import (
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMClusterInfo,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from llm_datadist_ray.errors import handle_llm_status
from tests.conformance import row_side
from tests.conformance.collective import free_port
from tests.conformance.pair import HOST_IP, End, Pair
from tests.conformance.pool_cache import PoolCache, call, on_dist
from tests.conformance.row_checks import (
    MIB,
    POOL,
    STATUS_BASE,
    V1_POOL_BYTES,
    check_code,
    init_refused,
    options_of,
    refused,
    v1,
    v2,
)
from tests.conformance.v1_pair import LINK_TIMEOUT_MS, V1Pair, init_v1

DESC = CacheDesc(1, [4, 16], DataType.DT_INT8)
two_sided = pytest.mark.mode("two-sided")


def cluster(cluster_id: int, port: int) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_local_ip_info(HOST_IP, 0)
    info.append_remote_ip_info(HOST_IP, port)
    return info


@contextmanager
def stopped(end: End) -> Iterator[None]:
    end.process.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        end.process.signal(signal.SIGCONT)


def test_status_success(pair: Pair) -> None:
    code = check_code("SUCCESS", 0)
    assert on_dist(pair.a, "link_clusters", [pair.b.info()], LINK_TIMEOUT_MS) == (code, [code])
    assert not code
    assert handle_llm_status(0, "step") is None  # type: ignore[func-returns-value]


def test_status_failed() -> None:
    """A second live instance; a port that is taken; every native code without a name."""
    code = check_code("FAILED", 0xFFFFFFFF)
    with v2():
        refused(code, LLMDataDist(LLMRole.DECODER, 2).init, options_of(enable_cache_manager=True))
    with socket.create_server((HOST_IP, 0)) as taken:
        port = taken.getsockname()[1]
        init_refused(code, options_of(enable_cache_manager=True, listen_ip_info=f"{HOST_IP}:{port}"))
    for unnamed in (STATUS_BASE + 20, STATUS_BASE + 23, 12345):
        assert str(unnamed) in refused(code, handle_llm_status, unnamed, "step")


def linked_v1(pair: Pair, sync_kv_timeout_ms: int) -> tuple[V1Pair, PoolCache, PoolCache]:
    ends = init_v1(pair, sync_kv_timeout=sync_kv_timeout_ms)
    caches = PoolCache(ends.prompt, "src"), PoolCache(ends.decoder, "dst")
    ends.link()
    return ends, *caches


@two_sided
def test_status_wait_process_timeout(idle_pair: Pair) -> None:
    """What LLM_TIMEOUT is in v1: a PROMPT that does not answer within ``sync_kv_timeout``."""
    code = check_code("WAIT_PROCESS_TIMEOUT", STATUS_BASE + 1)
    ends, src, dst = linked_v1(idle_pair, 100)
    with stopped(ends.prompt):
        refused(code, call, ends.decoder, "pull_cache", src.key(), dst)
        refused(code, on_dist, ends.decoder, "check_link_status", ends.prompt.cluster_id)
    dst.check()


def test_status_kv_cache_not_exist(linked_pair: Pair) -> None:
    code = check_code("KV_CACHE_NOT_EXIST", STATUS_BASE + 2)
    linked_pair.a.cache("dst")
    refused(code, linked_pair.a.process.pull_cache, CacheKeyByIdAndIndex(2, 7), "dst")
    src = linked_pair.b.cache("src")
    linked_pair.a.process.unregister("dst")
    refused(code, linked_pair.a.process.pull_cache, src.key(), "dst")


@two_sided
def test_status_repeat_request(idle_pair: Pair) -> None:
    """v1: a cluster that is named twice in one call."""
    code = check_code("REPEAT_REQUEST", STATUS_BASE + 3)
    ends = init_v1(idle_pair)
    twice = [ends.prompt.info(), ends.prompt.info()]
    for method in ("link_clusters", "unlink_clusters"):
        _, codes = on_dist(ends.decoder, method, twice, LINK_TIMEOUT_MS)
        assert codes == [LLMStatusCode.LLM_SUCCESS, code]


def test_status_param_invalid() -> None:
    code = check_code("PARAM_INVALID", STATUS_BASE + 5)
    assert code == 1343270917
    refused(code, CacheKey, 1)
    init_refused(code, options_of(enable_cache_manager=True, listen_ip_info="nowhere:1"))


def test_status_not_yet_link(pair: Pair) -> None:
    code = check_code("NOT_YET_LINK", STATUS_BASE + 7)
    pair.a.cache("dst")
    refused(code, pair.a.process.pull_cache, CacheKeyByIdAndIndex(2, 1), "dst")
    refused(code, on_dist, pair.a, "unlink", 1)
    refused(code, on_dist, pair.a, "query_register_mem_status", 1)


def test_status_already_link(linked_pair: Pair) -> None:
    code = check_code("ALREADY_LINK", STATUS_BASE + 8)
    assert linked_pair.a.process.link_clusters([linked_pair.b.info()], LINK_TIMEOUT_MS) == (code, [code])


def test_status_link_failed(pair: Pair) -> None:
    code = check_code("LINK_FAILED", STATUS_BASE + 9)
    assert pair.a.process.link_clusters([cluster(2, free_port())], LINK_TIMEOUT_MS) == (code, [code])


def test_status_unlink_failed(linked_pair: Pair) -> None:
    """The peer cannot be reached to drop its half, and the link is kept (spec api-datadist §5)."""
    code = check_code("UNLINK_FAILED", STATUS_BASE + 10)
    unreachable = cluster(2, free_port())
    assert linked_pair.a.process.unlink_clusters([unreachable], LINK_TIMEOUT_MS) == (code, [code])
    refused(LLMStatusCode.LLM_EXIST_LINK, linked_pair.a.process.switch_role, LLMRole.MIX)


@two_sided
def test_status_notify_prompt_unlink_failed(idle_pair: Pair) -> None:
    """v1: the PROMPT is gone; the own side is cleaned up all the same (spec api-datadist §9)."""
    code = check_code("NOTIFY_PROMPT_UNLINK_FAILED", STATUS_BASE + 11)
    ends = init_v1(idle_pair)
    ends.link()
    info = ends.prompt.info()
    ends.prompt.process.restart()
    ends.prompt.forget()
    unlink = partial(on_dist, ends.decoder, "unlink_clusters", [info], LINK_TIMEOUT_MS)
    assert unlink() == (LLMStatusCode.LLM_UNLINK_FAILED, [code])
    assert unlink() == (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_NOT_YET_LINK])


@pytest.mark.logs("17 clusters")
def test_status_cluster_num_exceed_limit() -> None:
    """v1: more than 16 clusters in a call."""
    code = check_code("CLUSTER_NUM_EXCEED_LIMIT", STATUS_BASE + 12)
    clusters = [cluster(cluster_id, 1) for cluster_id in range(2, 19)]
    with v1(LLMRole.DECODER) as dist:
        assert dist.link_clusters(clusters) == (code, [])
        assert dist.unlink_clusters(clusters) == (code, [])
        assert dist.unlink_clusters(clusters[:16])[0] == LLMStatusCode.LLM_SUCCESS


@pytest.mark.logs("another call links or unlinks")
def test_status_processing_link() -> None:
    """v1: another link or unlink is in progress."""
    code = check_code("PROCESSING_LINK", STATUS_BASE + 13)
    results: list[Any] = []
    with v1(LLMRole.DECODER) as dist, socket.create_server((HOST_IP, 0)) as silent:
        info = cluster(2, silent.getsockname()[1])
        first = threading.Thread(target=lambda: results.append(dist.link_clusters([info], 60_000)))
        first.start()
        connection, _ = silent.accept()  # it is on its way now, and waits for an answer
        with connection:
            assert dist.link_clusters([info]) == (code, [])
            assert dist.unlink_clusters([info]) == (code, [])
        first.join()
        assert results == [(LLMStatusCode.LLM_LINK_FAILED, [LLMStatusCode.LLM_LINK_FAILED])]


def test_status_device_out_of_memory() -> None:
    """v1: the pool has no room, for as long as nothing is given back (client-patterns §2.2)."""
    code = check_code("DEVICE_OUT_OF_MEMORY", STATUS_BASE + 14)
    desc = CacheDesc(1, [1, V1_POOL_BYTES * 3 // 4], DataType.DT_INT8)
    with v1() as dist:
        cache = dist.kv_cache_manager.allocate_cache(desc)
        refused(code, dist.kv_cache_manager.allocate_cache, desc)
        refused(code, dist.kv_cache_manager.allocate_blocks_cache, desc)
        dist.kv_cache_manager.deallocate_cache(cache)
        assert dist.kv_cache_manager.allocate_cache(desc).per_device_tensor_addrs


def test_status_exist_link(linked_pair: Pair) -> None:
    """``switch_role`` while there are links, whoever made them."""
    code = check_code("EXIST_LINK", STATUS_BASE + 24)
    for end in (linked_pair.a, linked_pair.b):
        refused(code, end.process.switch_role, LLMRole.MIX)
    linked_pair.a.process.unlink_clusters([linked_pair.b.info()], LINK_TIMEOUT_MS)
    linked_pair.a.process.switch_role(LLMRole.MIX)


@two_sided
def test_status_feature_not_enabled(linked_pair: Pair) -> None:
    """A pool method without a pool; host to host; ``link()`` on the hixl backend; v1 switching without its option."""
    code = check_code("FEATURE_NOT_ENABLED", STATUS_BASE + 25)
    src = linked_pair.b.cache("src", placement=Placement.HOST)
    linked_pair.a.cache("dst", placement=Placement.HOST)
    refused(code, linked_pair.a.process.pull_cache, src.key(), "dst")
    with v2() as dist:
        refused(code, dist.cache_manager.remove_cache_key, CacheKey(1, 0))
    hixl = {"enable_remote_cache_accessible": True, "listen_ip_info": f"{HOST_IP}:0", "transfer_backend": "hixl"}
    with v2(**hixl) as dist:
        refused(code, dist.link, "name", {1: 0, 2: 1}, "{}")
    with v1(LLMRole.DECODER) as dist:
        refused(code, dist.switch_role, LLMRole.PROMPT, {"llm.listenIpInfo": f"{HOST_IP}:0"})


@two_sided
def test_status_timeout(idle_pair: Pair) -> None:
    """A peer that does not answer within ``sync_kv_timeout``; the link has to be made anew (spec §3.2)."""
    code = check_code("TIMEOUT", STATUS_BASE + 26)
    a, b = idle_pair.a, idle_pair.b
    a.init(listen=False, sync_kv_timeout=100)
    b.init(listen=True)
    src, dst = b.cache("src"), a.cache("dst")
    idle_pair.link()
    with stopped(b):
        refused(code, a.process.pull_cache, src.key(), "dst")
        assert a.process.link_clusters([cluster(7, b.port)], 100)[0] == code
    success = LLMStatusCode.LLM_SUCCESS
    assert a.process.unlink_clusters([b.info()], LINK_TIMEOUT_MS, True) == (success, [success])
    idle_pair.link()
    a.process.pull_cache(src.key(2), "dst", 1)
    for tensor in range(4):
        dst.tensor(tensor)[1] = src.tensor(tensor)[2]


@two_sided
def test_status_link_busy(idle_pair: Pair) -> None:
    """v1 does not queue: of two pulls at once one is refused at once, while the other waits for its PROMPT."""
    code = check_code("LINK_BUSY", STATUS_BASE + 27)
    ends, src, dst = linked_v1(idle_pair, 300)
    with stopped(ends.prompt):
        codes = ends.decoder.process.run(row_side.codes_of_pulls_at_once, src.key(), dst.name, 2)
    assert sorted(codes) == [LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT, code]
    dst.check()


def test_status_out_of_memory() -> None:
    """v2: a pool that has no room, or that cannot be had; of both kinds (spec api-config §3.1)."""
    code = check_code("OUT_OF_MEMORY", STATUS_BASE + 28)
    impossible = json.dumps({"memory_size": 2**60, "page_shift": 30})
    for option, placement in (("mem_pool_cfg", Placement.DEVICE), ("host_mem_pool_cfg", Placement.HOST)):
        with v2(**{option: POOL}) as dist:
            too_large = CacheDesc(2, [1, MIB // 2 + 1], DataType.DT_INT8, placement)
            refused(code, dist.cache_manager.allocate_cache, too_large)
            refused(code, dist.cache_manager.allocate_blocks_cache, too_large)
        init_refused(code, options_of(enable_cache_manager=True, **{option: impossible}))
