"""What the cache manager checks and asks of the engine: pools, keys, remapping, tasks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from llm_datadist_ray import (
    BlocksCacheKey,
    Cache,
    CacheKey,
    CacheKeyByIdAndIndex,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
    TransferWithCacheKeyConfig,
)
from llm_datadist_ray._native import CacheKind, Event, EventKind, KeyKind, NativeKey, NativeStatus, Path, RemoteBy
from tests.native.cache_fakes import Error, Fake, Ready, cache, check_raises, cpu_cache, desc, native_error, ready_link

INVALID_ID = 2**64 - 1
PARAM_INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_ENABLED = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NOT_YET_LINK = LLMStatusCode.LLM_NOT_YET_LINK
FAILED = LLMStatusCode.LLM_FAILED
MAYBE_NONE = (AttributeError, TypeError)
BOTH = (Placement.DEVICE, Placement.HOST)


class TestAllocate:
    """§4.1, §4.2."""

    @pytest.mark.parametrize(
        ("args", "pools", "error", "match"),
        [
            (("desc",), BOTH, TypeError, "cache_desc only support CacheDesc"),
            ((None,), BOTH, MAYBE_NONE, None),
            ((desc(), "keys"), BOTH, TypeError, "only support"),
            ((desc(), [BlocksCacheKey(1)]), BOTH, TypeError, "only support CacheKey"),
            ((desc(tensors=0),), (), PARAM_INVALID, "num_tensors"),
            ((desc(shape=[0, 1]),), (), PARAM_INVALID, "no memory pool for Placement.DEVICE: init had no mem_pool_cfg"),
            ((desc(placement=Placement.HOST),), (Placement.DEVICE,), PARAM_INVALID, "host_mem_pool_cfg"),
            ((desc(),), (Placement.HOST,), PARAM_INVALID, "mem_pool_cfg"),
            ((desc(shape=[1] * 32),), BOTH, PARAM_INVALID, "1 to 31 dimensions"),
            ((desc(shape=[4, 0]),), BOTH, PARAM_INVALID, "greater than zero"),
            ((desc(), [CacheKey(1, i) for i in range(5)]), BOTH, PARAM_INVALID, "5 cache_keys .* 4 entries"),
            ((desc(), [CacheKey(1, INVALID_ID)] * 5), BOTH, PARAM_INVALID, "5 cache_keys .* 4 entries"),
        ],
    )
    def test_checks_of_contiguous(self, args: tuple, pools: tuple, error: Error, match: str | None) -> None:
        fake = Fake(pools=pools)
        check_raises(error, match, lambda: fake.manager.allocate_cache(*args))
        # What was allocated before the keys were counted has gone back.
        assert [name for name, _ in fake.engine.calls] in ([], ["allocate_cache", "unregister_cache"])

    @pytest.mark.parametrize(
        ("args", "error"),
        [
            (("desc",), TypeError),
            ((None,), MAYBE_NONE),
            ((desc(), CacheKey(1, 1)), TypeError),
            ((desc(), [BlocksCacheKey(1)]), TypeError),
            ((desc(tensors=0),), PARAM_INVALID),
            ((desc(placement=Placement.HOST),), PARAM_INVALID),
            ((desc(shape=[4, -1]),), PARAM_INVALID),
        ],
    )
    def test_checks_of_blocks(self, args: tuple, error: Error) -> None:
        fake = Fake(pools=[Placement.DEVICE])
        check_raises(error, None, lambda: fake.manager.allocate_blocks_cache(*args))
        assert fake.engine.calls == []

    def test_memory_is_looked_for_before_keys_are_counted(self) -> None:
        fake = Fake(pools=BOTH)
        fake.engine.answers["allocate_cache"] = native_error(NativeStatus.POOL_FULL, "the pool is full")
        keys = [CacheKey(1, i) for i in range(5)]
        check_raises(LLMStatusCode.LLM_OUT_OF_MEMORY, "full", lambda: fake.manager.allocate_cache(desc(), keys))

    def test_what_the_engine_is_asked_for(self) -> None:
        """Placeholders keep their entry and name nothing; a prefix id that is valid wins."""
        fake = Fake(pools=BOTH)
        keys = [CacheKey(1, 5, 6), CacheKey(1, INVALID_ID, 6), CacheKey(1, 5, 7, 8)]
        made = fake.manager.allocate_cache(desc(placement=Placement.HOST), keys)
        assert (made.cache_id, made.tensor_addrs, made.is_blocks_cache) == (9, [4096, 8192], False)
        assert fake.engine.calls == [
            (
                "allocate_cache",
                {
                    "kind": CacheKind.CONTIGUOUS,
                    "placement": Placement.HOST,
                    "num_entries": 4,
                    "tensor_bytes": 64,
                    "num_tensors": 2,
                    "keys": [NativeKey(KeyKind.REQUEST, 5, 6, 0), NativeKey(KeyKind.PREFIX, 8, 7, 2)],
                },
            )
        ]
        made = fake.manager.allocate_blocks_cache(desc(), BlocksCacheKey(1, 7))
        assert made.is_blocks_cache
        assert fake.engine.calls[1][1]["kind"] == CacheKind.BLOCKS
        assert fake.engine.calls[1][1]["keys"] == [NativeKey(KeyKind.BLOCKS, 0, 7)]
        fake.manager.allocate_blocks_cache(desc())
        assert fake.engine.calls[2][1]["keys"] == []


@pytest.mark.parametrize("blocks", [False, True])
class TestDeallocate:
    """§4.3."""

    @staticmethod
    def method(fake: Fake, blocks: bool) -> Callable[[Any], None]:
        return fake.manager.deallocate_blocks_cache if blocks else fake.manager.deallocate_cache

    @pytest.mark.parametrize(("value", "error"), [("cache", TypeError), (3, TypeError), (None, MAYBE_NONE)])
    def test_types(self, blocks: bool, value: Any, error: Error) -> None:
        check_raises(error, None, lambda: self.method(Fake(pools=BOTH), blocks)(value))

    def test_kind_before_pool_before_id(self, blocks: bool) -> None:
        fake = Fake()
        check_raises(PARAM_INVALID, "should be a", lambda: self.method(fake, blocks)(cache(blocks=not blocks)))
        right = cache(blocks=blocks)
        check_raises(NOT_ENABLED, "needs a memory pool", lambda: self.method(fake, blocks)(right))
        assert right.tensor_addrs != []
        assert fake.engine.calls == []

    @pytest.mark.parametrize("pool", BOTH)
    def test_any_pool_will_do_and_addresses_go(self, blocks: bool, pool: Placement) -> None:
        fake = Fake(pools=[pool])
        for answer in (None, native_error(NativeStatus.NO_CACHE)):
            fake.engine.answers["deallocate_cache"] = answer
            given = cache(blocks=blocks)
            self.method(fake, blocks)(given)
            assert given.tensor_addrs == []
            assert fake.engine.calls[-1] == ("deallocate_cache", {"arg": 3})

    def test_other_failures_are_raised(self, blocks: bool) -> None:
        fake = Fake(pools=BOTH)
        fake.engine.answers["deallocate_cache"] = native_error(NativeStatus.CLOSED)
        given = cache(blocks=blocks)
        check_raises(FAILED, "words", lambda: self.method(fake, blocks)(given))
        assert given.tensor_addrs != []


class TestRemoveCacheKey:
    """§4.4."""

    @pytest.mark.parametrize(("key", "error"), [(BlocksCacheKey(1), TypeError), ("key", TypeError), (None, MAYBE_NONE)])
    def test_types(self, key: Any, error: Error) -> None:
        check_raises(error, None, lambda: Fake(pools=BOTH).manager.remove_cache_key(key))

    def test_no_pool(self) -> None:
        check_raises(NOT_ENABLED, "remove_cache_key", lambda: Fake().manager.remove_cache_key(CacheKey(1, 1)))

    def test_which_key(self) -> None:
        fake = Fake(pools=[Placement.HOST])
        for key in (CacheKey(1, 5, 6), CacheKey(1, 5, 6, 7), CacheKey(1, INVALID_ID, 6)):
            fake.manager.remove_cache_key(key)
        assert [kwargs["arg"] for _, kwargs in fake.engine.calls] == [
            NativeKey(KeyKind.REQUEST, 5, 6),
            NativeKey(KeyKind.PREFIX, 7, 6),
        ]


def test_pool_status() -> None:
    fake = Fake(pools=[Placement.DEVICE])
    fake.engine.answers["pool_info"] = "info"
    assert fake.manager.pool_status() == "info"
    assert fake.engine.calls == [("pool_info", {"arg": Placement.DEVICE})]
    check_raises(NOT_ENABLED, "host_mem_pool_cfg", lambda: fake.manager.pool_status(Placement.HOST))
    check_raises(TypeError, "placement only support", lambda: fake.manager.pool_status(1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("copy_blocks", (cache(blocks=True), {})),
        ("remove_cache_key", (CacheKey(1, INVALID_ID),)),
        ("transfer_cache_async", (cache(), Ready(), [])),
        ("pull_cache", (CacheKeyByIdAndIndex(2, 1), cache())),
        ("pull_cache_async", (CacheKeyByIdAndIndex(2, 1), cache())),
        ("push_cache", (CacheKeyByIdAndIndex(3, 1), cache(tensors=1))),
        ("push_cache_async", (CacheKeyByIdAndIndex(3, 1), cache(tensors=1))),
        ("push_blocks", (BlocksCacheKey(3), cache(tensors=1, blocks=True), [0], [0])),
        ("push_blocks_async", (BlocksCacheKey(3), cache(tensors=1, blocks=True), [0], [0])),
    ],
)
def test_after_finalize_also_when_the_engine_is_not_needed(method: str, args: tuple) -> None:
    """§1: nothing to move, or a cluster that link() has not reached."""
    fake = Fake(remote_access=True, pools=BOTH, not_ready=[2])
    fake.engine.is_open = False
    check_raises(FAILED, "closed", lambda: getattr(fake.manager, method)(*args))
    assert fake.engine.calls == []


class TestEarlierLife:
    """Caches that another manager has made: ids begin anew after each ``init``, so theirs say nothing here."""

    @pytest.fixture
    def fake(self) -> Fake:
        return Fake(remote_access=True, pools=BOTH)

    @pytest.fixture(params=[False, True])
    def blocks(self, request: pytest.FixtureRequest) -> bool:
        return request.param

    @staticmethod
    def dead(*, blocks: bool = False) -> Cache:
        manager = Fake(pools=BOTH).manager
        return manager.allocate_blocks_cache(desc()) if blocks else manager.allocate_cache(desc())

    def test_deallocate(self, fake: Fake, blocks: bool) -> None:
        """§4.3: unknown, and so success without effect."""
        dead = self.dead(blocks=blocks)
        fake.engine.answers["deallocate_cache"] = native_error(NativeStatus.NO_CACHE)
        (fake.manager.deallocate_blocks_cache if blocks else fake.manager.deallocate_cache)(dead)
        assert fake.engine.calls == [("deallocate_cache", {"arg": 0})]
        assert dead.tensor_addrs == []

    def test_every_other_method_asks_for_cache_0_which_does_not_exist(self, fake: Fake) -> None:
        manager, plain, paged = fake.manager, self.dead(), self.dead(blocks=True)
        by_id, by_model = CacheKeyByIdAndIndex(2, 1), BlocksCacheKey(2)
        manager.pull_cache(by_id, plain)
        manager.pull_blocks(by_model, paged, [0], [0])
        manager.pull_blocks(by_model, paged, [0], [0], src_layer_range=range(1))
        manager.pull_blocks(by_id, paged, [], [0])
        manager.pull_cache_async(by_id, plain)
        manager.push_cache(by_id, plain)
        manager.push_blocks(by_model, paged, [0], [0])
        config = TransferWithCacheKeyConfig(by_id, range(1), range(1))
        assert manager.transfer_cache_async(plain, Ready(), [config]).synchronize(10_000) == 0
        assert len(fake.engine.calls) == 8
        assert not any("local_cache_id" in fields for _, fields in fake.engine.calls)
        manager.copy_blocks(paged, {0: [1]})
        assert fake.engine.calls[-1][1]["cache_id"] == 0
        mine = manager.allocate_cache(desc())
        manager.copy_cache(mine, plain)
        manager.copy_cache(plain, mine)
        found = [(fields["dst_cache_id"], fields["src_cache_id"]) for _, fields in fake.engine.calls[-2:]]
        assert found == [(9, 0), (0, 9)]

    @pytest.mark.parametrize("to_host", [False, True])
    def test_swap_blocks(self, fake: Fake, to_host: bool) -> None:
        """Its addresses are of memory that is gone."""
        pair = (self.dead(blocks=True), cpu_cache())
        src, dst = pair if to_host else pair[::-1]
        check_raises(NOT_EXIST, "made before finalize", lambda: fake.manager.swap_blocks(src, dst, {0: 0}))
        assert fake.engine.calls == []


DEVICE, HOST = Memtype.MEM_TYPE_DEVICE, Memtype.MEM_TYPE_HOST


class TestRemap:
    """§10."""

    @pytest.mark.parametrize(
        "infos",
        [
            [],
            None,
            "info",
            (MemInfo(DEVICE, 1, 1),),
            [MemInfo(DEVICE, 1, 1), 7],
            MemInfo(HOST, 1, 1),
            MemInfo(DEVICE, 0, 1),
            MemInfo(DEVICE, 1, 0),
            MemInfo(DEVICE, 1, -1),
            [MemInfo(None, 1, 1)],  # type: ignore[arg-type]
            [MemInfo(DEVICE, None, 1)],  # type: ignore[arg-type]
            [MemInfo(DEVICE, 1, None)],  # type: ignore[arg-type]
        ],
    )
    def test_bad_arguments_are_param_invalid_also_with_a_link(self, infos: Any) -> None:
        fake = Fake()
        fake.engine.answers["links"] = [ready_link()]
        check_raises(PARAM_INVALID, None, lambda: fake.manager.remap_registered_memory(infos))

    @pytest.mark.parametrize("links", [[], [ready_link(False)], [ready_link(is_inbound=True)]])
    def test_no_link(self, links: list) -> None:
        fake = Fake()
        fake.engine.answers["links"] = links
        check_raises(NOT_YET_LINK, "link first", lambda: fake.manager.remap_registered_memory(MemInfo(DEVICE, 1, 1)))

    @pytest.mark.parametrize("infos", [MemInfo(DEVICE, 1, 1), [MemInfo(DEVICE, 1, 1), MemInfo(DEVICE, 2**63, 2**40)]])
    def test_with_a_link_nothing_happens(self, infos: Any) -> None:
        fake = Fake()
        fake.engine.answers["links"] = [ready_link(False), ready_link()]
        fake.manager.remap_registered_memory(infos)


def test_a_manager_goes_with_its_last_reference() -> None:
    """And its engine with it: nothing waits for the garbage collector."""
    fake = Fake()
    manager = weakref.ref(fake.manager)
    fake.manager.pull_blocks(BlocksCacheKey(2), cache(blocks=True), [0], [0])
    gc.disable()
    try:
        del fake.manager
        assert manager() is None
    finally:
        gc.enable()


class TestNotReady:
    """``link()`` has not exchanged everything yet (§11)."""

    def test_every_transfer_method_and_only_to_that_cluster(self) -> None:
        not_ready = {2}
        fake = Fake(remote_access=True, not_ready=not_ready)
        manager, paged, plain = fake.manager, cache(blocks=True), cache()
        by_id, by_model = CacheKeyByIdAndIndex(2, 1), BlocksCacheKey(2)
        calls: list[tuple[Any, tuple]] = [
            (manager.pull_cache, (by_id, plain)),
            (manager.pull_blocks, (by_model, paged, [0], [0])),
            (manager.push_cache, (by_id, plain)),
            (manager.push_blocks, (by_model, paged, [0], [0])),
            (manager.pull_cache_async, (by_id, plain)),
            (manager.pull_blocks_async, (by_model, paged, [0], [0])),
            (manager.push_cache_async, (by_id, plain)),
            (manager.push_blocks_async, (by_model, paged, [0], [0])),
        ]
        for method, args in calls:
            check_raises(NOT_YET_LINK, r"cluster 2 .* link\(\) exchange is not OK yet", lambda m=method, a=args: m(*a))
        assert fake.engine.calls == []
        assert fake.events.expected == {}
        manager.pull_cache(CacheKeyByIdAndIndex(3, 1), plain)
        not_ready.clear()
        for method, args in calls:
            method(*args)
        assert len(fake.engine.calls) == 1 + len(calls)

    def test_arguments_come_first(self) -> None:
        fake = Fake(not_ready=[2])
        check_raises(
            PARAM_INVALID, None, lambda: fake.manager.pull_blocks(BlocksCacheKey(2), cache(blocks=True), [], [0])
        )


class TestRemoteIds:
    """§5.5, §5.7, §7: ids that are none."""

    @pytest.mark.parametrize("cache_id", [0, -1, -(2**63)])
    def test_pull_in_remote_access_mode_is_by_the_invalid_request_key(self, cache_id: int) -> None:
        fake = Fake(remote_access=True)
        fake.manager.pull_cache(CacheKeyByIdAndIndex(2, cache_id, 3), cache())
        fake.manager.pull_blocks(CacheKeyByIdAndIndex(2, cache_id, 3), cache(blocks=True), [], [0])
        for _, fields in fake.engine.calls:
            assert fields["remote_by"] == RemoteBy.BLOCKS_KEY
            assert not {"remote_model_id", "remote_batch_index", "remote_cache_id"} & set(fields)

    def test_pull_in_two_sided_mode_is_by_id(self) -> None:
        fake = Fake()
        fake.manager.pull_cache(CacheKeyByIdAndIndex(2, -1, 3), cache())
        assert fake.engine.calls[0][1]["remote_cache_id"] == -1
        assert "remote_by" not in fake.engine.calls[0][1]

    def test_push_to_id_zero_is_by_request_key_zero(self) -> None:
        fake = Fake(remote_access=True)
        fake.manager.push_cache(CacheKeyByIdAndIndex(2, 0, 3), cache())
        assert fake.engine.calls[0][1]["remote_by"] == RemoteBy.REQUEST_KEY
        check_raises(TypeError, None, lambda: fake.manager.push_cache(CacheKeyByIdAndIndex(2, -1), cache()))


class TestAsync:
    """One path for both forms."""

    def test_the_same_transfer_is_submitted(self) -> None:
        fake = Fake(remote_access=True)
        manager, paged, plain = fake.manager, cache(blocks=True), cache(tensors=4)
        layers = {"src_layer_range": range(1), "dst_layer_range": range(1, 2)}
        for name, args, kwargs in (
            ("pull_cache", (CacheKeyByIdAndIndex(2, 1, 3), plain, 1, 16), layers),
            ("pull_blocks", (BlocksCacheKey(2, 5), paged, [1, 2], [3, 0]), {}),
            ("push_cache", (CacheKeyByIdAndIndex(2, 1, 3), plain, 1), layers),
            ("push_blocks", (BlocksCacheKey(2, 5), paged, [1, 2], [3, 0]), {}),
        ):
            getattr(manager, name)(*args, **kwargs)
            getattr(manager, f"{name}_async")(*args, **kwargs)
            (_, blocking), (_, submitted) = fake.engine.calls[-2:]
            assert submitted == {**blocking, "user_tag": 11}

    def test_the_event_completes_the_task(self) -> None:
        fake = Fake()
        fake.engine.answers["submit"] = 5
        task = fake.manager.pull_cache_async(CacheKeyByIdAndIndex(2, 1), cache())
        assert task.op_id == 5
        assert not task.done()
        fake.events.expected[11](Event(EventKind.OP, 5, 11, NativeStatus.OK, 128, 0.1, Path.SHM))
        task.wait(0)

    def test_what_fails_at_once_is_raised_and_expected_no_more(self) -> None:
        fake = Fake()
        fake.engine.answers["submit"] = native_error(NativeStatus.NOT_LINKED)
        key = CacheKeyByIdAndIndex(2, 1)
        check_raises(NOT_YET_LINK, "words", lambda: fake.manager.pull_cache_async(key, cache()))
        fake.engine.answers["submit"] = native_error()
        odd = cache(tensors=3)
        check_raises(
            PARAM_INVALID,
            "words; also: .* does not divide",
            lambda: fake.manager.pull_cache_async(key, odd, dst_layer_range=range(1)),
        )
        assert fake.events.expected == {}

    def test_a_flaw_is_added_to_what_the_core_calls_invalid(self) -> None:
        fake = Fake()
        key, odd = CacheKeyByIdAndIndex(2, 1), cache(tensors=3)
        fake.engine.answers["run"] = native_error()
        check_raises(
            PARAM_INVALID,
            "words; also: .* divide",
            lambda: fake.manager.pull_cache(key, odd, dst_layer_range=range(1)),
        )
        fake.engine.answers["run"] = native_error(NativeStatus.NO_CACHE)
        check_raises(NOT_EXIST, "words", lambda: fake.manager.pull_cache(key, odd, dst_layer_range=range(1)))

    def test_a_push_of_nothing_is_done(self) -> None:
        fake = Fake(remote_access=True)
        one: Cache = cache(tensors=1)
        for task in (
            fake.manager.push_cache_async(CacheKeyByIdAndIndex(2, 1), one),
            fake.manager.push_blocks_async(BlocksCacheKey(2), cache(tensors=1, blocks=True), [0], [0]),
        ):
            task.wait(0)
        assert fake.engine.calls == []
