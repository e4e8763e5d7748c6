"""The engine without a model: tokens follow from every KV byte, bytes from the prefix. Needs the compiled module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from llm_datadist_ray.engines import create
from llm_datadist_ray.engines.base import GREEDY, ContextFull, Engine, EngineSpec, Sampling

BLOCK_TOKENS = 4
NUM_BLOCKS = 24
MAX_TOKENS = 9
SPEC = EngineSpec(kind="synthetic", model="2x2x8", dtype="float32", block_tokens=BLOCK_TOKENS)
LENGTHS = [1, 3, 4, 5, 7, 8, 9, 16, 17, 40]


@dataclass
class Side:
    """An engine and block memory that held something else before."""

    engine: Engine
    blocks: np.ndarray
    random: np.random.Generator

    @classmethod
    def create(cls, seed: int, spec: EngineSpec = SPEC) -> Side:
        random = np.random.default_rng(seed)
        engine = create(spec)
        layout = engine.layout
        blocks = random.integers(0, 256, (layout.num_tensors, NUM_BLOCKS, layout.block_bytes), np.uint8)
        engine.attach(blocks)
        return cls(engine, blocks, random)

    def table(self, num_tokens: int) -> list[int]:
        return self.random.permutation(NUM_BLOCKS)[: self.engine.layout.num_blocks_for(num_tokens)].tolist()

    def decode(self, num_tokens: int, first: int, table: Sequence[int], sampling: Sampling = GREEDY) -> list[int]:
        sequence = self.engine.start_decode(num_tokens, first, table, sampling=sampling)
        return [first, *(sequence.step() for _ in range(MAX_TOKENS - 1))]

    def kv(self, table: Sequence[int], num_tokens: int) -> np.ndarray:
        """``uint8[num_tensors, num_tokens, token_bytes]`` in token order."""
        layout = self.engine.layout
        ordered = self.blocks[:, list(table)].reshape(layout.num_tensors, len(table) * layout.block_tokens, -1)
        return ordered[:, :num_tokens].copy()


@pytest.fixture
def sides() -> tuple[Side, Side]:
    return Side.create(1), Side.create(2)


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([num_tokens, seed]).integers(0, 256, num_tokens).tolist()


def handed_over(source: Side, target: Side, prompt: list[int], sampling: Sampling = GREEDY) -> tuple[int, list[int]]:
    """The first token and the target's block table, after prefill and a copy of whole blocks."""
    source_table, target_table = source.table(len(prompt)), target.table(len(prompt) + MAX_TOKENS)
    first = source.engine.prefill(prompt, source_table, sampling=sampling)
    target.blocks[:, target_table[: len(source_table)]] = source.blocks[:, source_table]
    return first, target_table


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7, seed=3)], ids=["greedy", "sampled"])
def test_decode_elsewhere_equals_alone(sides: tuple[Side, Side], num_tokens: int, sampling: Sampling) -> None:
    source, target = sides
    prompt = prompt_of(num_tokens)
    first, table = handed_over(source, target, prompt, sampling)
    before = target.blocks.copy()
    tokens = target.decode(num_tokens, first, table, sampling)
    assert tokens == source.engine.generate_alone(prompt, MAX_TOKENS, sampling=sampling)
    assert len(set(tokens)) == MAX_TOKENS
    others = np.setdiff1d(np.arange(NUM_BLOCKS), table)
    assert np.array_equal(target.blocks[:, others], before[:, others])
    # The KV of the generated tokens is the one that a prefill of them would make: conversations share prefixes.
    whole = prompt + tokens[:-1]
    again = source.table(len(whole))
    assert source.engine.prefill(whole, again, sampling=sampling) == tokens[-1]
    assert np.array_equal(source.kv(again, len(whole)), target.kv(table, len(whole)))


def test_every_flipped_byte_changes_the_tokens(sides: tuple[Side, Side]) -> None:
    source, target = sides
    num_tokens = 6  # a block and a half
    first, table = handed_over(source, target, prompt_of(num_tokens))
    expected, clean = target.decode(num_tokens, first, table), target.blocks.copy()
    token_bytes = clean.shape[2] // BLOCK_TOKENS
    for tensor in range(clean.shape[0]):
        for position in range(num_tokens):
            for byte in range(token_bytes):
                target.blocks[:] = clean
                where = table[position // BLOCK_TOKENS], position % BLOCK_TOKENS * token_bytes + byte
                target.blocks[tensor, where[0], where[1]] ^= 1 << byte % 8
                assert target.decode(num_tokens, first, table)[1] != expected[1], (tensor, position, byte)


def test_bytes_behind_the_sequence_change_nothing(sides: tuple[Side, Side]) -> None:
    source, target = sides
    first, table = handed_over(source, target, prompt_of(6))
    expected = target.decode(6, first, table)
    target.blocks[:, table[1], target.blocks.shape[2] // 2 :] ^= 0xFF
    target.blocks[:, table[2:]] ^= 0xFF
    assert target.decode(6, first, table) == expected


def test_exchanged_and_missing_blocks_change_the_tokens(sides: tuple[Side, Side]) -> None:
    source, target = sides
    num_tokens = 3 * BLOCK_TOKENS
    first, table = handed_over(source, target, prompt_of(num_tokens))
    expected, clean = target.decode(num_tokens, first, table), target.blocks.copy()

    def decode_with(damage: np.ndarray) -> list[int]:
        target.blocks[:] = damage
        return target.decode(num_tokens, first, table)

    assert decode_with(clean) == expected
    for one, two in ((0, 1), (0, 2), (1, 2)):
        for tensors in (slice(None), 0, 3):
            swapped = clean.copy()
            swapped[tensors, [table[one], table[two]]] = clean[tensors, [table[two], table[one]]]
            assert decode_with(swapped) != expected
        assert target.decode(num_tokens, first, [*_exchanged(table, one, two)]) != expected
    for layer in range(2):
        for blocks in (slice(None), [table[1]]):
            swapped = clean.copy()
            swapped[2 * layer, blocks] = clean[2 * layer + 1, blocks]
            swapped[2 * layer + 1, blocks] = clean[2 * layer, blocks]
            assert decode_with(swapped) != expected
    for tensor in range(clean.shape[0]):
        for block in table[:3]:
            zeroed = clean.copy()
            zeroed[tensor, block] = 0
            assert decode_with(zeroed) != expected


def _exchanged(table: list[int], one: int, two: int) -> list[int]:
    table = list(table)
    table[one], table[two] = table[two], table[one]
    return table


def test_damage_during_decode_is_seen_too(sides: tuple[Side, Side]) -> None:
    source, target = sides
    prompt = prompt_of(8)
    first, table = handed_over(source, target, prompt)
    sequence = target.engine.start_decode(8, first, table)
    tokens = [first, sequence.step()]
    target.blocks[3, table[0], 5] ^= 4
    tokens.append(sequence.step())
    alone = source.engine.generate_alone(prompt, 3)
    assert tokens[:2] == alone[:2]
    assert tokens[2] != alone[2]


def test_a_shared_prefix_has_equal_bytes(sides: tuple[Side, Side]) -> None:
    one, two = sides
    shared = prompt_of(10)
    tables = one.table(20), two.table(20)
    one.engine.prefill(shared + prompt_of(10, seed=1), tables[0])
    two.engine.prefill(shared + prompt_of(10, seed=2), tables[1])
    kv = one.kv(tables[0], 20), two.kv(tables[1], 20)
    assert np.array_equal(kv[0][:, :10], kv[1][:, :10])
    different = (kv[0][:, 10:] != kv[1][:, 10:]).mean(axis=2)
    assert (different > 0.9).all(), "positions behind the first other token must have other bytes"
    # No two positions or tensors have the same bytes, else an exchange would go unnoticed.
    assert len(np.unique(kv[0].reshape(-1, kv[0].shape[2]), axis=0)) == kv[0].shape[0] * 20


def test_the_first_token_out_of_order_matters(sides: tuple[Side, Side]) -> None:
    """The digest of a prefix is a sum: it must still see the order."""
    side, _ = sides
    tables = side.table(2), [23]
    side.engine.prefill([7, 9], tables[0])
    kv = side.kv(tables[0], 2)
    side.engine.prefill([9, 7], tables[1])
    assert (kv[:, 1] != side.kv(tables[1], 2)[:, 1]).any()


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_layers_are_reported_when_final(sides: tuple[Side, Side], num_tokens: int) -> None:
    side, _ = sides
    table = side.table(num_tokens)
    before = side.blocks.copy()
    seen: list[int] = []
    at_callback: list[np.ndarray] = []
    checks = 0

    def check() -> None:
        nonlocal checks
        assert not seen
        checks += 1

    def on_layer(layer: int) -> None:
        seen.append(layer)
        at_callback.append(side.blocks[2 * layer : 2 * layer + 2, table].copy())
        later = slice(2 * layer + 2, None)
        filled = ((num_tokens - 1) % BLOCK_TOKENS + 1) * side.blocks.shape[2] // BLOCK_TOKENS
        assert np.array_equal(side.blocks[later, table[-1], :filled], before[later, table[-1], :filled])

    side.engine.prefill(prompt_of(num_tokens), table, on_layer=on_layer, check=check)
    assert seen == [0, 1]
    assert checks == len(table)
    assert np.array_equal(np.concatenate(at_callback), side.blocks[:, table])
    tail = side.kv(table, len(table) * BLOCK_TOKENS)[:, num_tokens:]
    assert not tail.any(), "the tail of the last block must be zero"


def test_a_check_ends_a_prefill(sides: tuple[Side, Side]) -> None:
    side, _ = sides
    table, before = side.table(20), side.blocks.copy()
    answers = iter([None, None, InterruptedError("cancelled")])

    def check() -> None:
        if error := next(answers):
            raise error

    with pytest.raises(InterruptedError, match="cancelled"):
        side.engine.prefill(prompt_of(20), table, check=check)
    changed = (side.blocks != before).any(axis=(0, 2))
    assert sorted(np.flatnonzero(changed)) == sorted(table[:2])


def test_sampling_seeds_differ_and_temperature_zero_is_greedy(sides: tuple[Side, Side]) -> None:
    engine = sides[0].engine
    prompt = prompt_of(9)
    greedy = engine.generate_alone(prompt, MAX_TOKENS)
    assert engine.generate_alone(prompt, MAX_TOKENS, sampling=Sampling(0.0, seed=5)) == greedy
    runs = [engine.generate_alone(prompt, MAX_TOKENS, sampling=Sampling(1.0, seed=seed)) for seed in range(3)]
    assert len({tuple(tokens) for tokens in [greedy, *runs]}) == 4


def test_a_full_table_says_so_and_keeps_its_bytes(sides: tuple[Side, Side]) -> None:
    side, _ = sides
    first = side.engine.prefill(prompt_of(3), [5])
    sequence = side.engine.start_decode(3, first, [5])
    sequence.step()
    before = side.blocks.copy()
    for _ in range(2):
        with pytest.raises(ContextFull, match="behind 4 tokens"):
            sequence.step()
    assert np.array_equal(side.blocks, before)


def test_bad_requests_write_nothing(sides: tuple[Side, Side]) -> None:
    side, _ = sides
    before = side.blocks.copy()
    for prompt, table, message in [
        ([], [0], "prompt is empty"),
        ([1] * 5, [0], "5 tokens need 2 blocks, the table has 1"),
        ([1] * 5, [3, 3], "names a block twice"),
        ([1] * 5, [3, NUM_BLOCKS], "leaves the attached blocks"),
        ([1] * 5, [3, -1], "leaves the attached blocks"),
        ([256 + 65536], [0], "token id is outside"),
        ([-1], [0], "token id is outside"),
    ]:
        with pytest.raises(ValueError, match=message):
            side.engine.prefill(prompt, table)
    for num_tokens, first, table, message in [
        (0, 1, [0], "behind 0 tokens"),
        (5, 1, [0], "need 2 blocks"),
        (4, 256 + 65536, [0], "token id is outside"),
    ]:
        with pytest.raises(ValueError, match=message):
            side.engine.start_decode(num_tokens, first, table)
    for prompt, max_tokens in (([], 1), ([1], 0)):
        with pytest.raises(ValueError):
            side.engine.generate_alone(prompt, max_tokens)
    assert np.array_equal(side.blocks, before)


def test_memory_must_fit() -> None:
    engine = create(SPEC)
    layout = engine.layout
    good = np.zeros((layout.num_tensors, 2, layout.block_bytes), np.uint8)
    shifted = np.zeros(good.size + 1, np.uint8)[1:].reshape(good.shape)
    for bad in (good[:-1], good[..., :-8], good.view(np.int8), good[:, ::2], shifted):
        with pytest.raises(ValueError, match="KV memory"):
            engine.attach(bad)
    with pytest.raises(ValueError, match="attach"):
        engine.prefill([1], [0])
    engine.attach(good)
    with pytest.raises(ValueError, match="already attached"):
        engine.attach(good)


def test_shapes() -> None:
    named = create(EngineSpec(kind="synthetic", model="smollm2-shape")).layout
    assert (named.num_layers, named.num_kv_heads, named.head_dim, named.dtype) == (30, 3, 64, "float32")
    assert named == create(EngineSpec(kind="synthetic", model="30x3x64")).layout
    half = create(EngineSpec(kind="synthetic", model="smollm2-shape", dtype="float16")).layout
    assert half.block_bytes * 2 == named.block_bytes
    assert half.digest != named.digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "tiny"}, r"LAYERSxHEADSxDIM.*'tiny'; known: smollm2-shape"),
        ({"model": "smollm2-shap"}, "did you mean 'smollm2-shape'"),
        ({"model": "2x0x8"}, "LAYERSxHEADSxDIM"),
        ({"model": "2x2"}, "LAYERSxHEADSxDIM"),
        ({"model": "2x1x1"}, "4 bytes per token and tensor; a multiple of 8"),
        ({"dtype": "float64"}, "unknown dtype 'float64'"),
        ({"device": "npu:0"}, "'cpu' only"),
        ({"block_tokens": 0}, "block_tokens"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, object], message: str) -> None:
    settings = {"kind": "synthetic", "model": "2x2x8", **changes}
    with pytest.raises(ValueError, match=message):
        create(EngineSpec(**settings))  # type: ignore[arg-type]


def test_text(sides: tuple[Side, Side]) -> None:
    engine = sides[0].engine
    text = "a é 漢字 😀 end"
    assert engine.encode(text, chat=True) == list(text.encode())
    detokenize = engine.detokenizer()
    pieces = [detokenize(token) for token in text.encode()]
    assert [piece for piece in pieces if piece] == list(text)
    assert [detokenize(token) for token in (0xC3, 256 + 0x1F, 256 + 0xFFFF)] == [
        "",
        "\N{REPLACEMENT CHARACTER} 001f",
        " ffff",
    ]
    assert engine.eos_token_ids == frozenset()
