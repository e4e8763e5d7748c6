"""Rows of status codes that nothing produces, here or upstream (spec api-types §3.2): they are there for clients to
compare with; and what comes instead."""

from __future__ import annotations

import pytest

from llm_datadist_ray import CacheDesc, CacheKey, DataType, LLMStatusCode
from llm_datadist_ray.types import INVALID_ID
from tests.conformance.pair import Pair
from tests.conformance.row_checks import POOL, STATUS_BASE, check_code, refused, v1, v2

DESC = CacheDesc(1, [4, 16], DataType.DT_INT8)


def test_status_request_already_completed() -> None:
    """Never produced, by upstream either (spec §3.2): for comparison."""
    check_code("REQUEST_ALREADY_COMPLETED", STATUS_BASE + 4)


def test_status_engine_finalized() -> None:
    """Never produced: after finalize it is LLM_FAILED (spec api-cachemanager §1)."""
    check_code("ENGINE_FINALIZED", STATUS_BASE + 6)
    with v2() as dist:
        manager = dist.cache_manager
    refused(LLMStatusCode.LLM_FAILED, manager.register_cache, DESC, [4096])


def test_status_prefix_already_exist() -> None:
    """Not produced: a prefix key that is bound already is LLM_PARAM_INVALID in v2, LLM_FAILED in v1."""
    check_code("PREFIX_ALREADY_EXIST", STATUS_BASE + 15)
    key = CacheKey(1, 0, 0, 5)
    with v2(mem_pool_cfg=POOL) as dist:
        dist.cache_manager.allocate_cache(DESC, [key])
        refused(LLMStatusCode.LLM_PARAM_INVALID, dist.cache_manager.allocate_cache, DESC, [key])
    with v1() as dist:
        cache = dist.kv_cache_manager.allocate_cache(DESC, [key])
        refused(LLMStatusCode.LLM_FAILED, dist.kv_cache_manager.allocate_cache, DESC, [key])
        assert cache.cache_id == 1


@pytest.mark.mode("two-sided")
def test_status_prefix_not_exist(linked_pair: Pair) -> None:
    """Not produced: an unknown prefix is LLM_KV_CACHE_NOT_EXIST."""
    check_code("PREFIX_NOT_EXIST", STATUS_BASE + 16)
    linked_pair.b.cache("src", key=[CacheKey(2, 5)])
    linked_pair.a.cache("dst")
    unknown = CacheKey(2, INVALID_ID, 0, 5)
    refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, linked_pair.a.process.pull_cache, unknown, "dst")


def test_status_seq_lenoverlimit() -> None:
    """Not produced; the spelling is upstream's."""
    check_code("SEQ_LENOVERLIMIT", STATUS_BASE + 17)


def test_status_no_free_block() -> None:
    """Not produced."""
    check_code("NO_FREE_BLOCK", STATUS_BASE + 18)


def test_status_blocks_out_of_memory() -> None:
    """Not produced."""
    check_code("BLOCKS_OUT_OF_MEMORY", STATUS_BASE + 19)


def test_status_device_mem_error() -> None:
    """Ascend only, reserved (spec §3.2): for comparison."""
    check_code("DEVICE_MEM_ERROR", 507053)


def test_status_suspect_remote_error() -> None:
    """Ascend only (spec §3.2): for comparison."""
    check_code("SUSPECT_REMOTE_ERROR", 507057)


def test_status_unknown_error() -> None:
    """Never returned by an engine (spec §3.2): for comparison. The one negative code."""
    assert check_code("UNKNOWN_ERROR", -1) < 0
