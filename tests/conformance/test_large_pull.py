"""Paged caches of a real model's size: 32 layers × 2 × 512 blocks × 16 KiB, 256 scattered blocks of every tensor in one
call; every byte inside and outside of them is what it should be."""

from __future__ import annotations

import numpy as np
import pytest

from llm_datadist_ray import BlocksCacheKey, Placement
from llm_datadist_ray._native import Path
from tests.conformance.memory import MemoryLayout
from tests.conformance.pair import Pair

LAYOUT = MemoryLayout(num_tensors=64, num_entries=512, entry_bytes=16 * 1024, gap_bytes=4096)
NUM_PULLED = 256


@pytest.mark.timeout(300)
def test_scattered_blocks_of_every_tensor(idle_pair: Pair) -> None:
    a, b = idle_pair.a, idle_pair.b
    idle_pair.init()
    for end, seed in ((a, 1), (b, 2)):
        end.process.begin("large_memory", "kv", LAYOUT, seed, shared=idle_pair.path == "shm")
    for end in (a, b):
        end.process.end()
        end.process.register(
            "kv", blocks=True, key=BlocksCacheKey(end.cluster_id), placement=Placement.DEVICE, remote_accessible=True
        )
    idle_pair.link()

    rng = np.random.default_rng(3)
    src_blocks, dst_blocks = (rng.permutation(LAYOUT.num_entries)[:NUM_PULLED].astype(np.int32) for _ in range(2))
    a.process.pull_blocks(BlocksCacheKey(2), "kv", src_blocks, dst_blocks)

    a.process.begin("check_large", "kv", 1, (2, src_blocks, dst_blocks))
    b.process.begin("check_large", "kv", 2, None)
    assert a.process.end() == []
    assert b.process.end() == []
    moved = LAYOUT.num_tensors * NUM_PULLED * LAYOUT.entry_bytes
    assert a.process.info().bytes_pulled == {
        path: moved if path == Path[idle_pair.path.upper()] else 0 for path in Path if path
    }
