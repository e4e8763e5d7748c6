"""Waiting for Ray that another thread can end at once. No polling: the waiter sleeps until one of the two comes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from llm_datadist_ray.actors.errors import RequestError


class Interrupt:
    """Ends, for a reason, whatever waits through it, now and later. Any thread; the first reason stays."""

    def __init__(self) -> None:
        self._reason: Future[RequestError] = Future()

    @property
    def reason(self) -> RequestError | None:
        return self._reason.result() if self._reason.done() else None

    def set(self, reason: RequestError) -> None:
        with contextlib.suppress(InvalidStateError):
            self._reason.set_result(reason)

    def check(self) -> None:
        """Raises the reason if there is one."""
        if (reason := self.reason) is not None:
            raise reason

    def wait(self, ref: Any) -> Any:
        """As ``ray.get(ref)``, or raises the reason."""
        answer = ref.future()
        self.check()
        wait((answer, self._reason), return_when=FIRST_COMPLETED)
        self.check()
        return answer.result()

    def iterate(self, stream: Any) -> Iterator[Any]:
        """The values of a streaming call as they come, or raises the reason. From one thread."""
        arrived: SimpleQueue[_Arrival] = SimpleQueue()
        pump = asyncio.run_coroutine_threadsafe(_pump(stream, arrived), _StreamLoop.get())
        self._reason.add_done_callback(lambda reason: arrived.put(_Arrival(error=reason.result())))
        try:
            while True:
                arrival = arrived.get()
                self.check()
                if arrival.error is not None:
                    raise arrival.error
                if arrival.is_end:
                    return
                yield arrival.value
        finally:
            pump.cancel()


@dataclass(frozen=True, slots=True)
class _Arrival:
    value: Any = None
    error: BaseException | None = None
    is_end: bool = False


async def _pump(stream: Any, arrived: SimpleQueue[_Arrival]) -> None:
    try:
        async for ref in stream:
            arrived.put(_Arrival(await ref))
    except Exception as error:  # raised again by whoever waits for the value
        arrived.put(_Arrival(error=error))
    else:
        arrived.put(_Arrival(is_end=True))


class _StreamLoop:
    """The one event loop of this process that waits for streams: Ray has no future for the next item of one."""

    _lock = threading.Lock()
    _loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def get(cls) -> asyncio.AbstractEventLoop:
        with cls._lock:
            if cls._loop is None:
                cls._loop = asyncio.new_event_loop()
                threading.Thread(target=cls._loop.run_forever, name="ldr-streams", daemon=True).start()
            return cls._loop
