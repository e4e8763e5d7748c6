"""What the actors of this process's Ray have written to their standard error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import ray
from ray._private import worker

_RAYS_OWN = re.compile(r":(job_id|actor_name|task_name):")


class ActorLogs:
    """Reads on from where the last reading ended. A worker that is not used by anybody yet is read too."""

    def __init__(self) -> None:
        self._num_read: dict[Path, int] = {}

    def unexpected(self, expected: Sequence[str]) -> list[str]:
        """New lines that no expression of ``expected`` is found in. Our actors write there what is worth a look: a
        warning, an error, a traceback."""
        return [line for line in self._new_lines() if not any(re.search(pattern, line) for pattern in expected)]

    def _new_lines(self) -> Iterator[str]:
        if not ray.is_initialized():
            return
        for path in sorted(Path(_logs_folder()).glob("worker-*.err")):
            lines = path.read_text(errors="replace").splitlines()
            new = lines[self._num_read.get(path, 0) :]
            self._num_read[path] = len(lines)
            yield from (f"{path.name}: {line}" for line in new if line and not _RAYS_OWN.match(line))


def _logs_folder() -> str:
    assert worker._global_node is not None
    return worker._global_node.get_logs_dir_path()
