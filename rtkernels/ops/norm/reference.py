"""The normalisations and their backward in plain torch: for CPU tensors, and what the kernels are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rtkernels.ops.norm.layer_norm_plan import parameter_sums
from rtkernels.runtime.layout import nothing, row_count


def _gain(weight: Tensor | None, offset: float) -> Tensor | float:
    return 1.0 if weight is None else weight.float() + offset


# ---- rms_norm -------------------------------------------------------------------------------------------------------


def rms_fwd(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """Return y."""
    h = x.float()
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * rstd * _gain(weight, offset)).to(x.dtype).contiguous()


def rms_bwd(
    dy: Tensor, h: Tensor, weight: Tensor | None, dsum: Tensor | None, eps: float, offset: float, weight_grad: bool
):
    """Return dh and dweight."""
    hf, dyf = h.float(), dy.float()
    rstd = torch.rsqrt(hf.square().mean(-1, keepdim=True) + eps)
    g = dyf * _gain(weight, offset)
    dh = rstd * g - hf * rstd**3 * (g * hf).mean(-1, keepdim=True)
    if dsum is not None:
        dh = dh + dsum.float()
    dweight = nothing(h)
    if weight_grad:
        dweight = (dyf * hf * rstd).reshape(row_count(h.shape), h.shape[-1]).sum(0).to(weight.dtype)
    return dh.to(h.dtype).contiguous(), dweight


# ---- layer_norm -----------------------------------------------------------------------------------------------------


def normalised_rows(h: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``(h - mean) * rstd`` and rstd; the mean of equal numbers is exactly that number."""
    rough = h.mean(-1, keepdim=True)
    centred = h - (rough + (h - rough).mean(-1, keepdim=True))
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * rstd, rstd


def layer_fwd(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float) -> Tensor:
    """Return y."""
    y = normalised_rows(x.float(), eps)[0] * _gain(weight, offset)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).contiguous()


def layer_bwd(
    dy: Tensor, h: Tensor, weight: Tensor | None, bias: Tensor | None, dsum: Tensor | None, eps: float, offset: float,
    parameter_grad: bool,
):  # fmt: skip
    """Return dh and the gradients of the parameters, as rows."""
    d = dy.float()
    normalised, rstd = normalised_rows(h.float(), eps)
    g = d * _gain(weight, offset)
    dh = rstd * (g - g.mean(-1, keepdim=True) - normalised * (g * normalised).mean(-1, keepdim=True))
    if dsum is not None:
        dh = dh + dsum.float()
    sums, dtype = parameter_sums(weight, bias, parameter_grad)
    gradients = nothing(h)
    if sums:
        both = torch.stack((d * normalised, d)[:sums]).reshape(sums, row_count(h.shape), h.shape[-1])
        gradients = both.sum(1).to(dtype)
    return dh.to(h.dtype).contiguous(), gradients


# ---- the same with a residual, into memory of the caller, over what was normalised ----------------------------------


def added(forward: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a forward that gives y and the sum of x and residual, of which it is the norm."""

    def add_forward(x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        total = (x.float() + residual.float()).to(x.dtype).contiguous()
        return forward(total, *rest), total

    return add_forward


def over(backward: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """Return a backward that writes dh over h and returns the rest."""

    def backward_over(dy: Tensor, h: Tensor, *rest: Any) -> Tensor:
        dh, gradients = backward(dy, h, *rest)
        h.copy_(dh)
        return gradients

    return backward_over
