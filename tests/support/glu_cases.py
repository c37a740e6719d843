"""Inputs of gated activations, and what their results must be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import rtkernels
from support.compare import ROUNDOFF, assert_close, assert_same_bits

glu = rtkernels.glu


def cut(x: Tensor, low: float = -math.inf, high: float = math.inf) -> Tensor:
    """Clamp with the slope docs/numerics.md states: 1 within the limits and at them, 0 beyond, NaN for NaN.

    The slope of torch's clamp exactly at a limit depends on the release.
    """
    return torch.where(x > high, high, torch.where(x < low, low, x))


ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "none": lambda x: x,
    "swiglu_oai": lambda x: cut(x, high=7.0) * torch.sigmoid(1.702 * cut(x, high=7.0)),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
# For fp64: torch's own formulas lose their digits to cancellation where the result is small.
EXACT = ACTS | {
    "gelu_tanh": lambda x: x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    "gelu_erf": lambda x: x * 0.5 * torch.erfc(x * -math.sqrt(0.5)),
}


def plain_glu(x: Tensor, up: Tensor | None, weight: Tensor | None, act: str, limit: float | None = None) -> Tensor:
    """The op in plain torch, rounding wherever torch rounds; exact enough in fp64."""
    gate, up = x.chunk(2, -1) if up is None else (x, up)
    if limit is not None:
        gate, up = cut(gate, high=limit), cut(up, -limit, limit)
    if act == "swiglu_oai":
        up = (cut(up, -7.0, 7.0) if limit is None else up) + 1
        act = "quick_gelu" if limit is not None else act
    y = (EXACT if x.dtype == torch.float64 else ACTS)[act](gate) * up
    return y if weight is None else y * weight.unsqueeze(-1)


# ---- inputs: one list for every place -------------------------------------------------------------------------------


@dataclass
class Inputs:
    x: Tensor
    up: Tensor | None = None
    weight: Tensor | None = None
    dy: Tensor | None = None  # drawn in the shape of the result if None

    def leaves(self, dtype: torch.dtype | None = None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return x, up and weight as leaves that want gradients; with a dtype, copies of it."""
        return tuple(
            t if t is None else (t.detach() if dtype is None else t.detach().to(dtype)).requires_grad_()
            for t in (self.x, self.up, self.weight)
        )


Normal = Callable[..., Tensor]


def spaced(normal: Normal, rows: int, cols: int, *, every: int = 1, skip: int = 0, pad: int = 0) -> Tensor:
    """[rows, cols] out of a wider tensor: each `every`-th row, columns from `skip`, `pad` unused columns after."""
    return normal(rows * every, skip + cols + pad)[::every, skip : skip + cols]


CASES: dict[str, Callable[[Normal], Inputs]] = {
    "merged": lambda n: Inputs(n(5, 2 * 64)),
    "merged_3d": lambda n: Inputs(n(2, 3, 2 * 40)),
    "merged_1d": lambda n: Inputs(n(2 * 24)),
    "one_element": lambda n: Inputs(n(2)),
    "one_column": lambda n: Inputs(n(37, 2)),
    "odd": lambda n: Inputs(n(3, 2 * 33)),
    "odd_wide": lambda n: Inputs(n(2, 2 * 1027)),
    "several_strips": lambda n: Inputs(n(3, 2 * 2200)),
    "many_short_rows": lambda n: Inputs(n(530, 2 * 8)),
    "no_rows": lambda n: Inputs(n(0, 2 * 16)),
    "no_columns": lambda n: Inputs(n(4, 0), weight=n(4)),
    "separate": lambda n: Inputs(n(5, 64), n(5, 64)),
    "separate_strides": lambda n: Inputs(spaced(n, 5, 64, pad=8), spaced(n, 5, 64, every=2)),
    "separate_odd": lambda n: Inputs(n(4, 19), n(4, 19)),
    "strided_rows": lambda n: Inputs(spaced(n, 5, 2 * 64, every=3, pad=16)),
    "unaligned": lambda n: Inputs(spaced(n, 5, 2 * 64, skip=1, pad=7)),
    "unaligned_rows": lambda n: Inputs(spaced(n, 5, 2 * 64, pad=1)),
    "transposed": lambda n: Inputs(n(2 * 16, 6).t()),
    "expanded_rows": lambda n: Inputs(n(1, 2 * 32).expand(4, -1), n(1, 2 * 32).expand(4, -1)),
    "dy_expanded": lambda n: Inputs(n(6, 2 * 64), dy=n(1).expand(6, 64)),
    "dy_rows_expanded": lambda n: Inputs(n(6, 2 * 64), dy=n(1, 64).expand(6, 64)),
    "dy_strided": lambda n: Inputs(n(6, 2 * 64), dy=spaced(n, 6, 64, every=2, pad=8)),
    "dy_unaligned": lambda n: Inputs(n(6, 2 * 64), dy=spaced(n, 6, 64, skip=3, pad=5)),
    "weight": lambda n: Inputs(n(6, 2 * 64), weight=n(6)),
    "weight_fp32": lambda n: Inputs(n(2, 3, 64), n(2, 3, 64), weight=n(2, 3).float()),
    "weight_scalar": lambda n: Inputs(n(2 * 24), weight=n(1)[0]),
    "weight_odd": lambda n: Inputs(n(5, 2 * 77), weight=n(5).float()),
    "weight_wide": lambda n: Inputs(n(2, 2 * 4400), weight=n(2)),
    "weight_wide_odd": lambda n: Inputs(n(2, 2 * 1301), weight=n(2)),
    "weight_many_rows": lambda n: Inputs(n(300, 2 * 8), weight=n(300)),
    "weight_strided": lambda n: Inputs(n(6, 2 * 16), weight=n(12)[::2]),
    "weight_expanded": lambda n: Inputs(n(6, 2 * 16), weight=n(1).expand(6)),
}


def make(case: str, dtype: torch.dtype, device: str) -> Inputs:
    """Build the tensors of a case: the same numbers on every device."""
    generator = torch.Generator().manual_seed(sum(map(ord, case)))

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 2).to(dtype).to(device)

    inputs = CASES[case](normal)
    if inputs.dy is None:
        shape = inputs.x.shape if inputs.up is not None else (*inputs.x.shape[:-1], inputs.x.shape[-1] // 2)
        inputs.dy = normal(*shape)
    return inputs


def check(inputs: Inputs, act: str, limit: float | None = None) -> tuple[Tensor | None, ...]:
    """Run forward and backward and hold every element to its error budget; return result and gradients."""
    wide = inputs.leaves(torch.float64)
    exact = plain_glu(*wide, act, limit)
    exact.backward(inputs.dy.double())
    leaves = inputs.leaves()
    y = glu(leaves[0], leaves[1], act=act, weight=leaves[2], limit=limit)
    assert y.dtype == inputs.x.dtype and y.is_contiguous() and y.shape == exact.shape
    quiet = glu(inputs.x.detach(), inputs.up, act=act, weight=inputs.weight, limit=limit)
    assert_same_bits(quiet, y.detach(), "result without gradients")
    y.backward(inputs.dy)

    with torch.no_grad():
        x, up, weight = wide
        gate, up = x.chunk(2, -1) if up is None else (x, up)
        w = 1.0 if weight is None else weight.unsqueeze(-1)
        g = inputs.dy.double()
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        value = EXACT["quick_gelu" if act == "swiglu_oai" and limit is not None else act](gate)
        # One rounding to the stored type, and fp32 arithmetic (8 roundoffs of it) whose errors are relative to the
        # terms that were added (it shows where a slope crosses zero) and grow with the exponent in the tail of act.
        tail = 1 + gate.square()
        other = up.abs() + 1 if act == "swiglu_oai" else up
        dgate, dup = (g * w * other).abs() * tail, (g * w * value).abs() * tail
        terms = {
            "x": dgate if inputs.up is not None else torch.cat((dgate, dup), -1),
            "up": dup,
            "weight": ((g * value * other).abs() * tail).sum(-1),
        }

        def close(what: str, got: Tensor, reference: Tensor, fp32_terms: Tensor) -> None:
            slack = 8 * ROUNDOFF[torch.float32] / ROUNDOFF[got.dtype]
            assert_close(got, reference, scale=reference.abs() + slack * fp32_terms, what=what, c=1.01)

        close("y", y, exact, (value * other * w).abs() * tail)
        for name, leaf, reference in zip(terms, leaves, wide, strict=True):
            if leaf is not None:
                assert leaf.grad.dtype == leaf.dtype
                close(f"d{name}", leaf.grad, reference.grad, terms[name])
    return (y.detach(), *(leaf if leaf is None else leaf.grad for leaf in leaves))
