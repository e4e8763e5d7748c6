"""The installed command as a process of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from installed_command import COMMAND, DEADLINE_S, RunCommand
from ray_head import Head, ray_head


@pytest.fixture(scope="session")
def clean_env() -> dict[str, str]:
    """This process's environment without what would make a run join, or behave like, somebody else's cluster."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "LDR_", "LLM_DATADIST_"))}
    if cache := os.environ.get("LLM_DATADIST_CACHE"):
        env["LLM_DATADIST_CACHE"] = cache
    return env | {"RAY_AUTH_MODE": "token"}


@pytest.fixture(scope="session")
def head(clean_env: dict[str, str]) -> Iterator[Head]:
    """One for all: to join it is much faster than to start one per command."""
    with ray_head(clean_env) as head:
        yield head


@pytest.fixture
def run_command(clean_env: dict[str, str], tmp_path: Path) -> RunCommand:
    """``run_command(*args, env={...}, head=..., deadline_s=...)``: runs it to its end in an empty folder, without an
    input; in the Ray of ``head`` if one is given."""

    def run(
        *args: str | Path,
        env: Mapping[str, str] | None = None,
        head: Head | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> subprocess.CompletedProcess[str]:
        base_env = clean_env if head is None else head.env | {"RAY_ADDRESS": head.address}
        return subprocess.run(
            [COMMAND, *args],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=deadline_s,
            cwd=tmp_path,
            env=base_env | dict(env or {}),
        )

    return run
