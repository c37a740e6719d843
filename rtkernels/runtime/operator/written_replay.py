"""A function written of the notes of a call (``noting.py``): it compares arguments, allocates, launches and returns."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels.runtime.launch.memory import allocator
from rtkernels.runtime.operator.noting import Arguments, Line, Notes, NotRepeatable, Root, View
from rtkernels.runtime.operator.written import written_code
from rtkernels.runtime.torch_private import increment_versions, same_tensors

MISS = object()  # what a written function returns for a call that is not like the one it was made of


def written_call(name: str, arguments: Arguments, notes: Notes, result: Any) -> Callable[..., Any] | None:
    """Return a function of the call's arguments that does what was noted, or returns MISS; None if there is none.

    Args:
        name: Of the public function, for tracebacks.
        arguments: Its arguments.
        notes: Of a call of it.
        result: What that call returned.
    """
    if notes.refused is not None:
        return None
    try:
        return _Writer(name, arguments, notes).function(result)
    except NotRepeatable as error:
        notes.refuse(str(error))
        return None


class _Writer:
    def __init__(self, name: str, arguments: Arguments, notes: Notes) -> None:
        self.name, self.arguments, self.notes = name, arguments, notes
        first = next(iter(notes.arguments.values()))
        self.scope: dict[str, Any] = {
            "MISS": MISS, "allocate": allocator(first.get_device()), "is_grad_enabled": torch.is_grad_enabled,
            "increment_versions": increment_versions,
        }  # fmt: skip
        self.body: list[str] = []
        self.constants = 0

    def constant(self, value: Any) -> str:
        """Return an expression of a value."""
        if value is None or type(value) in (bool, int):
            return repr(value)
        self.constants += 1
        self.scope[f"c_{self.constants}"] = value
        return f"c_{self.constants}"

    def function(self, result: Any) -> Callable[..., Any]:
        """Return the written function."""
        returned: list[View] = []
        expression = self.returned(result, returned)
        self.drop_unused(returned)
        self.reshape_memory(returned)
        for i, line in enumerate(self.notes.lines):
            self.write(i, line)
        self.body.append(f"return {expression()}")
        self.free_memory()
        source = f"def {self.name}({', '.join(self.arguments.names)}):\n    "
        source += "\n    ".join([*self.comparison(), *self.body]) + "\n"
        exec(written_code(source, f"<rtkernels replay of {self.name}>"), self.scope)
        return self.scope[self.name]

    # ---- is it a call like that one ----

    def comparison(self) -> list[str]:
        """Return the lines that return MISS for other calls, and take the addresses of tensors."""
        tensors, lines = self.notes.arguments, []
        for name, (kind, parts) in self.arguments.parts.items():
            self.scope[f"kind_of_{name}"] = kind
            lines.append(f"if type({name}) is not kind_of_{name} or len({name}) != {len(parts)}:\n        return MISS")
            lines += [f"{''.join(f'{part}, ' for part in parts)}= {name}"] if parts else []
        same = [self.same(name, value) for name, value in self.arguments.values.items()]
        distinct: dict[int, str] = {}
        for name, tensor in tensors.items():
            if (first := distinct.setdefault(id(tensor), name)) != name:
                same.append(f"{name} is {first}")
        if any(t.requires_grad for t in tensors.values()):
            same.append("not is_grad_enabled()")
        if self.notes.debug:
            self.scope["environ"] = os.environ
            same.append("not environ.get('RTKERNELS_DEBUG')")
        self.scope["matches"] = same_tensors([tensors[name] for name in distinct.values()])
        same.append(f"matches({', '.join(distinct.values())})")
        lines.append(f"if not ({' and '.join(same)}):\n        return MISS")
        others = [f"not ({_end(a)} <= {_begin(b)} or {_end(b)} <= {_begin(a)})" for a, b in self.notes.apart]
        used = _words([*self.body, *others])
        misaligned = {name: tensor.data_ptr() & 15 for name, tensor in tensors.items() if f"p_{name}" in used}
        others += [f"p_{name} & 15 != {rest}" for name, rest in misaligned.items() if rest]
        if aligned := [f"p_{name}" for name, rest in misaligned.items() if not rest]:
            others.append(f"({' | '.join(aligned)}) & 15")
        lines += [f"p_{name} = {name}.data_ptr()" for name in misaligned]
        lines += [f"if {' or '.join(others)}:\n        return MISS"] if others else []
        return lines

    def same(self, name: str, value: Any) -> str:
        """Return the comparison of an argument that is no tensor. A different type or sign of zero is another call."""
        if value is None or type(value) is bool or isinstance(value, (torch.dtype, torch.layout)):
            return f"{name} is {self.constant(value)}"
        kind = type(value)
        self.scope[f"kind_of_{name}"], self.scope[f"given_as_{name}"] = kind, value
        equal = f"type({name}) is kind_of_{name} and {name} == given_as_{name}"
        if kind is float and value == 0:
            equal += f" and str({name}) == {str(value)!r}"
        return f"({name} is given_as_{name} or ({equal}))"

    # ---- what it does ----

    def write(self, i: int, line: Line) -> None:
        """Write one line."""
        made = sorted((root for root in self.notes.roots() if root.line is line), key=lambda root: root.part or 0)
        names = "".join(f"{root.name}, " for root in made) if made and made[0].part is not None else ""
        names = f"{names or made[0].name} = " if made else ""
        if line.plan is not None:
            self.scope[f"run_{i}"] = line.plan.run_plain
            given = [
                self.address(v) if isinstance(v, View) else self.constant(0 if v is None else v) for v in line.given
            ]
            self.body.append(f"{names}run_{i}({', '.join(given)})")
            for name in dict.fromkeys(view.root.name for view in line.written if view.root.argument):
                self.body.append(f"{name}.is_inference() or increment_versions(({name},))")
        elif line.function is None:
            layout = ", ".join(map(self.constant, (made[0].shape, made[0].strides, made[0].dtype)))
            self.body.append(f"{names}allocate({layout})")
        else:
            self.scope[f"call_{i}"] = getattr(line.function, "_op", line.function)  # without the wrapper of torch
            given = [self.value(v) for v in line.given] + [f"{k}={self.value(v)}" for k, v in line.keywords.items()]
            self.body.append(f"{names}call_{i}({', '.join(given)})")

    def value(self, value: Any) -> str:
        """Return the expression of an argument of torch's functions."""
        if isinstance(value, View):
            return self.tensor(value)
        if isinstance(value, (list, tuple)):
            inner = "".join(f"{self.value(v)}, " for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        return self.constant(value)

    @staticmethod
    def address(view: View) -> str:
        """Return the expression of an address."""
        base = f"p_{view.root.name}" if view.root.argument else f"{view.root.name}.data_ptr()"
        return f"{base} + {view.first}" if view.first else base

    def tensor(self, view: View) -> str:
        """Return the expression of a tensor."""
        root, name = view.root, view.root.name
        if view.is_root:
            return name
        dense = _is_dense(root.shape, root.strides)
        if not view.first and dense and _is_dense(view.shape, view.strides) and _bytes(view) == _bytes(root):
            retyped = "" if view.dtype == root.dtype else f".view({self.constant(view.dtype)})"
            if retyped and view.dtype.itemsize != root.dtype.itemsize:
                retyped = f".view(-1){retyped}"
            return f"{name}{retyped}.view({self.constant(view.shape)})"
        if view.dtype.itemsize != root.dtype.itemsize or view.first % view.dtype.itemsize:
            raise NotRepeatable("a view has elements of another size")
        retyped = "" if view.dtype == root.dtype else f".view({self.constant(view.dtype)})"
        first = f"{view.first // view.dtype.itemsize}"
        if root.argument:
            first = f"{name}.storage_offset() + {first}" if view.first else f"{name}.storage_offset()"
        return f"{name}{retyped}.as_strided({self.constant(view.shape)}, {self.constant(view.strides)}, {first})"

    def returned(self, result: Any, views: list[View]) -> Callable[[], str]:
        """Return what gives the expression of a result, when the memory of all roots is known; collect its tensors."""
        if isinstance(result, Tensor):
            view = self.notes.view_of(result)
            views.append(view)
            return lambda: self.tensor(view)
        if isinstance(result, (tuple, list)):
            inner = [self.returned(value, views) for value in result]
            kind = type(result)
            if hasattr(kind, "_fields"):
                return lambda: f"{self.constant(kind)}({', '.join(part() for part in inner)})"
            left, right = "[]" if kind is list else "()"
            return lambda: left + "".join(f"{part()}, " for part in inner) + right
        if result is None or isinstance(result, (bool, int, float, str, torch.dtype)):
            return lambda: self.constant(result)
        raise NotRepeatable(f"the result is a {type(result).__name__}")

    def drop_unused(self, returned: list[View]) -> None:
        """Leave out lines whose results nobody uses: a function may work out more than this call asks for."""
        used, kept = {id(view.root) for view in returned}, []
        made: dict[int, list[Root]] = {}
        for root in self.notes.roots():
            made.setdefault(id(root.line), []).append(root)
        for line in reversed(self.notes.lines):
            if line.changes or any(id(root) in used for root in made.get(id(line), [])):
                kept.insert(0, line)
                leaves = torch.utils._pytree.tree_leaves((line.given, line.keywords), is_leaf=_is_view)
                used |= {id(view.root) for view in leaves if isinstance(view, View)}
        self.notes.lines[:] = kept

    def reshape_memory(self, returned: list[View]) -> None:
        """Let memory be allocated as it is returned, where only its address is used besides: views take host time."""
        seen: dict[int, set[View]] = {}
        for view in returned:
            seen.setdefault(id(view.root), set()).add(view)
        for line in self.notes.lines:
            if line.function is not None:
                for view in torch.utils._pytree.tree_leaves((line.given, line.keywords), is_leaf=_is_view):
                    if isinstance(view, View):
                        seen.setdefault(id(view.root), set()).add(view)
        remade: dict[int, dict[int, View]] = {}
        for views in seen.values():
            (view, *others) = views
            root = view.root
            if others or root.argument or view.first or view.is_root or root.line.function is not None:
                continue
            if _span(view) != _span(root) or _bytes(view) != _bytes(root):
                continue
            if root.line.plan is not None:
                if not root.line.plan.is_allocated(root.part or 0):
                    continue
                i = next(i for i, line in enumerate(self.notes.lines) if line is root.line)
                remade.setdefault(i, {})[root.part or 0] = view
            root.shape, root.strides, root.dtype = view.shape, view.strides, view.dtype
        for i, parts in remade.items():
            line = self.notes.lines[i]
            plan = line.plan.with_layouts({part: (v.shape, v.strides, v.dtype) for part, v in parts.items()})
            self.notes.lines[i] = new = line._replace(plan=plan)
            for root in self.notes.roots():
                root.line = new if root.line is line else root.line

    def free_memory(self) -> None:
        """Let go of what no later line uses, as a function does whose variables are overwritten."""
        names = [root.name for root in self.notes.roots() if not root.argument]
        last: dict[int, list[str]] = {}
        for name in names:
            uses = [i for i, line in enumerate(self.body) if name in _words([line])]
            if uses and uses[-1] < len(self.body) - 2:
                last.setdefault(uses[-1], []).append(name)
        for i in sorted(last, reverse=True):
            self.body.insert(i + 1, f"del {', '.join(last[i])}")


def _words(lines: Sequence[str]) -> set[str]:
    return set(re.findall(r"\w+", " ".join(lines)))


def _is_view(value: Any) -> bool:
    return isinstance(value, View)


def _bytes(t: View | Root) -> int:
    count = 1
    for size in t.shape:
        count *= size
    return count * t.dtype.itemsize


def _span(t: View | Root) -> int:
    """Return how many bytes lie between the first element and the end of the last one."""
    return (sum((n - 1) * s for n, s in zip(t.shape, t.strides, strict=True)) + 1) * t.dtype.itemsize


def _begin(view: View) -> str:
    return f"p_{view.root.name} + {view.first}"


def _end(view: View) -> str:
    return f"p_{view.root.name} + {view.first + _span(view)}"


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
