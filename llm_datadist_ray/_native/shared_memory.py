"""Caller-owned memory that peers on this host can map (design section 3, "Memory")."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist_ray._native._ldr import ffi, lib
from llm_datadist_ray._native.status import check

if TYPE_CHECKING:
    import numpy as np


def alloc_shared(nbytes: int) -> np.ndarray:
    """``uint8[nbytes]``, zeroed, page aligned; a cache registered inside it is reachable by the ``shm`` path.

    The memory is freed when the last array that views it is garbage collected, and not before. Keep one until every
    cache inside is unregistered and every engine that knew it closed. A forked child shares it.

    NativeError: LLM_PARAM_INVALID for 0, LLM_OUT_OF_MEMORY. ValueError for a negative size.
    """
    import numpy as np

    if nbytes < 0:
        raise ValueError(f"nbytes should not be negative, but got {nbytes}")
    address_p = ffi.new("void **")
    check(lib.ldr_shared_alloc(nbytes, address_p, ffi.NULL))
    owner = ffi.gc(address_p[0], lib.ldr_shared_free, nbytes)
    return np.frombuffer(ffi.buffer(owner, nbytes), dtype=np.uint8)
