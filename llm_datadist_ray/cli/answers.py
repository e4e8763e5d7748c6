"""What a run says about its requests on standard output: for people, or one JSON object per request."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

import click
from rich.console import Console

from llm_datadist_ray.cli.check import CheckResult
from llm_datadist_ray.cli.phase_table import phase_table

if TYPE_CHECKING:
    from llm_datadist_ray.actors.errors import RequestError
    from llm_datadist_ray.actors.messages import RequestReport, TokenPiece

_MAX_PROMPT_CHARS = 100
# A terminal obeys control characters, and a model may produce any.
_NO_CONTROLS = {code: None for code in range(32) if chr(code) not in "\n\t"} | {127: None}


class Answers(Protocol):
    """The order for each request: ask, then piece for each token, answered, finish; or fail at any point after ask."""

    def ask(self, prompt: str) -> None: ...

    def piece(self, piece: TokenPiece) -> None: ...

    def answered(self, report: RequestReport) -> None: ...

    def finish(self, prompt: str, report: RequestReport, check: CheckResult | None) -> None: ...

    def fail(self, prompt: str, error: RequestError) -> None: ...


class TextAnswers:
    """The answer token by token, a table of the phases, and the outcome of the check."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()

    def ask(self, prompt: str) -> None:
        shown = prompt.partition("\n")[0][:_MAX_PROMPT_CHARS]
        rest = "" if shown == prompt else f"... ({len(prompt)} characters)"
        self._write(f"> {shown}{rest}\n")

    def piece(self, piece: TokenPiece) -> None:
        self._write(piece.text)

    def answered(self, report: RequestReport) -> None:
        self._write(
            f"\n\n{report.num_prompt_tokens} prompt tokens, {len(report.token_ids)} new tokens "
            f"({report.finish_reason}); prefill by member {report.prompt_cluster_id}, "
            f"decode by member {report.decoder_cluster_id}\n"
        )
        self._console.print(phase_table(report, plain=not self._console.is_interactive))

    def finish(self, prompt: str, report: RequestReport, check: CheckResult | None) -> None:
        if check is not None:
            self._write(f"check: {check.num_equal}/{check.num_compared} tokens equal\n")
            if not check.is_equal:
                self._write(f"check failed: {check.first_difference}\n")
        self._write("\n")

    def fail(self, prompt: str, error: RequestError) -> None:
        self._write("\n")
        click.echo(f"Error: {error}", err=True)

    def _write(self, text: str) -> None:
        self._console.file.write(text.translate(_NO_CONTROLS) if self._console.is_terminal else text)
        self._console.file.flush()


class JsonAnswers:
    """One line of JSON per request: ``prompt``, the fields of RequestReport, and ``check`` and ``error`` or null."""

    def ask(self, prompt: str) -> None:
        """Says nothing: the object comes when the request has ended."""

    def piece(self, piece: TokenPiece) -> None:
        """Says nothing: the text is part of the object."""

    def answered(self, report: RequestReport) -> None:
        """Says nothing: the check belongs into the same object."""

    def finish(self, prompt: str, report: RequestReport, check: CheckResult | None) -> None:
        outcome = None if check is None else asdict(check) | {"is_equal": check.is_equal}
        click.echo(json.dumps({"prompt": prompt, **asdict(report), "check": outcome, "error": None}))

    def fail(self, prompt: str, error: RequestError) -> None:
        click.echo(json.dumps({"prompt": prompt, "error": {"kind": type(error).__name__, "message": str(error)}}))
