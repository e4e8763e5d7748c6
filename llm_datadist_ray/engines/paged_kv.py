"""KV blocks as tensors, and a Hugging Face cache that also writes everything into blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import DynamicCache, PretrainedConfig

from .base import TENSORS_PER_LAYER, KvLayout
from .request_checks import check_memory, check_table


class PagedKv:
    """The attached array ``uint8[num_tensors, num_blocks, block_bytes]`` seen as
    ``dtype[num_tensors, num_blocks, block_tokens, num_kv_heads, head_dim]``; the memory stays the caller's.

    The blocks are host memory whatever the model runs on: ``device`` is where :meth:`read` puts its copy, and
    :meth:`write` takes states from anywhere. On a CPU neither copies more than it would have to anyway.

    Raises ValueError when the array does not fit the layout.
    """

    def __init__(self, blocks: np.ndarray, layout: KvLayout, device: torch.device) -> None:
        check_memory(blocks, layout, layout.itemsize)
        self.layout = layout
        self._device = device
        self.num_blocks = blocks.shape[1]
        shape = (*blocks.shape[:2], layout.block_tokens, layout.num_kv_heads, layout.head_dim)
        self._blocks = torch.from_numpy(blocks).view(getattr(torch, layout.dtype)).view(shape)

    def checked_table(self, block_ids: Sequence[int], num_tokens: int) -> torch.Tensor:
        """``block_ids`` as an index tensor; ValueError when they do not hold ``num_tokens`` or are not usable."""
        check_table(block_ids, num_tokens, self.layout, self.num_blocks)
        return torch.tensor(block_ids, dtype=torch.int64)

    def clear(self, block: int) -> None:
        """Zeroes one block of every tensor."""
        self._blocks[:, block] = 0

    def write(self, tensor: int, table: torch.Tensor, start: int, states: torch.Tensor) -> None:
        """Stores ``states[1, num_kv_heads, tokens, head_dim]`` as positions ``start`` and on of one tensor."""
        positions = torch.arange(start, start + states.shape[2])
        block_tokens = self.layout.block_tokens
        host_states = states[0].transpose(0, 1).cpu()
        self._blocks[tensor][table[positions // block_tokens], positions % block_tokens] = host_states

    def read(self, tensor: int, table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """A copy of the first ``num_tokens`` positions of one tensor, ``[1, num_kv_heads, num_tokens, head_dim]``."""
        blocks = self._blocks[tensor][table[: self.layout.num_blocks_for(num_tokens)]]
        # Contiguous, like the cache of a process that computed these positions itself: equal inputs to equal kernels.
        return blocks.flatten(0, 1)[:num_tokens].transpose(0, 1).unsqueeze(0).contiguous().to(self._device)


class PagedCache(DynamicCache):
    """The model's own cache for attention; whatever is added to it also goes to the blocks of ``table``.

    ``on_layer``, while set, is called with a layer's index as soon as that layer's new positions are in the blocks.
    """

    def __init__(self, config: PretrainedConfig, kv: PagedKv, table: torch.Tensor) -> None:
        super().__init__(config=config)
        self._kv = kv
        self._table = table
        self.on_layer: Callable[[int], None] | None = None

    def load(self, num_tokens: int) -> None:
        """Takes the first ``num_tokens`` positions of every layer out of the blocks."""
        for layer in range(self._kv.layout.num_layers):
            keys, values = (
                self._kv.read(TENSORS_PER_LAYER * layer + part, self._table, num_tokens)
                for part in range(TENSORS_PER_LAYER)
            )
            super().update(keys, values, layer)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.get_seq_length(layer_idx)
        for part, states in enumerate((key_states, value_states)):
            self._kv.write(TENSORS_PER_LAYER * layer_idx + part, self._table, start, states)
        if self.on_layer is not None:
            self.on_layer(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
