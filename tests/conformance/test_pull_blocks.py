"""Pulls into paged caches, byte by byte (spec api-cachemanager §5.6, §5.7)."""

from __future__ import annotations

import numpy as np
import pytest

from llm_datadist_ray import CacheKey
from tests.conformance.pair import CacheRef, Pair


def expect_blocks(dst: CacheRef, dst_blocks: list, src: CacheRef, src_blocks: list, pairs: list[tuple]) -> None:
    for dst_tensor, src_tensor in pairs:
        for src_block, dst_block in zip(src_blocks, dst_blocks, strict=True):
            dst.tensor(dst_tensor)[dst_block] = src.tensor(src_tensor)[src_block]


def expect_pieces(dst: CacheRef, dst_blocks: list, src: CacheRef, src_batch: int, pairs: list[tuple]) -> None:
    block_bytes, entry_bytes = dst.layout.entry_bytes, src.layout.entry_bytes
    for dst_tensor, src_tensor in pairs:
        for piece, dst_block in enumerate(dst_blocks):
            data = src.tensor(src_tensor)[src_batch, piece * block_bytes : min((piece + 1) * block_bytes, entry_bytes)]
            dst.tensor(dst_tensor)[dst_block, : len(data)] = data


def same(num: int) -> list[tuple]:
    return [(index, index) for index in range(num)]


BLOCK_LISTS = {
    "scattered": ([5, 0, 3], [1, 4, 2]),
    "adjacent": ([1, 2, 3, 4], [0, 1, 2, 3]),
    "runs": ([0, 1, 4, 5], [2, 3, 0, 1]),
    "backwards": ([3, 2, 1], [1, 2, 3]),
    "repeated source": ([2, 2, 2], [0, 3, 5]),
    "one": ([5], [5]),
    "all": ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("form", [list, tuple, np.int32, np.int64])
@pytest.mark.parametrize("name", BLOCK_LISTS)
def test_block_lists(linked_pair: Pair, name: str, form: type) -> None:
    src_blocks, dst_blocks = BLOCK_LISTS[name]
    src, dst = linked_pair.b.blocks("src"), linked_pair.a.blocks("dst", model_id=None)
    given = [form(blocks) if form in (list, tuple) else np.array(blocks, form) for blocks in (src_blocks, dst_blocks)]
    linked_pair.a.process.pull_blocks(linked_pair.b.blocks_key(), "dst", *given)
    expect_blocks(dst, dst_blocks, src, src_blocks, same(4))


def test_mixed_and_strided_lists(linked_pair: Pair) -> None:
    src, dst = linked_pair.b.blocks("src"), linked_pair.a.blocks("dst")
    every_second = np.arange(6, dtype=np.int64)[::2]
    linked_pair.a.process.pull_blocks(linked_pair.b.blocks_key(), "dst", src_blocks=every_second, dst_blocks=[5, 1, 3])
    expect_blocks(dst, [5, 1, 3], src, [0, 2, 4], same(4))


@pytest.mark.parametrize(
    ("ranges", "pairs"),
    [
        ({"src_layer_range": range(1, 2), "dst_layer_range": range(1)}, [(0, 2), (1, 3)]),
        ({"src_layer_range": range(1, 3), "dst_layer_range": range(2, 4), "tensor_num_per_layer": 1}, [(2, 1), (3, 2)]),
        ({"src_layer_range": range(2)}, same(4)),
        ({"dst_layer_range": range(0)}, same(4)),
    ],
)
def test_layer_ranges(linked_pair: Pair, ranges: dict, pairs: list[tuple]) -> None:
    src, dst = linked_pair.b.blocks("src"), linked_pair.a.blocks("dst")
    linked_pair.a.process.pull_blocks(linked_pair.b.blocks_key(), "dst", [4, 1], [0, 5], **ranges)
    expect_blocks(dst, [0, 5], src, [4, 1], pairs)


def test_caches_of_different_numbers_of_blocks(linked_pair: Pair) -> None:
    src, dst = linked_pair.b.blocks("src", entries=9), linked_pair.a.blocks("dst", entries=3)
    linked_pair.a.process.pull_blocks(linked_pair.b.blocks_key(), "dst", [8, 0], [0, 2])
    expect_blocks(dst, [0, 2], src, [8, 0], same(4))


def test_odd_number_of_tensors(linked_pair: Pair) -> None:
    src, dst = linked_pair.b.blocks("src", tensors=3), linked_pair.a.blocks("dst", tensors=3)
    linked_pair.a.process.pull_blocks(linked_pair.b.blocks_key(), "dst", [1], [2])
    expect_blocks(dst, [2], src, [1], same(3))


def test_many_blocks_of_odd_size(linked_pair: Pair) -> None:
    """More pieces than one system call takes."""
    rng = np.random.default_rng(5)
    src = linked_pair.b.blocks("src", tensors=2, entries=3000, entry_bytes=777)
    dst = linked_pair.a.blocks("dst", tensors=2, entries=3000, entry_bytes=777)
    src_blocks, dst_blocks = rng.integers(0, 3000, 2500), rng.permutation(3000)[:2500]
    linked_pair.a.process.pull_blocks(linked_pair.b.blocks_key(), "dst", src_blocks, dst_blocks)
    for tensor in range(2):
        dst.tensor(tensor)[dst_blocks] = src.tensor(tensor)[src_blocks]
    linked_pair.check_only_path_used()


def test_models_are_separate(linked_pair: Pair) -> None:
    sources = [linked_pair.b.blocks(f"src{model}", model_id=model, entry_bytes=64 + model) for model in range(3)]
    for model, src in enumerate(sources):
        dst = linked_pair.a.blocks(f"dst{model}", model_id=model, entry_bytes=64 + model)
        linked_pair.a.process.pull_blocks(linked_pair.b.blocks_key(model), f"dst{model}", [model], [5])
        expect_blocks(dst, [5], src, [model], same(4))


def test_the_newest_cache_of_a_model_is_found(linked_pair: Pair) -> None:
    linked_pair.b.blocks("old")
    src, dst = linked_pair.b.blocks("new"), linked_pair.a.blocks("dst")
    linked_pair.a.process.pull_blocks(linked_pair.b.blocks_key(), "dst", [1], [1])
    expect_blocks(dst, [1], src, [1], same(4))


@pytest.mark.parametrize("dst_blocks", [[0], [3, 1], [4, 0, 2]])
@pytest.mark.parametrize("src_batch", [0, 2])
def test_contiguous_to_blocks(linked_pair: Pair, src_batch: int, dst_blocks: list[int]) -> None:
    src = linked_pair.b.cache("src", entries=3, entry_bytes=288)
    dst = linked_pair.a.blocks("dst")
    linked_pair.a.process.pull_blocks(src.key(src_batch), "dst", [], dst_blocks)
    expect_pieces(dst, dst_blocks, src, src_batch, same(4))


def test_contiguous_to_blocks_ends_with_a_short_piece(linked_pair: Pair) -> None:
    src = linked_pair.b.cache("src", entries=2, entry_bytes=250)
    dst = linked_pair.a.blocks("dst")
    linked_pair.a.process.pull_blocks(src.key(1), "dst", dst_blocks=[5, 2, 0])
    expect_pieces(dst, [5, 2, 0], src, 1, same(4))


def test_contiguous_to_blocks_with_layers(linked_pair: Pair) -> None:
    src, dst = linked_pair.b.cache("src", entry_bytes=192), linked_pair.a.blocks("dst")
    ranges = {"src_layer_range": range(1), "dst_layer_range": range(1, 2)}
    linked_pair.a.process.pull_blocks(src.key(1), "dst", (), (1, 0), **ranges)
    expect_pieces(dst, [1, 0], src, 1, [(2, 0), (3, 1)])


def test_contiguous_to_blocks_by_request_key_takes_the_bound_entry(linked_pair: Pair) -> None:
    keys = [CacheKey(2, 1), CacheKey(2, 2), CacheKey(2, 3)]
    src, dst = linked_pair.b.cache("src", entries=3, entry_bytes=192, key=keys), linked_pair.a.blocks("dst")
    linked_pair.a.process.pull_blocks(keys[2], "dst", [], [4, 5])
    expect_pieces(dst, [4, 5], src, 2, same(4))


def test_pulls_on_one_link_queue_up(linked_pair: Pair) -> None:
    """Several threads on one link: all succeed (spec api-datadist §10)."""
    src, dst = linked_pair.b.blocks("src", entry_bytes=100_000), linked_pair.a.blocks("dst", entry_bytes=100_000)
    key = linked_pair.b.blocks_key()
    calls = [("pull_blocks", (key, "dst", [5 - block], [block]), {}) for block in range(6)]
    assert linked_pair.a.process.parallel(calls) == [None] * 6
    expect_blocks(dst, [0, 1, 2, 3, 4, 5], src, [5, 4, 3, 2, 1, 0], same(4))


def test_a_late_destination_is_usable(linked_pair: Pair) -> None:
    """Registered, replaced and used while the link is up (client-patterns §3.1)."""
    src = linked_pair.b.blocks("src")
    for round_number in range(3):
        dst = linked_pair.a.blocks("dst")
        linked_pair.a.process.pull_blocks(linked_pair.b.blocks_key(), "dst", [round_number], [0])
        expect_blocks(dst, [0], src, [round_number], same(4))
        linked_pair.a.process.unregister("dst")
