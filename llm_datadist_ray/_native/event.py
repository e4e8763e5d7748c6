"""What :meth:`NativeEngine.poll` returns."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from llm_datadist_ray._native.clock import seconds
from llm_datadist_ray._native.paths import Path
from llm_datadist_ray._native.status import NativeStatus, native_status_of

if TYPE_CHECKING:
    from llm_datadist_ray._native._ldr import CData


class EventKind(IntEnum):
    """``LDR_EVENT_x``: what ``id`` and ``user_tag`` of an event mean, and what its status says."""

    OP = 1
    """``id`` is the operation, ``user_tag`` as submitted; exactly one for each successful submit."""
    LINK_UP = 2
    """``id`` is the peer's cluster id, ``user_tag`` its incarnation."""
    LINK_DOWN = 3
    """As LINK_UP; OK means that the link was closed on purpose, else why it broke."""
    GRANT_ENDED = 4
    """At the source: ``id`` is the grant's sequence. OK means closed by its sink. Its blocks are free again."""


class Event(NamedTuple):
    kind: EventKind
    id: int
    user_tag: int
    status: int
    """A :class:`NativeStatus`; the text of a failed operation is :meth:`NativeEngine.op_error`."""
    num_bytes: int
    latency_s: float
    path: Path

    @property
    def is_ok(self) -> bool:
        return self.status == NativeStatus.OK


def event_from_c(event: CData) -> Event:
    return Event(
        EventKind(event.kind),
        event.id,
        event.user_tag,
        native_status_of(event.status),
        event.bytes,
        seconds(event.latency_ns),
        Path(event.path),
    )
