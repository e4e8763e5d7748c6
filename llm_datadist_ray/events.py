"""The one reader of a native engine's event queue."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from itertools import count

from llm_datadist_ray._native import Event, EventKind, NativeEngine, NativeError, NativeStatus, Path

EventHandler = Callable[[Event], None]

_log = logging.getLogger("llm_datadist_ray.events")


class EventDispatcher:
    """Hands each event to the handlers of its kind, in order; an event that nobody waits for is dropped.

    Its thread starts with the first subscriber, sleeps in the native queue and ends when the engine is closed; from
    then on subscribing is NativeError CLOSED. Any thread may subscribe. A handler runs in the dispatcher's thread and
    must neither block nor raise: what it raises is a defect of this package, ends the thread, and with it the waiting
    of all others, and shows as the thread's traceback.
    """

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._has_ended = False
        # Replaced as a whole, never changed, so that the thread needs no lock to walk one.
        self._handlers: Mapping[EventKind, tuple[EventHandler, ...]] = {}
        self._ops: dict[int, EventHandler] = {}
        self._tags = count(1)

    def subscribe(self, kind: EventKind, handler: EventHandler) -> Callable[[], None]:
        """Calls ``handler`` with every event of that kind that is handed out from now on, until the returned function
        is called. What was queued before the first subscriber came is handed out to nobody. NativeError CLOSED."""

        def unsubscribe() -> None:
            with self._lock:
                left = tuple(other for other in self._handlers.get(kind, ()) if other is not handler)
                self._handlers = {**self._handlers, kind: left}

        with self._lock:
            self._start()
            self._handlers = {**self._handlers, kind: (*self._handlers.get(kind, ()), handler)}
        return unsubscribe

    def expect_op(self, handler: EventHandler) -> int:
        """The ``user_tag`` to submit an operation with: its completion goes to ``handler``, once.

        NativeError CLOSED."""
        with self._lock:
            self._start()
            tag = next(self._tags)
            self._ops[tag] = handler
        return tag

    def forget_op(self, tag: int) -> None:
        """The operation was not submitted after all."""
        with self._lock:
            self._ops.pop(tag, None)

    def join(self, timeout_s: float) -> None:
        """Waits for the thread; close the engine first. In a handler it returns at once."""
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(timeout_s)

    def _start(self) -> None:
        if self._has_ended:
            raise NativeError(
                f"the events of cluster {self._engine.cluster_id} are no longer read: the engine is closed, or one of "
                "their handlers has failed",
                NativeStatus.CLOSED,
            )
        if self._thread is None:
            while self._engine.poll():
                pass
            name = f"ldr-events-{self._engine.cluster_id}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            while (events := self._next_events()) is not None:
                for event in events:
                    self._hand_out(event)
        finally:
            self._end_ops()

    def _next_events(self) -> list[Event] | None:
        """Waits for them. None when there are no more."""
        try:
            return self._engine.poll(timeout_s=None)
        except NativeError as error:
            if error.native_status != NativeStatus.CLOSED:
                _log.error("no more events of cluster %d: %s", self._engine.cluster_id, error)
            return None

    def _end_ops(self) -> None:
        """Nobody will tell what becomes of those still in flight: to who waits for them they have failed."""
        with self._lock:
            self._has_ended = True
            left, self._ops = self._ops, {}
        for tag, handler in left.items():
            handler(Event(EventKind.OP, 0, tag, NativeStatus.CLOSED, 0, 0.0, Path.NONE))

    def _hand_out(self, event: Event) -> None:
        if event.kind == EventKind.OP:
            with self._lock:
                handler = self._ops.pop(event.user_tag, None)
            if handler is not None:
                handler(event)
        for subscriber in self._handlers.get(event.kind, ()):
            subscriber(event)
