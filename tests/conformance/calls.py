"""Calls of every aten overload of the table: those that torch's samples (OpInfo) lead to, forward and backward,
in-place and ``out=`` forms derived from functional ones, and some written here for overloads that no sample reaches.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from conformance import differs, harness
from rtkernels.aten import table

_KEPT = 6  # calls of one overload that the samples of one operator contribute
_ELEMENTS = 1 << 12


class Call(NamedTuple):
    """Arguments of an overload; tensors must be copied before each use."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def overload_of(name: str) -> Any:
    """Return ``torch.ops.aten.<operator>.<overload>``."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


class _Recorder(TorchDispatchMode):
    def __init__(self, found: dict[str, list[Call]]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::").removesuffix(".default")
        if name in table.table():
            given = harness.tensors((args, kwargs))
            if all(type(t) is torch.Tensor and t.numel() <= _ELEMENTS for t in given):
                self.found.setdefault(name, []).append(Call(*harness.fresh(_detached((tuple(args), dict(kwargs))))))
        return func(*args, **kwargs)


def _detached(tree: Any) -> Any:
    return tree_map(lambda value: value.detach() if isinstance(value, torch.Tensor) else value, tree)


def _samples(op: Any, dtype: torch.dtype, device: str, grad: bool) -> list[Any]:
    given = list(op.sample_inputs(device, dtype, requires_grad=grad))
    given = given[:: -(-len(given) // 16)]
    return [each for sample in given for each in (sample, sample.noncontiguous())]


@cache
def _operators() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for op in harness.operators():
        found.setdefault(op.name, []).append(op)
    return found


@cache
def _recorded(opinfo: str, dtype: torch.dtype, device: str) -> dict[str, list[Call]]:
    """Return the calls that the samples of an OpInfo come to, by overload: at most `_KEPT` of each, spread evenly."""
    found: dict[str, list[Call]] = {}
    state = torch.random.get_rng_state()
    for op in _operators().get(opinfo, []):
        if dtype not in op.supported_dtypes(device):
            continue
        grad = op.supports_autograd and dtype.is_floating_point
        torch.manual_seed(0)
        try:
            samples = _samples(op, dtype, device, grad)
        except Exception:  # some cannot be generated for a dtype
            continue
        for sample in samples:
            try:
                with _Recorder(found):
                    harness.run(op, sample, grad)
            except Exception:  # what torch itself refuses
                continue
    torch.random.set_rng_state(state)
    return {name: calls[:: -(-len(calls) // _KEPT)] for name, calls in found.items()}


def calls_of(name: str, dtype: torch.dtype, device: str) -> list[Call]:
    """Return calls of one overload for tensors of a dtype; empty if torch has none for it."""
    if name in WRITTEN:
        return [Call(tuple(call[0]), dict(call[1])) for call in WRITTEN[name](dtype, device)]
    row = table.table()[name]
    calls = [call for opinfo in row.opinfo for call in _recorded(opinfo, dtype, device).get(name, [])]
    calls += [call for other, derive in _relatives(name) for call in map(derive, _found(other, dtype, device))]
    given = [call for call in calls if call is not None]
    return random.Random(name).sample(given, min(len(given), 2 * _KEPT))


NUMBERS: tuple[Any, ...] = (-1, 0, 2, 300, True, 2.5, -0.0, 1e30, 1e-42, float("inf"), float("nan"))


def with_numbers(name: str, calls: list[Call]) -> list[Call]:
    """Return pointwise calls with other numbers in the places of numbers and of second tensors, and all of them 0-d."""
    if table.table()[name].family != "ew" or not calls:
        return []
    arguments = table.schema_of(name).arguments
    call = max(calls, key=lambda call: sum(t.numel() for t in harness.tensors(tuple(call))))
    results: list[Call] = []
    for i, argument in enumerate(arguments[: len(call.args)]):
        number = "number" in str(argument.type)
        if not number and not (i == 1 and str(argument.type) == "Tensor" and torch._C._should_allow_numbers_as_tensors(
            name.partition(".")[0].rstrip("_")
        )):  # fmt: skip
            continue
        for value in NUMBERS:
            if value in (0, 1e-42) and type(value) is not bool and table.table()[name].operator in differs.DIVIDES:
                continue  # integers; and CUDA kernels multiply by the reciprocal
            results.append(Call((*call.args[:i], value, *call.args[i + 1 :]), call.kwargs))
    for other in (call, *results[:4]):
        leaves = harness.tensors(tuple(other))
        if leaves and all(t.numel() for t in leaves):
            results.append(Call(*tree_map(lambda v: _first(v) if isinstance(v, torch.Tensor) else v, tuple(other))))
    return results


def _first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1)[0].clone()


def _found(name: str, dtype: torch.dtype, device: str) -> list[Call]:
    row = table.table().get(name)
    return [call for opinfo in (row.opinfo if row else ()) for call in _recorded(opinfo, dtype, device).get(name, [])]


def _relatives(name: str) -> list[tuple[str, Callable[[Call], Call | None]]]:
    """Return other overloads of the same operator whose calls become calls of this one."""
    schema = table.schema_of(name)
    row = table.table()[name]
    wanted = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]
    outs = [a.name for a in schema.arguments if a.is_out]
    found: list[tuple[str, Callable[[Call], Call | None]]] = []
    for other in table.table():
        if other == name or table.table()[other].operator != row.operator:
            continue
        of = table.schema_of(other)
        if any(a.is_out for a in of.arguments):
            continue
        listed = [(a.name, str(a.type)) for a in of.arguments]
        if sorted(listed) == sorted(wanted):
            found.append((other, _with_out(other, outs) if outs else lambda call: call))
        elif [n for n, _ in listed] == [n for n, _ in wanted]:
            found.append((other, _numbers_for_tensors(listed, wanted, other, outs)))
    return found


def _with_out(other: str, outs: list[str]) -> Callable[[Call], Call | None]:
    def derive(call: Call) -> Call | None:
        try:
            result = overload_of(other)(*call.args, **call.kwargs)
        except Exception:
            return None
        result = result if isinstance(result, (tuple, list)) else (result,)
        return Call(call.args, {**call.kwargs, **{n: torch.empty_like(m) for n, m in zip(outs, result, strict=True)}})

    return derive


def _numbers_for_tensors(listed: Any, wanted: Any, other: str, outs: list[str]) -> Callable[[Call], Call | None]:
    """Return a function that replaces tensors by numbers where this overload has numbers, and vice versa."""

    def derive(call: Call) -> Call | None:
        values = list(call.args)
        for i, ((_, have), (_, want)) in enumerate(zip(listed, wanted, strict=True)):
            if have == want or i >= len(values):
                continue
            if "number" in want and isinstance(values[i], torch.Tensor) and values[i].numel():
                values[i] = values[i].reshape(-1)[0].item()
            elif want == "Tensor" and isinstance(values[i], (int, float)) and isinstance(values[0], torch.Tensor):
                values[i] = torch.ones_like(values[0], memory_format=torch.contiguous_format)
            else:
                return None
        changed = Call(tuple(values), call.kwargs)
        if not outs:
            return changed
        try:
            result = getattr(torch.ops.aten, other.partition(".")[0])(*values, **call.kwargs)
        except Exception:
            return None
        return Call(changed.args, {**call.kwargs, outs[0]: torch.empty_like(result)})

    return derive


# ---- overloads that no sample reaches -------------------------------------------------------------------------------

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Written = list[tuple[tuple[Any, ...], dict[str, Any]]]


def _data(dtype: torch.dtype, device: str, *shape: int) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape, device=device) > 0.5
    return (torch.rand(shape, device=device) * 8 - 4).to(dtype)


def _floats_only(make: Callable[[torch.dtype, str], Written]) -> Callable[[torch.dtype, str], Written]:
    return lambda dtype, device: make(dtype, device) if dtype in _FLOATS else []


def _row_norm(backward: bool) -> Callable[[torch.dtype, str], Written]:
    def make(dtype: torch.dtype, device: str) -> Written:
        results: Written = []
        for rows, cols in ((5, 33), (3, 64), (2, 1024)):
            x, w = _data(dtype, device, rows, cols), _data(dtype, device, cols)
            rstd = torch.rand(rows, 1, device=device) + 0.5
            for weight in (w, None):
                if backward:
                    results.append(((_data(dtype, device, rows, cols), x, [cols], rstd, weight, [True, True]), {}))
                else:
                    results.append(((x, [cols], weight, 1e-5), {}))
        return results

    return make


def _weight_norm(backward: bool) -> Callable[[torch.dtype, str], Written]:
    def make(dtype: torch.dtype, device: str) -> Written:
        v, g = _data(dtype, device, 4, 35), _data(dtype, device, 4, 1)
        norms = torch.rand(4, 1, device=device) + 0.5
        return [((_data(dtype, device, 4, 35), v, g, norms, 0), {})] if backward else [((v, g, 0), {})]

    return make


def _fill(**numbers: float) -> Callable[[torch.dtype, str], Written]:
    return lambda dtype, device: [((_data(dtype, device, *shape), *numbers.values()), {}) for shape in ((7,), (3, 40))]


def _factory(dtype: torch.dtype, device: str) -> Written:
    return [(([5, 7],), {"dtype": dtype, "device": torch.device(device)})]


def _normal(mean: bool, std: bool) -> Callable[[torch.dtype, str], Written]:
    def make(dtype: torch.dtype, device: str) -> Written:
        spread = _data(dtype, device, 3, 9).abs()
        return [((_data(dtype, device, 3, 9) if mean else 0.5, spread if std else 0.25), {})]

    return make


def _close(dtype: torch.dtype, device: str) -> Written:
    x = _data(dtype, device, 3, 9)
    return [((x, x + x * 1e-3), {"equal_nan": equal}) for equal in (False, True)]


def _put(dtype: torch.dtype, device: str) -> Written:
    index = torch.tensor([2, 0, 1, -1], device=device)
    return [((_data(dtype, device, 5, 9), [index], _data(dtype, device, 4, 9), False, True), {})]


def _scatter(number: bool) -> Callable[[torch.dtype, str], Written]:
    def make(dtype: torch.dtype, device: str) -> Written:
        index = torch.tensor([[3, 0, 1], [4, 2, 0]], device=device)
        results: Written = []
        for x, dim in ((_data(dtype, device, 5, 3), 0), (_data(dtype, device, 6, 2).t(), 1)):
            src = 2 if number else _data(dtype, device, *index.shape)
            results.append(((x, dim, index, src), {}))
        return results

    return make


def _assign(dtype: torch.dtype, device: str) -> Written:
    return [((x, indices, values, False), {}) for (x, indices, values, *_), _ in _put(dtype, device)]


def _isin(number_first: bool) -> Callable[[torch.dtype, str], Written]:
    def make(dtype: torch.dtype, device: str) -> Written:
        given = [(_data(dtype, device, *shape), 2) for shape in ((7,), (3, 40), ())]
        return [(pair[::-1] if number_first else pair, {"invert": i}) for pair in given for i in (False, True)]

    return make


WRITTEN: dict[str, Callable[[torch.dtype, str], Written]] = {
    "isfinite": lambda t, d: [((_data(t, d, *shape),), {}) for shape in ((7,), (3, 40))],
    "isclose": _floats_only(_close),
    "slice_scatter": lambda t, d: [((_data(t, d, 6, 9), _data(t, d, 3, 9), 0, 1, 4), {})],
    "_index_put_impl_": _put,
    **dict.fromkeys(("scatter.src", "scatter_.src"), _scatter(False)),
    **dict.fromkeys(("scatter.value", "scatter_.value"), _scatter(True)),
    **dict.fromkeys(("index_put", "index_put_"), _assign),
    "isin.Tensor_Scalar": _isin(False),
    "isin.Scalar_Tensor": _isin(True),
    "gelu_": _floats_only(lambda t, d: [((_data(t, d, 3, 9),), {"approximate": a}) for a in ("none", "tanh")]),
    "native_dropout_backward": _floats_only(
        lambda t, d: [((_data(t, d, 3, 9), _data(torch.bool, d, 3, 9), 1.25), {})]
    ),
    "sum.out": lambda t, d: [((_data(t, d, 3, 9),), {"out": torch.ones(9, device=d).to(t).sum()})],
    "sum.IntList_out": lambda t, d: [
        ((_data(t, d, 3, 9), [1]), {"out": torch.ones(3, 2, device=d).to(t).sum(1)})
    ],
    "cumsum.out": lambda t, d: [((_data(t, d, 3, 9), 1), {"out": torch.ones(3, 9, device=d).to(t).cumsum(1)})],
    "sort.stable": lambda t, d: [
        ((_data(t, d, 3, 40),), {"stable": True, "dim": dim, "descending": down})
        for dim in (0, 1) for down in (False, True)
    ],
    "topk": lambda t, d: [((_data(t, d, 3, 40), 1, 1, down, True), {}) for down in (False, True)],  # ties: any index
    "randperm": lambda t, d: [((9,), {"device": torch.device(d)})] if t == torch.float32 else [],
    "_fused_rms_norm": _floats_only(_row_norm(False)),
    "_fused_rms_norm_backward": _floats_only(_row_norm(True)),
    "_weight_norm_interface": _floats_only(_weight_norm(False)),
    "_weight_norm_interface_backward": _floats_only(_weight_norm(True)),
    "uniform_": _floats_only(_fill(low=-1.0, high=2.0)),
    "normal_": _floats_only(_fill(mean=0.5, std=2.0)),
    "exponential_": _floats_only(_fill(rate=1.5)),
    "bernoulli_.float": _floats_only(_fill(p=0.25)),
    "rand": _floats_only(_factory),
    "randn": _floats_only(_factory),
    "rand_like": _floats_only(_fill()),
    "randn_like": _floats_only(_fill()),
    "native_dropout": _floats_only(lambda t, d: [((_data(t, d, 3, 40), p, True), {}) for p in (0.25, 1.0)]),
    "normal.Tensor_Tensor": _floats_only(_normal(True, True)),
    "normal.Tensor_float": _floats_only(_normal(True, False)),
    "normal.float_Tensor": _floats_only(_normal(False, True)),
}  # fmt: skip
