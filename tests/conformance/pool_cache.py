"""Caches that a process of a pair took from a pool, or made of its own host memory, and what they should hold."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np

from llm_datadist_ray import CacheKeyByIdAndIndex, Placement
from tests.conformance import collective, row_side
from tests.conformance.pair import End

_seeds = count(1)


class PoolCache:
    """``expected`` is ``[tensors, entries, entry_bytes]``; what an operation should do is done to it."""

    def __init__(
        self,
        end: End,
        name: str,
        *,
        blocks: bool = False,
        tensors: int = 4,
        entries: int = 6,
        entry_bytes: int = 96,
        keys: Any = None,
        placement: Placement = Placement.DEVICE,
        is_cpu: bool = False,
    ) -> None:
        self.end = end
        self.name = name
        seed, shape = next(_seeds), (tensors, entries, entry_bytes)
        self.expected = row_side.pattern(seed, *shape)
        self.cache_id = -1
        if is_cpu:
            end.process.run(row_side.cpu_cache, name, seed, shape)
        else:
            keys = keys if blocks else keys or []
            self.cache_id = end.process.run(
                row_side.allocate, name, seed, shape, blocks=blocks, keys=keys, placement=placement
            )

    def key(self, batch_index: int = 0) -> CacheKeyByIdAndIndex:
        return CacheKeyByIdAndIndex(self.end.cluster_id, self.cache_id, batch_index)

    def addrs(self) -> list[int]:
        return list(self.end.process.run(row_side.tensor_addrs, self.name))

    def check(self) -> None:
        actual = np.frombuffer(self.end.process.run(row_side.contents, self.name), np.uint8)
        wrong = np.flatnonzero(actual != self.expected.reshape(-1))
        assert not len(wrong), f"{len(wrong)} bytes of {self.name!r} are wrong, from {wrong[0]} to {wrong[-1]}"


def call(end: End, method: str, *args: Any, **kwargs: Any) -> Any:
    """A method of that end's cache manager; a PoolCache or ``Named`` among the arguments stands for its cache there."""
    given = [row_side.Named(arg.name) if isinstance(arg, PoolCache) else arg for arg in args]
    return end.process.run(row_side.manager_call, method, *given, **kwargs)


def on_dist(end: End, method: str, *args: Any, **kwargs: Any) -> Any:
    return end.process.run(collective.call, method, *args, **kwargs)
