"""What the parts of :class:`NativeEngine` share: the handle that brackets every native call."""

from __future__ import annotations

from llm_datadist_ray._native.handle import EngineHandle


class EngineCalls:
    _handle: EngineHandle | None = None  # for __del__ of an engine whose constructor raised

    @property
    def _native(self) -> EngineHandle:
        assert self._handle is not None  # set by the constructor, or there is no object to call a method of
        return self._handle
