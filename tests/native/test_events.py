"""The one reader of an engine's event queue: who gets what, and what its end means for those who wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Empty, Queue
from typing import Any

import pytest

from llm_datadist_ray._native import Event, EventKind, NativeError, NativeStatus, Path
from llm_datadist_ray.events import EventDispatcher

WAIT_S = 10.0


class FakeEngine:
    """``queue`` holds what each poll gives; closing it, or an error in it, is what a poll raises."""

    cluster_id = 5

    def __init__(self) -> None:
        self.queue: Queue[list[Event] | NativeError] = Queue()

    def poll(self, max_events: int = 64, timeout_s: float | None = 0.0) -> list[Event]:
        try:
            answer = self.queue.get(timeout_s is None)
        except Empty:
            return []
        if isinstance(answer, NativeError):
            self.queue.put(answer)
            raise answer
        return answer

    def give(self, *events: Event) -> None:
        self.queue.put(list(events))

    def close(self) -> None:
        self.queue.put(NativeError("the engine is closed", NativeStatus.CLOSED))


class Seen:
    """A handler that keeps what it gets, calls ``then`` and can be waited for."""

    def __init__(self, then: Any = lambda: None) -> None:
        self.events: Queue[Event] = Queue()
        self._then = then

    def __call__(self, event: Event) -> None:
        self.events.put(event)
        self._then()

    def next(self) -> Event:
        return self.events.get(timeout=WAIT_S)


def link_up(cluster_id: int) -> Event:
    return Event(EventKind.LINK_UP, cluster_id, 0, NativeStatus.OK, 0, 0.0, Path.NONE)


def op(tag: int) -> Event:
    return Event(EventKind.OP, 77, tag, NativeStatus.OK, 96, 0.1, Path.SHM)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture
def events(engine: FakeEngine) -> Iterator[EventDispatcher]:
    events = EventDispatcher(engine)  # type: ignore[arg-type]
    yield events
    engine.close()
    events.join(WAIT_S)


def check_closed(events: EventDispatcher) -> None:
    for begin in (lambda: events.expect_op(Seen()), lambda: events.subscribe(EventKind.LINK_UP, Seen())):
        with pytest.raises(NativeError, match="of cluster 5 are no longer read") as caught:
            begin()
        assert caught.value.native_status == NativeStatus.CLOSED


def test_by_kind_and_in_order_until_the_end_of_the_subscription(engine: FakeEngine, events: EventDispatcher) -> None:
    first, second = Seen(), Seen()
    end = events.subscribe(EventKind.LINK_UP, first)
    events.subscribe(EventKind.LINK_UP, second)
    engine.give(op(99), link_up(2), link_up(3))
    assert [first.next().id, first.next().id, second.next().id, second.next().id] == [2, 3, 2, 3]
    end()
    engine.give(link_up(4))
    assert second.next().id == 4
    assert first.events.empty()


def test_a_completion_goes_to_who_expects_it_once(engine: FakeEngine, events: EventDispatcher) -> None:
    seen, forgotten = Seen(), Seen()
    tag, other = events.expect_op(seen), events.expect_op(forgotten)
    events.forget_op(other)
    engine.give(op(tag), op(tag), op(other))
    last = Seen()
    engine.give(op(events.expect_op(last)))
    last.next()
    assert seen.next() == op(tag)
    assert seen.events.empty()
    assert forgotten.events.empty()


def test_what_was_queued_before_the_first_subscriber_is_not_for_him(
    engine: FakeEngine, events: EventDispatcher
) -> None:
    engine.give(link_up(2))
    engine.give(link_up(3), op(1))
    seen = Seen()
    events.subscribe(EventKind.LINK_UP, seen)
    engine.give(link_up(4))
    assert seen.next().id == 4


def test_nor_for_who_expects_the_first_operation(engine: FakeEngine, events: EventDispatcher) -> None:
    engine.give(op(1))
    seen = Seen()
    tag = events.expect_op(seen)
    engine.give(op(tag)._replace(id=8))
    assert seen.next().id == 8


def test_the_end_of_the_engine_ends_those_in_flight(engine: FakeEngine, events: EventDispatcher) -> None:
    seen = [Seen(), Seen()]
    tags = [events.expect_op(one) for one in seen]
    engine.close()
    found = [one.next() for one in seen]
    assert [(event.kind, event.user_tag, event.status) for event in found] == [
        (EventKind.OP, tag, NativeStatus.CLOSED) for tag in tags
    ]
    events.join(WAIT_S)
    check_closed(events)


def test_a_closed_engine_has_no_first_subscriber(engine: FakeEngine, events: EventDispatcher) -> None:
    engine.close()
    for begin in (lambda: events.expect_op(Seen()), lambda: events.subscribe(EventKind.LINK_UP, Seen())):
        with pytest.raises(NativeError, match="closed"):
            begin()


@pytest.mark.logs("no more events of cluster 5: broken")
def test_an_engine_that_fails(engine: FakeEngine, events: EventDispatcher) -> None:
    seen = Seen()
    events.expect_op(seen)
    engine.queue.put(NativeError("broken", NativeStatus.SYSTEM))
    assert seen.next().status == NativeStatus.CLOSED


@pytest.mark.parametrize("error", [ValueError, SystemExit])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_handler_that_raises_leaves_nobody_waiting(
    engine: FakeEngine, events: EventDispatcher, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error

    seen = Seen()
    tag = events.expect_op(seen)
    events.subscribe(EventKind.LINK_UP, Seen(fail))
    engine.give(link_up(2), op(tag))
    assert seen.next().status == NativeStatus.CLOSED
    events.join(WAIT_S)
    check_closed(events)
    assert seen.events.empty()


def test_a_handler_may_wait_for_the_end_of_the_thread_it_is_in(engine: FakeEngine, events: EventDispatcher) -> None:
    joined = threading.Event()

    def close_all() -> None:
        engine.close()
        events.join(WAIT_S)
        joined.set()

    events.subscribe(EventKind.LINK_UP, Seen(close_all))
    engine.give(link_up(2))
    assert joined.wait(WAIT_S)
