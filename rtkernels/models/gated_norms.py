"""Find which ``group_rms_norm_gate`` a norm with a gate computes, as those behind delta rules and Mamba-2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.models import replace
from rtkernels.models.probe import (
    HALVES,
    NotRecognized,
    Recognized,
    Trial,
    check_plain,
    normal,
    positional,
    probing,
    rows_of_scales,
    twin_of,
)
from rtkernels.models.proof import Setting, prove
from rtkernels.models.recognize import _epsilon, autocasts, is_norm

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def is_gated_norm(module: nn.Module) -> bool:
    """Return True if a module may be a norm with a gate: its forward takes both."""
    if not is_norm(module):
        return False
    names = positional(type(module).forward)
    return len(names) == 3 and names[2] in ("gate", "z")


@probing()
def recognize(module: nn.Module) -> Recognized:
    """Return which norm with a gate a module computes.

    Raises:
        NotRecognized: It computes none of ours.
    """
    given = {name: p for name, p in module._parameters.items() if p is not None}
    if set(given) != {"weight"} or given["weight"].dim() != 1:
        raise NotRecognized(f"its parameters are {', '.join(given)}; expected weight")
    eps = _epsilon(module)
    if eps is None:
        raise NotRecognized("it has no epsilon that is a number")
    check_plain(module)
    width = given["weight"].shape[0]

    def twin(w: int, dtype: torch.dtype, training: bool) -> nn.Module:
        return twin_of(module, {"weight": normal(w, seed=9, dtype=dtype)}, training=training)

    numbers = {v for v in module.__dict__.values() if type(v) is int and 0 < v <= width and width % v == 0}
    counts = sorted({1, *numbers, *(width // v for v in numbers)})
    kinds = []
    for groups in counts:
        for act in ("silu", "sigmoid"):
            for first in (False, True):
                options = (("act", act), ("eps", eps), ("gate_first", first), ("groups", groups))
                name = f"{'a gate before' if first else 'a gate behind'} a norm of {groups} groups, {act}"
                kinds.append((name, Recognized("gated_norm", options)))

    def of(where: str, *shape: int, dtype: torch.dtype = torch.float32, training: bool = True) -> Setting:
        def trial(w: int) -> Trial:
            x = rows_of_scales(*shape, w) if dtype == torch.float32 else normal(*shape, w, dtype=dtype)
            return Trial(where, (x, normal(*shape, w, seed=1, dtype=dtype) * 2))

        return Setting(trial, (width,), dtype, training)

    settings = [
        of("for inputs of 2 dimensions", 7),
        of("for inputs of 3 dimensions", 2, 3),
        of("in evaluation", 2, 3, training=False),
        *(of(f"in {str(dtype)[6:]}", 2, 3, dtype=dtype) for dtype in HALVES),
    ]
    return prove(module, width, kinds, twin, settings)


def _gated_norm(original: type[nn.Module], act: str, eps: str, gate_first: bool, groups: int) -> Any:
    own, name = original.forward, positional(original.forward)[2]
    first = positional(original.forward)[1]

    def forward(self, *args, **named):
        given = dict(zip((first, name), args, strict=False)) | named
        x, gate = given.get(first), given.get(name)
        if len(args) > 2 or set(given) != {first, name} or not _fits(x, gate, self.weight):
            return own(self, *args, **named)
        return rtkernels.group_rms_norm_gate(
            x, gate, self.weight, groups=groups, eps=getattr(self, eps), act=act, gate_first=gate_first
        )

    return forward


def _fits(x: Any, gate: Any, weight: Tensor) -> bool:
    tensors = isinstance(x, Tensor) and isinstance(gate, Tensor)
    if not tensors or x.dtype not in _FLOATS or x.dtype != gate.dtype or x.shape != gate.shape:
        return False
    return x.shape[-1] == weight.shape[0] and (x.dtype == weight.dtype or autocasts(x))


replace.register("gated_norm", _gated_norm)
