"""The cffi binding: compiles what stands between the cdef marks of ``include/ldr.h`` with the native core (API mode).

``setup.py`` names ``ffibuilder`` of this file; nothing else reads it.
"""

from __future__ import annotations

import os
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent
HEADER = ROOT / "include" / "ldr.h"

COMPILE_FLAGS = ["-O3", "-g1", "-fvisibility=hidden", "-Wall", "-Wextra", "-fno-plt", "-pthread"]


def cdef_text() -> str:
    """The declarations of the C ABI, which cffi parses and the compiler checks against the header."""
    _, begin, rest = HEADER.read_text(encoding="utf-8").partition("/* cdef-begin */")
    text, end, _ = rest.partition("/* cdef-end */")
    if not begin or not end:
        raise RuntimeError(f"{HEADER} has no cdef-begin and cdef-end marks")
    return text


def _sources() -> list[str]:
    # Relative to the project's root, where setuptools runs: absolute sources would be compiled outside of build/.
    return sorted(os.path.relpath(path, ROOT.parent) for path in ROOT.glob("src/**/*.cc"))


ffibuilder = FFI()
ffibuilder.cdef(cdef_text())
ffibuilder.set_source(
    "llm_datadist_ray._native._ldr",
    '#include "ldr.h"',
    sources=_sources(),
    include_dirs=["native/include", "native/src"],
    extra_compile_args=COMPILE_FLAGS,
    extra_link_args=["-pthread"],
    language="c++",
)
