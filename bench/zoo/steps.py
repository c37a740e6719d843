"""Steps of a model, and how far two of them may be apart.

That is asked of the model itself: its parameters and inputs are changed by a rounding, and what its results change by
is what rounding may do. In fp8 the change is that of an e4m3 code, at what the replaced layers read, at their weights
and at the gradients that they get.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.zoo.build import Built, call, outputs_of, seed, unshared, with_gradients

ROUNDING, CODES = 2.0**-23, 2.0**-4  # half a unit in the last place of fp32, and of e4m3
# Operators differ in more than one rounding. In bf16 and fp8, where a result is hundreds of roundings off the exact
# one, ours may be off as far as the model itself is, and half of that again: samples of an error differ.
FACTOR, FACTOR_HALF, FACTOR_FP8 = 8.0, 1.5, 2.0
FLOOR, FLOOR_HALF = 4e-6, 2.0**-9  # of a tensor's norm: sums of several terms in another order, one rounding
UNIT_HALF = 2.0**-7  # of a number in bf16, such as a loss: the next one
SMALLEST = 1e-7  # of the largest norm of a gradient in fp32: what is zero but for rounding
# In bf16, of the largest norm of a gradient in the same module: that of a score is a difference of two numbers of the
# size of the gradient of values, one of which attention computes from its rounded result. Where values hardly differ
# nothing else is left of it, and in the gradient of a bias of keys, which is zero, nothing at all.
SMALLEST_HALF = 2.0**-9
SAMPLES_HALF, SAMPLES_FP8, MORE_SAMPLES = 4, 3, 36  # of a model's own error: at first; more if they do not explain ours
# An error larger than the result is of no certain size: batch norms over few elements divide by deviations near zero.
TAIL = 10.0
SEEN, SEEN_HALF = 0.01, 0.05  # parts of a tensor's norm: changes that are to be seen in fp32 and in bf16
NEW_TOKENS = 5


class Step(NamedTuple):
    """What one step gives: results and gradients by name, and generated tokens."""

    results: dict[str, Tensor]
    gradients: dict[str, Tensor]


class Changed(Exception):
    """A patched model gives other results; says which."""


class NotRepeatable(Exception):
    """A model that is not patched gives other results when it is called again; says which."""


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
    inputs = unshared({name: value for name, value in built.inputs.items() if name not in left_out})
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


def _neighbours(norms: dict[str, float]) -> dict[str, float]:
    """Return the largest norm of a gradient among the parameters of a module and of its other children, by name."""
    largest: dict[str, float] = {}
    for name, norm in norms.items():
        group = name.rsplit(".", 2)[0]
        largest[group] = max(norm, largest.get(group, 0.0))
    return {
        name: max(largest[name.rsplit(".", 2)[0]], largest.get(name.rsplit(".", 1)[0], 0.0)) for name in norms
    }  # fmt: skip


class Tolerance:
    """How far a step may be from `wanted`: as far as `others` are, times a factor, and a floor.

    In fp32, `wanted` is the model itself, and others are that with changes of the size of a rounding. In bf16 it is an
    fp32 copy of the model (:func:`bench.zoo.compare.exact_of`), and others are the model in bf16 without and with
    changes: torch's own sums over rows in bf16 are off by 1 to 12 % on the CPU, and a choice of experts may flip.
    """

    def __init__(self, wanted: Step, others: list[Step], factor: float, floor: float, half: bool = False) -> None:
        self.wanted, self._factor = wanted, factor
        self._floors: list[dict[str, float]] = []
        self._norms: list[dict[str, float]] = []
        self._moved: list[dict[str, float]] = [dict.fromkeys(tensors, 0.0) for tensors in wanted]
        for i, tensors in enumerate(wanted):
            norms = {name: _norm(torch.nan_to_num(t.float(), 0, 0, 0)) for name, t in tensors.items()}
            self._norms.append(norms)
            zero = dict.fromkeys(norms, 0.0)
            if i == 1 and half:
                zero = {name: SMALLEST_HALF * norm for name, norm in _neighbours(norms).items()}
            elif i == 1:
                zero = dict.fromkeys(norms, SMALLEST * max(norms.values(), default=0.0))
            units = {name: UNIT_HALF if half and t.numel() == 1 else floor for name, t in tensors.items()}
            self._floors.append({name: units[name] * norm + zero[name] for name, norm in norms.items()})
        for other in others:
            self.add(other)

    def add(self, other: Step) -> None:
        """Allow what another sample of the model's own error is off by."""
        for i, moved in enumerate(self._moved):
            found = distances(other[i], self.wanted[i])
            for name in moved:
                moved[name] = max(moved[name], found[name])

    def leave_out_zeros(self) -> None:
        """Allow anything for gradients that are zero."""
        floors, norms = self._floors[1], self._norms[1]
        floors |= {name: float("inf") for name, norm in norms.items() if not norm}

    @property
    def allowed(self) -> list[dict[str, float]]:
        found = []
        for moved, floors, norms in zip(self._moved, self._floors, self._norms, strict=True):
            factors = {name: self._factor * (TAIL if moved[name] > norm else 1.0) for name, norm in norms.items()}
            found.append({name: factor * moved[name] + floors[name] for name, factor in factors.items()})
        return found

    def seen(self, part: float) -> list[int]:
        """Return of how many floating-point tensors a change by this part of their norm is seen, and how many are."""
        found = [0, 0]
        for tensors, allowed in zip(self.wanted, self.allowed, strict=True):
            for name, t in tensors.items():
                if t.is_floating_point() and (norm := _norm(torch.nan_to_num(t.float(), 0, 0, 0))):
                    found[0] += allowed[name] < part * norm
                    found[1] += 1
        return found

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
