"""Runs a call varied and as it is, on contiguous tensors in fresh memory, and compares."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rtkernels
from contracts.fuzz.calls import Call, results_of
from contracts.fuzz.memory import Arena, Layout, as_bytes, dense, fill, layouts, placed, span
from contracts.fuzz.variations import Variation, is_index, resized
from rtkernels.errors import ArgumentError, RtkError
from rtkernels.ops.shared.backend import NoBackendError

# Largest difference, of the largest magnitude of a result, where a layout leads to another kernel: sums in another
# order in fp32, then one rounding to the dtype either way. Codes of 8 bits may differ by one step.
TOLERANCE = {
    torch.float64: 1e-9, torch.float32: 3e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10,
    torch.float8_e4m3fn: 2.0**-3, torch.float8_e5m2: 2.0**-2,
}  # fmt: skip
# Results in float32 of what was rounded to 16 bits in between: a last bit of a norm there is a rounding of its row.
ROUNDED_BETWEEN = {"rms_norm_router": 2.0**-9}
# What says in words that a call cannot be done: an argument will not do, or the kernel that was asked for.
_REFUSED = (ArgumentError, NoBackendError)
# Functions that read a tensor as a whole before they write over it: a shift of memory changes nothing.
COPY_FIRST = {"index_select", "scatter_add", "index_select_into", "scatter_add_into", "add_", "add_in_place"}


class Failure(NamedTuple):
    """What went wrong."""

    call: str
    variation: str
    what: str


class Wrong(Exception):
    """What is wrong with a call."""


@contextlib.contextmanager
def at(place: str, order: str | int = "forward") -> Iterator[str]:
    """Run calls at a place, and give the device of their tensors: ``cpu``, ``sm_80``, ``sm_90``, ``cuda``."""
    if place in ("cpu", "cuda"):
        yield place
        return
    with rtkernels.emulate(place, order):
        yield "cpu"


class Fuzzer:
    """Runs variations of calls at one place.

    Args:
        place: ``cpu`` (the references), ``sm_80`` or ``sm_90`` (the emulator), ``cuda``.
        repeat: How often a varied call is made: later ones are replays.
    """

    def __init__(self, place: str, repeat: int = 1) -> None:
        self.place, self.repeat = place, repeat
        self.device = "cuda" if place == "cuda" else "cpu"
        self.refused = self.passed = 0
        self._baselines: dict[Any, Any] = {}

    def check(self, call: Call, variation: Variation) -> Failure | None:
        """Return what is wrong with a variation of a call, or None."""
        try:
            done = self._aliased(call, variation) if variation.alias else self._varied(call, variation)
        except Wrong as wrong:
            return Failure(call.name, variation.named(call), str(wrong))
        except (RtkError, RuntimeError, IndexError, TypeError, ValueError, AttributeError, KeyError) as error:
            text = " ".join(str(error).split())[:200]
            if "CUDA error" in text or "illegal" in text or ("misaligned" in text and self.place == "cuda"):
                raise  # the context is lost
            return Failure(call.name, variation.named(call), f"{type(error).__name__}: {text}")
        self.passed += done
        self.refused += not done
        return None

    # ---- layouts, sizes, gradients ----

    def _varied(self, call: Call, variation: Variation) -> bool:
        values = call.tensors
        if variation.sizes:
            values = [resized(t, *variation.sizes) for t in values]
        chosen = dict(variation.layouts)
        tensors, watched = [], {}
        for i, value in enumerate(values):
            if variation.same and variation.same[1] == i:
                tensors.append(tensors[variation.same[0]])
                continue
            t, arena = placed(value, _layout(value, chosen.get(i)), self.device)
            if is_other_matrix(call, i, t):
                return False
            tensors.append(t)
            watched[i] = arena, t
        clones = [contiguous(t) for t in tensors]
        wanted = self._outcome(call, clones, variation, {})
        for i, (arena, t) in watched.items():
            arena.watch(*[t] if i in call.written and not t.is_neg() else [])
        given = [contiguous(t) for t in tensors] if call.written else []
        got = None
        for i in range(self.repeat if not call.written else 1):
            got = self._outcome(call, tensors, variation, {})
            if isinstance(got, _REFUSED):
                break
            if isinstance(wanted, _REFUSED):
                raise Wrong(f"contiguous tensors are refused ({wanted}), these are not")
            least = ROUNDED_BETWEEN.get(call.name.partition("#")[0].partition("(")[0], 0.0)
            compare(got, wanted, f"call {i + 1}" if i else "", _largest(clones), least)
        if isinstance(got, _REFUSED):
            for i in call.written:
                if not same_bits(tensors[i], given[i]):
                    raise Wrong(f"{call.names[i]} was changed although it was refused: {got}")
        if not call.written or not any(tensors[i].is_neg() for i in call.written):
            self._check_damage([arena for arena, _ in watched.values()])
        return not isinstance(got, _REFUSED)

    def _outcome(self, call: Call, tensors: list[Tensor], variation: Variation, more: dict[str, Any]) -> Any:
        """Return the results of a call, with gradients and with what it overwrote; or the refusal it raised."""
        if variation.grads:
            return self._gradients(call, tensors, variation)
        try:
            with at(self.place), torch.no_grad():
                made = results_of(call.run(tensors, **more))
        except _REFUSED as error:
            return error
        return [*made, *(tensors[i] for i in sorted(call.written))]

    def _gradients(self, call: Call, tensors: list[Tensor], variation: Variation) -> Any:
        given = [t.detach().requires_grad_(i in variation.grads) for i, t in enumerate(tensors)]
        plain = all(t.is_contiguous() for t in tensors)
        try:
            with at(self.place):
                made = [t for t in results_of(call.run(given)) if t is not None]
                outs = [t for t in made if t.requires_grad]
                if not outs:
                    return [*made]
                incoming = []
                for t in outs:
                    value = _noise(t)
                    how = _layout(value, variation.incoming or None)
                    dy, _ = placed(value, how, self.device)
                    incoming.append(contiguous(dy) if plain else dy)
                ins = [given[i] for i in variation.grads]
                grads = torch.autograd.grad(outs, ins, incoming, allow_unused=True)
        except _REFUSED as error:
            return error
        except NotImplementedError as error:  # no gradient, which is said in words of torch
            return ArgumentError(str(error))
        return [*(t.detach() for t in made), *grads]

    def _check_damage(self, arenas: list[Arena]) -> None:
        for arena in arenas:
            if changed := arena.damage():
                raise Wrong(f"{changed} bytes changed that belong to an input or to nobody")

    # ---- shared memory ----

    def _aliased(self, call: Call, variation: Variation) -> bool:
        target, name, shift = variation.alias
        wanted = self._outcome(call, self._fresh(call), Variation(), {})
        if isinstance(wanted, _REFUSED):
            raise Wrong(f"the plain call is refused: {wanted}")
        j = call.names.index(name)
        if target.startswith("out["):
            return self._out_over(call, int(target[4:-1]), j, shift, wanted)
        return self._written_over(call, call.names.index(target), j, shift)

    def _out_over(self, call: Call, number: int, j: int, shift: int, wanted: list[Any]) -> bool:
        results = wanted[: len(wanted) - len(call.written)]
        if number >= len(results) or results[number] is None or not results[number].numel():
            return False
        like = results[number]
        fresh, arena = placed(like, Layout("as it is", like.stride()), self.device)
        arena.watch(fresh)
        given = _as_out(call, number, fresh, len(results))
        if given is None:
            return False
        for _ in range(3):  # later calls are replays, which must see what the first one saw
            got = self._outcome(call, self._fresh(call), Variation(), given)
            if isinstance(got, _REFUSED):
                raise Wrong(f"out of fresh memory is refused: {got}")
            self._compare_out(got, wanted, number, fresh)
            if arena.damage():
                raise Wrong("memory around out was changed")
        self._out_elsewhere(call, number, like, wanted)
        overlapping = _over(like, call.tensors[j], shift, self.device)
        if overlapping is None:
            return False
        out, other, exact = overlapping
        given = _as_out(call, number, out, len(results))
        for order in _orders(self.place):
            tensors = self._fresh(call)
            tensors[j] = other
            fill(other, call.tensors[j], shared=False)
            got = self._in_order(call, tensors, given, order)
            if isinstance(got, _REFUSED):
                if not same_bits(other, call.tensors[j].to(self.device)):
                    raise Wrong(f"{call.names[j]} was changed although out was refused: {got}")
                return False
            self._refuse_shift(call, exact, "out", call.names[j])
            self._compare_out(got, wanted, number, out)
        return True

    def _fresh(self, call: Call) -> list[Tensor]:
        return [contiguous(t.to(self.device)) for t in call.tensors]

    def _out_elsewhere(self, call: Call, number: int, like: Tensor, wanted: list[Any]) -> None:
        """Let a result go to memory that begins one element behind an aligned address."""
        out, arena = placed(like, Layout("off", like.stride(), 1), self.device)
        arena.watch(out)
        for _ in range(2):
            given = _as_out(call, number, out, len(wanted) - len(call.written))
            got = self._outcome(call, self._fresh(call), Variation(), given)
            if arena.damage():
                raise Wrong("memory around an out that is not aligned was changed")
            if not isinstance(got, _REFUSED):
                self._compare_out(got, wanted, number, out)

    def _written_over(self, call: Call, i: int, j: int, shift: int) -> bool:
        """Let a tensor that is overwritten share memory with another one."""
        overlapping = _over(call.tensors[i], call.tensors[j], shift, self.device)
        if overlapping is None:
            return False
        first, second, exact = overlapping
        for order in _orders(self.place):
            tensors = [contiguous(t.to(self.device)) for t in call.tensors]
            tensors[i], tensors[j] = first, second
            fill(first, call.tensors[i], shared=False)
            fill(second, call.tensors[j], shared=False)
            clones = [contiguous(t) for t in tensors]
            before = [contiguous(t) for t in tensors]
            wanted = self._outcome(call, clones, Variation(), {})
            got = self._in_order(call, tensors, {}, order)
            if isinstance(got, _REFUSED):
                for name, t, was in zip(call.names, tensors, before, strict=True):
                    if not same_bits(t, was):
                        raise Wrong(f"{name} was changed although it was refused: {got}")
                return False
            self._refuse_shift(call, exact, call.names[i], call.names[j])
            if isinstance(wanted, _REFUSED):
                raise Wrong(f"apart they are refused ({wanted}), together not")
            if j in call.written:
                raise Wrong(f"{call.names[i]} and {call.names[j]} are both written, share memory, and are not refused")
            last = len(wanted) - len(call.written)
            compare([*got[:last], first], [*wanted[:last], wanted[last + sorted(call.written).index(i)]], "")
        return True

    def _in_order(self, call: Call, tensors: list[Tensor], more: dict[str, Any], order: str | int) -> Any:
        try:
            with at(self.place, order), torch.no_grad():
                made = results_of(call.run(tensors, **more))
        except _REFUSED as error:
            return error
        return [*made, *(tensors[i] for i in sorted(call.written))]

    def _refuse_shift(self, call: Call, exact: bool, target: str, other: str) -> None:
        """A kernel reads an element while another thread writes it: wrong on a device, whatever happens here."""
        if not exact and call.name.partition("#")[0].partition("(")[0] not in COPY_FIRST:
            raise Wrong(f"{target} overlaps {other} and is not refused")

    def _compare_out(self, got: list[Any], wanted: list[Any], number: int, out: Tensor) -> None:
        if got[number] is None or got[number].data_ptr() != out.data_ptr():
            raise Wrong("the result is not out")
        compare(got, wanted, "")


def _as_out(call: Call, number: int, out: Tensor, count: int) -> dict[str, Any] | None:
    """Return the keywords that let a result go to `out`; None if the function cannot do that."""
    if call.out_names:
        return {call.out_names[number]: out} if number < len(call.out_names) else None
    return {"out": out if count == 1 else tuple(out if i == number else None for i in range(count))}


def _orders(place: str) -> tuple[str | int, ...]:
    return ("forward", "reverse", 5) if place.startswith("sm_") else ("forward",)


def _over(a: Tensor, b: Tensor, shift: int, device: str) -> tuple[Tensor, Tensor, bool] | None:
    """Return contiguous tensors like `a` and `b`, the second holding b's values, `shift` bytes apart.

    Also whether they are the same memory seen alike; None if they would not overlap.
    """
    size_a, size_b = a.numel() * a.itemsize, b.numel() * b.itemsize
    if shift % b.itemsize or shift % a.itemsize or shift >= size_a or -shift >= size_b or not size_a or not size_b:
        return None
    arena = Arena(max(size_a, size_b) + 2 * abs(shift), device)
    begin = max(0, -shift)
    strides_a = a.stride() if span(a.shape, a.stride()) == a.numel() else dense(a.shape)
    strides_b = b.stride() if span(b.shape, b.stride()) == b.numel() else dense(b.shape)
    first = arena.at(begin, a.shape, strides_a, a.dtype)
    second = arena.at(begin + shift, b.shape, strides_b, b.dtype)
    fill(second, b, shared=False)
    alike = (first.shape, first.stride(), first.dtype) == (second.shape, second.stride(), second.dtype)
    return first, second, shift == 0 and alike


def contiguous(t: Tensor) -> Tensor:
    """Return a contiguous copy in fresh memory, with the same bits."""
    t = t.detach().resolve_neg()
    if t.dtype == torch.bool:  # a clone has bytes 0 and 1, a tensor that shares memory with numbers others
        return as_bytes(t).clone(memory_format=torch.contiguous_format).view(torch.bool)
    return t.clone(memory_format=torch.contiguous_format)


def is_other_matrix(call: Call, i: int, t: Tensor) -> bool:
    """Return True for a square ``b`` of a product whose strides say that it came as [k, n]: a contiguous one is [n, k].

    Not where the call says which it is.
    """
    square = t.dim() > 1 and t.shape[-1] == t.shape[-2] > 1
    told = bool({"nk", "kn"} & call.words)
    return call.family == "gemm" and call.names[i] == "b" and square and not told and t.stride(-1) != 1


def _layout(t: Tensor, name: str | None) -> Layout | None:
    return next((how for how in layouts(t) if how.name == name), None)


def _noise(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(like.numel())
    return torch.randn(like.shape, generator=generator).to(like.dtype).to(like.device)


# ---- comparing ------------------------------------------------------------------------------------------------------


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors have the same shape, dtype and bits."""
    a, b = (t.detach().resolve_neg() for t in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))


def _largest(tensors: list[Tensor]) -> float:
    """Return the largest finite magnitude of inputs: what is left of sums that cancel is as large as their error."""
    floats = [t.float().nan_to_num(0.0, 0.0, 0.0).abs().max() for t in tensors if t.dtype in TOLERANCE and t.numel()]
    return float(max(floats, default=0.0))


def compare(got: list[Any], wanted: list[Any], what: str, inputs: float = 0.0, least: float = 0.0) -> None:
    """Raise if results differ by more than another kernel may make of it, and by more than `least`."""
    if len(got) != len(wanted):
        raise Wrong(f"{len(got)} results; expected {len(wanted)}")
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        if a is None and b is None:
            continue
        if a is None or b is None:
            raise Wrong(f"result {i}: {'missing' if a is None else 'unexpected'}")
        if a.shape != b.shape or a.dtype != b.dtype:
            raise Wrong(f"result {i}: {a.dtype} {tuple(a.shape)}; expected {b.dtype} {tuple(b.shape)}")
        if same_bits(a, b):
            continue
        if b.dtype not in TOLERANCE or is_index(b):
            raise Wrong(f"result {i}: other values {what}")
        x, y = (t.detach().resolve_neg().float() for t in (a, b))
        if not torch.equal(x.isnan(), y.isnan()):
            raise Wrong(f"result {i}: NaN in other places {what}")
        finite = y.isfinite() & x.isfinite()
        if not torch.equal(x[~finite].nan_to_num(), y[~finite].nan_to_num()):
            raise Wrong(f"result {i}: infinities in other places {what}")
        largest = max(float(y[finite].abs().max()) if finite.any() else 0.0, 0.1 * inputs)
        error = float((x - y)[finite].abs().max()) if finite.any() else 0.0
        if error > max(TOLERANCE[b.dtype], least) * largest:
            raise Wrong(f"result {i}: off by {error:.3g} where the largest is {largest:.3g} {what}")


def rng_of(seed: int, call: Call) -> random.Random:
    """Return random numbers that depend on the seed and the call alone."""
    return random.Random(f"{seed} {call.name}")


__all__ = ["Failure", "Fuzzer", "rng_of"]
