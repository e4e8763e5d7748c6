"""One action for several things at once: order, failures, and what happens without threads."""

from __future__ import annotations

import threading

import pytest

from llm_datadist_ray.parallel import in_parallel


def test_in_order_and_all_at_once() -> None:
    together = threading.Barrier(16, timeout=30)

    def action(number: int) -> int:
        together.wait()
        return number * number

    assert in_parallel("squares", action, range(16)) == [number * number for number in range(16)]


def test_nothing() -> None:
    assert in_parallel("nothing", str, []) == []


def test_one_item_is_the_callers() -> None:
    assert in_parallel("one", lambda item: threading.current_thread(), [1]) == [threading.current_thread()]


def test_threads_have_the_name_and_end() -> None:
    before = set(threading.enumerate())
    together = threading.Barrier(3, timeout=30)

    def action(number: int) -> str:
        together.wait()
        return threading.current_thread().name

    names = in_parallel("three", action, range(3))
    assert sorted(names) == sorted([threading.current_thread().name, "three", "three"])
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("can_start", [True, False])
def test_the_first_failure_after_all_have_ended(can_start: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without threads, as while the interpreter exits, the caller does it all."""
    if not can_start:
        monkeypatch.setattr(threading.Thread, "start", _refuse)
    done = []

    def action(number: int) -> None:
        done.append(number)
        if number in (3, 5):
            raise ValueError(number)

    with pytest.raises(ValueError, match="3"):
        in_parallel("failing", action, range(40))
    assert sorted(done) == list(range(40))
    if not can_start:
        assert done == list(range(40))


def _refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_an_interrupt_of_the_caller_begins_nothing_new() -> None:
    interrupted = threading.Event()
    begun = []

    def action(number: int) -> None:
        begun.append(number)
        if threading.current_thread() is threading.main_thread():
            interrupted.set()
            raise KeyboardInterrupt
        assert interrupted.wait(30)

    with pytest.raises(KeyboardInterrupt):
        in_parallel("interrupted", action, range(1000))
    # The others may each have taken one more between the interrupt and its being seen, and not the rest.
    assert len(begun) < 1000
