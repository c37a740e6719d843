"""Replace the adaptive norms of diffusion transformers (``AdaLayerNormZero`` and others) by a modulated norm.

Such a module projects a condition to rows of a scale and a shift, and of gates that it returns. Our forward calls the
same projection, and normalises and modulates in one op. The order of the parts differs between classes, so it is found
by comparing results (``probe``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.models import replace
from rtkernels.models.merged import has_watched_child
from rtkernels.models.probe import (
    HALVES,
    LinearMap,
    NotRecognized,
    Recognized,
    Trial,
    check_plain,
    check_pure,
    difference,
    normal,
    positional,
    probing,
    rows_of_scales,
    twin_of,
)
from rtkernels.models.recognize import _epsilon, _features, autocasts

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_CHILDREN = ("linear", "norm", "silu")


def is_modulated(module: nn.Module) -> bool:
    """Return True if a module may be an adaptive norm: its children are a projection, a norm and an activation."""
    own = {name for name, child in module._modules.items() if child is not None}
    return own == set(_CHILDREN) and _condition(module) is not None and _features(module._modules["linear"]) is not None


def _condition(module: nn.Module) -> str | None:
    """Return the name of the argument that is projected."""
    names = positional(type(module).forward)
    return "emb" if "emb" in names else names[2] if len(names) == 3 else None


@probing()
def recognize(module: nn.Module) -> Recognized:
    """Return which adaptive norm a module computes.

    Raises:
        NotRecognized: It computes none of ours.
    """
    check_plain(module, ("linear",))
    read, gives = _features(module._modules["linear"])
    norm, condition = module._modules["norm"], _condition(module)
    eps, shape = _epsilon(norm), getattr(norm, "normalized_shape", None) or getattr(norm, "dim", None)
    width = shape[-1] if isinstance(shape, (tuple, list, torch.Size)) and len(shape) == 1 else None
    if eps is None or width is None or gives % width or not 2 <= gives // width <= 6:
        raise NotRecognized("its projection gives no scale and shift of its norm's width")
    parts = gives // width

    def twin(dtype: torch.dtype, training: bool) -> nn.Module:
        return twin_of(module, {}, {"linear": LinearMap(read, gives, 0, dtype)}, training=training)

    def trial(where: str, dtype: torch.dtype, *leading: int) -> Trial:
        x = rows_of_scales(*leading, width) if dtype == torch.float32 else normal(*leading, width, dtype=dtype)
        return Trial(where, (x, normal(leading[0], read, seed=1, dtype=dtype)))

    def call(forward: Any, of: nn.Module, x: Tensor, c: Tensor) -> Any:
        return forward(of, x, **{condition: c})

    theirs = partial(call, type(module).forward)

    kinds = [
        Recognized(
            "modulated",
            (("condition", condition), ("eps", eps), ("normalise", kind), ("order", order), ("parts", parts)),
        )
        for kind in ("layer_norm", "rms_norm")
        for order in ((0, 1), (1, 0))
    ]
    settings = [
        (trial("for inputs of 3 dimensions", torch.float32, 2, 7), torch.float32, True),
        (trial("in evaluation", torch.float32, 3, 1), torch.float32, False),
        *((trial(f"in {str(dtype)[6:]}", dtype, 2, 5), dtype, True) for dtype in HALVES),
    ]
    first, dtype, training = settings[0]
    own = twin(dtype, training)
    check_pure(partial(theirs, own), own, first)
    alike = []
    for kind in kinds:
        ours = replace.forward_of("modulated", type(module), **dict(kind.options))
        if not difference(partial(call, ours, own), partial(theirs, own), first._replace(gradients=False)):
            alike.append((kind, partial(call, ours)))
    if len(alike) != 1:
        raise NotRecognized("it computes none of our ops" if not alike else "it computes more than one of our ops")
    kind, ours = alike[0]
    for given, dtype, training in settings:
        copied = twin(dtype, training)
        if found := difference(partial(ours, copied), partial(theirs, copied), given, list(copied.parameters())):
            raise NotRecognized(f"it computes none of our ops: like a modulated norm, but with {found}")
    return kind


def _modulated(
    original: type[nn.Module], condition: str, eps: str, normalise: str, order: tuple[int, int], parts: int
) -> Any:
    own, names = original.forward, positional(original.forward)[1:]
    op = {"layer_norm": rtkernels.layer_norm, "rms_norm": rtkernels.rms_norm}[normalise]

    def forward(self, *args, **kwargs):
        given = dict(zip(names, args, strict=False)) | kwargs
        x, emb = given.get(names[0]), given.get(condition)
        linear = self._modules["linear"]
        fits = isinstance(x, Tensor) and isinstance(emb, Tensor) and x.dtype in _FLOATS and x.dim() == 3
        if not fits or emb.dim() != 2 or autocasts(x) or has_watched_child(self, ("linear",)):
            return own(self, *args, **kwargs)
        style = linear(torch.nn.functional.silu(emb).to(x.dtype))
        if style.dtype != x.dtype:
            return own(self, *args, **kwargs)
        chunks = style.chunk(parts, 1)
        shift, scale = chunks[order[0]].unsqueeze(1), chunks[order[1]].unsqueeze(1)
        y = op(x, scale=scale, shift=shift, eps=getattr(self._modules["norm"], eps))
        return y if parts == 2 else (y, *chunks[2:])

    return forward


replace.register("modulated", _modulated)
