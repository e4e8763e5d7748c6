"""Contiguous to contiguous pulls, byte by byte (spec api-cachemanager §5.5 - §5.7)."""

from __future__ import annotations

import pytest

from llm_datadist_ray import CacheKey, Placement
from tests.conformance.pair import CacheRef, Pair

INVALID_ID = 2**64 - 1


def expect_entry(dst: CacheRef, dst_batch: int, src: CacheRef, src_batch: int, size: int, pairs: list[tuple]) -> None:
    for dst_tensor, src_tensor in pairs:
        dst.tensor(dst_tensor)[dst_batch, :size] = src.tensor(src_tensor)[src_batch, :size]


def same(num: int) -> list[tuple]:
    return [(index, index) for index in range(num)]


@pytest.mark.parametrize("size", [-1, 1, 95, 96])
@pytest.mark.parametrize(("dst_batch", "src_batch"), [(0, 0), (5, 2), (3, 5)])
def test_size_and_batch(linked_pair: Pair, size: int, dst_batch: int, src_batch: int) -> None:
    src, dst = linked_pair.b.cache("src"), linked_pair.a.cache("dst")
    linked_pair.a.process.pull_cache(src.key(src_batch), "dst", dst_batch, size)
    expect_entry(dst, dst_batch, src, src_batch, 96 if size == -1 else size, same(4))


def test_smaller_destination_takes_a_prefix(linked_pair: Pair) -> None:
    src, dst = linked_pair.b.cache("src", entry_bytes=200), linked_pair.a.cache("dst", entry_bytes=64)
    linked_pair.a.process.pull_cache(src.key(3), "dst", batch_index=1)
    expect_entry(dst, 1, src, 3, 64, same(4))


def test_large_entries(linked_pair: Pair) -> None:
    """More than one chunk of a stream, not a multiple of anything."""
    src = linked_pair.b.cache("src", tensors=3, entries=2, entry_bytes=3_000_001)
    dst = linked_pair.a.cache("dst", tensors=3, entries=2, entry_bytes=3_000_001)
    linked_pair.a.process.pull_cache(src.key(1), "dst", 0)
    expect_entry(dst, 0, src, 1, 3_000_001, same(3))
    linked_pair.check_only_path_used()


@pytest.mark.parametrize(
    ("ranges", "pairs"),
    [
        ({"src_layer_range": range(2), "dst_layer_range": range(2)}, same(4)),
        ({"src_layer_range": range(1), "dst_layer_range": range(1, 2)}, [(2, 0), (3, 1)]),
        (
            {"src_layer_range": range(3, 4), "dst_layer_range": range(1), "tensor_num_per_layer": 1},
            [(0, 3)],
        ),
        ({"src_layer_range": range(1), "dst_layer_range": range(1), "tensor_num_per_layer": 4}, same(4)),
        ({"src_layer_range": range(2, 2), "dst_layer_range": range(0)}, same(4)),
        ({"src_layer_range": range(2)}, same(4)),
        ({"dst_layer_range": range(2)}, same(4)),
        ({"src_cache_offset": 3, "nonsense": object}, same(4)),
    ],
)
def test_layer_ranges(linked_pair: Pair, ranges: dict, pairs: list[tuple]) -> None:
    src, dst = linked_pair.b.cache("src"), linked_pair.a.cache("dst")
    linked_pair.a.process.pull_cache(src.key(2), "dst", 4, **ranges)
    expect_entry(dst, 4, src, 2, 96, pairs)


def test_one_range_selects_from_a_cache_of_another_size(linked_pair: Pair) -> None:
    src, dst = linked_pair.b.cache("src", tensors=2), linked_pair.a.cache("dst", tensors=6)
    linked_pair.a.process.pull_cache(src.key(), "dst", dst_layer_range=range(1, 2))
    expect_entry(dst, 0, src, 0, 96, [(2, 0), (3, 1)])
    back = linked_pair.a.cache("back", tensors=2)
    wide = linked_pair.b.cache("wide", tensors=6)
    linked_pair.a.process.pull_cache(wide.key(1), "back", src_layer_range=range(2, 3))
    expect_entry(back, 0, wide, 1, 96, [(0, 4), (1, 5)])


def test_single_tensor_needs_no_layers(linked_pair: Pair) -> None:
    src, dst = linked_pair.b.cache("src", tensors=1), linked_pair.a.cache("dst", tensors=1)
    linked_pair.a.process.pull_cache(src.key(), "dst")
    expect_entry(dst, 0, src, 0, 96, same(1))


def test_a_pull_of_a_registered_cache_can_be_repeated(linked_pair: Pair) -> None:
    src, dst = linked_pair.b.cache("src", key=[CacheKey(2, 7)]), linked_pair.a.cache("dst")
    for batch in range(3):
        linked_pair.a.process.pull_cache(src.key(0), "dst", batch)
        expect_entry(dst, batch, src, 0, 96, same(4))


def test_both_ends_can_pull(linked_pair: Pair) -> None:
    """A link is usable in both directions (spec api-datadist §3)."""
    on_a, on_b = linked_pair.a.cache("on_a"), linked_pair.b.cache("on_b")
    linked_pair.b.process.pull_cache(on_a.key(1), "on_b", 2)
    expect_entry(on_b, 2, on_a, 1, 96, same(4))
    linked_pair.a.process.pull_cache(on_b.key(2), "on_a", 0)
    expect_entry(on_a, 0, on_b, 2, 96, same(4))


def test_overlapping_registrations(linked_pair: Pair) -> None:
    """A cache may be registered twice; both ids reach the same memory, and one survives the other (spec §3.4)."""
    src, dst = linked_pair.b.cache("src"), linked_pair.a.cache("dst")
    again_id = linked_pair.b.process.register(
        "src", blocks=False, key=None, placement=Placement.DEVICE, remote_accessible=True
    )
    assert again_id == src.cache_id + 1
    linked_pair.b.process.unregister_id(src.cache_id)
    linked_pair.a.process.pull_cache(type(src.key())(2, again_id, 1), "dst", 0)
    expect_entry(dst, 0, src, 1, 96, same(4))


@pytest.mark.mode("two-sided")
class TestKeys:
    def test_request_and_prefix_keys_name_their_entry(self, linked_pair: Pair) -> None:
        keys = [CacheKey(2, 11, 5), CacheKey(2, INVALID_ID, 5, 11), CacheKey(2, INVALID_ID), CacheKey(2, 11, 6)]
        src, dst = linked_pair.b.cache("src", key=keys), linked_pair.a.cache("dst")
        for entry in (0, 1, 3):
            linked_pair.a.process.pull_cache(keys[entry], "dst", entry)
            expect_entry(dst, entry, src, entry, 96, same(4))

    def test_the_last_of_equal_keys_wins_in_one_registration(self, linked_pair: Pair) -> None:
        src = linked_pair.b.cache("src", key=[CacheKey(2, 1), CacheKey(2, 2), CacheKey(2, 1)])
        dst = linked_pair.a.cache("dst")
        linked_pair.a.process.pull_cache(CacheKey(2, 1), "dst")
        expect_entry(dst, 0, src, 2, 96, same(4))

    def test_the_first_of_two_registrations_keeps_a_key(self, linked_pair: Pair) -> None:
        first = linked_pair.b.cache("first", key=[CacheKey(2, 1)])
        second = linked_pair.b.cache("second", key=[CacheKey(2, 1), CacheKey(2, 2)])
        dst = linked_pair.a.cache("dst")
        linked_pair.a.process.pull_cache(CacheKey(2, 1), "dst", 0)
        expect_entry(dst, 0, first, 0, 96, same(4))
        linked_pair.a.process.pull_cache(second.key(0), "dst", 1)
        expect_entry(dst, 1, second, 0, 96, same(4))

    def test_by_id_an_entry_with_a_prefix_key_is_served(self, linked_pair: Pair) -> None:
        src, dst = linked_pair.b.cache("src", key=[CacheKey(2, INVALID_ID, 0, 9)]), linked_pair.a.cache("dst")
        linked_pair.a.process.pull_cache(src.key(0), "dst")
        expect_entry(dst, 0, src, 0, 96, same(4))
