"""A Ray of its own for the tests of this folder, as a cluster's owner would start it."""

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

from installed_command import COMMAND
from process_marks import END_DEADLINE_S, marked_processes, wait_until_ended

RAY = Path(sys.executable).with_name("ray")
START_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Head:
    """``env`` is what a process needs to use it; with ``address`` as RAY_ADDRESS a launch joins it."""

    address: str
    job_address: str
    env: dict[str, str]


@contextmanager
def ray_head(clean_env: dict[str, str]) -> Iterator[Head]:
    """Starts it with its dashboard, and with a token, as Ray has it by default. Ends every process that it started."""
    env = clean_env | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PATH": f"{COMMAND.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
    }
    # Not pytest's own folder: the names of Ray's sockets would become too long.
    folder = Path(tempfile.mkdtemp(prefix="ldr-", dir="/tmp"))
    port, dashboard_port, client_port, agent_port = free_ports(4)
    command = [
        *(RAY, "start", "--head", "--block", "--disable-usage-stats", "--temp-dir", folder),
        *("--node-ip-address", "127.0.0.1", "--port", str(port), "--num-cpus", "2"),
        *("--object-store-memory", str(100 * 1024 * 1024)),
        *("--include-dashboard", "true", "--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard_port)),
        *("--ray-client-server-port", str(client_port), "--dashboard-agent-listen-port", str(agent_port)),
        *("--min-worker-port", "0", "--max-worker-port", "0"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
    try:
        read_until(process, "Ray runtime started.", START_DEADLINE_S)
        yield Head(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard_port}", env)
    finally:
        with marked_processes(str(folder)) as fds:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=END_DEADLINE_S)
            wait_until_ended(fds)
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
