"""The lifetime of one native engine."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llm_datadist_ray._native._ldr import ffi, lib
from llm_datadist_ray._native.status import NativeError, NativeStatus, check

if TYPE_CHECKING:
    from llm_datadist_ray._native._ldr import CData

_handles: weakref.WeakSet[EngineHandle] = weakref.WeakSet()


class EngineHandle:
    """:attr:`pointer` is what native calls take.

    The native core itself ends calls that are inside when it closes, and answers those that come too late with CLOSED:
    its handle lives as long as this object. Only who waits for the engine's descriptors needs :meth:`held`; ``wake_fd``
    becomes readable for him when closing begins. Any thread, any number at once.
    """

    def __init__(self, params: CData) -> None:
        """Starts the engine of a ``ldr_engine_params_t *``. NativeError; OSError without a free descriptor."""
        self._is_closing = False
        self._is_closed = False
        self._reset()  # first: it can fail, and no engine would be left behind
        engine_p = ffi.new("ldr_engine_t **")
        try:
            check(lib.ldr_engine_create(params, engine_p))
        except NativeError:
            os.close(self.wake_fd)
            raise
        self._pointer = ffi.gc(engine_p[0], lib.ldr_engine_destroy)
        _handles.add(self)

    def _reset(self) -> None:
        self._num_held = 0
        self._changed = threading.Condition(threading.Lock())
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC)

    def reset_in_child(self) -> None:
        """The threads that were inside, or held the lock, do not exist here, and the eventfd is the parent's too."""
        if not self._is_closed:
            os.close(self.wake_fd)
            self._reset()

    @property
    def is_open(self) -> bool:
        return not self._is_closing

    def raise_if_closing(self) -> None:
        if self._is_closing:
            raise NativeError("the engine is closed: make a new one", NativeStatus.CLOSED)

    @property
    def pointer(self) -> CData:
        """NativeError CLOSED once closing has begun."""
        if self._is_closing:
            self.raise_if_closing()
        return self._pointer

    @contextmanager
    def held(self) -> Iterator[CData]:
        """For who waits for a descriptor of the engine and for ``wake_fd``: none of them is closed meanwhile."""
        with self._changed:
            self.raise_if_closing()
            self._num_held += 1
        try:
            yield self._pointer
        finally:
            with self._changed:
                self._num_held -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Fails the calls that are inside with CLOSED and ends the engine; repeatable, also from several threads: each
        returns when it is gone."""
        with self._changed:
            is_first = not self._is_closing
            self._is_closing = True
            if not is_first:
                self._changed.wait_for(lambda: self._is_closed)
                return
            os.eventfd_write(self.wake_fd, 1)
            self._changed.wait_for(lambda: not self._num_held)
        lib.ldr_engine_shutdown(self._pointer)
        os.close(self.wake_fd)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def _after_fork_in_child() -> None:
    # The native core refuses calls here by itself (LDR_ERR_FORKED).
    for handle in _handles:
        handle.reset_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
