"""What a public function does, noted while it runs: calls of operators, views and memory.

A dispatch mode sees all that torch and our operators compute, whatever Python is around it. Of calls whose tensors have
the same metadata and whose other arguments are the same, nothing but addresses can differ, unless the host reads values
(such calls are refused) or asks whether tensors overlap (the function that is written of the notes asks that, too:
``written_replay.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rtkernels import emulator
from rtkernels.runtime import env, layout
from rtkernels.runtime.launch.device import emulate_features
from rtkernels.runtime.operator.declared import Declared, under_way
from rtkernels.runtime.operator.operator import CANNOT_LAUNCH, TorchOp
from rtkernels.runtime.operator.plan import StepPlan, Steps

MAX_PARTS = 16  # of a list among the arguments
_MAX_LINES = 64
_ALLOCATIONS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
_ZEROS = {"zeros", "zeros_like", "new_zeros"}
_UNKNOWN_RESULTS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class NotRepeatable(Exception):
    """Why no function can be written."""


class Arguments:
    """The arguments of a call by name; those of lists and tuples have the name of the list and a number."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.names = [*values]
        self.parts: dict[str, tuple[type, list[str]]] = {}  # kind of a list, names of what is in it
        self.values: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, value in values.items():
            self._add(name, value)

    def _add(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self.tensors[name] = value
        elif isinstance(value, (tuple, list)):
            names = [f"{name}_{i}" for i in range(len(value))]
            self.parts[name] = type(value), names
            for part, inner in zip(names, value, strict=True):
                self._add(part, inner)
        else:
            self.values[name] = value


class Root:
    """A tensor whose memory others may view: an argument, or what a line of the written function makes."""

    __slots__ = ("argument", "dtype", "line", "name", "offset", "part", "shape", "storage", "strides")

    def __init__(self, name: str, tensor: Tensor, line: Line | None, part: int | None = None) -> None:
        self.name, self.line, self.part, self.argument = name, line, part, line is None
        self.shape, self.strides, self.dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        self.offset = tensor.storage_offset() * tensor.element_size()
        self.storage = StorageWeakRef(tensor.untyped_storage())  # keeps its identity from being given to another one


class View(NamedTuple):
    """A tensor of the call as the written function has it: `first` bytes behind the first element of a root."""

    root: Root
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_root(self) -> bool:
        root = self.root
        return (self.first, self.shape, self.strides, self.dtype) == (0, root.shape, root.strides, root.dtype)


class Line(NamedTuple):
    """One thing that the call did.

    Attributes:
        plan: Of an operator, which takes addresses; None for others.
        function: Of torch, or an operator that wants tensors; None for a plan, and for memory that is only allocated.
        given: Its arguments: ``View`` for tensors.
        keywords: The same by name; of memory that is only allocated, whether it is to be cleared.
        written: Arguments of the operator that it overwrites.
        changes: It overwrites memory, so that it is called whether or not its results are used.
    """

    plan: StepPlan | None
    function: Callable[..., Any] | None
    given: Sequence[Any]
    keywords: dict[str, Any]
    written: Sequence[View] = ()
    changes: bool = False


class Notes(TorchDispatchMode):
    """While it is on, notes everything that is computed.

    Args:
        arguments: Tensors among the arguments of the call, by name.
    """

    def __init__(self, arguments: dict[str, Tensor]) -> None:
        super().__init__()
        self.arguments, self.lines, self.refused = arguments, [], None
        self.debug = False  # the call asked whether it is to look at values
        self.inside = False  # of an operator that is noted as a whole
        self.thread = threading.get_ident()
        self.device = next(iter(arguments.values())).device
        self.apart: list[tuple[View, View]] = []  # tensors that do not overlap, which the call wanted to know
        self._roots: dict[int, list[Root]] = {}  # by storage
        self._views: dict[Any, View | None] = {}  # by all that a tensor is; None: of several roots
        for name, tensor in arguments.items():
            self._add_root(Root(name, tensor, None), tensor)

    def __enter__(self) -> Notes:
        layout.overlap_questions.append(self._note_overlap)
        env.questions.append(self._note_variable)
        under_way.append(self)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> Any:
        layout.overlap_questions.remove(self._note_overlap)
        env.questions.remove(self._note_variable)
        under_way.remove(self)
        return super().__exit__(*exc)

    def refuse(self, why: str) -> None:
        """Say that no function can be written of this call."""
        self.refused = self.refused or why

    # ---- tensors ----

    def _add_root(self, root: Root, tensor: Tensor) -> None:
        self._roots.setdefault(root.storage.cdata, []).append(root)
        self._add_view(tensor, root)

    def _add_view(self, tensor: Tensor, root: Root) -> None:
        first = tensor.storage_offset() * tensor.element_size() - root.offset
        view = View(root, first, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        known = self._views.setdefault(_identity(tensor), view)
        if known is not None and known.root is not root and self.arguments.get(known.root.name) is not tensor:
            self._views[_identity(tensor)] = None

    def view_of(self, tensor: Tensor) -> View:
        """Return what the written function has in the place of a tensor."""
        found = self._views.get(identity := _identity(tensor))
        if found is None and identity not in self._views:
            roots = self._roots.get(identity[0], [])
            if len(roots) == 1:
                self._add_view(tensor, roots[0])
                found = self._views[identity]
        if found is None:
            raise NotRepeatable("a tensor is neither an argument nor made by the call, or one of several")
        return found

    def roots(self) -> Iterator[Root]:
        """Yield the arguments and what the call made."""
        for roots in self._roots.values():
            yield from roots

    def _note_overlap(self, a: Tensor, b: Tensor, overlap: bool) -> None:
        if self.thread != threading.get_ident():
            return
        try:
            views = self.view_of(a), self.view_of(b)
        except NotRepeatable as error:
            self.refuse(str(error))
            return
        if overlap:
            self.refuse("tensors overlap")
        elif views[0].root.argument and views[1].root.argument:
            self.apart.append(views)

    def _note_variable(self, name: str) -> None:
        if name == "RTKERNELS_DEBUG" and self.thread == threading.get_ident():  # others are for what is slow anyway
            self.debug = True

    # ---- what is called ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = TorchOp.by_overload.get(func)
        if isinstance(operator, Declared) and self.refused is None:
            return self._run_operator(operator, _all_arguments(func, args, kwargs))
        result = self._as_a_whole(func, *args, **kwargs)
        if self.refused is None:
            try:
                if operator is not None:
                    raise NotRepeatable(f"{operator.name} has lists of tensors")
                self._note_call(func, args, kwargs, result)
            except NotRepeatable as error:
                self.refuse(str(error))
        return result

    def _as_a_whole(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self.inside = self.inside, True
        try:
            return function(*args, **kwargs)
        finally:
            self.inside = before

    def launched(self, operator: Declared, args: tuple[Any, ...]) -> Any:
        """Launch an operator that was not called by the dispatcher, and note it."""
        if isinstance(operator, TorchOp):
            return operator.overload(*args)
        with _disable_current_modes():
            return self._run_operator(operator, list(args))

    def _run_operator(self, operator: Declared, args: list[Any]) -> Any:
        plan, used = None, args
        if operator._prepare is None:
            try:
                with self:  # copies are noted
                    plan, used = operator._planned(tuple(args))
            except CANNOT_LAUNCH as error:  # the operator may fall back, or raises it once more
                self.refuse(str(error))
        if type(plan) is Steps and plan.instead is not None:
            with self:  # and so is what other operators do
                made = plan.instead(*used)
        else:
            made = self._as_a_whole(self._launch, operator, used)
            try:
                if type(plan) is StepPlan:
                    self._note_plan(operator, plan, used, made)
                else:  # it asks for addresses, or plain torch does its work
                    views = [self.view_of(v) if isinstance(v, Tensor) else v for v in used]
                    call = operator.call if isinstance(operator, TorchOp) else operator.launch
                    self._add_line(Line(None, call, views, {}, changes=bool(operator._written)), made)
            except NotRepeatable as error:
                self.refuse(str(error))
        with self:
            for i in operator._places:
                if operator._kinds[i].written and used[i] is not args[i]:
                    args[i].copy_(used[i])
        return made

    @staticmethod
    def _launch(operator: Declared, args: tuple[Any, ...]) -> Any:
        if isinstance(operator, TorchOp):
            return operator.overload(*args)
        features = emulator.active() if args[operator._places[0]].get_device() < 0 else None
        if features is None:
            return operator.launch(*args)
        with emulator.lock:
            emulate_features(features)
            with emulator.recording():
                return operator.launch(*args)

    def _note_plan(self, operator: Declared, plan: StepPlan, used: Sequence[Any], made: Any) -> None:
        given = [None if used[i] is None else self.view_of(used[i]) for i in operator._places]
        given += [used[i] for i in operator._number_places]
        written = [
            self.view_of(used[i]) for i in operator._places if operator._kinds[i].written and used[i] is not None
        ]
        self._add_line(Line(plan, None, given, {}, written, changes=bool(written)), made)

    def _note_call(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if any(tag in func.tags for tag in _UNKNOWN_RESULTS):
            raise NotRepeatable(f"{func} reads values")
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if not all(isinstance(t, Tensor) for t in results):
            raise NotRepeatable(f"{func} returns other things than tensors")
        given = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(t.device == self.device for t in given) and any(t.device != self.device for t in results):
            raise NotRepeatable(f"{func} copies to where the host may read it")
        storages = {_storage(t): t for t in given}
        aliases = [storages.get(_storage(t)) for t in results]
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        if results and not writes and all(base is not None for base in aliases):  # views: nothing is computed
            for t, base in zip(results, aliases, strict=True):
                self._add_view(t, self.view_of(base).root)
            return
        if any(base is not None for base in aliases) and not writes:
            raise NotRepeatable(f"{func} returns views of some arguments")
        name = func._schema.name.removeprefix("aten::")
        if (name in _ALLOCATIONS or name in _ZEROS) and self._is_plain(result):
            self._add_line(Line(None, None, (), {"zero": True} if name in _ZEROS else {}), result)
            return
        views = torch.utils._pytree.tree_map(lambda v: self.view_of(v) if isinstance(v, Tensor) else v, (args, kwargs))
        self._add_line(Line(None, func, views[0], views[1], changes=writes), None if writes else result)

    def _is_plain(self, t: Tensor) -> bool:
        return t.device == self.device and t.layout == torch.strided and not t.is_pinned()

    def _add_line(self, line: Line, made: Any) -> None:
        if len(self.lines) >= _MAX_LINES:
            raise NotRepeatable(f"the call does more than {_MAX_LINES} things")
        number = len(self.lines)
        self.lines.append(line)
        if isinstance(made, Tensor):
            self._add_root(Root(f"t_{number}", made, line), made)
        elif made is not None:
            for part, tensor in enumerate(made):
                self._add_root(Root(f"t_{number}_{part}", tensor, line, part), tensor)


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _identity(t: Tensor) -> tuple[Any, ...]:
    return _storage(t), t.storage_offset(), t.shape, t.stride(), t.dtype


def _all_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return what the dispatcher gives a mode with the defaults that it leaves out."""
    return [
        args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        for i, argument in enumerate(func._schema.arguments)
    ]
