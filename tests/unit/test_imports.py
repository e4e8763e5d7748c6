"""Imports go down the layers of design section 2, never up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "llm_datadist_ray"
ROOT = Path(__file__).resolve().parents[2] / PACKAGE

# Lowest first. A module may import its own layer and those before it.
LAYERS = [
    {
        "_named_enum",
        "checked_field",
        "checks",
        "config",
        "errors",
        "log",
        "membership",
        "option_keys",
        "options",
        "parallel",
        "pool_config",
        "types",
    },
    {"_native", "engines"},
    {"events"},
    {"cache", "engine_start", "handoff", "kv_cache", "linking", "v2_runtime"},
    {"compat", "datadist"},
    {"actors"},
    {"cli", "integrations", "jobs", "serve"},
]
MAY_IMPORT_RAY = LAYERS[-2] | LAYERS[-1]
HEAVY = {"ray", "torch", "transformers"}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    """The first name below the package: ``cache`` for cache/manager.py, ``""`` for __init__.py."""
    relative = path.relative_to(ROOT).with_suffix("")
    return "" if relative.parts == ("__init__",) else relative.parts[0]


def imports(path: Path, *, everywhere: bool) -> Iterator[str]:
    """Modules imported by the file; ``everywhere`` counts those inside functions too, TYPE_CHECKING never does."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    nodes: list[ast.AST] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = absolute_name(path, node)
            names = [alias.name for alias in node.names]
            yield from ([f"{PACKAGE}.{name}" for name in names] if module == PACKAGE else [module])
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            nodes.extend(node.orelse)
        elif everywhere or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            nodes.extend(ast.iter_child_nodes(node))


def absolute_name(path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = path.relative_to(ROOT.parent).parts[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def layer_of(part: str) -> int:
    found = [number for number, layer in enumerate(LAYERS) if part in layer]
    assert found, f"{part} belongs to no layer: add it to LAYERS"
    return found[0]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_layers(path: Path) -> None:
    part = part_of(path)
    if not part:
        return  # the package itself resolves its names when they are asked for
    for module in imports(path, everywhere=True):
        root, _, rest = module.partition(".")
        if root == "ray":
            assert part in MAY_IMPORT_RAY, f"{path} imports {module}"
        if root != PACKAGE or not rest:
            continue
        target = rest.partition(".")[0]
        if target[0].isupper() or target == "v2_list" or target.startswith("__"):
            continue  # a public name, from whatever layer: see test_public_names_are_for_the_top
        assert layer_of(target) <= layer_of(part), f"{path} imports {module}, which is above it"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_are_for_the_top(path: Path) -> None:
    """Below the ways in nobody imports through the package's lazy names, which would hide what is imported."""
    part = part_of(path)
    if not part or part in LAYERS[-1]:
        return
    for module in imports(path, everywhere=True):
        target = module.removeprefix(f"{PACKAGE}.") if module.startswith(f"{PACKAGE}.") else ""
        assert not target[:1].isupper(), f"{path} imports {module} through the package"


@pytest.mark.parametrize("layer", range(len(LAYERS) - 2))
def test_nothing_heavy_at_import(layer: int) -> None:
    """Below the actors, Ray is never and torch only inside functions imported; engines may import what they run on."""
    for path in modules():
        if part_of(path) in LAYERS[layer] - {"engines"}:
            heavy = HEAVY & {module.partition(".")[0] for module in imports(path, everywhere=False)}
            assert not heavy, f"{path} imports {heavy}"
