"""The requests that one side of a cluster knows, and how they are cancelled."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

from llm_datadist_ray.actors.errors import RequestCancelled, RequestFailed, RequestRejected

T = TypeVar("T")
_NUM_REMEMBERED = 4096


class RequestTable(Generic[T]):
    """Request id to whatever that side keeps for it. Any thread; nothing blocks.

    Ray may run a cancel before the call that it is meant to cancel, so a cancelled id is remembered (the last 4096)
    and refused afterwards.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, T] = {}
        self._running: dict[str, T] = {}
        self._cancelled: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        with self._lock:
            return len(self._waiting) + len(self._running)

    def add(self, request_id: str, entry: T) -> None:
        """RequestRejected for an id that is in use, RequestCancelled for one that was cancelled."""
        with self._lock:
            self._check(request_id)
            if request_id in self._waiting or request_id in self._running:
                raise RequestRejected(f"request {request_id}: this id is in use by another request")
            self._waiting[request_id] = entry

    def begin(self, request_id: str) -> T:
        """From now on :meth:`cancel` only marks it: whoever began it ends it. RequestFailed for an unknown id."""
        with self._lock:
            self._check(request_id)
            if request_id not in self._waiting:
                raise RequestFailed(f"request {request_id}: it was never admitted here, or has begun already")
            entry = self._running[request_id] = self._waiting.pop(request_id)
            return entry

    def end(self, request_id: str) -> None:
        with self._lock:
            self._running.pop(request_id, None)

    def cancel(self, request_id: str) -> T | None:
        """Its entry when it has not begun, so that the caller frees it; None otherwise. Idempotent."""
        with self._lock:
            self._cancelled[request_id] = None
            if len(self._cancelled) > _NUM_REMEMBERED:
                self._cancelled.popitem(last=False)
            return self._waiting.pop(request_id, None)

    def check(self, request_id: str) -> None:
        """RequestCancelled when it was cancelled."""
        with self._lock:
            self._check(request_id)

    def _check(self, request_id: str) -> None:
        if request_id in self._cancelled:
            raise RequestCancelled(f"request {request_id} was cancelled")
