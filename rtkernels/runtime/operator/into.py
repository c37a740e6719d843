"""``out=``: results in memory of the caller, for every public function by one mechanism.

Operators allocate their results where their steps begin (``plan.StepPlan``). While a function is called with ``out``,
these places ask here first. The first call with some metadata runs as if there were no ``out`` and its results are
copied; which of the allocations they came from is noted. Calls like it get ``out`` at these places, and memory that was
kept from the call before for everything else, so that nothing is allocated and nothing is copied. What a function makes
by other means is copied each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels import emulator
from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.memory import Allocate
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import overlaps_itself
from rtkernels.runtime.operator.aliasing import refuse_shared
from rtkernels.runtime.operator.autograd import refuse_gradients
from rtkernels.runtime.torch_private import TENSOR_TYPES, dispatch_modes, functorch_transform, is_dynamo_compiling

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype

_CALLS_LIMIT = 1024
calls_under_way: list[None] = []  # empty unless some thread is inside of a call with `out`: what steps look at
_state = threading.local()
_calls: dict[Any, _Known] = {}


class _Known:
    """What is known of calls of one function with the same metadata."""

    __slots__ = ("kept", "layouts", "places", "results")

    def __init__(self) -> None:
        self.layouts: list[tuple[str, Layout]] = []  # of all allocations, in order
        self.places: dict[int, int] = {}  # allocation -> result
        self.results: list[Layout | None] = []
        self.kept: dict[Any, dict[int, Tensor]] = {}  # thread and stream -> allocation -> memory of what is no result


class _Call:
    """One call with `out`, while it is under way."""

    __slots__ = ("known", "made", "outs", "stream")

    def __init__(self, known: _Known | None, outs: Sequence[Tensor | None], stream: Any) -> None:
        self.known, self.outs, self.stream = known, outs, stream
        self.made: list[tuple[str, Layout, Tensor]] = []

    def memory(self, name: str, layout: Layout, allocate: Allocate) -> Tensor:
        place, known, tensor = len(self.made), self.known, None
        if known is not None and place < len(known.layouts) and known.layouts[place] == (name, layout):
            result = known.places.get(place)
            if result is None:
                tensor = known.kept.get(self.stream, {}).get(place)
            elif result < len(self.outs) and self.outs[result] is not None and not self.outs[result].data_ptr() & 15:
                tensor = _seen_as(self.outs[result], layout)  # kernels take it that results are 16-byte aligned
        if tensor is None:
            tensor = allocate(*layout)
        self.made.append((name, layout, tensor))
        return tensor


def memory(name: str, layout: Layout, allocate: Allocate) -> Tensor:
    """Return the memory of a result or of scratch: that of the caller, that of the call before, or new one."""
    call = getattr(_state, "call", None)
    return allocate(*layout) if call is None else call.memory(name, layout, allocate)


def into(function: Callable[..., Any], arguments: dict[str, Any], over: str = "") -> Any:
    """Call `function` with its results in ``arguments["out"]``.

    Args:
        function: A public function; it is called without `out`.
        arguments: All of its arguments by name: its ``locals()`` at its first line.
        over: Names of arguments that `out` may be: the very same memory, seen alike.

    Returns:
        What the function returns, with the tensors of `out` in the places of those it would have made.

    Raises:
        ArgumentError: `out` has another dtype, shape, stride or device than the result or shares memory with an
            argument, or a gradient is wanted. It is not changed then.
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
    refuse_gradients(f"{function.__name__} with out=", [t for _, t in tensors] + [t for t in outs if t is not None])
    if is_dynamo_compiling():
        return _placed(function(**given), out, outs)
    _check_overlap(outs, tensors, over.split())
    seen = [*(t for _, t in tensors), *(t for t in outs if t is not None)]
    if dispatch_modes() or functorch_transform() is not None or any(type(t) not in TENSOR_TYPES for t in seen):
        return _placed(function(**given), out, outs)
    mode = emulator.active(), torch.is_inference_mode_enabled()
    key = (function, mode, tuple(t is None for t in outs), _key(given))
    known, device = _calls.get(key), seen[0].device
    if known is not None:
        _check(outs, known.results, device)
    stream: Any = threading.get_ident(), 0
    if device.type == "cuda":
        capturing = torch.cuda.is_current_stream_capturing()  # a graph's scratch is its own
        stream = None if capturing else (stream[0], torch._C._cuda_getCurrentRawStream(device.index))
    call, before = _Call(known, outs, stream), getattr(_state, "call", None)
    calls_under_way.append(None)
    _state.call = call
    try:
        result = function(**given)
    finally:
        _state.call = before
        calls_under_way.pop()
    if known is None:
        known = _noted(call, result)
        if len(_calls) >= _CALLS_LIMIT:
            _calls.clear()
        _calls[key] = known
    placed = _placed(result, out, outs)
    del result
    if stream is not None and known.kept.get(stream) is None:
        known.kept[stream] = _not_shared(call, known)
    return placed


Plans.replays.append(_calls.clear)  # what is known depends on the plans


def _noted(call: _Call, result: Any) -> _Known:
    known = _Known()
    known.layouts = [(name, layout) for name, layout, _ in call.made]
    storages = {t.untyped_storage().data_ptr(): i for i, (_, _, t) in enumerate(call.made) if t.numel()}
    for i, tensor in enumerate(_results(result)):
        known.results.append(None if tensor is None else _layout(tensor))
        if tensor is None or not tensor.numel():
            continue
        place = storages.get(tensor.untyped_storage().data_ptr())
        if place is None:
            continue
        made = call.made[place][2]
        whole = made.storage_offset() == tensor.storage_offset() and made.nbytes == tensor.nbytes
        if whole and _span(made) == _span(tensor):  # a part of it is copied each time
            known.places.setdefault(place, i)
    return known


def _not_shared(call: _Call, known: _Known) -> dict[int, Tensor]:
    """Return the memory of a call that nobody has any more: neither its caller nor anything that the call left."""
    kept = {}
    for place, (_, _, tensor) in enumerate(call.made):
        if place in known.places or not tensor.numel():
            continue
        storage = tensor.untyped_storage()
        if torch._C._storage_Use_Count(storage._cdata) <= 2:  # `tensor` and `storage`
            kept[place] = tensor
    return kept


def _placed(result: Any, out: Any, outs: Sequence[Tensor | None]) -> Any:
    """Return `result` with the tensors of `outs` in it, copied to where they are not there yet."""
    made = _results(result)
    returned = [result] if isinstance(result, Tensor) else list(result)
    device = next((t.device for t in made if t is not None), None)
    _check(outs, [None if t is None else _layout(t) for t in made], device)
    for i, (tensor, wanted) in enumerate(zip(outs, made, strict=False)):
        if tensor is None:
            continue
        if is_dynamo_compiling() or tensor.data_ptr() != wanted.data_ptr() or not tensor.numel():
            tensor.copy_(wanted)
        elif not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
        returned[i] = tensor
    if isinstance(result, Tensor):
        return returned[0]
    return type(result)(*returned) if hasattr(result, "_fields") else tuple(returned)


def _results(result: Any) -> list[Tensor | None]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [t if isinstance(t, Tensor) else None for t in result]
    raise ArgumentError(f"out goes with functions that return tensors, not {type(result).__name__}")


def _check(outs: Sequence[Tensor | None], results: Sequence[Layout | None], device: torch.device | None) -> None:
    if len(outs) > len(results):
        raise ArgumentError(f"out has {len(outs)} tensors; expected {len(results)}, as the call has results")
    for i, (tensor, result) in enumerate(zip(outs, results, strict=False)):
        if tensor is None:
            continue
        name = _name(outs, i)
        if result is None:
            raise ArgumentError(f"{name} is a tensor; expected None, as the call makes no such result")
        shape, strides, dtype = result
        if tuple(tensor.shape) != shape:
            raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
        if tensor.dtype != dtype:
            raise ArgumentError(f"{name} has dtype {_short(tensor.dtype)}; expected {_short(dtype)}")
        got = [(n, s) for n, s in zip(shape, tensor.stride(), strict=True) if n > 1]
        if tensor.numel() and got != [(n, s) for n, s in zip(shape, strides, strict=True) if n > 1]:
            raise ArgumentError(f"{name} has strides {tensor.stride()}; expected {strides}")
        if device is not None and tensor.device != device:
            raise ArgumentError(f"{name} is on {tensor.device}; expected {device}")


def _check_overlap(outs: Sequence[Tensor | None], tensors: Sequence[tuple[str, Tensor]], over: Sequence[str]) -> None:
    there = [(_name(outs, i), t) for i, t in enumerate(outs) if t is not None]
    for i, (name, out) in enumerate(there):
        if out.numel() and overlaps_itself(out.shape, out.stride()):
            raise ArgumentError(f"{name} has strides {out.stride()}; expected memory of its own for every element")
        refuse_shared(name, out, [*tensors, *there[:i]], over)


def _tensors(value: Any, name: str = "") -> Any:
    """Yield names and tensors of all arguments, also those of lists and of objects with fields (``MoeIndex``)."""
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


def _key(value: Any) -> Any:
    """Return all that a call depends on but the contents of its tensors."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride(), value.device, value.data_ptr() & 15 if not value.is_meta else 0
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    if isinstance(value, (tuple, list)):
        return type(value), *map(_key, value)
    if hasattr(value, "__dataclass_fields__"):
        return type(value), *(_key(getattr(value, field, None)) for field in value.__dataclass_fields__)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _span(tensor: Tensor) -> int:
    """Return how many bytes lie between the first element and the end of the last one."""
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _seen_as(out: Tensor, layout: Layout) -> Tensor:
    """Return the memory of `out` with the shape, the strides and the dtype that an operator gives it."""
    shape, strides, dtype = layout
    if _layout(out) == layout:
        return out
    if out.dtype != dtype:
        out = out.as_strided((_span(out) // out.element_size(),), (1,)).view(dtype)
    return out.as_strided(shape, strides)


def _name(outs: Sequence[Any], i: int) -> str:
    return "out" if len(outs) == 1 else f"out[{i}]"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
