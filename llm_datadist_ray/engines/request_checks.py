"""What every engine refuses before it writes anything, in the same words (ValueError)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .base import KvLayout


def check_memory(blocks: np.ndarray, layout: KvLayout, alignment_bytes: int) -> None:
    """``blocks`` must be writable, C-contiguous ``uint8[num_tensors, num_blocks, block_bytes]`` of this layout."""
    if blocks.dtype != np.uint8 or blocks.ndim != 3 or not blocks.flags.writeable:
        raise ValueError(f"KV memory must be writable uint8 with 3 axes, not {blocks.dtype} with {blocks.ndim}")
    if (blocks.shape[0], blocks.shape[2]) != (layout.num_tensors, layout.block_bytes):
        raise ValueError(
            f"KV memory of shape {blocks.shape} does not fit this model: expected "
            f"({layout.num_tensors}, num_blocks, {layout.block_bytes})"
        )
    if not blocks.flags.c_contiguous or blocks.ctypes.data % alignment_bytes:
        raise ValueError(f"KV memory must be C-contiguous and aligned to {alignment_bytes} bytes")


def check_table(block_ids: Sequence[int], num_tokens: int, layout: KvLayout, num_blocks: int) -> None:
    """The table must hold ``num_tokens`` and name each of its blocks once, out of ``num_blocks``."""
    needed = layout.num_blocks_for(num_tokens)
    if len(block_ids) < needed:
        raise ValueError(f"{num_tokens} tokens need {needed} blocks, the table has {len(block_ids)}")
    if len(set(block_ids)) != len(block_ids):
        raise ValueError(f"the block table names a block twice: {list(block_ids)}")
    if any(not 0 <= block < num_blocks for block in block_ids):
        raise ValueError(f"the block table {list(block_ids)} leaves the attached blocks 0..{num_blocks - 1}")


def check_tokens(token_ids: Sequence[int], vocab_size: int, max_context_tokens: int) -> None:
    """There must be token ids, all known to the model and no more than its context holds."""
    if len(token_ids) == 0:
        raise ValueError("the prompt is empty")
    if len(token_ids) > max_context_tokens:
        raise ValueError(f"the prompt has {len(token_ids)} tokens, the model's context {max_context_tokens}")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise ValueError(f"a token id is outside 0..{vocab_size - 1}")


def check_start(num_tokens: int, max_context_tokens: int) -> None:
    """Decoding must start behind at least one token and inside the context."""
    if not 1 <= num_tokens <= max_context_tokens:
        raise ValueError(f"cannot decode behind {num_tokens} tokens: 1..{max_context_tokens} are possible")


def check_max_tokens(max_tokens: int) -> None:
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; at least 1 token is generated")
