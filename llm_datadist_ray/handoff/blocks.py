"""Who holds which KV block. Pure bookkeeping: it never touches the memory itself."""

from __future__ import annotations

import threading
from dataclasses import dataclass


class BlocksFull(RuntimeError):
    """Not enough free blocks now; the message says how many were wanted and how many there are."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """``total == free + cached + working + granted + quarantined`` at any moment (design section 5, "Conserved")."""

    total: int
    free: int
    cached: int
    """Kept for a later prompt with the same prefix; no prefix cache exists yet, so 0."""
    working: int
    """Held by a request that computes in them or is about to."""
    granted: int
    """Promised to a sink; immutable until the grant ends."""
    quarantined: int
    """Waiting until a remote writer is known to be quiet; sinks only pull so far, so 0."""


class BlockAllocator:
    """Blocks ``0 .. num_blocks - 1``, handed to owners (request ids). Any thread.

    An owner reserves once; its blocks are *working* until it releases them or grants them to a sink, and *granted*
    until the grant has ended. The two ways back to *free* are separate on purpose: granted blocks must not be freed by
    whoever only knows that the request is over.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a cache has at least 1 block")
        self._lock = threading.Lock()
        self._total = num_blocks
        # A stack, lowest block on top: a freed block is the next one used, while it is still in the CPU's caches.
        self._free = list(reversed(range(num_blocks)))
        self._working: dict[str, tuple[int, ...]] = {}
        self._granted: dict[str, tuple[int, ...]] = {}

    @property
    def num_blocks(self) -> int:
        return self._total

    def reserve(self, owner: str, num_blocks: int) -> tuple[int, ...]:
        """Free blocks become the owner's working ones. BlocksFull when there are too few free ones; ValueError for an
        owner that already holds blocks."""
        with self._lock:
            if owner in self._working or owner in self._granted:
                raise ValueError(f"{owner} already holds blocks")
            if num_blocks < 1:
                raise ValueError(f"{owner} wants {num_blocks} blocks; at least 1 is reserved")
            if num_blocks > len(self._free):
                raise BlocksFull(f"{num_blocks} blocks are wanted, {len(self._free)} of {self._total} are free")
            start = len(self._free) - num_blocks
            blocks = tuple(reversed(self._free[start:]))
            del self._free[start:]
            self._working[owner] = blocks
            return blocks

    def release(self, owner: str) -> int:
        """The owner's working blocks are free again; returns how many, 0 when it has none. Granted ones stay."""
        with self._lock:
            return self._give_back(self._working.pop(owner, ()))

    def grant(self, owner: str) -> None:
        """The owner's working blocks become granted ones; KeyError when it has none."""
        with self._lock:
            self._granted[owner] = self._working.pop(owner)

    def end_grant(self, owner: str) -> int:
        """The owner's granted blocks are free again; returns how many, 0 when it has none. Only once the native grant
        has ended: before that a sink may still read them."""
        with self._lock:
            return self._give_back(self._granted.pop(owner, ()))

    def counts(self) -> BlockCounts:
        """Each number is counted, none is derived from the others: a leak would show as a sum that is wrong."""
        with self._lock:
            return BlockCounts(
                total=self._total,
                free=len(self._free),
                cached=0,
                working=sum(map(len, self._working.values())),
                granted=sum(map(len, self._granted.values())),
                quarantined=0,
            )

    def _give_back(self, blocks: tuple[int, ...]) -> int:
        self._free.extend(reversed(blocks))
        return len(blocks)
