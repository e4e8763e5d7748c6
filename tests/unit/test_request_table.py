"""Requests of one side: every order of begin and cancel, and what a member says while it starts."""

from __future__ import annotations

import threading

import pytest

from llm_datadist_ray.actors.attempt import new_attempt
from llm_datadist_ray.actors.errors import RequestCancelled, RequestFailed, RequestRejected
from llm_datadist_ray.actors.progress import ProgressLog
from llm_datadist_ray.actors.request_table import RequestTable


def test_cancel_before_begin_hands_the_entry_back_once() -> None:
    table: RequestTable[str] = RequestTable("prompt 1")
    table.add("r", "entry")
    assert table.cancel("r") == "entry"
    assert table.cancel("r") is None
    with pytest.raises(RequestCancelled, match="request r was cancelled"):
        table.begin("r")
    assert len(table) == 0


def test_cancel_after_begin_leaves_the_entry_to_who_began() -> None:
    table: RequestTable[str] = RequestTable("prompt 1")
    table.add("r", "entry")
    assert table.begin("r") == "entry"
    table.check("r")
    assert table.cancel("r") is None
    with pytest.raises(RequestCancelled):
        table.check("r")
    assert len(table) == 1
    table.end("r")
    assert len(table) == 0


def test_cancel_that_comes_first_wins() -> None:
    table: RequestTable[str] = RequestTable("prompt 1")
    assert table.cancel("r") is None
    with pytest.raises(RequestCancelled):
        table.add("r", "entry")


def test_an_id_is_used_once_at_a_time() -> None:
    table: RequestTable[str] = RequestTable("prompt 1")
    with pytest.raises(RequestFailed, match=r"request r: prompt 1 never admitted it, .* send it again"):
        table.begin("r")
    table.add("r", "entry")
    with pytest.raises(RequestRejected, match="in use by another request"):
        table.add("r", "while it waits")
    table.begin("r")
    with pytest.raises(RequestRejected, match="in use by another request"):
        table.add("r", "while it runs")
    with pytest.raises(RequestFailed, match="has begun it already"):
        table.begin("r")
    table.end("r")
    table.add("r", "entry")


def test_two_attempts_of_one_request_are_told_apart_and_texts_name_the_request() -> None:
    table: RequestTable[str] = RequestTable("prompt 1")
    first, second = new_attempt("r"), new_attempt("r")
    table.add(first, "first")
    table.cancel(first)
    table.add(second, "second")
    assert table.begin(second) == "second"
    with pytest.raises(RequestCancelled, match=r"^request r was cancelled$"):
        table.check(first)


def test_the_memory_of_cancelled_ids_is_bounded() -> None:
    table: RequestTable[str] = RequestTable("prompt 1")
    for number in range(5000):
        table.cancel(f"r{number}")
    table.add("r0", "long forgotten")
    with pytest.raises(RequestCancelled):
        table.add("r4999", "remembered")


def test_progress_wakes_its_readers_and_ends() -> None:
    log = ProgressLog()
    heard: list[str] = []

    def read() -> None:
        while sentences := log.wait(len(heard)):
            heard.extend(sentences)

    reader = threading.Thread(target=read)
    reader.start()
    for sentence in ("loading", "loading", "ready"):
        log.say(sentence)
    log.close()
    reader.join(timeout=5)
    assert not reader.is_alive()
    assert heard == ["loading", "ready"]
