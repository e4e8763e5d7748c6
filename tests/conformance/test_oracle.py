"""The oracle itself: one wrong byte anywhere is seen."""

from __future__ import annotations

import pytest

from tests.conformance.pair import Pair


@pytest.mark.parametrize("where", ["first byte", "gap", "tensor", "last byte"])
@pytest.mark.parametrize("end_name", ["a", "b"])
def test_a_stray_byte_is_seen(pair: Pair, end_name: str, where: str) -> None:
    end = getattr(pair, end_name)
    cache = end.cache("cache")
    offset = {
        "first byte": 0,
        "gap": cache.layout.offset(2) - 1,
        "tensor": cache.layout.offset(1) + 7,
        "last byte": cache.layout.total_bytes - 1,
    }[where]
    pair.check_memory()
    end.process.flip_byte("cache", offset)
    with pytest.raises(AssertionError, match=f"1 bytes of memory 'cache' of cluster {end.cluster_id}.* {offset} "):
        pair.check_memory()
    end.process.flip_byte("cache", offset)
