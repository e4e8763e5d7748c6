"""The sink of handoffs: fetches the granted blocks of one request, once."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from llm_datadist_ray._native import (
    CloseOutcome,
    Direction,
    GrantId,
    Move,
    NativeEngine,
    NativeError,
    RemoteBy,
    Transfer,
    TransferResult,
)
from llm_datadist_ray.handoff.handoff import Handoff

_T = TypeVar("_T")
_log = logging.getLogger("llm_datadist_ray.handoff")


class FetchFailed(RuntimeError):
    """A handoff could not be fetched; nothing of it may be decoded. ``step`` is open, transfer or close."""

    def __init__(self, message: str, *, step: str = "", elapsed_s: float = 0.0, native_status: int = 0) -> None:
        super().__init__(message)
        self.step = step
        self.elapsed_s = elapsed_s
        self.native_status = native_status


@dataclass(frozen=True, slots=True)
class Fetched:
    """``path`` is the native result's own word for what carried the bytes."""

    num_bytes: int
    path: str
    open_s: float
    transfer_s: float
    close_s: float


class GrantSink:
    """Fetches into one registered blocks cache. Any thread; each fetch blocks its caller."""

    def __init__(self, engine: NativeEngine, *, cache_id: int) -> None:
        self._engine = engine
        self._cache_id = cache_id

    def fetch(
        self, handoff: Handoff, dst_blocks: Sequence[int], *, timeout_s: float, source: str | None = None
    ) -> Fetched:
        """Opens the grant, pulls its blocks in order into ``dst_blocks`` and closes it, three native calls in all.

        Each step is bounded by ``timeout_s``. Returns only when the source has answered CLOSED; whatever fails before
        that raises :class:`FetchFailed`, and the source is told (CANCELLED) if it can be reached. ``source`` is what
        texts call it.
        """
        source = source or f"prompt {handoff.source_cluster_id} at {handoff.source_address}"
        fetch = _Fetch(self._engine, handoff, timeout_s, source)
        num_blocks = fetch.step("open", fetch.open)
        if num_blocks != len(dst_blocks):
            fetch.close_cancelled()
            raise fetch.failed("open", f"it holds {num_blocks} blocks, {len(dst_blocks)} are ready here", 0)
        opened_at = time.monotonic()
        result = fetch.step("transfer", lambda: fetch.transfer(self._cache_id, dst_blocks))
        moved_at = time.monotonic()
        fetch.step("close", lambda: fetch.close(CloseOutcome.OK))
        return Fetched(
            num_bytes=result.num_bytes,
            path=str(result.path),
            open_s=opened_at - fetch.started_at,
            transfer_s=moved_at - opened_at,
            close_s=time.monotonic() - moved_at,
        )


class _Fetch:
    """One fetch: the open id, and what it takes to name a failure."""

    def __init__(self, engine: NativeEngine, handoff: Handoff, timeout_s: float, source: str) -> None:
        self._engine = engine
        self._handoff = handoff
        self._source = source
        self._timeout_s = timeout_s
        self._open_id = secrets.randbits(64) or 1
        self.started_at = time.monotonic()

    def step(self, name: str, action: Callable[[], _T]) -> _T:
        try:
            return action()
        except NativeError as error:
            self.close_cancelled()
            raise self.failed(name, str(error), error.native_status) from error

    def open(self) -> int:
        handoff = self._handoff
        return self._engine.grant_open(
            cluster_id=handoff.source_cluster_id,
            grant=GrantId(handoff.source_incarnation, handoff.grant_sequence, handoff.grant_nonce),
            generation=handoff.generation,
            num_tokens=handoff.num_tokens,
            layout_digest=handoff.layout_digest,
            open_id=self._open_id,
            timeout_s=self._timeout_s,
        )

    def transfer(self, cache_id: int, dst_blocks: Sequence[int]) -> TransferResult:
        return self._engine.transfer(
            Transfer(
                Direction.PULL,
                self._handoff.source_cluster_id,
                cache_id,
                Move.BLOCKS,
                RemoteBy.OPEN_GRANT,
                remote_key_id=self._open_id,
                dst_blocks=dst_blocks,
                timeout_s=self._timeout_s,
            )
        )

    def close(self, outcome: CloseOutcome) -> None:
        self._engine.grant_close(self._open_id, outcome, timeout_s=self._timeout_s)

    def close_cancelled(self) -> None:
        """After a failure. The source may be gone or may never have heard of the open: then it needs no telling."""
        try:
            self.close(CloseOutcome.CANCELLED)
        except NativeError as error:
            _log.info("request %s: the source was not told to cancel: %s", self._handoff.request_id, error)

    def failed(self, step: str, reason: str, native_status: int) -> FetchFailed:
        elapsed_s = time.monotonic() - self.started_at
        return FetchFailed(
            f"request {self._handoff.request_id}: handoff from {self._source} failed in step {step} after "
            f"{elapsed_s * 1000:.0f} ms: {reason}",
            step=step,
            elapsed_s=elapsed_s,
            native_status=native_status,
        )
