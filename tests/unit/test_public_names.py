"""The package's public surface (spec api-types §1)."""

from __future__ import annotations

import subprocess
import sys

import pytest

import llm_datadist_ray

EAGER_UPSTREAM_NAMES = 23
NEED_THE_COMPILED_MODULE = {"KvCacheManager", "LLMDataDist"}
NEED_RAY = {"DisaggCluster"}


def run(program: str, **env: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=env or None)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_all_is_sorted_and_unique() -> None:
    assert llm_datadist_ray.__all__ == sorted(set(llm_datadist_ray.__all__))


def test_upstream_names() -> None:
    assert len(set(llm_datadist_ray.v2_list)) == EAGER_UPSTREAM_NAMES
    assert set(llm_datadist_ray.__all__) - set(llm_datadist_ray.v2_list) == {
        "DisaggCluster",
        "KvCacheManager",
        "MemType",
        "Tensor",
        "TensorDesc",
    }


@pytest.mark.parametrize("name", sorted(set(llm_datadist_ray.__all__) - NEED_THE_COMPILED_MODULE - NEED_RAY))
def test_every_name_resolves(name: str) -> None:
    value = getattr(llm_datadist_ray, name)
    assert value.__module__.startswith("llm_datadist_ray.")
    assert name in dir(llm_datadist_ray)


def test_aliases() -> None:
    assert llm_datadist_ray.LlmConfig is llm_datadist_ray.LLMConfig
    assert llm_datadist_ray.MemType is llm_datadist_ray.Memtype


def test_type_checkers_see_every_name() -> None:
    """The names under TYPE_CHECKING are those of ``__all__``."""
    import ast
    from pathlib import Path

    tree = ast.parse(Path(llm_datadist_ray.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    names = {alias.name for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == set(llm_datadist_ray.__all__)


@pytest.mark.parametrize("name", ["CacheManager", "nonsense"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(AttributeError, match="has no attribute"):
        getattr(llm_datadist_ray, name)


def test_import_is_light() -> None:
    """Neither Ray nor torch, nor the compiled module, nor NumPy."""
    loaded = run(
        "import sys, llm_datadist_ray; from llm_datadist_ray import LLMConfig, CacheDesc, LLMStatusCode\n"
        "print(*(name for name in ('ray', 'torch', 'numpy', 'llm_datadist_ray._native') if name in sys.modules))"
    )
    assert loaded == ""


def test_import_sets_the_ascend_variable_only_when_unset() -> None:
    program = "import llm_datadist_ray, os; print(os.environ['AUTO_USE_UC_MEMORY'])"
    assert run(program, PATH="") == "0"
    assert run(program, PATH="", AUTO_USE_UC_MEMORY="1") == "1"
