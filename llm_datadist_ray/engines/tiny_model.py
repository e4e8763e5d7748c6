"""A hand-made Llama for tests: four layers, grouped KV heads, a tokenizer of single bytes, seeded random weights.

It knows nothing, but its tokens depend on the whole context, it writes mostly printable text, and it takes about a
millisecond per token, so token equality can be tested everywhere. Use it with dtype float64 where equality counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

NUM_LAYERS, HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, FEED_FORWARD = 4, 64, 4, 2, 16, 128
CONTEXT_TOKENS = 4096
NUM_BYTES = 256  # token ids 0..255 are the byte values
SPECIAL_TOKENS = {"<bos>": 256, "<eos>": 257, "<pad>": 258, "<unk>": 259}
VOCAB = NUM_BYTES + len(SPECIAL_TOKENS)
SEED = 20240229

# Quiet embeddings under loud layers: the next token then follows from the whole context. Without that a random model
# soon repeats one token for ever, and a wrong KV block would go unnoticed.
_EMBEDDING_GAIN = 0.3
_LAYER_GAIN = 3.0


def write(folder: Path) -> None:
    """Writes the model in Hugging Face format into ``folder``; a tenth of a second, the same bytes every time."""
    from safetensors.numpy import save_file

    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _config())
    _write_tokenizer(folder)


def weights() -> dict[str, np.ndarray]:
    """All tensors, float32. The legacy generator is used because NumPy freezes its stream for ever."""
    random = np.random.RandomState(SEED)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN, _EMBEDDING_GAIN)}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "self_attn.q_proj.weight": matrix(NUM_HEADS * HEAD_DIM, HIDDEN, _LAYER_GAIN),
            prefix + "self_attn.k_proj.weight": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN, _LAYER_GAIN),
            prefix + "self_attn.v_proj.weight": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN, _LAYER_GAIN),
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN, NUM_HEADS * HEAD_DIM, _LAYER_GAIN),
            prefix + "mlp.gate_proj.weight": matrix(FEED_FORWARD, HIDDEN, _LAYER_GAIN),
            prefix + "mlp.up_proj.weight": matrix(FEED_FORWARD, HIDDEN, _LAYER_GAIN),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN, FEED_FORWARD, _LAYER_GAIN),
            prefix + "input_layernorm.weight": np.ones(HIDDEN, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        }
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    tensors["lm_head.weight"] = matrix(VOCAB, HIDDEN, 4.0) * _loudness()[:, None]
    return tensors


def _loudness() -> np.ndarray:
    """How likely each token is to be generated: printable ASCII mostly, an end of sequence now and then."""
    loudness = np.full(VOCAB, 0.1, np.float32)
    loudness[ord(" ") : ord("~") + 1] = 1.0
    loudness[SPECIAL_TOKENS["<eos>"]] = 0.65
    return loudness


def _config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": SPECIAL_TOKENS["<bos>"],
        "eos_token_id": SPECIAL_TOKENS["<eos>"],
        "pad_token_id": SPECIAL_TOKENS["<pad>"],
        "dtype": "float32",
    }


def _byte_characters() -> list[str]:
    """What a byte-level tokenizer writes for each byte: the byte itself where printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(NUM_BYTES)]


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {character: byte for byte, character in enumerate(_byte_characters())} | SPECIAL_TOKENS
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {f"{token.strip('<>')}_token": token for token in SPECIAL_TOKENS}
    config = roles | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", config | {"model_max_length": CONTEXT_TOKENS})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
