"""One computation at a time, and waiters that can be called off."""

from __future__ import annotations

import threading

import pytest

from llm_datadist_ray.actors.compute_turn import ComputeTurn
from llm_datadist_ray.actors.errors import RequestCancelled

DEADLINE_S = 10.0


class Waiter(threading.Thread):
    """Takes the turn once; ``looked`` is set at each look at whether it was cancelled."""

    def __init__(self, turn: ComputeTurn) -> None:
        super().__init__(daemon=True)
        self.is_cancelled = False
        self.has_computed = False
        self.looked = threading.Event()
        self._turn = turn
        self.start()

    def check(self) -> None:
        self.looked.set()
        if self.is_cancelled:
            raise RequestCancelled("request r was cancelled")

    def run(self) -> None:
        try:
            with self._turn.take(self.check):
                self.has_computed = True
        except RequestCancelled:
            return


def test_a_cancelled_waiter_leaves_while_another_computes() -> None:
    turn = ComputeTurn()
    with turn.take(lambda: None):
        waiter = Waiter(turn)
        assert waiter.looked.wait(DEADLINE_S)
        waiter.is_cancelled = True
        turn.recheck()
        waiter.join(DEADLINE_S)
        assert not waiter.is_alive()
    assert not waiter.has_computed


def test_a_cancelled_waiter_does_not_swallow_the_turn_of_the_next() -> None:
    turn = ComputeTurn()
    with turn.take(lambda: None):
        first, second = Waiter(turn), Waiter(turn)
        assert first.looked.wait(DEADLINE_S)
        assert second.looked.wait(DEADLINE_S)
        first.is_cancelled = True
    for waiter in (first, second):
        waiter.join(DEADLINE_S)
        assert not waiter.is_alive()
    assert (first.has_computed, second.has_computed) == (False, True)


def test_a_cancelled_request_never_takes_a_free_turn() -> None:
    def check() -> None:
        raise RequestCancelled("request r was cancelled")

    turn = ComputeTurn()
    with pytest.raises(RequestCancelled), turn.take(check):
        pytest.fail("it must not compute")
    with turn.take(lambda: None):
        pass


def test_an_error_in_a_computation_frees_the_turn() -> None:
    turn = ComputeTurn()
    with pytest.raises(KeyError), turn.take(lambda: None):
        raise KeyError("x")
    with turn.take(lambda: None):
        pass
