"""The boundary between the actors and whatever computes tokens (design section 7, "Engines").

An engine computes into, and out of, KV *blocks* that somebody else owns. It never allocates KV memory, never talks to
the network and never imports Ray: it is given one array for all blocks (:meth:`Engine.attach`) and block tables.

A *block* is ``block_tokens`` consecutive token positions of one KV tensor. There are two tensors per layer, K then V:
tensor ``2 * layer`` is K and tensor ``2 * layer + 1`` is V of that layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

TENSORS_PER_LAYER = 2


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Which engine to build; small, picklable, the same on prefill and decode.

    ``kind`` names an entry of :func:`llm_datadist_ray.engines.engine_kinds`; ``model`` is a bundled model's name, a
    folder in Hugging Face format or a ``.gguf`` file. ``device`` is ``"cpu"`` or ``"npu:N"``. ``dtype`` is a NumPy
    style name and holds for weights and KV alike.
    """

    kind: str = "transformers"
    model: str = "tiny"
    dtype: str = "float32"
    device: str = "cpu"
    block_tokens: int = 16
    num_threads: int = 1


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What two engines must agree on before a block of one means anything to the other.

    ``head_layout`` is the order of axes inside a block: ``"NHD"`` is (token, kv head, head dim).
    """

    model_id: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    itemsize: int
    head_layout: str = "NHD"

    @property
    def num_tensors(self) -> int:
        return self.num_layers * TENSORS_PER_LAYER

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one tensor."""
        return self.block_tokens * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token over all tensors."""
        return self.num_tensors * self.num_kv_heads * self.head_dim * self.itemsize

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    @property
    def digest(self) -> int:
        """64 bits over every field; compared between members of a cluster when they link (design section 5)."""
        text = "|".join(str(getattr(self, name)) for name in self.__slots__)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from the model's distribution.

    ``temperature`` 0 is greedy: the most probable token. Otherwise the token at position ``p`` of the sequence is drawn
    with random numbers that depend on ``seed`` and ``p`` alone, so that any process draws the same one.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    """Only the most probable tokens that together reach this probability are drawn from; 0 < top_p <= 1."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature is {self.temperature}; 0 (greedy) to 100 is allowed")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; more than 0 and at most 1 is allowed")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; 0 to 2**63 - 1 is allowed")


GREEDY = Sampling()


class DecodeSequence(Protocol):
    """One request being decoded. Used by one thread at a time."""

    def step(self) -> int:
        """Computes and returns the next token id; the token before it is already part of the sequence.

        Raises :class:`ContextFull` when the block table has no room for another token.
        """


@runtime_checkable
class Engine(Protocol):
    """What the actors need of a model. All methods may block for as long as the computation takes; an engine is used
    by one thread at a time (the worker core holds a lock), except ``encode`` and ``detokenizer``, which any thread may
    call at any time.
    """

    @property
    def layout(self) -> KvLayout: ...

    @property
    def max_context_tokens(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def attach(self, blocks: np.ndarray) -> None:
        """Hands over the KV memory: ``uint8[num_tensors, num_blocks, block_bytes]``, writable, owned by the caller,
        which keeps it alive as long as the engine. Must be called once before ``prefill`` or ``start_decode``."""

    def encode(self, prompt: str, *, chat: bool) -> list[int]:
        """Token ids of a prompt; ``chat`` wraps it as one user turn of the model's chat template where there is one."""

    def detokenizer(self) -> Callable[[int], str]:
        """A fresh incremental detokenizer: called with each token id in turn it returns the text that is now certain
        (possibly empty), never half a character. Special tokens give no text."""

    def prefill(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        *,
        sampling: Sampling = GREEDY,
        on_layer: Callable[[int], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> int:
        """Fills the blocks with the KV of ``token_ids`` and returns the first generated token id.

        Runs in chunks of ``block_tokens`` whatever the prompt, so that any process computes the same floats. The tail
        of the last block beyond the prompt is zeroed. ``on_layer(i)`` is called after all blocks of layer ``i`` hold
        their final bytes, in increasing order, each layer once. ``check()`` is called before every chunk; what it
        raises ends the prefill and comes out of it (a cancelled request). Raises ValueError for an empty prompt or a
        table that is too short, before anything is written.
        """

    def start_decode(
        self, num_tokens: int, first_token: int, block_ids: Sequence[int], *, sampling: Sampling = GREEDY
    ) -> DecodeSequence:
        """Starts from KV that is already in the blocks: ``num_tokens`` positions, of which the tokens need not be
        known. The sequence reads those positions out of the blocks when it is created, and writes the KV of every
        token that it generates into the blocks of ``block_ids`` behind them."""

    def generate_alone(self, token_ids: Sequence[int], max_tokens: int, *, sampling: Sampling = GREEDY) -> list[int]:
        """The reference: what one process produces with no blocks and no transfer, up to and including an
        end-of-sequence token. Uses the model library's own cache, not the attached blocks."""


class ContextFull(RuntimeError):
    """The block table or the model's context has no room for another token."""
