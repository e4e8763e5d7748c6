"""Text in and out: prompts to token ids, token ids to text as it becomes certain."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer

_HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class TextCodec:
    """The tokenizer of a model folder. Any thread may call any method at any time: only the Rust tokenizer's read-only
    methods are used, because the Python wrapper changes its truncation settings on every call."""

    def __init__(self, folder: Path) -> None:
        self._wrapper = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tokenizer = getattr(self._wrapper, "backend_tokenizer", None)
        if tokenizer is None:
            raise ValueError(f"the tokenizer of {folder.name} has no tokenizer.json, which this engine needs")
        self._tokenizer: Tokenizer = tokenizer
        self._special = frozenset(self._wrapper.all_special_ids)

    def encode(self, prompt: str, *, chat: bool) -> list[int]:
        if not chat or self._wrapper.chat_template is None:
            return self._tokenizer.encode(prompt).ids
        turn = [{"role": "user", "content": prompt}]
        text = self._wrapper.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        # The template has written the special tokens already.
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self)

    def is_special(self, token: int) -> bool:
        return token in self._special


class Detokenizer:
    """Text of one sequence, piece by piece; used by one thread."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        # The tokens of the last piece are decoded again before the next, since some tokenizers write a token
        # differently at the start of a text (a leading space).
        self._context: list[int] = []
        self._pending: list[int] = []

    def __call__(self, token: int) -> str:
        if self._codec.is_special(token):
            return ""
        self._pending.append(token)
        text = self._codec.decode(self._context + self._pending)
        if text.endswith(_HALF_CHARACTER):
            return ""
        piece = text[len(self._codec.decode(self._context)) :]
        self._context, self._pending = self._pending, []
        return piece
