"""Converts a GGUF file into a Hugging Face folder (float16 safetensors, tokenizer); transformers reads the file."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from unittest import mock

from .models import Progress

# Kinds of pre-tokenizer, as GGUF files name them, that make every digit a token of its own. transformers does not take
# that from the file.
_DIGIT_SPLITTERS = {"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Writes the model (config, weights, generation settings) and its tokenizer with the chat template into ``folder``.

    Blocks for about half a minute per 100 MB. Raises ImportError when a package of the extra ``demo`` is missing and
    ValueError when the file is no GGUF file or transformers does not know its architecture.
    """
    digits_are_tokens = pre_tokenizer(source) in _DIGIT_SPLITTERS
    try:
        # transformers needs the first two but asks for them only in the middle of its work.
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
        import torch
        from tokenizers import pre_tokenizers
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ModuleNotFoundError as exc:
        raise ImportError(
            f"converting {source.name} needs the Python package {exc.name!r}; install llm-datadist-ray[demo]",
            name=exc.name,
        ) from exc

    with _quiet():
        progress("reading the tokenizer", 0.0)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
        if digits_are_tokens:
            backend = tokenizer.backend_tokenizer
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
        progress("de-quantizing weights", 0.2)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),  # else the model refuses to be saved
            dtype=torch.float16,
            local_files_only=True,
        )
        progress("writing the converted model", 0.95)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    progress("converted", 1.0)


def pre_tokenizer(source: Path) -> str | None:
    """What the file says under ``tokenizer.ggml.pre``, None when it says nothing; ValueError when it is no GGUF file.

    Found by its bytes, since the gguf package reads the whole vocabulary first, which takes many seconds.
    """
    text = b"tokenizer.ggml.pre"
    key = struct.pack("<Q", len(text)) + text + struct.pack("<I", 8)  # 8: its value is a string
    if source.stat().st_size < 4:
        raise ValueError(f"{source.name} is not a GGUF file")
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[:4] != b"GGUF":
            raise ValueError(f"{source.name} is not a GGUF file")
        found = content.find(key)
        if found < 0:
            return None
        start = found + len(key) + 8
        (size_bytes,) = struct.unpack("<Q", content[start - 8 : start])
        return content[start : start + size_bytes].decode(errors="replace")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers from logging anything but errors and from drawing progress bars; afterwards it may again."""
    from tqdm.auto import tqdm
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        # transformers' own switch does not reach the bar of its GGUF reader.
        with mock.patch.object(tqdm, "__init__", partialmethod(tqdm.__init__, disable=True)):
            yield
    finally:
        logging.set_verbosity(verbosity)
