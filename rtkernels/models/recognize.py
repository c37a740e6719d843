"""Find which of our ops a module computes, by running its forward and ours side by side (``probe``).

A *candidate* is any module with the role of one of our ops. A candidate that is not recognised is left alone and
reported with a reason. Our forward is compared with the module's own as a function of the input: in 2, 3 and 4
dimensions, for several widths and layouts, in training and evaluation, in fp32 and 16 bits, with the gradients of the
input and of every parameter (``proof``).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rtkernels
from rtkernels.models.probe import (
    LinearMap,
    NotRecognized,
    Recognized,
    Trial,
    check_plain,
    difference,
    normal,
    probing,
    rows_of_scales,
    twin_of,
)
from rtkernels.models.proof import Setting, prove, settings_for
from rtkernels.ops.act.act import KINDS
from rtkernels.ops.act.glu_plan import CLAMPS

TOLERANCE = 1e-4
ACTIVATIONS = ("silu", "gelu_tanh", "gelu_erf", "relu", "relu2", "sigmoid", "none", "swiglu_oai", "quick_gelu")
_EPSILONS = ("variance_epsilon", "eps")
_OTHER_DIMENSIONS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)
_NORM_NAME = re.compile(r"Norm(?!al)")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MERGED = ("gate_up_proj", "down_proj")
_ACTIVATION_NAME = re.compile(r"(^|_)(act|activation|silu|swish|gelu|relu|mish|glu|swiglu|sigmoid)", re.IGNORECASE)
_MLP_NAME = re.compile(r"MLP|Mlp|FeedForward|FFN|GLU|Glu")
_ACTIVATION_CLASS = re.compile(r"GELU|ReLU|SiLU|Swish|Sigmoid|Activation")
_GATE_NAME = re.compile(r"GLU|Glu")


def autocasts(x: Tensor) -> bool:
    """Return True inside ``torch.autocast`` for x's device; the meta device has none."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def _takes_one_input(module: nn.Module) -> bool:
    """Return True if a forward needs nothing but the hidden states; diffusers' also take ``*args, **kwargs``."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(type(module).forward).parameters.values()
    return len([p for p in parameters if p.kind not in variadic]) == 2


def _check_one_input(module: nn.Module) -> None:
    if not _takes_one_input(module):
        raise NotRecognized("its forward takes more than the hidden states")


# ---- norms ----------------------------------------------------------------------------------------------------------


def is_norm(module: nn.Module) -> bool:
    """Return True if a module may be a norm: it has no children, and an epsilon or the name of a norm."""
    if module._modules or type(module).__module__.startswith("torch.nn.utils"):  # parametrizations
        return False
    given = {name: p for name, p in module._parameters.items() if p is not None}
    like_a_norm = given.keys() <= {"weight", "bias"} and all(p.dim() == 1 for p in given.values())
    named = _NORM_NAME.search(type(module).__name__) is not None
    return named or (like_a_norm and _epsilon(module) is not None)


def _epsilon(module: nn.Module) -> str | None:
    names = (*_EPSILONS, *(name for name in module.__dict__ if "eps" in name))
    return next((name for name in names if isinstance(getattr(module, name, None), float)), None)


def _small_constants(module: nn.Module) -> tuple[float, ...]:
    """Return the numbers in the code of a forward that may be an epsilon, as in OLMo's norm."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return tuple(n for n in getattr(code, "co_consts", ()) if isinstance(n, float) and 0 < n < 1e-2)


def norm_weight(module: nn.Module, weighted: bool = True) -> Tensor | None:
    """Return the weight of a recognised norm, also if it has become a buffer since then.

    `weighted` is False for a norm that had a buffer of this name when it was recognised, which it does not use.
    """
    return getattr(module, "weight", None) if weighted else None


@probing()
def norm(module: nn.Module) -> Recognized:
    """Return which norm a candidate computes.

    Raises:
        NotRecognized: It computes none of our norms.
    """
    if isinstance(module, _OTHER_DIMENSIONS):
        raise NotRecognized("it normalises over other dimensions than the last")
    given = {name: p for name, p in module._parameters.items() if p is not None}
    if set(given) not in (set(), {"weight"}, {"weight", "bias"}):
        raise NotRecognized(f"its parameters are {', '.join(given)}; expected weight, weight and bias, or none")
    if any(p.dim() != 1 for p in given.values()):
        raise NotRecognized("its weight has more than one dimension")
    eps_name = _epsilon(module)
    numbers = () if eps_name is not None or given else _small_constants(module)
    if eps_name is None and len(numbers) != 1:
        raise NotRecognized("it has no epsilon that is a number")
    _check_one_input(module)
    check_plain(module)
    sizes = [n for v in module.__dict__.values() for n in (v if isinstance(v, tuple) else (v,)) if type(n) is int]
    width = given["weight"].shape[0] if given else next((n for n in sizes if 1 < n <= 1 << 16), 64)
    eps = numbers[0] if eps_name is None else getattr(module, eps_name)

    def twin(w: int, dtype: torch.dtype, training: bool) -> nn.Module:
        fresh = {name: normal(w, seed=i, dtype=dtype) for i, name in enumerate(given)}
        return twin_of(module, fresh, sizes={width: w}, training=training)

    more = (("weighted", False),) if "weight" in module._buffers else ()
    candidates = [("layer_norm", Recognized("layer_norm", (("eps", eps), ("offset", 0.0), *more)))] if numbers else []
    for offset in () if numbers else (0.0, 1.0) if given else (0.0,):
        options = (("eps", eps_name), ("offset", offset), *more)
        candidates += [(kind, Recognized(kind, options)) for kind in ("rms_norm", "layer_norm")]
    scales = max(eps, 1e-12) ** 0.5 * torch.tensor([[0.5], [1.0], [3.0], [30.0]], dtype=torch.float32, device="cpu")
    settings = [
        *settings_for(width, 1e6),
        Setting(lambda w: Trial("for numbers as small as its epsilon", (normal(4, w) * scales,)), (width,)),
        Setting(lambda w: Trial("for large numbers", (normal(4, w) * 1e12,), gradients=False), (width,)),
    ]
    return prove(module, width, candidates, twin, settings)


# ---- gated MLPs -----------------------------------------------------------------------------------------------------


class Projections(NamedTuple):
    """Names of a gated MLP's children.

    `up` is None if one projection gives both halves, up first with `up_first`; `down` is None if nothing is projected
    behind the gate. `dropout` is called on the gated values, or on the result if it is `behind`.
    """

    gate: str
    up: str | None
    down: str | None
    up_first: bool = False
    dropout: str | None = None
    behind: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in self[:3] if name is not None)


def is_mlp(module: nn.Module) -> bool:
    """Return True if a module may be a gated MLP.

    It has projections with the usual names. Or it has projections with fitting sizes and an activation, and it either
    takes one input or is named like an MLP.
    """
    return _names_projections(module) or (
        next(_projections(module), None) is not None
        and _has_activation(module)
        and (_takes_one_input(module) or _MLP_NAME.search(type(module).__name__) is not None)
    )


def _names_projections(module: nn.Module) -> bool:
    return any(all(name in module._modules for name in names) for names in (_PROJECTIONS, _MERGED))


def _has_activation(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    classes = (type(child).__name__ for child in module._modules.values() if child is not None)
    return any(_ACTIVATION_NAME.search(name) for name in (*getattr(code, "co_names", ()), *module._modules, *classes))


def _features(child: nn.Module | None) -> tuple[int, int] | None:
    """Return the input and output widths of a projection, None if the module is not one."""
    sizes = getattr(child, "in_features", None), getattr(child, "out_features", None)
    return sizes if all(isinstance(size, int) for size in sizes) else None


def _projections(module: nn.Module) -> Iterator[Projections]:
    """Yield the possible assignments of children to projections, by their sizes."""
    sizes = {name: _features(child) for name, child in module._modules.items()}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    if len(sizes) == 3:
        for gate, up, down in permutations(sizes):
            if sizes[gate] == sizes[up] and sizes[down][0] == sizes[gate][1]:
                yield Projections(gate, up, down)
    elif len(sizes) == 2:
        for both, down in permutations(sizes):
            if sizes[both][1] == 2 * sizes[down][0]:
                yield Projections(both, None, down)
                yield Projections(both, None, down, up_first=True)
    elif len(sizes) == 1 and _GATE_NAME.search(type(module).__name__):
        (both,) = sizes
        if sizes[both][1] % 2 == 0:
            yield Projections(both, None, None)
            yield Projections(both, None, None, up_first=True)


def _with_dropout(module: nn.Module, found: list[Projections]) -> list[Projections]:
    """Return the assignments with the places that a dropout among the children may have."""
    names = [name for name, child in module._modules.items() if isinstance(child, nn.Dropout) and child.p > 0]
    if len(names) != 1:
        return found
    places = [one._replace(dropout=names[0]) for one in found]
    return places + [one._replace(behind=True) for one in places if one.down is not None]


class _Mask(nn.Module):
    """Replaces a dropout in a twin: fixed factors, so that the place of the dropout shows in the results."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.linspace(0.5, 2.0, x.shape[-1], dtype=torch.float32, device="cpu").to(x.dtype)


@probing()
def mlp(module: nn.Module) -> Recognized:
    """Return which gated MLP a candidate computes.

    Raises:
        NotRecognized: It computes none of ours.
    """
    _check_one_input(module)
    if any(p is not None for p in module._parameters.values()):
        raise NotRecognized("it has parameters beside those of its projections")
    separate = all(name in module._modules for name in _PROJECTIONS)
    if _names_projections(module):
        found = [Projections(*_PROJECTIONS) if separate else Projections(_MERGED[0], None, _MERGED[1])]
    else:
        found = list(_projections(module))
    places = _with_dropout(module, found)
    dropout = places[0].dropout
    if _names_projections(module) and dropout is None:
        kinds = [(f"glu with {act}", Recognized("mlp", (("act", act), ("separate", separate)))) for act in ACTIVATIONS]
    else:
        kinds = [
            (f"glu with {act}", Recognized("named_mlp", (("act", act), ("projections", names))))
            for act in ACTIVATIONS
            for names in places
            if act != "none" or names[:4] == found[0][:4]  # without an activation, gate and up may swap
        ]
    clamps = limits(module)
    kinds += [
        (f"{act} and a limit", Recognized("named_mlp", (("act", act), ("projections", names), ("limit", name))))
        for name in clamps
        for act, usual in CLAMPS.items()
        for names in places
        if getattr(module, name) != usual
    ]
    check_plain(module, (*found[0].names, *([] if dropout is None else [dropout])))
    widths = _widths(module, found[0])

    def twin(w: int, dtype: torch.dtype, training: bool) -> nn.Module:
        sizes = _scaled(widths, w)
        maps = {}
        for i, name in enumerate(found[0].names):
            read, gives = _features(module._modules[name]) or _default_features(name, widths)
            maps[name] = LinearMap(sizes[read], sizes[gives], 10 * i, dtype)
        if dropout is not None:
            maps[dropout] = _Mask()
        return twin_of(module, {}, maps, sizes, training)

    # Behind large inputs a clamped gate has only slopes near 0, whose rounding would decide.
    bound = max((getattr(module, name) for name in clamps), default=1e2)
    return prove(module, widths[0], kinds, twin, settings_for(widths[0], 1e8, rows=2 * bound))


def _default_features(name: str, widths: tuple[int, int, int]) -> tuple[int, int]:
    width, inner, out = widths
    return {"down_proj": (inner, out), "gate_up_proj": (width, 2 * inner)}.get(name, (width, inner))


def _widths(module: nn.Module, found: Projections) -> tuple[int, int, int]:
    """Return the widths of the input, the gated values and the result; small ones for layers without sizes."""
    first = _features(module._modules[found.gate])
    if found.down is None and first is not None:
        return first[0], first[1] // 2, first[1] // 2
    last = _features(module._modules[found.down or found.gate])
    if first is None or last is None:
        return 64, 96, 64
    return first[0], last[0], last[1]


def _scaled(widths: tuple[int, int, int], w: int) -> dict[int, int]:
    """Map each width to that of a twin with input width w; equal widths stay equal."""
    width, inner, out = widths
    if w == width:
        return {n: n for n in (width, inner, 2 * inner, out)}
    sizes = {out: w + 8, width: w}
    small = sizes[inner] if inner in sizes else sizes[2 * inner] // 2 if 2 * inner in sizes else w + 16
    return {2 * inner: 2 * small, inner: small, **sizes}


def limits(module: nn.Module) -> list[str]:
    """Return the attributes that may be the limit of a clamped gate, one for each number."""
    given = {name: value for name, value in module.__dict__.items() if "limit" in name}
    numbers = {value: name for name, value in given.items() if type(value) in (int, float) and 0 < value < inf}
    return list(numbers.values())


@probing()
def activations(theirs: Callable[[Tensor, Tensor], Tensor], limit: float | None = None) -> list[str]:
    """Return the activations of ``glu`` that a function of gate and up may compute, those with a limit if it is given.

    Raises:
        NotRecognized: The function raises, or depends on more than gate and up.
    """
    trials = [Trial("for gate and up", tuple(rows_of_scales(9, 64, seed=seed) for seed in (1, 2)))]
    trials.append(Trial("for large numbers", (normal(3, 64, seed=3) * 1e8, normal(3, 64, seed=4) * 1e8)))
    return [
        act
        for act in (ACTIVATIONS if limit is None else CLAMPS)
        if not any(difference(partial(rtkernels.glu, act=act, limit=limit), theirs, trial) for trial in trials)
    ]


# ---- activations ----------------------------------------------------------------------------------------------------


def is_activation(module: nn.Module) -> bool:
    """Return True if a module may be an activation that the model computes in several steps, as a tanh formula."""
    own = (*module._modules, *module._parameters, *module._buffers)
    return not own and _ACTIVATION_CLASS.search(type(module).__name__) is not None and _takes_one_input(module)


@probing()
def activation(module: nn.Module) -> Recognized:
    """Return which activation of ``act`` a module computes in more than one step.

    Raises:
        NotRecognized: It computes none of them, or torch computes it in one step already.
    """
    check_plain(module)
    width = 64

    def twin(w: int, dtype: torch.dtype, training: bool) -> nn.Module:
        return twin_of(module, {}, training=training)

    own, x, steps = twin(width, torch.float32, False), normal(2, width), _Steps()
    with steps, torch.no_grad():
        type(module).forward(own, x)
    if steps.count < 2:
        raise NotRecognized("torch computes it in one step")
    kinds = [(f"act with {kind}", Recognized("activation", (("act", kind),))) for kind in KINDS]
    # Rows of three elements may all be negative, where the model's formula cancels and has no correct digits.
    settings = [s for s in settings_for(width, 1e8) if len(s.trial(width).leaves[0].shape) != 4]
    return prove(module, width, kinds, twin, settings)


class _Steps(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))
