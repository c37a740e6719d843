"""The activations of gated linear units in plain torch, with their derivatives."""

from __future__ import annotations

from math import inf, pi, sqrt

import torch
from torch import Tensor

from rtkernels.runtime.layout import nothing

_OAI_LIMIT = 7.0
_QUICK = 1.702  # quick GELU's factor inside the sigmoid


def _sigmoid_gate(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sigmoid(z), x * sigmoid(z) and sigmoid(-z), for x of z's sign.

    Made from the smaller of the two sigmoids: 1 minus one that is near 1 has lost its digits, and slopes have that
    times a power of x.
    """
    e = torch.exp(-z.abs())
    small, negative = e / (1 + e), z < 0
    product = torch.where(negative, x * small, torch.where(small == 0, x, x - x * small))
    return torch.where(negative, small, 1 - small), product, torch.where(negative, 1 - small, small)


def _clamped_at(act: str, limit: float | None) -> float | None:
    """Return the limit of an activation that clamps, None for others."""
    if act == "swiglu_oai":
        return _OAI_LIMIT if limit is None else limit
    return None if limit == inf else limit


def value_and_slope(act: str, x: Tensor, limit: float | None = None) -> tuple[Tensor, Tensor]:
    """Return act(x) and its derivative, with x clamped to at most `limit`."""
    limit = _clamped_at(act, limit)
    if limit is not None:
        value, slope = value_and_slope("quick_gelu" if act == "swiglu_oai" else act, x.clamp(max=limit))
        return value, slope.masked_fill(x > limit, 0.0)
    if act == "silu":
        s, y, opposite = _sigmoid_gate(x, x)
        return y, s + y * opposite
    if act == "gelu_tanh":
        linear = sqrt(8 / pi)  # of 2u; (1 + tanh(u)) / 2 is sigmoid(2u)
        cubic, square = 0.044715 * linear, x * x
        doubled = x * (linear + cubic * square)
        s, y, opposite = _sigmoid_gate(x, doubled)
        return y, s + y * opposite * (linear + 3 * cubic * square)
    if act == "gelu_erf":
        below = 0.5 * torch.erfc(x * -sqrt(0.5))
        return x * below, below + x * torch.exp(-0.5 * x**2) / sqrt(2 * pi)
    if act == "relu":
        return torch.relu(x), (~(x <= 0)).to(x.dtype)
    if act == "relu2":
        r = torch.relu(x)
        return r.square(), 2 * r
    if act == "sigmoid":
        s = torch.sigmoid(x)
        return s, s * torch.sigmoid(-x)
    if act == "quick_gelu":
        s, y, opposite = _sigmoid_gate(x, _QUICK * x)
        return y, s + _QUICK * y * opposite
    return x, torch.ones_like(x)


def partner_and_slope(act: str, up: Tensor, limit: float | None = None) -> tuple[Tensor, Tensor]:
    """Return the factor of the activation, for most activations up itself, and its derivative."""
    limit = _clamped_at(act, limit)
    if limit is not None:
        return up.clamp(-limit, limit) + float(act == "swiglu_oai"), (~(up.abs() > limit)).to(up.dtype)
    return up, torch.ones_like(up)


def halves(x: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return gate and up in fp32."""
    gate, up = x.chunk(2, -1) if up is None else (x, up)
    return gate.float(), up.float()


def gradients(
    dy: Tensor,
    x: Tensor,
    up: Tensor | None,
    weight: Tensor | None,
    act: str,
    weight_grad: bool,
    limit: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of [gate | up] in fp32, and that of the weight."""
    gate, other = halves(x, up)
    value, slope = value_and_slope(act, gate, limit)
    partner, partner_slope = partner_and_slope(act, other, limit)
    g = dy.float()
    dweight = (g * value * partner).sum(-1).to(weight.dtype).contiguous() if weight_grad else nothing(x)
    if weight is not None:
        g = g * weight.float().unsqueeze(-1)
    return torch.cat((g * partner * slope, g * value * partner_slope), -1), dweight
