"""No model: KV bytes that depend on the tokens before them, and tokens that depend on every KV byte.

The KV of a position follows from all tokens up to it, so prompts that share a prefix share its bytes. A generated
token is a native hash over every byte of the sequence, read through the block table at every step: one wrong byte, two
blocks exchanged, or K in the place of V give other tokens. It moves as many bytes as a model of its shape and computes
next to nothing, for benchmarks of the transfer and for fault tests.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence

import numpy as np

from llm_datadist_ray._native.block_sequence import BlockSequence

from .base import GREEDY, TENSORS_PER_LAYER, ContextFull, EngineSpec, KvLayout, Sampling
from .models import Progress, nearest
from .request_checks import check_max_tokens, check_memory, check_start, check_table, check_tokens

NUM_BYTES = 256  # token ids 0..255 are the bytes of a text; generated are only ids from here on
NUM_WORDS = 65536
VOCAB = NUM_BYTES + NUM_WORDS
CONTEXT_TOKENS = 131072

_SHAPES = {"smollm2-shape": "30x3x64"}
_DTYPES = ("float16", "float32")
_REVISION = "r1"  # of the arithmetic: sides that compute differently must not take each other for the same model
_WORD_BYTES = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


class SyntheticEngine:
    """See :class:`llm_datadist_ray.engines.base.Engine`. ``EngineSpec.model`` is ``LAYERSxHEADSxDIM`` (KV heads and
    their dimension), or ``smollm2-shape``, which is 30x3x64. A sequence never ends by itself.

    With a temperature above 0 the tokens also depend on the seed, and on nothing else of the sampling.
    """

    def __init__(self, spec: EngineSpec, *, progress: Progress | None = None) -> None:
        self._layout = _layout(spec)
        token_bytes = self._layout.block_bytes // self._layout.block_tokens
        if token_bytes % _WORD_BYTES:
            raise ValueError(
                f"model {spec.model!r} in {spec.dtype} has {token_bytes} bytes per token and tensor; a multiple "
                f"of {_WORD_BYTES} is needed"
            )
        self._blocks: np.ndarray | None = None

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def max_context_tokens(self) -> int:
        return CONTEXT_TOKENS

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset()

    def attach(self, blocks: np.ndarray) -> None:
        if self._blocks is not None:
            raise ValueError("KV memory is already attached to this engine")
        check_memory(blocks, self._layout, _WORD_BYTES)
        self._blocks = blocks

    def encode(self, prompt: str, *, chat: bool) -> list[int]:
        """The bytes of the text; ``chat`` changes nothing."""
        return list(prompt.encode())

    def detokenizer(self) -> Callable[[int], str]:
        """A byte is a byte of UTF-8 text; any other token is a word of four hexadecimal digits."""
        decode_bytes = codecs.getincrementaldecoder("utf-8")("replace").decode

        def text_of(token: int) -> str:
            if token < NUM_BYTES:
                return decode_bytes(bytes([token]))
            return f"{decode_bytes(b'', True)} {token - NUM_BYTES:04x}"

        return text_of

    def prefill(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        *,
        sampling: Sampling = GREEDY,
        on_layer: Callable[[int], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> int:
        check_tokens(token_ids, VOCAB, CONTEXT_TOKENS)
        kv = _SyntheticKv(self._attached(), self._layout, block_ids, len(token_ids))
        return kv.prefill(token_ids, _hash_seed(sampling), on_layer, check)

    def start_decode(
        self, num_tokens: int, first_token: int, block_ids: Sequence[int], *, sampling: Sampling = GREEDY
    ) -> SyntheticSequence:
        check_start(num_tokens, CONTEXT_TOKENS)
        check_tokens([first_token], VOCAB, CONTEXT_TOKENS)
        kv = _SyntheticKv(self._attached(), self._layout, block_ids, num_tokens)
        return SyntheticSequence(kv, num_tokens, first_token, _hash_seed(sampling))

    def generate_alone(self, token_ids: Sequence[int], max_tokens: int, *, sampling: Sampling = GREEDY) -> list[int]:
        """In memory of its own, as large as the KV of everything. Ends early when the context is full."""
        check_tokens(token_ids, VOCAB, CONTEXT_TOKENS)
        check_max_tokens(max_tokens)
        max_tokens = min(max_tokens, CONTEXT_TOKENS - len(token_ids) + 1)
        num_blocks = self._layout.num_blocks_for(len(token_ids) + max_tokens - 1)
        blocks = np.zeros((self._layout.num_tensors, num_blocks, self._layout.block_bytes), np.uint8)
        kv = _SyntheticKv(blocks, self._layout, range(num_blocks), len(token_ids))
        seed = _hash_seed(sampling)
        generated = [kv.prefill(token_ids, seed, None, None)]
        sequence = SyntheticSequence(kv, len(token_ids), generated[0], seed)
        return generated + [sequence.step() for _ in range(max_tokens - 1)]

    def _attached(self) -> np.ndarray:
        if self._blocks is None:
            raise ValueError("no KV memory: call attach() before prefill() or start_decode()")
        return self._blocks


class SyntheticSequence:
    """See :class:`llm_datadist_ray.engines.base.DecodeSequence`."""

    def __init__(self, kv: _SyntheticKv, num_tokens: int, last_token: int, hash_seed: int) -> None:
        self._kv = kv
        self._num_tokens = num_tokens
        self._last_token = last_token
        self._hash_seed = hash_seed
        self._prefix_digest = kv.prefix_digest(num_tokens)

    def step(self) -> int:
        if self._num_tokens >= self._kv.capacity_tokens:
            raise ContextFull(f"no room behind {self._num_tokens} tokens: blocks and context hold no more")
        digests = _prefix_digests(self._prefix_digest, self._num_tokens, [self._last_token])
        self._kv.fill(self._num_tokens, digests)
        self._num_tokens += 1
        self._prefix_digest = int(digests[-1])
        self._last_token = self._kv.next_token(self._num_tokens, self._hash_seed)
        return self._last_token


class _SyntheticKv:
    """The KV of one sequence in its blocks. The seed of a position's bytes is the digest of the tokens up to it."""

    def __init__(self, blocks: np.ndarray, layout: KvLayout, block_ids: Sequence[int], num_tokens: int) -> None:
        check_table(block_ids, num_tokens, layout, blocks.shape[1])
        self._blocks = blocks
        self._layout = layout
        self._token_bytes = layout.block_bytes // layout.block_tokens
        self._block_ids = list(block_ids)
        self._native = BlockSequence(blocks, self._token_bytes, self._block_ids)
        self.capacity_tokens = min(len(block_ids) * layout.block_tokens, CONTEXT_TOKENS)

    def prefill(
        self,
        token_ids: Sequence[int],
        hash_seed: int,
        on_layer: Callable[[int], None] | None,
        check: Callable[[], None] | None,
    ) -> int:
        layout = self._layout
        full_blocks, tail_tokens = divmod(len(token_ids), layout.block_tokens)
        digests = _prefix_digests(0, 0, token_ids)
        last_chunk = (len(token_ids) - 1) // layout.block_tokens * layout.block_tokens
        for start in range(0, last_chunk, layout.block_tokens):
            if check is not None:
                check()
            self.fill(start, digests[start : start + layout.block_tokens])
        if check is not None:
            check()
        if tail_tokens:
            self._blocks[:, self._block_ids[full_blocks], tail_tokens * self._token_bytes :] = 0
        # The blocks of a layer are final only when the last chunk has passed it.
        for layer in range(layout.num_layers):
            self._native.fill(last_chunk, digests[last_chunk:], TENSORS_PER_LAYER * layer, TENSORS_PER_LAYER)
            if on_layer is not None:
                on_layer(layer)
        return self.next_token(len(token_ids), hash_seed)

    def fill(self, first_position: int, digests: np.ndarray) -> None:
        """Writes the KV of some positions in every tensor."""
        self._native.fill(first_position, digests, 0, self._layout.num_tensors)

    def next_token(self, num_tokens: int, hash_seed: int) -> int:
        return NUM_BYTES + self._native.hash(num_tokens, hash_seed) % NUM_WORDS

    def prefix_digest(self, num_tokens: int) -> int:
        """The digest that the KV of the last position was made from: it is read out of the first word of the KV, since
        whoever continues a sequence need not know its tokens."""
        block, inside = divmod(num_tokens - 1, self._layout.block_tokens)
        start = inside * self._token_bytes
        word = self._blocks[0, self._block_ids[block], start : start + _WORD_BYTES]
        return _unmix64(int(word.view(np.uint64)[0]))


def _prefix_digests(before: int, first_position: int, token_ids: Sequence[int]) -> np.ndarray:
    """``uint64[n]``: for each token a digest of it and all before it; ``before`` is that of the tokens in front.

    A sum, modulo 2**64, of numbers that depend on a token and its position, because NumPy has cumulative sums.
    """
    position = np.arange(first_position + 1, first_position + len(token_ids) + 1, dtype=np.uint64)
    terms = _mix64(_mix64(position * np.uint64(_GOLDEN)) + np.asarray(token_ids, np.uint64))
    terms[:1] += np.uint64(before)
    return np.cumsum(terms, dtype=np.uint64)


def _mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, as in ``native/src/block_hash.cc``."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _unmix64(x: int) -> int:
    """The inverse of :func:`_mix64`."""
    x = (x ^ x >> 31 ^ x >> 62) * 0x319642B2D24D8EC3 & _MASK
    x = (x ^ x >> 27 ^ x >> 54) * 0x96DE1B173F119089 & _MASK
    return x ^ x >> 30 ^ x >> 60


def _hash_seed(sampling: Sampling) -> int:
    return sampling.seed + 1 if sampling.temperature else 0


def _layout(spec: EngineSpec) -> KvLayout:
    shape = _SHAPES.get(spec.model, spec.model)
    sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", shape)
    if sizes is None:
        raise ValueError(
            f"the shape of a synthetic model is LAYERSxHEADSxDIM, such as 30x3x64, or a name, not {spec.model!r}"
            + nearest(spec.model, _SHAPES)
        )
    if spec.dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {spec.dtype!r}{nearest(spec.dtype, _DTYPES)}")
    if spec.device != "cpu":
        raise ValueError(f"engine 'synthetic' is for device 'cpu' only, not {spec.device!r}")
    if spec.block_tokens < 1:
        raise ValueError(f"block_tokens ({spec.block_tokens}) must be at least 1")
    num_layers, num_kv_heads, head_dim = (int(size) for size in sizes.groups())
    model_id, itemsize = f"synthetic-{shape}@{_REVISION}", np.dtype(spec.dtype).itemsize
    return KvLayout(model_id, num_layers, num_kv_heads, head_dim, spec.dtype, spec.block_tokens, itemsize)
