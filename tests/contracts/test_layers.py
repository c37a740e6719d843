"""Arrows go down: which layer may import which, and which device headers a family may include."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rtkernels"

GROUND = {
    "errors", "_public", "runtime.progress",
    "runtime.checks", "runtime.cpus", "runtime.depends", "runtime.env", "runtime.layout", "runtime.suggest",
    "runtime.targets", "runtime.torch_private", "runtime.invariance",
}  # fmt: skip
# Families and what they may use of each other.
FAMILIES = {
    "layout": set(),
    "reduce": set(),
    "rope": set(),
    "pointwise": {"act", "layout"},
    "multi": set(),
    "index": set(),
    "scan": set(),
    "sort": set(),
    "random": set(),
    "window": set(),
    "quant": {"layout"},
    "norm": {"act", "quant"},
    "act": {"quant", "layout"},
    "moe": {"quant"},
    "loss": {"reduce", "gemm"},
    "router": {"norm", "quant", "gemm"},
    "gemm": {"quant", "layout", "act"},
    "attention": {"gemm", "index", "norm", "reduce", "rope"},
    "conv": {"gemm"},
}
# Families without public functions: behind torch's operators, tested in tests/aten, timed by ``python -m bench aten``.
ATEN_ONLY = {"scan", "sort", "random", "window"}
# What a layer may import besides itself and GROUND; inside functions, layers below `emulator` may reach it too.
ALLOWED = {
    "ground": set(),
    "runtime.build": set(),
    "emulator": {"runtime.build"},
    "runtime.launch": {"runtime.build"},
    "runtime.operator": {"runtime.launch", "runtime.build", "emulator"},
    "runtime.call": {"runtime.operator", "runtime.launch", "emulator", "interop"},
    "runtime.warm": {"runtime.build", "runtime.operator", "runtime.launch"},
    "interop": set(),
    "cache": {"runtime.build"},
    "ops.shared": {"runtime.launch", "runtime.operator"},
    **{
        f"ops.{family}": {
            *("runtime.launch", "runtime.operator", "runtime.call", "interop", "ops.shared"),
            *(f"ops.{f}" for f in below),
        }
        for family, below in FAMILIES.items()
    },
    "compat": {"ops"},
    "calibration": {"ops", "ops.shared"},
    "jax": {"ops", "ops.shared", "runtime.operator", "runtime.launch"},
    "aten": {"ops", "runtime.call", "runtime.operator", "runtime.launch", "runtime.build", "emulator"},
    "custom": {"aten", "runtime.call", "runtime.operator", "runtime.launch", "runtime.build", "emulator"},
    "losses": {"ops", "runtime.operator"},
    "nn": {"ops", "runtime.operator", "runtime.launch"},
    "optim": {"ops", "runtime.operator", "runtime.launch"},
    "models": {"nn", "ops", "runtime.operator"},
    "integrations": {"models", "jax"},
}
EVERYTHING = {"__init__", "__main__", "cli"}
BY_PUBLIC_NAMES = {"nn", "optim", "models", "jax", "integrations"}  # layers that call the public functions as users do


def layer_of(module: str) -> str:
    """Return the layer of a module, named without ``rtkernels.``."""
    if module in GROUND:
        return "ground"
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] in ("runtime", "ops") and len(parts) > 1 else parts[0]


@functools.cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Return what a file imports of this package, and whether it does so inside a function."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    inner = {id(node) for f in ast.walk(tree) if isinstance(f, functions) for node in ast.walk(f)}
    typing = {
        id(node) for f in ast.walk(tree) if isinstance(f, ast.If) and "TYPE_CHECKING" in ast.unparse(f.test)
        for node in ast.walk(f)
    }  # fmt: skip
    found = []
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in inner) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = PACKAGE.joinpath(*node.module.split(".")[1:], alias.name)
                whole = submodule.is_dir() or submodule.with_suffix(".py").is_file()
                found.append((f"{node.module}.{alias.name}" if whole else node.module, id(node) in inner))
    ours = ("rtkernels", "bench", "tests", "support", "contracts")
    return [(name, inside) for name, inside in found if name.split(".")[0] in ours]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_go_down(path: Path) -> None:
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    layer = layer_of(module)
    wrong = []
    for name, inside in imports(path):
        if not name.startswith("rtkernels"):
            wrong.append(name)
            continue
        target = layer_of(name.removeprefix("rtkernels").removeprefix(".") or "__init__")
        if layer in EVERYTHING or target in (layer, "ground"):
            continue
        allowed = ALLOWED.get(layer, set())
        if target in allowed or ("ops" in allowed and target.startswith("ops.")):
            continue
        if inside and target == "emulator" and layer in ("runtime.launch", "ops.shared"):
            continue
        if name == "rtkernels" and layer in BY_PUBLIC_NAMES:
            continue
        wrong.append(name)
    assert not wrong, f"{layer} must not import {', '.join(wrong)}"


def circles(below: dict[str, set[str]]) -> list[list[str]]:
    """Return modules that import each other, directly or by way of others; `below`: what each one imports."""

    def reached(start: str) -> set[str]:
        found, waiting = set(), [start]
        while waiting:
            new = below.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    of_each = {module: reached(module) for module in below}
    together = {frozenset(n for n in found if m in of_each[n]) for m, found in of_each.items() if m in found}
    return sorted(map(sorted, together))


@pytest.mark.parametrize("family", ["shared", *FAMILIES])
def test_no_circle_inside_a_family(family: str) -> None:
    """Imports inside functions count: they only hide that two modules need each other."""
    prefix = f"rtkernels.ops.{family}."
    below = {
        path.stem: {name.removeprefix(prefix) for name, _ in imports(path) if name.startswith(prefix)}
        for path in (PACKAGE / "ops" / family).glob("*.py")
    }
    found = circles(below)
    assert not found, f"move what both need into a module below them: {found}"


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert circles({"a": {"a"}, "b": {"a"}}) == [["a"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("folder", sorted(p.name for p in (ROOT / "cuda_src").iterdir() if p.is_dir()))
def test_includes_go_down(folder: str) -> None:
    everything = {p.name for p in (ROOT / "cuda_src").iterdir() if p.is_dir()}
    below = {"ptx": {"ptx"}, "common": {"ptx", "common"}, "probe": everything}.get(folder)
    if below is None:
        below = {"ptx", "common", "shared", folder, *FAMILIES.get(folder, set())}
    for path in sorted((ROOT / "cuda_src" / folder).iterdir()):
        for include in re.findall(r'#include "(\w+)/', path.read_text(encoding="utf-8")):
            allowed = below | ({"common"} if folder == "ptx" else set())  # types and feature macros
            assert include in allowed, f"{path.name} includes {include}/"


def test_families_have_the_same_names_everywhere() -> None:
    families = {p.name for p in (PACKAGE / "ops").iterdir() if p.is_dir() and (p / "__init__.py").exists()} - {"shared"}
    for place in ("tests/ops", "cuda_src", "bench/rows", "tests/contracts/samples"):
        wanted = families if place == "cuda_src" else families - ATEN_ONLY
        missing = wanted - {p.name for p in (ROOT / place).iterdir() if p.is_dir()}
        assert not missing, f"{place} lacks {missing}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_uses_what_it_may(family: str) -> None:
    of_modules = {
        target.removeprefix("ops.")
        for path in (PACKAGE / "ops" / family).glob("*.py") for name, _ in imports(path)
        if (target := layer_of(name.removeprefix("rtkernels."))).startswith("ops.")
    }  # fmt: skip
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "cuda_src" / family).iterdir())
    used = (of_modules | set(re.findall(r'#include "(\w+)/', text))) & set(FAMILIES) - {family}
    assert used == FAMILIES[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_says_what_it_has(family: str) -> None:
    text = ast.get_docstring(ast.parse((PACKAGE / "ops" / family / "__init__.py").read_text(encoding="utf-8")))
    uses = re.sub(r"\(.*?\)", "", text.replace("\n", " ").rpartition("Uses ")[2])
    assert set(re.findall(r"``(\w+)``", uses)) == FAMILIES[family]
    assert FAMILIES[family] or uses.startswith("no other family")
    assert f"``cuda_src/{family}/``" in text


def test_the_document_names_the_same_families() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+)[^|]* \| ([^|\n]+) \|$", text[text.index("| family | uses |") :], re.M)
    said = {
        family: set(re.findall(r"`(\w+)`", uses)) for names, uses in rows for family in re.findall(r"`(\w+)`", names)
    }
    assert said == FAMILIES
