"""transfer_cache_async of v1 above a fake engine: checks at the call, what is sent (spec api-kvcachemanager §7)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from llm_datadist_ray._native import Direction, Move, NativeStatus, RemoteBy
from llm_datadist_ray.errors import LLMStatusCode
from llm_datadist_ray.types import (
    BlocksCacheKey,
    Cache,
    CacheTask,
    KvCache,
    LayerSynchronizer,
    LLMRole,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from tests.conformance.status import FEATURE_NOT_ENABLED, KV_CACHE_NOT_EXIST, PARAM_INVALID, SUCCESS, raises
from tests.native.kv_cache_process import FakeProcess, device_desc

LINK_BUSY = LLMStatusCode.LLM_LINK_BUSY
WAIT_TIMEOUT = LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
logs_layers = pytest.mark.logs("ldr-layers")


class Ready(LayerSynchronizer):
    def __init__(self, say: Callable[[int], bool] = lambda layer: True) -> None:
        self.asked: list[int] = []
        self._say = say

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        assert timeout_in_millis is None
        self.asked.append(layer_index)
        return self._say(layer_index)


def configs(*dst_cluster_ids: int, layers: range | None = None, batch: int = 0) -> list[TransferConfig]:
    num_addrs = 2 * (2 if layers is None else len(layers))
    return [TransferConfig(dst, list(range(100, 100 + num_addrs)), layers, batch) for dst in dst_cluster_ids]


def push(process: FakeProcess, cache: KvCache, *args: Any, **kwargs: Any) -> CacheTask:
    synchronizer = kwargs.pop("synchronizer", None) or Ready()
    return process.manager.transfer_cache_async(cache, synchronizer, *args, **kwargs)


def sent(process: FakeProcess) -> list[tuple]:
    """Cluster, address, tensor, move, batch, of every transfer."""
    found = []
    for transfer in process.engine.calls_of("transfer"):
        params = transfer.params
        assert (params.direction, params.remote_by, params.local_num_tensors) == (Direction.PUSH, RemoteBy.ADDRESS, 1)
        found.append(
            (params.cluster_id, params.remote_key_id, params.local_first_tensor, params.move, params.local_batch_index)
        )
    return found


class TestCall:
    @pytest.mark.parametrize("role", [LLMRole.DECODER, LLMRole.MIX])
    def test_role(self, role: LLMRole) -> None:
        process = FakeProcess(role)
        with raises(PARAM_INVALID, "is for PROMPT"):
            push(process, process.cache(), configs(2))

    def test_devices(self) -> None:
        process = FakeProcess(LLMRole.PROMPT, 2)
        with raises(FEATURE_NOT_ENABLED):
            push(process, process.cache(), configs(2))

    @pytest.mark.parametrize(
        ("args", "error"),
        [
            ((None, Ready(), []), TypeError),
            ((Cache(1, device_desc(), [1] * 4, None, False, False), Ready(), []), TypeError),
            (("host", Ready(), []), PARAM_INVALID),
            (("cache", Ready(), [], None, 1), TypeError),
            (("cache", Ready(), [], None, range(1)), TypeError),
            (("cache", Ready(), [], ["0"], [0]), TypeError),
            (("cache", Ready(), [], [0], [-1]), ValueError),
            (("cache", Ready(), [], [2**64], [0]), ValueError),
            (("cache", Ready(), [], [0], [0], "1"), TypeError),
            (("cache", Ready(), [], [0], [0], -1), ValueError),
            (("cache", Ready(), [], [0], None), PARAM_INVALID),
            (("cache", Ready(), [], [0], [0, 1]), PARAM_INVALID),
            (("cache", Ready(), [], [0], []), PARAM_INVALID),
            (("cache", Ready(), [], None, [0], 96), PARAM_INVALID),
            (("cache", Ready(), [], None, []), PARAM_INVALID),
            (("cache", Ready(), [], [], [0], 96), PARAM_INVALID),
            (("cache", None, []), TypeError),
            (("cache", lambda layer, timeout: True, []), TypeError),
            (("cache", Ready(), None), TypeError),
            (("cache", Ready(), configs(2)[0]), TypeError),
            (("cache", Ready(), [TransferWithCacheKeyConfig(BlocksCacheKey(2), range(1), range(1))]), TypeError),
            (("cache", Ready(), [None]), TypeError),
            (("cache", Ready(), [], None, None, 96), PARAM_INVALID),
            (("odd", Ready(), []), PARAM_INVALID),
            (("cache", Ready(), configs(2, batch=1), [0], [0]), PARAM_INVALID),
            (("cache", Ready(), configs(2, layers=range(1, 3))), PARAM_INVALID),
            (("cache", Ready(), [TransferConfig(2, [1, 2])]), PARAM_INVALID),
            (("cache", Ready(), [TransferConfig(2, [1, 2, 3, 4, 5])]), PARAM_INVALID),
        ],
    )
    def test_arguments(self, args: tuple, error: Any) -> None:
        process = FakeProcess(LLMRole.PROMPT)
        host_desc = device_desc(placement=Placement.HOST)
        caches = {
            "cache": process.cache(),
            "odd": process.cache(tensors=3),
            "host": KvCache.create_cpu_cache(host_desc, [1, 2, 3, 4]),
        }
        source = caches.get(args[0], args[0]) if isinstance(args[0], str) else args[0]
        with raises(PARAM_INVALID) if error is PARAM_INVALID else pytest.raises(error):
            process.manager.transfer_cache_async(source, *args[1:])

    def test_what_is_not_supported_says_so(self) -> None:
        process = FakeProcess(LLMRole.PROMPT)
        with raises(PARAM_INVALID, "transfer from blocks to cache is not supported"):
            push(process, process.cache(), configs(2), [0], None)
        with raises(PARAM_INVALID, "transfer from cache to blocks is not supported"):
            push(process, process.cache(), configs(2), None, [0])

    def test_no_configs(self) -> None:
        process = FakeProcess(LLMRole.PROMPT)
        task = push(process, process.cache(), ())
        assert (task.synchronize(0), task.get_results(0)) == (SUCCESS, [])

    def test_the_full_range_is_written_into_the_config(self) -> None:
        process = FakeProcess(LLMRole.PROMPT)
        config = configs(2)[0]
        push(process, process.cache(), [config]).synchronize()
        assert config.src_layer_range == range(2)


class TestTransfers:
    def test_entries_layer_by_layer(self) -> None:
        process = FakeProcess(LLMRole.PROMPT)
        synchronizer = Ready()
        cache = process.cache(tensors=6)
        targets = [
            *configs(2, layers=range(1, 3), batch=5),
            TransferConfig(3, [700, 701], range(2, 3)),
        ]
        task = push(process, cache, targets, synchronizer=synchronizer)
        assert task.get_results() == [SUCCESS, SUCCESS]
        assert synchronizer.asked == [1, 2]
        assert sent(process) == [
            (2, 100, 2, Move.ENTRY, 5),
            (2, 101, 3, Move.ENTRY, 5),
            (2, 102, 4, Move.ENTRY, 5),
            (2, 103, 5, Move.ENTRY, 5),
            (3, 700, 4, Move.ENTRY, 0),
            (3, 701, 5, Move.ENTRY, 0),
        ]

    @pytest.mark.parametrize("size", [None, 0, 96])
    def test_blocks(self, size: int | None) -> None:
        process = FakeProcess(LLMRole.PROMPT)
        task = push(process, process.cache(blocks=True, tensors=2), configs(2, layers=range(1)), [3, 1], [0, 5], size)
        assert task.synchronize() == SUCCESS
        assert [move for _, _, _, move, _ in sent(process)] == [Move.BLOCKS] * 2
        params = process.engine.calls_of("transfer")[0].params
        assert (params.src_blocks.count, params.dst_blocks.count, params.dst_block_bytes) == (2, 2, size or 0)

    def test_a_blocks_cache_without_lists_is_its_first_block(self) -> None:
        process = FakeProcess(LLMRole.PROMPT)
        task = push(process, process.cache(blocks=True), configs(2))
        assert task.synchronize() == SUCCESS
        params = process.engine.calls_of("transfer")[0].params
        assert (params.move, params.src_blocks.count, params.dst_blocks.count) == (Move.BLOCKS, 1, 1)

    @logs_layers
    def test_and_has_no_second_entry(self) -> None:
        process = FakeProcess(LLMRole.PROMPT)
        assert push(process, process.cache(blocks=True), configs(2, batch=1)).synchronize() == PARAM_INVALID
        assert not process.engine.calls_of("transfer")

    @logs_layers
    @pytest.mark.parametrize(
        ("status", "code"),
        [
            (NativeStatus.TIMEOUT, WAIT_TIMEOUT),
            (NativeStatus.INVALID, PARAM_INVALID),
            (NativeStatus.NO_CACHE, KV_CACHE_NOT_EXIST),
            (NativeStatus.NOT_LINKED, LLMStatusCode.LLM_NOT_YET_LINK),
        ],
    )
    def test_a_failure_stops_the_job(self, status: NativeStatus, code: LLMStatusCode) -> None:
        process = FakeProcess(LLMRole.PROMPT)
        process.engine.fail["transfer"] = status
        task = push(process, process.cache(), configs(2, 3))
        assert task.get_results() == [code, None]
        assert task.synchronize() == code
        assert len(process.engine.calls_of("transfer")) == 1

    @logs_layers
    def test_a_link_in_use(self) -> None:
        """Of that config; nothing is queued."""
        process = FakeProcess(LLMRole.PROMPT)
        cache = process.cache()
        results = []

        def push_inside() -> None:
            process.engine.before.clear()
            results.extend(push(process, cache, [*configs(3), *configs(2)]).get_results())

        process.engine.before["transfer"] = push_inside
        assert push(process, cache, configs(2)).synchronize() == SUCCESS
        assert results == [None, LINK_BUSY]

    def test_time_outs_of_the_task(self) -> None:
        process = FakeProcess(LLMRole.PROMPT)
        go = threading.Event()
        task = push(process, process.cache(), configs(2, 3), synchronizer=Ready(lambda layer: go.wait()))
        assert task.synchronize(0) == WAIT_TIMEOUT
        assert task.get_results(0) == [WAIT_TIMEOUT, WAIT_TIMEOUT]
        go.set()
        assert task.get_results() == [SUCCESS, SUCCESS]

    def test_a_synchronizer_that_says_no(self) -> None:
        process = FakeProcess(LLMRole.PROMPT)
        cache = process.cache()
        task = push(
            process, cache, [*configs(2, layers=range(1)), *configs(3, layers=range(1, 2))],
            synchronizer=Ready(lambda layer: False),
        )  # fmt: skip
        assert task.get_results() == [PARAM_INVALID, None]
        assert task.synchronize() == PARAM_INVALID

    def test_the_source_stays_while_it_is_sent(self) -> None:
        process = FakeProcess(LLMRole.PROMPT)
        go = threading.Event()
        task = push(process, process.cache(), configs(2), synchronizer=Ready(lambda layer: go.wait()))
        assert process.engine.caches
        go.set()
        assert task.synchronize() == SUCCESS
