"""Placement combinations (spec api-cachemanager §6)."""

from __future__ import annotations

import pytest

from llm_datadist_ray import Placement
from tests.conformance.pair import Pair
from tests.conformance.status import FEATURE_NOT_ENABLED, PARAM_INVALID, raises

HOST, DEVICE = Placement.HOST, Placement.DEVICE
COMBINATIONS = pytest.mark.parametrize(
    ("src_placement", "dst_placement"), [(DEVICE, DEVICE), (DEVICE, HOST), (HOST, DEVICE), (HOST, HOST)]
)


@COMBINATIONS
@pytest.mark.parametrize("move", ["C2C", "B2B", "C2B"])
def test_pulls(linked_pair: Pair, move: str, src_placement: Placement, dst_placement: Placement) -> None:
    pair = linked_pair
    if move == "B2B":
        src = pair.b.blocks("src", placement=src_placement)
    else:
        src = pair.b.cache("src", placement=src_placement)
    if move == "C2C":
        dst = pair.a.cache("dst", placement=dst_placement)
        call = "pull_cache", (src.key(0), "dst", 0)
    else:
        dst = pair.a.blocks("dst", placement=dst_placement)
        call = "pull_blocks", (pair.b.blocks_key(), "dst", [0], [0]) if move == "B2B" else (src.key(0), "dst", [], [0])
    method, args = call

    if not pair.remote_access and src_placement == dst_placement == HOST:
        with raises(FEATURE_NOT_ENABLED):
            getattr(pair.a.process, method)(*args)
    elif not pair.remote_access and move == "C2B" and src_placement == HOST:
        with raises(PARAM_INVALID):
            getattr(pair.a.process, method)(*args)
    else:
        getattr(pair.a.process, method)(*args)
        for tensor in range(4):
            dst.tensor(tensor)[0] = src.tensor(tensor)[0]


@COMBINATIONS
@pytest.mark.mode("remote-access")
def test_pushes(linked_pair: Pair, src_placement: Placement, dst_placement: Placement) -> None:
    src = linked_pair.a.cache("src", placement=src_placement)
    dst = linked_pair.b.cache("dst", placement=dst_placement)
    linked_pair.a.process.push_cache(dst.key(1), "src", 2)
    for tensor in range(4):
        dst.tensor(tensor)[1] = src.tensor(tensor)[2]


@pytest.mark.mode("remote-access")
def test_host_memory_is_not_accessible_by_default(linked_pair: Pair) -> None:
    """Spec §3.3."""
    host = linked_pair.b.cache("host", placement=HOST, remote_accessible=None)
    device = linked_pair.b.cache("device", remote_accessible=None)
    dst = linked_pair.a.cache("dst")
    with raises(PARAM_INVALID):
        linked_pair.a.process.pull_cache(host.key(), "dst")
    linked_pair.a.process.pull_cache(device.key(), "dst")
    for tensor in range(4):
        dst.tensor(tensor)[0] = device.tensor(tensor)[0]
