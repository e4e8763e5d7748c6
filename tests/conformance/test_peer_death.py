"""kill -9 of the serving process in the middle of a 1 GiB pull, again and again (design section 3, "Liveness").

LDR_KILL_ROUNDS is the number of rounds on each path and mode; 5 unless set, 50 in the full run.
"""

from __future__ import annotations

import os

import pytest

from llm_datadist_ray import BlocksCacheKey, Placement
from tests.conformance.memory import MemoryLayout
from tests.conformance.pair import End, Pair

NUM_ROUNDS = int(os.environ.get("LDR_KILL_ROUNDS", "5"))
LAYOUT = MemoryLayout(num_tensors=64, num_entries=1024, entry_bytes=16 * 1024, gap_bytes=4096)


def serve(end: End, value: int) -> None:
    end.init(listen=True)
    end.process.paint("kv", LAYOUT, value, shared=end.path == "shm")
    end.process.register("kv", blocks=True, key=BlocksCacheKey(2), placement=Placement.DEVICE, remote_accessible=True)


@pytest.mark.faults
@pytest.mark.timeout(60 + 30 * NUM_ROUNDS)
def test_kill_in_the_middle_of_a_pull(idle_pair: Pair) -> None:
    a, b = idle_pair.a, idle_pair.b
    a.init(listen=False)
    a.process.paint("kv", LAYOUT, 0, shared=idle_pair.path == "shm")
    a.process.register("kv", blocks=True, key=None, placement=Placement.DEVICE, remote_accessible=True)
    serve(b, 1)
    idle_pair.link()
    all_blocks = list(range(LAYOUT.num_entries))

    counts = None
    for round_number in range(1, NUM_ROUNDS + 1):
        outcome = a.process.pull_and_kill(2, "kv", b.process.pid)
        done, total = outcome["progress"]
        assert 0 < done < total == LAYOUT.num_tensors * LAYOUT.tensor_bytes, "the pull had begun and was not complete"
        assert not outcome["is_ok"]
        assert "cluster 2" in outcome["text"], outcome["text"]
        assert outcome["elapsed_s"] < 1.0, outcome

        b.process.restart()
        b.forget()
        serve(b, 10 * round_number)
        idle_pair.link()
        a.process.pull_blocks(BlocksCacheKey(2), "kv", all_blocks, all_blocks)
        assert a.process.is_painted("kv", 10 * round_number)
        if counts is None:
            counts = a.process.counts()
    assert a.process.settled_counts(counts) == counts
