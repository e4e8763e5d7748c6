"""Rows of KvCacheManager that move bytes between a PROMPT and a DECODER (spec api-kvcachemanager §4, §5, §7)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from llm_datadist_ray import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist_ray.kv_cache import KvCacheManager
from llm_datadist_ray.types import INVALID_ID
from tests.conformance import row_side
from tests.conformance.pair import Pair
from tests.conformance.pool_cache import PoolCache, call
from tests.conformance.row_checks import parameters, refused, v1
from tests.conformance.status import FEATURE_NOT_ENABLED, KV_CACHE_NOT_EXIST, NOT_YET_LINK, PARAM_INVALID, SUCCESS
from tests.conformance.v1_pair import V1Pair, init_v1

DEVICE_OUT_OF_MEMORY = LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
DESC = CacheDesc(2, [4, 8], DataType.DT_INT8)
HOST_DESC = CacheDesc(2, [4, 8], DataType.DT_INT8, Placement.HOST)
two_sided = pytest.mark.mode("two-sided")


@pytest.fixture
def ends(idle_pair: Pair) -> Iterator[V1Pair]:
    """Initialised, not linked."""
    yield init_v1(idle_pair)


@two_sided
def test_v1_kv_cache_manager_pull_cache(ends: V1Pair) -> None:
    """With offsets; a given offset, be it 0, leaves the key bound (spec §4)."""
    assert parameters(KvCacheManager.pull_cache)[:4] == ["cache_key", "kv_cache", ("batch_index", 0), ("size", -1)]
    src = PoolCache(ends.prompt, "src", keys=[CacheKey(2, 7), CacheKey(2, 8), CacheKey(2, 9)])
    dst = PoolCache(ends.decoder, "dst")
    refused(NOT_YET_LINK, call, ends.decoder, "pull_cache", src.key(), dst)
    ends.link()

    def pull(*args: Any, **kwargs: Any) -> None:
        call(ends.decoder, "pull_cache", *args, **kwargs)

    pull(CacheKey(2, 7), dst, 0, src_cache_offset=0, dst_cache_offset=0)
    pull(CacheKey(2, 7), dst, 1, 20, src_cache_offset=10, dst_cache_offset=70)
    pull(CacheKey(2, 7), dst, 2, -1, dst_cache_offset=90, unknown=1)
    dst.expected[:, 0] = src.expected[:, 0]
    dst.expected[:, 1, 70:90] = src.expected[:, 0, 10:30]
    dst.expected[:, 2, 90:] = src.expected[:, 0, :6]
    pull(src.key(0), dst, 3)  # by id, and consumes the key
    dst.expected[:, 3] = src.expected[:, 0]
    refused(KV_CACHE_NOT_EXIST, pull, CacheKey(2, 7), dst)
    for layer in range(2):
        pull(CacheKey(2, 8), dst, 4, src_layer_range=range(layer, layer + 1), dst_layer_range=range(layer, layer + 1))
    dst.expected[:, 4] = src.expected[:, 1]
    refused(KV_CACHE_NOT_EXIST, pull, CacheKey(2, 8), dst)
    cpu = PoolCache(ends.decoder, "cpu", is_cpu=True)
    for args, kwargs, error in (
        ((BlocksCacheKey(2), dst), {}, TypeError),
        ((CacheKey(2, 9, 0, 1), dst), {}, PARAM_INVALID),
        ((CacheKey(2, INVALID_ID), dst), {}, PARAM_INVALID),
        ((src.key(), 1), {}, TypeError),
        ((src.key(), cpu), {}, PARAM_INVALID),
        ((src.key(), dst, -1), {}, ValueError),
        ((src.key(), dst, 6), {}, PARAM_INVALID),
        ((src.key(), dst, 0, 0), {}, PARAM_INVALID),
        ((src.key(), dst, 0, -2), {}, PARAM_INVALID),
        ((src.key(), dst, 0, 97), {}, PARAM_INVALID),
        ((src.key(), dst, 0, 20), {"src_cache_offset": 80}, PARAM_INVALID),
        ((src.key(), dst, 0, 20), {"dst_cache_offset": 80}, PARAM_INVALID),
        ((src.key(), dst), {"src_cache_offset": -1}, ValueError),
        ((src.key(), dst), {"dst_cache_offset": "0"}, TypeError),
        ((src.key(), dst), {"tensor_num_per_layer": 0}, PARAM_INVALID),
        ((CacheKey(2, 77), dst), {}, KV_CACHE_NOT_EXIST),
        ((CacheKeyByIdAndIndex(2, 77), dst), {}, KV_CACHE_NOT_EXIST),
        ((src.key(6), dst), {}, KV_CACHE_NOT_EXIST),
        ((CacheKeyByIdAndIndex(7, 1), dst), {}, NOT_YET_LINK),
    ):
        refused(error, pull, *args, **kwargs)
    refused(PARAM_INVALID, call, ends.prompt, "pull_cache", CacheKey(1, 1), src)
    dst.check()
    src.check()


@two_sided
def test_v1_kv_cache_manager_pull_blocks(ends: V1Pair) -> None:
    """Lists only, not tuples; nothing is consumed (spec §5)."""
    assert parameters(KvCacheManager.pull_blocks)[:4] == [
        "prompt_cache_key",
        "decoder_kv_cache",
        "prompt_blocks",
        "decoder_blocks",
    ]
    src = PoolCache(ends.prompt, "src", blocks=True, keys=BlocksCacheKey(2))
    dst, narrow = (
        PoolCache(ends.decoder, "dst", blocks=True),
        PoolCache(ends.decoder, "narrow", blocks=True, entry_bytes=64),
    )
    contiguous = PoolCache(ends.prompt, "contiguous", keys=[CacheKey(2, 1)])
    ends.link()

    def pull(*args: Any, **kwargs: Any) -> None:
        call(ends.decoder, "pull_blocks", *args, **kwargs)

    key = BlocksCacheKey(prompt_cluster_id=2)
    pull(key, dst, [5, 0], [1, 2])
    pull(key, dst, [3], [4], src_layer_range=range(1, 2), dst_layer_range=range(1), tensor_num_per_layer=1)
    dst.expected[:, [1, 2]] = src.expected[:, [5, 0]]
    dst.expected[0, 4] = src.expected[1, 3]
    for args, error in (
        ((contiguous.key(), dst, [0], [0]), TypeError),
        ((CacheKey(2, 1), dst, [], [0]), TypeError),
        ((key, dst, (0,), [0]), TypeError),
        ((key, dst, [0], (0,)), TypeError),
        ((key, dst, ["0"], [0]), TypeError),
        ((key, dst, [], []), PARAM_INVALID),
        ((key, dst, [0, 1], [0]), PARAM_INVALID),
        ((key, dst, [6], [0]), PARAM_INVALID),
        ((key, dst, [0], [6]), PARAM_INVALID),
        ((key, narrow, [0], [0]), PARAM_INVALID),
        ((BlocksCacheKey(2, 1), dst, [0], [0]), KV_CACHE_NOT_EXIST),
        ((BlocksCacheKey(7), dst, [0], [0]), NOT_YET_LINK),
    ):
        refused(error, pull, *args)
    refused(PARAM_INVALID, call, ends.prompt, "pull_blocks", BlocksCacheKey(1), src, [0], [0])
    dst.check()
    narrow.check()


@two_sided
def test_v1_kv_cache_manager_transfer_cache_async(ends: V1Pair) -> None:
    """PROMPT pushes layer after layer to addresses inside the decoder's caches (spec §7)."""
    assert parameters(KvCacheManager.transfer_cache_async) == [
        "src_cache",
        "layer_synchronizer",
        "transfer_configs",
        ("src_block_indices", None),
        ("dst_block_indices", None),
        ("dst_block_memory_size", None),
    ]
    src, blocks = PoolCache(ends.prompt, "src"), PoolCache(ends.prompt, "blocks", blocks=True)
    dst, dst_blocks = PoolCache(ends.decoder, "dst"), PoolCache(ends.decoder, "dst_blocks", blocks=True)
    ends.link()
    run = ends.prompt.process.run

    def results(name: str, configs: Any, *args: Any) -> Any:
        run(row_side.start_transfer, name, configs, *args)
        return run(row_side.get_results)

    second_layer = [address + 2 * 96 for address in dst.addrs()[2:]]
    assert results("src", [TransferConfig(1, second_layer, range(1, 2), 5)]) == [SUCCESS]
    dst.expected[2:, 2] = src.expected[2:, 5]
    assert run(row_side.layer_calls) == [(1, None)]
    assert results("blocks", [TransferConfig(1, dst_blocks.addrs())], [0, 5], [4, 1]) == [SUCCESS]
    dst_blocks.expected[:, [4, 1]] = blocks.expected[:, [0, 5]]
    assert results("src", [TransferConfig(1, [4096, 8192], range(1))]) == [PARAM_INVALID]
    assert results("src", [TransferConfig(7, dst.addrs())]) == [NOT_YET_LINK]
    good = TransferConfig(1, dst.addrs())
    by_key = TransferWithCacheKeyConfig(BlocksCacheKey(1), range(1), range(1))
    for args, error in (
        (("src", [by_key]), TypeError),
        (("src", good), TypeError),
        (("src", [good], None, []), PARAM_INVALID),
        (("src", [good], None, [0], 8), PARAM_INVALID),
        (("blocks", [good], [0, 1], [0]), PARAM_INVALID),
        (("src", [TransferConfig(1, [1, 2, 3])]), PARAM_INVALID),
        (("src", [TransferConfig(1, [1] * 6, range(3))]), PARAM_INVALID),
    ):
        refused(error, run, row_side.start_transfer, *args)
    refused(PARAM_INVALID, ends.decoder.process.run, row_side.start_transfer, "dst", [TransferConfig(2, src.addrs())])
    dst.check()
    dst_blocks.check()
    with v1(device_id=[0, 1], listen_ip_info="127.0.0.1:0;127.0.0.1:0") as dist:
        cache = dist.kv_cache_manager.allocate_cache(DESC)
        refused(FEATURE_NOT_ENABLED, dist.kv_cache_manager.transfer_cache_async, cache, None, [])
