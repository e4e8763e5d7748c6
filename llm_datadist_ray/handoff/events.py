"""The one reader of a native engine's event queue."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from llm_datadist_ray._native import Event, EventKind, NativeEngine, NativeError, NativeStatus

EventHandler = Callable[[Event], None]

_log = logging.getLogger("llm_datadist_ray.handoff")


class EventThread:
    """Hands each event to the handler of its kind, in order; an event without a handler is dropped.

    The thread sleeps in the native queue and ends when the engine is closed. A handler must neither block nor raise:
    what it raises is a defect of this package, ends the thread and shows as the thread's traceback.
    """

    def __init__(self, engine: NativeEngine, handlers: Mapping[EventKind, EventHandler]) -> None:
        self._engine = engine
        self._handlers = dict(handlers)
        self._thread = threading.Thread(target=self._run, name=f"ldr-events-{engine.cluster_id}", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread; close the engine first."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            try:
                events = self._engine.poll(timeout_s=None)
            except NativeError as error:
                if error.native_status != NativeStatus.CLOSED:
                    _log.error("no more events of cluster %d: %s", self._engine.cluster_id, error)
                return
            for event in events:
                handler = self._handlers.get(event.kind)
                if handler is not None:
                    handler(event)
