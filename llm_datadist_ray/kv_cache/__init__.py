"""The v1 interface: a role-gated face over the same transfer core (spec api-kvcachemanager)."""

from __future__ import annotations

from llm_datadist_ray.kv_cache.manager import KvCacheManager
from llm_datadist_ray.kv_cache.runtime import V1Runtime

__all__ = ["KvCacheManager", "V1Runtime"]
