"""remap_registered_memory with and without links (spec api-cachemanager §10)."""

from __future__ import annotations

import pytest

from llm_datadist_ray import MemInfo, Memtype
from tests.conformance.pair import SUCCESS, Pair
from tests.conformance.status import FAILED, NOT_YET_LINK, PARAM_INVALID, raises

INFO = MemInfo(Memtype.MEM_TYPE_DEVICE, 1 << 40, 4096)


@pytest.mark.parametrize("infos", [INFO, [INFO, INFO]])
def test_needs_a_link_and_does_nothing(pair: Pair, infos: MemInfo | list[MemInfo]) -> None:
    """At both ends of the link; the caches stay as they are."""
    pair.a.cache("cache")
    for end in (pair.a, pair.b):
        with raises(NOT_YET_LINK):
            end.process.manage("remap_registered_memory", infos)
    pair.link()
    for end in (pair.a, pair.b):
        end.process.manage("remap_registered_memory", infos)
    assert pair.a.process.unlink_clusters([pair.b.info()], 5000, True) == (SUCCESS, [SUCCESS])
    with raises(NOT_YET_LINK):
        pair.a.process.manage("remap_registered_memory", infos)


def test_arguments_come_before_the_link(pair: Pair) -> None:
    for infos in ([], [INFO, 7], MemInfo(Memtype.MEM_TYPE_HOST, 1, 1)):
        with raises(PARAM_INVALID):
            pair.a.process.manage("remap_registered_memory", infos)


def test_a_broken_link_is_none(linked_pair: Pair) -> None:
    linked_pair.b.process.restart()
    linked_pair.b.forget()
    assert linked_pair.a.process.wait_for_link_down(2, 10)
    with raises(NOT_YET_LINK):
        linked_pair.a.process.manage("remap_registered_memory", INFO)


def test_after_finalize(pair: Pair) -> None:
    """§1."""
    pair.a.process.keep_manager()
    pair.a.process.finalize()
    with raises(FAILED, "closed"):
        pair.a.process.use_kept_manager("remap_registered_memory", INFO)
