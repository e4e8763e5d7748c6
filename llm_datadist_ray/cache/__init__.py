"""The cache manager of the v2 interface (spec api-cachemanager)."""

from __future__ import annotations

from llm_datadist_ray.cache.manager import CacheManager
from llm_datadist_ray.cache.task import TransferTask

__all__ = ["CacheManager", "TransferTask"]
