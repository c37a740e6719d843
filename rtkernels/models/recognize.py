"""Which of our ops does a module compute? Asked by running it, with parameters and inputs of our own, on the CPU.

Nothing of the model is read but sizes and scalar attributes, so models on any device, on meta and sharded ones can be
asked. Inputs have magnitudes from 1e-2 to 2e2, both signs and a row of zeros: with values near 1 a clamped activation
looks like a plain one. Norms get rows as small as their epsilon, too. The gradient of the input is compared as well.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import rtkernels

_NORM_TOLERANCE = 1e-5
TOLERANCE = 1e-4
_ACTIVATIONS = ("silu", "gelu_tanh", "gelu_erf", "relu", "relu2", "sigmoid", "none", "swiglu_oai")
_EPSILONS = ("variance_epsilon", "eps")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
ROTATIONS = ("halves", "half tables", "neighbours", "neighbour tables")
_MERGED = ("gate_up_proj", "down_proj")


class Recognized(NamedTuple):
    """What a module computes: the kind of replacement, and its options as sorted pairs."""

    kind: str
    options: tuple[tuple[str, Any], ...]


class NotRecognized(Exception):
    """Why a module is left alone, as a sentence for the report."""


def probe_values(*shape: int, seed: int = 0) -> Tensor:
    """Return fp32 numbers of magnitudes 1e-2 to 2e2 with both signs; the first row of the last two dimensions is 0."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.exp(torch.empty(shape).uniform_(-4.6, 5.3, generator=generator))
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    values = magnitude * sign
    if len(shape) > 1:
        values[..., 0, :] = 0.0
    return values


def agree(ours: Callable[..., Any], theirs: Callable[..., Any], inputs: Sequence[Tensor], tolerance: float) -> bool:
    """Return True if two functions give the same results and the same gradients of all inputs."""
    results = []
    for function in (theirs, ours):
        leaves = [t.clone().requires_grad_() for t in inputs]
        try:
            made = function(*leaves)
        except Exception:  # a module may refuse these inputs, as may the op
            return False
        made = made if isinstance(made, tuple) else (made,)
        if not all(isinstance(t, Tensor) and t.dtype == torch.float32 and t.requires_grad for t in made):
            return False
        total = sum((t * probe_values(*t.shape, seed=7 + i).clamp(-3, 3)).sum() for i, t in enumerate(made))
        results.append([*made, *torch.autograd.grad(total, leaves)])
    for wanted, got in zip(*results, strict=True):
        if wanted.shape != got.shape or not torch.isfinite(wanted).all():
            return False
        if not torch.allclose(got, wanted, rtol=tolerance, atol=tolerance * float(wanted.detach().abs().mean())):
            return False
    return True


def twin_of(
    module: nn.Module, parameters: dict[str, Tensor], children: dict[str, nn.Module] | None = None
) -> nn.Module:
    """Return a shallow copy with other parameters and children; the module itself is not touched."""
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin._parameters = {name: nn.Parameter(value) for name, value in parameters.items()}
    twin._modules = {**module._modules, **(children or {})}
    return twin


def autocasts(x: Tensor) -> bool:
    """Return True inside of ``torch.autocast`` for x's device; meta has none."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def positional(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's positional arguments."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]


def _only(found: list[Recognized], what: str) -> Recognized:
    if not found:
        raise NotRecognized(f"{what} computes none of our ops")
    if len(found) > 1:
        raise NotRecognized(f"{what} computes more than one of our ops: {', '.join(map(str, found))}")
    return found[0]


# ---- norms ----------------------------------------------------------------------------------------------------------


def is_norm(module: nn.Module) -> bool:
    """Return True if a module may be a norm: no children, parameters of one dimension, an epsilon."""
    if module._modules or any(p is not None and p.dim() > 1 for p in module._parameters.values()):
        return False
    return any(isinstance(getattr(module, name, None), float) for name in _EPSILONS)


def norm_weight(module: nn.Module) -> Tensor | None:
    """Return the weight of a recognised norm; a buffer of that name is one that it does not use."""
    return None if "weight" in module._buffers else getattr(module, "weight", None)


def norm(module: nn.Module) -> Recognized:
    """Return which norm a candidate computes.

    Raises:
        NotRecognized: None of ours.
    """
    given = {name: p for name, p in module._parameters.items() if p is not None}
    if set(given) not in (set(), {"weight"}, {"weight", "bias"}):
        raise NotRecognized(f"its parameters are {', '.join(given)}; expected weight, weight and bias, or none")
    if len(positional(type(module).forward)) != 2:
        raise NotRecognized("its forward takes more than the hidden states")
    width = given["weight"].shape[0] if given else 64
    fresh = {name: torch.randn(width, generator=torch.Generator().manual_seed(i)) for i, name in enumerate(given)}
    twin = twin_of(module, fresh)
    twin._buffers = {  # a norm that multiplies with one is none of ours
        name: torch.randn(b.shape, generator=torch.Generator().manual_seed(7)) for name, b in module._buffers.items()
        if b is not None and b.is_floating_point()
    }  # fmt: skip
    eps_name = next(name for name in _EPSILONS if isinstance(getattr(module, name, None), float))
    eps, weight, bias = getattr(module, eps_name), fresh.get("weight"), fresh.get("bias")
    theirs, found = partial(type(module).forward, twin), []
    small = torch.randn(4, width, generator=torch.Generator().manual_seed(2)) * eps**0.5
    inputs = [torch.cat([probe_values(5, width), small * torch.tensor([[0.5], [1.0], [3.0], [30.0]])])]
    for offset in (0.0, 1.0) if given else (0.0,):
        options = (("eps", eps_name), ("offset", offset))
        rms = partial(rtkernels.rms_norm, weight=weight, eps=eps, offset=offset)
        if bias is None and agree(rms, theirs, inputs, _NORM_TOLERANCE):
            found.append(Recognized("rms_norm", options))
        layer = partial(rtkernels.layer_norm, weight=weight, bias=bias, eps=eps, offset=offset)
        if agree(layer, theirs, inputs, TOLERANCE):
            found.append(Recognized("layer_norm", options))
    return _only(found, "it")


# ---- gated MLPs -----------------------------------------------------------------------------------------------------


class _Gives(nn.Module):
    """Returns a tensor whatever it is given."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.__dict__["value"] = value

    def forward(self, x: Tensor) -> Tensor:
        return self.value


def is_mlp(module: nn.Module) -> bool:
    """Return True if a module may be a gated MLP: it has the projections of one."""
    children = module._modules
    return all(name in children for name in _PROJECTIONS) or all(name in children for name in _MERGED)


def mlp(module: nn.Module) -> Recognized:
    """Return which gated MLP a candidate computes.

    Raises:
        NotRecognized: None of ours.
    """
    if len(positional(type(module).forward)) != 2:
        raise NotRecognized("its forward takes more than the hidden states")
    if any(isinstance(child, nn.Dropout) and child.p > 0 for child in module.children()):
        raise NotRecognized("it has a dropout")
    separate = all(name in module._modules for name in _PROJECTIONS)

    def theirs(gate: Tensor, up: Tensor) -> Tensor:
        if separate:
            stubs = {"gate_proj": _Gives(gate), "up_proj": _Gives(up), "down_proj": nn.Identity()}
        else:
            stubs = {"gate_up_proj": _Gives(torch.cat([gate, up], -1)), "down_proj": nn.Identity()}
        return type(module).forward(twin_of(module, {}, stubs), gate)

    inputs = [probe_values(7, 64, seed=1), probe_values(7, 64, seed=2)]
    found = [Recognized("mlp", (("act", act), ("separate", separate))) for act in activations(theirs, inputs)]
    return _only(found, "it")


def activations(theirs: Callable[[Tensor, Tensor], Tensor], inputs: Sequence[Tensor]) -> list[str]:
    """Return the activations of ``glu`` that a function of gate and up may have."""
    return [act for act in _ACTIVATIONS if agree(partial(rtkernels.glu, act=act), theirs, inputs, TOLERANCE)]


# ---- rotary embeddings ----------------------------------------------------------------------------------------------


def rope(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return how a function ``(q, k, cos, sin, ...)`` rotates q and k ``[batch, heads, tokens, size]``.

    The first part of the result is "halves" (element i and i + half are a pair, tables have every angle twice, as
    halves), "half tables" (the same, every angle one time), "neighbours" (elements 2i and 2i + 1 are a pair, tables as
    halves) or "neighbour tables" (the same, an angle in two neighbouring columns). "partial" follows where tables
    narrower than a head leave the rest of it alone.

    Raises:
        NotRecognized: None of ours.
    """
    names = positional(function)
    if names[:4] != ["q", "k", "cos", "sin"]:
        raise NotRecognized(f"its arguments are {', '.join(names)}; expected q, k, cos, sin")
    q, k = probe_values(2, 3, 5, 16, seed=3), probe_values(2, 1, 5, 16, seed=4)
    angles = probe_values(2, 5, 8, seed=5)
    forms = []
    for form in ROTATIONS:
        for rotary in (16, 8):
            half = angles[..., : rotary // 2]
            table = half if form == "half tables" else torch.cat([half, half], -1)
            table = half.repeat_interleave(2, -1) if form == "neighbour tables" else table
            tables = {"cos": table.cos(), "sin": table.sin()}
            if agree(partial(apply_rope, form=form, **tables), partial(function, **tables), [q, k], TOLERANCE):
                forms.append((form, rotary))
    whole = [form for form, rotary in forms if rotary == 16]
    if len(whole) != 1:
        raise NotRecognized("it rotates in no way of ours" if not whole else "it rotates in more than one way")
    return (whole[0], "partial") if (whole[0], 8) in forms else (whole[0],)


def apply_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, form: str, layout: str = "bhsd", **options: Any
) -> tuple[Tensor, Tensor]:
    """Rotate q and k with our op, in the way that a name of :func:`rope` says. Other options are those of the op."""
    cos, sin, pairs = rope_tables(q.shape[-1], cos, sin, form)
    return rtkernels.rope(q, cos, sin, k=k, layout=layout, **pairs, **options)


def rope_tables(size: int, cos: Tensor, sin: Tensor, form: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return tables as our ops take them for heads of a size, and the options `rotary` and `interleaved`."""
    rotary = 2 * cos.shape[-1] if form == "half tables" else cos.shape[-1]
    if form == "neighbours":
        cos, sin = cos[..., : rotary // 2], sin[..., : rotary // 2]
    whole = None if rotary == size else rotary
    return cos, sin, {"rotary": whole, "interleaved": form in ("neighbours", "neighbour tables")}
