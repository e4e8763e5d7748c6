"""Programs as known clients write them, run against this package (spec client-patterns §1 - §3).

Each one checks the bytes on its sides itself, those that must not change too.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conformance.conftest import PATHS
from tests.conformance.pair import HOST_IP, side_env

_CLIENTS = Path(__file__).with_name("clients")
_ROOT = Path(__file__).resolve().parents[2]
_DEADLINE_S = 90.0
_GRACE_S = 5.0


@dataclass(frozen=True)
class Program:
    """A file of ``clients/``, run as one process for each role; ``arguments`` are those of every one of them."""

    script: str
    roles: tuple[str, ...] = ("prompt", "decoder")
    arguments: tuple[str, ...] = ()
    also_over_tcp: bool = False
    """Where it makes a difference that no process can reach the memory of another."""

    def __str__(self) -> str:
        return "-".join([self.script, *self.arguments]).replace("--", "")


HIXL = ("--backend", "hixl")
PROGRAMS = [
    Program("pull_cache", also_over_tcp=True),
    Program("pull_blocks"),
    Program("pull_from_cache_to_blocks"),
    Program("pull_blocks_xpyd", ("prompt-0", "prompt-1", "decoder")),
    Program("push_blocks", also_over_tcp=True),
    Program("push_blocks", arguments=HIXL),
    Program("push_cache", arguments=("--comm-res", '{"version":"1.3"}')),
    Program("switch_role"),
    Program("transfer_cache_async", also_over_tcp=True),
    Program("transfer_cache_async", arguments=HIXL),
    Program("hixl_transfer_backend"),
    Program("vllm_ascend_v1"),
    Program("vllm_ascend_v1_requests", also_over_tcp=True),
    Program("vllm_ascend_v2", ("prefill", "decode"), ("--model", "dense")),
    Program("vllm_ascend_v2", ("prefill", "decode"), ("--model", "mla")),
    Program("vllm_ascend_v2", ("prefill", "decode"), ("--model", "sparse"), also_over_tcp=True),
    Program("omni_infer", ("prompt-0", "prompt-1", "decoder"), also_over_tcp=True),
    Program("mindie", ("prefill-0", "prefill-1", "misconfigured", "decode")),
    Program("sglang", ("prefill", "decode")),
]


def cases() -> list[object]:
    found = [pytest.param(program, ",".join(PATHS), id=str(program)) for program in PROGRAMS]
    if "tcp" in PATHS and PATHS != ["tcp"]:
        found += [pytest.param(program, "tcp", id=f"{program}-tcp") for program in PROGRAMS if program.also_over_tcp]
    return found


@pytest.mark.parametrize(("program", "paths"), cases())
def test_client(program: Program, paths: str, tmp_path: Path) -> None:
    ports = free_ports(len(program.roles))
    with ExitStack() as stack:
        processes = [
            stack.enter_context(ClientProcess(program, role, ports, paths, tmp_path)) for role in program.roles
        ]
        wait_for_all(processes)
    wrong = [process for process in processes if process.code != 0 or process.errors]
    if wrong:
        pytest.fail("\n".join(process.report() for process in processes), pytrace=False)


class ClientProcess:
    """One role of a program. It ends by itself, or is ended with the ``with`` block."""

    def __init__(self, program: Program, role: str, ports: list[int], paths: str, directory: Path) -> None:
        self.role = role
        self._output_path = directory / f"{role}.stdout"
        self._errors_path = directory / f"{role}.stderr"
        command = [
            *(sys.executable, "-X", "faulthandler", "-m", "llm_datadist_ray.compat"),
            *(str(_CLIENTS / f"{program.script}.py"), role, *program.arguments),
            *("--rendezvous", str(directory / "rendezvous"), "--ports", *map(str, ports)),
        ]
        env = {**side_env(paths), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        with open(self._output_path, "wb") as output, open(self._errors_path, "wb") as errors:
            self._process = subprocess.Popen(command, cwd=_ROOT, env=env, stdout=output, stderr=errors)

    def __enter__(self) -> ClientProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.code is None:
            self._process.send_signal(signal.SIGABRT)  # faulthandler prints where it was
        self._process.wait()

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def pidfd(self) -> int:
        """Readable once it has ended; the caller's to close."""
        return os.pidfd_open(self._process.pid)

    @property
    def errors(self) -> str:
        return self._errors_path.read_text()

    def report(self) -> str:
        end = "was ended, as it had not by itself" if self.code == -signal.SIGABRT else f"ended with {self.code}"
        return f"{self.role} {end}\n--- stdout\n{self._output_path.read_text()}--- stderr\n{self.errors}"


def wait_for_all(processes: list[ClientProcess]) -> None:
    """Until all have ended, the deadline, or a while after the first of them has failed: the others wait for it."""
    deadline = time.monotonic() + _DEADLINE_S
    with ExitStack() as stack:
        running = {stack.enter_context(open(process.pidfd(), "rb", buffering=0)): process for process in processes}
        while running:
            ended, _, _ = select.select(list(running), [], [], max(0.0, deadline - time.monotonic()))
            if not ended:
                return
            codes = [running.pop(pidfd).code for pidfd in ended]
            if any(codes):
                deadline = min(deadline, time.monotonic() + _GRACE_S)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((HOST_IP, 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in sockets]
