"""The data paths by which bulk bytes can travel (design section 3)."""

from __future__ import annotations

import os
from difflib import get_close_matches
from enum import IntEnum
from pathlib import Path as FilePath
from typing import Any

from llm_datadist_ray._native._ldr import ffi, lib
from llm_datadist_ray._native.status import NativeError, NativeStatus, check


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

_HIXL_LIBRARY = "libcann_hixl.so"
_DEFAULT_ASCEND_HOME = "/usr/local/Ascend/cann"


def parse_paths(text: str | None) -> PathSet:
    """``"cma,tcp"`` as paths in order of preference; all for None or ``""``.

    NativeError: LLM_PARAM_INVALID that names an unknown path and the nearest known one; LLM_FEATURE_NOT_ENABLED for
    ``hixl``, which this version does not have.
    """
    _check_names(text or "")
    path_set_p = ffi.new("uint32_t *")
    check(lib.ldr_paths_parse(ffi.NULL if text is None else text.encode(), path_set_p))
    return paths_of_mask(path_set_p[0])


def _check_names(text: str) -> None:
    known = [str(path) for path in DATA_PATHS]
    for name in map(str.strip, text.split(",")):
        if name == "hixl":
            raise NativeError(_why_no_hixl(), NativeStatus.UNSUPPORTED)
        if name and name not in known:
            nearest = get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
            raise NativeError(
                f"{name!r} in {text!r} is no data path{hint}; known are {', '.join(known)}", NativeStatus.INVALID
            )


def _why_no_hixl() -> str:
    """Looks for the library by its file only: opening it on a machine with a broken driver can hang."""
    home = os.environ.get("ASCEND_HOME_PATH")
    loader = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    folders = [f"{home}/lib64"] if home else []
    folders += [f"{_DEFAULT_ASCEND_HOME}/lib64", *loader]
    found = next((folder for folder in folders if FilePath(folder, _HIXL_LIBRARY).exists()), None)
    return (
        f"data path 'hixl' is not supported by this version. It needs {_HIXL_LIBRARY}, which is "
        + (f"in {found}" if found else "not there")
        + f" (looked for in ASCEND_HOME_PATH, {home or 'not set'}; {_DEFAULT_ASCEND_HOME}; the loader path "
        f"LD_LIBRARY_PATH, {':'.join(loader) or 'not set'}). Use {', '.join(map(str, DATA_PATHS))}"
    )


def mask_of_paths(paths: PathSet) -> int:
    return sum(1 << path for path in paths)


def paths_of_mask(mask: int) -> PathSet:
    return tuple(path for path in DATA_PATHS if mask >> path & 1)


def bytes_by_path(counters: Any) -> dict[Path, int]:
    """A ``uint64_t[LDR_NUM_PATHS]`` without its unused first place."""
    return {path: counters[path] for path in DATA_PATHS}
