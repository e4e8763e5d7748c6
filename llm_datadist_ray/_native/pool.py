"""What a memory pool of an engine holds (spec api-config §3.1)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm_datadist_ray._native._ldr import CData


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """``largest_free_bytes`` far below ``free_bytes`` in many ``num_free_ranges`` is fragmentation."""

    size_bytes: int
    page_bytes: int
    used_bytes: int
    """Whole pages: a tensor's size is rounded up to them."""
    largest_free_bytes: int
    huge_bytes: int
    """How much of the pool is on huge pages."""
    num_free_ranges: int
    num_allocations: int
    """Caches, also those that only a key or a reader keeps."""

    @property
    def free_bytes(self) -> int:
        return self.size_bytes - self.used_bytes


def pool_info_from_c(info: CData) -> PoolInfo:
    return PoolInfo(**{field.name: getattr(info, field.name) for field in fields(PoolInfo)})
