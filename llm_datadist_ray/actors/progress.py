"""What a member says while it starts, for whoever waits for it."""

from __future__ import annotations

import threading


class ProgressLog:
    """Sentences in order. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sentences: list[str] = []
        self._is_closed = False

    def say(self, sentence: str) -> None:
        """A sentence equal to the last one is dropped."""
        with self._changed:
            if not self._sentences or self._sentences[-1] != sentence:
                self._sentences.append(sentence)
                self._changed.notify_all()

    def close(self) -> None:
        """Ends the waiting of all readers."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait(self, num_read: int) -> tuple[str, ...]:
        """The sentences behind the first ``num_read``; blocks until there is one. Empty: closed, nothing follows."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._sentences) > num_read)
            return tuple(self._sentences[num_read:])
