"""Checks of the arguments of ``fp8_linear``, and codes given in place of x."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm.fp8_operands import PITCH
from rtkernels.ops.quant.hadamard import BLOCKS
from rtkernels.ops.quant.quantize_fp8_plan import FP8_DTYPES, groups_of
from rtkernels.runtime.checks import check_tensor
from rtkernels.runtime.layout import FLOAT_DTYPES, check_same, row_count, token


def check_linear(
    shape: torch.Size, dtype: torch.dtype, device: int, weight: Tensor, bias: Tensor | None, main_grad: Tensor | None
) -> None:
    """Raise an ArgumentError unless weight, bias and main_grad fit together and to x."""
    token("x", dtype)
    check_tensor("weight", weight)
    token("weight", weight.dtype)
    if weight.dim() != 2:
        raise ArgumentError(f"weight has shape {tuple(weight.shape)}; expected [out features, in features]")
    if len(shape) < 1 or shape[-1] != weight.shape[1]:
        raise ArgumentError(f"x has shape {tuple(shape)}; expected [..., {weight.shape[1]}], the columns of weight")
    check_same("weight", weight.get_device(), device, "device index")
    if bias is not None:
        check_tensor("bias", bias)
        token("bias", bias.dtype)
        check_same("bias", tuple(bias.shape), (weight.shape[0],), "shape", of="weight's rows")
        check_same("bias", bias.get_device(), device, "device index")
    if main_grad is not None:
        check_main_grad(main_grad, weight)


def check_main_grad(main_grad: Tensor, weight: Tensor) -> None:
    """Raise an ArgumentError unless the gradient of a weight can be added to a tensor."""
    check_tensor("main_grad", main_grad)
    token("main_grad", main_grad.dtype, (torch.float32,))
    check_same("main_grad", tuple(main_grad.shape), tuple(weight.shape), "shape", of="weight")
    check_same("main_grad", main_grad.get_device(), weight.get_device(), "device index", of="weight")
    if not main_grad.is_contiguous():
        raise ArgumentError(f"main_grad has strides {main_grad.stride()}; expected a contiguous tensor")


def check_recipe(recipe: str, smooth: Tensor | None, wgrad: str, is_codes: bool) -> None:
    """Raise an ArgumentError unless options go with the recipe and with the kind of x."""
    if (recipe == "smooth") != (smooth is not None):
        came = "None" if smooth is None else "given"
        raise ArgumentError(f"smooth is {came} with recipe {recipe!r}; expected it with recipe 'smooth' only")
    if wgrad == "bf16" and is_codes:
        raise ArgumentError("wgrad is 'bf16' and x is codes; expected 'fp8', or x as a tensor")


def check_rotation(weight: Tensor, rotation: int) -> None:
    """Raise an ArgumentError unless both features of a weight are multiples of a rotation that there is."""
    if rotation not in BLOCKS:
        raise ArgumentError(f"rotation is {rotation!r}; expected one of {', '.join(map(str, BLOCKS))}")
    if weight.shape[0] % rotation or weight.shape[1] % rotation:
        raise ArgumentError(
            f"weight has shape {tuple(weight.shape)}; recipe 'hadamard' expects multiples of the rotation, {rotation}"
        )


def given_codes(x: Any, weight: Tensor, recipe: str, scale_layout: str) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the tensor that receives the gradient, and the codes in the form of ``OPERAND``'s results."""
    q, scale, y = x.q, x.scale, getattr(x, "y", None)
    q_t, scale_t = getattr(x, "q_t", None), getattr(x, "scale_t", None)
    if recipe != "block":
        raise ArgumentError(f"x is codes (a {type(x).__name__}); expected a tensor for recipe {recipe!r}")
    if scale_layout not in ("row", "column"):
        raise ArgumentError(f"scale_layout is {scale_layout!r}; expected 'row' or 'column'")
    if q is None or scale is None:
        raise ArgumentError("x.q or x.scale is None; expected codes by rows (layout 'row' or 'both')")
    token("x.q", q.dtype, FP8_DTYPES)
    rows, groups = row_count(q.shape), groups_of(q.shape[-1])
    if q.shape[-1] % PITCH:
        raise ArgumentError(f"x.q has {q.shape[-1]} columns; expected a multiple of {PITCH} for codes")
    wanted = (groups, rows) if scale_layout == "column" else (*q.shape[:-1], groups)
    check_same("x.scale", tuple(scale.shape), wanted, "shape", of=f"x.q, scale_layout {scale_layout!r}")
    if is_grad_enabled() and weight.requires_grad and (q_t is None or scale_t is None):
        raise ArgumentError("x.q_t or x.scale_t is None; expected layout 'both', as weight requires grad")
    if y is None:
        y = q.new_empty((), dtype=torch.bfloat16).expand(q.shape)
    else:
        token("x.y", y.dtype, FLOAT_DTYPES)
        check_same("x.y", tuple(y.shape), tuple(q.shape), "shape", of="x.q")
    if q_t is not None and rows % PITCH:
        q_t = torch.nn.functional.pad(q_t.view(torch.uint8), (0, -rows % PITCH)).view(q_t.dtype)
    column_scale = scale if scale_layout == "column" else scale.reshape(rows, groups).t()
    return y, (q.reshape(rows, q.shape[-1]), column_scale, q_t, scale_t)
