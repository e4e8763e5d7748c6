"""Block lists on their way to native code: nothing here looks at an element in Python."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

from llm_datadist_ray._native._ldr import ffi

if TYPE_CHECKING:
    import numpy as np

    from llm_datadist_ray._native._ldr import CData

BlockList = Union[Sequence[int], "np.ndarray"]
"""A list or tuple of ints, or a one-dimensional int32 / int64 array, which is passed on as it is."""


def fill_block_list(target: CData, name: str, blocks: BlockList) -> Any:
    """Points a ``ldr_block_list_t`` at the blocks; the return value must live as long as the pointer is used.

    TypeError when an element is no int, is negative or has more than 64 bits, and for another array type.
    """
    if isinstance(blocks, (list, tuple)):
        try:
            # Unsigned, so that a negative block is refused here; beyond 63 bits the native range check does it.
            # From a list, for which array has a quick way.
            buffer: Any = array("Q", blocks if isinstance(blocks, list) else list(blocks))
        except OverflowError as error:
            raise TypeError(f"{name} holds a block number below 0 or of more than 64 bits") from error
        except TypeError as error:
            raise TypeError(f"{name} only support int elements: {error}") from error
        item_bytes = 8
    else:
        buffer, item_bytes = _array(name, blocks)
    if len(buffer):
        pointer = ffi.from_buffer("char[]", buffer)
        target.indices = pointer
        target.count = len(buffer)
        target.item_bytes = item_bytes
        return pointer
    return None


def _array(name: str, blocks: Any) -> tuple[np.ndarray, int]:
    import numpy as np

    if not isinstance(blocks, np.ndarray):
        raise TypeError(f"{name} only support list, tuple or numpy.ndarray, but got {type(blocks).__name__}")
    if blocks.ndim != 1 or blocks.dtype not in (np.int32, np.int64):
        raise TypeError(
            f"{name} only support one-dimensional arrays of int32 or int64, but got {blocks.ndim} dimensions of "
            f"{blocks.dtype}"
        )
    return np.ascontiguousarray(blocks), blocks.dtype.itemsize
