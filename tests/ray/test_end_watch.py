"""Who is told that a member has ended: both halves of the watch, without a Ray that runs."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from llm_datadist_ray.actors.end_watch import EndWatch, reason_of_end

DEADLINE_S = 10.0


def test_the_last_watcher_stays_and_the_others_are_told_of_no_end() -> None:
    watch = EndWatch()
    answers: SimpleQueue[bool] = SimpleQueue()
    watchers = [threading.Thread(target=lambda: answers.put(watch.wait()), daemon=True) for _ in range(3)]
    for watcher in watchers:
        watcher.start()
    assert [answers.get(timeout=DEADLINE_S) for _ in range(2)] == [False, False]
    assert answers.empty()
    watch.end()
    assert answers.get(timeout=DEADLINE_S)


def test_a_watch_that_begins_after_the_end_returns_at_once() -> None:
    watch = EndWatch()
    watch.end()
    assert watch.wait()


@pytest.mark.logs("no evidence of a death")
def test_only_a_death_or_a_stop_is_an_end() -> None:
    answers: list[bool | Exception] = [ActorUnavailableError("lost", None), ActorUnavailableError("lost", None), True]
    pauses: list[float] = []

    def ask() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert reason_of_end(ask, pauses.append) == "its actor was stopped"
    assert len(pauses) == 2
    answers.append(False)
    assert reason_of_end(ask, pauses.append) is None
    for error in (ActorDiedError(), ValueError("Failed to look up actor")):
        answers.append(error)
        assert (reason_of_end(ask, pauses.append) or "").startswith("its actor has died: ")
    assert len(pauses) == 2
