"""``ray job submit -- llm-datadist-ray run ...`` on a Ray of its own."""

from __future__ import annotations

import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from installed_command import COMMAND, CONFIGS

RAY = Path(sys.executable).with_name("ray")
START_DEADLINE_S = 120.0
JOB_DEADLINE_S = 200.0
STOP_DEADLINE_S = 30.0


@dataclass(frozen=True)
class Head:
    job_address: str
    env: dict[str, str]


@pytest.fixture
def head(clean_env: dict[str, str]) -> Iterator[Head]:
    """A Ray head with its dashboard, and with a token, as Ray has it by default. Ends every process that it started."""
    env = clean_env | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PATH": f"{COMMAND.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
    }
    # Not pytest's own folder: the names of Ray's sockets would become too long.
    folder = Path(tempfile.mkdtemp(prefix="ldr-", dir="/tmp"))
    dashboard_port, client_port, agent_port = free_ports(3)
    command = [
        *(RAY, "start", "--head", "--block", "--disable-usage-stats", "--temp-dir", folder),
        *("--node-ip-address", "127.0.0.1", "--port", "0", "--num-cpus", "2"),
        *("--object-store-memory", str(100 * 1024 * 1024)),
        *("--include-dashboard", "true", "--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard_port)),
        *("--ray-client-server-port", str(client_port), "--dashboard-agent-listen-port", str(agent_port)),
        *("--min-worker-port", "0", "--max-worker-port", "0"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
    try:
        read_until(process, "Ray runtime started.", START_DEADLINE_S)
        yield Head(f"http://127.0.0.1:{dashboard_port}", env)
    finally:
        with pidfds(folder) as fds:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=STOP_DEADLINE_S)
            end_all(fds)
        shutil.rmtree(folder)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in sockets]


def read_until(process: subprocess.Popen[bytes], words: str, deadline_s: float) -> None:
    assert process.stdout
    deadline = time.monotonic() + deadline_s
    output = b""
    while words.encode() not in output:
        ready, _, _ = select.select([process.stdout], [], [], deadline - time.monotonic())
        assert ready, f"no {words!r} within {deadline_s} s:\n{output.decode()}"
        chunk = os.read(process.stdout.fileno(), 65536)
        assert chunk, f"it ended before {words!r}:\n{output.decode()}"
        output += chunk


@contextmanager
def pidfds(folder: Path) -> Iterator[dict[int, int]]:
    """Process -> descriptor, of all that have the folder in their command line or environment: those of our Ray."""
    with ExitStack() as stack:
        fds = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and belongs_to(entry, folder):
                try:
                    fds[int(entry.name)] = os.pidfd_open(int(entry.name))
                except ProcessLookupError:
                    continue
                stack.callback(os.close, fds[int(entry.name)])
        yield fds


def belongs_to(entry: Path, folder: Path) -> bool:
    try:
        return any(os.fsencode(folder) in (entry / name).read_bytes() for name in ("cmdline", "environ"))
    except OSError:  # it has ended, or is somebody else's
        return False


def end_all(fds: dict[int, int]) -> None:
    """Waits for processes that were told to end, and kills those that do not."""
    deadline = time.monotonic() + STOP_DEADLINE_S
    for fd in fds.values():
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            signal.pidfd_send_signal(fd, signal.SIGKILL)


def test_submitted_job_runs_prefill_and_decode_and_checks_every_token(head: Head) -> None:
    submit = [RAY, "job", "submit", "--address", head.job_address, "--"]
    run = ["llm-datadist-ray", "run", CONFIGS / "local_1p1d_tiny.yaml", "--prompt", "Hello there", "--max-tokens", "12"]
    result = subprocess.run(
        [*submit, *run, "--check"], capture_output=True, encoding="utf-8", timeout=JOB_DEADLINE_S, env=head.env
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert "check: 12/12 tokens equal" in output
    assert "succeeded" in output.lower()
    list_jobs = [RAY, "job", "list", "--address", head.job_address]
    jobs = subprocess.run(list_jobs, capture_output=True, encoding="utf-8", timeout=60, env=head.env)
    assert "SUCCEEDED" in jobs.stdout + jobs.stderr
