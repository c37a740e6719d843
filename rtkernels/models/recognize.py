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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.models.probe import (
    HALVES,
    RAISED,
    LinearMap,
    NotRecognized,
    Raised,
    Recognized,
    Trial,
    check_globals,
    check_plain,
    difference,
    normal,
    outcome,
    probing,
    rows_of_scales,
    twin_of,
)
from rtkernels.models.proof import Setting, prove, settings_for

TOLERANCE = 1e-4
ACTIVATIONS = ("silu", "gelu_tanh", "gelu_erf", "relu", "relu2", "sigmoid", "none", "swiglu_oai")
_EPSILONS = ("variance_epsilon", "eps")
_OTHER_DIMENSIONS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)
_NORM_NAME = re.compile(r"Norm(?!al)")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MERGED = ("gate_up_proj", "down_proj")
_ACTIVATION_NAME = re.compile(r"(^|_)(act|activation|silu|swish|gelu|relu|mish|glu|swiglu|sigmoid)", re.IGNORECASE)
_MLP_NAME = re.compile(r"MLP|Mlp|FeedForward|FFN|GLU|Glu")
ROTATIONS = ("halves", "half tables", "neighbours", "neighbour tables")


def autocasts(x: Tensor) -> bool:
    """Return True inside ``torch.autocast`` for x's device; the meta device has none."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def positional(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's positional arguments."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]


def _takes_one_input(module: nn.Module) -> bool:
    return len(inspect.signature(type(module).forward).parameters) == 2


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


def norm_weight(module: nn.Module) -> Tensor | None:
    """Return the weight of a recognised norm; a buffer named weight does not count, because norms do not use it."""
    return None if "weight" in module._buffers else getattr(module, "weight", None)


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
    if eps_name is None:
        raise NotRecognized("it has no epsilon that is a number")
    _check_one_input(module)
    check_plain(module)
    sizes = [n for v in module.__dict__.values() for n in (v if isinstance(v, tuple) else (v,)) if type(n) is int]
    width = given["weight"].shape[0] if given else next((n for n in sizes if 1 < n <= 1 << 16), 64)
    eps = getattr(module, eps_name)

    def twin(w: int, dtype: torch.dtype, training: bool) -> nn.Module:
        fresh = {name: normal(w, seed=i, dtype=dtype) for i, name in enumerate(given)}
        return twin_of(module, fresh, sizes={width: w}, training=training)

    candidates = []
    for offset in (0.0, 1.0) if given else (0.0,):
        options = (("eps", eps_name), ("offset", offset))
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
    """Names of a gated MLP's children; `up` is None if one projection gives both halves, up first with `up_first`."""

    gate: str
    up: str | None
    down: str
    up_first: bool = False

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
        kinds = [(f"glu with {act}", Recognized("mlp", (("act", act), ("separate", separate)))) for act in ACTIVATIONS]
    else:
        found = list(_projections(module))
        kinds = [
            (f"glu with {act}", Recognized("named_mlp", (("act", act), ("projections", names))))
            for act in ACTIVATIONS
            for names in (found[:1] if act == "none" else found)  # without an activation, gate and up may swap
        ]
    check_plain(module, found[0].names)
    widths = _widths(module, found[0])

    def twin(w: int, dtype: torch.dtype, training: bool) -> nn.Module:
        sizes = _scaled(widths, w)
        maps = {}
        for i, name in enumerate(found[0].names):
            read, gives = _features(module._modules[name]) or _default_features(name, widths)
            maps[name] = LinearMap(sizes[read], sizes[gives], 10 * i, dtype)
        return twin_of(module, {}, maps, sizes, training)

    return prove(module, widths[0], kinds, twin, settings_for(widths[0], 1e8))


def _default_features(name: str, widths: tuple[int, int, int]) -> tuple[int, int]:
    width, inner, out = widths
    return {"down_proj": (inner, out), "gate_up_proj": (width, 2 * inner)}.get(name, (width, inner))


def _widths(module: nn.Module, found: Projections) -> tuple[int, int, int]:
    """Return the widths of the input, the gated values and the result; small ones for layers without sizes."""
    first, last = _features(module._modules[found.gate]), _features(module._modules[found.down])
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


@probing()
def activations(theirs: Callable[[Tensor, Tensor], Tensor]) -> list[str]:
    """Return the activations of ``glu`` that a function of gate and up may compute.

    Raises:
        NotRecognized: The function raises, or depends on more than gate and up.
    """
    trials = [Trial("for gate and up", tuple(rows_of_scales(9, 64, seed=seed) for seed in (1, 2)))]
    trials.append(Trial("for large numbers", (normal(3, 64, seed=3) * 1e8, normal(3, 64, seed=4) * 1e8)))
    return [
        act
        for act in ACTIVATIONS
        if not any(difference(partial(rtkernels.glu, act=act), theirs, trial) for trial in trials)
    ]


# ---- rotary embeddings ----------------------------------------------------------------------------------------------


@probing()
def rope(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return how a function ``(q, k, cos, sin, ...)`` rotates q and k ``[batch, heads, tokens, size]``.

    The first item is one of:

    - "halves": elements i and i + size / 2 are a pair; tables have each angle twice, in two halves.
    - "half tables": the same pairs; tables have each angle once.
    - "neighbours": elements 2i and 2i + 1 are a pair; tables have each angle twice, in two halves.
    - "neighbour tables": the same pairs; tables have each angle in two neighbouring columns.

    Further items: "partial" if tables narrower than a head leave the rest of the head alone, "mixed" if 16-bit heads
    stay in 16 bits with fp32 tables, "tokens first" if ``unsqueeze_dim=2`` takes ``[batch, tokens, heads, size]``.

    Raises:
        NotRecognized: The rotation is none of these.
    """
    names = positional(function)
    if names[:4] != ["q", "k", "cos", "sin"]:
        raise NotRecognized(f"its arguments are {', '.join(names)}; expected q, k, cos, sin")
    check_globals(function)
    screen = {form: _may_rotate_otherwise(function, form, gradients=False) for form in ROTATIONS}
    whole = [form for form, found in screen.items() if not found]
    if all(found.startswith(RAISED) for found in screen.values()):
        raise NotRecognized(screen["halves"])
    if len(whole) != 1:
        raise NotRecognized("it rotates in no way of ours" if not whole else "it rotates in more than one way")
    for setting in ({}, {"size": 32}, {"size": 24, "tokens": 67}, *({"dtype": dtype} for dtype in HALVES)):
        if found := _rotates_otherwise(function, whole[0], **setting):
            raise NotRecognized(f"it rotates in no way of ours: like {whole[0]}, but with {found}")
    optional = {
        "partial": {"rotary": 8},
        "mixed": {"dtype": torch.bfloat16, "table": torch.float32},
        "tokens first": {"options": {"unsqueeze_dim": 2}},
    }
    more = [name for name, setting in optional.items() if not _may_rotate_otherwise(function, whole[0], **setting)]
    return (whole[0], *more)


def _may_rotate_otherwise(function: Callable[..., Any], form: str, **setting: Any) -> str:
    try:
        return _rotates_otherwise(function, form, **setting)
    except Raised as error:
        return str(error)


def _rotates_otherwise(
    function: Callable[..., Any], form: str, size: int = 16, rotary: int | None = None, tokens: int = 5,
    dtype: torch.dtype = torch.float32, table: torch.dtype | None = None, options: dict[str, Any] | None = None,
    gradients: bool = True,
) -> str:  # fmt: skip
    """Return how a function differs from our rotation, "" if it does not."""
    half = normal(2, tokens, (rotary or size) // 2, seed=5) * 3
    angles = half if form == "half tables" else torch.cat([half, half], -1)
    angles = half.repeat_interleave(2, -1) if form == "neighbour tables" else angles
    tables = {"cos": angles.cos().to(table or dtype), "sin": angles.sin().to(table or dtype)}
    first = bool(options)
    shapes = [(2, tokens, heads, size) for heads in (3, 1)]
    leaves = tuple(normal(*shape, seed=3 + i, dtype=dtype) * 3 for i, shape in enumerate(shapes))

    def arguments(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return (q, k) if first else (q.transpose(1, 2), k.transpose(1, 2))

    where = f"for heads of {size}" if dtype == torch.float32 else f"in {str(dtype)[6:]}"
    ours = partial(apply_rope, form=form, layout="bshd" if first else "bhsd", **tables)
    theirs = partial(function, **tables, **(options or {}))
    trial = Trial(where, leaves, arguments, gradients)
    if found := difference(ours, theirs, trial):
        return found
    plain = trial._replace(gradients=False)
    with torch.no_grad():
        without = outcome(theirs, plain, ())
    same = all(torch.equal(a, b) for a, b in zip(without, outcome(theirs, plain, ()), strict=True))
    return "" if same else "other results without gradients"


def apply_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, form: str, layout: str = "bhsd", **options: Any
) -> tuple[Tensor, Tensor]:
    """Rotate q and k with our op, in a form returned by :func:`rope`. `options` are passed to the op."""
    cos, sin, pairs = rope_tables(q.shape[-1], cos, sin, form)
    return rtkernels.rope(q, cos, sin, k=k, layout=layout, **pairs, **options)


def rope_tables(size: int, cos: Tensor, sin: Tensor, form: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return the tables that our ops take for heads of a size, with the options `rotary` and `interleaved`."""
    rotary = 2 * cos.shape[-1] if form == "half tables" else cos.shape[-1]
    if form == "neighbours":
        cos, sin = cos[..., : rotary // 2], sin[..., : rotary // 2]
    whole = None if rotary == size else rotary
    return cos, sin, {"rotary": whole, "interleaved": form in ("neighbours", "neighbour tables")}
