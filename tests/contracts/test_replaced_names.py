"""Names that tests replace exist: tests for a GPU, or left out of a run, would keep names that are gone."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


def _imported(tree: ast.Module) -> dict[str, Any]:
    """Return the modules and objects of rtkernels that a file imports, by the names that it gives them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "rtkernels" and (module := _module(alias.name)) is not None:
                    package = importlib.import_module("rtkernels")
                    found[alias.asname or "rtkernels"] = module if alias.asname else package
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rtkernels":
            if (module := _module(node.module)) is None:
                continue
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                found[alias.asname or alias.name] = getattr(module, alias.name)
    return found


def _module(name: str) -> Any:
    """Import a module of rtkernels; None if it is for a library that is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "rtkernels").split(".")[0] == "rtkernels":
            raise
        return None


def _value(node: ast.expr, imported: dict[str, Any]) -> Any:
    """Return what a name with attributes is, None if it is nothing that was imported."""
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := _value(node.value, imported)) is not None:
        return getattr(owner, node.attr)
    return None


def _gone(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = _imported(tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr"):
            continue
        if len(node.args) != 3 or node.keywords or not isinstance(node.args[1], ast.Constant):
            continue
        owner, name = _value(node.args[0], imported), node.args[1].value
        if owner is not None and not hasattr(owner, name):
            yield f"{path.relative_to(TESTS)}:{node.lineno}: {ast.unparse(node.args[0])} has no {name}"


@pytest.mark.parametrize("folder", sorted(p.name for p in TESTS.iterdir() if p.is_dir()))
def test_names_that_are_replaced_exist(folder: str) -> None:
    files = [path for path in (TESTS / folder).rglob("*.py") if "setattr(" in path.read_text(encoding="utf-8")]
    assert not [gone for path in files for gone in _gone(path)]
