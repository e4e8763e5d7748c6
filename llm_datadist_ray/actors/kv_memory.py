"""The KV blocks of one worker: shared memory, seen by the engine as an array and by peers as a blocks cache."""

from __future__ import annotations

import numpy as np

from llm_datadist_ray._native import alloc_shared
from llm_datadist_ray.cache import CacheManager
from llm_datadist_ray.engines.base import KvLayout
from llm_datadist_ray.types import BlocksCacheKey, Cache, CacheDesc, DataType

_DATA_TYPES = {
    "bfloat16": DataType.DT_BF16,
    "float16": DataType.DT_FLOAT16,
    "float32": DataType.DT_FLOAT,
    "float64": DataType.DT_DOUBLE,
}
_DAMAGE = 0x3F  # as every byte of a float of any width a finite number, and hardly the right one


class KvMemory:
    """``blocks`` is ``uint8[num_tensors, num_blocks, block_bytes]``, zeroed; keep this object as long as it is used."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        """NativeError (LLM_OUT_OF_MEMORY) when the host has no room for it."""
        self._layout = layout
        self._num_blocks = num_blocks
        memory = alloc_shared(layout.num_tensors * num_blocks * layout.block_bytes)
        self.blocks: np.ndarray = memory.reshape(layout.num_tensors, num_blocks, layout.block_bytes)

    def register(self, manager: CacheManager, cluster_id: int) -> Cache:
        """As a blocks cache that peers can address; stays registered until the manager's engine is closed."""
        layout = self._layout
        shape = [self._num_blocks, layout.block_tokens, layout.num_kv_heads, layout.head_dim]
        desc = CacheDesc(layout.num_tensors, shape, _DATA_TYPES[layout.dtype])
        addresses = [int(tensor.ctypes.data) for tensor in self.blocks]
        return manager.register_blocks_cache(desc, addresses, BlocksCacheKey(cluster_id))

    def damage(self, block: int) -> None:
        """Overwrites one block of every tensor (``testing.overwrite_pulled_block``)."""
        self.blocks[:, block] = _DAMAGE
