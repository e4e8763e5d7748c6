"""A piece of registered memory (spec api-types §9)."""

from __future__ import annotations

from llm_datadist_ray.checks import check_isinstance
from llm_datadist_ray.types.enums import Memtype


class MemInfo:
    """``size`` bytes at address ``addr``, for ``remap_registered_memory`` only. Only types are checked (TypeError)."""

    def __init__(self, mem_type: Memtype, addr: int, size: int) -> None:
        check_isinstance("mem_type", mem_type, Memtype)
        check_isinstance("addr", addr, int)
        check_isinstance("size", size, int)
        self._mem_type = mem_type
        self._addr = addr
        self._size = size

    @property
    def mem_type(self) -> Memtype:
        return self._mem_type

    @property
    def addr(self) -> int:
        return self._addr

    @property
    def size(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"MemInfo(mem_type={self._mem_type}, addr={self._addr}, size={self._size})"
