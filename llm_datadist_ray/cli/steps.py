"""What is being done right now, on standard error: a spinner or a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

Say = Callable[[str], None]


class Steps:
    """Used by one thread at a time; what is said through it may come from any thread."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._started_at_s = time.monotonic()

    @contextmanager
    def doing(self, what: str) -> Iterator[Say]:
        """Shows ``what`` until the block ends; call the yielded function with what has come next."""
        if not self._console.is_interactive:
            self._line(what)
            yield self._line
            return
        with self._console.status(Text(what)) as status:
            yield lambda text: status.update(Text(text))

    @contextmanager
    def bar(self, title: str) -> Iterator[Callable[[str, float], None]]:
        """For work that tells its progress as ``(step, fraction)``; shows nothing before it is told anything."""
        if not self._console.is_interactive:
            yield _once_per_step(lambda step: self._line(f"{title}: {step}"))
            return
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(title, total=1.0, visible=False)
            yield lambda step, fraction: progress.update(
                task, completed=fraction, description=f"{title}: {step}", visible=True
            )

    def _line(self, text: str) -> None:
        elapsed_s = time.monotonic() - self._started_at_s
        self._console.print(Text(f"[{elapsed_s:5.1f} s] {text}"), soft_wrap=True)


def _once_per_step(say: Say) -> Callable[[str, float], None]:
    last_step = ""

    def progress(step: str, fraction: float) -> None:
        nonlocal last_step
        if step != last_step:
            last_step = step
            say(step)

    return progress
