"""The thread of a layer-wise transfer (spec api-cachemanager §8.2, api-types §10.5)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import pytest

from llm_datadist_ray import CacheTask, LayerSynchronizer, LLMException, LLMStatusCode
from llm_datadist_ray.cache.layerwise import LayerTarget, LayerwiseJob

SUCCESS = LLMStatusCode.LLM_SUCCESS
FAILED = LLMStatusCode.LLM_FAILED
PARAM_INVALID = LLMStatusCode.LLM_PARAM_INVALID
TIMEOUT = LLMStatusCode.LLM_TIMEOUT
LAYERS = 4


class Synchronizer(LayerSynchronizer):
    """Says yes, but at ``stop_at``, where it calls ``last_word``; ``events`` are its calls and, added by the test's
    targets, the layers sent."""

    def __init__(self, stop_at: int | None = None, last_word: Callable[[], bool] = lambda: False) -> None:
        self.events: list[tuple] = []
        self.thread: threading.Thread | None = None
        self._stop_at = stop_at
        self._last_word = last_word

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.thread = threading.current_thread()
        self.events.append(("sync", layer_index, timeout_in_millis))
        return self._last_word() if layer_index == self._stop_at else True


def target(
    synchronizer: Synchronizer,
    cluster_id: int,
    layers: range,
    fail_at: int | None = None,
    code: LLMStatusCode = TIMEOUT,
) -> LayerTarget:
    def send(layer: int, q: int) -> None:
        synchronizer.events.append((cluster_id, layer, q))
        if layer == fail_at:
            raise LLMException(f"cluster {cluster_id} is slow", status_code=TIMEOUT)

    return LayerTarget(cluster_id, layers, send)


def results(synchronizer: Synchronizer, targets: list[LayerTarget]) -> list[LLMStatusCode | None]:
    job = LayerwiseJob(synchronizer, targets, LAYERS, "job")
    job.start()
    assert job.wait(10_000)
    assert job.num_configs == len(targets)
    return job.results()


def boom() -> bool:
    raise ZeroDivisionError("the model broke")


def test_layers_in_order_and_each_asked_for_once() -> None:
    """8.2 steps 1 to 4: a layer that nobody wants is skipped, targets come in list order, q counts from the range."""
    sync = Synchronizer()
    targets = [target(sync, 7, range(2, 4)), target(sync, 8, range(2, 3)), target(sync, 9, range(1))]
    assert results(sync, targets) == [SUCCESS] * 3
    assert sync.events == [
        ("sync", 0, None),
        (9, 0, 0),
        ("sync", 2, None),
        (7, 2, 0),
        (8, 2, 0),
        ("sync", 3, None),
        (7, 3, 1),
    ]


def test_the_thread_is_new_named_and_keeps_the_process_alive() -> None:
    threads = []
    for _ in range(2):
        sync = Synchronizer()
        results(sync, [target(sync, 7, range(1))])
        assert sync.thread is not None
        threads.append(sync.thread)
    assert threads[0] is not threads[1]
    assert [(thread.name, thread.daemon) for thread in threads] == [("job", False)] * 2


@pytest.mark.parametrize("answer", [False, 0, None, ""])
def test_a_falsy_answer_stops_the_job(answer: object) -> None:
    """8.2 step 2: the layer's configs get PARAM_INVALID, a finished one keeps its result, a later one has none."""
    sync = Synchronizer(1, lambda: answer)  # type: ignore[arg-type, return-value]
    targets = [
        target(sync, 6, range(1)),
        target(sync, 7, range(4)),
        target(sync, 8, range(1, 2)),
        target(sync, 9, range(2, 4)),
    ]
    assert results(sync, targets) == [SUCCESS, PARAM_INVALID, PARAM_INVALID, None]
    assert [event for event in sync.events if event[0] == "sync"] == [("sync", 0, None), ("sync", 1, None)]


@pytest.mark.logs("cluster 8 is slow")
def test_a_failure_stops_the_job_also_for_others() -> None:
    """8.2 step 3: the failing config gets its code; those before it in that layer have theirs, the rest none."""
    sync = Synchronizer()
    targets = [
        target(sync, 6, range(2)),
        target(sync, 7, range(4)),
        target(sync, 8, range(4), fail_at=1),
        target(sync, 9, range(4)),
    ]
    assert results(sync, targets) == [SUCCESS, None, TIMEOUT, None]
    assert sync.events[-1] == (8, 1, 1)


@pytest.mark.logs("ended by an exception")
def test_the_end_of_the_thread_by_system_exit_is_one_too() -> None:
    def leave() -> bool:
        raise SystemExit(0)

    sync = Synchronizer(1, leave)
    assert results(sync, [target(sync, 7, range(2))]) == [FAILED]


@pytest.mark.logs("ended by an exception")
def test_an_exception_of_the_synchronizer_is_a_failure_of_the_unfinished() -> None:
    """8.2, the quirk's Do."""
    sync = Synchronizer(2, boom)
    targets = [target(sync, 7, range(2)), target(sync, 8, range(3)), target(sync, 9, range(3, 4))]
    assert results(sync, targets) == [SUCCESS, FAILED, FAILED]


@pytest.mark.logs("cluster 7 is slow")
def test_configs_of_one_cluster_share_the_last_status() -> None:
    """8.2, api-types §10.5: last write wins."""
    sync = Synchronizer()
    targets = [target(sync, 7, range(1)), target(sync, 7, range(2), fail_at=1)]
    assert results(sync, targets) == [TIMEOUT, TIMEOUT]
    sync = Synchronizer()
    assert results(sync, [target(sync, 7, range(1)), target(sync, 7, range(4))]) == [SUCCESS, SUCCESS]


@pytest.mark.parametrize("stop_at", [None, 1])
def test_targets_go_when_it_has_ended(stop_at: int | None) -> None:
    """Also while the task is held: what they send from can be large."""

    class Source:
        def send(self, layer: int, q: int) -> None:
            pass

    source = Source()
    job = LayerwiseJob(Synchronizer(stop_at), [LayerTarget(7, range(2), source.send)], LAYERS, "job")
    kept = weakref.ref(source)
    del source
    job.start()
    assert job.wait(10_000)
    assert kept() is None
    assert job.results() == [SUCCESS if stop_at is None else PARAM_INVALID]
    assert job.num_configs == 1


def test_no_configs_complete_at_once() -> None:
    """8.1, last line."""
    sync = Synchronizer()
    job = LayerwiseJob(sync, [], LAYERS, "job")
    job.start()
    task = CacheTask(job)
    assert task.synchronize(0) == SUCCESS
    assert task.get_results(0) == []
    assert sync.events == []


def test_time_outs_leave_the_job_running() -> None:
    gate = threading.Event()
    sync = Synchronizer(0, lambda: gate.wait(10))
    job = LayerwiseJob(sync, [target(sync, 7, range(1)), target(sync, 8, range(1))], LAYERS, "job")
    job.start()
    task = CacheTask(job)
    assert task.synchronize(1) == TIMEOUT
    assert task.get_results(0) == [TIMEOUT, TIMEOUT]
    gate.set()
    assert task.get_results() == [SUCCESS, SUCCESS]
    assert task.synchronize() == SUCCESS
