"""The "smooth" recipe of fp8_linear: columns of x times a factor, those of the weight divided by it.

``x * smooth = x_q * x_scale[t]`` and ``weight / smooth = w_q * w_scale[n]`` are quantised by rows, one time. The
gradients take the same codes, transposed: w_scale and x_scale vary along the dimension that these sum over, so they go
into dy before it is quantised, and `smooth` varies along one that they keep:

    dx[t, k] = smooth[k] * sum over n of (dy * w_scale)[t, n] * w_q[n, k]
    dw[n, k] = 1 / smooth[k] * sum over t of (dy * x_scale)[t, n] * x_q[t, k]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm.fp8_operands import PITCH, rounded, zeros_of
from rtkernels.ops.gemm.scaled_mm import scaled_mm
from rtkernels.ops.layout.transpose import TRANSPOSE
from rtkernels.ops.quant.quantize_fp8_channel import CHANNEL
from rtkernels.ops.quant.smooth_quant import SMOOTH
from rtkernels.runtime.layout import check_same, nothing, row_count, token
from rtkernels.runtime.operator.autograd import needs_grad, once_differentiable
from rtkernels.runtime.operator.declared import Argument, Operator
from rtkernels.runtime.operator.plan import Memory, Steps
from rtkernels.runtime.operator.registry import Op

E4M3 = torch.float8_e4m3fn


def _check(x: Any, smooth: Any) -> None:
    if len(x.shape) != 2:
        raise ArgumentError(f"x has shape {tuple(x.shape)}; expected a matrix")
    check_same("smooth", smooth.device, x.device, "device index")
    if 0 not in x.shape:
        check_same("smooth", tuple(smooth.shape), (x.shape[1],), "shape", of="x's columns")


def _quantized(
    x: Tensor, smooth: Tensor, dtype: torch.dtype, pow2_scale: bool, transposed: bool, with_amax: bool
) -> tuple[Tensor, ...]:
    if x.numel() == 0:
        return zeros_of(x, _outputs(x, smooth, dtype, pow2_scale, transposed, with_amax))
    cols = x.shape[1]
    extra = -cols % PITCH
    if extra:
        x, smooth = F.pad(x, (0, extra)), F.pad(smooth, (0, extra))
    q, scale, amax = SMOOTH(x, smooth, None, dtype, pow2_scale, with_amax)
    q_t = TRANSPOSE(q, 0, 1, PITCH) if transposed else nothing(x)
    return q, scale, q_t, amax[:cols].clone() if with_amax and extra else amax


def _outputs(x, smooth, dtype, pow2_scale, transposed, with_amax):
    rows, cols = x.shape[0], rounded(x.shape[1], PITCH)
    return (
        Memory((rows, cols), dtype),
        Memory((rows,), torch.float32),
        Memory((cols, rounded(rows, PITCH)), dtype) if transposed else None,
        Memory((x.shape[1],), torch.float32) if with_amax else None,
    )


SMOOTH_OPERAND = Operator(
    "fp8_smooth_operand", (Argument("x", None), Argument("smooth", None)),
    options="ScalarType dtype, bool pow2_scale, bool transposed, bool with_amax",
    results="q scale q_t amax", outputs=_outputs, check=_check, plan=lambda: Steps(instead=_quantized),
    reference=_quantized, plans_empty=True,
)  # fmt: skip


class _SmoothLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, main_grad, smooth, grad_dtype, out_dtype, pow2_scale, with_amax, backend):
        ctx.set_materialize_grads(False)
        y, amax, x_codes, w_codes = _product(
            x, weight, bias, smooth, out_dtype, pow2_scale, with_amax, backend, weight.requires_grad, x.requires_grad
        )
        ctx.save_for_backward(*x_codes, *w_codes, smooth)
        ctx.options = grad_dtype, pow2_scale, backend
        ctx.x_shape, ctx.x_dtype, ctx.weight_shape, ctx.weight_dtype = x.shape, x.dtype, weight.shape, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.main_grad = main_grad  # not saved: later micro-batches may have changed it, which is the point
        ctx.mark_non_differentiable(amax)
        return y, amax

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _):
        if dy is None:
            return (None,) * 10
        (grad_dtype, pow2_scale, backend), (n, k) = ctx.options, ctx.weight_shape
        x_q_t, x_scale, w_q_t, w_scale, smooth = ctx.saved_tensors
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        flat = dy.reshape(row_count(ctx.x_shape), n)
        dx = dw = dbias = None
        if need_x:
            q, scale, _, _ = SMOOTH_OPERAND(flat, w_scale, grad_dtype, pow2_scale, False, False)
            options = {"recipe": "row", "out_dtype": ctx.x_dtype, "backend": backend}
            dx = scaled_mm(q, w_q_t[:k], scale, smooth, **options).view(ctx.x_shape)
        if need_w and flat.shape[0] == 0:
            dw = flat.new_zeros(n, k, dtype=ctx.weight_dtype)
        elif need_w:
            q, scale = CHANNEL(flat, x_scale, None, grad_dtype, pow2_scale, PITCH)
            options = {"recipe": "row", "out_dtype": ctx.weight_dtype, "backend": backend}
            if ctx.main_grad is not None:
                options |= {"out_dtype": None, "out": ctx.main_grad, "accumulate": True}
            dw = scaled_mm(q, x_q_t[:k], scale, smooth.reciprocal(), **options)
        if need_bias:
            dbias = flat.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, None if ctx.main_grad is not None else dw, dbias, *(None,) * 7


def _product(x, weight, bias, smooth, out_dtype, pow2_scale, with_amax, backend, keep_x, keep_w):
    """Return the result, maxima of x's columns, and what the gradients of the weight and of x need."""
    flat = x.reshape(row_count(x.shape), x.shape[-1])
    q, scale, q_t, amax = SMOOTH_OPERAND(flat, smooth, E4M3, pow2_scale, keep_x, with_amax)
    w_q, w_scale, w_q_t, _ = SMOOTH_OPERAND(weight, smooth.reciprocal(), E4M3, pow2_scale, keep_w, False)
    y = scaled_mm(q, w_q, scale, w_scale, recipe="row", bias=bias, out_dtype=out_dtype, backend=backend)
    x_codes = (q_t, scale) if keep_x else (None, None)
    return y.view(*x.shape[:-1], weight.shape[0]), amax, x_codes, (w_q_t, w_scale) if keep_w else (None, None)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor | None, smooth: Tensor, grad_dtype: torch.dtype,
    out_dtype: torch.dtype, pow2_scale: bool, with_amax: bool, backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result and, with_amax, the largest magnitudes of x's columns; arguments as for ``fp8_linear``."""
    token("smooth", smooth.dtype, (torch.float32,))
    check_same("smooth", tuple(smooth.shape), (weight.shape[1],), "shape", of="weight's columns")
    check_same("smooth", smooth.get_device(), x.get_device(), "device index")
    smooth = smooth.detach()
    if is_grad_enabled() and needs_grad(x, weight, bias):
        return _SmoothLinear.apply(
            x, weight, bias, main_grad, smooth, grad_dtype, out_dtype, pow2_scale, with_amax, backend
        )
    given = [t if t is None else t.detach() for t in (x, weight, bias)]
    return _product(*given, smooth, out_dtype, pow2_scale, with_amax, backend, False, False)[:2]


OP = Op("fp8_linear_smooth", public=(), kernels=(), torch_ops=(SMOOTH_OPERAND,))
