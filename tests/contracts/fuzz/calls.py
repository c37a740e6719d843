"""What the fuzzer calls: operators with samples of their family, public functions; each as a function of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import rtkernels
from contracts import test_dynamic_rows
from contracts.fuzz import extra_calls
from contracts.samples import samples_of
from rtkernels.runtime.operator import registry
from rtkernels.runtime.operator.declared import Operator

_ROWS = 6
# Options and `out` that exclude each other; and one that adds to `out`.
WITHOUT_OUT = {"rms_norm(), residual", "scaled_mm(), quantised", "grouped_wgrad()"}
# Functions with several results whose `out` is for the first one; those of others have their own names, or none.
ONE_EACH = {
    "attention": ("out",), "attention_varlen": ("out",), "index_select": ("out",),
    **dict.fromkeys(("quantize_nvfp4", "quantize_mxfp8", "quantize_mxfp4", "glu"), ("out", "scale_out")),
    **dict.fromkeys(("rms_norm", "layer_norm"), ("out",)),
}  # fmt: skip


@dataclass
class Call:
    """One call with its tensors.

    Attributes:
        name: ``scaled_mm_out#3`` (operators), ``scaled_mm()`` (functions).
        family: Folder of the op.
        names: Of the tensors, in order.
        tensors: Their values, on the CPU.
        run: Takes tensors in that order, and ``out=`` if `has_out`; returns what the function returns.
        written: Places of the tensors that the call changes.
        has_out: Takes ``out=``.
        out_names: Names of the arguments that results go to, in their order; none if ``out`` is a tuple for several.
        numbers: Integers among the other arguments, which sizes may belong to.
        words: Strings among them, such as names of layouts.
        function: It is a public function, which may be differentiable.
    """

    name: str
    family: str
    names: list[str]
    tensors: list[Tensor]
    run: Callable[..., Any]
    written: set[int] = field(default_factory=set)
    has_out: bool = False
    out_names: tuple[str, ...] = ()
    numbers: frozenset[int] = frozenset()
    words: frozenset[str] = frozenset()
    function: bool = False


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield names and values of all that is in nested arguments."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, str(key))
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from leaves(item, f"{name}[{i}]")
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for key in value.__dataclass_fields__:
            yield from leaves(getattr(value, key), f"{name}.{key}")
    else:
        yield name, value


def rebuilt(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the same arguments with other tensors."""
    if isinstance(value, dict):
        return {key: rebuilt(item, tensors) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [rebuilt(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return type(value)(**{key: rebuilt(getattr(value, key), tensors) for key in value.__dataclass_fields__})
    return next(tensors) if isinstance(value, Tensor) else value


def results_of(result: Any) -> list[Tensor | None]:
    """Return the tensors of a result, and None for everything else."""
    return [value if isinstance(value, Tensor) else None for _, value in leaves(result, "")]


def _call(name: str, family: str, callee: Callable[..., Any], args: Any, kwargs: Any, **more: Any) -> Call:
    parameters = [*inspect.signature(callee).parameters]
    found = list(leaves(dict(zip(parameters, args, strict=False)) | kwargs, ""))
    given = [(key, value) for key, value in found if isinstance(value, Tensor)]

    def run(tensors: list[Tensor], **outputs: Any) -> Any:
        some = iter(tensors)
        again = rebuilt(args, some), rebuilt(kwargs, some)
        return callee(*again[0], **again[1], **outputs)

    numbers = frozenset(value for _, value in found if type(value) is int)
    words = frozenset(value for _, value in found if isinstance(value, str))
    more |= {"numbers": numbers, "words": words}
    return Call(name, family, [key for key, _ in given], [t.detach() for _, t in given], run, **more)


# ---- operators ------------------------------------------------------------------------------------------------------


def operators() -> Iterator[Call]:
    """Yield every declared operator with each of its samples."""
    for op in registry.ops():
        try:
            samples = samples_of(op.name, "cpu")
        except Exception as error:  # pragma: no cover - says which op it is
            raise RuntimeError(f"samples of {op.name}") from error
        for number, (operator, args) in enumerate(samples):
            if not isinstance(operator, Operator) or operator.lists is not None:
                continue
            names = operator.names
            call = _call(f"{operator.name}#{number}", op_family(op), _named(operator, names), args, {})
            kinds = {argument.name: argument for argument in operator.arguments}
            call.written = {i for i, name in enumerate(call.names) if name in kinds and kinds[name].written}
            yield call


def op_family(op: Any) -> str:
    """Return the family of an op: the folder of its module."""
    for module in ("act", "attention", "conv", "gemm", "index", "layout", "loss", "moe", "multi", "norm", "pointwise",
                   "quant", "random", "reduce", "rope", "router", "scan", "shared", "sort", "window"):  # fmt: skip
        if importable(f"rtkernels.ops.{module}.{op.name}"):
            return module
    return "other"


def importable(name: str) -> bool:
    """Return True if a module is loaded under this name."""
    import sys

    return name in sys.modules


def _named(operator: Any, names: tuple[str, ...]) -> Callable[..., Any]:
    """Return an operator as a function whose signature has its names."""

    def function(*args: Any) -> Any:
        return operator(*args)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return function


# ---- public functions -----------------------------------------------------------------------------------------------


def functions() -> Iterator[Call]:
    """Yield every public function with the arguments of ``test_dynamic_rows.CALLS``, and some more."""
    families = {name: op_family(op) for op in registry.ops() for name in op.public}
    for label, call in test_dynamic_rows.CALLS.items():
        name = label.partition(",")[0]
        args, kwargs = _captured(name, call)
        yield _function(f"{name}()" + label[len(name) :], name, families.get(name, "other"), args, kwargs)
    for label, (name, args, kwargs) in extra_calls.calls().items():
        yield _function(f"{name}(){label}", name, families.get(name, "other"), args, kwargs)


def _captured(name: str, call: Callable[..., Any]) -> tuple[Any, Any]:
    """Return the arguments that a lambda gives the public function of this name."""
    function, seen = getattr(rtkernels, name), []

    def spy(*args: Any, **kwargs: Any) -> Any:
        copies = iter([t.detach().clone() for _, t in leaves((args, kwargs), "") if isinstance(t, Tensor)])
        seen.append((rebuilt(args, copies), rebuilt(kwargs, copies)))  # their values before the call writes to them
        return function(*args, **kwargs)

    counts = test_dynamic_rows.COUNTS
    setattr(rtkernels, name, spy)
    test_dynamic_rows.COUNTS = torch.tensor([1, 0, 3, 2])  # all rows belong to an expert
    try:
        with torch.no_grad():
            call(*test_dynamic_rows._inputs(_ROWS))
    finally:
        setattr(rtkernels, name, function)
        test_dynamic_rows.COUNTS = counts
    return seen[0]


def _function(label: str, name: str, family: str, args: Any, kwargs: Any) -> Call:
    function = getattr(rtkernels, name)
    has_out = "out" in inspect.signature(function).parameters and label not in WITHOUT_OUT
    names = ONE_EACH.get(name, ()) if has_out else ()
    call = _call(label, family, function, args, kwargs, has_out=has_out, out_names=names, function=True)
    tensors = [t.clone() for t in call.tensors]
    versions = [t._version for t in tensors]
    with torch.no_grad():
        call.run(tensors)
    # Compares versions, too: a write may leave the same values.
    changed = [not torch.equal(_bits(a), _bits(b)) for a, b in zip(tensors, call.tensors, strict=True)]
    call.written = {i for i, t in enumerate(tensors) if changed[i] or t._version != versions[i]}
    return call


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8) if t.dim() and t.numel() else t.reshape(-1).contiguous().view(torch.uint8)
