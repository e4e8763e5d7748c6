"""The memory of a cache, with gaps before, between and behind its tensors, so that a stray byte is seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MemoryLayout:
    """``num_tensors`` tensors of ``num_entries`` batch entries or blocks of ``entry_bytes`` bytes."""

    num_tensors: int
    num_entries: int
    entry_bytes: int
    gap_bytes: int = 200

    @property
    def tensor_bytes(self) -> int:
        return self.num_entries * self.entry_bytes

    @property
    def total_bytes(self) -> int:
        return self.gap_bytes + self.num_tensors * (self.tensor_bytes + self.gap_bytes)

    def offset(self, tensor: int) -> int:
        return self.gap_bytes + tensor * (self.tensor_bytes + self.gap_bytes)

    def tensor(self, memory: np.ndarray, tensor: int) -> np.ndarray:
        """View ``[num_entries, entry_bytes]``."""
        start = self.offset(tensor)
        return memory[start : start + self.tensor_bytes].reshape(self.num_entries, self.entry_bytes)


def fill(memory: np.ndarray, seed: int) -> None:
    """The same bytes for the same seed and size, in every process; no two blocks alike."""
    rng = np.random.default_rng(seed)
    chunk = 1 << 22
    for start in range(0, len(memory), chunk):
        memory[start : start + chunk] = np.frombuffer(rng.bytes(min(chunk, len(memory) - start)), np.uint8)
