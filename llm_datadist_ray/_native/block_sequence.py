"""KV bytes of a sequence through its block table, made and hashed in native code (``ldr_blocks_fill``, ``_hash``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist_ray._native._ldr import ffi, lib
from llm_datadist_ray._native.blocks import BlockList, fill_block_list
from llm_datadist_ray._native.status import check

if TYPE_CHECKING:
    import numpy as np


class BlockSequence:
    """A block table over ``blocks``: C-contiguous ``uint8[num_tensors, num_blocks, block_bytes]``, kept alive by this.

    ``token_bytes`` is one position of one tensor: a multiple of 8 that divides ``block_bytes``. Used by one thread at a
    time. Calls block for one pass over the positions, without the interpreter lock; others must not write those
    meanwhile. NativeError (LLM_PARAM_INVALID) when the positions leave the table, the table the blocks, or the sizes
    do not fit.
    """

    def __init__(self, blocks: np.ndarray, token_bytes: int, block_ids: BlockList) -> None:
        num_tensors, num_blocks, block_bytes = blocks.shape
        tensor_bytes = blocks.strides[0]
        addresses = ffi.new("uint64_t[]", [blocks.ctypes.data + t * tensor_bytes for t in range(num_tensors)])
        sequence = ffi.new("ldr_sequence_t *")
        sequence.struct_size = ffi.sizeof("ldr_sequence_t")
        sequence.num_tensors = num_tensors
        sequence.addresses = addresses
        sequence.num_blocks = num_blocks
        sequence.block_bytes = block_bytes
        sequence.token_bytes = token_bytes
        self._kept = (blocks, addresses, fill_block_list(sequence.blocks, "block_ids", block_ids))
        self._sequence = sequence
        self._hash_p = ffi.new("uint64_t *")

    def hash(self, num_positions: int, seed: int) -> int:
        """64 bits over every byte of the first ``num_positions`` positions."""
        check(lib.ldr_blocks_hash(self._sequence, num_positions, seed, self._hash_p))
        return int(self._hash_p[0])

    def fill(self, first_position: int, position_seeds: np.ndarray, first_tensor: int, num_tensors: int) -> None:
        """Writes ``len(position_seeds)`` positions of some tensors; it is a contiguous ``uint64[n]``."""
        seeds = ffi.from_buffer("uint64_t[]", position_seeds)
        check(
            lib.ldr_blocks_fill(self._sequence, first_tensor, num_tensors, first_position, seeds, len(position_seeds))
        )
