"""The test's end of a :mod:`tests.conformance.side` process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_CALL_TIMEOUT_S = 120.0


class SideProcess:
    """Every other attribute is a command of :class:`tests.conformance.side.Side`; what it raises is raised here.

    Nothing is expected on its standard error: see :meth:`check_stderr`.
    """

    def __init__(self, env: dict[str, str]) -> None:
        self._env = env
        self._stderr = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115 (closed by stop)
        self.start_process()

    def start_process(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            module = ["-m", "tests.conformance.side", str(theirs.fileno())]
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-W", "error", *module],
                cwd=_ROOT,
                env=self._env,
                pass_fds=[theirs.fileno()],
                stderr=self._stderr,
            )
        self._connection = Connection(ours.detach())
        self._num_unanswered = 1
        self.pid = self.end()

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.begin(method, *args, **kwargs)
            return self.end()

        return call

    def begin(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Sends a command whose answer :meth:`end` waits for."""
        self._connection.send((method, args, kwargs))
        self._num_unanswered += 1

    def end(self) -> Any:
        self._num_unanswered -= 1
        if not self._connection.poll(_CALL_TIMEOUT_S):
            self._process.send_signal(signal.SIGABRT)  # faulthandler prints where it hangs
            self._process.wait()
            text = self._new_stderr()
            raise TimeoutError(f"process {self._process.pid} gave no answer within {_CALL_TIMEOUT_S} s\n{text}")
        try:
            is_ok, value = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            code = self._process.wait()
            raise RuntimeError(f"process {self._process.pid} died: {code}\n{self._new_stderr()}") from error
        if not is_ok:
            raise value
        return value

    def recover(self) -> None:
        """After a test, which may have failed: answers that nobody waited for are taken, a dead process is replaced."""
        if self._process.poll() is not None:
            self.restart()
        while self._num_unanswered:
            with suppress(Exception):
                self.end()

    def check_stderr(self) -> None:
        """Fails if the process has written something there since the last check: a warning, a message of the C library,
        a stack. Its loggers write to standard output."""
        text = self._new_stderr()
        assert not text, f"process {self.pid} wrote to its standard error:\n{text}"

    def _new_stderr(self) -> str:
        """Taken out of the file, to which the process appends."""
        text = os.pread(self._stderr.fileno(), 1 << 20, 0).decode(errors="replace")
        self._stderr.truncate(0)
        return text

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED)  # until then its threads may still run for a while

    def restart(self) -> None:
        """Kills the process (if somebody has not done so) and starts another one."""
        self.kill()
        self.start_process()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def stop(self) -> None:
        """Lets it end by itself, which includes finalizing; fails if it does not, or badly."""
        self._connection.close()
        try:
            code = self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)
            code = self._process.wait()
        with self._stderr:
            self.check_stderr()
        assert code == 0, f"process {self.pid} ended with {code}"
