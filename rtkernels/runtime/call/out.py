"""``out=``: results in memory of the caller, for every public function by one mechanism.

A call with `out` computes its results and copies them. Its replay does not: a trace knows that a result goes nowhere
but to `out`, so kernels write it there, and scratch is kept between calls (``memory.py``). Nothing is allocated or
copied from the third call on. What cannot be replayed is copied each time, and so are results whose strides or
alignment are not those of `out`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.checks import spell
from rtkernels.runtime.layout import overlaps_itself
from rtkernels.runtime.operator.aliasing import refuse_shared
from rtkernels.runtime.operator.autograd import refuse_gradients, refuse_tangents
from rtkernels.runtime.torch_private import is_dynamo_compiling


def with_out(function: Callable[..., Any], arguments: dict[str, Any], over: Sequence[str]) -> Any:
    """Call `function` with its results in ``arguments["out"]``.

    Args:
        function: It is called without `out`.
        arguments: All of its arguments by name.
        over: Names of arguments that `out` may be: the very same memory, with the same layout.

    Returns:
        What the function returns, with the tensors of `out` in place of its results.

    Raises:
        ArgumentError: `out` has another dtype, shape or device than the result or shares memory with an argument,
            or a gradient is needed. It is not changed then.
    """
    given = {name: value for name, value in arguments.items() if name != "out"}
    out = arguments["out"]
    outs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    if not outs:
        raise ArgumentError(f"out is an empty {type(out).__name__}; expected a torch.Tensor or None for each result")
    tensors = list(_tensors(given))
    for i, tensor in enumerate(outs):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise ArgumentError(f"{_name(outs, i)} is a {type(tensor).__name__}; expected a torch.Tensor or None")
    refuse_gradients(f"{function.__name__} with out=", [*(t for _, t in tensors), *outs])
    if not is_dynamo_compiling():
        _check_overlap(outs, tensors, over)
    return _copied(function(**given), outs)


def refuse_any_tangent(name: str, arguments: dict[str, Any]) -> None:
    """Raise if a tensor among all arguments of a public function has a tangent, which the function would drop."""
    refuse_tangents(name, [t for _, t in _tensors(arguments)])


def _copied(result: Any, outs: Sequence[Tensor | None]) -> Any:
    """Return `result` with the tensors of `outs` in it."""
    results = _results(result)
    _check(outs, results)
    returned = [result] if isinstance(result, Tensor) else list(result)
    for i, (tensor, value) in enumerate(zip(outs, results, strict=False)):
        if tensor is not None:
            returned[i] = tensor.copy_(value)
    if isinstance(result, Tensor):
        return returned[0]
    return type(result)(*returned) if hasattr(result, "_fields") else type(result)(returned)


def _results(result: Any) -> list[Tensor | None]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [t if isinstance(t, Tensor) else None for t in result]
    raise ArgumentError(f"out is given, and the result is a {type(result).__name__}; expected out=None")


def _check(outs: Sequence[Tensor | None], results: Sequence[Tensor | None]) -> None:
    if len(outs) > len(results):
        raise ArgumentError(f"out has {len(outs)} tensors; expected {len(results)}, one for each result of the call")
    for i, (tensor, result) in enumerate(zip(outs, results, strict=False)):
        if tensor is None:
            continue
        name = _name(outs, i)
        if result is None:
            raise ArgumentError(f"{name} is a tensor; expected None, because this call has no such result")
        if tensor.shape != result.shape:
            raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(result.shape)}")
        if tensor.dtype != result.dtype:
            raise ArgumentError(f"{name} has dtype {spell(tensor.dtype)}; expected {spell(result.dtype)}")
        if tensor.device != result.device:
            raise ArgumentError(f"{name} is on {tensor.device}; expected {result.device}")


def _check_overlap(outs: Sequence[Tensor | None], tensors: Sequence[tuple[str, Tensor]], over: Sequence[str]) -> None:
    there = [(_name(outs, i), t) for i, t in enumerate(outs) if t is not None]
    for i, (name, out) in enumerate(there):
        if out.numel() and overlaps_itself(out.shape, out.stride()):
            raise ArgumentError(f"{name} has strides {out.stride()}; expected memory of its own for every element")
        refuse_shared(name, out, [*tensors, *there[:i]], over)


def _tensors(value: Any, name: str = "") -> Any:
    """Yield names and tensors of all arguments, also those of lists and of objects with fields (``MoeIndex``)."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, name or key)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item, name)
    elif hasattr(value, "__dataclass_fields__"):
        for field in value.__dataclass_fields__:
            yield from _tensors(getattr(value, field, None), name)


def _name(outs: Sequence[Any], i: int) -> str:
    return "out" if len(outs) == 1 else f"out[{i}]"
