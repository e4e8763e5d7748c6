"""Whose turn it is to compute: an engine is used by one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ComputeTurn:
    """A lock whose waiters can be called off. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_taken = False

    @contextmanager
    def take(self, check: Callable[[], None]) -> Iterator[None]:
        """Waits for the turn and holds it for the block. What ``check`` raises ends the wait: it is asked first, after
        every :meth:`recheck`, and last before the turn is taken."""
        with self._changed:
            try:
                check()
                while self._is_taken:
                    self._changed.wait()
                    check()
            except BaseException:
                self._changed.notify()  # the wake-up may have been meant for the next one
                raise
            self._is_taken = True
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify()

    def recheck(self) -> None:
        """Somebody's ``check`` may raise from now on."""
        with self._changed:
            self._changed.notify_all()
