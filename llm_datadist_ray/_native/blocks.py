"""Block lists on their way to native code: nothing here looks at an element in Python."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

from llm_datadist_ray._native._ldr import ffi

if TYPE_CHECKING:
    import numpy as np

    from llm_datadist_ray._native._ldr import CData

_PYTHON_LISTS = (list, tuple)
_from_buffer = ffi.from_buffer
_BYTES = ffi.typeof("char[]")
_new = ffi.new
_NUMBER = ffi.typeof("uint64_t *")
_INT32_OR_INT64 = frozenset("ilq")  # as NumPy calls C's int, long and long long, on every 64-bit Linux

BlockList = Union[Sequence[int], "np.ndarray"]
"""A list or tuple of ints, or a one-dimensional int32 / int64 array, which is passed on as it is."""

BlocksInC = tuple["CData", int, int]
"""Initialises a ``ldr_block_list_t``: ``indices``, ``count`` and ``item_bytes``, its fields in their order."""


def blocks_to_c(name: str, blocks: BlockList) -> BlocksInC | None:
    """None for no blocks. The result must live as long as the pointer in it is used.

    TypeError when an element is no int, is negative or has more than 64 bits, and for another array type.
    """
    if isinstance(blocks, _PYTHON_LISTS):
        if not blocks:
            return None
        # Unsigned, so that a negative block is refused here; beyond 63 bits the native range check does it. The
        # shortest lists have a quicker way, and lists a quicker one than tuples.
        try:
            if len(blocks) == 1 and type(blocks[0]) is int:
                return _new(_NUMBER, blocks[0]), 1, 8
            buffer = array("Q", blocks if type(blocks) is list else list(blocks))
        except OverflowError as error:
            raise TypeError(f"{name} holds a block number below 0 or of more than 64 bits") from error
        except TypeError as error:
            raise TypeError(f"{name} only support int elements: {error}") from error
        return _from_buffer(_BYTES, buffer), len(buffer), 8
    numbers = array_in_c(name, blocks)
    count = len(numbers)
    if not count:
        return None
    try:
        pointer = _from_buffer(_BYTES, numbers)
    except ValueError:  # elements that are no neighbours
        pointer = _from_buffer(_BYTES, numbers.copy())
    return pointer, count, numbers.itemsize


def fill_block_list(target: CData, name: str, blocks: BlockList) -> BlocksInC | None:
    """:func:`blocks_to_c` put into a ``ldr_block_list_t`` that is empty."""
    in_c = blocks_to_c(name, blocks)
    if in_c is not None:
        target.indices, target.count, target.item_bytes = in_c
    return in_c


def array_in_c(name: str, blocks: Any) -> np.ndarray:
    """The array itself. TypeError unless it is one-dimensional, of int32 or int64."""
    try:
        dtype = blocks.dtype
        if dtype.char in _INT32_OR_INT64 and dtype.isnative and blocks.ndim == 1:
            return blocks
    except AttributeError as error:
        raise TypeError(f"{name} only support list, tuple or numpy.ndarray, but got {type(blocks).__name__}") from error
    raise TypeError(
        f"{name} only support one-dimensional arrays of int32 or int64, but got {blocks.ndim} dimensions of "
        f"{blocks.dtype}"
    )
