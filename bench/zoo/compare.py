"""A model before and after ``patch``: forward, backward, generate, a deep copy, and the way back.

How far results may be apart is asked of the model itself: its parameters and inputs are changed by a rounding, and what
its results change by is what rounding may do. In fp8 the change is that of an e4m3 code, at what the replaced layers
read, at their weights and at the gradients that they get.
"""

from __future__ import annotations

import contextlib
import copy
import math
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.zoo.build import Built, call, outputs_of, seed, with_gradients
from rtkernels import models
from rtkernels.models import fp8 as quantized

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "fused_layers": {"fused_layers": True},
    "attention": {"attention": True},
    "router": {"router": True},
    "fp8": {"fp8": True},
}
_KIND = {"fused_layers": "fused"}  # names of kinds in reports that are not those of the option
ROUNDING, CODES = 2.0**-23, 2.0**-4  # half a unit in the last place of fp32, and of e4m3
FACTOR, FACTOR_FP8, FACTOR_HALF = 8.0, 4.0, 8.0  # operators differ in more than one rounding
FLOOR, FLOOR_FP8, FLOOR_HALF = 1e-6, 1e-2, 1e-2  # of a tensor's norm; sums of several terms in another order
SMALLEST = 1e-8  # of the largest norm: what is zero but for rounding
NEW_TOKENS = 5


class Step(NamedTuple):
    """What one step gives: results and gradients by name, and generated tokens."""

    results: dict[str, Tensor]
    gradients: dict[str, Tensor]


class Changed(Exception):
    """A patched model gives other results; says which."""


# ---- steps ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def kept_state(model: nn.Module) -> Iterator[None]:
    """Give buffers and attributes back what they held.

    Running statistics change in training, and some models keep positions of the last call for the next one.
    """
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    attributes = {module: dict(module.__dict__) for module in model.modules()}
    try:
        yield
    finally:
        for module, before in attributes.items():
            for name in module.__dict__.keys() - before.keys():
                del module.__dict__[name]
            module.__dict__.update(before)
        with torch.no_grad():
            for name, b in model.named_buffers():
                if name in buffers and b.shape == buffers[name].shape:
                    b.copy_(buffers[name])


def _objective(results: dict[str, Tensor]) -> Tensor:
    """Return a number that depends on all results."""
    generator, total = torch.Generator().manual_seed(2), torch.zeros(())
    for t in results.values():
        if t.is_floating_point() and t.requires_grad and t.numel():
            weights = torch.randn(t.shape, generator=generator) * t.numel() ** -0.5
            finite = torch.where(torch.isfinite(t), t, torch.zeros_like(t))
            total = total + (finite.float() * weights).sum()
    return total


def train(model: nn.Module, built: Built) -> Step:
    """Return results and gradients of one step in training mode, those of inputs among them."""
    model.train()
    model.zero_grad(set_to_none=True)
    inputs = with_gradients(built.inputs) if built.input_gradients else built.inputs
    with kept_state(model):
        result = call(model, inputs)
        objective = result.loss if built.has_loss else _objective(outputs_of(result))
        objective.backward()
        results = {name: t.detach().clone() for name, t in outputs_of(result).items()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.grad is not None:
            gradients[f"input {name}"] = value.grad.clone()
    model.zero_grad(set_to_none=True)
    return Step(results, gradients)


def padded(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return inputs of which the second sequence ends earlier."""
    mask = inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] < 8:
        return inputs
    mask = mask.clone()
    mask[1, -3:] = 0
    return {**inputs, "attention_mask": mask}


@torch.no_grad()
def evaluate(model: nn.Module, built: Built) -> Step:
    """Return results in evaluation mode, with padding where the model takes it."""
    model.eval()
    with kept_state(model):
        results = {name: t.clone() for name, t in outputs_of(call(model, padded(built.inputs))).items()}
    model.train()
    return Step(results, {})


@torch.no_grad()
def generate(model: nn.Module, built: Built) -> Step:
    """Return the tokens that a model chooses greedily."""
    model.eval()
    left_out = ("labels", "decoder_input_ids", "start_positions", "end_positions")
    inputs = {name: value for name, value in built.inputs.items() if name not in left_out}
    with kept_state(model):
        seed(3)
        found = model.generate(
            **inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1
        )
    model.train()
    return Step(outputs_of(found), {})


# ---- how far apart --------------------------------------------------------------------------------------------------


def _norm(t: Tensor) -> float:
    return float(t.double().norm()) if t.numel() else 0.0


def distances(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, float]:
    """Return the norm of the difference of all tensors; infinite where they are not comparable."""
    found = {}
    for name in a.keys() | b.keys():
        x, y = a.get(name), b.get(name)
        if x is None or y is None or x.shape != y.shape:
            found[name] = math.inf
        elif not y.is_floating_point():
            found[name] = 0.0 if torch.equal(x, y) else math.inf
        else:
            x, y = x.double(), y.double()
            same = (x == y) | (x.isnan() & y.isnan())
            found[name] = _norm(torch.where(same, 0.0, x - y))
            if not math.isfinite(found[name]):
                found[name] = math.inf
    return found


class Tolerance:
    """How far a step may be from `wanted`: what changes of the size of a rounding do, times a factor, and a floor."""

    def __init__(self, wanted: Step, others: list[Step], factor: float, floor: float) -> None:
        self.wanted = wanted
        self.allowed: list[dict[str, float]] = []
        for i, tensors in enumerate(wanted):
            norms = {name: _norm(torch.nan_to_num(t.float(), 0, 0, 0)) for name, t in tensors.items()}
            largest = max(norms.values(), default=0.0) if i == 1 else 0.0
            moved = [distances(other[i], tensors) for other in others]
            self.allowed.append({
                name: factor * max((m[name] for m in moved), default=0.0) + floor * norm + SMALLEST * largest
                for name, norm in norms.items()
            })  # fmt: skip

    def check(self, got: Step) -> float:
        """Return the largest distance by what is allowed.

        Raises:
            Changed: It is more than 1.
        """
        worst, where = 0.0, ""
        for what, wanted, given, allowed in zip(("result", "gradient of"), self.wanted, got, self.allowed, strict=True):
            for name, distance in distances(given, wanted).items():
                limit = allowed.get(name, 0.0)
                if distance and not math.isinf(limit) and distance > worst * limit:
                    worst = distance / limit if limit else math.inf
                    size = _norm(wanted[name].float()) if name in wanted else 0.0
                    where = f"{what} {name}: off by {distance:.2g}, allowed {limit:.2g}, norm {size:.2g}"
        if worst > 1:
            raise Changed(where)
        return worst


def check_equal(got: Step, wanted: Step, what: str) -> None:
    """Raise Changed if two steps differ in a bit."""
    for mine, theirs in zip(got, wanted, strict=True):
        for name, distance in distances(mine, theirs).items():
            if distance:
                raise Changed(f"{what}: {name} differs by {distance:.2g}")


@contextlib.contextmanager
def rounded(model: nn.Module, built: Built, size: float, number: int) -> Iterator[Built]:
    """Change parameters by at most a part of `size`; yields inputs that are changed, too."""
    generator = torch.Generator().manual_seed(number)

    def other(t: Tensor) -> Tensor:
        noise = torch.rand(t.shape, generator=generator) * 2 - 1
        return (t.double() * (1 + size * noise.double())).to(t.dtype)

    with torch.no_grad():
        before = {name: p.detach().clone() for name, p in model.named_parameters() if p.is_floating_point()}
        parameters = dict(model.named_parameters())
        for name, value in before.items():
            parameters[name].copy_(other(value))
    inputs = {
        name: other(v) if isinstance(v, Tensor) and v.is_floating_point() else v for name, v in built.inputs.items()
    }
    try:
        yield built._replace(inputs=inputs)
    finally:
        with torch.no_grad():
            for name, value in before.items():
                parameters[name].copy_(value)


class _Noise(torch.autograd.Function):
    """Change values by what a code changes them by, and their gradient, too."""

    @staticmethod
    def forward(ctx, x, forward_size, backward_size, generator):
        ctx.size, ctx.generator = backward_size, generator
        return _noisy(x, forward_size, generator)

    @staticmethod
    def backward(ctx, dy):
        return _noisy(dy, ctx.size, ctx.generator), None, None, None


def _noisy(x: Tensor, size: float, generator: torch.Generator) -> Tensor:
    return (x.float() * (1 + size * (torch.rand(x.shape, generator=generator) * 2 - 1))).to(x.dtype)


@contextlib.contextmanager
def like_codes(model: nn.Module, names: list[str], number: int) -> Iterator[None]:
    """Let modules compute as if what they read, their weights and their gradients were fp8 codes."""
    generator = torch.Generator().manual_seed(number)
    modules, handles = dict(model.named_modules()), []

    def before(_: Any, args: tuple[Any, ...]) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            return (_Noise.apply(args[0], CODES, 0.0, generator), *args[1:])
        return None

    def after(_: Any, args: Any, result: Any) -> Any:
        return _Noise.apply(result, 0.0, CODES, generator) if isinstance(result, Tensor) else result

    weights = []
    with torch.no_grad():
        for name in names:
            for p in modules[name].parameters():
                if p.dim() > 1:
                    weights.append((p, p.detach().clone()))
                    p.copy_(_noisy(p, CODES, generator))
    for name in names:
        handles += [modules[name].register_forward_pre_hook(before), modules[name].register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for p, value in reversed(weights):
                p.copy_(value)


# ---- one model ------------------------------------------------------------------------------------------------------


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
        Changed: It does not repeat its own results.
    """

    def __init__(self, model: nn.Module, built: Built) -> None:
        try:
            train(model, built)
        except Exception:  # a model that writes to its inputs
            built = built._replace(input_gradients=False)
        self.model, self.built, self._repeats = model, built, None
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
            check_equal(run(model, built), self.steps[way], "does not repeat itself")
            others = []
            for number in (11, 12):
                with rounded(model, built, ROUNDING, number) as other:
                    others.append(run(model, other))
            self.tolerances[way] = Tolerance(self.steps[way], others, FACTOR, FLOOR)

    def check(self, model: nn.Module) -> float:
        """Return the largest distance of all ways to call a model, by what is allowed."""
        return max(self.tolerances[way].check(run(model, self.built)) for way, run in self.ways.items())

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
                p.mul_(1.5).add_(0.01)
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


def _check_half(model: nn.Module, built: Built, options: dict[str, Any]) -> str:
    """Compare a model in bf16 before and after it is patched; returns what was compared."""
    half, given = half_of(model, built)
    tolerances = {}
    try:
        for run in (train, evaluate):
            others = []
            for number in (21, 22):
                with rounded(half, given, 2.0**-8, number) as other:
                    others.append(run(half, other))
            tolerances[run] = Tolerance(run(half, given), others, FACTOR_HALF, FLOOR_HALF)
    except Exception:  # many models have no bf16 on the CPU
        return "no bf16"
    models.patch(half, **options)
    for run, tolerance in tolerances.items():
        tolerance.check(run(half, given))
    return "bf16"


def _check_fp8(model: nn.Module, before: Before) -> str:
    """Compare a model in fp8 with itself under noise of fp8's size; returns what was compared."""
    built = before.built
    half, given = half_of(model, built)
    dtype = "bf16"
    try:
        wanted = train(half, given)
    except Exception:
        half, given, dtype = copy.deepcopy(model), built, "fp32"
        wanted = train(half, given)
    report = models.patch(half, fp8=True)
    names = [site.name for site in report.sites if site.kind == "fp8" and site.reason is None]
    got = train(half, given)
    models.unpatch(half)
    if before.copies_repeat():
        check_equal(train(half, given), wanted, "unpatched")
    others = []
    for number in range(31, 34):
        with like_codes(half, names, number):
            others.append(train(half, given))
    Tolerance(wanted, others, FACTOR_FP8, FLOOR_FP8).check(got)
    same = all(not d for a, b in zip(got, wanted, strict=True) for d in distances(a, b).values())
    if same:
        raise Changed(f"{len(names)} layers are in fp8, and nothing differs")
    return dtype


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
                found["dtype"] = _check_fp8(model, before)
                models.patch(model, **options)
                _check_copy(model, before, True)
            elif name != "default" and not count and known.get("default") is not None:
                before.check_same(train(model, before.built), known["default"], f"{name}= found nothing, and differs")
            else:
                found["worst"] = round(before.check(model), 3)
                if name == "default":
                    known["default"] = train(model, before.built)
                if count:
                    _check_copy(model, before, name != "fused_layers")
        finally:
            models.unpatch(model)
        before.check_restored(model, "unpatched")
        if name == "attention" and count:
            found["dtype"] = _check_half(model, before.built, options)
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
