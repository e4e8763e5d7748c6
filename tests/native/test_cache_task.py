"""Transfers in the background: awaited, waited for, watched, cancelled (design section 4)."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from llm_datadist_ray import LLMException, LLMStatusCode
from llm_datadist_ray._native import Event, EventKind, NativeError, NativeStatus, Path, Progress
from llm_datadist_ray.cache.task import TransferTask


class FakeEngine:
    def __init__(self) -> None:
        self.cancelled: list[int] = []
        self.answers: dict[str, Any] = {}

    def cancel(self, op_id: int) -> None:
        self._answer("cancel")
        self.cancelled.append(op_id)

    def progress(self, op_id: int) -> Progress:
        return self._answer("progress")

    def op_error(self, op_id: int) -> str:
        return self._answer("op_error")

    def _answer(self, method: str) -> Any:
        answer = self.answers.get(method)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def task_of(engine: FakeEngine, flaw: str | None = None) -> TransferTask:
    task = TransferTask(engine, 7, flaw)  # type: ignore[arg-type]
    task.op_id = 5
    return task


def event(status: int = NativeStatus.OK, num_bytes: int = 96) -> Event:
    return Event(EventKind.OP, 5, 1, status, num_bytes, 0.1, Path.SHM)


def over() -> NativeError:
    return NativeError("no such operation", NativeStatus.NOT_FOUND)


def test_success(engine: FakeEngine) -> None:
    task = task_of(engine)
    assert not task.done()
    with pytest.raises(TimeoutError, match="transfer 5 with cluster 7 still runs after 0 s"):
        task.wait(0)
    task.complete(event())
    assert task.done()
    task.wait()
    task.wait(0)
    assert task.progress() == (96, 96)


def test_failure_is_the_error_of_the_blocking_call_each_time_a_new_one(engine: FakeEngine) -> None:
    engine.answers["op_error"] = "cluster 7: no cache 3"
    task = task_of(engine)
    task.complete(event(NativeStatus.NO_CACHE, 0))
    errors = []
    for _ in range(2):
        with pytest.raises(NativeError, match="cluster 7: no cache 3") as caught:
            task.wait(0)
        errors.append(caught.value)
        assert caught.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert errors[0] is not errors[1]


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (NativeStatus.INVALID, LLMStatusCode.LLM_PARAM_INVALID, "native words; also: 3 tensors do not divide"),
        (NativeStatus.NO_CACHE, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "native words"),
    ],
)
def test_a_known_flaw_is_added_to_what_the_core_calls_invalid(
    engine: FakeEngine, status: int, code: LLMStatusCode, text: str
) -> None:
    engine.answers["op_error"] = "native words"
    task = task_of(engine, "3 tensors do not divide")
    task.complete(event(status))
    with pytest.raises(LLMException) as caught:
        task.wait(0)
    assert (caught.value.args, caught.value.status_code) == ((text,), code)


@pytest.mark.parametrize(("status", "name"), [(NativeStatus.CLOSED, "CLOSED"), (-1000, "-1000")])
def test_a_text_that_is_gone(engine: FakeEngine, status: int, name: str) -> None:
    engine.answers["op_error"] = over()
    task = task_of(engine)
    task.complete(event(status))
    with pytest.raises(NativeError, match=f"transfer 5 with cluster 7 failed: {name}") as caught:
        task.wait(0)
    assert caught.value.status_code == LLMStatusCode.LLM_FAILED


def test_cancel_is_a_request_and_harmless_when_it_is_late(engine: FakeEngine) -> None:
    task = task_of(engine)
    task.cancel()
    assert engine.cancelled == [5]
    assert not task.done()
    engine.answers["cancel"] = over()
    task.cancel()
    engine.answers["cancel"] = NativeError("forked", NativeStatus.FORKED)
    with pytest.raises(NativeError, match="forked"):
        task.cancel()


def test_progress(engine: FakeEngine) -> None:
    task = task_of(engine)
    engine.answers["progress"] = Progress(10, 100)
    assert task.progress() == (10, 100)
    engine.answers["progress"] = over()  # over, and its event on the way
    assert task.progress() == (10, 100)
    engine.answers["progress"] = NativeError("forked", NativeStatus.FORKED)
    with pytest.raises(NativeError, match="forked"):
        task.progress()
    engine.answers["op_error"] = "x"
    task.complete(event(NativeStatus.CANCELLED, 40))
    assert task.progress() == (40, 100)


def test_nothing_to_do_is_done(engine: FakeEngine) -> None:
    task = TransferTask.nothing_to_do(engine, 7)  # type: ignore[arg-type]
    task.wait(0)
    asyncio.run(asyncio.wait_for(_await(task), 5))


async def _await(task: TransferTask) -> None:
    await task


def test_await_wakes_the_loop_from_the_dispatchers_thread(engine: FakeEngine) -> None:
    engine.answers["op_error"] = "cluster 7 is slow"
    good, bad = task_of(engine), task_of(engine)

    async def main() -> list[Any]:
        waiting = [asyncio.ensure_future(_await(task)) for task in (good, good, bad)]
        await asyncio.sleep(0)  # all three are at their await now
        for task, done in ((good, event()), (bad, event(NativeStatus.TIMEOUT))):
            thread = threading.Thread(target=task.complete, args=(done,))
            thread.start()
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)

    first, second, third = asyncio.run(main())
    assert first is None
    assert second is None
    assert isinstance(third, NativeError)
    assert third.status_code == LLMStatusCode.LLM_TIMEOUT


def test_giving_up_an_await_leaves_the_transfer_running(engine: FakeEngine) -> None:
    task = task_of(engine)

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_await(task), 0.01)

    asyncio.run(main())
    assert engine.cancelled == []
    assert not task.done()
    task.complete(event())  # that loop is closed: nothing happens, and nothing is raised
    task.wait(0)


def test_waiting_in_several_threads_and_loops(engine: FakeEngine) -> None:
    task = task_of(engine)
    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(task.wait, 10) for _ in range(2)]
        waits += [pool.submit(asyncio.run, _await(task)) for _ in range(2)]
        task.complete(event())
        assert [wait.result(10) for wait in waits] == [None] * 4
