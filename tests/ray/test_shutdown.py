"""After a shutdown: every request has ended with a sentence, nothing is left in Ray, and nobody starts a new one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import ray

from llm_datadist_ray import DisaggCluster
from llm_datadist_ray.actors import RequestError, RequestFailed
from llm_datadist_ray.actors.names import COORDINATOR_NAME, namespace_of
from llm_datadist_ray.actors.state_store import StateStore


def test_a_cluster_that_was_shut_down_says_so(launch: Callable[..., DisaggCluster], long_story: str) -> None:
    cluster = launch("gone")
    store = StateStore(namespace_of("gone"))
    assert store.load() is not None, "or its absence later shows nothing"
    early, half_read, waiting = (cluster.stream(long_story, max_tokens=600) for _ in range(3))
    next(half_read)
    errors: list[RequestError] = []
    first_token = threading.Event()

    def read() -> None:
        try:
            for _ in waiting:
                first_token.set()
        except RequestError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert first_token.wait(10)
    started_at = time.monotonic()
    cluster.shutdown()
    reader.join(timeout=10)
    assert time.monotonic() - started_at < 10
    cluster.shutdown()
    half_read.cancel()
    for ask in (
        lambda: cluster.generate("hello"),
        cluster.status,
        lambda: next(early),
        lambda: next(half_read),
    ):
        with pytest.raises(RequestFailed, match=r"cluster gone .*is shut down: launch it again"):
            ask()
    assert [type(error) for error in errors] == [RequestFailed]
    assert "cluster gone is shut down" in str(errors[0])
    with pytest.raises(ValueError, match="Failed to look up actor"):
        ray.get_actor(COORDINATOR_NAME, namespace=namespace_of("gone"))
    assert store.load() is None
