"""Norm of a branch and its sum with the residual, for the few rows of a decoding step, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import check_same
from rtkernels.runtime.operator.declared import Aligned, Meta, Operator
from rtkernels.runtime.operator.plan import IN_TORCH, Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_HALVES = (torch.bfloat16, torch.float16)
_THREADS = 256
_KERNEL = Kernel(
    "norm/step_norm.cu", "step_norm", template="T", max_registers=80, tier="serve",
    args="x:ptr weight:ptr residual:ptr y:ptr cols:i64 x_row:i64 residual_row:i64 eps:f64 offset:f64",
    variants=[("bf16",), ("fp16",)],
)  # fmt: skip


def _check(x: Meta, weight: Meta) -> None:
    if not x.dim() or not x.shape[-1]:
        raise ArgumentError(f"x has shape {tuple(x.shape)}; expected rows of one element or more")
    check_same("weight", weight.dtype, x.dtype, "dtype", of="x")
    check_same("weight", tuple(weight.shape), tuple(x.shape[-1:]), "shape", of="the last dimension of x")


def _plan(x: Meta, device: int) -> Steps:
    cols = x.shape[-1]
    if cols % 8 or x.rows > 65535:
        return IN_TORCH
    launch = _KERNEL.bind((x.token,), device, x.rows, _THREADS, overlap=True)
    return Steps(Step(launch, "x", "weight", "residual", "y", cols, cols, cols, "eps", "offset"))


def _reference(x, weight, residual, eps, offset) -> Tensor:
    in_fp32 = x.float()
    normed = in_fp32 * torch.rsqrt(in_fp32.square().mean(-1, keepdim=True) + eps) * (offset + weight.float())
    return (residual.float() + normed.to(x.dtype).float()).to(x.dtype).contiguous()


FORWARD = Operator(
    "step_norm",
    (Aligned("x", _HALVES), Aligned("weight", _HALVES), Aligned("residual", like="x")),
    options="float eps, float offset", numbers="eps offset", results="y", outputs=lambda x: (Memory(x.shape, x.dtype),),
    plan=_plan, reference=_reference, check=_check,
)  # fmt: skip

OP = Op("step_norm", public=(), kernels=(_KERNEL,), torch_ops=(FORWARD,))
