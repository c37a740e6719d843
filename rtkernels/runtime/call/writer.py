"""Writes what a trace does as a function: memory, launches, calls of torch, results."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels.runtime.call import memory as memory_of
from rtkernels.runtime.call.trace import NotRepeatable, Number, Record, Root, Trace, View
from rtkernels.runtime.depends import MISS
from rtkernels.runtime.launch.memory import allocator, fresh_zeros
from rtkernels.runtime.layout import is_dense
from rtkernels.runtime.operator.plan import Memory, StepPlan, fill_call, layout_of
from rtkernels.runtime.operator.written import generated
from rtkernels.runtime.torch_private import increment_versions

_BINDINGS = {"add", "addmm", "clamp", "copy_", "div", "mm", "mul", "pow", "reciprocal", "sub"}


class Writer(ABC):
    """Writes the function of a trace. Subclasses write its guard."""

    def __init__(self, name: str, parameters: Sequence[str], trace: Trace) -> None:
        self.name, self.parameters, self.trace = name, parameters, trace
        self.device = -1 if trace.device.index is None else trace.device.index
        self.scope: dict[str, Any] = {
            "MISS": MISS, "allocate": allocator(self.device), "is_grad_enabled": torch.is_grad_enabled,
            "increment_versions": increment_versions, "fresh_zeros": fresh_zeros,
        }  # fmt: skip
        self.body: list[str] = []
        self.constants = 0
        self.scratch: list[str] = []  # names of the memory of plans
        self.given_memory: dict[int, View] = {}  # where plans write results, by root
        self.packed: dict[Any, int] = {}  # offsets of roots and scratch in one allocation
        self.numbers: list[Number] = []  # arguments that are converted for launches

    def constant(self, value: Any) -> str:
        """Return the expression of a value."""
        if value is None or type(value) in (bool, int):
            return repr(value)
        self.constants += 1
        self.scope[f"c_{self.constants}"] = value
        return f"c_{self.constants}"

    def replay(self, result: Any) -> Callable[..., Any] | None:
        """Return the function that repeats the call, which returned `result`; None, if the trace says why not."""
        if self.trace.refused is not None:
            return None
        try:
            return self._function(result)
        except NotRepeatable as error:
            return self.trace.refuse(str(error))

    def _function(self, result: Any) -> Callable[..., Any]:
        returned: list[View] = []
        expression = self.returned(result, returned)
        self.given_memory = memory_of.write_in_place(self.trace, returned)
        memory_of.drop_unused(self.trace, returned)
        seen = memory_of.seen_views(self.trace, returned)
        memory_of.reshape_memory(self.trace, seen)
        self.packed, total = memory_of.packed_memory(self.trace, seen, self.given_memory)
        if self.packed:
            if self.trace.has_out:
                self.scope["kept"] = memory_of.Kept(self.device, total)
                self.body.append("scratch = kept()")
            else:
                layout = ", ".join(map(self.constant, ((total,), (1,), torch.uint8)))
                self.body.append(f"scratch = allocate({layout})")
            self.body.append("p_scratch = scratch.data_ptr()")
        for i, record in enumerate(self.trace.records):
            self.write(i, record, seen)
        self.body.append(f"return {expression()}")
        self.keep_addresses()
        self.free_memory()
        function = re.sub(r"\W", "_", self.name)
        comparison, body, kind = self.comparison(), self.body, self.trace.device.type
        if torch.is_autocast_enabled(kind) and any(record.function is not None for record in self.trace.records):
            self.scope["autocast"] = torch.autocast  # what was recorded has been cast, or was computed without it
            body = [f"with autocast({kind!r}, enabled=False):", *(f"    {line}" for line in body)]
        source = f"def {function}({', '.join(self.parameters)}):\n    "
        source += "\n    ".join([*comparison, *body]) + "\n"
        generated(source, f"<rtkernels replay of {self.name}>", self.scope)
        return self.scope[function]

    @abstractmethod
    def comparison(self) -> list[str]:
        """Return the lines that return MISS for other calls, and read the addresses of tensors (``depends.py``)."""

    # ---- the body ----

    def write(self, i: int, record: Record, seen: memory_of.Seen) -> None:
        """Write one record."""
        results = memory_of.results_of(self.trace, record)
        names = "".join(f"{root.name}, " for root in results) if results and results[0].part is not None else ""
        names = f"{names or results[0].name} = " if results else ""
        if record.plan is not None:
            given = [self.launch_argument(v) for v in record.given]
            if record.plan.is_straight:
                self.write_plan(i, record.plan, given, results, seen)
            else:
                self.scope[f"run_{i}"] = record.plan.run
                self.body.append(f"{names}run_{i}({', '.join(given)})")
            written = record.written if self.trace.counts_versions else ()
            for name in dict.fromkeys(view.root.name for view in written if view.root.argument):
                self.body.append(f"{name}.is_inference() or increment_versions(({name},))")
        elif record.function is None:
            if id(results[0]) not in self.packed:
                self.allocate(
                    results[0].name, Memory(results[0].shape, results[0].dtype, results[0].strides, **record.keywords)
                )
        else:
            given = [self.value(v) for v in record.given] + [f"{k}={self.value(v)}" for k, v in record.keywords.items()]
            if _converts(record):
                self.body.append(f"{names}{given[0]}.to({self.constant(record.keywords['dtype'])})")
            else:
                self.scope[f"call_{i}"] = _fast(record.function)
                self.body.append(f"{names}call_{i}({', '.join(given)})")

    def launch_argument(self, value: Any) -> str:
        """Return the expression of an argument of a plan."""
        if isinstance(value, View):
            return self.address(value)
        if not isinstance(value, Number):
            return self.constant(0 if value is None else value)
        if value.encode is None:
            return value.name
        self.numbers.append(value)
        return f"n_{len(self.numbers) - 1}"

    def write_plan(
        self, i: int, plan: StepPlan, given: Sequence[str], results: Sequence[Root], seen: memory_of.Seen
    ) -> None:
        """Inline the ``run`` of a plan, without memory that nobody needs."""
        known = dict(zip(plan.arguments, given, strict=True))
        by_name = dict(zip(plan.results, results, strict=True))
        for name, memory in plan.memory().items():
            root = by_name.get(name)
            where = (i, name) if root is None else id(root)
            variable = f"t_{i}_{name}" if root is None else root.name
            if where in self.packed:
                known[name] = self.in_packed(where)
            elif where in self.given_memory:
                known[name] = self.address(self.given_memory[where])
                fill = ".zero_()" if memory.fresh else fill_call(memory)
                self.body += [f"{self.tensor(self.given_memory[where])}{fill}"] if fill else []
            elif plan.is_asked_for(name):
                self.allocate(variable, memory)
                known[name] = f"{variable}.data_ptr()"
                self.scratch += [variable] if root is None else []
            elif id(root) in seen and not self.trace.counts_versions:  # autograd may record it
                self.allocate(variable, memory)
            elif id(root) in seen:  # empty, and the same in all calls
                self.scope[f"e_{variable}"] = self.scope["allocate"](*layout_of(memory))
                self.body.append(f"{variable} = e_{variable}")
        self.body += plan.launch_lines(f"{i}_", known, self.scope)

    def allocate(self, name: str, memory: Memory) -> None:
        """Write an allocation."""
        layout = ", ".join(map(self.constant, layout_of(memory)))
        source = f"fresh_zeros({self.device}, {memory.shape[0]})" if memory.fresh else f"allocate({layout})"
        self.body.append(f"{name} = {source}{fill_call(memory)}")

    def in_packed(self, where: Any) -> str:
        """Return the address of memory that is a part of the scratch."""
        return f"p_scratch + {self.packed[where]}" if self.packed[where] else "p_scratch"

    def value(self, value: Any) -> str:
        """Return the expression of an argument of a function of torch."""
        if isinstance(value, View):
            return self.tensor(value)
        if isinstance(value, (list, tuple)):
            inner = "".join(f"{self.value(v)}, " for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        return self.constant(value)

    def address(self, view: View) -> str:
        """Return the expression of an address."""
        if id(view.root) in self.given_memory:
            target = self.given_memory[id(view.root)]
            return self.address(target._replace(first=target.first + view.first))
        base = f"p_{view.root.name}" if view.root.argument else f"{view.root.name}.data_ptr()"
        base = self.in_packed(id(view.root)) if id(view.root) in self.packed else base
        return f"{base} + {view.first}" if view.first else base

    def tensor(self, view: View) -> str:
        """Return the expression of a tensor."""
        root, name = view.root, view.root.name
        if view.is_root:
            return name
        if (view.first, view.dtype, view.shape, view.strides) == (0, root.dtype, root.shape[::-1], root.strides[::-1]):
            if len(root.shape) == 2:
                return f"{name}.t()"
        dense = is_dense((root.dtype, root.shape, root.strides))
        same_size = not view.first and memory_of.size(view) == memory_of.size(root)
        retyped = "" if view.dtype == root.dtype else f".view({self.constant(view.dtype)})"
        if same_size and dense and is_dense((view.dtype, view.shape, view.strides)):
            if retyped and view.dtype.itemsize != root.dtype.itemsize:
                retyped = f".view(-1){retyped}"
            return f"{name}{retyped}.view({self.constant(view.shape)})"
        if view.dtype.itemsize != root.dtype.itemsize or view.first % view.dtype.itemsize:
            raise NotRepeatable("a view has elements of another size")
        first = f"{name}.storage_offset()"  # arguments and ``fresh_zeros`` may begin anywhere in their storage
        first += f" + {view.first // view.dtype.itemsize}" if view.first else ""
        return f"{name}{retyped}.as_strided({self.constant(view.shape)}, {self.constant(view.strides)}, {first})"

    def returned(self, result: Any, views: list[View]) -> Callable[[], str]:
        """Return a function that gives the expression of a result once memory is assigned; collect its tensors."""
        if isinstance(result, Tensor):
            view = self.trace.view_of(result)
            views.append(view)
            return lambda: self.tensor(view) + self.alias(view, result)
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

    def alias(self, view: View, result: Tensor) -> str:
        """Return the method that turns an argument into a new tensor, if the call returned an alias of it."""
        given = self.trace.arguments.get(view.root.name)
        if given is None or given is result:
            return ""
        if given.requires_grad and not result.requires_grad:
            return ".detach()"
        return f".view({self.constant(view.shape)})" if view.is_root else ""

    def memory_names(self) -> list[str]:
        return [root.name for root in self.trace.roots() if not root.argument] + self.scratch

    def keep_addresses(self) -> None:
        """Read an address that is used several times once, right after its allocation."""
        for name in self.memory_names():
            asked = re.compile(rf"\b{name}\.data_ptr\(\)")
            if len(asked.findall("\n".join(self.body))) < 2:
                continue
            self.body = [asked.sub(f"p_{name}", line) for line in self.body]
            first = next(i for i, line in enumerate(self.body) if name in words_of([line.partition(" = ")[0]]))
            self.body.insert(first + 1, f"p_{name} = {name}.data_ptr()")

    def free_memory(self) -> None:
        """Free memory after its last use."""
        last: dict[int, list[str]] = {}
        for name in self.memory_names():
            uses = [i for i, line in enumerate(self.body) if {name, f"p_{name}"} & words_of([line])]
            if uses and uses[-1] < len(self.body) - 2:
                last.setdefault(uses[-1], []).append(name)
        for i in sorted(last, reverse=True):
            self.body.insert(i + 1, f"del {', '.join(last[i])}")


def words_of(lines: Sequence[str]) -> set[str]:
    """Return the names in lines of code."""
    return set(re.findall(r"\w+", " ".join(lines)))


def _converts(record: Record) -> bool:
    """Return True for a copy that changes the dtype and nothing else."""
    name = getattr(getattr(record.function, "_schema", None), "name", "")
    to = record.keywords.get("dtype")
    return name == "aten::_to_copy" and len(record.keywords) == 1 and to not in (None, record.given[0].dtype)


def _fast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the cheapest equivalent: the Python binding of an operator, or the operator without its wrapper."""
    name = getattr(getattr(function, "_schema", None), "name", "").removeprefix("aten::")
    if name in _BINDINGS:
        return getattr(Tensor if name.endswith("_") else torch, name)
    return getattr(function, "_op", function)
