"""Blocks are conserved, and nobody gets a block that somebody else holds."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llm_datadist_ray.handoff.blocks import BlockAllocator, BlocksFull

NUM_BLOCKS = 12
OWNERS = st.sampled_from(["a", "b", "c", "d"])


class Blocks(RuleBasedStateMachine):
    """Any order of calls by four owners, against a plain dictionary of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.working: dict[str, tuple[int, ...]] = {}
        self.granted: dict[str, tuple[int, ...]] = {}

    def held(self) -> list[int]:
        return [block for blocks in (*self.working.values(), *self.granted.values()) for block in blocks]

    @rule(owner=OWNERS, num_blocks=st.integers(1, NUM_BLOCKS + 2))
    def reserve(self, owner: str, num_blocks: int) -> None:
        if owner in self.working or owner in self.granted:
            with pytest.raises(ValueError, match="already holds"):
                self.allocator.reserve(owner, num_blocks)
            return
        num_free = NUM_BLOCKS - len(self.held())
        if num_blocks > num_free:
            with pytest.raises(BlocksFull, match=f"{num_blocks} blocks are wanted, {num_free} of {NUM_BLOCKS}"):
                self.allocator.reserve(owner, num_blocks)
            return
        blocks = self.allocator.reserve(owner, num_blocks)
        assert len(blocks) == len(set(blocks)) == num_blocks
        assert set(blocks) <= set(range(NUM_BLOCKS)) - set(self.held())
        self.working[owner] = blocks

    @rule(owner=OWNERS)
    def release(self, owner: str) -> None:
        assert self.allocator.release(owner) == len(self.working.pop(owner, ()))

    @rule(owner=OWNERS)
    def end_grant(self, owner: str) -> None:
        assert self.allocator.end_grant(owner) == len(self.granted.pop(owner, ()))

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.working)))
        self.allocator.grant(owner)
        self.granted[owner] = self.working.pop(owner)

    @rule(owner=OWNERS)
    def grant_without_blocks(self, owner: str) -> None:
        if owner not in self.working:
            with pytest.raises(KeyError):
                self.allocator.grant(owner)

    @invariant()
    def conserved(self) -> None:
        counts = self.allocator.counts()
        assert counts.total == NUM_BLOCKS
        assert counts.total == counts.free + counts.cached + counts.working + counts.granted + counts.quarantined
        assert counts.working == sum(map(len, self.working.values()))
        assert counts.granted == sum(map(len, self.granted.values()))


Blocks.TestCase.settings = settings(max_examples=60, deadline=None)
TestBlocks = Blocks.TestCase


def test_release_leaves_granted_blocks_alone() -> None:
    allocator = BlockAllocator(4)
    allocator.reserve("a", 3)
    allocator.grant("a")
    assert allocator.release("a") == 0
    assert allocator.counts().granted == 3
    assert allocator.end_grant("a") == 3
    assert allocator.counts().free == 4


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_sizes_below_one_are_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockAllocator(num_blocks)
    with pytest.raises(ValueError, match="at least 1"):
        BlockAllocator(4).reserve("a", num_blocks)


def test_threads_never_share_a_block() -> None:
    allocator = BlockAllocator(16)
    holders: dict[int, str] = {}
    problems: list[str] = []

    def work(name: str) -> None:
        for turn in range(300):
            owner = f"{name}{turn}"
            try:
                blocks = allocator.reserve(owner, 1 + turn % 5)
            except BlocksFull:
                continue
            problems.extend(f"{block}: {holders[block]}, {owner}" for block in blocks if block in holders)
            holders.update(dict.fromkeys(blocks, owner))
            for block in blocks:
                del holders[block]
            if turn % 2:
                allocator.grant(owner)
                allocator.end_grant(owner)
            else:
                allocator.release(owner)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert allocator.counts().free == 16
