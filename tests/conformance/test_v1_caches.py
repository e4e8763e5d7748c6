"""Allocation, release and local copies of v1 in one process (spec api-kvcachemanager §3, §6, §9)."""

from __future__ import annotations

import pytest

from llm_datadist_ray import CacheDesc, DataType, KvCache, LLMRole, Placement, TransferConfig
from tests.conformance import v1_side
from tests.conformance.side import Side
from tests.conformance.status import FAILED, KV_CACHE_NOT_EXIST, PARAM_INVALID, raises
from tests.conformance.v1_ends import (
    INVALID_ID,
    V1End,
    V1Ends,
    blocks_key,
    copy_blocks,
    copy_entry,
    one_path,
    prefix_key,
    request_key,
    two_devices,
)
from tests.conformance.v1_side import PAGE_BYTES
from tests.conformance.v1_status import DEVICE_OUT_OF_MEMORY

pytest_plugins = ["tests.conformance.v1_fixtures"]
pytestmark = one_path


@pytest.fixture
def prompt(v1_idle: V1Ends, v1_num_devices: int) -> V1End:
    v1_idle.prompt.init(num_devices=v1_num_devices)
    return v1_idle.prompt


class TestAllocation:
    @pytest.mark.parametrize("v1_num_devices", [1, 2])
    def test_ids_and_memory(self, prompt: V1End) -> None:
        """Real, usable, disjoint addresses on every device (their contents are the fixture's proof)."""
        caches = [prompt.cache("a"), prompt.cache("b", blocks=True), prompt.cache("c", tensors=1, entry_bytes=20_000)]
        assert [cache.cache_id for cache in caches] == [1, 2, 3]
        assert prompt.used_bytes() == [(4 + 4 + 2) * PAGE_BYTES] * prompt.num_devices
        addresses = [
            addr for cache in caches for device in prompt.run(v1_side.addresses, cache.name) for addr in device
        ]
        assert len(set(addresses)) == 9 * prompt.num_devices

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (request_key(7), request_key(7)),
            (prefix_key(7), prefix_key(7)),
            (request_key(7, 3), request_key(7, 3)),
        ],
    )
    def test_a_key_that_is_bound(self, prompt: V1End, first: object, second: object) -> None:
        prompt.cache("a", key=[first])
        used = prompt.used_bytes()
        with raises(FAILED):
            prompt.cache("b", key=[request_key(1), second])
        assert prompt.used_bytes() == used
        prompt.cache("c", key=[request_key(1)])  # what was refused has bound nothing

    def test_keys_of_other_kinds_and_models(self, prompt: V1End) -> None:
        keys = [request_key(7), prefix_key(7), request_key(7, 1), prefix_key(7, 1)]
        for index, key in enumerate(keys):
            prompt.cache(f"cache{index}", key=[key])

    def test_placeholders_and_repetitions(self, prompt: V1End) -> None:
        none = request_key(INVALID_ID)
        prompt.cache("a", key=[none, none, request_key(1), request_key(1)])
        prompt.cache("b", key=[none])
        prompt.cache("c", blocks=True, key=blocks_key())

    def test_a_blocks_key_that_is_bound(self, prompt: V1End) -> None:
        first = prompt.cache("a", blocks=True, key=blocks_key(2))
        with raises(FAILED):
            prompt.cache("b", blocks=True, key=blocks_key(2))
        prompt.deallocate(first)
        prompt.cache("b", blocks=True, key=blocks_key(2))

    @pytest.mark.parametrize("v1_num_devices", [1, 2])
    def test_a_full_pool(self, prompt: V1End) -> None:
        big = prompt.cache("big", tensors=1, entries=1, entry_bytes=31 << 20)
        used = prompt.used_bytes()
        with raises(DEVICE_OUT_OF_MEMORY):
            prompt.cache("more", tensors=2, entries=1, entry_bytes=1 << 20)
        assert prompt.used_bytes() == used
        prompt.deallocate(big)
        assert prompt.used_bytes() == [0] * prompt.num_devices
        prompt.cache("more", tensors=2, entries=1, entry_bytes=1 << 20)

    def test_the_pool_is_what_utilization_leaves(self, v1_idle: V1Ends) -> None:
        prompt = v1_idle.prompt
        prompt.init(ge__flowGraphMemMaxSize=str(2 << 20), llm__MemoryUtilization="0.5")
        with raises(DEVICE_OUT_OF_MEMORY):
            prompt.cache("a", tensors=1, entries=1, entry_bytes=(1 << 20) + 1)
        prompt.cache("a", tensors=1, entries=1, entry_bytes=1 << 20)

    def test_without_a_pool_size(self, v1_idle: V1Ends) -> None:
        """A client of the first generation gives none (client-patterns §2.1)."""
        v1_idle.decoder.init()
        assert v1_idle.decoder.process.finalize() is None
        v1_idle.decoder.run(
            v1_side.init, LLMRole.DECODER, 2, {"llm.SyncKvCacheWaitTime": "20000", "ge.exec.deviceId": "0"}
        )
        assert v1_idle.decoder.cache("a").cache_id == 1

    def test_on_all_devices_or_on_none(self, v1_idle: V1Ends) -> None:
        """The devices of a process may be filled differently by their keys being pulled: here one is full."""
        prompt = v1_idle.prompt
        prompt.init(num_devices=2)
        hog = prompt.cache("hog", tensors=1, entries=1, entry_bytes=20 << 20, key=[request_key(1)])
        prompt.run(v1_side.free_on_device, 0, hog.named)
        prompt.forget(hog)
        with raises(DEVICE_OUT_OF_MEMORY):
            prompt.cache("a", tensors=1, entries=1, entry_bytes=20 << 20, key=[request_key(2)])
        assert prompt.used_bytes() == [0, 20 << 20]
        a = prompt.cache("a", key=[request_key(2)])  # ids and keys are in step again
        b = prompt.cache("b")
        assert b.cache_id == a.cache_id + 1


class TestRelease:
    def test_without_keys_at_once(self, prompt: V1End) -> None:
        cache = prompt.cache("a")
        prompt.deallocate(cache)
        assert prompt.used_bytes() == [0]
        assert prompt.run(v1_side.addresses, "a") == []

    def test_with_keys_when_they_are_gone(self, prompt: V1End) -> None:
        cache = prompt.cache("a", key=[request_key(1), prefix_key(2)])
        used = prompt.used_bytes()
        prompt.deallocate(cache)
        assert prompt.used_bytes() == used
        prompt.call("remove_cache_key", request_key(3))
        prompt.call("remove_cache_key", request_key(INVALID_ID))
        prompt.call("remove_cache_key", request_key(1))
        prompt.call("remove_cache_key", request_key(1))
        assert prompt.used_bytes() == used
        prompt.call("remove_cache_key", prefix_key(2))
        assert prompt.used_bytes() == [0]

    def test_a_key_that_is_removed_can_be_bound(self, prompt: V1End) -> None:
        prompt.cache("a", key=[request_key(1)])
        prompt.call("remove_cache_key", request_key(1))
        prompt.cache("b", key=[request_key(1)])

    def test_the_id_is_gone_although_keys_keep_the_memory(self, prompt: V1End) -> None:
        cache, other = prompt.cache("a", key=[request_key(1)]), prompt.cache("b")
        prompt.deallocate(cache)
        for call in (
            ("deallocate_cache", cache),
            ("copy_cache", cache, other),
            ("copy_cache", other, cache),
            ("copy_blocks", cache, {0: [1]}),
        ):
            with raises(KV_CACHE_NOT_EXIST):
                prompt.call(*call)
        with raises(KV_CACHE_NOT_EXIST):
            prompt.run(v1_side.tensors, "a")
        with raises(PARAM_INVALID):
            prompt.call("swap_blocks", cache, prompt.host_cache("host"), {0: 1})

    @two_devices
    def test_the_last_reference(self, prompt: V1End) -> None:
        cache = prompt.cache("a")
        prompt.run(v1_side.drop, "a")
        prompt.forget(cache)
        assert prompt.used_bytes() == [0, 0]

    def test_after_finalize(self, prompt: V1End) -> None:
        """The object stays, says FAILED, and frees nothing of the next life, whose ids start at 1 again."""
        cache = prompt.cache("old")
        prompt.forget(cache)
        prompt.run(v1_side.keep_manager)
        prompt.process.finalize()
        assert prompt.run(v1_side.kept_manager_says) == (False, FAILED)
        prompt.init()
        assert prompt.cache("new").cache_id == 1
        used = prompt.used_bytes()
        prompt.run(v1_side.drop, "old")
        assert prompt.used_bytes() == used

    def test_a_cache_of_before_finalize(self, prompt: V1End) -> None:
        """Its id is that of another cache now."""
        old = prompt.cache("old", blocks=True)
        prompt.forget(old)
        prompt.process.finalize()
        prompt.init()
        new, host = prompt.cache("new", blocks=True), prompt.host_cache("host")
        assert new.cache_id == old.cache_id
        used = prompt.used_bytes()
        for call in (
            ("deallocate_cache", old),
            ("copy_cache", old, new),
            ("copy_cache", new, old),
            ("copy_blocks", old, {0: [1]}),
            ("swap_blocks", old, host, {0: 0}),
            ("swap_blocks", host, old, {0: 0}),
        ):
            with raises(KV_CACHE_NOT_EXIST):
                prompt.call(*call)
        with raises(KV_CACHE_NOT_EXIST):
            prompt.run(v1_side.tensors, "old")
        prompt.run(v1_side.start_push, "task", "old", [TransferConfig(2, [1, 2, 3, 4])])
        prompt.run(v1_side.tell, "task", {0: True})
        assert prompt.run(v1_side.outcome, "task")[0] == KV_CACHE_NOT_EXIST
        assert prompt.used_bytes() == used
        prompt.call("copy_blocks", new, {0: [1]})
        copy_blocks(new, [1], new, [0])

    def test_a_task_that_is_over_holds_no_cache(self, prompt: V1End) -> None:
        cache = prompt.cache("a")
        prompt.run(v1_side.start_push, "task", "a", [TransferConfig(2, [1, 2, 3, 4])])
        prompt.run(v1_side.drop, "a")
        prompt.forget(cache)
        prompt.run(v1_side.wait_asked, "task", 1)
        assert prompt.used_bytes() != [0]
        prompt.run(v1_side.tell, "task", {0: False})
        for _ in range(2):
            assert prompt.run(v1_side.outcome, "task") == (PARAM_INVALID, [PARAM_INVALID])
            assert prompt.used_bytes() == [0]


class TestCopyCache:
    @pytest.mark.parametrize(
        ("args", "size"), [((), 96), ((5, 2), 96), ((1, 3, 40), 56), ((1, 3, 40, 10), 10), ((1, 3, 0, 1, 77), 1)]
    )
    @pytest.mark.parametrize("v1_num_devices", [1, 2])
    def test_bytes(self, prompt: V1End, args: tuple, size: int) -> None:
        dst, src = prompt.cache("dst"), prompt.cache("src")
        prompt.call("copy_cache", dst, src, *args)
        dst_batch, src_batch, offset = (*args, 0, 0, 0)[:3] if len(args) < 3 else args[:3]
        copy_entry(dst, dst_batch, src, src_batch, size=size, dst_offset=offset, src_offset=offset)

    def test_within_one_cache(self, prompt: V1End) -> None:
        cache = prompt.cache("a")
        prompt.call("copy_cache", cache, cache, 2, 1)
        copy_entry(cache, 2, cache, 1)

    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [
            ((6,), {}),
            ((0, 6), {}),
            ((0, 0, 96), {}),
            ((0, 0, 96, 1), {}),
            ((0, 0, 1, 96), {}),
            ((0, 0, 0, 97), {}),
            ((0, 0, 2**64 - 1, 2), {}),
            ((), {"entry_bytes": 95}),
            ((0, 0, 95, 1), {"entry_bytes": 95}),
            ((), {"tensors": 3}),
        ],
    )
    def test_violations(self, prompt: V1End, args: tuple, kwargs: dict) -> None:
        dst, src = prompt.cache("dst", **kwargs), prompt.cache("src")
        with raises(PARAM_INVALID):
            prompt.call("copy_cache", dst, src, *args)


class TestCopyBlocks:
    @pytest.mark.parametrize("blocks", [True, False])
    @pytest.mark.parametrize("v1_num_devices", [1, 2])
    def test_bytes(self, prompt: V1End, blocks: bool) -> None:
        """Of any cache."""
        cache = prompt.cache("a", blocks=blocks)
        prompt.call("copy_blocks", cache, {0: [3, 4], 1: [], 2: [5]})
        copy_blocks(cache, [3, 4, 5], cache, [0, 0, 2])
        prompt.call("copy_blocks", cache, {})

    @pytest.mark.parametrize("info", [{6: [0]}, {0: [6]}, {0: [1, 2**63]}, {2**64 - 1: [0]}])
    def test_out_of_range(self, prompt: V1End, info: dict) -> None:
        with raises(PARAM_INVALID):
            prompt.call("copy_blocks", prompt.cache("a", blocks=True), info)


class TestSwapBlocks:
    @pytest.mark.parametrize("v1_num_devices", [1, 2])
    @pytest.mark.parametrize("blocks", [True, False])
    def test_both_ways(self, prompt: V1End, blocks: bool) -> None:
        device, host = prompt.cache("device", blocks=blocks), prompt.host_cache("host")
        prompt.call("swap_blocks", device, host, {0: 5, 1: 4})
        copy_blocks(host, [5, 4], device, [0, 1])
        prompt.call("swap_blocks", host, device, {5: 2, 0: 3})
        copy_blocks(device, [2, 3], host, [5, 0])
        prompt.call("swap_blocks", host, device, {})

    def test_no_blocks_at_all(self, prompt: V1End) -> None:
        prompt.cache("device", tensors=1)
        for to_host in (True, False):
            with raises(PARAM_INVALID, "batch_size"):
                prompt.run(swap_without_blocks, "device", to_host)

    def test_addresses_that_are_none(self, prompt: V1End) -> None:
        prompt.cache("device", tensors=1)
        for address in (-1, 2**64):
            with pytest.raises(TypeError, match="addresses only support"):
                prompt.run(swap_from_address, "device", address)


class TestTensors:
    @pytest.mark.parametrize("v1_num_devices", [1, 2])
    @pytest.mark.parametrize("tensor", [0, 3])
    def test_views(self, prompt: V1End, tensor: int) -> None:
        cache = prompt.cache("a")
        found = prompt.run(v1_side.tensors, "a", tensor)
        assert found == [
            ("DT_UINT8", [6, 96], cache.tensor(tensor, device).tobytes()) for device in range(prompt.num_devices)
        ]

    def test_index(self, prompt: V1End) -> None:
        prompt.cache("a")
        for index in (-1, 4):
            with raises(PARAM_INVALID):
                prompt.run(v1_side.tensors, "a", index)

    def test_host(self, prompt: V1End) -> None:
        prompt.host_cache("host")
        with raises(KV_CACHE_NOT_EXIST):
            prompt.run(v1_side.tensors, "host")


def swap_without_blocks(side: Side, device: str, to_host: bool) -> None:
    """In the process: with a description that ``update_dim`` has made sense of, whose batch_size stays 0."""
    desc = CacheDesc(1, [0, 96], DataType.DT_UINT8, Placement.HOST)
    desc.update_dim(0, 6)
    pair = v1_side.state_of(side).caches[device], KvCache.create_cpu_cache(desc, [1])
    side.dist.kv_cache_manager.swap_blocks(*(pair if to_host else pair[::-1]), {})


def swap_from_address(side: Side, device: str, address: int) -> None:
    desc = CacheDesc(1, [6, 96], DataType.DT_UINT8, Placement.HOST)
    host = KvCache.create_cpu_cache(desc, [address])
    side.dist.kv_cache_manager.swap_blocks(host, v1_side.state_of(side).caches[device], {0: 0})
