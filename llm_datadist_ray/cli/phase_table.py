"""One request's phases as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from llm_datadist_ray.actors.messages import RequestReport

COLUMNS = ("phase", "ms", "bytes", "path", "GB/s", "tokens/s")


def phase_table(report: RequestReport, *, plain: bool) -> Table:
    """``plain``: ASCII only."""
    table = Table(box=box.ASCII if plain else box.ROUNDED)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("phase", "path") else "right", no_wrap=True)
    for row in phase_rows(report):
        table.add_row(*row)
    return table


def phase_rows(report: RequestReport) -> list[tuple[str, ...]]:
    """``first token`` counts from the start of the request, the other phases from their own start."""
    times = report.times
    return [
        ("prefill", _ms(times.prefill_s), "", "", "", _rate(report.num_prompt_tokens, times.prefill_s)),
        ("handoff", _ms(times.handoff_s), "", "", "", ""),
        (
            "transfer",
            _ms(times.transfer_s),
            str(report.transfer_bytes),
            report.transfer_path,
            _rate(report.transfer_bytes / 1e9, times.transfer_s, digits=3),
            "",
        ),
        ("first token", _ms(times.first_token_s), "", "", "", ""),
        # Prefill gave the first token.
        ("decode", _ms(times.decode_s), "", "", "", _rate(len(report.token_ids) - 1, times.decode_s)),
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _rate(amount: float, seconds: float, *, digits: int = 1) -> str:
    return f"{amount / seconds:.{digits}f}" if amount > 0 and seconds > 0 else "-"
