"""Who keeps an allocated cache, and which pulls use up a key (spec api-cachemanager §2.4, §5.5, §5.7)."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from llm_datadist_ray import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, Placement
from tests.conformance.pair import SUCCESS, CacheRef, End, Pair
from tests.conformance.status import KV_CACHE_NOT_EXIST, PARAM_INVALID, TIMEOUT, raises

INVALID_ID = 2**64 - 1
POOL = '{"memory_size": 1048576, "page_shift": 12}'
USED = 4 * 4096
two_sided_only = pytest.mark.mode("two-sided")
remote_access_only = pytest.mark.mode("remote-access")

REQUESTS = [CacheKey(2, 11), CacheKey(2, 12), CacheKey(2, 13)]
PREFIX = CacheKey(2, INVALID_ID, 0, 21)


@pytest.fixture
def pool_pair(idle_pair: Pair) -> Pair:
    """Linked, both with pools."""
    idle_pair.init(mem_pool_cfg=POOL, host_mem_pool_cfg=POOL)
    idle_pair.link()
    return idle_pair


def used(end: End) -> int:
    return end.process.manage("pool_status", Placement.DEVICE).used_bytes


def deallocate(cache: CacheRef, *, blocks: bool = False) -> None:
    """The bytes stay as they are while keys are left."""
    cache.end.process.manage("deallocate_blocks_cache" if blocks else "deallocate_cache", cache.name)


def pull(pair: Pair, key: Any, dst: CacheRef, src: CacheRef, src_batch: int, **kwargs: Any) -> None:
    """All of an entry, into entry 0."""
    pair.a.process.pull_cache(key, dst.name, **kwargs)
    for tensor in range(4):
        dst.tensor(tensor)[0] = src.tensor(tensor)[src_batch]


def is_gone(pair: Pair, key: Any) -> None:
    with raises(KV_CACHE_NOT_EXIST):
        pair.a.process.pull_cache(key, "dst")


@two_sided_only
class TestTwoSided:
    def test_a_request_key_is_used_up(self, pool_pair: Pair) -> None:
        """§5.5 row 1. The cache itself stays while its id is held, for pulls by id too."""
        src, dst = pool_pair.b.allocate("src", key=REQUESTS), pool_pair.a.cache("dst")
        pull(pool_pair, REQUESTS[1], dst, src, 1)
        is_gone(pool_pair, REQUESTS[1])
        pull(pool_pair, src.key(1), dst, src, 1)
        pull(pool_pair, REQUESTS[2], dst, src, 2)
        pull(pool_pair, REQUESTS[0], dst, src, 0)
        pull(pool_pair, src.key(2), dst, src, 2)
        assert used(pool_pair.b) == USED
        pool_pair.b.forget_cache("src")
        deallocate(src)
        assert used(pool_pair.b) == 0
        is_gone(pool_pair, src.key(1))

    def test_the_last_pull_frees_what_was_deallocated(self, pool_pair: Pair) -> None:
        """§2.4."""
        src, dst = pool_pair.b.allocate("src", key=REQUESTS[:2]), pool_pair.a.cache("dst")
        deallocate(src)
        pull(pool_pair, REQUESTS[0], dst, src, 0)
        assert used(pool_pair.b) == USED
        pull(pool_pair, REQUESTS[1], dst, src, 1)
        assert used(pool_pair.b) == 0
        pool_pair.b.forget_cache("src")
        is_gone(pool_pair, REQUESTS[1])
        is_gone(pool_pair, src.key(0))

    def test_by_id_and_index_a_bound_key_is_used_up_too(self, pool_pair: Pair) -> None:
        """§5.5 row 3: also when the id was given back and keys keep the cache."""
        src, dst = pool_pair.b.allocate("src", key=REQUESTS[:2]), pool_pair.a.cache("dst")
        pull(pool_pair, src.key(1), dst, src, 1)
        is_gone(pool_pair, REQUESTS[1])
        deallocate(src)
        pull(pool_pair, src.key(5), dst, src, 5)  # no key there: nothing is used up
        assert used(pool_pair.b) == USED
        pull(pool_pair, src.key(0), dst, src, 0)
        assert used(pool_pair.b) == 0
        pool_pair.b.forget_cache("src")

    def test_prefix_keys_are_not_used_up(self, pool_pair: Pair) -> None:
        """§5.5 row 2, and by id (the quirk's Do)."""
        src, dst = pool_pair.b.allocate("src", key=[CacheKey(2, INVALID_ID), PREFIX]), pool_pair.a.cache("dst")
        deallocate(src)
        for key in (PREFIX, PREFIX, src.key(1), src.key(1), PREFIX):
            pull(pool_pair, key, dst, src, 1)
        assert used(pool_pair.b) == USED
        pool_pair.b.forget_cache("src")
        pool_pair.b.process.manage("remove_cache_key", PREFIX)
        assert used(pool_pair.b) == 0
        is_gone(pool_pair, PREFIX)

    def test_registered_caches_keep_their_keys(self, pool_pair: Pair) -> None:
        src, dst = pool_pair.b.cache("src", key=REQUESTS), pool_pair.a.cache("dst")
        for key, batch in ((REQUESTS[1], 1), (REQUESTS[1], 1), (src.key(2), 2), (REQUESTS[2], 2)):
            pull(pool_pair, key, dst, src, batch)
        pool_pair.b.process.manage("remove_cache_key", REQUESTS[1])
        deallocate(src)
        pull(pool_pair, REQUESTS[1], dst, src, 1)

    def test_removed_keys_are_not_found(self, pool_pair: Pair) -> None:
        """§4.4."""
        src, dst = pool_pair.b.allocate("src", key=REQUESTS), pool_pair.a.cache("dst")
        pool_pair.b.process.manage("remove_cache_key", REQUESTS[0])
        is_gone(pool_pair, REQUESTS[0])
        pull(pool_pair, REQUESTS[1], dst, src, 1)

    def test_into_blocks(self, pool_pair: Pair) -> None:
        """§5.5: pull_blocks from a contiguous source uses keys up as pull_cache does."""
        src, dst = pool_pair.b.allocate("src", entry_bytes=192, key=REQUESTS), pool_pair.a.allocate("dst", blocks=True)
        for key, batch in ((REQUESTS[1], 1), (src.key(0), 0)):
            pool_pair.a.process.pull_blocks(key, "dst", [], [3, 5])
            for tensor in range(4):
                dst.tensor(tensor)[[3, 5]] = src.tensor(tensor)[batch].reshape(2, 96)
        for key in REQUESTS[:2]:
            with raises(KV_CACHE_NOT_EXIST):
                pool_pair.a.process.pull_blocks(key, "dst", [], [3, 5])

    def test_blocks_keys_are_not_used_up_and_go_with_their_cache(self, pool_pair: Pair) -> None:
        """§5.5 row 5, §2.4."""
        key = BlocksCacheKey(2, 6)
        src, dst = pool_pair.b.allocate("src", blocks=True, key=key), pool_pair.a.blocks("dst")
        for block in range(3):
            pool_pair.a.process.pull_blocks(key, "dst", [block], [5 - block])
            for tensor in range(4):
                dst.tensor(tensor)[5 - block] = src.tensor(tensor)[block]
        pool_pair.b.forget_cache("src")
        deallocate(src, blocks=True)
        assert used(pool_pair.b) == 0
        with raises(KV_CACHE_NOT_EXIST):
            pool_pair.a.process.pull_blocks(key, "dst", [0], [0])

    def test_layer_ranges_use_a_key_up_when_all_tensors_have_gone(self, pool_pair: Pair) -> None:
        """§5.5: for each key on its own, and a tensor pulled twice counts once."""
        src, dst = pool_pair.b.allocate("src", key=REQUESTS), pool_pair.a.cache("dst")
        first, second = ({"src_layer_range": range(k, k + 1), "dst_layer_range": range(k, k + 1)} for k in range(2))

        def pull_layer(key: Any, batch: int, ranges: dict) -> None:
            pool_pair.a.process.pull_cache(key, "dst", **ranges)
            layer = ranges["src_layer_range"].start
            for tensor in (2 * layer, 2 * layer + 1):
                dst.tensor(tensor)[0] = src.tensor(tensor)[batch]

        pull_layer(REQUESTS[0], 0, first)
        pull_layer(REQUESTS[0], 0, first)
        pull_layer(REQUESTS[1], 1, second)
        pull_layer(REQUESTS[1], 1, first)
        is_gone(pool_pair, REQUESTS[1])
        pull_layer(src.key(0), 0, second)  # the same key by the other name
        is_gone(pool_pair, REQUESTS[0])
        pull_layer(REQUESTS[2], 2, second)
        pull(pool_pair, REQUESTS[2], dst, src, 2)  # without a range all are taken at once
        is_gone(pool_pair, REQUESTS[2])

    def test_pulls_that_fail_use_nothing_up(self, pool_pair: Pair) -> None:
        """§5.5."""
        src, dst = pool_pair.b.allocate("src", key=REQUESTS), pool_pair.a.cache("dst")
        pool_pair.a.cache("large", entry_bytes=97)
        pool_pair.a.cache("odd", tensors=3)
        for name in ("large", "odd"):
            for key in (REQUESTS[0], src.key(0)):
                with raises(PARAM_INVALID):
                    pool_pair.a.process.pull_cache(key, name)
        pull(pool_pair, REQUESTS[0], dst, src, 0)

    def test_a_pull_that_times_out_uses_nothing_up(self, idle_pair: Pair) -> None:
        """§5.5: the link must be made again, and the key is still there."""
        pair = idle_pair
        pair.a.init(listen=False, sync_kv_timeout=200)
        pair.b.init(listen=True, mem_pool_cfg=POOL)
        pair.link()
        src, dst = pair.b.allocate("src", key=REQUESTS), pair.a.cache("dst")
        pair.b.process.signal(signal.SIGSTOP)
        try:
            with raises(TIMEOUT):
                pair.a.process.pull_cache(REQUESTS[0], "dst")
        finally:
            pair.b.process.signal(signal.SIGCONT)
        assert pair.a.process.unlink_clusters([pair.b.info()], 5000, True) == (SUCCESS, [SUCCESS])
        pair.link()
        pull(pair, REQUESTS[0], dst, src, 0)
        is_gone(pair, REQUESTS[0])

    def test_two_pulls_of_one_key_at_once_leave_none(self, pool_pair: Pair) -> None:
        """Whoever is too late is told so; whatever was served is right, and the memory goes back."""
        src, dst = pool_pair.b.allocate("src", key=REQUESTS[:1]), pool_pair.a.cache("dst")
        deallocate(src)
        outcomes = pool_pair.a.process.parallel([("pull_cache", (REQUESTS[0], "dst"), {})] * 4)
        for tensor in range(4):
            dst.tensor(tensor)[0] = src.tensor(tensor)[0]
        assert None in outcomes
        assert {error.status_code for error in outcomes if error is not None} <= {KV_CACHE_NOT_EXIST}
        pool_pair.b.forget_cache("src")
        assert used(pool_pair.b) == 0

    def test_memory_that_is_used_again_is_somebody_elses(self, pool_pair: Pair) -> None:
        """A pull by the old name finds nothing, one by the new name the new bytes."""
        dst = pool_pair.a.cache("dst")
        for round_number in range(5):
            src = pool_pair.b.allocate("src", key=[CacheKey(2, round_number)])
            deallocate(src)
            pull(pool_pair, CacheKey(2, round_number), dst, src, 0)
            pool_pair.b.forget_cache("src")
            assert used(pool_pair.b) == 0
            is_gone(pool_pair, CacheKey(2, round_number))


@remote_access_only
class TestRemoteAccess:
    """§5.7: nothing is used up, the peer learns nothing."""

    def test_ids(self, pool_pair: Pair) -> None:
        src, dst = pool_pair.b.allocate("src", key=REQUESTS), pool_pair.a.allocate("dst")
        for _ in range(3):
            pull(pool_pair, src.key(1), dst, src, 1)
        pool_pair.b.process.manage("remove_cache_key", REQUESTS[1])
        pull(pool_pair, src.key(1), dst, src, 1)
        pool_pair.b.forget_cache("src")
        deallocate(src)
        assert used(pool_pair.b) == USED  # two keys are left, and nobody can use them up here
        for key in (REQUESTS[0], REQUESTS[2]):
            pool_pair.b.process.manage("remove_cache_key", key)
        assert used(pool_pair.b) == 0

    def test_request_keys(self, pool_pair: Pair) -> None:
        """With the bound entry, which the text asks for only if it is cheap."""
        src, dst = pool_pair.b.allocate("src", entry_bytes=192, key=REQUESTS), pool_pair.a.blocks("dst")
        for _ in range(3):
            pool_pair.a.process.pull_blocks(REQUESTS[1], "dst", [], [3, 5])
        for tensor in range(4):
            dst.tensor(tensor)[[3, 5]] = src.tensor(tensor)[1].reshape(2, 96)

    @pytest.mark.parametrize("cache_id", [0, -1, -(2**63)])
    def test_ids_of_nothing_are_the_invalid_request_key(self, pool_pair: Pair, cache_id: int) -> None:
        """Which the blocks cache of model 0 is filed under: found, and of the wrong layout."""
        key = CacheKeyByIdAndIndex(2, cache_id)
        pool_pair.a.cache("dst")
        pool_pair.a.blocks("paged")
        pool_pair.b.allocate("other", blocks=True, key=BlocksCacheKey(2, 1))
        calls = (("pull_cache", "dst", []), ("pull_blocks", "paged", [[], [0]]))
        for method, dst, lists in calls:
            with raises(KV_CACHE_NOT_EXIST):
                pool_pair.a.process.manage(method, key, dst, *lists)
        pool_pair.b.allocate("src", blocks=True, key=BlocksCacheKey(2, 0))
        for method, dst, lists in calls:
            with raises(PARAM_INVALID):
                pool_pair.a.process.manage(method, key, dst, *lists)

    def test_pushes_reach_allocated_caches(self, pool_pair: Pair) -> None:
        """§3.3: they are always accessible."""
        src, dst = pool_pair.a.allocate("src"), pool_pair.b.allocate("dst")
        paged_src = pool_pair.a.allocate("paged_src", blocks=True)
        paged_dst = pool_pair.b.allocate("paged_dst", blocks=True, key=BlocksCacheKey(2), placement=Placement.HOST)
        pool_pair.a.process.push_cache(dst.key(2), "src", 4)
        pool_pair.a.process.push_blocks(BlocksCacheKey(2), "paged_src", [1, 5], [0, 3])
        for tensor in range(4):
            dst.tensor(tensor)[2] = src.tensor(tensor)[4]
            paged_dst.tensor(tensor)[[0, 3]] = paged_src.tensor(tensor)[[1, 5]]


def test_pool_memory_takes_the_path_of_the_pair(pool_pair: Pair) -> None:
    """It is shared memory, so that every path reaches it, at both ends and in both placements."""
    for placement in (Placement.DEVICE, Placement.HOST):
        src = pool_pair.b.allocate(f"src{placement}", placement=placement)
        dst = pool_pair.a.allocate(f"dst{placement}", placement=Placement.DEVICE)
        pull(pool_pair, src.key(3), dst, src, 3)
    pool_pair.check_only_path_used()
