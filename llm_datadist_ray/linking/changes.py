"""What an application is told of links that come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llm_datadist_ray._native import Event, EventKind, NativeStatus
from llm_datadist_ray.events import EventDispatcher
from llm_datadist_ray.log import log


@dataclass(frozen=True, slots=True)
class LinkChange:
    """A link has come up, or is no longer usable. Ours: upstream tells nobody."""

    cluster_id: int
    incarnation: int
    """Of the peer's engine: another one each time that engine starts."""
    is_up: bool
    reason: str
    """Why it is down, in words: ``"unlinked"`` when one of the ends wanted it, else what broke it. Empty when up."""


LinkChangeCallback = Callable[[LinkChange], None]


def watch_links(events: EventDispatcher, callback: LinkChangeCallback) -> Callable[[], None]:
    """Calls back for every change from now on, in the dispatcher's thread, until the returned function is called."""

    def handle(event: Event) -> None:
        change = _change_of(event)
        try:
            callback(change)
        # The application's own failure, SystemExit too: its traceback is logged, and other callbacks still get theirs.
        except BaseException:
            log.exception("callback %r failed for %s", callback, change)

    ends = [events.subscribe(kind, handle) for kind in (EventKind.LINK_UP, EventKind.LINK_DOWN)]

    def end() -> None:
        for unsubscribe in ends:
            unsubscribe()

    return end


def _change_of(event: Event) -> LinkChange:
    is_up = event.kind == EventKind.LINK_UP
    return LinkChange(event.id, event.user_tag, is_up, "" if is_up else _reason(event.status))


def _reason(status: int) -> str:
    if status == NativeStatus.OK:
        return "unlinked"
    try:
        return NativeStatus(status).name.lower().replace("_", " ")
    except ValueError:
        return f"native status {status}"
