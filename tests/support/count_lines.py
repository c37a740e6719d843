"""Lines of ``rtkernels/runtime`` and ``rtkernels/aten``, and of the preambles of public functions.

``python -m tests.support.count_lines [TREE ...]`` counts one tree (default: this one); of two trees it prints both and
the difference. ``--files`` and ``--functions`` list files and functions, too.

Lines of a file are all its lines, comments and blank ones included. Files that exist for something the tree before the
redesign lacked are grouped by feature (``FEATURES``).

The preamble of a public function is what comes before its work. It is counted as follows:

* An operator is a name of a module that is assigned a call of a kind in ``KINDS``. A definition of a module (function,
  class or assigned name) leads to an operator if it calls one, names its method (``FORWARD.call``), or does so with a
  definition that leads to one; imports from other modules of the package are followed.
* The preamble is the lines after the docstring up to the innermost statement with the first such call or method. Blank
  lines and comments do not count.
* Public functions are those of ``OPS`` in ``rtkernels/_public.py``. Those that call no operator have no preamble.
  Two trees are compared over the functions that have a preamble in both.

A check that moves to a helper of the same family leaves the preamble but not the tree, so the lines of
``rtkernels/ops`` are printed as well.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

KINDS = ("Operator", "Primitive", "TorchOp", "MutatingOp", "InPlaceOperator", "ListOperator", "Internal")
FEATURES = {
    "batch invariance": ("runtime/invariance.py", "aten/invariant*.py"),
    "overlapping memory refused": ("runtime/operator/aliasing.py",),
    "errors name arguments of the caller": ("runtime/call/explained.py",),
    "scatter, choice of operators, wrapped numbers": ("aten/scatter.py", "aten/selection.py", "aten/wrapped.py"),
    "measured choices": ("runtime/build/tuned.py", "runtime/launch/tuned.py"),
    "progress of compilation": ("runtime/progress.py",),
    "gradients added to main_grad": ("runtime/operator/main_grad.py",),
    "places of the cache": ("runtime/build/places.py",),
    "pointwise operators of users (moved to `custom`)": ("aten/custom.py",),
}
_OTHER = "everything else"


class Tree:
    """The modules of one checkout, parsed once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lines: dict[str, list[str]] = {}
        self.modules: dict[str, ast.Module] = {}
        for path in sorted((root / "rtkernels").rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text()
            self.lines[name], self.modules[name] = text.splitlines(), ast.parse(text)

    def files(self, *folders: str) -> dict[str, int]:
        """Return the number of lines of each file in some folders of the package."""
        base = self.root / "rtkernels"
        found = sorted(path for folder in folders for path in (base / folder).rglob("*.py"))
        return {str(path.relative_to(base)): len(path.read_text().splitlines()) for path in found}

    @cached_property
    def _definitions(self) -> dict[tuple[str, str], list[ast.AST]]:
        found: dict[tuple[str, str], list[ast.AST]] = {}
        for module, tree in self.modules.items():
            for node in tree.body:
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    found.setdefault((module, node.name), []).append(node)
                elif isinstance(node, ast.Assign):
                    for name in (n for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)):
                        found.setdefault((module, name.id), []).append(node.value)
        return found

    @cached_property
    def _imports(self) -> dict[tuple[str, str], tuple[str, str]]:
        return {
            (module, alias.asname or alias.name): (node.module or "", alias.name)
            for module, tree in self.modules.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def _named(self, module: str, node: ast.expr) -> tuple[str, str] | None:
        """Return the module and name of a definition to which an expression refers."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            imported = ".".join(self._imports.get((module, node.value.id), ()))
            if imported in self.modules:
                return imported, node.attr
        if not isinstance(node, ast.Name):
            return None
        own = (module, node.id)
        return own if own in self._definitions else self._imports.get(own)

    def _uses(self, module: str, node: ast.AST) -> Iterator[tuple[int, tuple[str, str]]]:
        """Yield the line and name of what a function or class calls, or takes a method of; of a value, all names."""
        for part in ast.walk(node):
            used = part.func if isinstance(part, ast.Call) else part.value if isinstance(part, ast.Attribute) else part
            if isinstance(part, ast.Name) and isinstance(node, ast.stmt):
                continue
            if isinstance(used, ast.expr) and (named := self._named(module, used)) is not None:
                yield used.lineno, named

    @cached_property
    def _leading(self) -> set[tuple[str, str]]:
        def is_operator(node: ast.AST) -> bool:
            return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS

        uses = {
            own: {named for node in nodes for _, named in self._uses(own[0], node)}
            for own, nodes in self._definitions.items()
            if own[1] != "OP"  # the op's record names its operators and is not called
        }
        found = {own for own, nodes in self._definitions.items() if any(map(is_operator, nodes))}
        while more := {own for own, used in uses.items() if own not in found and used & found}:
            found |= more
        return found

    def preambles(self) -> dict[str, int]:
        """Return the number of lines of the preamble of each public function that leads to an operator."""
        (public,) = (
            node.value for node in self.modules["rtkernels._public"].body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "OPS"
        )  # fmt: skip
        counts = {}
        for name, place in ast.literal_eval(public).items():
            for node in self._definitions.get((f"rtkernels.{place}", name), ()):
                count = self._preamble(f"rtkernels.{place}", node) if isinstance(node, ast.FunctionDef) else None
                if count is not None:
                    counts[name] = count
        return counts

    def _preamble(self, module: str, function: ast.FunctionDef) -> int | None:
        body = function.body[1:] if ast.get_docstring(function) is not None else function.body
        leading = [line for s in body for line, named in self._uses(module, s) if named in self._leading]
        if not leading:
            return None
        statements = [n for s in body for n in ast.walk(s) if isinstance(n, ast.stmt)]
        end = max(s.lineno for s in statements if s.lineno <= min(leading) <= (s.end_lineno or s.lineno))
        lines = (line.strip() for line in self.lines[module][body[0].lineno - 1 : end - 1])
        return sum(1 for line in lines if line and not line.startswith("#"))


def by_feature(files: dict[str, int]) -> dict[str, int]:
    """Return the lines of the files of each feature, and of all other files."""
    counts = dict.fromkeys([*FEATURES, _OTHER], 0)
    for file, lines in files.items():
        features = (f for f, patterns in FEATURES.items() if any(fnmatch(file, pattern) for pattern in patterns))
        counts[next(features, _OTHER)] += lines
    return counts


def _print(title: str, tables: list[dict[str, int]], names: list[str] | None = None) -> None:
    """Print a row for each name, and their sum."""
    names = names if names is not None else list(dict.fromkeys(name for table in tables for name in table))
    rows = [(name, [table.get(name, 0) for table in tables]) for name in names]
    print(f"\n{title}")
    for name, counts in [*rows, ("sum", [sum(c) for c in zip(*(r[1] for r in rows), strict=True)])]:
        difference = f"{counts[1] - counts[0]:+8,}" if len(counts) == 2 else ""
        print(f"  {name:56}" + "".join(f"{count:8,}" for count in counts) + difference)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.count_lines", description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE", help="one or two checkouts; default: this one")
    parser.add_argument("--files", action="store_true", help="list the files of runtime and aten")
    parser.add_argument("--functions", action="store_true", help="list the preamble of each function")
    args = parser.parse_args(argv)
    trees = [Tree(path) for path in args.trees or [Path(__file__).parents[2]]]
    files = [tree.files("runtime", "aten") for tree in trees]
    if args.files:
        _print("runtime and aten, by file", files)
    _print("runtime and aten, by feature", [by_feature(table) for table in files])
    _print("ops", [{"ops": sum(tree.files("ops").values())} for tree in trees])
    preambles = [tree.preambles() for tree in trees]
    shared = [name for name in preambles[-1] if all(name in table for table in preambles)]
    if args.functions:
        _print("preambles, by function", preambles, sorted(shared, key=lambda name: -preambles[-1][name]))
    _print(f"preambles of {len(shared)} functions", [{"": sum(t[name] for name in shared)} for t in preambles])
    return 0


if __name__ == "__main__":
    sys.exit(main())
