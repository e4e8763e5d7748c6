"""The installed command as a process of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from installed_command import COMMAND, DEADLINE_S, RunCommand


@pytest.fixture
def clean_env() -> dict[str, str]:
    """This process's environment without what would make a run join, or behave like, somebody else's cluster."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "LDR_", "LLM_DATADIST_"))}
    if cache := os.environ.get("LLM_DATADIST_CACHE"):
        env["LLM_DATADIST_CACHE"] = cache
    return env | {"RAY_AUTH_MODE": "token"}


@pytest.fixture
def run_command(clean_env: dict[str, str], tmp_path: Path) -> RunCommand:
    """``run_command(*args, env={...}, deadline_s=...)``: runs it to its end in an empty folder, without an input."""

    def run(
        *args: str | Path, env: Mapping[str, str] | None = None, deadline_s: float = DEADLINE_S
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [COMMAND, *args],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=deadline_s,
            cwd=tmp_path,
            env=clean_env | dict(env or {}),
        )

    return run
