"""Copies inside one process, byte by byte (spec api-cachemanager §9)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from llm_datadist_ray import Cache, CacheDesc, DataType, LLMException, LLMStatusCode, Placement
from tests.conformance.conftest import PATHS
from tests.conformance.pair import CacheRef, End, Pair
from tests.conformance.side import Side
from tests.conformance.status import FAILED, KV_CACHE_NOT_EXIST, PARAM_INVALID, raises

DEVICE, HOST = Placement.DEVICE, Placement.HOST
POOL = '{"memory_size": 4194304, "page_shift": 12}'
LARGE_POOL = 1 << 28
ABSENT = 99


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


def expect_copy(
    dst: CacheRef, src: CacheRef, dst_batch: int = 0, src_batch: int = 0, offset: int = 0, size: int = -1
) -> None:
    stop = src.layout.entry_bytes if size == -1 else offset + size
    for tensor in range(src.layout.num_tensors):
        dst.tensor(tensor)[dst_batch, offset:stop] = src.tensor(tensor)[src_batch, offset:stop].copy()


class TestCopyCache:
    """§9.1."""

    @pytest.mark.parametrize(
        "args",
        [
            (),
            (5, 0),
            (0, 5),
            (1, 2, 40),
            (1, 2, 40, 8),
            (1, 2, 0, 96),
            (0, 0, 95),
            (0, 0, 95, 1),
            (3, 3, 0, 1, 7),
            (3, 3, 0, -1, 2**64 - 1),
        ],
    )
    def test_bytes(self, end: End, args: tuple) -> None:
        """Destination first; the request id changes nothing."""
        src, dst = end.cache("src"), end.cache("dst")
        end.process.manage("copy_cache", "dst", "src", *args)
        expect_copy(dst, src, *args[:4])

    @pytest.mark.parametrize("dst_placement", [DEVICE, HOST])
    @pytest.mark.parametrize("src_placement", [DEVICE, HOST])
    @pytest.mark.parametrize("allocated", [False, True])
    def test_placements(self, end: End, src_placement: Placement, dst_placement: Placement, allocated: bool) -> None:
        make = end.allocate if allocated else end.cache
        src, dst = make("src", placement=src_placement), make("dst", placement=dst_placement)
        end.process.manage("copy_cache", "dst", "src", 2, 1)
        expect_copy(dst, src, 2, 1)

    def test_entries_of_different_sizes(self, end: End) -> None:
        """§9.1: what fits both; -1 is the rest of the source entry."""
        small, large = end.cache("small", entry_bytes=50), end.cache("large")
        end.process.manage("copy_cache", "large", "small", 1, 2, 10)
        expect_copy(large, small, 1, 2, 10)
        with raises(PARAM_INVALID):
            end.process.manage("copy_cache", "small", "large", 1, 2, 10)
        end.process.manage("copy_cache", "small", "large", 1, 2, 10, 40)
        expect_copy(small, large, 1, 2, 10, 40)

    def test_into_itself(self, end: End) -> None:
        cache = end.cache("cache")
        end.process.manage("copy_cache", "cache", "cache", 4, 1)
        expect_copy(cache, cache, 4, 1)
        end.process.manage("copy_cache", "cache", "cache", 2, 2)

    def test_large(self, end: End) -> None:
        src = end.cache("src", tensors=2, entries=2, entry_bytes=2_500_003)
        dst = end.cache("dst", tensors=2, entries=2, entry_bytes=2_500_003)
        end.process.manage("copy_cache", "dst", "src", 0, 1, 7)
        expect_copy(dst, src, 0, 1, 7)

    @pytest.mark.parametrize(
        "args",
        [
            (6, 0),
            (0, 6),
            (0, 0, 96),
            (0, 0, 2**64 - 1),
            (0, 0, 0, 97),
            (0, 0, 1, 96),
            (0, 0, 95, 2),
            (0, 0, 1, 2**63 - 1),
        ],
    )
    def test_what_does_not_fit(self, end: End, args: tuple) -> None:
        end.cache("src")
        end.cache("dst")
        with raises(PARAM_INVALID):
            end.process.manage("copy_cache", "dst", "src", *args)

    def test_offset_beyond_the_destination_entry(self, end: End) -> None:
        end.cache("src")
        end.cache("dst", entry_bytes=50)
        with raises(PARAM_INVALID):
            end.process.manage("copy_cache", "dst", "src", 0, 0, 50, 1)

    def test_tensors_differ(self, end: End) -> None:
        end.cache("src", tensors=2)
        end.cache("dst")
        with raises(PARAM_INVALID):
            end.process.manage("copy_cache", "dst", "src")

    def test_unknown_caches_come_before_what_does_not_fit(self, end: End) -> None:
        end.cache("src")
        end.cache("dst")
        end.process.unregister("dst")
        with raises(KV_CACHE_NOT_EXIST):
            end.process.manage("copy_cache", "dst", "src", ABSENT)
        with raises(KV_CACHE_NOT_EXIST):
            end.process.manage("copy_cache", "src", "dst", ABSENT)

    def test_a_deallocated_cache_is_unknown(self, end: End) -> None:
        end.cache("src")
        end.allocate("dst")
        end.process.manage("deallocate_cache", "dst")
        end.forget_cache("dst")
        with raises(KV_CACHE_NOT_EXIST):
            end.process.manage("copy_cache", "dst", "src")


class TestCopyBlocks:
    """§9.2."""

    @pytest.mark.parametrize("allocated", [False, True])
    @pytest.mark.parametrize(
        "info", [{0: [1]}, {0: [1, 2], 5: [3]}, {4: []}, {}, {0: [1], 2: [3], 4: [5]}, {3: [3]}, {5: [0, 1, 2, 3, 4]}]
    )
    def test_bytes(self, end: End, info: dict, allocated: bool) -> None:
        cache = end.allocate("cache", blocks=True) if allocated else end.blocks("cache")
        end.process.manage("copy_blocks", "cache", info)
        for tensor in range(4):
            before = cache.tensor(tensor).copy()
            for source, targets in info.items():
                cache.tensor(tensor)[targets] = before[source]

    def test_many(self, end: End) -> None:
        cache = end.blocks("cache", tensors=2, entries=4000, entry_bytes=777)
        order = np.random.default_rng(1).permutation(4000)
        info = {int(source): [int(target)] for source, target in zip(order[:2000], order[2000:], strict=True)}
        end.process.manage("copy_blocks", "cache", info)
        for tensor in range(2):
            cache.tensor(tensor)[order[2000:]] = cache.tensor(tensor)[order[:2000]]

    @pytest.mark.parametrize("info", [{0: [6]}, {6: [0]}, {0: [1, 2**63 - 1]}, {0: [1], 2: [6]}, {2**64 - 1: [0]}])
    def test_blocks_beyond_the_cache(self, end: End, info: dict) -> None:
        """Nothing is copied, also not the good ones."""
        end.blocks("cache")
        with raises(PARAM_INVALID):
            end.process.manage("copy_blocks", "cache", info)

    @pytest.mark.parametrize("info", [{-1: [0]}, {0: [-1]}, {0: [1, 2**64]}])
    def test_negative_and_huge_numbers(self, end: End, info: dict) -> None:
        end.blocks("cache")
        with pytest.raises(TypeError):
            end.process.manage("copy_blocks", "cache", info)

    def test_unknown_cache(self, end: End) -> None:
        end.blocks("cache")
        end.process.unregister("cache")
        with raises(KV_CACHE_NOT_EXIST):
            end.process.manage("copy_blocks", "cache", {0: [1]})


class TestSwapBlocks:
    """§9.3: one way, from the first cache to the second."""

    @pytest.mark.parametrize("allocated", [False, True])
    @pytest.mark.parametrize("info", [{0: 1}, {5: 0, 0: 5, 1: 1}, {}, {0: 0, 1: 1, 2: 2}, {4: 2, 3: 2}])
    @pytest.mark.parametrize("to_host", [False, True])
    def test_bytes(self, end: End, info: dict, to_host: bool, allocated: bool) -> None:
        device = end.allocate("device", blocks=True) if allocated else end.blocks("device")
        host = end.cpu_cache("host")
        src, dst = (device, host) if to_host else (host, device)
        end.process.manage("swap_blocks", src.name, dst.name, info)
        for tensor in range(4):
            for source, target in info.items():
                dst.tensor(tensor)[target] = src.tensor(tensor)[source]

    def test_caches_of_different_numbers_of_blocks(self, end: End) -> None:
        host, device = end.cpu_cache("host", entries=9), end.blocks("device", entries=3)
        end.process.manage("swap_blocks", "host", "device", {8: 2})
        for tensor in range(4):
            device.tensor(tensor)[2] = host.tensor(tensor)[8]
        for info in ({9: 0}, {0: 3}):
            with raises(PARAM_INVALID):
                end.process.manage("swap_blocks", "host", "device", info)

    def test_registered_host_caches_count(self, end: End) -> None:
        host, device = end.blocks("host", placement=HOST, remote_accessible=False), end.blocks("device")
        end.process.manage("swap_blocks", "device", "host", {0: 3})
        for tensor in range(4):
            host.tensor(tensor)[3] = device.tensor(tensor)[0]

    def test_no_registry_is_asked(self, end: End) -> None:
        """Works on the addresses of an object whose cache is no longer registered."""
        host, device = end.cpu_cache("host"), end.blocks("device")
        end.process.unregister("device")
        end.process.manage("swap_blocks", "host", "device", {1: 2})
        for tensor in range(4):
            device.tensor(tensor)[2] = host.tensor(tensor)[1]

    def test_many(self, end: End) -> None:
        host = end.cpu_cache("host", tensors=2, entries=4000, entry_bytes=777)
        device = end.blocks("device", tensors=2, entries=4000, entry_bytes=777)
        order = np.random.default_rng(2).permutation(4000)
        end.process.manage("swap_blocks", "host", "device", {k: int(target) for k, target in enumerate(order)})
        for tensor in range(2):
            device.tensor(tensor)[order] = host.tensor(tensor)

    def test_after_finalize(self, end: End) -> None:
        """§1."""
        end.cpu_cache("host")
        end.blocks("device")
        end.process.keep_manager()
        end.process.finalize()
        with raises(FAILED, "closed"):
            end.process.use_kept_manager("swap_blocks", "host", "device", {0: 0})
        with raises(FAILED, "closed"):
            end.process.use_kept_manager("copy_blocks", "device", {0: [1]})

    def test_finalize_waits_for_the_copy(self, end: End) -> None:
        """The pool is still there when the last byte is written to it, and then the copies end."""
        size = {"tensors": 1, "entries": 4, "entry_bytes": LARGE_POOL // 4}
        end.process.finalize()
        end.init(listen=False, mem_pool_cfg=f'{{"memory_size": {LARGE_POOL}}}')
        end.allocate("device", blocks=True, **size)
        end.cpu_cache("host", **size)
        for name in ("device", "host"):
            end.forget_cache(name)
        assert end.process.run(finalize_while_swapping, "host", "device") == FAILED

    @pytest.mark.parametrize("address", [-1, 2**64])
    def test_addresses_that_are_none(self, end: End, address: int) -> None:
        end.blocks("device", tensors=1)
        end.process.run(add_cpu_cache, "host", address)
        for names in (("host", "device"), ("device", "host")):
            with pytest.raises(TypeError, match="addresses only support"):
                end.process.manage("swap_blocks", *names, {0: 0})

    def test_a_cache_of_before_finalize(self, end: End) -> None:
        """Its memory went with its pool."""
        end.allocate("device", blocks=True)
        end.forget_cache("device")
        end.process.finalize()
        end.init(listen=False, mem_pool_cfg=POOL)
        end.cpu_cache("host")
        for names in (("host", "device"), ("device", "host")):
            with raises(KV_CACHE_NOT_EXIST):
                end.process.manage("swap_blocks", *names, {0: 0})


def finalize_while_swapping(side: Side, host: str, device: str) -> LLMStatusCode:
    """In the process: copies without a pause until the engine says no; what it said."""
    manager, src, dst = side.dist.cache_manager, side._caches[host], side._caches[device]
    has_begun = threading.Event()

    def swap() -> LLMStatusCode:
        while True:
            try:
                manager.swap_blocks(src, dst, {k: k for k in range(4)})
            except LLMException as error:
                return error.status_code
            has_begun.set()

    with ThreadPoolExecutor(1) as threads:
        swapping = threads.submit(swap)
        has_begun.wait(20.0)
        side.finalize()
        return swapping.result()


def add_cpu_cache(side: Side, name: str, address: int) -> None:
    desc = CacheDesc(1, [6, 96], DataType.DT_UINT8, placement=Placement.HOST)
    side._caches[name] = Cache.create_cpu_cache(desc, [address])
