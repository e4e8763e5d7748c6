"""The requests that one side of a cluster knows, and how they are cancelled."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

from llm_datadist_ray.actors.attempt import request_id_of
from llm_datadist_ray.actors.errors import RequestCancelled, RequestFailed, RequestRejected

T = TypeVar("T")
_NUM_REMEMBERED = 4096


class RequestTable(Generic[T]):
    """Attempt id to whatever that side, ``side`` in texts, keeps for it. Any thread; nothing blocks.

    Ray may run a cancel before the call that it is meant to cancel, so a cancelled id is remembered (the last 4096)
    and refused afterwards.
    """

    def __init__(self, side: str) -> None:
        self._side = side
        self._lock = threading.Lock()
        self._waiting: dict[str, T] = {}
        self._running: dict[str, T] = {}
        self._cancelled: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        with self._lock:
            return len(self._waiting) + len(self._running)

    def add(self, attempt_id: str, entry: T) -> None:
        """RequestRejected for an id that is in use, RequestCancelled for one that was cancelled."""
        with self._lock:
            self._check(attempt_id)
            if attempt_id in self._waiting or attempt_id in self._running:
                raise RequestRejected(
                    f"request {request_id_of(attempt_id)}: this id is in use by another request at {self._side}: wait "
                    "for its end, or take another id"
                )
            self._waiting[attempt_id] = entry

    def begin(self, attempt_id: str) -> T:
        """From now on :meth:`cancel` only marks it: whoever began it ends it. RequestFailed for an unknown id."""
        with self._lock:
            self._check(attempt_id)
            if attempt_id not in self._waiting:
                raise RequestFailed(
                    f"request {request_id_of(attempt_id)}: {self._side} never admitted it, or has begun it already; "
                    "send it again from the start",
                    member=self._side,
                    step="begin",
                )
            entry = self._running[attempt_id] = self._waiting.pop(attempt_id)
            return entry

    def end(self, attempt_id: str) -> None:
        with self._lock:
            self._running.pop(attempt_id, None)

    def cancel(self, attempt_id: str) -> T | None:
        """Its entry when it has not begun, so that the caller frees it; None otherwise. Idempotent."""
        with self._lock:
            self._cancelled[attempt_id] = None
            if len(self._cancelled) > _NUM_REMEMBERED:
                self._cancelled.popitem(last=False)
            return self._waiting.pop(attempt_id, None)

    def check(self, attempt_id: str) -> None:
        """RequestCancelled when it was cancelled."""
        with self._lock:
            self._check(attempt_id)

    def _check(self, attempt_id: str) -> None:
        if attempt_id in self._cancelled:
            raise RequestCancelled(f"request {request_id_of(attempt_id)} was cancelled")
