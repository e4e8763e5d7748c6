"""Where prompts come from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from llm_datadist_ray.cli.exits import BadInput


def gather(texts: Sequence[str], files: Sequence[str]) -> list[str]:
    """The prompts in order: the texts, then one per file. Raises BadInput for none at all, an empty or unreadable one.

    A file is UTF-8 and is one prompt as a whole, without the newline at its very end; ``-`` is standard input.
    """
    if not texts and not files:
        raise BadInput("there is nothing to ask: give --prompt TEXT or --prompt-file FILE, each as often as you like")
    for text in texts:
        _refuse_empty(text, "--prompt")
        _refuse_bad_bytes(text)
    return [*texts, *(_read(file) for file in files)]


def _read(file: str) -> str:
    name = "standard input" if file == "-" else f"prompt file {file!r}"
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise BadInput(f"{name} cannot be read: {error.strerror}") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{name} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}; "
            "convert it first, for example with iconv"
        ) from error
    text = text.removesuffix("\n").removesuffix("\r")
    _refuse_empty(text, name)
    return text


def _refuse_empty(text: str, name: str) -> None:
    if not text:
        raise BadInput(f"{name} is empty: a prompt needs at least one character")


def _refuse_bad_bytes(text: str) -> None:
    """Bytes of the command line that are not in its encoding come as halves of surrogate pairs."""
    from llm_datadist_ray.actors.request_input import surrogate_in

    if where := surrogate_in(text):
        raise BadInput(
            f"--prompt is no valid text: half of a surrogate pair, {where}; write it in UTF-8, or give a UTF-8 file "
            "with --prompt-file"
        )
