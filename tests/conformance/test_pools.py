"""Allocation from memory pools (spec api-cachemanager §2.1, §2.3, §4; api-config §3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llm_datadist_ray import BlocksCacheKey, CacheDesc, CacheKey, DataType, Placement
from llm_datadist_ray._native import PoolInfo
from tests.conformance.conftest import PATHS
from tests.conformance.pair import End, Pair
from tests.conformance.status import FAILED, KV_CACHE_NOT_EXIST, OUT_OF_MEMORY, PARAM_INVALID, raises

DEVICE, HOST = Placement.DEVICE, Placement.HOST
INVALID_ID = 2**64 - 1
PAGE = 4096
NUM_PAGES = 64
POOL = f'{{"memory_size": {NUM_PAGES * PAGE}, "page_shift": 12}}'


@pytest.fixture(scope="module")
def local_pair() -> Iterator[Pair]:
    pair = Pair(PATHS[0], "two-sided")
    yield pair
    pair.stop()


@pytest.fixture
def end(local_pair: Pair) -> Iterator[End]:
    """An initialised process with pools. After the test all its bytes must be what the oracle says."""
    end = local_pair.a
    end.init(listen=False, mem_pool_cfg=POOL, host_mem_pool_cfg=POOL)
    try:
        yield end
        end.check_memory()
    finally:
        local_pair.reset()


def info(end: End, placement: Placement = DEVICE) -> PoolInfo:
    return end.process.manage("pool_status", placement)


def free(end: End, name: str, *, blocks: bool = False) -> None:
    end.forget_cache(name)
    end.process.manage("deallocate_blocks_cache" if blocks else "deallocate_cache", name)


def test_ids_count_up_from_one_for_both_kinds_and_both_ways(end: End) -> None:
    """§2.1."""
    made = [
        end.allocate("one"),
        end.cache("two"),
        end.blocks("three"),
        end.allocate("four", blocks=True),
        end.allocate("five", placement=HOST),
    ]
    assert [cache.cache_id for cache in made] == [1, 2, 3, 4, 5]
    free(end, "one")
    assert end.allocate("six").cache_id == 6


@pytest.mark.parametrize("placement", [DEVICE, HOST])
@pytest.mark.parametrize("tensor_bytes", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_tensors_have_whole_pages_of_their_own(end: End, placement: Placement, tensor_bytes: int) -> None:
    """§4.1: sizes are rounded up to pages, tensor by tensor; what is written to one changes no other one."""
    names = [f"cache{k}" for k in range(4)]
    for name in names:
        end.allocate(name, tensors=3, entries=1, entry_bytes=tensor_bytes, placement=placement)
    addrs = [addr for name in names for addr in end.process.tensor_addrs(name)]
    pages = -(-tensor_bytes // PAGE)
    assert all(addr % PAGE == 0 for addr in addrs)
    taken = {page for addr in addrs for page in range(addr // PAGE, addr // PAGE + pages)}
    assert len(taken) == 12 * pages
    found = info(end, placement)
    assert (found.size_bytes, found.page_bytes) == (NUM_PAGES * PAGE, PAGE)
    assert found.used_bytes == 12 * pages * PAGE
    assert found.free_bytes == (NUM_PAGES - 12 * pages) * PAGE
    assert info(end, HOST if placement == DEVICE else DEVICE).used_bytes == 0


def test_out_of_memory_keeps_nothing(end: End) -> None:
    """§4.1. The text has the sizes; what fits can be had afterwards, to the last page."""
    end.allocate("first", tensors=1, entries=4, entry_bytes=8 * PAGE, key=[CacheKey(1, 1)])
    before = info(end)
    with raises(OUT_OF_MEMORY, str(4 * 9 * PAGE)):
        end.allocate("second", tensors=1, entries=4, entry_bytes=9 * PAGE, key=[CacheKey(1, 2)])
    with raises(OUT_OF_MEMORY):
        end.allocate("third", tensors=NUM_PAGES // 2 + 1, entries=1, entry_bytes=1)  # the last does not fit
    for huge in (
        CacheDesc(1, [2**40, 2**20], DataType.DT_INT8),
        CacheDesc(2**16, [1], DataType.DT_INT8),
        CacheDesc(2**16 + 1, [1], DataType.DT_INT8),
        CacheDesc(2**32 - 1, [1], DataType.DT_INT8),
    ):
        with raises(OUT_OF_MEMORY):
            end.process.manage("allocate_blocks_cache", huge, BlocksCacheKey(1, 3))
    assert info(end) == before
    free(end, "first")
    end.process.manage("remove_cache_key", CacheKey(1, 1))
    keys = [CacheKey(1, 2), CacheKey(1, 1)]
    end.allocate("all", tensors=2, entries=NUM_PAGES // 2, entry_bytes=PAGE, key=keys)
    assert (info(end).free_bytes, info(end).largest_free_bytes) == (0, 0)
    with raises(OUT_OF_MEMORY):
        end.allocate("one more", tensors=1, entries=1, entry_bytes=1)


def test_memory_comes_before_keys(end: End) -> None:
    """§4.1, the order of its rows."""
    end.allocate("bound", tensors=1, key=[CacheKey(1, 1)])
    with raises(OUT_OF_MEMORY):
        end.allocate("large", tensors=1, entries=2, entry_bytes=NUM_PAGES * PAGE, key=[CacheKey(1, 1)] * 3)


def test_freed_neighbours_join(end: End) -> None:
    """Freed in any order, the whole pool can be had in one piece again."""
    names = [f"cache{k}" for k in range(NUM_PAGES)]
    for name in names:
        end.allocate(name, tensors=1, entries=1, entry_bytes=PAGE)
    for name in names[::2]:
        free(end, name)
    found = info(end)
    assert (found.num_free_ranges, found.largest_free_bytes) == (NUM_PAGES // 2, PAGE)
    assert found.free_bytes == NUM_PAGES // 2 * PAGE
    with raises(OUT_OF_MEMORY):
        end.allocate("two pages", tensors=1, entries=1, entry_bytes=2 * PAGE)
    for name in names[-1::-2]:
        free(end, name)
    assert (info(end).num_free_ranges, info(end).largest_free_bytes) == (1, NUM_PAGES * PAGE)
    end.allocate("all", tensors=1, entries=1, entry_bytes=NUM_PAGES * PAGE)


class TestKeyConflicts:
    """§2.3."""

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ([CacheKey(1, 5, 6)], [CacheKey(1, 5, 6)]),
            ([CacheKey(1, 5, 6)], [CacheKey(1, 7), CacheKey(9, 5, 6)]),
            ([CacheKey(1, INVALID_ID, 6, 5)], [CacheKey(1, 1, 6, 5)]),
            ([], [CacheKey(1, 5), CacheKey(1, 5)]),
            ([], [CacheKey(1, INVALID_ID, 0, 5), CacheKey(1, 7, 0, 5)]),
            (BlocksCacheKey(1, 6), BlocksCacheKey(2, 6)),
        ],
    )
    @pytest.mark.parametrize("registered", [False, True])
    def test_refused(self, end: End, first: Any, second: Any, registered: bool) -> None:
        """Nothing is kept: no memory, no key; the first binding stays."""
        blocks = isinstance(first, BlocksCacheKey)
        make: Callable = end.cache if registered else end.allocate
        make("first", blocks=blocks, key=first)
        before = info(end)
        with raises(PARAM_INVALID):
            end.allocate("second", blocks=blocks, key=second)
        assert info(end) == before
        if not blocks:
            end.allocate("others", key=[key for key in second if key.req_id == 7 and not key.is_prefix_key])

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ([CacheKey(1, 5, 6)], [CacheKey(1, 5, 7), CacheKey(1, 6, 6), CacheKey(1, 5, 6, 5)]),
            ([CacheKey(1, INVALID_ID)] * 3, [CacheKey(1, INVALID_ID)] * 3),
            ([], [CacheKey(1, 5, 0), CacheKey(1, 5, 1)]),
            (BlocksCacheKey(1, 6), BlocksCacheKey(1, 7)),
            (None, None),
        ],
    )
    def test_no_conflict(self, end: End, first: Any, second: Any) -> None:
        blocks = not isinstance(first, list)
        end.allocate("first", blocks=blocks, key=first)
        end.allocate("second", blocks=blocks, key=second)

    def test_a_placeholder_beside_a_blocks_cache_of_the_model(self, end: End) -> None:
        """The quirk's Do, both ways round."""
        end.allocate("paged", blocks=True, key=BlocksCacheKey(1, 6))
        end.allocate("plain", key=[CacheKey(1, INVALID_ID, 6)])
        end.allocate("plain2", key=[CacheKey(1, INVALID_ID, 7)])
        end.allocate("paged2", blocks=True, key=BlocksCacheKey(1, 7))

    @pytest.mark.parametrize("num_keys", [0, 5, 6])
    def test_up_to_one_key_for_each_entry(self, end: End, num_keys: int) -> None:
        end.allocate("cache", key=[CacheKey(1, k) for k in range(num_keys)])
        before = info(end)
        with raises(PARAM_INVALID, "7 cache_keys"):
            end.allocate("more", key=[CacheKey(1, 10 + k) for k in range(7)])
        with raises(PARAM_INVALID, "7 cache_keys"):
            end.allocate("more", key=[CacheKey(1, INVALID_ID)] * 7)
        assert info(end) == before
        end.allocate("again", key=[CacheKey(1, 10)])

    def test_a_key_is_free_when_its_cache_is(self, end: End) -> None:
        end.allocate("paged", blocks=True, key=BlocksCacheKey(1, 6))
        free(end, "paged", blocks=True)
        end.allocate("paged", blocks=True, key=BlocksCacheKey(1, 6))
        end.allocate("plain", key=[CacheKey(1, 5)])
        end.process.manage("remove_cache_key", CacheKey(1, 5))
        end.allocate("plain2", key=[CacheKey(1, 5)])


class TestDeallocate:
    """§4.3, §2.4."""

    @pytest.mark.parametrize("blocks", [False, True])
    def test_frees(self, end: End, blocks: bool) -> None:
        end.allocate("cache", blocks=blocks, key=BlocksCacheKey(1) if blocks else None)
        assert info(end).used_bytes == 4 * PAGE
        free(end, "cache", blocks=blocks)
        assert info(end).used_bytes == 0
        assert end.process.tensor_addrs("cache") == []
        free_again = "deallocate_blocks_cache" if blocks else "deallocate_cache"
        end.process.manage(free_again, "cache")

    @pytest.mark.parametrize(
        ("kind", "blocks"),
        [("registered", False), ("registered", True), ("unregistered", False), ("unregistered", True), ("CPU", True)],
    )
    def test_what_is_not_of_the_pool_is_left_alone(self, end: End, kind: str, blocks: bool) -> None:
        """A success; the object's addresses go, the cache and its memory stay."""
        cache = end.cpu_cache("cache") if kind == "CPU" else end.cache("cache", blocks=blocks)
        end.allocate("other", blocks=blocks)
        if kind == "unregistered":
            end.process.unregister("cache")
        end.process.manage("deallocate_blocks_cache" if blocks else "deallocate_cache", "cache")
        assert end.process.tensor_addrs("cache") == []
        assert info(end).used_bytes == 4 * PAGE
        if kind == "registered" and not blocks:
            end.process.manage("copy_cache", "cache", "cache", 1, 0)  # still known
            for tensor in range(4):
                cache.tensor(tensor)[1] = cache.tensor(tensor)[0]

    def test_keys_keep_the_memory(self, end: End) -> None:
        """The id alone is not the last reference; every kind of key is one."""
        keys = [CacheKey(1, 1), CacheKey(1, INVALID_ID), CacheKey(1, INVALID_ID, 0, 2)]
        end.allocate("cache", key=keys)
        end.process.manage("deallocate_cache", "cache")
        assert end.process.tensor_addrs("cache") == []
        for key in (CacheKey(1, 3), CacheKey(1, INVALID_ID), CacheKey(1, 1, 1), keys[0], keys[0]):
            assert info(end).used_bytes == 4 * PAGE
            end.process.manage("remove_cache_key", key)
        assert info(end).used_bytes == 4 * PAGE
        end.forget_cache("cache")
        end.process.manage("remove_cache_key", keys[2])
        assert info(end).used_bytes == 0

    def test_keys_first_and_then_the_id(self, end: End) -> None:
        end.allocate("cache", key=[CacheKey(1, 1)])
        end.process.manage("remove_cache_key", CacheKey(1, 1))
        assert info(end).used_bytes == 4 * PAGE
        free(end, "cache")
        assert info(end).used_bytes == 0

    def test_keys_of_registered_caches_stay(self, end: End) -> None:
        """§4.4: the name is still taken."""
        end.cache("registered", key=[CacheKey(1, 1)])
        end.process.manage("remove_cache_key", CacheKey(1, 1))
        with raises(PARAM_INVALID):
            end.allocate("allocated", key=[CacheKey(1, 1)])

    def test_unregistering_an_allocated_cache_frees_it_with_its_keys(self, end: End) -> None:
        """§3.5."""
        for blocks, key in ((False, [CacheKey(1, 1)]), (True, BlocksCacheKey(1))):
            for _ in range(2):
                end.allocate("cache", blocks=blocks, key=key)
                end.forget_cache("cache")
                end.process.unregister("cache")
                assert info(end).used_bytes == 0


@pytest.mark.parametrize("blocks", [False, True])
def test_caches_of_before_finalize_are_dead(end: End, blocks: bool) -> None:
    """§2.1: ids begin anew, so that its id is that of another cache now."""
    dead = end.allocate("dead", blocks=blocks)
    end.forget_cache("dead")
    end.process.finalize()
    end.init(listen=False, mem_pool_cfg=POOL)
    live = end.allocate("live", blocks=blocks)
    assert live.cache_id == dead.cache_id
    before = info(end)
    with raises(KV_CACHE_NOT_EXIST):
        if blocks:
            end.process.manage("copy_blocks", "dead", {0: [1]})
        else:
            end.process.manage("copy_cache", "dead", "live", 1, 0)
    with raises(KV_CACHE_NOT_EXIST):
        if blocks:
            end.process.pull_blocks(BlocksCacheKey(2), "dead", [0], [0])
        else:
            end.process.pull_cache(CacheKey(2, 1), "dead")
    end.process.manage("deallocate_blocks_cache" if blocks else "deallocate_cache", "dead")
    assert end.process.tensor_addrs("dead") == []
    assert info(end) == before
    if blocks:
        end.process.manage("copy_blocks", "live", {0: [1]})
    else:
        end.process.manage("copy_cache", "live", "live", 1, 0)
    for tensor in range(4):
        live.tensor(tensor)[1] = live.tensor(tensor)[0]


def test_after_finalize(end: End) -> None:
    """§1."""
    end.allocate("cache")
    end.forget_cache("cache")
    end.process.keep_manager()
    end.process.finalize()
    for method, args in (
        ("deallocate_cache", ("cache",)),
        ("remove_cache_key", (CacheKey(1, 1),)),
        ("pool_status", (DEVICE,)),
    ):
        with raises(FAILED, "closed"):
            end.process.use_kept_manager(method, *args)
