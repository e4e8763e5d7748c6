"""From the logits of a position to one token, the same in any process that has the same logits."""

from __future__ import annotations

import hashlib

import torch

from .base import Sampling


def choose(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    """The token at ``position`` of the sequence, given its ``logits[vocab_size]``, on any device and of any dtype.

    Computed in float64 on the CPU, with a stable order of equal probabilities: neither the device's rounding nor its
    sort decides.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    wide = logits.to("cpu", torch.float64)
    # Less the largest first, so that a small temperature gives no infinity above.
    probabilities = torch.softmax((wide - wide.max()) / sampling.temperature, -1)
    ordered, token_ids = probabilities.sort(descending=True, stable=True)
    reached = ordered.cumsum(-1)
    num_kept = min(int((reached < sampling.top_p).sum()) + 1, len(reached))
    target = reached[num_kept - 1] * uniform(sampling.seed, position)
    index = min(int(torch.searchsorted(reached[:num_kept], target)), num_kept - 1)
    return int(token_ids[index])


def uniform(seed: int, position: int) -> float:
    """A random number in [0, 1) that depends on its arguments alone, with 53 random bits."""
    text = b"sampling" + seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 11) / 2**53
