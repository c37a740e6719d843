"""What is changed between two calls, by the items of ``depends.ITEMS``."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import rtkernels
from contracts.depends.calls import Call
from contracts.depends.device import State, capture, on_stream
from contracts.fuzz.calls import leaves, rebuilt
from contracts.fuzz.memory import Arena, Layout, dense, layouts, placed
from rtkernels.runtime.launch.plans import Plans

Given = dict[str, Any]
Run = Callable[[Callable[[], Any], list[Any]], Any]  # makes a call; adds what it sees to the list, "wrong" if that is


def plainly(call: Callable[[], Any], seen: list[Any]) -> Any:
    """Make a call without gradients."""
    with torch.no_grad():
        return call()


class Way(NamedTuple):
    """How a call is made: with new tensors each time."""

    make: Callable[[], Given]
    run: Run = plainly


class Change(NamedTuple):
    """One change.

    Attributes:
        item: Of ``depends.ITEMS``.
        name: What is changed.
        before: The calls that are recorded.
        after: The call that must not be taken for one of them.
        other: The call after the change is no replay of one before, even if results are the same: "always", or where
            "torch" computes a part of the call.
        new_plans: Plans of operators, whose keys take 0.0 for -0.0 and 1 for True, are made anew before each call.
    """

    item: str
    name: str
    before: Way
    after: Way
    other: str = ""
    new_plans: bool = False


# ---- arguments ------------------------------------------------------------------------------------------------------


def maker(given: Given, change: Callable[[list[Tensor]], list[Tensor]] | None = None, device: str = "cuda") -> Any:
    """Return a function that gives arguments with tensors of their own, which `change` may replace by others."""
    tensors = [value for _, value in leaves(given, "") if isinstance(value, Tensor)]

    def make() -> Given:
        made = [_copy(t, device) for t in tensors]
        return rebuilt(given, iter(made if change is None else change(made)))

    return make


def _copy(t: Tensor, device: str) -> Tensor:
    if 0 in t.stride() and t.numel():  # torch does not write to such a tensor
        span = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
        return t.as_strided((span,), (1,)).to(device, copy=True).as_strided(t.shape, t.stride())
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t)


def _replaced(i: int, how: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    return lambda made: [how(t) if j == i else t for j, t in enumerate(made)]


def _laid_out(layout: Layout) -> Callable[[Tensor], Tensor]:
    return lambda t: placed(t.cpu(), layout, "cuda")[0]


def _floating(t: Tensor) -> bool:
    return t.is_floating_point() and t.itemsize > 1


def tensors(call: Call, rng: random.Random) -> Iterator[Change]:
    """Values, alignment, strides, dtype, shape, device, kind of tensor; lazy negatives; aliasing."""
    plain = Way(maker(call.given))

    def after(item: str, name: str, change: Any, device: str = "cuda") -> Change:
        return Change(item, name, plain, Way(maker(call.given, change, device)))

    yield after("tensors", "values", lambda made: [(t * 0.5 + 1).to(t.dtype) if _floating(t) else t for t in made])
    yield after("tensors", "cpu", None, "cpu")
    yield after("tensors", "dtype", lambda made: [t.bfloat16() if t.dtype == torch.float32 else t for t in made])
    yield after("tensors", "fewer rows", lambda made: [t[:-1] if t.dim() and t.shape[0] > 1 else t for t in made])
    yield after("tensors", "parameters", lambda made: [
        torch.nn.Parameter(t, requires_grad=False) if _floating(t) else t for t in made
    ])  # fmt: skip
    for i, (name, value) in enumerate(call.tensors):
        found = {how.name: how for how in layouts(value) if how.strides != value.stride() or how.offset or how.negated}
        yield after("tensors", f"{name} on another device", _replaced(i, Tensor.cpu))
        for kind in ("off", "neg", "step", "swap", "expand"):
            names = [key for key in found if key.startswith(kind)]
            if names:
                how = found[rng.choice(names)]
                item = "lazy negatives" if kind == "neg" else "tensors"
                yield after(item, f"{name} {how.name}", _replaced(i, _laid_out(how)))
    yield from _aliases(call, plain)


def _aliases(call: Call, plain: Way) -> Iterator[Change]:
    found = call.tensors
    pairs = [
        (i, j) for i in range(len(found)) for j in range(i + 1, len(found))
        if found[i][1].dtype == found[j][1].dtype and found[i][1].numel() and found[j][1].numel()
    ]  # fmt: skip
    for i, j in pairs:
        names = f"{found[i][0]} and {found[j][0]}"
        if found[i][1].shape == found[j][1].shape and found[i][1].stride() == found[j][1].stride():
            same = Way(maker(call.given, lambda made, i=i, j=j: [made[i] if k == j else t for k, t in enumerate(made)]))
            view = Way(maker(
                call.given, lambda made, i=i, j=j: [made[i].view(t.shape) if k == j else t for k, t in enumerate(made)]
            ))  # fmt: skip
            yield Change("aliasing", f"{names} are one", plain, same)
            yield Change("aliasing", f"{names} are no longer one", same, plain)
            yield Change("aliasing", f"{names} are one memory", plain, view)
        yield Change("aliasing", f"{names} overlap", plain, Way(maker(call.given, _overlapping(i, j))))


def _overlapping(i: int, j: int, first: int = 16) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return what puts tensor `j` over a part of tensor `i`."""

    def change(made: list[Tensor]) -> list[Tensor]:
        a, b = made[i], made[j]
        arena = Arena((a.numel() + b.numel()) * a.itemsize + first, "cuda")
        over = {k: arena.at(at, t.shape, dense(t.shape), t.dtype) for k, t, at in ((i, a, 0), (j, b, first))}
        for k, t in over.items():
            t.copy_(made[k])
        return [over.get(k, t) for k, t in enumerate(made)]

    return change


def out(call: Call) -> Iterator[Change]:
    """`out`: given or not, an input, over a part of one; what a replay with it keeps."""
    if call.aten or "out" not in call.given or call.given["out"] is not None:
        return
    with torch.no_grad():
        results = call.call(maker(call.given)())
    single = isinstance(results, Tensor)
    first = results if single else next((t for t in results if isinstance(t, Tensor)), None)
    if first is None or hasattr(results, "__dataclass_fields__"):
        return
    wanted: Any = first if single else tuple(t if isinstance(t, Tensor) else None for t in results)
    for given in (wanted, first):
        try:
            with torch.no_grad():
                call.call(maker({**call.given, "out": given})())
        except Exception:
            continue
        wanted = given
        break
    else:
        return
    given = {**call.given, "out": torch.empty_strided(first.shape, first.stride(), dtype=first.dtype)}
    given["out"] = rebuilt(wanted, (t.cpu() for _, t in leaves(wanted, "") if isinstance(t, Tensor)))
    plain, with_out = Way(maker(call.given)), Way(maker(given))
    names = [name for name, value in leaves(given, "") if isinstance(value, Tensor)]
    at = next(i for i, name in enumerate(names) if name.startswith("out"))
    yield Change("aliasing", "out is given", plain, with_out)
    yield Change("aliasing", "out is no longer given", with_out, plain)
    yield Change("tensors", "out off", with_out, Way(maker(given, _replaced(at, _laid_out(
        Layout("off", dense(first.shape), 1)
    )))))  # fmt: skip
    for i, (name, value) in enumerate(call.tensors):
        i = next(k for k, key in enumerate(names) if key == name)
        if value.dtype == first.dtype and value.numel():
            yield Change("aliasing", f"out overlaps {name}", with_out, Way(maker(given, _overlapping(i, at))))
            if value.shape == first.shape:
                over = Way(maker(given, lambda made, i=i: [made[i] if k == at else t for k, t in enumerate(made)]))
                yield Change("aliasing", f"out is {name}", with_out, over)
    for item, run in (("threads", _in_a_thread), ("stream", _on_another_stream), ("capture", _captured)):
        yield Change(item, f"{item}, with out", with_out, with_out._replace(run=run))


def _are_equal(a: Any, b: Any) -> bool:
    return isinstance(a, (int, float)) and isinstance(b, (int, float)) and a == b


# torch's kernels for the CPU, which the stand-in falls back to, write out of bounds where g does not fit dim.
_UNCHECKED_BY_TORCH = {("aten _weight_norm_interface", "dim"), ("aten _weight_norm_interface_backward", "dim")}


def options(call: Call, rng: random.Random) -> Iterator[Change]:
    """Arguments that are no tensors: their types, signs of zeros, values; lists and tuples; None."""
    make = maker(call.given)
    always = "" if call.aten else "always"  # the dispatcher makes numbers of their types

    def with_value(name: str, value: Any) -> Way:
        return Way(lambda: {**make(), name: value})

    for name, value in call.given.items():
        if name == "out" or (call.name, name) in _UNCHECKED_BY_TORCH:
            continue
        kind = type(value)
        pairs: list[tuple[Any, Any]] = []
        if kind is float or (kind is int and call.aten):
            pairs = [(0.0, -0.0), (1.0, 1), (1, True), (value, value + 1), (0, False)]
        elif kind is int:
            pairs = [(value, float(value)), (value, value + 1), (1, True), (0, False), (0, 0.0)]
        elif kind is bool:
            pairs = [(value, not value), (value, int(value))]
        elif value is None:
            pairs = [(None, t.cuda()) for t in [rng.choice(call.tensors)[1]] if call.tensors] + [(None, 1.0)]
        elif isinstance(value, torch.dtype):
            pairs = [(value, torch.float16), (value, None)]
        for first, second in pairs:
            values = with_value(name, first), with_value(name, second)
            yield Change(
                "other arguments", f"{name} {first!r:.20} {second!r:.20}", *values, always, _are_equal(first, second)
            )
        if kind in (list, tuple):
            other = tuple if kind is list else list
            after = Way(lambda name=name, other=other: (made := make()) | {name: other(made[name])})
            yield Change("other arguments", f"{name} as a {other.__name__}", Way(make), after, always)
        if isinstance(value, Tensor) and name != next(iter(call.given)):
            yield Change("other arguments", f"{name} None", Way(make), with_value(name, None))


# ---- what is around a call ------------------------------------------------------------------------------------------


def _inside(*contexts: Callable[[], Any]) -> Run:
    def run(call: Callable[[], Any], seen: list[Any]) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for context in contexts:
                stack.enter_context(context())
            return call()

    return run


@contextlib.contextmanager
def _set(get: Callable[[], Any], change: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = get()
    change(value)
    try:
        yield
    finally:
        change(before)


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _in_a_thread(call: Callable[[], Any], seen: list[Any]) -> Any:
    made: list[Any] = []

    def run() -> None:
        try:
            made.append(plainly(call, seen))
        except Exception as error:
            made.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def _on_another_stream(call: Callable[[], Any], seen: list[Any]) -> Any:
    State.streams.clear()
    with on_stream(7):
        result = plainly(call, seen)
    if State.streams - {7}:
        seen.append(("wrong", "launches go to another stream than the current one"))
    return result


def _captured(call: Callable[[], Any], seen: list[Any]) -> Any:
    with capture():
        return plainly(call, seen)


class _Seen(TorchDispatchMode):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


def _under_a_mode(call: Callable[[], Any], seen: list[Any]) -> Any:
    with torch.no_grad(), _Seen(seen):
        return call()


def _with_new_plans(call: Callable[[], Any], seen: list[Any]) -> Any:
    Plans.forget_all()
    State.plans = 0
    result = plainly(call, seen)
    seen.append(("plans", bool(State.plans)))
    return result


def _for_two_targets(call: Callable[[], Any], seen: list[Any]) -> Any:
    Plans.forget_all()
    State.plans = 0
    with rtkernels.emulate("sm_80"):
        plainly(call, seen)
    made, State.plans = State.plans, 0
    with rtkernels.emulate("sm_90"):
        result = plainly(call, seen)
    if made and not State.plans:
        seen.append(("wrong", "plans of another target are used"))
    return result


def _with_gradients(call: Callable[[], Any], seen: list[Any]) -> Any:
    with torch.enable_grad():
        return call()


def surroundings(call: Call) -> Iterator[Change]:
    """What is around a call: modes, dtypes, threads, streams, the environment, plans."""
    make = maker(call.given)
    plain = Way(make)
    always = "" if call.aten else "always"  # what an override does is below that

    def around(item: str, name: str, run: Run, before: Run = plainly, other: str = "") -> Change:
        return Change(item, name, Way(make, before), Way(make, run), other)

    half, bfloat, cpu = (
        _inside(lambda kind=kind, dtype=dtype: torch.autocast(kind, dtype=dtype))
        for kind, dtype in (("cuda", torch.float16), ("cuda", torch.bfloat16), ("cpu", torch.bfloat16))
    )
    yield around("autocast", "on", bfloat)
    yield around("autocast", "off", plainly, bfloat)
    yield around("autocast", "to float16", half, bfloat)
    yield around("autocast", "of the CPU", cpu)
    for dtype in (torch.float64, torch.bfloat16):
        run = _inside(lambda dtype=dtype: _set(torch.get_default_dtype, torch.set_default_dtype, dtype))
        yield around("default dtype", str(dtype), run, other="torch")
    deterministic = _inside(
        lambda: _set(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)
    )
    yield around("deterministic mode", "on", deterministic, other="torch")
    level = _inside(lambda: rtkernels.batch_invariant(1))
    yield around("batch invariance", "level 1", level, other=always)
    yield around("batch invariance", "off", plainly, level, other=always)
    yield around("inference mode", "on", _inside(torch.inference_mode), other=always)
    yield around("inference mode", "off", plainly, _inside(torch.inference_mode), other=always)
    inside = Way(lambda: _made_in_inference_mode(make))
    yield Change("inference mode", "of tensors", plain, inside)
    leaf = Way(maker(call.given, lambda made: [t.requires_grad_() if _floating(t) else t for t in made]))
    yield Change("gradients", "wanted, but off", plain, leaf)
    yield Change("gradients", "on", leaf, leaf._replace(run=_with_gradients))
    yield Change("gradients", "wanted", plain, leaf._replace(run=_with_gradients))
    yield Change("gradients", "on, but not wanted", plain, plain._replace(run=_with_gradients))
    yield around("environment", "RTKERNELS_DEBUG", _inside(lambda: _variable("RTKERNELS_DEBUG", "1")))
    if call.name.startswith(("attention_decode", "mla_decode", "append_kv_cache")):
        far = maker(call.given, lambda made: [torch.full_like(t, 1000) if t.dtype == torch.int32 else t for t in made])
        run = _inside(lambda: _variable("RTKERNELS_DEBUG", "1"))
        yield Change("environment", "RTKERNELS_DEBUG, and positions beyond a cache", plain, Way(far, run))
    yield around("dispatch modes", "a mode", _under_a_mode)
    yield around("dispatch modes", "forward-mode differentiation", _inside(forward_ad.dual_level))
    yield around("stream", "another", _on_another_stream)
    yield around("capture", "on", _captured)
    yield around("threads", "another", _in_a_thread)
    yield around("plans", "forgotten", _with_new_plans)
    if not call.aten:
        on_cpu = Way(maker(call.given, device="cpu"))
        once = on_cpu._replace(run=_inside(lambda: rtkernels.emulate("sm_90")))
        yield Change("emulation", "another target", once, on_cpu._replace(run=_for_two_targets))


def _made_in_inference_mode(make: Callable[[], Given]) -> Given:
    with torch.inference_mode():
        return make()


def changes(call: Call, rng: random.Random) -> list[Change]:
    """Return all changes of a call."""
    return [*tensors(call, rng), *out(call), *options(call, rng), *surroundings(call)]
