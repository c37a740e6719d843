"""What all normalisations over the last dimension demand of their tensors."""

from __future__ import annotations

from typing import Any

import torch

from rtkernels.errors import ArgumentError
from rtkernels.runtime.layout import check_same, token

Metadata = tuple[Any, ...]  # (dtype, shape, stride, device index)


def check_inputs(
    x: Metadata, weight: Metadata | None, bias: Metadata | None, residual: Metadata | None, **vectors: Metadata | None
) -> None:
    """Raise an ArgumentError unless these tensors go together. `vectors`: fp32, one number per column."""
    dtype, shape, _, device = x[:4]
    token("x", dtype)
    if not shape:
        raise ArgumentError("x has no dimensions; expected at least one, the last is normalised")
    accepted = {"weight": (dtype, torch.float32), "bias": (dtype, torch.float32)}
    for name, meta in (("weight", weight), ("bias", bias), *vectors.items()):
        if meta is not None:
            token(name, meta[0], accepted.get(name, (torch.float32,)))
            if tuple(meta[1]) != (shape[-1],):
                raise ArgumentError(
                    f"{name} has shape {tuple(meta[1])}; expected ({shape[-1]},), the last dimension of x"
                )
            check_same(name, meta[3], device, "device index")
    if weight is not None and bias is not None:
        check_same("bias", bias[0], weight[0], "dtype", of="weight")
    if residual is not None:
        check_same("residual", residual[0], dtype, "dtype")
        check_same("residual", residual[1], shape, "shape")
        check_same("residual", residual[3], device, "device index")
