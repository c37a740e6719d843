"""layer_norm and its backward in plain torch: for CPU tensors, and what the kernels are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.norm.layer_norm_plan import check
from rtkernels.ops.norm.statistics import check_out
from rtkernels.runtime.layout import check_same, metadata, nothing, row_count


def parameter_sums(weight: Tensor | None, bias: Tensor | None, wanted: bool) -> tuple[int, torch.dtype | None]:
    """Return how many parameter gradients a backward call makes, and their dtype. dbias always follows dweight."""
    if not wanted:
        return 0, None
    return (1, weight.dtype) if bias is None else (2, bias.dtype)


def check_bwd(dy, h, weight, bias, dsum, parameter_grad: bool) -> None:
    """Raise an ArgumentError for arguments of the backward that do not fit together."""
    check(metadata(h), metadata(weight), metadata(bias), None)
    for name, tensor in (("dy", dy), ("dsum", dsum)):
        if tensor is not None:
            check_same(name, tensor.dtype, h.dtype, "dtype", of="h")
            check_same(name, tensor.shape, h.shape, "shape", of="h")
            check_same(name, tensor.get_device(), h.get_device(), "device index", of="h")
    if parameter_grad and weight is None and bias is None:
        raise ArgumentError("parameter_grad is True but there is neither weight nor bias")


def _gain(weight: Tensor | None, offset: float) -> Tensor | float:
    return 1.0 if weight is None else weight.float() + offset


def normalised_rows(h: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``(h - mean) * rstd`` and rstd; the mean of equal numbers is exactly that number."""
    rough = h.mean(-1, keepdim=True)
    centred = h - (rough + (h - rough).mean(-1, keepdim=True))
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * rstd, rstd


def reference_fwd(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float) -> Tensor:
    """Return y."""
    check(metadata(x), metadata(weight), metadata(bias), None)
    y = normalised_rows(x.float(), eps)[0] * _gain(weight, offset)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).contiguous()


def reference_add_fwd(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float
):
    """Return y and the sum of x and residual, of which it is the norm."""
    check(metadata(x), metadata(weight), metadata(bias), metadata(residual))
    total = (x.float() + residual.float()).to(x.dtype).contiguous()
    return reference_fwd(total, weight, bias, eps, offset), total


def reference_out(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    out: Tensor,
) -> Tensor:
    """Write y into out; return the sum, empty without a residual."""
    check(metadata(x), metadata(weight), metadata(bias), metadata(residual))
    check_out(out, x, residual, weight, bias)
    if residual is None:
        made, total = reference_fwd(x, weight, bias, eps, offset), nothing(x)
    else:
        made, total = reference_add_fwd(x, residual, weight, bias, eps, offset)
    out.copy_(made)
    return total


def reference_bwd(
    dy: Tensor,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dsum: Tensor | None,
    eps: float,
    offset: float,
    parameter_grad: bool,
):
    """Return dh and the gradients of the parameters, as rows."""
    check_bwd(dy, h, weight, bias, dsum, parameter_grad)
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
