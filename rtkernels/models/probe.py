"""Test whether two forwards of a module compute the same function, by running both on the CPU with our own inputs.

Only sizes and attributes of the model are read, so models on any device, on meta and sharded models can be tested.
Both forwards get a *twin* of the module: a shallow copy with random parameters, in which projections are random linear
maps. Results, input gradients and all parameter gradients are compared row by row, so that rows of large numbers do not
hide differences in rows of small ones. The caller's modes and random state do not change.
"""

from __future__ import annotations

import copy
import dis
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from logging import Logger
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_CONTAINERS = (list, dict, set)
_OWN_TABLES = ("_parameters", "_buffers", "_modules")
_HALF_TOLERANCE = 3e-2  # relative to row norms: a model rounds after every step, our ops only once
HALVES = (torch.bfloat16, torch.float16)
RAISED = "it could not be tried"


class Recognized(NamedTuple):
    """What a module computes: the kind of replacement, and its options as sorted pairs."""

    kind: str
    options: tuple[tuple[str, Any], ...]


class NotRecognized(Exception):
    """The reason why a module is left alone, as a sentence for the report."""


class Raised(NotRecognized):
    """The module raised an exception during the test."""

    def __init__(self, where: str, error: BaseException) -> None:
        text = (str(error).splitlines() or [""])[0][:160]
        super().__init__(f"{RAISED} {where}: {type(error).__name__}: {text}")


@contextmanager
def probing() -> Iterator[None]:
    """Compute in fp32 on the CPU with gradients, whatever the caller's modes; keep the caller's random state."""
    default, precision, state = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.get_rng_state()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # raised by the model's code
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_default_dtype(default)
            torch.set_float32_matmul_precision(precision)
            torch.set_rng_state(state)


def positional(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's positional arguments."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]


# ---- numbers --------------------------------------------------------------------------------------------------------


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normally distributed numbers, the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def rows_of_scales(*shape: int, seed: int = 0, low: float = 1e-2, high: float = 2e2) -> Tensor:
    """Return normally distributed rows with scales from `low` to `high`; the first row is 0."""
    x = normal(*shape, seed=seed)
    count = x[..., 0].numel()
    scales = torch.logspace(0, 1, count, base=high / low, dtype=torch.float32, device="cpu") * low
    scales[0] = 0.0
    return x * scales.view(*x.shape[:-1], 1)


class LinearMap(nn.Module):
    """Replaces a projection in a twin: a random linear map of rank 6 with a bias, cheap for any width.

    ``weight`` has the projection's shape and dtype and is 0, so that a module which reads the weight itself fails the
    test.
    """

    def __init__(self, width: int, out: int, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = width, out
        self.down = nn.Parameter(normal(width, 6, seed=seed, dtype=dtype) * width**-0.5)
        self.up = nn.Parameter(normal(6, out, seed=seed + 1, dtype=dtype) * 6**-0.5)
        self.offset = nn.Parameter(normal(out, seed=seed + 2, dtype=dtype) * 0.1)
        self.__dict__["weight"] = torch.zeros((), dtype=dtype, device="cpu").expand(out, width)
        self.__dict__["bias"] = None

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.down @ self.up + self.offset


# ---- twins ----------------------------------------------------------------------------------------------------------


def twin_of(
    module: nn.Module,
    parameters: dict[str, Tensor],
    children: dict[str, nn.Module] | None = None,
    sizes: dict[int, int] | None = None,
    training: bool = True,
) -> nn.Module:
    """Return a shallow copy with other parameters and children; the module itself does not change.

    Parameters that are not given become None. Floating-point buffers become random, because none of our ops multiplies
    by a buffer. Children that are not given are copied. `sizes` maps widths stored in attributes to those of the twin.
    """
    twin = object.__new__(type(module))  # calling a class of FSDP would build a module
    twin.__dict__ = {
        name: copy.copy(value) if type(value) in _CONTAINERS and not name.startswith("_") else value
        for name, value in module.__dict__.items()
    }
    for name, value in twin.__dict__.items():
        if sizes and not name.startswith("_"):
            twin.__dict__[name] = _resized(value, sizes)
    twin.__dict__["training"] = training
    given = {name: nn.Parameter(value) for name, value in parameters.items()}
    twin._parameters = {**dict.fromkeys(module._parameters), **given}
    twin._buffers = {name: None if b is None else _fresh(b, sizes or {}) for name, b in module._buffers.items()}
    kept = {name: child for name, child in module._modules.items() if name not in (children or {})}
    twin._modules = {name: None if c is None else copy.deepcopy(c).train(training) for name, c in kept.items()}
    twin._modules |= children or {}
    return twin


def _resized(value: Any, sizes: dict[int, int]) -> Any:
    if type(value) is int:
        return sizes.get(value, value)
    if isinstance(value, (tuple, list)) and value and all(type(v) is int for v in value):
        return type(value)(sizes.get(v, v) for v in value)
    return value


def _fresh(buffer: Tensor, sizes: dict[int, int]) -> Tensor:
    shape = [sizes.get(size, size) for size in buffer.shape]
    if buffer.is_floating_point() and buffer.numel() <= 1 << 22:
        return normal(*shape, seed=7).to(buffer.dtype)
    return torch.zeros(shape, dtype=buffer.dtype, device="cpu")


def check_plain(module: nn.Module, projections: Sequence[str] = ()) -> None:
    """Refuse a module that computes with more than its input, parameters and projections.

    Raises:
        NotRecognized: Another child has parameters, buffers, a dropout or hooks, an attribute is a tensor, or the
            forward reads a global that may change.
    """
    for name, child in module._modules.items():
        if child is None or name in projections:
            continue
        for inner in child.modules():
            if isinstance(inner, nn.modules.dropout._DropoutNd):
                if inner.p > 0:
                    raise NotRecognized("it has a dropout")
            if any(t is not None for t in (*inner._parameters.values(), *inner._buffers.values())):
                raise NotRecognized(f"its child {name} has parameters or buffers of its own")
            hooks = (inner._forward_hooks, inner._forward_pre_hooks, inner._backward_hooks, inner._backward_pre_hooks)
            if any(hooks) or "forward" in inner.__dict__:
                raise NotRecognized(f"its child {name} has hooks, which would not run")
    for name, value in module.__dict__.items():
        if isinstance(value, Tensor):
            raise NotRecognized(f"its attribute {name} is a tensor")
    check_globals(inspect.unwrap(type(module).forward), type(module))


_FIXED = (ModuleType, FunctionType, BuiltinFunctionType, MethodDescriptorType, type, torch.dtype, torch.device, Logger)


def check_globals(function: Any, cls: type | None = None) -> None:
    """Refuse a function that reads a global or closure variable other than a function, class or module: it may change.

    Functions of the same file and methods of the class are checked, too.

    Raises:
        NotRecognized: The function reads such a variable.
    """
    file, seen, todo = getattr(function, "__module__", None), set(), [function]
    while todo:
        function = todo.pop()
        if getattr(function, "__code__", None) is None or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        read = {name: cell.cell_contents for name, cell in cells if name != "__class__"}
        for step in _instructions(function.__code__):
            if step.opname == "LOAD_GLOBAL" and step.argval in function.__globals__:
                read[step.argval] = function.__globals__[step.argval]
            elif cls is not None and step.opname in _ATTRIBUTES and not hasattr(nn.Module, step.argval):
                todo += [f for f in (getattr(cls, step.argval, None),) if isinstance(f, FunctionType)]
        for name, value in read.items():
            if isinstance(value, FunctionType) and value.__module__ in (file, function.__module__):
                todo.append(value)
            elif _is_table_of_activations(value):
                continue
            elif not isinstance(value, _FIXED) and not (callable(value) and not isinstance(value, nn.Module)):
                raise NotRecognized(f"its forward reads {name}, a {type(value).__name__} that may change")


def _is_table_of_activations(value: Any) -> bool:
    """Return True for transformers' ``ACT2FN``, from which forwards take an activation by the name they hold."""
    activations = sys.modules.get("transformers.activations")
    return activations is not None and value is activations.ACT2FN


_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Return the instructions of a function and of the functions nested in it."""
    yield from dis.get_instructions(code)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _instructions(inner)


# ---- comparisons ----------------------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """One call of both forwards: its description, the leaf tensors, and the arguments computed from them."""

    where: str
    leaves: tuple[Tensor, ...]
    arguments: Callable[..., tuple[Any, ...]] = lambda *leaves: leaves
    gradients: bool = True
    tolerance: float = 2e-5


def outcome(function: Callable[..., Any], trial: Trial, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the results and gradients of a function.

    Raises:
        Raised: The function raised an exception.
        NotRecognized: It changes its input, draws random numbers, or returns something other than tensors.
    """
    leaves = [t.detach().clone().requires_grad_() for t in trial.leaves]
    arguments = trial.arguments(*(t * 1 for t in leaves))  # not the leaves themselves, which cannot be changed in place
    given = [t for t in arguments if isinstance(t, Tensor)]
    versions, state = [t._version for t in given], torch.get_rng_state()
    try:
        results = function(*arguments)
        results = results if isinstance(results, tuple) else (results,)
        if not all(isinstance(t, Tensor) for t in results):
            raise NotRecognized(f"it gives {', '.join(type(t).__name__ for t in results)}; expected tensors")
        gradients: Sequence[Tensor | None] = ()
        if trial.gradients:
            gradients = (None,) * (len(leaves) + len(parameters))
            differentiable = [(i, t) for i, t in enumerate(results) if t.requires_grad]
            if differentiable:
                total = sum((t * normal(*t.shape, seed=70 + i, dtype=t.dtype)).sum() for i, t in differentiable)
                gradients = torch.autograd.grad(total, (*leaves, *parameters), allow_unused=True)
    except NotRecognized:
        raise
    except Exception as error:
        raise Raised(trial.where, error) from error
    if [t._version for t in given] != versions:
        raise NotRecognized("it changes its input in place")
    if not torch.equal(torch.get_rng_state(), state):
        raise NotRecognized("it draws random numbers")
    return [*(t.detach() for t in results), *gradients]


def _alike(ours: Tensor | None, theirs: Tensor | None, tolerance: float, by_rows: bool = True) -> bool:
    """Return True if no row differs by more than a fraction of its norm, and `theirs` is finite."""
    if ours is None or theirs is None:
        return ours is theirs
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if theirs.dtype in HALVES:
        tolerance = max(tolerance, _HALF_TOLERANCE)
    if not theirs.is_floating_point():
        return torch.equal(ours, theirs)
    columns = theirs.shape[-1] if by_rows and theirs.dim() else max(theirs.numel(), 1)
    ours, theirs = (t.double().reshape(-1, columns) for t in (ours, theirs))
    norms = theirs.norm(dim=-1)
    return bool(torch.isfinite(norms).all()) and bool(((ours - theirs).norm(dim=-1) <= tolerance * norms).all())


def difference(
    ours: Callable[..., Any], theirs: Callable[..., Any], trial: Trial, parameters: Sequence[Tensor] = ()
) -> str:
    """Return how `ours` differs from `theirs`, "" if it does not.

    Raises:
        NotRecognized: `theirs` raised an exception or cannot be compared; see :func:`outcome`.
    """
    wanted = outcome(theirs, trial, parameters)
    try:
        got = outcome(ours, trial, parameters)
    except NotRecognized as error:
        return f"ours raises {trial.where} ({error})"
    count = len(wanted) - (len(trial.leaves) + len(parameters) if trial.gradients else 0)
    if len(got) != len(wanted):
        return "another number of results"
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        is_parameter = i >= count + len(trial.leaves)  # its gradient is a sum over all rows
        if not _alike(a, b, trial.tolerance, by_rows=not is_parameter):
            of = "parameters" if is_parameter else "its input"
            what = "other results" if i < count else f"other gradients of {of}"
            return f"{what} {trial.where}"
    return ""


def check_pure(function: Callable[..., Any], twin: nn.Module, trial: Trial) -> None:
    """Refuse a forward that is not repeatable, differs without gradients, or changes its module.

    Raises:
        NotRecognized: The forward is one of these.
    """
    classes = [cls for cls in type(twin).__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module]

    def state() -> list[dict[str, Any]]:
        own = {name: value for name, value in twin.__dict__.items() if name not in _OWN_TABLES}
        own = {name: copy.copy(value) if type(value) in _CONTAINERS else value for name, value in own.items()}
        buffers = {name: None if b is None else b._version for name, b in twin._buffers.items()}
        return [own, buffers, *(dict(vars(cls)) for cls in classes)]

    before = state()
    plain = trial._replace(gradients=False)
    wanted = outcome(function, plain, ())
    for where, mode in (("the second time", torch.enable_grad), ("without gradients", torch.no_grad)):
        with mode():
            got = outcome(function, plain, ())
        if not all(_alike(a, b, trial.tolerance) for a, b in zip(got, wanted, strict=True)):
            raise NotRecognized(f"it gives other results {where}")
    for then, now in zip(before, state(), strict=True):
        for name in then.keys() | now.keys():
            a, b = then.get(name), now.get(name)
            if a is not b and not (type(a) in (*_CONTAINERS, int) and a == b):
                raise NotRecognized(f"its forward changes {name}")
