"""The installed command, and the cluster configurations, for the tests of this folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

COMMAND = Path(sys.executable).with_name("llm-datadist-ray")
CONFIGS = Path(__file__).parents[2] / "cluster_configs"
DEADLINE_S = 200.0

RunCommand = Callable[..., "subprocess.CompletedProcess[str]"]
"""``run_command(*args, env={...}, head=..., deadline_s=...)``, see the fixture."""
