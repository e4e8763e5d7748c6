"""A transfer in the background that can be awaited, waited for, watched and cancelled (design section 4)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from llm_datadist_ray._native import Event, NativeEngine, NativeError, NativeStatus, Progress
from llm_datadist_ray.cache.selection import explained

if TYPE_CHECKING:
    import asyncio


class TransferTask:
    """Returned by the ``*_async`` methods of :class:`CacheManager`, which make it.

    Every method may be called from any thread, repeatedly. ``await task`` works in any event loop, also in several;
    giving up an ``await`` or a :meth:`wait` leaves the transfer running, which only :meth:`cancel` ends. Until the task
    is done the transfer may write its destination. Failures are those of the blocking method, see
    :class:`CacheManager`; each who waits gets an exception of his own.
    """

    def __init__(self, engine: NativeEngine, cluster_id: int, flaw: str | None) -> None:
        self.op_id = 0  # the manager's to set
        self._engine = engine
        self._cluster_id = cluster_id
        self._flaw = flaw
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._waiters: list[Callable[[], None]] = []
        self._failure: tuple[str, int] | None = None
        self._progress = Progress(0, 0)

    @classmethod
    def nothing_to_do(cls, engine: NativeEngine, cluster_id: int) -> TransferTask:
        """Done, successfully."""
        task = cls(engine, cluster_id, None)
        task._ended.set()
        return task

    def done(self) -> bool:
        """It has ended, whichever way."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until it has succeeded. LLMException when it failed; TimeoutError when it still runs after
        ``timeout_s``, which changes nothing (None: no limit but the transfer's own)."""
        if not self._ended.wait(timeout_s):
            raise TimeoutError(
                f"transfer {self.op_id} with cluster {self._cluster_id} still runs after {timeout_s} s: wait again, or "
                "cancel it"
            )
        self._raise_if_failed()

    def __await__(self) -> Generator[Any, None, None]:
        """As :meth:`wait` without a limit."""
        if not self.done():
            import asyncio

            loop = asyncio.get_running_loop()
            woken: asyncio.Future[None] = loop.create_future()
            self._call_when_ended(lambda: _wake(loop, woken))
            yield from woken
        self._raise_if_failed()

    def cancel(self) -> None:
        """A request, which is too late when the last byte has moved. The destination may be partly written when the
        task is done, which may be a moment later; it then fails with LLM_FAILED."""
        try:
            self._engine.cancel(self.op_id)
        except NativeError as error:
            if error.native_status not in (NativeStatus.NOT_FOUND, NativeStatus.CLOSED):
                raise

    def progress(self) -> Progress:
        """Bytes that have moved and all there are, 0 until the plan is made. Of a failed one: how far it came."""
        if not self.done():
            try:
                seen = self._engine.progress(self.op_id)
            except NativeError as error:
                if error.native_status not in (NativeStatus.NOT_FOUND, NativeStatus.CLOSED):
                    raise
            else:
                with self._lock:
                    if not self.done():
                        self._progress = seen
        return self._progress

    def complete(self, event: Event) -> None:
        """For the event dispatcher, in its thread: the one completion of the operation."""
        failure = None if event.is_ok else (self._text_of(event), event.status)
        with self._lock:
            self._failure = failure
            done, total = event.num_bytes, self._progress.bytes_total
            self._progress = Progress(done, done if event.is_ok else max(done, total))
            self._ended.set()
            waiters, self._waiters = self._waiters, []
        for wake in waiters:
            wake()

    def _text_of(self, event: Event) -> str:
        try:
            return self._engine.op_error(event.id)
        except NativeError:  # too many failures since, or the engine is closed: the status is what there is
            op_id = event.id or self.op_id  # the end of the engine is told to all of them alike
            return f"transfer {op_id} with cluster {self._cluster_id} failed: {_name(event.status)}"

    def _call_when_ended(self, wake: Callable[[], None]) -> None:
        with self._lock:
            if not self.done():
                self._waiters.append(wake)
                return
        wake()

    def _raise_if_failed(self) -> None:
        if self._failure is None:
            return
        raise explained(NativeError(*self._failure), self._flaw)


def _name(status: int) -> str:
    return status.name if isinstance(status, NativeStatus) else str(status)


def _wake(loop: asyncio.AbstractEventLoop, woken: asyncio.Future[None]) -> None:
    """From another thread."""

    def set_result() -> None:
        if not woken.done():
            woken.set_result(None)

    try:
        loop.call_soon_threadsafe(set_result)
    except RuntimeError:
        if not loop.is_closed():
            raise
        # Whoever awaited it there is gone.
