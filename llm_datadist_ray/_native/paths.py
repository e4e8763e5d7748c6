"""The data paths by which bulk bytes can travel (design section 3)."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from llm_datadist_ray._native._ldr import ffi, lib
from llm_datadist_ray._native.status import check


class Path(IntEnum):
    """``LDR_PATH_x``; a smaller number is preferred. ``NONE`` is the path of an operation that moved nothing."""

    NONE = 0
    SHM = 1
    CMA = 2
    UNIX = 3
    TCP = 4

    def __str__(self) -> str:
        return self.name.lower()


PathSet = tuple[Path, ...]
DATA_PATHS: PathSet = tuple(path for path in Path if path)


def parse_paths(text: str | None) -> PathSet:
    """``"cma,tcp"`` as paths in order of preference; all for None or ``""``.

    NativeError (LLM_PARAM_INVALID) that names an unknown path.
    """
    path_set_p = ffi.new("uint32_t *")
    check(lib.ldr_paths_parse(ffi.NULL if text is None else text.encode(), path_set_p))
    return paths_of_mask(path_set_p[0])


def mask_of_paths(paths: PathSet) -> int:
    return sum(1 << path for path in paths)


def paths_of_mask(mask: int) -> PathSet:
    return tuple(path for path in DATA_PATHS if mask >> path & 1)


def bytes_by_path(counters: Any) -> dict[Path, int]:
    """A ``uint64_t[LDR_NUM_PATHS]`` without its unused first place."""
    return {path: counters[path] for path in DATA_PATHS}
