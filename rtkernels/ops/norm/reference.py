"""The normalisations and their backward in plain torch: for CPU tensors, and what the kernels are compared with."""

from __future__ import annotations

from collections.abc import Callable

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


def _total(x: Tensor, residual: Tensor) -> Tensor:
    return (x.float() + residual.float()).to(x.dtype).contiguous()


def add_rms_fwd(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float):
    """Return y and the sum of x and residual, of which it is the norm."""
    total = _total(x, residual)
    return rms_fwd(total, weight, eps, offset), total


def add_layer_fwd(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float):
    """Return y and the sum of x and residual, of which it is the norm."""
    total = _total(x, residual)
    return layer_fwd(total, weight, bias, eps, offset), total


def rms_bwd_over(
    dy: Tensor, h: Tensor, weight: Tensor | None, dsum: Tensor | None, eps: float, offset: float, weight_grad: bool,
    backward: Callable[..., tuple[Tensor, Tensor]] = rms_bwd,
) -> Tensor:  # fmt: skip
    """Write dh over h and return dweight. `backward`: who computes them."""
    dh, dweight = backward(dy, h, weight, dsum, eps, offset, weight_grad)
    h.copy_(dh)
    return dweight


def layer_bwd_over(
    dy: Tensor, h: Tensor, weight: Tensor | None, bias: Tensor | None, dsum: Tensor | None, eps: float, offset: float,
    parameter_grad: bool, backward: Callable[..., tuple[Tensor, Tensor]] = layer_bwd,
) -> Tensor:  # fmt: skip
    """Write dh over h and return the gradients of the parameters. `backward`: who computes them."""
    dh, gradients = backward(dy, h, weight, bias, dsum, eps, offset, parameter_grad)
    h.copy_(dh)
    return gradients
