"""How a command ends early: one sentence on standard error, and an exit code that says whose fault it was."""

from __future__ import annotations

import click

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""


class Failed(click.ClickException):
    """The input was right, and still it did not work."""

    exit_code = EXIT_FAILED


class BadInput(click.ClickException):
    """The caller has to change an argument, a file or the configuration."""

    exit_code = EXIT_USAGE
