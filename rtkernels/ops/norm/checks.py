"""Checks of tensors, and of the caller's memory, for all normalisations over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.runtime.checks import check_same, check_shape, token
from rtkernels.runtime.operator.aliasing import refuse_shared
from rtkernels.runtime.operator.autograd import needs_grad
from rtkernels.runtime.operator.declared import Meta


def check_inputs(
    x: Meta, weight: Meta | None, bias: Meta | None = None, residual: Meta | None = None, smooth: Meta | None = None
) -> None:
    """Raise an ArgumentError unless these tensors go together. `smooth`: fp32, one number per column."""
    dtype, shape = x.dtype, x.shape
    token("x", dtype)
    if not shape:
        raise ArgumentError("x has no dimensions; expected at least one, the last is normalised")
    for name, meta in (("weight", weight), ("bias", bias), ("smooth", smooth)):
        if meta is not None:
            token(name, meta.dtype, (torch.float32,) if name == "smooth" else (dtype, torch.float32))
            check_shape(name, meta.shape, shape[-1:], "the last dimension of x")
    if weight is not None and bias is not None:
        check_same("bias", bias.dtype, weight.dtype, "dtype", of="weight")
    if residual is not None:
        check_same("residual", residual.dtype, dtype, "dtype")
        check_same("residual", residual.shape, shape, "shape")


def check_gradients(h: Meta, dy: Meta, dsum: Meta | None) -> None:
    """Raise an ArgumentError unless incoming gradients have the dtype and shape of what was normalised."""
    for name, meta in (("dy", dy), ("dsum", dsum)):
        if meta is not None:
            check_same(name, meta.dtype, h.dtype, "dtype", of="h")
            check_same(name, meta.shape, h.shape, "shape", of="h")


def check_over(h: Tensor, *others: Tensor | None) -> None:
    """Raise an ArgumentError unless the gradient of `h` can be written over it."""
    if not h.is_contiguous():
        raise ArgumentError(f"h has strides {h.stride()}; expected a dense tensor to write the gradient over")
    refuse_shared("h", h, [("another input", t) for t in others])


def recorded(*tensors: Tensor | None) -> bool:
    """Return True if autograd records a call with these tensors."""
    return is_grad_enabled() and any(needs_grad(t) for t in tensors if t is not None)
