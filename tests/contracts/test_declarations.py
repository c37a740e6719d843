"""How the functions of a declaration are written: they name what they take, and they are short."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from rtkernels.runtime.operator import registry
from rtkernels.runtime.operator.declared import Primitive

OPS = Path(__file__).parents[2] / "rtkernels" / "ops"
LIMIT = 60  # lines of a function, without its docstring


def _primitives() -> list[Primitive]:
    """Return all primitives that modules of ours hold, in dictionaries, too."""
    registry.ops()
    modules = [module for name, module in sys.modules.items() if name.startswith("rtkernels.")]
    held: list[Any] = [value for module in modules for value in vars(module).values()]
    held += [inner for value in held if isinstance(value, dict) for inner in value.values()]
    return [value for value in held if isinstance(value, Primitive)]


def test_functions_of_a_declaration_name_what_they_take() -> None:
    """An operator is declared where its module is imported, a primitive by its first call: `by_name` checks then."""
    primitives = _primitives()
    assert len(primitives) > 20
    for primitive in primitives:
        assert primitive._declared.name == primitive.name


@pytest.mark.one_in(1000)
def test_functions_are_short() -> None:
    long = []
    for path in sorted(OPS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[0]
                lines = node.end_lineno - node.lineno + 1
                lines -= first.end_lineno - first.lineno + 1 if ast.get_docstring(node) else 0
                if lines > LIMIT:
                    long.append(f"{path.relative_to(OPS)}: {node.name} has {lines} lines, expected up to {LIMIT}")
    assert not long, "\n".join(["describe the problem, choose a kernel, make the steps, each in a function:", *long])
