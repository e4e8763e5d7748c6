"""The source of handoffs: grants blocks, and takes them back when a grant has ended."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from llm_datadist_ray._native import Event, GrantId, GrantStats, NativeEngine
from llm_datadist_ray.handoff.blocks import BlockAllocator


@dataclass(frozen=True, slots=True)
class Grant:
    id: GrantId
    generation: int


class GrantSource:
    """Mints grants for blocks of one registered blocks cache. Any thread; no method waits for a peer.

    Subscribe :meth:`on_grant_ended` to GRANT_ENDED at the engine's :class:`~llm_datadist_ray.events.EventDispatcher`:
    only that event makes granted blocks free again, whoever ended the grant.
    """

    def __init__(self, engine: NativeEngine, allocator: BlockAllocator, *, cache_id: int, layout_digest: int) -> None:
        self._engine = engine
        self._allocator = allocator
        self._cache_id = cache_id
        self._layout_digest = layout_digest
        self._lock = threading.Lock()
        self._owners: dict[int, str] = {}
        self._sequences: dict[str, int] = {}

    def mint(self, owner: str, blocks: Sequence[int], num_tokens: int) -> Grant:
        """Grants the blocks, in token order; they are among the owner's working blocks and all of those become
        granted. NativeError when the core refuses; the blocks stay the owner's then."""
        # Under the lock, so that the end of the grant, which may come at once, is not handled before it is known here.
        with self._lock:
            grant_id, generation = self._engine.grant_mint(
                cache_id=self._cache_id, blocks=blocks, num_tokens=num_tokens, layout_digest=self._layout_digest
            )
            self._allocator.grant(owner)
            self._owners[grant_id.sequence] = owner
            self._sequences[owner] = grant_id.sequence
        return Grant(grant_id, generation)

    def revoke(self, owner: str) -> bool:
        """Ends the owner's grant, also while it is read: the reader fails. False when there is none (any more)."""
        with self._lock:
            sequence = self._sequences.get(owner)
        if sequence is None:
            return False
        self._engine.grant_revoke(sequence)
        return True

    def stats(self) -> GrantStats:
        return self._engine.grant_stats()

    def on_grant_ended(self, event: Event) -> None:
        """Event handler: the grant's blocks are free. A grant that was not minted here is not ours to free."""
        with self._lock:
            owner = self._owners.pop(event.id, None)
            if owner is None:
                return
            del self._sequences[owner]
            self._allocator.end_grant(owner)
