"""What ``transfer_cache_async`` checks, in its order, and what each layer becomes (spec §8.1, §8.3)."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from llm_datadist_ray import (
    BlocksCacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    LLMException,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist_ray._native import Direction, Move, NativeStatus, RemoteBy
from tests.native.cache_fakes import Fake, Ready, cache, native_error

PARAM_INVALID = LLMStatusCode.LLM_PARAM_INVALID
SUCCESS = LLMStatusCode.LLM_SUCCESS
TIMEOUT_NS = 2_000_000_000


def by_address(layers: range | None = None, num_addrs: int = 4, src_batch_index: int = 0) -> TransferConfig:
    return TransferConfig(2, [1000 * (i + 1) for i in range(num_addrs)], layers, src_batch_index)


def by_key(
    key: Any = None, src: range = range(2), dst: range = range(2), src_batch_index: int = 0
) -> TransferWithCacheKeyConfig:
    return TransferWithCacheKeyConfig(key or CacheKeyByIdAndIndex(2, 7, 3), src, dst, src_batch_index)


def changed(config: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(config, name, value)
    return config


SRC = cache(tensors=4)
HOST = cache(tensors=4, placement=Placement.HOST)
ODD = cache(tensors=3)

# Each row is wrong in that column and, if it is marked so, in later ones too: the error tells that it came first.
CHECKS: list[tuple[str, tuple, type[Exception] | str]] = [
    ("source type", ("cache", None, None), TypeError),
    ("source None", (None, None, None), TypeError),
    ("placement before lists", (HOST, Ready(), [], "0"), "on the host"),
    ("dst list type", (SRC, Ready(), [], [2**64], "0"), TypeError),
    ("dst list range before src list", (SRC, Ready(), [], "0", [2**64]), ValueError),
    ("dst list negative", (SRC, Ready(), [], None, [-1]), ValueError),
    ("dst list elements", (SRC, Ready(), [], None, ["0"]), TypeError),
    ("src list type before size", (SRC, Ready(), [], 7, [0], -1), TypeError),
    ("src list range", (SRC, Ready(), [], [2**64], [0]), ValueError),
    ("dst array dimensions", (SRC, Ready(), [], [0, 1], np.zeros((2, 2), np.int64)), TypeError),
    ("dst array of floats", (SRC, Ready(), [], None, np.array([0.0])), TypeError),
    ("dst array without sign", (SRC, Ready(), [], None, np.array([0], np.uint64)), TypeError),
    ("dst tensor", (SRC, Ready(), [], None, torch.tensor([0])), TypeError),
    ("src array before size", (SRC, Ready(), [], np.array([0], np.uint64), [0], -1), TypeError),
    ("src array dimensions", (SRC, Ready(), [], np.zeros((1, 1), np.int32), [0]), TypeError),
    ("src tensor", (SRC, Ready(), [], torch.tensor([0]), [0]), TypeError),
    ("memory size type", (SRC, Ready(), [], [0], [0, 1], "0"), TypeError),
    ("memory size range before counts", (SRC, Ready(), [], [0], [0, 1], -1), ValueError),
    ("source without destination blocks", (SRC, None, [], [0]), "1 src_block_indices need as many"),
    ("counts before synchronizer", (SRC, None, [], [0], [0, 1]), "1 src_block_indices need as many"),
    ("destination alone without size", (SRC, None, [], None, [0, 1]), "need dst_block_memory_size"),
    ("synchronizer before configs", (SRC, object(), None), TypeError),
    ("synchronizer None", (SRC, None, []), TypeError),
    ("configs None", (SRC, Ready(), None, None, None, 5), TypeError),
    ("configs type", (SRC, Ready(), by_address()), TypeError),
    ("config of the other mode", (ODD, Ready(), [by_address(), by_key()], None, None, 5), TypeError),
    ("size without blocks before tensors", (ODD, Ready(), [], None, None, 5), "needs dst_block_indices"),
    ("tensors before configs", (ODD, Ready(), [by_address(num_addrs=1)]), "has 3"),
    ("batch before range", (SRC, Ready(), [by_address(range(9), 1, 1)], [0], [0]), "src_batch_index should be 0"),
    ("range before addresses", (SRC, Ready(), [by_address(range(3), 1)]), "inside the 2 layers"),
    ("addresses", (SRC, Ready(), [by_address(), by_address(None, 3)]), r"transfer_configs\[1\]: 2 layers need"),
    ("addresses of the range", (SRC, Ready(), [by_address(range(1))]), "1 layers need 2 dst_addrs each, but got 4"),
]


@pytest.mark.parametrize(("args", "error"), [row[1:] for row in CHECKS], ids=[row[0] for row in CHECKS])
def test_checks(args: tuple, error: type[Exception] | str) -> None:
    fake = Fake()
    if isinstance(error, str):
        with pytest.raises(LLMException, match=error) as caught:
            fake.manager.transfer_cache_async(*args)
        assert caught.value.status_code == PARAM_INVALID
    else:
        with pytest.raises(error):
            fake.manager.transfer_cache_async(*args)
    assert fake.engine.calls == []


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (by_address(), TypeError),
        (by_key(src=range(1, 3)), "inside the 2 layers"),
        (changed(by_key(), dst_layer_range=range(1)), "should be equally long"),
        (changed(by_key(), dst_layer_range=None), TypeError),
        (changed(by_key(), dst_layer_range=range(2**70)), "should be equally long"),
        (changed(by_key(), cache_key=None), AttributeError),
        (by_key(CacheKeyByIdAndIndex(2, -1)), TypeError),
    ],
)
def test_checks_of_configs_by_key(config: Any, error: type[Exception] | str) -> None:
    fake = Fake(remote_access=True)
    expected: Any = LLMException if isinstance(error, str) else error
    with pytest.raises(expected, match=error if isinstance(error, str) else None):
        fake.manager.transfer_cache_async(SRC, Ready(), [config])
    assert fake.engine.calls == []


def layers_of(fake: Fake, *args: Any) -> list[dict[str, Any]]:
    task = fake.manager.transfer_cache_async(*args)
    assert task.synchronize(10_000) == SUCCESS
    assert all(name == "run" for name, _ in fake.engine.calls)
    return [fields for _, fields in fake.engine.calls]


def test_no_configs() -> None:
    fake = Fake()
    assert fake.manager.transfer_cache_async(SRC, Ready(), []).get_results(0) == []


def test_a_range_left_out_is_put_into_the_callers_object() -> None:
    config, keyed = by_address(), changed(by_key(), src_layer_range=None)
    layers_of(Fake(), SRC, Ready(), [config])
    layers_of(Fake(remote_access=True), SRC, Ready(), (keyed,))
    assert config.src_layer_range == keyed.src_layer_range == range(2)


def test_entries_to_addresses() -> None:
    """Two pushes for a layer, one for each address; q counts from the range's start (8.2)."""
    source = cache(tensors=6, cache_id=5)
    common = {
        "direction": Direction.PUSH,
        "cluster_id": 2,
        "remote_by": RemoteBy.ADDRESS,
        "local_cache_id": 5,
        "local_batch_index": 3,
        "local_num_tensors": 1,
        "size_bytes": -1,
    }
    found = layers_of(Fake(), source, Ready(), [by_address(range(1, 3), 4, 3)])
    assert all(0 < fields.pop("timeout_ns") <= TIMEOUT_NS for fields in found)
    assert found == [{**common, "local_first_tensor": 2 + i, "remote_key_id": 1000 * (i + 1)} for i in range(4)]


@pytest.mark.logs("slow")
def test_the_two_tensors_of_a_layer_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """8.3: the limit is per layer. Here the first tensor takes all of it, and the next layer has its own."""
    fake, clock = Fake(), [100.0]
    monkeypatch.setattr("llm_datadist_ray.cache.layerwise.time", SimpleNamespace(monotonic=lambda: clock[0]))
    found: list[int] = []

    def run(transfer: Any) -> None:
        found.append(transfer.params.timeout_ns)
        clock[0] += (1.5, 0.1, 2.5, 0.0)[len(found) - 1]
        if len(found) == 4:
            raise native_error(NativeStatus.TIMEOUT, "slow")

    fake.engine.run = run  # type: ignore[method-assign]
    task = fake.manager.transfer_cache_async(SRC, Ready(), [by_address()])
    assert task.get_results(10_000) == [LLMStatusCode.LLM_TIMEOUT]
    assert found == [TIMEOUT_NS, TIMEOUT_NS // 4, TIMEOUT_NS, 0]


def test_entries_to_a_cache_by_id() -> None:
    """One push for a layer, of both its tensors, from the q-th layer of one range to that of the other (8.2)."""
    fake = Fake(remote_access=True)
    common = {
        "direction": Direction.PUSH,
        "cluster_id": 2,
        "remote_cache_id": 7,
        "remote_batch_index": 3,
        "local_cache_id": 3,
        "local_batch_index": 1,
        "local_num_tensors": 2,
        "remote_num_tensors": 2,
        "size_bytes": -1,
        "timeout_ns": TIMEOUT_NS,
    }
    config = by_key(src=range(1, 3), dst=range(4, 6), src_batch_index=1)
    assert layers_of(fake, cache(tensors=6), Ready(), [config]) == [
        {**common, "local_first_tensor": 2, "remote_first_tensor": 8},
        {**common, "local_first_tensor": 4, "remote_first_tensor": 10},
    ]


@pytest.mark.parametrize("form", [list, tuple, lambda blocks: np.array(blocks, np.int32)])
@pytest.mark.parametrize("remote_access", [False, True])
@pytest.mark.parametrize(
    ("src", "dst", "size", "expected"),
    [
        ([0, 1], [2, 3], None, {"move": Move.BLOCKS, "src_blocks": 2, "dst_blocks": 2}),
        ([0, 1], [2, 3], 16, {"move": Move.BLOCKS, "src_blocks": 2, "dst_blocks": 2, "dst_block_bytes": 16}),
        ([0, 1], [2, 3], 0, {"move": Move.BLOCKS, "src_blocks": 2, "dst_blocks": 2}),
        ([], [2, 3], 8, {"move": Move.ENTRY_TO_BLOCKS, "dst_blocks": 2, "dst_block_bytes": 8}),
        (None, [2, 3], 8, {"move": Move.ENTRY_TO_BLOCKS, "dst_blocks": 2, "dst_block_bytes": 8}),
        ([], [], 0, {}),
        (None, None, None, {}),
    ],
)
def test_block_lists(remote_access: bool, src: Any, dst: Any, size: int | None, expected: dict, form: Any) -> None:
    config: Any = by_key(BlocksCacheKey(2, 9)) if remote_access else by_address()
    names = ("move", "src_blocks", "dst_blocks", "dst_block_bytes")
    lists = [None if blocks is None else form(blocks) for blocks in (src, dst)]
    for fields in layers_of(Fake(remote_access=remote_access), cache(tensors=4), Ready(), [config], *lists, size):
        assert {name: fields[name] for name in names if name in fields} == expected


@pytest.mark.logs("dst_block_memory_size should be greater than zero")
@pytest.mark.parametrize("remote_access", [False, True])
def test_a_block_size_of_zero_fails_the_layer(remote_access: bool) -> None:
    """8.3: 0 < M."""
    fake = Fake(remote_access=remote_access)
    config: Any = by_key() if remote_access else by_address()
    task = fake.manager.transfer_cache_async(SRC, Ready(), [config], None, [0], 0)
    assert task.get_results(10_000) == [PARAM_INVALID]
    assert fake.engine.calls == []


def test_the_callers_objects_may_change_afterwards() -> None:
    gate = threading.Event()

    class Gated(LayerSynchronizer):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            return gate.wait(10)

    fake = Fake()
    config, src, dst = by_address(), [0, 1], np.array([2, 3])
    task = fake.manager.transfer_cache_async(SRC, Gated(), [config], src, dst)
    src.clear()
    dst[:] = -1
    config.dst_addrs, config.src_layer_range, config.dst_cluster_id = [], range(9), 99
    gate.set()
    assert task.get_results(10_000) == [SUCCESS]
    assert [fields["remote_key_id"] for _, fields in fake.engine.calls] == [1000, 2000, 3000, 4000]
    assert {fields["src_blocks"] for _, fields in fake.engine.calls} == {2}


@pytest.mark.logs("exchange is not OK yet")
def test_not_ready_is_the_layers_result() -> None:
    fake = Fake(not_ready=[2])
    task = fake.manager.transfer_cache_async(SRC, Ready(), [by_address()])
    assert task.get_results(10_000) == [LLMStatusCode.LLM_NOT_YET_LINK]
