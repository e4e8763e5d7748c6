"""What the test of the reference rules runs in a process of a pair: ``end.process.run(function, ...)``."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from llm_datadist_ray import Cache, CacheDesc, DataType, Placement
from llm_datadist_ray._native import alloc_shared

if TYPE_CHECKING:
    from tests.conformance.side import Side

NUM_TENSORS, NUM_ENTRIES, ENTRY_BYTES = 2, 3, 64


def byte_of(tag: int, tensor: int, entry: int) -> int:
    """What all bytes of an entry are; neighbours and other caches differ."""
    return (tag * 31 + tensor * 7 + entry * 3 + 1) % 251


def _desc() -> CacheDesc:
    return CacheDesc(NUM_TENSORS, [NUM_ENTRIES, ENTRY_BYTES], DataType.DT_UINT8)


def _fill(cache: Cache, tag: int) -> None:
    for tensor, addr in enumerate(cache.tensor_addrs):
        for entry in range(NUM_ENTRIES):
            ctypes.memset(addr + entry * ENTRY_BYTES, byte_of(tag, tensor, entry), ENTRY_BYTES)


def allocate(side: Side, tag: int, keys: Any, *, is_blocks: bool) -> int:
    manager = side.dist.cache_manager
    cache = manager.allocate_blocks_cache(_desc(), keys) if is_blocks else manager.allocate_cache(_desc(), keys)
    _fill(cache, tag)
    side._caches[f"cache {cache.cache_id}"] = cache
    return cache.cache_id


def register(side: Side, tag: int, keys: Any, *, is_blocks: bool) -> int:
    memory = alloc_shared(NUM_TENSORS * NUM_ENTRIES * ENTRY_BYTES)  # every path reaches it
    side._kept.append(memory)
    addrs = [memory.ctypes.data + tensor * NUM_ENTRIES * ENTRY_BYTES for tensor in range(NUM_TENSORS)]
    manager = side.dist.cache_manager
    register = manager.register_blocks_cache if is_blocks else manager.register_cache
    cache = register(_desc(), addrs, keys)
    _fill(cache, tag)
    side._caches[f"cache {cache.cache_id}"] = cache
    return cache.cache_id


def deallocate(side: Side, cache_id: int) -> None:
    cache = side._caches[f"cache {cache_id}"]
    manager = side.dist.cache_manager
    (manager.deallocate_blocks_cache if cache.is_blocks_cache else manager.deallocate_cache)(cache)


def pull(side: Side, key: Any, *, is_blocks: bool, **ranges: Any) -> list[int]:
    """Pulls one entry, or all blocks, and returns of each tensor the byte that the first entry is full of."""
    name = "pulled blocks" if is_blocks else "pulled entries"
    if name not in side._caches:
        register(side, 0, None if is_blocks else [], is_blocks=is_blocks)
        side._caches[name] = side._caches.pop(next(reversed(side._caches)))
    cache, manager = side._caches[name], side.dist.cache_manager
    for addr in cache.tensor_addrs:
        ctypes.memset(addr, 255, NUM_ENTRIES * ENTRY_BYTES)
    if is_blocks:
        manager.pull_blocks(key, cache, [0, 1, 2], [0, 1, 2])
    else:
        manager.pull_cache(key, cache, 0, **ranges)
    found = []
    for addr in cache.tensor_addrs:
        entry = set(ctypes.string_at(addr, ENTRY_BYTES))
        assert len(entry) == 1
        found.append(entry.pop())
    return found


def used_bytes(side: Side) -> int:
    return side.dist.cache_manager.pool_status(Placement.DEVICE).used_bytes


def is_pull_target(side: Side, number: int) -> bool:
    """Whether the cache is one that :func:`pull` has made."""
    targets = (side._caches.get(name) for name in ("pulled blocks", "pulled entries"))
    return any(cache is not None and cache.cache_id == number for cache in targets)
