"""Pulls and pushes that can be awaited, waited for and cancelled (design section 4)."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from llm_datadist_ray import CacheKeyByIdAndIndex
from llm_datadist_ray._native import NativeError, NativeStatus
from tests.conformance.pair import Pair
from tests.conformance.status import FAILED, KV_CACHE_NOT_EXIST, NOT_YET_LINK, PARAM_INVALID, TIMEOUT, raises

remote_access_only = pytest.mark.mode("remote-access")
ABSENT = 99


def test_pull_cache(linked_pair: Pair) -> None:
    src, dst = linked_pair.b.cache("src"), linked_pair.a.cache("dst")
    layers = {"src_layer_range": range(1), "dst_layer_range": range(1, 2)}
    linked_pair.a.process.start_task("pull_cache_async", src.key(3), "dst", 1, 50, **layers)
    linked_pair.a.process.wait_task()
    for tensor in range(2):
        dst.tensor(2 + tensor)[1, :50] = src.tensor(tensor)[3, :50]
    assert linked_pair.a.process.task_state() == (True, (100, 100))
    linked_pair.a.process.cancel_task()  # too late, and harmless
    linked_pair.a.process.wait_task(0)


def test_many_awaits_in_one_loop(linked_pair: Pair) -> None:
    """They queue up on the link as blocking calls would, and each is woken by its own completion."""
    src, dst = linked_pair.b.blocks("src", entries=64), linked_pair.a.blocks("dst", entries=64)
    key = linked_pair.b.blocks_key()
    calls: list[Any] = [("pull_blocks_async", (key, "dst", [63 - k], [k]), {}) for k in range(64)]
    calls.insert(20, ("pull_blocks_async", (linked_pair.b.blocks_key(ABSENT), "dst", [0], [0]), {}))
    outcomes = linked_pair.a.process.await_all(calls)
    failed = outcomes.pop(20)
    assert isinstance(failed, NativeError)
    assert failed.status_code == KV_CACHE_NOT_EXIST
    assert outcomes == [None] * 64
    for tensor in range(4):
        dst.tensor(tensor)[:] = src.tensor(tensor)[::-1]


def test_blocks_of_a_contiguous_source(linked_pair: Pair) -> None:
    src, dst = linked_pair.b.cache("src", entry_bytes=192), linked_pair.a.blocks("dst")
    assert linked_pair.a.process.await_all([("pull_blocks_async", (src.key(2), "dst", [], [4, 0]), {})]) == [None]
    for tensor in range(4):
        dst.tensor(tensor)[[4, 0]] = src.tensor(tensor)[2].reshape(2, 96)


@remote_access_only
def test_pushes(linked_pair: Pair) -> None:
    src, dst = linked_pair.a.cache("src"), linked_pair.b.cache("dst")
    paged_src, paged_dst = linked_pair.a.blocks("paged_src"), linked_pair.b.blocks("paged_dst")
    linked_pair.a.cache("one", tensors=1)
    outcomes = linked_pair.a.process.await_all(
        [
            ("push_cache_async", (dst.key(4), "src", 2), {}),
            ("push_blocks_async", (linked_pair.b.blocks_key(), "paged_src", [5, 0], [1, 3]), {}),
            ("push_cache_async", (dst.key(0), "one"), {}),
        ]
    )
    assert outcomes == [None] * 3
    for tensor in range(4):
        dst.tensor(tensor)[4] = src.tensor(tensor)[2]
        paged_dst.tensor(tensor)[[1, 3]] = paged_src.tensor(tensor)[[5, 0]]


def test_what_is_wrong_before_the_peer_is_asked_is_raised_at_once(pair: Pair) -> None:
    pair.a.cache("dst", tensors=3)
    key = CacheKeyByIdAndIndex(2, 1)
    with raises(NOT_YET_LINK):
        pair.a.process.start_task("pull_cache_async", key, "dst")
    with raises(PARAM_INVALID):
        pair.a.process.start_task("pull_cache_async", key, "dst", ABSENT)
    with raises(PARAM_INVALID, "does not divide"):
        pair.a.process.start_task("pull_cache_async", key, "dst", dst_layer_range=range(1))
    with pytest.raises(TypeError):
        pair.a.process.start_task("pull_cache_async", 7, "dst")


def test_what_the_peer_says_comes_out_of_the_task(linked_pair: Pair) -> None:
    """Each time it is asked for."""
    linked_pair.a.cache("dst")
    linked_pair.a.process.start_task("pull_cache_async", CacheKeyByIdAndIndex(2, ABSENT), "dst")
    for _ in range(2):
        with raises(KV_CACHE_NOT_EXIST, "99"):
            linked_pair.a.process.wait_task()
    assert linked_pair.a.process.task_state() == (True, (0, 0))


def test_the_transfers_own_time_limit(idle_pair: Pair) -> None:
    idle_pair.a.init(listen=False, sync_kv_timeout=200)
    idle_pair.b.init(listen=True)
    idle_pair.link()
    src = idle_pair.b.cache("src")
    idle_pair.a.cache("dst")
    idle_pair.b.process.signal(signal.SIGSTOP)
    try:
        idle_pair.a.process.start_task("pull_cache_async", src.key(), "dst")
        with raises(TIMEOUT, "cluster 2"):
            idle_pair.a.process.wait_task()
    finally:
        idle_pair.b.process.signal(signal.SIGCONT)


def test_waiting_less_than_it_takes_and_cancelling(linked_pair: Pair) -> None:
    """A wait that gives up changes nothing; a cancelled task fails, and later ones wait for nothing."""
    src = linked_pair.b.cache("src")
    linked_pair.a.cache("dst")
    linked_pair.b.process.signal(signal.SIGSTOP)
    try:
        linked_pair.a.process.start_task("pull_cache_async", src.key(), "dst")
        with pytest.raises(TimeoutError, match=r"cluster 2 still runs after 0.05 s"):
            linked_pair.a.process.wait_task(0.05)
        assert linked_pair.a.process.task_state() == (False, (0, 0))
        start = time.monotonic()
        linked_pair.a.process.cancel_task()
        with pytest.raises(NativeError) as caught:
            linked_pair.a.process.wait_task()
        assert time.monotonic() - start < 5
        assert (caught.value.native_status, caught.value.status_code) == (NativeStatus.CANCELLED, FAILED)
    finally:
        linked_pair.b.process.signal(signal.SIGCONT)


def test_finalize_ends_a_task(linked_pair: Pair) -> None:
    """The exactly-one completion of a submitted operation holds for the engine's end, too."""
    src = linked_pair.b.cache("src")
    linked_pair.a.cache("dst")
    linked_pair.b.process.signal(signal.SIGSTOP)
    try:
        linked_pair.a.process.start_task("pull_cache_async", src.key(), "dst")
        linked_pair.a.process.finalize()
        with raises(FAILED):
            linked_pair.a.process.wait_task()
    finally:
        linked_pair.b.process.signal(signal.SIGCONT)
