"""Engines: what computes tokens behind the actors. The contract is :mod:`llm_datadist_ray.engines.base`.

Importing this package imports neither torch nor transformers; :func:`create` imports what the chosen kind needs.
"""

from __future__ import annotations

import importlib

from .base import Engine, EngineSpec
from .models import Progress, nearest

_FACTORIES = {
    "synthetic": "llm_datadist_ray.engines.synthetic:SyntheticEngine",
    "transformers": "llm_datadist_ray.engines.transformers:TransformersEngine",
}


def engine_kinds() -> tuple[str, ...]:
    """The values that ``EngineSpec.kind`` may have, sorted."""
    return tuple(sorted(_FACTORIES))


def create(spec: EngineSpec, *, progress: Progress | None = None) -> Engine:
    """Builds the engine that ``spec`` names and loads its model; blocks for seconds.

    ``progress(step, fraction)`` hears about a model that has to be prepared first (once per machine, then cached).
    Raises ValueError for an unknown kind, model, dtype or device, ModelNotFound (a FileNotFoundError) when a model's
    files are not there, and ImportError naming the extra to install.
    """
    target = _FACTORIES.get(spec.kind)
    if target is None:
        raise ValueError(f"unknown engine kind {spec.kind!r}{nearest(spec.kind, engine_kinds())}")
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.startswith("llm_datadist_ray"):
            raise
        raise ImportError(
            f"engine {spec.kind!r} needs the Python package {exc.name!r}; install llm-datadist-ray[demo]",
            name=exc.name,
        ) from exc
    return getattr(module, attribute)(spec, progress=progress)
