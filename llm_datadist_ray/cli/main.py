"""The entry point ``llm-datadist-ray``."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

import click

from llm_datadist_ray.cli.doctor import doctor
from llm_datadist_ray.cli.exits import EXIT_INTERRUPTED, EXIT_OK
from llm_datadist_ray.cli.run import run


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="llm_datadist_ray", prog_name="llm-datadist-ray")
def cli() -> None:
    """Prefill and decode of large language models in different Ray actors, over a native KV transport."""


cli.add_command(run)
cli.add_command(doctor)


def main(args: Sequence[str] | None = None) -> int:
    """Runs one command (``sys.argv`` when ``args`` is None) and returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A model may say anything; a terminal in a C locale must not end the request.
            stream.reconfigure(errors="backslashreplace")
    try:
        exit_code = cli.main(args, prog_name="llm-datadist-ray", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("Interrupted.", err=True)
        return EXIT_INTERRUPTED
    return EXIT_OK if exit_code is None else exit_code


if __name__ == "__main__":
    sys.exit(main())
