"""What all normalisations over the last dimension demand of their tensors, and of memory that the caller gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.runtime.checks import check_same, check_shape, token
from rtkernels.runtime.layout import extent, may_overlap
from rtkernels.runtime.operator.autograd import needs_grad

Metadata = tuple[Any, ...]  # (dtype, shape, stride, device index)


def check_inputs(
    x: Metadata, weight: Metadata | None, bias: Metadata | None, residual: Metadata | None, **vectors: Metadata | None
) -> None:
    """Raise an ArgumentError unless these tensors go together. `vectors`: fp32, one number per column."""
    dtype, shape = x[:2]
    token("x", dtype)
    if not shape:
        raise ArgumentError("x has no dimensions; expected at least one, the last is normalised")
    accepted = {"weight": (dtype, torch.float32), "bias": (dtype, torch.float32)}
    for name, meta in (("weight", weight), ("bias", bias), *vectors.items()):
        if meta is not None:
            token(name, meta[0], accepted.get(name, (torch.float32,)))
            check_shape(name, meta[1], shape[-1:], "the last dimension of x")
    if weight is not None and bias is not None:
        check_same("bias", bias[0], weight[0], "dtype", of="weight")
    if residual is not None:
        check_same("residual", residual[0], dtype, "dtype")
        check_same("residual", residual[1], shape, "shape")


def check_gradients(h: Metadata, **gradients: Metadata | None) -> None:
    """Raise an ArgumentError unless incoming gradients have the dtype and shape of what was normalised."""
    for name, meta in gradients.items():
        if meta is not None:
            check_same(name, meta[0], h[0], "dtype", of="h")
            check_same(name, meta[1], h[1], "shape", of="h")


def check_out(out: Tensor, x: Tensor, residual: Tensor | None, *vectors: Tensor | None) -> None:
    """Raise an ArgumentError unless `out` can take a result of x's shape and dtype.

    It may be x or the residual itself: every element is read before it is written, by the same thread.
    """
    check_same("out", out.dtype, x.dtype, "dtype")
    check_same("out", out.shape, x.shape, "shape")
    check_same("out", out.get_device(), x.get_device(), "device index")
    if out.numel() == 0:
        return
    first, last = extent(out)
    if last - first < out.numel() * out.itemsize:
        raise ArgumentError(f"out has strides {out.stride()}; expected memory of its own for every element")
    for name, t in (("x", x), ("residual", residual), *(("weight or bias", v) for v in vectors)):
        if t is None:
            continue
        same = name in ("x", "residual") and t.data_ptr() == out.data_ptr() and t.stride() == out.stride()
        if not same and may_overlap(out, t):
            raise ArgumentError(f"out overlaps {name}; expected memory of its own, or exactly x or residual")


def check_over(h: Tensor, *others: Tensor | None) -> None:
    """Raise an ArgumentError unless the gradient of `h` can be written over it."""
    if not h.is_contiguous():
        raise ArgumentError(f"h has strides {h.stride()}; expected a dense tensor to write the gradient over")
    if any(t is not None and may_overlap(h, t) for t in others):
        raise ArgumentError("h shares memory with another input; expected its own to write the gradient over")


def check_no_gradient(out: Tensor, *inputs: Tensor | None) -> None:
    """Raise an ArgumentError if a call with `out` would have to be recorded."""
    if recorded(out, *inputs):
        raise ArgumentError(
            "out is given but a tensor needs gradients; expected torch.no_grad() around the call, detached tensors, or "
            "no out"
        )


def recorded(*tensors: Tensor | None) -> bool:
    """Return True if autograd records a call with these tensors."""
    return is_grad_enabled() and any(needs_grad(t) for t in tensors if t is not None)
