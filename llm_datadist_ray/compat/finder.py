"""The import hook behind ``import llm_datadist``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from llm_datadist_ray.compat.modules import HOMES, ROOTS, is_package, public_names, resolve


class CompatFinder(MetaPathFinder, Loader):
    """Finds and makes upstream's modules. Their attributes are resolved at their first use, so that importing them is
    as light as importing ``llm_datadist_ray``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in HOMES:
            return None
        return ModuleSpec(fullname, self, origin="llm_datadist_ray.compat", is_package=is_package(fullname))

    def create_module(self, spec: ModuleSpec) -> None:
        """None: an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        vars(module).update(
            __doc__=f"llm_datadist_ray under upstream's name {name}.",
            __getattr__=partial(resolve, name),
            __dir__=lambda: sorted({*vars(module), *public_names(name)}),
        )


def install(*, replace: bool = False) -> None:
    """From now on ``import llm_datadist``, and the submodules of it that clients use, give this package's objects.

    Imports neither Ray nor torch, nor the compiled module. Installed already: nothing happens. ImportError when the
    real package is there, unless ``replace``, and always when it has been imported already: objects of both would mix.
    A mere directory of that name is not taken for it.
    """
    if any(isinstance(finder, CompatFinder) for finder in sys.meta_path):
        return
    for root in ROOTS:
        _check_not_real(root, replace)
    sys.meta_path.insert(0, CompatFinder())


def _check_not_real(root: str, replace: bool) -> None:
    imported = sys.modules.get(root)
    if imported is not None:
        raise ImportError(
            f"{root} has been imported already, from {getattr(imported, '__file__', None)}: "
            f"call llm_datadist_ray.compat.install() before the first import of it",
            name=root,
        )
    spec = importlib.util.find_spec(root)
    is_real = spec is not None and spec.has_location  # a namespace package, which any directory is, has none
    if is_real and not replace:
        raise ImportError(
            f"the real {root} is installed, at {spec and spec.origin}: to run on llm_datadist_ray instead, "
            f"pass replace=True (python -m llm_datadist_ray.compat --replace)",
            name=root,
        )
