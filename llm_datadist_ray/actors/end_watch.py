"""How the end of a member becomes known to whoever watches it: the member's half and the watcher's half."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ray.exceptions import ActorDiedError, RayError

_RETRY_S = 0.5
_log = logging.getLogger("llm_datadist_ray.actors")


class EndWatch:
    """The member's half: one watcher at a time sleeps in here. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_watchers = 0
        self._has_ended = False

    def wait(self) -> bool:
        """Blocks. True: the member ends on purpose. False: a later watcher has taken this one's place."""
        with self._changed:
            self._num_watchers += 1
            number = self._num_watchers
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._has_ended or self._num_watchers > number)
            return self._has_ended

    def end(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


def reason_of_end(ask: Callable[[], bool], pause: Callable[[float], object]) -> str | None:
    """The watcher's half: blocks until the member has ended and says why; None when another watcher has taken over.

    ``ask`` returns what :meth:`EndWatch.wait` does, over Ray. Only Ray's word that the actor has died is a death: a
    call that could not be delivered is made again after ``pause``.
    """
    while True:
        try:
            return "its actor was stopped" if ask() else None
        except (ActorDiedError, ValueError) as error:  # ValueError: Ray knows no actor of that name any more
            return f"its actor has died: {error}"
        except RayError as error:
            _log.warning("a member could not be watched for the moment, no evidence of a death: %s", error)
            pause(_RETRY_S)
