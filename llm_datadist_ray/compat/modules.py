"""Which of our modules stand behind each module of upstream's package (spec api-types §1)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import llm_datadist_ray

ROOTS = ("llm_datadist", "llm_datadist_v1")

ROOT_NAMES = [*llm_datadist_ray.v2_list, "KvCacheManager", "Tensor", "TensorDesc"]
"""``__all__`` of upstream's package."""

_ROOT_HOMES = ("llm_datadist_ray", "llm_datadist_ray.kv_cache")
_ROOT_EXTRAS = ("MemType", "v2_list")

HOMES: dict[str, tuple[str, ...]] = {
    "llm_datadist": _ROOT_HOMES,
    "llm_datadist.configs": ("llm_datadist_ray.config", "llm_datadist_ray.types"),
    "llm_datadist.data_type": ("llm_datadist_ray.types.data_type",),
    "llm_datadist.status": ("llm_datadist_ray.errors",),
    "llm_datadist.utils": (),
    "llm_datadist.utils.log": ("llm_datadist_ray.log",),
    "llm_datadist.utils.utils": ("llm_datadist_ray.checks",),
    "llm_datadist.v2": (),
    "llm_datadist.v2.cache_manager": ("llm_datadist_ray.cache",),
    "llm_datadist.v2.config": ("llm_datadist_ray.config",),
    "llm_datadist.v2.llm_datadist": ("llm_datadist_ray.datadist",),
    "llm_datadist.v2.llm_types": ("llm_datadist_ray.types",),
    "llm_datadist.v2.llm_utils": ("llm_datadist_ray.checks", "llm_datadist_ray.types"),
    # Upstream keeps v1 in a package of its own; here both interfaces share one family of classes.
    "llm_datadist_v1": _ROOT_HOMES,
}
"""Upstream's modules; an attribute is looked up in these modules of ours, in order."""


def is_package(name: str) -> bool:
    return name in ROOTS or any(other.startswith(f"{name}.") for other in HOMES)


def resolve(module: str, attribute: str) -> Any:
    """The object that ``attribute`` of upstream's ``module`` stands for, or one of its submodules.

    AttributeError when there is none; ImportError when what it needs (NumPy) is not installed.
    """
    if attribute == "__all__":
        return public_names(module)
    if f"{module}.{attribute}" in HOMES:
        return importlib.import_module(f"{module}.{attribute}")
    if not attribute.startswith("__") and (module not in ROOTS or attribute in (*ROOT_NAMES, *_ROOT_EXTRAS)):
        for home in _imported_homes(module):
            try:
                return getattr(home, attribute)
            except AttributeError:
                continue
    raise AttributeError(f"module {module!r} has no attribute {attribute!r}")


def public_names(module: str) -> list[str]:
    """What ``from module import *`` takes: of our modules without ``__all__``, what this package has defined."""
    if module in ROOTS:
        return list(ROOT_NAMES)
    found = {name for home in _imported_homes(module) for name in _exports(home)}
    return sorted(found)


def _imported_homes(module: str) -> Iterator[ModuleType]:
    """One at a time: an attribute of the first one needs no import of the others."""
    return map(importlib.import_module, HOMES[module])


def _exports(home: ModuleType) -> list[str]:
    names: list[str] | None = getattr(home, "__all__", None)
    if names is not None:
        return names
    return [
        name
        for name, value in vars(home).items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith("llm_datadist_ray.")
    ]
