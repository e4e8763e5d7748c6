"""One action for several things at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_MAX_THREADS = 16


def in_parallel(name: str, action: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The result for each item, in order; up to 16 at once, the others queue. Returns when all have ended, and raises
    the first item's failure that there is.

    The caller's thread is one of the 16, so that a single item needs no other. Where no thread can be started, as while
    the interpreter exits, the caller does all of the work. ``name`` is that of the threads.
    """
    waiting = deque(enumerate(items))
    results: dict[int, R] = {}
    errors: dict[int, Exception] = {}

    def work() -> None:
        while True:
            try:
                index, item = waiting.popleft()
            except IndexError:
                return
            try:
                results[index] = action(item)
            except Exception as error:  # raised below, to the caller
                errors[index] = error

    threads: list[threading.Thread] = []
    try:
        for _ in range(min(len(items), _MAX_THREADS) - 1):
            thread = threading.Thread(target=work, name=name)
            try:
                thread.start()
            except RuntimeError:
                break
            threads.append(thread)
        work()
    except BaseException:  # an interrupt: nothing new is begun
        waiting.clear()
        raise
    finally:
        for thread in threads:
            thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(items))]
