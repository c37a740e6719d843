"""What a call does, recorded while it runs: operators, views and memory.

Two recorders fill a ``Trace``. For public functions a dispatch mode sees everything that torch and our operators
compute, whatever Python is around it. Handlers of aten overrides run below the dispatcher: ``launches.py`` records what
they launch. Two calls whose tensors have the same metadata and whose other arguments are equal differ in addresses
only, unless the host reads values (such calls are refused) or asks whether tensors overlap (the replay asks that, too:
``codegen.py``).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rtkernels import emulator
from rtkernels.errors import CANNOT_LAUNCH
from rtkernels.runtime import env, layout
from rtkernels.runtime.launch.device import emulating
from rtkernels.runtime.operator.declaration import Declared, active_traces
from rtkernels.runtime.operator.declared import Operator
from rtkernels.runtime.operator.operator import TorchOp
from rtkernels.runtime.operator.plan import StepPlan, Steps
from rtkernels.runtime.torch_private import without_autocast

_MAX_RECORDS = 64
_MAX_ENCODED = 64
ALLOCATIONS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
_ZEROS = {"zeros", "zeros_like", "new_zeros"}
_UNKNOWN_RESULTS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class NotRepeatable(Exception):
    """Why a call cannot be replayed."""


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
    """A tensor whose memory others may view: an argument, or the result of a record."""

    __slots__ = ("argument", "dtype", "name", "offset", "part", "record", "shape", "storage", "strides")

    def __init__(self, name: str, tensor: Tensor, record: Record | None, part: int | None = None) -> None:
        self.name, self.record, self.part, self.argument = name, record, part, record is None
        self.shape, self.strides, self.dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        self.offset = tensor.storage_offset() * tensor.element_size()
        self.storage = StorageWeakRef(tensor.untyped_storage())  # keeps its identity from being given to another one


class View(NamedTuple):
    """A tensor of the call: it begins `first` bytes behind the first element of a root."""

    root: Root
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_root(self) -> bool:
        root = self.root
        return (self.first, self.shape, self.strides, self.dtype) == (0, root.shape, root.strides, root.dtype)


class Record(NamedTuple):
    """One thing that the call did.

    Attributes:
        plan: The plan of an operator, which takes addresses; None for anything else.
        function: A function of torch, or an operator that takes tensors; None for plans and for plain allocations.
        given: Its arguments, with a ``View`` for each tensor.
        keywords: Its keyword arguments; for an allocation, whether it is zeroed.
        written: Tensors that it overwrites.
        changes: It overwrites memory, so it runs whether or not its results are used.
    """

    plan: StepPlan | None
    function: Callable[..., Any] | None
    given: Sequence[Any]
    keywords: dict[str, Any]
    written: Sequence[View] = ()
    changes: bool = False


class Number(NamedTuple):
    """A number among the arguments that a launch takes, whatever its value is.

    Attributes:
        name: The argument's.
        encode: What the launch takes for it; None: the number itself.
    """

    name: str
    encode: Encoded | None


class Encoded:
    """What a launch takes for numbers, remembered: most come again.

    Args:
        encode: Returns it for a number, or None for one that the launch cannot take.
    """

    def __init__(self, encode: Callable[[Any], Any]) -> None:
        self._encode, self.kept = encode, {}

    def __call__(self, number: Any) -> Any:
        """Return it for a number that is not in ``kept``."""
        encoded = self._encode(number)
        if number and encoded is not None:  # zeros are equal whatever their sign
            if len(self.kept) >= _MAX_ENCODED:
                self.kept.clear()
            self.kept[number] = encoded
        return encoded


class Trace(ABC):
    """What a call did, in terms of its arguments.

    Args:
        arguments: Tensors among the arguments of the call, by name.
        over: Names of those that a result may be written over.
    """

    counts_versions = True  # False: the dispatcher has counted what the call overwrites

    def __init__(self, arguments: dict[str, Tensor], *, over: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.over = over
        self.has_out = any(name == "out" or name.startswith("out_") for name in arguments)
        self.arguments, self.records, self.refused = arguments, [], None
        self.debug = False  # True once the call has asked for RTKERNELS_DEBUG
        self.inside = False  # an operator that is recorded as a whole
        self.thread = threading.get_ident()
        self.device = max((t.device for t in arguments.values()), key=lambda device: device.type != "cpu")
        self.apart: list[tuple[View, View]] = []  # pairs that the call found not to overlap
        self._roots: dict[int, list[Root]] = {}  # by storage
        self._views: dict[Any, View | None] = {}  # by identity; None if several roots could be meant
        for name, tensor in arguments.items():
            self._add_root(Root(name, tensor, None), tensor)

    def __enter__(self) -> Trace:
        layout.overlap_questions.append(self._record_overlap)
        active_traces.append(self)
        return self

    def __exit__(self, *exc: Any) -> Any:
        layout.overlap_questions.remove(self._record_overlap)
        active_traces.remove(self)

    def refuse(self, why: str) -> None:
        """Give up: this call cannot be replayed."""
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
        """Return a tensor of the call as a view of a root."""
        found = self._views.get(identity := _identity(tensor))
        if found is None and identity not in self._views:
            roots = self._roots.get(identity[0], [])
            if len(roots) == 1:
                self._add_view(tensor, roots[0])
                found = self._views[identity]
        if found is None:
            raise NotRepeatable(
                "a tensor is neither an argument nor a result of the call, or it could be one of several"
            )
        return found

    def roots(self) -> Iterator[Root]:
        """Yield arguments and results."""
        for roots in self._roots.values():
            yield from roots

    def _record_overlap(self, a: Tensor, b: Tensor, overlap: bool) -> None:
        if self.inside or self.thread != threading.get_ident():  # what is recorded as a whole asks again in a replay
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

    # ---- calls ----

    def _as_a_whole(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self.inside = self.inside, True
        try:
            return function(*args, **kwargs)
        finally:
            self.inside = before

    @abstractmethod
    def launched(self, operator: Declared, args: tuple[Any, ...]) -> Any:
        """Launch an operator that the dispatcher did not call, and record it."""

    def _number(self, value: Any) -> Any:
        """Return what is recorded of a number that a plan takes."""
        return value

    def _record_plan(self, operator: Declared, plan: StepPlan, used: Sequence[Any], result: Any) -> None:
        given = [None if used[i] is None else self.view_of(used[i]) for i in operator._places]
        given += [self._number(used[i]) for i in operator._number_places]
        written = [self.view_of(used[i]) for i in operator.written_places if used[i] is not None]
        self._add_record(Record(plan, None, given, {}, written, changes=bool(written)), result)

    def _add_record(self, record: Record, result: Any) -> None:
        if len(self.records) >= _MAX_RECORDS:
            raise NotRepeatable(f"the call does more than {_MAX_RECORDS} things")
        number = len(self.records)
        self.records.append(record)
        if isinstance(result, Tensor):
            self._add_root(Root(f"t_{number}", result, record), result)
        elif result is not None:
            for part, tensor in enumerate(result):
                self._add_root(Root(f"t_{number}_{part}", tensor, record, part), tensor)


class DispatchTrace(Trace, TorchDispatchMode):
    """While active, records everything that is computed; arguments as for ``Trace``."""

    def __enter__(self) -> DispatchTrace:
        Trace.__enter__(self)
        env.questions.append(self._record_variable)
        return TorchDispatchMode.__enter__(self)

    def __exit__(self, *exc: Any) -> Any:
        Trace.__exit__(self, *exc)
        env.questions.remove(self._record_variable)
        return TorchDispatchMode.__exit__(self, *exc)

    def _record_variable(self, name: str) -> None:
        if name == "RTKERNELS_DEBUG" and self.thread == threading.get_ident():  # others decide how kernels are built
            self.debug = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = TorchOp.by_overload.get(func)
        if isinstance(operator, Operator) and operator.lists is None and self.refused is None:
            return self._run_operator(operator, _all_arguments(func, args, kwargs))
        result = self._as_a_whole(func, *args, **kwargs)
        if self.refused is None:
            try:
                if operator is not None:
                    raise NotRepeatable(f"{operator.name} has lists of tensors")
                self._record_call(func, args, kwargs, result)
            except NotRepeatable as error:
                self.refuse(str(error))
        return result

    def launched(self, operator: Declared, args: tuple[Any, ...]) -> Any:
        """Launch an operator that the dispatcher did not call, and record it."""
        if isinstance(operator, TorchOp):
            return operator.overload(*args)
        with _disable_current_modes():
            return self._run_operator(operator, list(args))

    def _run_operator(self, operator: Declared, args: list[Any]) -> Any:
        plan, used = None, args
        if operator._prepare is None:
            try:
                with self:  # copies are recorded
                    plan, used = operator._planned(tuple(args))
            except CANNOT_LAUNCH as error:  # the operator may fall back, or raises it once more
                self.refuse(str(error))
        if type(plan) is Steps and plan.instead is not None:
            with self, without_autocast(self.device.type):  # and so are the operators that it calls
                result = plan.instead(*used)
        else:
            result = self._as_a_whole(self._launch, operator, used, plan)
            try:
                if type(plan) is StepPlan:
                    self._record_plan(operator, plan, used, result)
                else:  # it depends on addresses, or plain torch does its work
                    views = [self.view_of(v) if isinstance(v, Tensor) else v for v in used]
                    call = operator.call if isinstance(operator, TorchOp) else operator.launch
                    self._add_record(Record(None, call, views, {}, changes=bool(operator._written)), result)
            except NotRepeatable as error:
                self.refuse(str(error))
        for i in operator.written_places:
            if used[i] is not args[i]:
                with self:
                    args[i].copy_(used[i])
                if operator.counts_versions and not args[i].is_inference():  # in a mode, `copy_` counts none
                    torch.autograd.graph.increment_version(args[i])
        return result

    @staticmethod
    def _launch(operator: Declared, args: tuple[Any, ...], plan: StepPlan | Steps | None) -> Any:
        launch = partial(operator.launch, *args)
        if type(plan) is StepPlan and plan.converted:
            # The operator would look up a plan for the converted arguments, with results of other shapes and dtypes.
            launch = partial(operator._run_planned, plan, args, args)
        elif isinstance(operator, TorchOp):
            return operator.overload(*args)
        features = emulator.active() if args[operator._places[0]].get_device() < 0 else None
        if features is None:
            return launch()
        with emulating(features):
            return launch()

    def _record_call(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
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
        if (name in ALLOCATIONS or name in _ZEROS) and self._is_plain(result):
            self._add_record(Record(None, None, (), {"zero": True} if name in _ZEROS else {}), result)
            return
        views = torch.utils._pytree.tree_map(lambda v: self.view_of(v) if isinstance(v, Tensor) else v, (args, kwargs))
        self._add_record(Record(None, func, views[0], views[1], changes=writes), None if writes else result)

    def _is_plain(self, t: Tensor) -> bool:
        return t.device == self.device and t.layout == torch.strided and not t.is_pinned()


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _identity(t: Tensor) -> tuple[Any, ...]:
    return _storage(t), t.storage_offset(), t.shape, t.stride(), t.dtype


def _all_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments of a dispatched call, with the defaults that the dispatcher leaves out."""
    return [
        args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        for i, argument in enumerate(func._schema.arguments)
    ]
