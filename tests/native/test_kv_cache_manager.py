"""KvCacheManager above fake engines: role gates, argument checks, codes (spec api-kvcachemanager §2 - §6, §8)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from llm_datadist_ray._native import CacheKind, KeyKind, NativeKey, NativeStatus
from llm_datadist_ray.errors import LLMException, LLMStatusCode
from llm_datadist_ray.types import (
    INVALID_ID,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    LLMRole,
    Placement,
)
from tests.conformance.status import FAILED, KV_CACHE_NOT_EXIST, NOT_YET_LINK, PARAM_INVALID, raises
from tests.native.kv_cache_process import FakeProcess, cpu_cache, device_desc

DECODER, PROMPT, MIX = LLMRole.DECODER, LLMRole.PROMPT, LLMRole.MIX
DEVICE_OUT_OF_MEMORY = LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
LINK_BUSY = LLMStatusCode.LLM_LINK_BUSY
KEY = CacheKey(2, 7)
BLOCKS_KEY = BlocksCacheKey(2)


# Every method with arguments that are right, by the roles that may call it.
CALLS: dict[str, Callable[[FakeProcess], Any]] = {
    "allocate_cache": lambda p: p.manager.allocate_cache(device_desc()),
    "allocate_cache with keys": lambda p: p.manager.allocate_cache(device_desc(), [KEY]),
    "allocate_blocks_cache": lambda p: p.manager.allocate_blocks_cache(device_desc()),
    "allocate_blocks_cache with key": lambda p: p.manager.allocate_blocks_cache(device_desc(), BLOCKS_KEY),
    "deallocate_cache": lambda p: p.manager.deallocate_cache(p.cache()),
    "remove_cache_key": lambda p: p.manager.remove_cache_key(KEY),
    "pull_cache": lambda p: p.manager.pull_cache(KEY, p.cache()),
    "pull_blocks": lambda p: p.manager.pull_blocks(BLOCKS_KEY, p.cache(), [0], [1]),
    "copy_cache": lambda p: p.manager.copy_cache(p.cache(), p.cache()),
    "copy_blocks": lambda p: p.manager.copy_blocks(p.cache(), {0: [1, 2]}),
    "swap_blocks": lambda p: p.manager.swap_blocks(p.cache(), cpu_cache(), {}),
    "get_cache_tensors": lambda p: p.manager.get_cache_tensors(p.cache()),
}
ONLY = {
    "allocate_cache with keys": {PROMPT},
    "allocate_blocks_cache with key": {PROMPT, MIX},
    "remove_cache_key": {PROMPT},
    "pull_cache": {DECODER},
    "pull_blocks": {DECODER},
}


class TestGates:
    @pytest.mark.parametrize("role", LLMRole)
    @pytest.mark.parametrize("name", CALLS)
    def test_roles(self, name: str, role: LLMRole) -> None:
        process = FakeProcess(role)
        if role in ONLY.get(name, LLMRole):
            CALLS[name](process)
        else:
            with raises(PARAM_INVALID, f"this is a {role.name}"):
                CALLS[name](process)

    def test_role_comes_before_arguments(self) -> None:
        for role, method, num_arguments in (
            (PROMPT, "pull_cache", 2),
            (PROMPT, "pull_blocks", 4),
            (DECODER, "remove_cache_key", 1),
            (DECODER, "transfer_cache_async", 3),
        ):
            with raises(PARAM_INVALID, "this is a"):
                getattr(FakeProcess(role).manager, method)(*[object()] * num_arguments)

    @pytest.mark.parametrize("name", CALLS)
    def test_after_close(self, name: str) -> None:
        process = FakeProcess(DECODER)
        cache = process.cache()
        process.cache = lambda **kwargs: cache  # type: ignore[method-assign]
        assert process.manager.is_initialized()
        process.runtime.close()
        process.runtime.close()
        assert not process.manager.is_initialized()
        assert not process.engine.is_open
        with raises(FAILED, "finalized"):
            CALLS[name](process)


class TestAllocation:
    def test_types(self) -> None:
        manager = FakeProcess(PROMPT).manager
        for desc in (None, 1, [device_desc()]):
            with pytest.raises(TypeError):
                manager.allocate_cache(desc)  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                manager.allocate_blocks_cache(desc)  # type: ignore[arg-type]
        for keys in (None, KEY, [1], [BLOCKS_KEY], {KEY: 1}):
            with pytest.raises(TypeError):
                manager.allocate_cache(device_desc(), keys)  # type: ignore[arg-type]
        for key in (1, KEY, [BLOCKS_KEY]):
            with pytest.raises(TypeError):
                manager.allocate_blocks_cache(device_desc(), key)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "desc",
        [
            device_desc(tensors=0),
            device_desc(placement=Placement.HOST),
            device_desc(shape=[1] * 32),
            device_desc(shape=[1, 0]),
            device_desc(shape=[1, -1]),
            CacheDesc(1, [1], None),  # type: ignore[arg-type]
        ],
        ids=["no tensors", "host", "rank", "zero", "negative", "data type"],
    )
    def test_descs(self, desc: CacheDesc) -> None:
        process = FakeProcess(PROMPT)
        for allocate in (process.manager.allocate_cache, process.manager.allocate_blocks_cache):
            with raises(PARAM_INVALID):
                allocate(desc)
        assert not process.engine.caches

    def test_ids_and_addresses(self) -> None:
        process = FakeProcess(PROMPT, 2)
        first, second = process.cache(), process.cache(blocks=True, tensors=2)
        assert (first.cache_id, second.cache_id) == (1, 2)
        assert second.per_device_tensor_addrs == [[2000, 2001]] * 2
        assert process.engine.caches[1] == {
            "kind": CacheKind.CONTIGUOUS,
            "placement": Placement.DEVICE,
            "num_entries": 6,
            "tensor_bytes": 576,
            "keys": [],
        }
        assert process.engine.caches[2]["kind"] == CacheKind.BLOCKS

    def test_keys(self) -> None:
        """Each by itself; placeholders repeat, the last of equals wins, those beyond the entries name nothing."""
        process = FakeProcess(PROMPT)
        none = CacheKey(1, INVALID_ID)
        keys = [CacheKey(1, 5, 1), none, CacheKey(1, INVALID_ID, 2, 5), none, CacheKey(1, 5, 1), CacheKey(1, 5, 2), KEY]
        cache = process.manager.allocate_cache(device_desc(), keys)
        assert process.engine.caches[cache.cache_id]["keys"] == [
            NativeKey(KeyKind.REQUEST, 5, 1, 4),
            NativeKey(KeyKind.PREFIX, 5, 2, 2),
            NativeKey(KeyKind.REQUEST, 5, 2, 5),
        ]
        blocks = process.manager.allocate_blocks_cache(device_desc(), BlocksCacheKey(1, 9))
        assert process.engine.caches[blocks.cache_id]["keys"] == [NativeKey(KeyKind.BLOCKS, 0, 9)]

    @pytest.mark.parametrize(
        ("status", "code"),
        [
            (NativeStatus.POOL_FULL, DEVICE_OUT_OF_MEMORY),
            (NativeStatus.BUSY, DEVICE_OUT_OF_MEMORY),
            (NativeStatus.KEY_BOUND, FAILED),
            (NativeStatus.INVALID, PARAM_INVALID),
            (NativeStatus.INTERNAL, FAILED),
        ],
    )
    @pytest.mark.parametrize("failing", [0, 1, 2])
    def test_on_all_devices_or_on_none(self, failing: int, status: NativeStatus, code: LLMStatusCode) -> None:
        process = FakeProcess(PROMPT, 3)
        kept = process.cache()
        process.engines[failing].fail["allocate_cache"] = status
        with raises(code):
            process.manager.allocate_cache(device_desc(), [KEY])
        process.engines[failing].fail.clear()
        assert all(list(engine.caches) == [kept.cache_id] for engine in process.engines)
        ids = {process.cache().cache_id for _ in range(2)}
        assert len(ids) == 2
        assert len({engine._last_id for engine in process.engines}) == 1


class TestRelease:
    def test_arguments(self) -> None:
        process = FakeProcess(DECODER)
        for cache in (None, 1, Cache(1, device_desc(), [1], None, False, False)):
            with pytest.raises(TypeError):
                process.manager.deallocate_cache(cache)  # type: ignore[arg-type]
        with raises(PARAM_INVALID):
            process.manager.deallocate_cache(cpu_cache())

    def test_twice(self) -> None:
        process = FakeProcess(DECODER, 2)
        cache = process.cache()
        process.manager.deallocate_cache(cache)
        assert cache.per_device_tensor_addrs == []
        assert not cache.is_valid
        assert all(not engine.caches for engine in process.engines)
        for _ in range(2):
            with raises(KV_CACHE_NOT_EXIST):
                process.manager.deallocate_cache(cache)
        with raises(KV_CACHE_NOT_EXIST):
            process.manager.get_cache_tensors(cache)

    def test_the_last_reference_deallocates(self) -> None:
        process = FakeProcess(DECODER)
        cache = process.cache()
        other = cache
        del cache
        assert process.engine.caches
        del other
        assert not process.engine.caches

    def test_a_cycle_that_holds_it_too(self) -> None:
        process = FakeProcess(DECODER)
        loop: list[Any] = [process.cache()]
        loop.append(loop)
        del loop
        gc.collect()
        assert not process.engine.caches

    def test_nothing_happens_after_close(self) -> None:
        process = FakeProcess(DECODER)
        cache = process.cache()
        process.runtime.close()
        del cache
        assert "deallocate_cache" not in process.engine.names_called()

    def test_remove_cache_key(self) -> None:
        process = FakeProcess(PROMPT, 2)
        process.manager.remove_cache_key(CacheKey(1, INVALID_ID, 3, 4))
        assert [engine.calls[-1] for engine in process.engines] == [
            ("remove_cache_key", NativeKey(KeyKind.PREFIX, 4, 3))
        ] * 2
        for key in (None, BLOCKS_KEY, 1):
            with pytest.raises(TypeError):
                process.manager.remove_cache_key(key)  # type: ignore[arg-type]


BY_ID = CacheKeyByIdAndIndex(2, 1)


class TestPulls:
    @pytest.mark.parametrize(
        ("args", "kwargs", "error"),
        [
            ((BLOCKS_KEY,), {}, TypeError),
            ((None,), {}, TypeError),
            ((CacheKey(2, INVALID_ID),), {}, PARAM_INVALID),
            ((CacheKey(2, 1, 0, 1),), {}, PARAM_INVALID),
            ((KEY, None), {}, TypeError),
            ((KEY, "v2"), {}, TypeError),
            ((KEY, "host"), {}, PARAM_INVALID),
            ((KEY, "cache", "0"), {}, TypeError),
            ((KEY, "cache", -1), {}, ValueError),
            ((KEY, "cache", 2**32), {}, ValueError),
            ((KEY, "cache", 0, None), {}, TypeError),
            ((KEY, "cache", 0, 2**63), {}, ValueError),
            ((KEY, "cache", 0, 0), {}, PARAM_INVALID),
            ((KEY, "cache", 0, -2), {}, PARAM_INVALID),
            ((KEY,), {"tensor_num_per_layer": None}, TypeError),
            ((KEY,), {"tensor_num_per_layer": -1}, ValueError),
            ((KEY,), {"tensor_num_per_layer": 0}, PARAM_INVALID),
            ((KEY,), {"src_layer_range": [0]}, TypeError),
            ((KEY,), {"dst_layer_range": range(0, 2, 2)}, PARAM_INVALID),
            ((KEY,), {"src_layer_range": range(-1, 2)}, PARAM_INVALID),
            ((KEY,), {"src_cache_offset": "0"}, TypeError),
            ((KEY,), {"dst_cache_offset": 1.0}, TypeError),
            ((KEY,), {"src_cache_offset": -1}, ValueError),
            ((KEY,), {"dst_cache_offset": -1}, ValueError),
        ],
    )
    def test_pull_cache_arguments(self, args: tuple, kwargs: dict, error: Any) -> None:
        process = FakeProcess(DECODER)
        self._check(process.manager.pull_cache, process, (*args, "cache")[: max(len(args), 2)], kwargs, error)

    @pytest.mark.parametrize(
        ("args", "kwargs", "error"),
        [
            ((KEY, "cache", [0], [0]), {}, TypeError),
            ((BY_ID, "cache", [0], [0]), {}, TypeError),
            ((BlocksCacheKey(2, None), "cache", [0], [0]), {}, TypeError),
            ((BLOCKS_KEY, "v2", [0], [0]), {}, TypeError),
            ((BLOCKS_KEY, "host", [0], [0]), {}, PARAM_INVALID),
            ((BLOCKS_KEY, "cache", (0,), [0]), {}, TypeError),
            ((BLOCKS_KEY, "cache", [0], (0,)), {}, TypeError),
            ((BLOCKS_KEY, "cache", ["0"], [0]), {}, TypeError),
            ((BLOCKS_KEY, "cache", None, [0]), {}, TypeError),
            ((BLOCKS_KEY, "cache", [-1], [0]), {}, TypeError),
            ((BLOCKS_KEY, "cache", [], []), {}, PARAM_INVALID),
            ((BLOCKS_KEY, "cache", [0], []), {}, PARAM_INVALID),
            ((BLOCKS_KEY, "cache", [0, 1], [0]), {}, PARAM_INVALID),
            ((BLOCKS_KEY, "cache", [0], [0]), {"tensor_num_per_layer": 0}, PARAM_INVALID),
            ((BLOCKS_KEY, "cache", [0], [0]), {"src_layer_range": 1}, TypeError),
            ((BLOCKS_KEY, "large", [0], [0]), {}, PARAM_INVALID),
        ],
    )
    def test_pull_blocks_arguments(self, args: tuple, kwargs: dict, error: Any) -> None:
        process = FakeProcess(DECODER)
        self._check(process.manager.pull_blocks, process, args, kwargs, error)

    def _check(self, method: Callable, process: FakeProcess, args: tuple, kwargs: dict, error: Any) -> None:
        caches = {
            "cache": process.cache(),
            "host": cpu_cache(),
            "v2": Cache(1, device_desc(), [1] * 4, None, False, False),
            "large": process.cache(shape=(2, 2**31)),
        }
        args = tuple(caches.get(arg, arg) if isinstance(arg, str) else arg for arg in args)
        if error is PARAM_INVALID:
            with raises(PARAM_INVALID):
                method(*args, **kwargs)
        else:
            with pytest.raises(error):
                method(*args, **kwargs)
        assert "transfer" not in process.engine.names_called()

    @pytest.mark.parametrize(
        ("offsets", "expected"),
        [
            ({}, (0, 0, 0)),
            ({"src_cache_offset": None, "dst_cache_offset": None, "nonsense": object()}, (0, 0, 0)),
            ({"src_cache_offset": 0}, (0, 0, 1)),
            ({"dst_cache_offset": 0}, (0, 0, 1)),
            ({"src_cache_offset": 3, "dst_cache_offset": 5}, (3, 5, 1)),
        ],
    )
    def test_offsets(self, offsets: dict, expected: tuple) -> None:
        process = FakeProcess(DECODER)
        process.manager.pull_cache(BY_ID, process.cache(), **offsets)
        params = process.engine.calls_of("transfer")[0].params
        assert (params.remote_offset_bytes, params.local_offset_bytes, params.flags) == expected

    @pytest.mark.parametrize(
        ("status", "code"),
        [
            (NativeStatus.TIMEOUT, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT),
            (NativeStatus.NO_CACHE, KV_CACHE_NOT_EXIST),
            (NativeStatus.NOT_LINKED, NOT_YET_LINK),
            (NativeStatus.LINK_BROKEN, FAILED),
            (NativeStatus.INVALID, PARAM_INVALID),
            (NativeStatus.NO_PATH, LLMStatusCode.LLM_FEATURE_NOT_ENABLED),
            (NativeStatus.CLOSED, FAILED),
        ],
    )
    def test_codes_of_any_device(self, status: NativeStatus, code: LLMStatusCode) -> None:
        process = FakeProcess(DECODER, 2)
        process.engines[1].fail["transfer"] = status
        with raises(code, "as it was told"):
            process.manager.pull_cache(BY_ID, process.cache())
        with raises(code):
            process.manager.pull_blocks(BLOCKS_KEY, process.cache(), [0], [0])

    def test_no_status_is_called_llm_timeout(self) -> None:
        process = FakeProcess(DECODER)
        cache = process.cache()
        for status in set(NativeStatus) - {NativeStatus.OK}:
            process.engine.fail["transfer"] = status
            with pytest.raises(LLMException) as caught:
                process.manager.pull_cache(BY_ID, cache)
            assert caught.value.status_code != LLMStatusCode.LLM_TIMEOUT

    def test_a_flawed_selection_says_what_is_wrong(self) -> None:
        process = FakeProcess(DECODER)
        process.engine.fail["transfer"] = NativeStatus.INVALID
        with raises(PARAM_INVALID, "tensor_num_per_layer 3 does not divide"):
            process.manager.pull_cache(BY_ID, process.cache(), src_layer_range=range(1), tensor_num_per_layer=3)

    def test_busy(self) -> None:
        """Refused and not queued; another link is free, and so is this one afterwards, whatever came of it."""
        process = FakeProcess(DECODER)
        cache = process.cache()

        def inside() -> None:
            process.engine.before.clear()
            with raises(LINK_BUSY, "in use by pull_cache"):
                process.manager.pull_cache(BY_ID, cache)
            with raises(LINK_BUSY):
                process.manager.pull_blocks(BLOCKS_KEY, cache, [0], [0])
            with raises(LINK_BUSY):
                process.runtime.check_link_status(2)
            process.manager.pull_cache(CacheKeyByIdAndIndex(3, 1), cache)
            process.engine.fail["transfer"] = NativeStatus.TIMEOUT

        process.engine.before["transfer"] = inside
        with raises(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT):
            process.manager.pull_cache(BY_ID, cache)
        process.engine.fail.clear()
        process.manager.pull_cache(BY_ID, cache)


def test_busy_is_out_of_memory_only_where_memory_is_asked_for() -> None:
    """Elsewhere the core means other bounds, which waiting for caches to go does not help."""
    process = FakeProcess(DECODER)
    target = process.cache()
    process.engine.fail["transfer"] = NativeStatus.BUSY
    with raises(FAILED):
        process.manager.pull_cache(KEY, target)
