"""Overloads on special values (infinities, NaN, zeros of both signs, denormals, the largest), called three times with
other values each, compared with torch's own kernels: results, layouts, what is written, aliases and version counters.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

import rtkernels
from conformance import differs, harness
from conformance.calls import Call, overload_of
from rtkernels.aten import table

_FIXED = frozenset("index indices target mask condition repeats sections rstd mean save_mean save_invstd total_weight "
                   "saved_norms std prob buffer test_elements sorter".split())  # fmt: skip
_RTOL = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}  # roundings of two steps
POINTWISE = ("ew", "copy")


class Outcome(NamedTuple):
    """The outcome of a call."""

    result: list[Any]  # leaves; tensors among them
    arguments: list[torch.Tensor]  # after the call
    versions: list[int]  # increments of the arguments' counters, then those of the results
    aliases: list[tuple[int, int]]  # results that share memory with arguments
    error: str


# ---- values ---------------------------------------------------------------------------------------------------------


def special(dtype: torch.dtype, kind: str) -> list[float]:
    """Return the values of a kind: "mixed" has all, "calm" none that overflow, "large" positive ones only."""
    if dtype == torch.bool:
        return [0, 1]
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return [0, 1, 2, 3, 7, info.max] + ([-1, -5] if info.min else []) + ([info.min] if kind == "mixed" else [])
    info, inf, nan = torch.finfo(dtype), float("inf"), float("nan")
    if kind == "large":
        return [info.max, 1.0, 0.25, info.tiny]
    values = [inf, -inf, nan, 0.0, -0.0, 0.5, -1.0, 1.0, -0.25, 3.0, 30.0]
    return values + [info.max, -info.max, info.tiny, info.tiny * info.eps] * (kind == "mixed")


def with_values(name: str, call: Call, kind: str, seed: int) -> Call:
    """Return a call with other values in its tensors, half of them special ones; indices and masks stay valid."""
    names = [argument.name for argument in table.schema_of(name).arguments]
    generator = torch.Generator().manual_seed(seed)

    def changed(argument: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.numel():
            return value
        fresh = harness.fresh(value)
        if argument in _FIXED or (argument.startswith("indices") and not value.is_floating_point()):
            return fresh
        if argument == "out":
            return _fill(fresh, torch.full(value.shape, 77, device=value.device))  # must be overwritten
        if value.dtype not in harness.DTYPES:
            return fresh
        if not kind and table.table()[name].operator not in differs.DIVIDES:
            return _fill(fresh, value.reshape(-1)[torch.randperm(value.numel(), generator=generator)].view(value.shape))
        listed = special(value.dtype, kind)
        if table.table()[name].operator in differs.DIVIDES and not value.is_floating_point():
            fresh, listed = _fill(fresh, value.clamp(1, 3)), [n for n in listed if n not in (0, min(listed))]
            value = fresh
        given = torch.tensor(listed, dtype=torch.float64 if value.is_floating_point() else None)
        picked = given.to(value.dtype)[torch.randint(len(given), value.shape, generator=generator)].to(value.device)
        calm = torch.rand(value.shape, generator=generator).to(value.device) < 0.5
        return _fill(fresh, torch.where(calm, value, picked))

    def each(argument: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
            return type(value)(changed(argument, item) for item in value)
        return changed(argument, value)

    args = tuple(each(n, value) for n, value in zip(names, call.args, strict=False))
    if name == "log_sigmoid_backward" and args[2].numel():  # the CPU's forward keeps it
        args = (*args[:2], args[1].abs().neg().exp())
    return Call(args, {n: each(n, value) for n, value in call.kwargs.items()})


def _fill(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(RuntimeError):  # expanded: elements share memory
        tensor.copy_(values)
    return tensor


# ---- calls ----------------------------------------------------------------------------------------------------------


def run(name: str, call: Call) -> Outcome:
    """Call an overload with copies of the arguments."""
    leaves, spec = tree_flatten(tuple(call))
    copies: dict[int, Any] = {id(leaf): harness.fresh(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    given = [copies.get(id(leaf), leaf) for leaf in leaves]
    args, kwargs = tree_unflatten(given, spec)
    tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
    before = [tensor._version for tensor in tensors]
    try:
        result = overload_of(name)(*args, **kwargs)
    except Exception as error:  # compared with torch's
        return Outcome([], tensors, [], [], type(error).__name__)
    results = tree_flatten(result)[0]
    outputs = [leaf for leaf in results if isinstance(leaf, torch.Tensor)]
    versions = [tensor._version - old for tensor, old in zip(tensors, before, strict=True)]
    versions += [tensor._version for tensor in outputs if not any(tensor is argument for argument in tensors)]
    aliases = [
        (i, j) for i, one in enumerate(outputs) for j, argument in enumerate(tensors)
        if one is argument or (one.numel() and one.untyped_storage()._cdata == argument.untyped_storage()._cdata)
    ]  # fmt: skip
    return Outcome(results, tensors, versions, aliases, "")


@contextlib.contextmanager
def taken(name: str, device: str) -> Iterator[None]:
    """Run the block with all overloads of an operator taken, whatever the sizes."""
    with harness.overridden(device, [table.table()[name].operator]):
        yield


def check(name: str, dtype: torch.dtype, device: str, calls: list[Call], *, graphs: bool = False) -> list[str]:
    """Return what differs from torch in calls of an overload, a line each."""
    row = table.table()[name]
    seed = zlib.crc32(f"{name} {dtype}".encode())
    failures: list[str] = []
    for number, call in enumerate(calls):
        kinds = _kinds(name, row.family, device)
        rounds = [with_values(name, call, kind, seed + 7 * number + i) for i, kind in enumerate(kinds)]
        want = [run(name, given) for given in rounds]
        with taken(name, device):
            got = [run(name, given) for given in rounds]
            kept = [_snapshot(outcome) for outcome in got]  # a later call must not change an earlier result
            again = [run(name, given) for given in rounds]
        for i, kind in enumerate(kinds):
            for one in (kept[i], got[i], again[i]):
                if text := difference(name, one, want[i], rounds[i], device):
                    failures.append(f"{name} {str(dtype)[6:]} {kind or 'plain'} {_shapes(call)}: {text}")
                    break
        if graphs and not any(outcome.error for outcome in want):
            text = _replayed(name, rounds, want, device)
            failures += [f"{name} {str(dtype)[6:]} graph {_shapes(call)}: {text}"] if text else []
    return failures


def _kinds(name: str, family: str, device: str) -> tuple[str, ...]:
    """Return the kinds of values of three calls. Sums of opposite large numbers depend on their order."""
    if name in differs.PLAIN or (device == "cpu" and name in differs.PLAIN_ON_THE_CPU):
        return "", "", ""
    if name in differs.CALM or (device == "cpu" and name in differs.CALM_ON_THE_CPU):
        return "calm", "", "calm"
    return ("mixed", "", "mixed") if family in POINTWISE else ("calm", "", "large")


def _snapshot(outcome: Outcome) -> Outcome:
    copied = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in outcome.result]
    return outcome._replace(result=[
        torch.empty_strided(b.shape, b.stride(), dtype=b.dtype, device=b.device).copy_(b)
        if isinstance(b, torch.Tensor) and b.numel() and a.stride() != b.stride() else a
        for a, b in zip(copied, outcome.result, strict=True)
    ])  # fmt: skip


def _shapes(call: Call) -> str:
    """Return the arguments in readable form: shapes, strides of non-contiguous tensors, numbers."""

    def text(value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return str(value)
        return f"{tuple(value.shape)}" + ("" if value.is_contiguous() else f"s{value.stride()}")

    return " ".join(map(text, tree_flatten(tuple(call))[0]))


# ---- comparison -----------------------------------------------------------------------------------------------------


def difference(name: str, got: Outcome, want: Outcome, call: Call, device: str) -> str:
    """Return how two outcomes differ; empty if they do not."""
    if got.error != want.error:
        return f"raises {got.error or 'nothing'}, torch {want.error or 'nothing'}"
    if want.error:
        return ""
    if got.versions != want.versions and name not in differs.VERSIONS:
        return f"versions {got.versions}, torch's {want.versions}"
    if got.aliases != want.aliases:
        return f"aliases {got.aliases}, torch's {want.aliases}"
    if name in differs.TIES and (text := _not_named(name, got, call)):
        return text
    scale = _magnitude(call) if name.partition(".")[0].rstrip("_") in differs.CANCELS else None
    for place, ours, theirs in (("result", got.result, want.result), ("argument", got.arguments, want.arguments)):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if place == "result" and i == 1 and name in differs.TOTAL_WEIGHT and call.args[3] == 0:
                continue
            if text := _unlike(name, a, b, scale, device):
                return f"{place} {i}: {text}"
    return ""


def _not_named(name: str, got: Outcome, call: Call) -> str:
    """Return what is wrong with indices that may name any of equal elements; empty if each names its own."""
    values, indices = got.result
    given = dict(zip((a.name for a in table.schema_of(name).arguments), call.args, strict=False)) | call.kwargs
    x, dim = given["self"], given.get("dim", -1)
    if not x.dim() or not indices.numel():
        return "" if not indices.any() else "the index of a number is not 0"
    if ((indices < 0) | (indices >= x.shape[dim])).any():
        return f"result 1: indices from {indices.min()} to {indices.max()}, of {x.shape[dim]} elements"
    named, ordered = x.gather(dim, indices), indices.sort(dim).values
    other = (named != values) & ~(named.isnan() & values.isnan())
    if values.is_floating_point():
        other |= (named == 0) & (named.signbit() != values.signbit())
    if other.any():
        return f"result 1: {int(other.sum())} of {other.numel()} indices name other elements"
    return "result 1: an index occurs twice" if (ordered.diff(dim=dim) == 0).any() else ""


def _magnitude(call: Call) -> torch.Tensor | None:
    """Return the largest finite operand at each position, because sums that cancel are no more exact than that."""
    floats = [t.double().abs().nan_to_num(0, 0, 0) for t in harness.tensors(tuple(call)) if t.is_floating_point()]
    floats = [t for t in floats if t.numel()]
    try:
        return torch.stack(torch.broadcast_tensors(*floats)).amax(0) if floats else None
    except RuntimeError:
        return max(t.max() for t in floats)


def _unlike(name: str, a: Any, b: Any, scale: torch.Tensor | None, device: str) -> str:
    if not isinstance(b, torch.Tensor):
        return "" if a == b else f"{a}, torch's {b}"
    if not isinstance(a, torch.Tensor) or (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return f"{getattr(a, 'dtype', a)} {tuple(a.shape)}, torch's {b.dtype} {tuple(b.shape)}"
    if a.stride() != b.stride() and b.numel() > 1:
        return f"strides {a.stride()}, torch's {b.stride()}"
    if not b.numel():
        return ""
    if name in differs.RANDOM or (name in differs.TIES and b.dtype == torch.int64 and a.shape == b.shape):
        return ""
    if b.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not b.is_floating_point():
        wrong = a != b
    else:
        info = torch.finfo(b.dtype)
        finite = a.isfinite() & b.isfinite()
        x, y = a.double(), b.double()
        allowed = _RTOL.get(b.dtype, 0.0) * differs.LOOSER.get(name, 1.0) * y.abs() + 2 * info.tiny * info.eps
        if table.table()[name].family not in POINTWISE or (device == "cpu" and name in differs.ROUGH_ON_THE_CPU):
            allowed = allowed + _RTOL.get(b.dtype, 0.0) * 8
        if scale is not None:
            allowed = allowed + 4 * _RTOL.get(b.dtype, 0.0) * (scale if scale.shape == y.shape else scale.max())
        if name in differs.STATISTICS:
            b = torch.where(a.isfinite() | b.isfinite(), b, a)  # infinite or NaN
        wrong = torch.where(finite, (x - y).abs() > allowed, (a != b) & ~(a.isnan() & b.isnan()))
        of_any_sign = differs.SIGN_OF_ZERO | differs.TIES
        if name not in of_any_sign and not (device == "cpu" and name in differs.SIGN_OF_ZERO_ON_THE_CPU):
            wrong |= (a == 0) & (b == 0) & (a.signbit() != b.signbit())
    if not wrong.any():
        return ""
    at = wrong.reshape(-1).nonzero()[0, 0]
    first, torchs = (t.reshape(-1)[at].item() for t in (a, b))
    return f"{int(wrong.sum())} of {wrong.numel()} elements, {first}, torch's {torchs}"


# ---- graphs ---------------------------------------------------------------------------------------------------------


def _replayed(name: str, rounds: list[Call], want: list[Outcome], device: str) -> str:
    """Capture a call in a CUDA graph, replay it with other values in its arguments, and compare."""
    if name in differs.NOT_CAPTURED or any(t.device.type != device for t in harness.tensors(tuple(rounds[0]))):
        return ""  # the host reads numbers in its own memory, torch's kernels too, while the graph is captured
    call = Call(*harness.fresh(tuple(rounds[0])))
    try:
        with taken(name, device):
            graph, results = _captured(name, call, rounds[0])
    except Exception as error:
        try:
            _captured(name, Call(*harness.fresh(tuple(rounds[0]))), rounds[0])
        except Exception:  # so does torch
            return ""
        return f"capture raises {type(error).__name__}: {str(error)[:80]}"
    for i in (1, 2):
        _set(call, rounds[i])
        graph.replay()
        torch.cuda.synchronize()
        got = want[i]._replace(result=results, arguments=harness.tensors(tuple(call)))
        if text := difference(name, got, want[i], rounds[i], device):
            return f"replay {i}: {text}"
    return ""


def _captured(name: str, call: Call, values: Call) -> tuple[Any, list[Any]]:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())  # which the arguments are still being written on
    with torch.cuda.stream(stream):
        overload_of(name)(*call.args, **call.kwargs)  # loads kernels
        _set(call, values)
        with torch.cuda.graph(graph, stream=stream):
            result = overload_of(name)(*call.args, **call.kwargs)
    torch.cuda.synchronize()
    return graph, tree_flatten(result)[0]


def _set(call: Call, values: Call) -> None:
    for tensor, value in zip(harness.tensors(tuple(call)), harness.tensors(tuple(values)), strict=True):
        _fill(tensor, value)


def emulate() -> Any:
    """Keep one emulation for several checks."""
    return rtkernels.emulate("sm_80")
