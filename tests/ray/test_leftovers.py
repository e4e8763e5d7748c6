"""A whole life in a process of its own leaves nothing behind: no process, no shared memory, no socket."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.process_marks import marked_processes, wait_until_ended

LIFE = """
import sys
from llm_datadist_ray import DisaggCluster
from tests.ray.helpers import tiny_config

sentences = []
with DisaggCluster.launch(tiny_config("leftovers"), on_progress=sentences.append) as cluster:
    assert cluster.generate("hello", max_tokens=4).token_ids
    early = cluster.stream("hello")
import ray
from llm_datadist_ray.actors import RequestFailed
for ask in (cluster.status, lambda: next(early), lambda: cluster.stream("hello")):
    try:
        ask()
    except RequestFailed as error:
        assert "is shut down" in str(error)
    else:
        raise AssertionError("it must fail")
assert not ray.is_initialized(), "somebody started a new Ray"
print("\\n".join(sentences))
"""
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def runtime_folder() -> Iterator[Path]:
    """Where the sockets of that life go. Not tmp_path: the path of a Unix socket has 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="ldr") as folder:
        yield Path(folder)


def test_a_whole_life_leaves_nothing_behind(runtime_folder: Path) -> None:
    mark = f"LDR_TEST_MARK={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    shared_before = set(os.listdir("/dev/shm"))
    life = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", LIFE],
        cwd=REPOSITORY,
        env={**os.environ, name: value, "XDG_RUNTIME_DIR": str(runtime_folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert life.returncode == 0, life.stderr
    assert "starting Ray on this host (2 CPUs)" in life.stdout
    for actor in ("prompt-0", "decoder-0"):
        assert f"{actor}: loading model tiny" in life.stdout
        assert f"{actor}: ready as cluster" in life.stdout
    assert "Traceback" not in life.stderr
    with marked_processes(mark) as fds:
        assert wait_until_ended(fds, 10.0) == []
    assert os.listdir(runtime_folder / "llm_datadist_ray") == [], "a socket was left behind"
    assert set(os.listdir("/dev/shm")) <= shared_before
