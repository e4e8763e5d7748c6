"""Source and sink of a handoff, over two native engines in this process: bytes, counters, and every refusal."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from llm_datadist_ray._native import CacheKind, Event, EventKind, GrantId, NativeEngine, NativeStatus, alloc_shared
from llm_datadist_ray.events import EventDispatcher
from llm_datadist_ray.handoff import BlockAllocator, Handoff
from llm_datadist_ray.handoff.sink import FetchFailed, GrantSink
from llm_datadist_ray.handoff.source import GrantSource

NUM_TENSORS, NUM_BLOCKS, BLOCK_BYTES = 4, 16, 256
DIGEST = 0x1234
TIMEOUT_S = 5.0
DEVICE = 1


class Side:
    """An engine with one blocks cache of random bytes."""

    def __init__(self, cluster_id: int) -> None:
        self.engine = NativeEngine(
            cluster_id=cluster_id,
            remote_access=True,
            listen_ip="127.0.0.1",
            secret=b"a secret of 16 b",
            layout_digest=DIGEST,
            layout_text="test layout",
        )
        shape = (NUM_TENSORS, NUM_BLOCKS, BLOCK_BYTES)
        self.blocks = alloc_shared(NUM_TENSORS * NUM_BLOCKS * BLOCK_BYTES).reshape(shape)
        self.blocks[:] = np.random.default_rng(cluster_id).integers(0, 256, shape, dtype=np.uint8)
        self.cache_id = self.engine.register_cache(
            kind=CacheKind.BLOCKS,
            placement=DEVICE,
            remote_accessible=True,
            num_entries=NUM_BLOCKS,
            tensor_bytes=NUM_BLOCKS * BLOCK_BYTES,
            addresses=[int(tensor.ctypes.data) for tensor in self.blocks],
        )


class Pair:
    """A source and a sink, linked. ``ends`` receives what the source has handled of ended grants."""

    def __init__(self) -> None:
        self.p, self.d = Side(1), Side(2)
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.source = GrantSource(self.p.engine, self.allocator, cache_id=self.p.cache_id, layout_digest=DIGEST)
        self.sink = GrantSink(self.d.engine, cache_id=self.d.cache_id)
        self.ends: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.events = EventDispatcher(self.p.engine)
        self.events.subscribe(EventKind.GRANT_ENDED, self._ended)
        self.d.engine.link(ip="127.0.0.1", port=self.p.engine.info().listen_port, timeout_s=TIMEOUT_S)

    def _ended(self, event: Event) -> None:
        self.source.on_grant_ended(event)
        self.ends.put(event)

    def mint(self, owner: str, num_blocks: int) -> Handoff:
        grant = self.source.mint(owner, self.allocator.reserve(owner, num_blocks), num_blocks * 16)
        return Handoff(
            request_id=owner,
            source_cluster_id=1,
            source_incarnation=grant.id.incarnation,
            source_address="127.0.0.1:1",
            grant_sequence=grant.id.sequence,
            grant_nonce=grant.id.nonce,
            generation=grant.generation,
            model_id="test",
            num_tokens=num_blocks * 16,
            first_token=7,
            layout_digest=DIGEST,
            num_blocks=num_blocks,
        )

    def refused(self, handoff: Handoff, dst_blocks: list[int]) -> FetchFailed:
        with pytest.raises(FetchFailed) as caught:
            self.sink.fetch(handoff, dst_blocks, timeout_s=TIMEOUT_S)
        return caught.value

    def close(self) -> None:
        self.d.engine.close()
        self.p.engine.close()
        self.events.join(TIMEOUT_S)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_fetch_moves_the_granted_blocks_and_no_others(pair: Pair) -> None:
    handoff = pair.mint("r", 3)
    expected = pair.d.blocks.copy()
    expected[:, [9, 2, 5]] = pair.p.blocks[:, [0, 1, 2]]
    fetched = pair.sink.fetch(handoff, [9, 2, 5], timeout_s=TIMEOUT_S)
    assert np.array_equal(pair.d.blocks, expected)
    assert fetched.num_bytes == 3 * NUM_TENSORS * BLOCK_BYTES
    assert fetched.path == "shm"
    assert min(fetched.open_s, fetched.transfer_s, fetched.close_s) > 0


def test_blocks_are_granted_until_the_sink_has_closed(pair: Pair) -> None:
    handoff = pair.mint("r", 3)
    assert (pair.allocator.counts().granted, pair.allocator.counts().free) == (3, NUM_BLOCKS - 3)
    assert pair.allocator.release("r") == 0
    pair.sink.fetch(handoff, [0, 1, 2], timeout_s=TIMEOUT_S)
    assert pair.ends.get(timeout=TIMEOUT_S).is_ok
    assert pair.allocator.counts().free == NUM_BLOCKS
    stats = pair.source.stats()
    assert (stats.granted, stats.closed, stats.live, stats.reclaimed) == (1, 1, 0, 0)


def test_a_handoff_is_fetched_once(pair: Pair) -> None:
    """The blocks hold another request's KV by then: whoever comes late must get an error, not those bytes."""
    handoff = pair.mint("first", 2)
    pair.sink.fetch(handoff, [0, 1], timeout_s=TIMEOUT_S)
    pair.ends.get(timeout=TIMEOUT_S)
    pair.mint("second", 2)
    before = pair.d.blocks.copy()
    error = pair.refused(handoff, [4, 5])
    assert (error.step, error.native_status) == ("open", NativeStatus.CONSUMED)
    assert "request first: handoff from prompt 1 at 127.0.0.1:1 failed in step open after" in str(error)
    assert np.array_equal(pair.d.blocks, before)
    assert pair.source.stats().live == 1


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"grant_nonce": 1}, NativeStatus.UNKNOWN_GRANT),
        ({"grant_sequence": 99}, NativeStatus.UNKNOWN_GRANT),
        ({"source_incarnation": 1}, NativeStatus.STALE),
        ({"generation": 99}, NativeStatus.STALE),
        ({"num_tokens": 1}, NativeStatus.STALE),
        ({"layout_digest": 1}, NativeStatus.LAYOUT),
        ({"source_cluster_id": 3}, NativeStatus.NOT_LINKED),
    ],
)
def test_what_is_not_exactly_the_handoff_is_refused(pair: Pair, change: dict[str, int], status: NativeStatus) -> None:
    handoff = pair.mint("r", 2)
    error = pair.refused(replace(handoff, **change), [0, 1])
    assert (error.step, error.native_status) == ("open", status)
    assert pair.allocator.counts().granted == 2
    pair.sink.fetch(handoff, [0, 1], timeout_s=TIMEOUT_S)


def test_a_failure_names_the_source_as_it_is_called(pair: Pair) -> None:
    handoff = replace(pair.mint("r", 2), grant_nonce=1)
    with pytest.raises(FetchFailed, match=r"request r: handoff from prompt-0 \(cluster 1\) failed in step open after"):
        pair.sink.fetch(handoff, [0, 1], timeout_s=TIMEOUT_S, source="prompt-0 (cluster 1)")


def test_the_end_of_a_grant_minted_elsewhere_frees_nothing(pair: Pair) -> None:
    blocks = pair.allocator.reserve("other", 2)
    grant, _ = pair.p.engine.grant_mint(cache_id=pair.p.cache_id, blocks=blocks, num_tokens=1, layout_digest=0)
    pair.p.engine.grant_revoke(grant.sequence)
    pair.mint("ours", 2)
    assert pair.source.revoke("ours")
    first, _ = (pair.ends.get(timeout=TIMEOUT_S) for _ in range(2))
    assert first.id == grant.sequence
    assert pair.allocator.counts().free == NUM_BLOCKS - len(blocks)


def test_a_revoked_grant_is_refused_and_its_blocks_are_free(pair: Pair) -> None:
    handoff = pair.mint("r", 2)
    assert pair.source.revoke("r")
    assert pair.ends.get(timeout=TIMEOUT_S).status == NativeStatus.REVOKED
    assert pair.allocator.counts().free == NUM_BLOCKS
    assert not pair.source.revoke("r")
    assert pair.refused(handoff, [0, 1]).native_status == NativeStatus.REVOKED


def test_a_sink_with_another_number_of_blocks_gives_the_grant_back(pair: Pair) -> None:
    handoff = pair.mint("r", 3)
    error = pair.refused(handoff, [0, 1])
    assert "it holds 3 blocks, 2 are ready here" in str(error)
    assert not pair.ends.get(timeout=TIMEOUT_S).is_ok
    assert pair.source.stats().reclaimed_cancelled == 1
    assert pair.allocator.counts().free == NUM_BLOCKS


def test_a_failed_transfer_cancels_the_grant(pair: Pair) -> None:
    handoff = pair.mint("r", 2)
    error = pair.refused(handoff, [0, NUM_BLOCKS])
    assert (error.step, error.native_status) == ("transfer", NativeStatus.INVALID)
    pair.ends.get(timeout=TIMEOUT_S)
    assert pair.source.stats().reclaimed_cancelled == 1
    assert pair.allocator.counts().free == NUM_BLOCKS


def test_a_source_that_is_gone_is_an_error(pair: Pair) -> None:
    handoff = pair.mint("r", 2)
    pair.p.engine.close()
    assert pair.refused(handoff, [0, 1]).step == "open"


def test_a_sink_that_dies_with_an_open_grant_frees_the_blocks(pair: Pair) -> None:
    handoff = pair.mint("r", 2)
    pair.d.engine.grant_open(
        cluster_id=1,
        grant=GrantId(handoff.source_incarnation, handoff.grant_sequence, handoff.grant_nonce),
        generation=handoff.generation,
        num_tokens=handoff.num_tokens,
        layout_digest=DIGEST,
        open_id=5,
        timeout_s=TIMEOUT_S,
    )
    pair.d.engine.close()
    pair.ends.get(timeout=TIMEOUT_S)
    assert pair.source.stats().reclaimed_peer_lost == 1
    assert pair.allocator.counts().free == NUM_BLOCKS
