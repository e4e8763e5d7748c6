"""Closing an engine beside threads that use it: calls that come too late are answered."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from llm_datadist_ray._native import NativeEngine, NativeError, NativeStatus

NUM_THREADS = 8
NUM_ROUNDS = 8


def calls_until_closed(engine: NativeEngine) -> int:
    num_calls = 0
    while True:
        try:
            engine.links()
            engine.poll()
        except NativeError as error:
            assert error.native_status == NativeStatus.CLOSED
            return num_calls
        num_calls += 1


def test_close_beside_threads_that_keep_calling() -> None:
    num_calls = []
    with ThreadPoolExecutor(NUM_THREADS + 2) as pool:
        for _ in range(NUM_ROUNDS):
            engine = NativeEngine(cluster_id=1, remote_access=True)
            callers = [pool.submit(calls_until_closed, engine) for _ in range(NUM_THREADS)]
            for closer in [pool.submit(engine.close) for _ in range(2)]:
                closer.result(10)
            num_calls += [caller.result(10) for caller in callers]
    assert max(num_calls) > 0


def test_a_call_after_the_end_is_answered_by_the_native_core() -> None:
    """Also when Python looked too early: the handle outlives its engine."""
    engine = NativeEngine(cluster_id=1, remote_access=True)
    handle = engine._handle
    assert handle is not None
    engine.close()
    handle._is_closing = False
    with pytest.raises(NativeError, match="being destroyed") as caught:
        engine.links()
    handle._is_closing = True
    assert caught.value.native_status == NativeStatus.CLOSED
