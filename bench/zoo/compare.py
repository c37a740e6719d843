"""A model before and after ``patch``: forward, backward, generate, a deep copy, and the way back."""

from __future__ import annotations

import contextlib
import copy
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bench.zoo import products
from bench.zoo.build import Built, _line
from bench.zoo.steps import (
    FACTOR,
    FACTOR_FP8,
    FACTOR_HALF,
    FLOOR,
    FLOOR_HALF,
    MORE_SAMPLES,
    ROUNDING,
    SAMPLES_FP8,
    SAMPLES_HALF,
    SEEN,
    SEEN_HALF,
    Changed,
    NotRepeatable,
    Step,
    Tolerance,
    check_equal,
    distances,
    evaluate,
    generate,
    like_codes,
    rounded,
    train,
)
from rtkernels import models
from rtkernels.models import fp8 as quantized

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "fused_layers": {"fused_layers": True},
    "attention": {"attention": True},
    "router": {"router": True},
    "fp8": {"fp8": True},
}
OTHER = 1 + 2.0**-10  # a factor of weights that every result shows, and none overflows by
_KIND = {"fused_layers": "fused"}  # names of kinds in reports that are not those of the option


@contextlib.contextmanager
def fp8_for_all_sizes() -> Iterator[None]:
    """Let fp8 take layers that are too small to gain."""
    before, quantized._SMALLEST_GAIN = quantized._SMALLEST_GAIN, 0
    try:
        yield
    finally:
        quantized._SMALLEST_GAIN = before


class Before:
    """A model as it is before it is patched: its steps, and how far others may be from them.

    Raises:
        NotRepeatable: It does not repeat its own results.
    """

    def __init__(self, model: nn.Module, built: Built) -> None:
        try:
            train(model, built)
        except Exception:  # a model that writes to its inputs
            built = built._replace(input_gradients=False)
        self.model, self.built, self._repeats = model, built, None
        self.unpatched = copy.deepcopy(model)
        self.state = {name: t.detach().clone() for name, t in model.state_dict().items()}
        self.ways: dict[str, Callable[[nn.Module, Built], Step]] = {"train": train, "evaluate": evaluate}
        can = getattr(model, "can_generate", None)
        if callable(can) and can():
            self.ways["generate"] = generate
        self.steps: dict[str, Step] = {}
        self.tolerances: dict[str, Tolerance] = {}
        self.no_generate = ""
        for way, run in list(self.ways.items()):
            try:
                self.steps[way] = run(model, built)
            except Exception as error:
                if way != "generate":
                    raise
                self.no_generate = f"{type(error).__name__}: {str(error)[:120]}"
                del self.ways[way]
                continue
            try:
                check_equal(run(model, built), self.steps[way], f"{way} gives other results when it is called again")
            except Changed as error:
                raise NotRepeatable(str(error)) from None
            self.tolerances[way] = Tolerance(self.steps[way], list(self._samples(model, run, 11, 2)), FACTOR, FLOOR)

    def _samples(self, model: nn.Module, run: Callable[[nn.Module, Built], Step], first: int, n: int) -> Iterator[Step]:
        """Yield results of the unpatched model with changes of the size of a rounding."""
        for number in range(first, first + n):
            with rounded(model, self.built, ROUNDING, number) as other:
                yield run(model, other)

    def check(self, model: nn.Module) -> float:
        """Return the largest distance of all ways to call a model, by what is allowed."""
        return max(
            _explained(
                run(model, self.built), self.tolerances[way], self._samples(self.unpatched, run, 13, MORE_SAMPLES)
            )
            for way, run in self.ways.items()
        )

    def copies_repeat(self) -> bool:
        """Return True if copies of the unpatched model give its bits: some convolutions depend on addresses."""
        if self._repeats is None:
            self._repeats, kept = True, []
            for size in (1000, 70_000, 3_000_000):
                kept.append(torch.empty(size))  # other addresses
                made = train(copy.deepcopy(self.model), self.built)
                same = (not d for a, b in zip(made, self.steps["train"], strict=True) for d in distances(a, b).values())
                self._repeats = self._repeats and all(same)
        return self._repeats

    def check_same(self, got: Step, wanted: Step, what: str) -> None:
        """Raise Changed if two steps in training differ in a bit; in more than a rounding if copies do."""
        try:
            check_equal(got, wanted, what)
        except Changed:
            if self.copies_repeat():
                raise
            self.tolerances["train"].check(got)

    def check_restored(self, model: nn.Module, what: str) -> None:
        """Raise Changed if a model is not what it was, to the bit."""
        state = model.state_dict()
        if list(state) != list(self.state) or not all(_same(state[name], t) for name, t in self.state.items()):
            raise Changed(f"{what}: its state_dict differs")
        self.check_same(train(model, self.built), self.steps["train"], what)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def _check_copy(model: nn.Module, before: Before, same_bits: bool) -> None:
    """Raise Changed if a deep copy of a patched model gives other results, or shares something with it.

    With fused layers, weights of a copy do not lie one behind the other, and several products take the place of one.
    """
    wanted = train(model, before.built)
    other = copy.deepcopy(model)
    copied = train(other, before.built)
    if same_bits:
        before.check_same(copied, wanted, "a deep copy")
    else:
        before.tolerances["train"].check(copied)
    with torch.no_grad():
        for p in other.parameters():
            if p.is_floating_point():
                p.mul_(OTHER)
    train(other, before.built)
    before.check_same(train(model, before.built), wanted, "the model whose copy has other weights")
    models.unpatch(other)
    before.check_same(train(model, before.built), wanted, "the model whose copy was unpatched")
    other.load_state_dict(before.state)
    before.check_restored(other, "an unpatched copy")


def half_of(model: nn.Module, built: Built) -> tuple[nn.Module, Built]:
    """Return a copy of a model in bf16, with inputs in bf16."""
    inputs = {
        name: v.bfloat16() if isinstance(v, Tensor) and v.is_floating_point() else v for name, v in built.inputs.items()
    }
    return copy.deepcopy(model).bfloat16(), built._replace(inputs=inputs)


def exact_of(half: nn.Module, given: Built) -> tuple[nn.Module, Built]:
    """Return a copy in fp32 of a model in bf16, with the same numbers as parameters and inputs."""
    inputs = {
        name: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for name, v in given.inputs.items()
    }
    return copy.deepcopy(half).float(), given._replace(inputs=inputs)


def samples(
    half: nn.Module, given: Built, run: Callable[[nn.Module, Built], Step], first: int, count: int
) -> Iterator[Step]:
    """Yield results of a model in bf16 with changes of the size of a rounding of its parameters and inputs."""
    for number in range(first, first + count):
        with rounded(half, given, 2.0**-8, number) as other:
            yield run(half, other)


def half_tolerance(
    half: nn.Module, given: Built, run: Callable[[nn.Module, Built], Step], more: list[Step] | None = None
) -> Tolerance:
    """Return how far a patched model in bf16 may be from what the model computes in fp32; half is not patched."""
    others = [run(half, given), *(samples(half, given, run, 21, SAMPLES_HALF) if more is None else more)]
    factor = FACTOR_HALF if more is None else FACTOR_FP8
    return Tolerance(run(*exact_of(half, given)), others, factor, FLOOR_HALF, half=True)


def _explained(got: Step, tolerance: Tolerance, more: Iterator[Step]) -> float:
    """Return the largest distance by what is allowed; where few samples of the model's own error are less, by more.

    Raises:
        Changed: More samples do not explain it either.
    """
    try:
        return tolerance.check(got)
    except Changed:
        for sample in more:
            tolerance.add(sample)
        return tolerance.check(got)


def _check_half(model: nn.Module, built: Built, options: dict[str, Any]) -> dict[str, Any]:
    """Compare a model in bf16 before and after it is patched; returns how, and how far apart they were."""
    half, given = half_of(model, built)
    try:
        tolerances = {run: half_tolerance(half, given, run) for run in (train, evaluate)}
    except Exception as error:  # many models have no bf16 on the CPU
        return {"dtype": "no bf16", "why not": _line(error)}
    models.patch(half, **options)
    got, worst = {run: run(half, given) for run in tolerances}, 0.0
    models.unpatch(half)
    for run, tolerance in tolerances.items():
        more = samples(half, given, run, 21 + SAMPLES_HALF, MORE_SAMPLES)
        worst = max(worst, _explained(got[run], tolerance, more))
    return {"dtype": "bf16", "worst half": round(worst, 3), "seen half": tolerances[train].seen(SEEN_HALF)}


def _check_fp8(model: nn.Module, before: Before) -> dict[str, Any]:
    """Compare a model in fp8 with itself under noise of fp8's size; returns how, and how far apart they were."""
    built = before.built
    half, given = half_of(model, built)
    dtype = "bf16"
    reason: dict[str, str] = {}
    try:
        wanted = train(half, given)
    except Exception as error:
        half, given, dtype, reason = copy.deepcopy(model), built, "fp32", {"why not": _line(error)}
        wanted = train(half, given)
    report = models.patch(half, fp8=True)
    names = [site.name for site in report.sites if site.kind == "fp8" and site.reason is None]
    got = train(half, given)
    models.unpatch(half)
    if before.copies_repeat():
        check_equal(train(half, given), wanted, "unpatched")

    def noisy(first: int, count: int) -> Iterator[Step]:
        for number in range(first, first + count):
            with like_codes(half, names, number):
                yield train(half, given)

    tolerance = half_tolerance(half, given, train, list(noisy(31, SAMPLES_FP8)))
    tolerance.leave_out_zeros()  # gradients behind a threshold that fp8 may cross (Phi-MoE's router)
    worst = _explained(got, tolerance, noisy(31 + SAMPLES_FP8, MORE_SAMPLES))
    same = all(not d for a, b in zip(got, wanted, strict=True) for d in distances(a, b).values())
    if same and any(t.any() for tensors in wanted for t in tensors.values()):
        raise Changed(f"{len(names)} layers are in fp8, and nothing differs")
    return {"dtype": dtype, "worst": round(worst, 3), **reason}


def _compared(name: str, model: nn.Module, before: Before, known: dict[str, Any]) -> dict[str, Any]:
    """Return what patching with one set of options did."""
    options, kind = OPTIONS[name], _KIND.get(name, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = models.patch(model, **options)
        found: dict[str, Any] = {
            "replaced": dict(report.replaced),
            "left": sorted({f"{s.kind} {s.module}: {s.reason}" for s in report.left_alone}),
        }
        count = sum(report.replaced.values()) if name == "default" else report.replaced[kind]
        try:
            if name == "fp8" and count:
                models.unpatch(model)
                with products.rounded_once():
                    found |= _check_fp8(model, before)
                models.patch(model, **options)
                _check_copy(model, before, True)
            elif name != "default" and not count and known.get("default") is not None:
                before.check_same(train(model, before.built), known["default"], f"{name}= found nothing, and differs")
            else:
                found["worst"] = round(before.check(model), 3)
                if name == "default":
                    known["default"] = train(model, before.built)
                    found["seen"] = before.tolerances["train"].seen(SEEN)
                if count:
                    _check_copy(model, before, name != "fused_layers")
        finally:
            models.unpatch(model)
        before.check_restored(model, "unpatched")
        if name == "attention" and count:
            with products.rounded_once():
                found |= _check_half(model, before.built, options)
    found["status"] = "kept" if count else "nothing"
    return found


def compare(built: Built, chosen: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Return, for each set of options, what patching did: its status is kept, nothing, changed or crashed.

    Raises:
        Exception: Of the model itself, before it was patched.
    """
    before = Before(built.model, built)
    found: dict[str, dict[str, Any]] = {}
    known: dict[str, Any] = {}
    for name in chosen or OPTIONS:
        model = copy.deepcopy(built.model)
        with fp8_for_all_sizes():
            try:
                found[name] = _compared(name, model, before, known)
            except Changed as error:
                found[name] = {"status": "changed", "why": str(error)[:300]}
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-3:]
                where = " < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(last))
                found[name] = {"status": "crashed", "why": f"{type(error).__name__}: {str(error)[:240]} ({where})"}
    if before.no_generate:
        found["generate"] = {"status": "nothing", "why": before.no_generate}
    return found
