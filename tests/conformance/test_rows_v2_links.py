"""Rows of LLMDataDist in v2 (spec api-datadist): its life, links and role. Links are shown by what moves over them."""

from __future__ import annotations

from typing import Any

import pytest

from llm_datadist_ray import CacheDesc, DataType, LLMClusterInfo, LLMDataDist, LLMRole, RegisterMemStatus
from tests.conformance.collective import final_status, free_port, local_table, ranks_of
from tests.conformance.pair import HOST_IP, CacheRef, End, Pair
from tests.conformance.pool_cache import on_dist
from tests.conformance.row_checks import (
    init_refused,
    is_listening,
    is_read_only,
    options_of,
    parameters,
    refused,
    v1,
    v2,
    v2_name,
)
from tests.conformance.status import (
    ALREADY_LINK,
    EXIST_LINK,
    FAILED,
    LINK_FAILED,
    NOT_YET_LINK,
    PARAM_INVALID,
    SUCCESS,
    UNLINK_FAILED,
    raises,
)

DESC = CacheDesc(1, [4, 16], DataType.DT_INT8)
OK = (SUCCESS, [SUCCESS])
TIMEOUT_MS = 5000


def pull(sink: End, dst: CacheRef, src: CacheRef) -> None:
    """Entry 1 of the source becomes entry 0 of the destination."""
    sink.process.pull_cache(src.key(1), dst.name, 0)
    for tensor in range(4):
        dst.tensor(tensor)[0] = src.tensor(tensor)[1]


def cannot_pull(sink: End, dst: CacheRef, src: CacheRef) -> None:
    with raises(NOT_YET_LINK):
        sink.process.pull_cache(src.key(), dst.name)


def pair_of_caches(pair: Pair) -> tuple[CacheRef, CacheRef]:
    return pair.a.cache("on_a"), pair.b.cache("on_b")


def test_v2_llm_datadist_constructor() -> None:
    assert v2_name("LLMDataDist") is LLMDataDist
    assert parameters(LLMDataDist) == ["role", "cluster_id"]
    refused(TypeError, LLMDataDist, 1, 1)
    refused(TypeError, LLMDataDist, LLMRole.MIX, "1")
    refused(TypeError, LLMDataDist, LLMRole.MIX, None)
    for out_of_range in (-1, 2**64):
        refused(ValueError, LLMDataDist, LLMRole.MIX, out_of_range)
    dist = LLMDataDist(role=LLMRole.MIX, cluster_id=2**64 - 1)
    assert dist.cluster_id == 2**64 - 1
    for method, args in (
        ("link_clusters", ([],)),
        ("unlink_clusters", ([],)),
        ("link", ("name", {1: 0, 2: 1}, "{}")),
        ("unlink", (1,)),
        ("query_register_mem_status", (1,)),
        ("check_link_status", (1,)),
        ("switch_role", (LLMRole.MIX,)),
    ):
        refused(RuntimeError, getattr(dist, method), *args)
    refused(RuntimeError, lambda: dist.kv_cache_manager)


def test_v2_llm_datadist_init() -> None:
    """One live instance per process; a failed init can be tried again (spec §2.2)."""
    assert parameters(LLMDataDist.init) == ["options"]
    options = options_of(local_comm_res="", listen_ip_info="127.0.0.1:0")
    given = dict(options)
    init_refused(TypeError, [])
    init_refused(AttributeError, None)
    init_refused(TypeError, {**options, "llm.listenIpInfo": 1})
    init_refused(TypeError, {**options, 1: "1"})
    init_refused(PARAM_INVALID, {**options, "llm.listenIpInfo": "nowhere:0"})
    dist, other = LLMDataDist(LLMRole.PROMPT, 1), LLMDataDist(LLMRole.DECODER, 2)
    dist.init(options)
    try:
        assert options == given
        dist.cache_manager.register_cache(DESC, [4096])
        assert dist.init({"llm.TransferBackend": "nonsense"}) is None  # type: ignore[func-returns-value]
        assert dist.cache_manager.register_cache(DESC, [4096]).cache_id == 2
        refused(FAILED, other.init, options)
        assert LLMDataDist.llm_engine_instance is dist
    finally:
        dist.finalize()
    with v2(LLMRole.DECODER, cluster_id=2) as third:
        assert LLMDataDist.llm_engine_instance is third


def test_v2_llm_datadist_finalize(linked_pair: Pair) -> None:
    """Links are dropped without asking the peer, caches are dead, and the object can be initialised again with the
    same options (spec §2.3, client-patterns §3.1)."""
    a, b = linked_pair.a, linked_pair.b
    on_a, on_b = pair_of_caches(linked_pair)
    pull(a, on_a, on_b)
    b.process.keep_manager()
    b.process.finalize()
    b.process.finalize()
    assert not is_listening(b.port)
    with raises(FAILED):
        b.process.use_kept_manager("unregister_cache", 1)
    with pytest.raises(RuntimeError):
        on_dist(b, "link_clusters", [a.info()])
    b.init(listen=True)
    assert b.cache("again").cache_id == 1
    assert a.process.unlink_clusters([b.info()], TIMEOUT_MS, True) == OK
    linked_pair.link()
    pull(a, on_a, b.cache_ref("again"))


def test_v2_llm_datadist_link_clusters(pair: Pair) -> None:
    """The client connects to who listens, and both use the link; a failure is a code in the tuple (spec §4)."""
    assert parameters(LLMDataDist.link_clusters) == ["clusters", ("timeout", 3000)]
    a, b = pair.a, pair.b
    on_a, on_b = pair_of_caches(pair)
    cannot_pull(a, on_a, on_b)
    nobody = LLMClusterInfo()
    nobody.remote_cluster_id = 7
    nobody.append_local_ip_info(HOST_IP, 0)
    nobody.append_remote_ip_info(HOST_IP, free_port())
    assert a.process.link_clusters((nobody, b.info()), timeout=TIMEOUT_MS) == (LINK_FAILED, [LINK_FAILED, SUCCESS])
    pull(a, on_a, on_b)
    pull(b, on_b, on_a)
    codes = [ALREADY_LINK, PARAM_INVALID]
    assert a.process.link_clusters([b.info(), b.info(remote=False)], TIMEOUT_MS) == (PARAM_INVALID, codes)
    assert a.process.link_clusters([]) == (PARAM_INVALID, [])
    for clusters, timeout, error in (
        (b.info(), 1, TypeError),
        ([1], 1, TypeError),
        ([b.info()], "1", TypeError),
        ([b.info()], 2**31, ValueError),
    ):
        with pytest.raises(error):
            a.process.link_clusters(clusters, timeout)
    with raises(PARAM_INVALID):
        a.process.link_clusters([b.info()], 0)
    with raises(PARAM_INVALID, "local_ip_info_list is empty"):
        a.process.link_clusters([b.info(), b.info(local=False)])


def test_v2_llm_datadist_unlink_clusters(linked_pair: Pair) -> None:
    """Without force both halves go, with it the own one; not linked is success (spec §5)."""
    assert parameters(LLMDataDist.unlink_clusters) == ["clusters", ("timeout", 3000), ("force", False)]
    a, b = linked_pair.a, linked_pair.b
    on_a, on_b = pair_of_caches(linked_pair)
    assert a.process.unlink_clusters([b.info(remote=False)]) == (PARAM_INVALID, [PARAM_INVALID])
    pull(b, on_b, on_a)  # nothing has happened
    assert a.process.unlink_clusters([b.info(local=False)], timeout=TIMEOUT_MS, force=False) == OK
    cannot_pull(a, on_a, on_b)
    cannot_pull(b, on_b, on_a)
    assert a.process.unlink_clusters([b.info()], TIMEOUT_MS) == OK
    linked_pair.link()
    pull(a, on_a, on_b)
    for end, peer, dst, src in ((a, b, on_a, on_b), (b, a, on_b, on_a)):
        assert end.process.unlink_clusters([peer.info(remote=False, local=False)], TIMEOUT_MS, force=True) == OK
        cannot_pull(end, dst, src)
    linked_pair.link()
    pull(b, on_b, on_a)
    assert a.process.unlink_clusters([]) == (PARAM_INVALID, [])
    with pytest.raises(TypeError):
        a.process.unlink_clusters([b.info()], TIMEOUT_MS, 1)
    unreachable = b.info(remote=False)
    unreachable.append_remote_ip_info(HOST_IP, free_port())
    assert a.process.unlink_clusters([unreachable], TIMEOUT_MS) == (UNLINK_FAILED, [UNLINK_FAILED])
    pull(a, on_a, on_b)  # and the link is kept


def test_v2_llm_datadist_switch_role(linked_pair: Pair) -> None:
    """Client and server change sides, caches stay; not while linked (spec §6.1)."""
    assert parameters(LLMDataDist.switch_role) == ["role", ("switch_options", None)]
    a, b = linked_pair.a, linked_pair.b
    on_a, on_b = pair_of_caches(linked_pair)
    for end in (a, b):
        with raises(EXIST_LINK):
            end.process.switch_role(LLMRole.MIX)
    assert a.process.unlink_clusters([b.info()], TIMEOUT_MS) == OK
    b.process.switch_role(LLMRole.DECODER)
    assert not is_listening(b.port)
    a.port = free_port()
    with pytest.raises(TypeError):
        a.process.switch_role(1)
    with pytest.raises(TypeError):
        a.process.switch_role(LLMRole.PROMPT, [])
    with raises(PARAM_INVALID):
        a.process.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": HOST_IP})
    a.process.switch_role(LLMRole.PROMPT, options_of(listen_ip_info=f"{HOST_IP}:{a.port}"))
    assert b.process.link_clusters([a.info()], TIMEOUT_MS) == OK
    pull(a, on_a, on_b)
    pull(b, on_b, on_a)


def collective(pair: Pair, name: str = "comm") -> tuple[str, dict[int, int], str]:
    return name, ranks_of(pair.a, pair.b), local_table(2)


def link_both(pair: Pair, call: tuple[str, dict[int, int], str]) -> list[int]:
    comm_ids = [on_dist(end, "link", *call) for end in (pair.a, pair.b)]
    for end, comm_id in zip((pair.a, pair.b), comm_ids, strict=True):
        assert end.process.run(final_status, comm_id) is RegisterMemStatus.OK
    return comm_ids


def test_v2_llm_datadist_link(pair: Pair) -> None:
    """Collective, and usable by both; from then on nothing new can be remote accessible (spec §7.1)."""
    assert parameters(LLMDataDist.link) == ["comm_name", "cluster_rank_info", "rank_table"]
    on_a, on_b = pair_of_caches(pair)
    name, ranks, table = call = collective(pair)
    for wrong, error in (
        ((None, ranks, table), TypeError),
        (("", ranks, table), PARAM_INVALID),
        (("n" * 128, ranks, table), PARAM_INVALID),
        ((name, [1, 2], table), TypeError),
        ((name, {"1": 0, 2: 1}, table), TypeError),
        ((name, {1: 0}, table), PARAM_INVALID),
        ((name, {cluster: cluster for cluster in range(1, 6)}, table), PARAM_INVALID),
        ((name, {1: 1, 2: 0}, table), PARAM_INVALID),
        ((name, {-1: 0, 1: 1}, table), ValueError),
        ((name, {1: 0, 2: 2**32}, table), ValueError),
        ((name, {3: 0, 2: 1}, table), PARAM_INVALID),
        ((name, ranks, {}), TypeError),
        ((name, ranks, "{"), LINK_FAILED),
    ):
        refused(error, on_dist, pair.a, "link", *wrong)
    assert link_both(pair, call) == [1, 1]
    pull(pair.a, on_a, on_b)
    pull(pair.b, on_b, on_a)
    refused(PARAM_INVALID, pair.a.cache, "late", remote_accessible=True)
    late = pair.b.cache("late", remote_accessible=None)  # which means False from now on
    if pair.remote_access:
        refused(PARAM_INVALID, pair.a.process.pull_cache, late.key(1), "on_a", 0)
    else:
        pull(pair.a, on_a, late)


def test_v2_llm_datadist_unlink(pair: Pair) -> None:
    """Local; a second one of the same id raises (spec §7.3)."""
    assert parameters(LLMDataDist.unlink) == ["comm_id"]
    on_a, on_b = pair_of_caches(pair)
    refused(NOT_YET_LINK, on_dist, pair.a, "unlink", 1)
    link_both(pair, collective(pair))
    pull(pair.a, on_a, on_b)
    for end, dst, src in ((pair.a, on_a, on_b), (pair.b, on_b, on_a)):
        assert on_dist(end, "unlink", 1) is None
        cannot_pull(end, dst, src)
        refused(NOT_YET_LINK, on_dist, end, "unlink", 1)
    refused(TypeError, on_dist, pair.a, "unlink", "1")
    refused(ValueError, on_dist, pair.a, "unlink", -1)
    assert link_both(pair, collective(pair, "again")) == [2, 2]
    pull(pair.b, on_b, on_a)


def test_v2_llm_datadist_query_register_mem_status(pair: Pair) -> None:
    """PREPARING until all have called ``link``, and no transfer before OK (spec §7.2)."""
    assert parameters(LLMDataDist.query_register_mem_status) == ["comm_id"]
    on_a, on_b = pair_of_caches(pair)
    call = collective(pair)
    comm_id = on_dist(pair.a, "link", *call)
    assert on_dist(pair.a, "query_register_mem_status", comm_id) is RegisterMemStatus.PREPARING
    cannot_pull(pair.a, on_a, on_b)
    on_dist(pair.b, "link", *call)
    for end in (pair.a, pair.b):
        assert end.process.run(final_status, comm_id) is RegisterMemStatus.OK
        assert on_dist(end, "query_register_mem_status", comm_id=comm_id) is RegisterMemStatus.OK
    pull(pair.a, on_a, on_b)
    for end in (pair.a, pair.b):
        on_dist(end, "unlink", comm_id)
    pair.link()
    pull(pair.a, on_a, on_b)
    missing_a_member = on_dist(pair.a, "link", "three", {1: 0, 2: 1, 3: 2}, local_table(3))
    assert on_dist(pair.a, "query_register_mem_status", missing_a_member) is RegisterMemStatus.PREPARING
    pull(pair.a, on_a, on_b)  # they were linked before, and not by a communicator
    refused(NOT_YET_LINK, on_dist, pair.a, "query_register_mem_status", 7)
    refused(TypeError, on_dist, pair.a, "query_register_mem_status", None)
    refused(ValueError, on_dist, pair.a, "query_register_mem_status", -1)


def test_v2_llm_datadist_cache_manager() -> None:
    """RuntimeError before init, PARAM_INVALID in v1, dead after finalize (spec §1, api-cachemanager §1)."""
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    refused(RuntimeError, lambda: dist.cache_manager)
    dist.init(options_of(enable_cache_manager=True))
    manager = dist.cache_manager
    assert dist.cache_manager is manager
    assert is_read_only(dist, "cache_manager")
    dist.finalize()
    refused(RuntimeError, lambda: dist.cache_manager)
    calls: list[tuple[Any, ...]] = [(manager.register_cache, DESC, [4096]), (manager.unregister_cache, 1)]
    for call in calls:
        refused(FAILED, *call)
    with v1() as v1_dist:
        refused(PARAM_INVALID, lambda: v1_dist.cache_manager)
