"""Rows of transfer_cache_async and CacheTask in v2 (spec api-cachemanager §8, api-types §10.5)."""

from __future__ import annotations

from typing import Any

from llm_datadist_ray import (
    BlocksCacheKey,
    CacheDesc,
    CacheKeyByIdAndIndex,
    CacheTask,
    DataType,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist_ray.cache import CacheManager
from tests.conformance import row_side
from tests.conformance.pair import CacheRef, End, Pair
from tests.conformance.pool_cache import call
from tests.conformance.row_checks import parameters, refused, v2, v2_name
from tests.conformance.status import FAILED, KV_CACHE_NOT_EXIST, NOT_YET_LINK, PARAM_INVALID, SUCCESS, TIMEOUT


def config_for(pair: Pair, dst: CacheRef, layers: range, *, batch: int = 0, key: Any = None, dst_batch: int = 0) -> Any:
    """Layers of the source to the same layers of ``dst``, in the form of the mode."""
    if pair.remote_access:
        return TransferWithCacheKeyConfig(key or dst.key(dst_batch), layers, layers, batch)
    addrs = dst.end.process.run(row_side.tensor_addrs, dst.name)[2 * layers.start : 2 * layers.stop]
    offset = dst_batch * dst.layout.entry_bytes
    return TransferConfig(dst.end.cluster_id, [address + offset for address in addrs], layers, batch)


def start(end: End, name: str, configs: list[Any], *args: Any, **kwargs: Any) -> None:
    end.process.run(row_side.start_transfer, name, configs, *args, **kwargs)


def synchronize(end: End, *args: Any, **kwargs: Any) -> LLMStatusCode:
    return end.process.run(row_side.synchronize, *args, **kwargs)


def get_results(end: End, *args: Any, **kwargs: Any) -> list[LLMStatusCode | None]:
    return end.process.run(row_side.get_results, *args, **kwargs)


def expect_layers(dst: CacheRef, dst_entry: Any, src: CacheRef, src_entry: Any, layers: range) -> None:
    for tensor in range(2 * layers.start, 2 * layers.stop):
        dst.tensor(tensor)[dst_entry] = src.tensor(tensor)[src_entry]


def test_v2_cache_manager_transfer_cache_async(linked_pair: Pair) -> None:
    """Layer by layer in increasing order when the synchronizer says so; entries to entries, an entry to blocks, and
    blocks to blocks (spec §8)."""
    assert parameters(CacheManager.transfer_cache_async) == [
        "src_cache",
        "layer_synchronizer",
        "transfer_configs",
        ("src_block_indices", None),
        ("dst_block_indices", None),
        ("dst_block_memory_size", None),
    ]
    pair, a, b = linked_pair, linked_pair.a, linked_pair.b
    src, dst = a.cache("src", tensors=6), b.cache("dst", tensors=6)
    blocks, dst_blocks = a.blocks("blocks", tensors=6), b.blocks("dst_blocks", tensors=6, entry_bytes=96)
    small = b.blocks("small", tensors=6, entry_bytes=40, model_id=1)
    start(a, "src", [config_for(pair, dst, range(1, 3), batch=5, dst_batch=2)])
    assert synchronize(a) is SUCCESS
    assert a.process.run(row_side.layer_calls) == [(1, None), (2, None)], "each layer once, without a time limit"
    expect_layers(dst, 2, src, 5, range(1, 3))

    start(a, "blocks", [config_for(pair, dst_blocks, range(3), key=b.blocks_key())], [0, 5], (3, 1))
    assert synchronize(a) is SUCCESS
    expect_layers(dst_blocks, [3, 1], blocks, [0, 5], range(3))

    config = config_for(pair, small, range(1), batch=0, key=b.blocks_key(1))
    start(a, "src", [config], None, [4, 0], 40)
    assert synchronize(a) is SUCCESS
    for tensor in range(2):
        small.tensor(tensor)[4], small.tensor(tensor)[0] = src.tensor(tensor)[0][:40], src.tensor(tensor)[0][40:80]

    start(a, "src", [config_for(pair, dst, range(3), batch=1)], refuse=1)
    assert get_results(a) == [PARAM_INVALID]
    assert a.process.run(row_side.layer_calls) == [(0, None), (1, None)]
    expect_layers(dst, 0, src, 1, range(1))  # what came before it stays


def test_v2_cache_manager_transfer_cache_async_refusals(linked_pair: Pair) -> None:
    """Checks at call time (spec §8.1)."""
    pair, a, b = linked_pair, linked_pair.a, linked_pair.b
    a.cache("src")
    a.blocks("blocks")
    a.cache("odd", tensors=3)
    a.cache("host", placement=Placement.HOST)
    dst = b.cache("dst")
    good = config_for(pair, dst, range(2))
    wrong_form = TransferConfig(2, [1, 2]) if pair.remote_access else TransferWithCacheKeyConfig(
        BlocksCacheKey(2), range(1), range(1)
    )  # fmt: skip
    for args, error in (
        (("src", [wrong_form]), TypeError),
        (("src", good), TypeError),
        (("src", None), TypeError),
        (("host", [good]), PARAM_INVALID),
        (("odd", [config_for(pair, dst, range(1))]), PARAM_INVALID),
        (("src", [good], "0", [0]), TypeError),
        (("src", [good], [-1], [0]), ValueError),
        (("src", [good], None, [2**64], 1), ValueError),
        (("src", [good], None, [0], -1), ValueError),
        (("src", [good], None, [0], "1"), TypeError),
        (("blocks", [good], [0], None), PARAM_INVALID),
        (("blocks", [good], [0, 1], [0]), PARAM_INVALID),
        (("src", [good], None, [0]), PARAM_INVALID),
        (("src", [good], None, None, 8), PARAM_INVALID),
        (("blocks", [config_for(pair, dst, range(2), batch=1)], [0], [0]), PARAM_INVALID),
        (("src", [config_for(pair, dst, range(3))]), PARAM_INVALID),
    ):
        refused(error, start, a, *args)
    if not pair.remote_access:
        refused(PARAM_INVALID, start, a, "src", [TransferConfig(2, [1, 2, 3], range(2))])
    refused(TypeError, call, a, "transfer_cache_async", row_side.Named("src"), None, [good])
    start(a, "src", [good])
    assert synchronize(a) is SUCCESS
    expect_layers(dst, 0, a.cache_ref("src"), 0, range(2))


def test_v2_cache_task_constructor(linked_pair: Pair) -> None:
    """Made by transfer_cache_async only; an empty list of configs is done at once (spec §8.1)."""
    assert v2_name("CacheTask") is CacheTask
    linked_pair.a.cache("src")
    start(linked_pair.a, "src", [])
    assert synchronize(linked_pair.a) is SUCCESS
    assert get_results(linked_pair.a) == []
    assert linked_pair.a.process.run(row_side.layer_calls) == []
    with v2() as dist:
        cache = dist.cache_manager.register_cache(CacheDesc(2, [4, 8], DataType.DT_INT8), [4096, 8192])
        refused(TypeError, dist.cache_manager.transfer_cache_async, cache, object(), [])
        refused(TypeError, dist.cache_manager.transfer_cache_async, None, object(), [])


def test_v2_cache_task_synchronize(linked_pair: Pair) -> None:
    """TIMEOUT while it runs, which cancels nothing; then the first failure in config order (api-types §10.5)."""
    assert parameters(CacheTask.synchronize) == [("timeout_in_millis", None)]
    pair, a, b = linked_pair, linked_pair.a, linked_pair.b
    src, dst = a.cache("src"), b.cache("dst")
    start(a, "src", [config_for(pair, dst, range(2), batch=3)], closed=True)
    assert synchronize(a, 1) is TIMEOUT
    assert synchronize(a, timeout_in_millis=0) is TIMEOUT
    refused(TypeError, synchronize, a, "1")
    refused(ValueError, synchronize, a, -1)
    refused(ValueError, synchronize, a, 2**32)
    a.process.run(row_side.open_gate)
    assert synchronize(a, timeout_in_millis=20_000) is SUCCESS
    assert synchronize(a) is SUCCESS
    expect_layers(dst, 0, src, 3, range(2))
    start(a, "src", [unlinked_config(pair, range(1))])
    assert synchronize(a) is NOT_YET_LINK


def unlinked_config(pair: Pair, layers: range) -> Any:
    if pair.remote_access:
        return TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(9, 1), layers, layers)
    return TransferConfig(9, [4096] * (2 * len(layers)), layers)


def test_v2_cache_task_get_results(linked_pair: Pair) -> None:
    """One entry per config in the order given: success, its error, or None when the job stopped before its end."""
    assert parameters(CacheTask.get_results) == [("timeout_in_millis", None)]
    pair, a, b = linked_pair, linked_pair.a, linked_pair.b
    src, dst = a.cache("src"), b.cache("dst")
    configs = [config_for(pair, dst, range(1)), unlinked_config(pair, range(1, 2))]
    start(a, "src", configs, closed=True)
    assert get_results(a, 1) == [TIMEOUT, TIMEOUT]
    refused(TypeError, get_results, a, 1.0)
    refused(ValueError, get_results, a, -1)
    a.process.run(row_side.open_gate)
    assert get_results(a) == get_results(a, timeout_in_millis=20_000) == [SUCCESS, NOT_YET_LINK]
    assert synchronize(a) is NOT_YET_LINK
    expect_layers(dst, 0, src, 0, range(1))
    start(a, "src", [config_for(pair, dst, range(1)), config_for(pair, dst, range(1, 2))], refuse=1)
    assert get_results(a) == [PARAM_INVALID, PARAM_INVALID], "of one cluster: the last write wins"
    start(a, "src", [config_for(pair, dst, range(2))], fail=1)
    assert get_results(a) == [FAILED]
    start(a, "src", [config_for(pair, dst, range(2)), unlinked_config(pair, range(1))])
    assert get_results(a) == [None, NOT_YET_LINK]
    if pair.remote_access:
        unknown = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, 77), range(1), range(1))
        start(a, "src", [unknown])
        assert get_results(a) == [KV_CACHE_NOT_EXIST]
    else:
        start(a, "src", [TransferConfig(2, [4096, 8192], range(1))])
        assert get_results(a) == [PARAM_INVALID], "no memory that the peer registered"
