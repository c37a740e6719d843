"""Public signatures and operator schemas stay as in ``surface.json``.

Something new needs no entry. A public function may get further options with defaults; a schema stays as it is, because
saved graphs name operators with their arguments. After a change that is meant:
``python -m tests.contracts.test_surface``.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import rtkernels
from rtkernels import _public
from rtkernels.runtime.operator import registry

RECORDED = Path(__file__).with_name("surface.json")

# [kind, name, default as text or None where there is none], in order
Parameter = list[Any]


def parameters(function: Any) -> list[Parameter]:
    """Return the parameters of a public function, without their types."""
    found = inspect.signature(function).parameters.values()
    return [[p.kind.name, p.name, None if p.default is p.empty else repr(p.default)] for p in found]


def surface() -> dict[str, Any]:
    """Return every public function with its parameters, and every operator with its schema."""
    functions = {name: getattr(rtkernels, name) for name in _public.OPS}
    return {
        "functions": {name: parameters(f) for name, f in sorted(functions.items()) if inspect.isfunction(f)},
        "schemas": {o.name: str(o.overload._schema) for op in registry.ops() for o in op.torch_ops},
    }


def _changes(before: list[Parameter], now: list[Parameter]) -> list[str]:
    """Return what breaks a previously valid call: an option removed, moved, renamed, or with another default."""
    positional = [p for p in before if p[0] != "KEYWORD_ONLY"]
    broken = [f"{p[1]} was {p}" for p, q in zip(positional, now, strict=False) if p != q]
    broken += [f"{p[1]} was {p}" for p in before if p not in now]
    return broken + [
        f"{p[1]} is new and has no default" for p in now[len(positional) :] if p not in before and not p[2]
    ]


def test_public_functions_take_what_they_took() -> None:
    before, now = json.loads(RECORDED.read_text(encoding="utf-8"))["functions"], surface()["functions"]
    assert not set(before) - set(now), "public functions are gone"
    broken = {name: changes for name, was in before.items() if (changes := _changes(was, now[name]))}
    assert not broken


def test_operators_have_the_schemas_they_had() -> None:
    before, now = json.loads(RECORDED.read_text(encoding="utf-8"))["schemas"], surface()["schemas"]
    assert {name: now.get(name) for name in before} == before


def test_what_counts_as_a_change() -> None:
    before = parameters(lambda x, y=1, *, eps=0.5: None)
    assert not _changes(before, parameters(lambda x, y=1, *, eps=0.5, scale=1.0: None))
    assert not _changes(before, parameters(lambda x, y=1, *, scale=1.0, eps=0.5: None))
    assert _changes(before, parameters(lambda x, y=1, *, eps=0.25: None))
    assert _changes(before, parameters(lambda y, x=1, *, eps=0.5: None))
    assert _changes(before, parameters(lambda x, y=1, *, eps=0.5, scale: None))
    assert _changes(before, parameters(lambda x, y=1: None))


def _text(found: dict[str, dict[str, Any]]) -> str:
    """Return JSON with a line for each function and operator."""
    parts = {name: ",\n".join(f'"{k}": {json.dumps(v)}' for k, v in of.items()) for name, of in found.items()}
    return "{" + ",\n".join(f'"{name}": {{\n{lines}\n}}' for name, lines in parts.items()) + "}\n"


if __name__ == "__main__":
    RECORDED.write_text(_text(surface()), encoding="utf-8")
