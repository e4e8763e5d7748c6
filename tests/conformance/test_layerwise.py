"""Layer-wise pushes in the background, byte by byte (spec api-cachemanager §8)."""

from __future__ import annotations

import signal
import time
from typing import Any

import numpy as np
import pytest

from llm_datadist_ray import CacheKey, Placement, TransferConfig, TransferWithCacheKeyConfig
from tests.conformance.pair import SUCCESS, CacheRef, Pair
from tests.conformance.status import KV_CACHE_NOT_EXIST, NOT_YET_LINK, PARAM_INVALID, TIMEOUT

two_sided_only = pytest.mark.mode("two-sided")
remote_access_only = pytest.mark.mode("remote-access")
POOL = '{"memory_size": 1048576, "page_shift": 12}'
NUM_LAYERS = 3
TENSORS = 2 * NUM_LAYERS
WAIT_MS = 30_000


def config_of(
    dst: CacheRef,
    src_layers: range = range(NUM_LAYERS),
    dst_layers: range | None = None,
    *,
    src_batch: int = 0,
    dst_batch: int = 0,
) -> Any:
    """To the destination's layers, in the way of the pair's mode: by the addresses of their entry ``dst_batch``, or by
    the cache's id and that index."""
    dst_layers = src_layers if dst_layers is None else dst_layers
    if dst.end.remote_access:
        return TransferWithCacheKeyConfig(dst.key(dst_batch), src_layers, dst_layers, src_batch)
    addrs = dst.end.process.tensor_addrs(dst.name)
    offset = dst_batch * dst.layout.entry_bytes
    picked = [addrs[2 * layer + j] + offset for layer in dst_layers for j in range(2)]
    return TransferConfig(dst.end.cluster_id, picked, src_layers, src_batch)


def push(pair: Pair, configs: list[Any], *lists: Any, refuse: int | None = None, src: str = "src") -> list[Any]:
    """Results of a transfer whose layers are all ready, but for ``refuse``."""
    pair.a.process.start_layers(src, configs, *lists, num_ready=99, refuse=refuse)
    return pair.a.process.layer_results(WAIT_MS)[1]


def layer_pairs(src_layers: range, dst_layers: range) -> list[tuple[int, int]]:
    return [(2 * a + j, 2 * b + j) for a, b in zip(src_layers, dst_layers, strict=True) for j in range(2)]


def caches(pair: Pair, *, src: dict | None = None, dst: dict | None = None) -> tuple[CacheRef, CacheRef]:
    made = []
    for end, name, given in ((pair.a, "src", src), (pair.b, "dst", dst)):
        kwargs = {"tensors": TENSORS, **(given or {})}
        make = end.blocks if kwargs.pop("paged", False) else end.cache
        made.append(make(name, **kwargs))
    return made[0], made[1]


class TestEntries:
    """§8.3, no lists."""

    @pytest.mark.parametrize(("src_batch", "dst_batch"), [(0, 0), (5, 1), (2, 5)])
    def test_batches(self, linked_pair: Pair, src_batch: int, dst_batch: int) -> None:
        src, dst = caches(linked_pair)
        assert push(linked_pair, [config_of(dst, src_batch=src_batch, dst_batch=dst_batch)]) == [SUCCESS]
        for tensor in range(TENSORS):
            dst.tensor(tensor)[dst_batch] = src.tensor(tensor)[src_batch]
        assert linked_pair.a.process.layer_results(0) == (SUCCESS, [SUCCESS], [0, 1, 2])

    @pytest.mark.parametrize(
        ("src_layers", "dst_layers"), [(range(1, 3), range(2)), (range(2, 3), range(1)), (range(2), range(1, 3))]
    )
    def test_layers(self, linked_pair: Pair, src_layers: range, dst_layers: range) -> None:
        """§8.2, the quirk's Do: the q-th layer of one range to that of the other."""
        src, dst = caches(linked_pair)
        assert push(linked_pair, [config_of(dst, src_layers, dst_layers)]) == [SUCCESS]
        for src_tensor, dst_tensor in layer_pairs(src_layers, dst_layers):
            dst.tensor(dst_tensor)[0] = src.tensor(src_tensor)[0]
        assert linked_pair.a.process.layer_results(0)[2] == list(src_layers)

    def test_smaller_entries_fill_the_front_of_larger_ones(self, linked_pair: Pair) -> None:
        src, dst = caches(linked_pair, src={"entry_bytes": 50})
        assert push(linked_pair, [config_of(dst, src_batch=1, dst_batch=2)]) == [SUCCESS]
        for tensor in range(TENSORS):
            dst.tensor(tensor)[2, :50] = src.tensor(tensor)[1]

    def test_several_destinations(self, linked_pair: Pair) -> None:
        """In the order of layers and of the list; they share a status, being of one cluster."""
        src, dst = caches(linked_pair)
        other = linked_pair.b.cache("other", tensors=TENSORS)
        configs = [config_of(dst, range(2)), config_of(other, range(1, 3), range(2), src_batch=2, dst_batch=3)]
        assert push(linked_pair, configs) == [SUCCESS, SUCCESS]
        for src_tensor, dst_tensor in layer_pairs(range(2), range(2)):
            dst.tensor(dst_tensor)[0] = src.tensor(src_tensor)[0]
        for src_tensor, dst_tensor in layer_pairs(range(1, 3), range(2)):
            other.tensor(dst_tensor)[3] = src.tensor(src_tensor)[2]

    def test_a_layer_goes_when_it_is_ready_and_not_before(self, linked_pair: Pair) -> None:
        """§8.2: what has arrived is what the synchronizer has let go."""
        src, dst = caches(linked_pair)
        linked_pair.a.process.start_layers("src", [config_of(dst)], num_ready=0, refuse=None)
        for layer in range(NUM_LAYERS):
            assert linked_pair.a.process.layer_results(1)[:2] == (TIMEOUT, [TIMEOUT])
            linked_pair.check_memory()
            linked_pair.a.process.release_layers(1)
            for tensor in (2 * layer, 2 * layer + 1):
                dst.tensor(tensor)[0] = src.tensor(tensor)[0]
            _wait_for_tensor(dst, 2 * layer + 1)
        assert linked_pair.a.process.layer_results(WAIT_MS) == (SUCCESS, [SUCCESS], [0, 1, 2])

    def test_large(self, linked_pair: Pair) -> None:
        size = {"entries": 2, "entry_bytes": 1_000_003}
        src, dst = caches(linked_pair, src=size, dst=size)
        assert push(linked_pair, [config_of(dst, src_batch=1)]) == [SUCCESS]
        for tensor in range(TENSORS):
            dst.tensor(tensor)[0] = src.tensor(tensor)[1]
        linked_pair.check_only_path_used()

    def test_into_a_pool_also_on_the_host(self, idle_pair: Pair) -> None:
        idle_pair.a.init(listen=False)
        idle_pair.b.init(listen=True, mem_pool_cfg=POOL, host_mem_pool_cfg=POOL)
        idle_pair.link()
        src = idle_pair.a.cache("src", tensors=TENSORS)
        for placement in Placement:
            dst = idle_pair.b.allocate(f"dst{placement}", tensors=TENSORS, placement=placement)
            assert push(idle_pair, [config_of(dst, src_batch=1, dst_batch=2)]) == [SUCCESS]
            for tensor in range(TENSORS):
                dst.tensor(tensor)[2] = src.tensor(tensor)[1]

    @remote_access_only
    def test_blocks_source_without_lists_is_one_entry(self, linked_pair: Pair) -> None:
        """§8.3, the upstream sample: block 0 of each tensor to block 0."""
        src, dst = caches(linked_pair, src={"paged": True}, dst={"paged": True})
        config = TransferWithCacheKeyConfig(linked_pair.b.blocks_key(), range(NUM_LAYERS), range(NUM_LAYERS))
        assert push(linked_pair, [config]) == [SUCCESS]
        for tensor in range(TENSORS):
            dst.tensor(tensor)[0] = src.tensor(tensor)[0]

    @two_sided_only
    def test_blocks_source_to_addresses_is_one_entry(self, linked_pair: Pair) -> None:
        src, dst = caches(linked_pair, src={"paged": True})
        assert push(linked_pair, [config_of(dst, dst_batch=3)]) == [SUCCESS]
        for tensor in range(TENSORS):
            dst.tensor(tensor)[3] = src.tensor(tensor)[0]

    @two_sided_only
    def test_an_address_may_be_anywhere_inside(self, linked_pair: Pair) -> None:
        """Raw addresses know no entries: K into the middle of one, V across two, and the very last bytes."""
        src, dst = caches(linked_pair, src={"entry_bytes": 40})
        addrs = linked_pair.b.process.tensor_addrs("dst")
        last = 6 * 96 - 40
        config = TransferConfig(2, [addrs[0] + 7, addrs[1] + 80, addrs[4] + last, addrs[4]], range(2))
        assert push(linked_pair, [config]) == [SUCCESS]
        for src_tensor, (dst_tensor, offset) in enumerate([(0, 7), (1, 80), (4, last), (4, 0)]):
            dst.flat(dst_tensor)[offset : offset + 40] = src.tensor(src_tensor)[0]


class TestBlocks:
    """§8.3, both lists."""

    @pytest.mark.parametrize("form", [list, np.int32])
    @pytest.mark.parametrize("size", [None, 0, 96])
    @pytest.mark.parametrize(
        ("src_blocks", "dst_blocks"), [([5, 0, 3], [1, 4, 2]), ([0, 1, 2], [3, 4, 5]), ([2, 2], [0, 5])]
    )
    def test_blocks(self, linked_pair: Pair, src_blocks: list, dst_blocks: list, size: int | None, form: Any) -> None:
        src, dst = caches(linked_pair, src={"paged": True}, dst={"paged": True})
        lists = [blocks if form is list else np.array(blocks, form) for blocks in (src_blocks, dst_blocks)]
        config = config_of(dst, range(1, 3), range(2))
        if linked_pair.remote_access:
            config = TransferWithCacheKeyConfig(linked_pair.b.blocks_key(), range(1, 3), range(2))
        assert push(linked_pair, [config], *lists, size) == [SUCCESS]
        for src_tensor, dst_tensor in layer_pairs(range(1, 3), range(2)):
            dst.tensor(dst_tensor)[dst_blocks] = src.tensor(src_tensor)[src_blocks]

    def test_many(self, linked_pair: Pair) -> None:
        size = {"paged": True, "tensors": 2, "entries": 3000, "entry_bytes": 777}
        src, dst = caches(linked_pair, src=size, dst=size)
        rng = np.random.default_rng(6)
        src_blocks, dst_blocks = rng.integers(0, 3000, 2500), rng.permutation(3000)[:2500]
        config = config_of(dst, range(1))
        if linked_pair.remote_access:
            config = TransferWithCacheKeyConfig(linked_pair.b.blocks_key(), range(1), range(1))
        assert push(linked_pair, [config], src_blocks.tolist(), dst_blocks.tolist()) == [SUCCESS]
        for tensor in range(2):
            dst.tensor(tensor)[dst_blocks] = src.tensor(tensor)[src_blocks]


class TestEntryToBlocks:
    """§8.3, destination blocks only; with the remainder of §5.6."""

    @pytest.mark.parametrize("src_batch", [0, 2])
    @pytest.mark.parametrize(("entry_bytes", "dst_blocks"), [(288, [4, 0, 2]), (288, [1]), (250, [5, 2, 0]), (96, [3])])
    def test_pieces(self, linked_pair: Pair, entry_bytes: int, dst_blocks: list[int], src_batch: int) -> None:
        src, dst = caches(linked_pair, src={"entries": 3, "entry_bytes": entry_bytes}, dst={"paged": True})
        config = config_of(dst, range(2), range(1, 3), src_batch=src_batch)
        assert push(linked_pair, [config], None, dst_blocks, 96) == [SUCCESS]
        for src_tensor, dst_tensor in layer_pairs(range(2), range(1, 3)):
            for piece, block in enumerate(dst_blocks):
                data = src.tensor(src_tensor)[src_batch, piece * 96 : (piece + 1) * 96]
                dst.tensor(dst_tensor)[block, : len(data)] = data

    @two_sided_only
    def test_the_callers_block_size_rules_at_an_address(self, linked_pair: Pair) -> None:
        """Raw addresses know no blocks."""
        src, dst = caches(linked_pair, src={"entries": 1, "entry_bytes": 100})
        assert push(linked_pair, [config_of(dst)], [], [7, 0, 2], 40) == [SUCCESS]
        for tensor in range(TENSORS):
            for piece, block in enumerate([7, 0, 2]):
                data = src.tensor(tensor)[0, piece * 40 : (piece + 1) * 40]
                dst.flat(tensor)[block * 40 : block * 40 + len(data)] = data


class TestChecks:
    """§8.3, the last column, and §7: nothing arrives."""

    @pytest.mark.parametrize(
        ("src", "dst", "batches", "lists"),
        [
            ({}, {}, (6, 0), ()),
            ({"entry_bytes": 97}, {"entries": 1}, (0, 0), ()),
            ({"paged": True}, {}, (1, 0), ()),
            ({}, {"paged": True}, (0, 0), ([0], [0])),
            ({"paged": True}, {"paged": True}, (0, 0), ([6], [0])),
            ({"paged": True}, {"paged": True}, (0, 0), ([0], [6])),
            ({"paged": True}, {"paged": True}, (0, 0), ([0], [0], 95)),
            ({"entry_bytes": 288}, {"paged": True}, (0, 0), (None, [0], 0)),
            ({"entry_bytes": 288}, {"paged": True}, (0, 0), (None, [6], 96)),
            ({"entry_bytes": 288}, {"paged": True}, (0, 0), (None, [0, 1, 2, 3], 96)),
            ({"entry_bytes": 288}, {"paged": True}, (6, 0), (None, [0], 96)),
            ({"entries": 1}, {"paged": True}, (0, 0), (None, [0], 96)),
        ],
    )
    def test_param_invalid(self, linked_pair: Pair, src: dict, dst: dict, batches: tuple, lists: tuple) -> None:
        _, target = caches(linked_pair, src=src, dst=dst)
        assert push(linked_pair, [config_of(target, src_batch=batches[0])], *lists) == [PARAM_INVALID]

    @remote_access_only
    @pytest.mark.parametrize(
        ("src", "dst", "dst_batch", "dst_layers", "lists"),
        [
            ({}, {}, 6, range(3), ()),
            ({}, {"paged": True}, 1, range(3), ()),
            ({}, {"tensors": 4}, 0, range(3), ()),
            ({"entry_bytes": 288}, {"paged": True}, 0, range(3), (None, [0], 48)),
            ({"entry_bytes": 288}, {}, 0, range(3), (None, [0], 96)),
            ({"paged": True, "entry_bytes": 48}, {"paged": True}, 0, range(3), ([0], [0])),
            ({"remote_accessible": False}, {}, 0, range(3), ()),
            ({}, {"remote_accessible": False}, 0, range(3), ()),
        ],
    )
    def test_what_only_remote_access_can_tell(
        self, linked_pair: Pair, src: dict, dst: dict, dst_batch: int, dst_layers: range, lists: tuple
    ) -> None:
        _, target = caches(linked_pair, src=src, dst=dst)
        results = push(linked_pair, [config_of(target, dst_layers=dst_layers, dst_batch=dst_batch)], *lists)
        assert results == [PARAM_INVALID]
        for tensor in range(min(4, target.layout.num_tensors)) if target.layout.num_tensors == 4 else ():
            target.tensor(tensor)[0] = linked_pair.a.cache_ref("src").tensor(tensor)[0]  # its layers 0 and 1 are there

    @two_sided_only
    @pytest.mark.parametrize("shift", [-1, 1, 96, -(1 << 20)])
    def test_an_address_outside(self, linked_pair: Pair, shift: int) -> None:
        """§8.3: PARAM_INVALID where upstream leaves it to the caller, by one byte already."""
        caches(linked_pair)
        addrs = linked_pair.b.process.tensor_addrs("dst")
        at = addrs[0] - 1 if shift == -1 else addrs[0] + 5 * 96 + shift
        assert push(linked_pair, [TransferConfig(2, [at, addrs[1]], range(1))]) == [PARAM_INVALID]

    @two_sided_only
    def test_an_address_of_a_cache_that_is_gone(self, linked_pair: Pair) -> None:
        _, dst = caches(linked_pair)
        config = config_of(dst)
        linked_pair.b.process.unregister("dst")
        assert push(linked_pair, [config]) == [PARAM_INVALID]

    @two_sided_only
    def test_blocks_that_leave_the_memory_at_an_address(self, linked_pair: Pair) -> None:
        """Six blocks fit behind the tensor's start, and five behind the second block's."""
        src, dst = caches(linked_pair, src={"paged": True}, dst={"paged": True})
        assert push(linked_pair, [config_of(dst, range(1), dst_batch=1)], [0], [5]) == [PARAM_INVALID]
        assert push(linked_pair, [config_of(dst, range(1), dst_batch=1)], [0], [4]) == [SUCCESS]
        for tensor in range(2):
            dst.tensor(tensor)[5] = src.tensor(tensor)[0]

    def test_unknown_caches(self, linked_pair: Pair) -> None:
        _, dst = caches(linked_pair)
        config = config_of(dst)
        if linked_pair.remote_access:
            linked_pair.b.process.unregister("dst")
            assert push(linked_pair, [config]) == [KV_CACHE_NOT_EXIST]
        linked_pair.a.process.unregister("src")
        assert push(linked_pair, [config]) == [KV_CACHE_NOT_EXIST]

    def test_not_linked(self, pair: Pair) -> None:
        _, dst = caches(pair)
        assert push(pair, [config_of(dst)]) == [NOT_YET_LINK]

    @remote_access_only
    def test_id_zero_is_the_request_key_zero(self, linked_pair: Pair) -> None:
        """§7, as push_cache."""
        src, dst = caches(linked_pair, dst={"key": [CacheKey(2, 0, 0)]})
        key = type(dst.key())(2, 0)
        config = TransferWithCacheKeyConfig(key, range(NUM_LAYERS), range(NUM_LAYERS), 1)
        assert push(linked_pair, [config]) == [SUCCESS]
        for tensor in range(TENSORS):
            dst.tensor(tensor)[0] = src.tensor(tensor)[1]


class TestStops:
    """§8.2."""

    def test_a_refusal_leaves_earlier_layers(self, linked_pair: Pair) -> None:
        src, dst = caches(linked_pair)
        assert push(linked_pair, [config_of(dst)], refuse=1) == [PARAM_INVALID]
        for tensor in range(2):
            dst.tensor(tensor)[0] = src.tensor(tensor)[0]
        assert linked_pair.a.process.layer_results(0) == (PARAM_INVALID, [PARAM_INVALID], [0, 1])

    def test_a_failure_leaves_earlier_layers(self, linked_pair: Pair) -> None:
        """The peer's cache goes away in between."""
        src, dst = caches(linked_pair)
        linked_pair.a.process.start_layers("src", [config_of(dst)], num_ready=1, refuse=None)
        for tensor in range(2):
            dst.tensor(tensor)[0] = src.tensor(tensor)[0]
        _wait_for_tensor(dst, 1)
        linked_pair.b.process.unregister("dst")
        linked_pair.a.process.release_layers(2)
        code = KV_CACHE_NOT_EXIST if linked_pair.remote_access else PARAM_INVALID
        assert linked_pair.a.process.layer_results(WAIT_MS) == (code, [code], [0, 1])

    def test_time_out(self, idle_pair: Pair) -> None:
        """§8.3: sync_kv_timeout for each layer."""
        idle_pair.a.init(listen=False, sync_kv_timeout=200)
        idle_pair.b.init(listen=True)
        idle_pair.link()
        _, dst = caches(idle_pair)
        config = config_of(dst)
        idle_pair.b.process.signal(signal.SIGSTOP)
        try:
            assert push(idle_pair, [config]) == [TIMEOUT]
        finally:
            idle_pair.b.process.signal(signal.SIGCONT)


def _wait_for_tensor(dst: CacheRef, index: int) -> None:
    """Until the tensor holds what it should."""
    start = dst.layout.offset(index)
    stop = start + dst.layout.tensor_bytes
    deadline = time.monotonic() + 10
    while dst.end.process.read(dst.name)[start:stop] != dst.expected[start:stop].tobytes():
        assert time.monotonic() < deadline, f"tensor {index} did not arrive"
