"""The binding with structs of the real header and a recording library in place of the compiled one."""

from __future__ import annotations

import functools
import importlib
import re
import runpy
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cffi

ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = "llm_datadist_ray._native"


def header_enums() -> dict[str, int]:
    text = (ROOT / "native/include/ldr.h").read_text()
    return {name: int(value) for name, value in re.findall(r"\b(LDR_\w+) = (-?\d+)", text)}


class FakeLib:
    """Constants of the header; functions answer 0 unless :attr:`answers` has one for them."""

    def __init__(self, ffi: cffi.FFI) -> None:
        self.answers: dict[str, Callable[..., Any]] = {}
        self.error_text = ffi.new("char[]", b"cluster 7: refused after 3 ms")
        for name, value in header_enums().items():
            setattr(self, name, value)

    def ldr_last_error(self) -> Any:
        return self.error_text

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("ldr_"):
            raise AttributeError(name)
        return lambda *args: self.answers.get(name, lambda *args: 0)(*args)


@functools.cache
def _header_ffi() -> cffi.FFI:
    ffi = cffi.FFI()
    ffi.cdef(runpy.run_path(str(ROOT / "native/build_binding.py"))["cdef_text"]())
    return ffi


@contextmanager
def fake_native() -> Iterator[tuple[types.ModuleType, FakeLib, cffi.FFI]]:
    """``llm_datadist_ray._native`` over a fake library; afterwards the real one is back as it was."""
    ffi = _header_ffi()
    compiled = types.ModuleType(f"{_PACKAGE}._ldr")
    lib = FakeLib(ffi)
    compiled.ffi, compiled.lib, compiled.CData = ffi, lib, ffi.CData  # type: ignore[attr-defined]
    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(_PACKAGE)}
    parent = importlib.import_module("llm_datadist_ray")
    had_attribute = parent.__dict__.pop("_native", None)
    sys.modules[compiled.__name__] = compiled
    try:
        yield importlib.import_module(_PACKAGE), lib, ffi
    finally:
        for name in [name for name in sys.modules if name.startswith(_PACKAGE)]:
            del sys.modules[name]
        sys.modules.update(saved)
        if had_attribute is not None:
            parent._native = had_attribute  # type: ignore[attr-defined]
