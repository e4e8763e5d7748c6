"""Memory of which a peer may reach one half only: nothing of the other half moves, and the first is usable as ever."""

from __future__ import annotations

import pytest

from tests.conformance.pair import Pair
from tests.conformance.status import FEATURE_NOT_ENABLED, PARAM_INVALID, raises

BOTH = {}
FIRST = {"src_layer_range": range(1), "dst_layer_range": range(1), "tensor_num_per_layer": 1}
SECOND = {"src_layer_range": range(1, 2), "dst_layer_range": range(1, 2), "tensor_num_per_layer": 1}
ONE_PRIVATE = {"tensors": [("in_shm", 0), ("private", 0)], "shared": {"in_shm": True, "private": False}}


@pytest.mark.parametrize(("layers", "touches_private"), [(BOTH, True), (SECOND, True), (FIRST, False)])
class TestOneTensorOutsideOfSharedMemory:
    """The ``shm`` path alone does not reach it, any other does (design section 3, "Memory")."""

    def test_pull(self, linked_pair: Pair, layers: dict, touches_private: bool) -> None:
        a, b = linked_pair.a, linked_pair.b
        src, dst = b.blocks_of("src", **ONE_PRIVATE), a.blocks("dst", tensors=2)
        if touches_private and linked_pair.path == "shm":
            with raises(FEATURE_NOT_ENABLED, "allows shm, and tensor 1 of the remote cache 1"):
                a.process.pull_blocks(b.blocks_key(), "dst", [5, 0], [1, 2], **layers)
            return
        a.process.pull_blocks(b.blocks_key(), "dst", [5, 0], [1, 2], **layers)
        if layers is not SECOND:
            dst.tensor(0)[[1, 2]] = src["in_shm"].tensor(0)[[5, 0]]
        if layers is not FIRST:
            dst.tensor(1)[[1, 2]] = src["private"].tensor(0)[[5, 0]]

    @pytest.mark.mode("remote-access")
    def test_push(self, linked_pair: Pair, layers: dict, touches_private: bool) -> None:
        a, b = linked_pair.a, linked_pair.b
        dst, src = b.blocks_of("dst", **ONE_PRIVATE), a.blocks("src", tensors=2)
        if touches_private and linked_pair.path == "shm":
            with raises(FEATURE_NOT_ENABLED, "allows shm, and tensor 1 of the remote cache 1"):
                a.process.push_blocks(b.blocks_key(), "src", [5, 0], [1, 2], **layers)
            return
        a.process.push_blocks(b.blocks_key(), "src", [5, 0], [1, 2], **layers)
        if layers is not SECOND:
            dst["in_shm"].tensor(0)[[1, 2]] = src.tensor(0)[[5, 0]]
        if layers is not FIRST:
            dst["private"].tensor(0)[[1, 2]] = src.tensor(1)[[5, 0]]


@pytest.mark.mode("remote-access")
def test_half_of_a_memory_is_accessible(linked_pair: Pair) -> None:
    """Two caches in one memory, the second without ``remote_accessible`` (spec api-cachemanager §3.3): it is reached
    neither by its own name nor across the end of the first."""
    a, b = linked_pair.a, linked_pair.b
    src = b.blocks_of("open", [("memory", 0)], shared={"memory": linked_pair.path == "shm"}, model_id=1)["memory"]
    b.blocks_of("closed", [("memory", 1)], model_id=2, remote_accessible=False)
    dst = a.blocks("dst", tensors=1)
    with raises(PARAM_INVALID, "not remote accessible"):
        a.process.pull_blocks(b.blocks_key(2), "dst", [0], [0])
    with raises(PARAM_INVALID, "not remote accessible"):
        a.process.push_blocks(b.blocks_key(2), "dst", [0], [0], tensor_num_per_layer=1)
    with raises(PARAM_INVALID, "has 6 blocks"):
        a.process.pull_blocks(b.blocks_key(1), "dst", [0, 8], [0, 1])
    with raises(PARAM_INVALID, "has 6 blocks"):
        a.process.push_blocks(b.blocks_key(1), "dst", [0, 1], [0, 8], tensor_num_per_layer=1)
    a.process.pull_blocks(b.blocks_key(1), "dst", [4], [3])
    dst.tensor(0)[3] = src.tensor(0)[4]
    a.process.push_blocks(b.blocks_key(1), "dst", [3], [0], tensor_num_per_layer=1)
    src.tensor(0)[0] = dst.tensor(0)[3]
