"""How a block list gets into a struct by position, in the short form that transfers use."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest

from tests.unit.fake_native import fake_native


def test_the_order_of_the_fields() -> None:
    with fake_native() as (_, _, ffi):
        names = [name for name, _ in ffi.typeof("ldr_block_list_t").fields]
    assert names[:3] == ["indices", "count", "item_bytes"]


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 20_000])
@pytest.mark.parametrize("form", [list, tuple, np.int32, np.int64])
def test_short_and_long_lists(num_blocks: int, form: type) -> None:
    numbers = [3 * k for k in range(num_blocks)]
    blocks = form(numbers) if form in (list, tuple) else np.array(numbers, form)
    with fake_native() as (module, _, ffi):
        fields = {"direction": 0, "cluster_id": 2, "local_cache_id": 3, "move": 1, "remote_by": 3}
        transfer = module.Transfer(**fields, dst_blocks=blocks)
        found = transfer.params.dst_blocks
        assert (found.count, transfer.params.src_blocks.count) == (num_blocks, 0)
        if num_blocks:
            dtype = np.int32 if form is np.int32 else np.int64
            assert found.item_bytes == np.dtype(dtype).itemsize
            raw = ffi.buffer(found.indices, found.count * found.item_bytes)
            assert np.frombuffer(raw, dtype).tolist() == numbers


@pytest.mark.parametrize("num_blocks", [1, 100])
@pytest.mark.parametrize("wrong", [-1, 2**64, "0", 0.5, None, np.float32(2.5), Decimal(2)])
def test_one_wrong_element(num_blocks: int, wrong: object) -> None:
    with fake_native() as (module, _, _), pytest.raises(TypeError, match="src_blocks"):
        module.Transfer(0, 2, 3, 1, 3, src_blocks=[0] * (num_blocks - 1) + [wrong])


@pytest.mark.parametrize("value", [None, -1, 2**64])
def test_a_number_that_does_not_fit_its_field(value: object) -> None:
    """Also where a zero is left out: None is none."""
    with fake_native() as (module, _, _), pytest.raises(TypeError):
        module.Transfer(0, 2, 3, 1, 3, remote_model_id=value)
