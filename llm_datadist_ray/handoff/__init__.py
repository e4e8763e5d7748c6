"""The handoff of one request's KV from its source to its sink (design section 5). No Ray in here.

:mod:`~llm_datadist_ray.handoff.source` and :mod:`~llm_datadist_ray.handoff.sink` need the compiled module and are
imported by name; the record and the block allocator do not.
"""

from __future__ import annotations

from llm_datadist_ray.handoff.blocks import BlockAllocator, BlockCounts, BlocksFull
from llm_datadist_ray.handoff.handoff import Handoff

__all__ = ["BlockAllocator", "BlockCounts", "BlocksFull", "Handoff"]
