"""A client that goes away frees both sides within a second, whatever it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import ray

from llm_datadist_ray import DisaggCluster
from llm_datadist_ray.actors import RequestCancelled, RequestStream
from llm_datadist_ray.actors.names import namespace_of
from tests.ray.helpers import is_at_rest, member, wait_until, worker


def drop(stream: RequestStream) -> None:
    """Nothing: the caller's reference is the last one, and it is gone when this returns."""


def test_cancel_ends_a_waiting_iteration(cluster: DisaggCluster, long_story: str) -> None:
    stream = cluster.stream(long_story, max_tokens=600)
    next(stream)
    canceller = threading.Thread(target=stream.cancel)
    canceller.start()
    with pytest.raises(RequestCancelled, match="was cancelled"):
        for _ in stream:
            pass
    canceller.join()
    assert stream.report is None
    wait_until(lambda: is_at_rest(cluster), 1.0)


def test_cancel_during_prefill_frees_both_sides(launch: Callable[..., DisaggCluster]) -> None:
    """One token per block: a prefill of this prompt takes seconds, its chunks milliseconds. The second request waits
    behind the first one."""
    size = {"num_blocks": 8000}
    cluster = launch("slow", model={"block_tokens": 1}, prompt=size, decoder=size)
    cluster.generate("link first", max_tokens=1)
    streams = [cluster.stream("x" * 3900, max_tokens=5) for _ in range(2)]
    iterations = [threading.Thread(target=_read_to_the_end, args=(stream,)) for stream in streams]
    for iteration in iterations:
        iteration.start()
    wait_until(lambda: worker(cluster, "prompt").blocks.working == 2 * 3900, 10.0)
    started_at = time.monotonic()
    for stream in streams:
        stream.cancel()
    for iteration in iterations:
        iteration.join(timeout=10)
    wait_until(lambda: is_at_rest(cluster), 1.0)
    assert time.monotonic() - started_at < 1.5
    assert [stream.report for stream in streams] == [None, None]


def _read_to_the_end(stream: RequestStream) -> None:
    with pytest.raises(RequestCancelled):
        list(stream)


@pytest.mark.parametrize("leave", [RequestStream.close, RequestStream.cancel, drop])
def test_leaving_mid_stream_frees_both_sides(
    cluster: DisaggCluster, long_story: str, leave: Callable[[RequestStream], None]
) -> None:
    streams = [cluster.stream(long_story, max_tokens=600)]
    for _ in range(3):
        next(streams[0])
    assert not is_at_rest(cluster), "the request must still run, or this test shows nothing"
    leave(streams.pop())
    wait_until(lambda: is_at_rest(cluster), 1.0)


def test_a_stream_that_is_never_read_holds_nothing(cluster: DisaggCluster) -> None:
    stream = cluster.stream("never read", max_tokens=5)
    assert is_at_rest(cluster)
    stream.close()
    assert is_at_rest(cluster)


def test_a_request_cancelled_before_it_starts_never_runs(cluster: DisaggCluster) -> None:
    stream = cluster.stream("cancelled early", max_tokens=5)
    stream.cancel()
    with pytest.raises(RequestCancelled):
        next(stream)
    assert is_at_rest(cluster)


def test_a_cancel_that_overtakes_its_call_wins(cluster: DisaggCluster) -> None:
    """Ray may run a cancel before the call that it was sent after."""
    decoder = ray.get_actor(member(cluster, "decoder").actor_name, namespace=namespace_of(cluster.config.name))
    ray.get(decoder.cancel.remote("overtaken"))
    with pytest.raises(ray.exceptions.RayTaskError, match="request overtaken was cancelled"):
        ray.get(decoder.reserve.remote("overtaken", 4, 4))
    assert is_at_rest(cluster)
