"""The router's linear layer: logits of 16-bit activations in fp32, with the precision that the caller requests."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm.fp8_linear_checks import check_main_grad
from rtkernels.ops.gemm.weight_gradient import add_product_
from rtkernels.ops.router.router_gemm_kernels import KERNELS, PRECISION, PRECISIONS
from rtkernels.ops.router.router_gemm_plan import plan_bwd, plan_fwd, plan_into
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import check_same, token
from rtkernels.runtime.invariance import starts_from_result
from rtkernels.runtime.layout import as_rows, nothing
from rtkernels.runtime.operator.autograd import applied, needs_grad, once_differentiable
from rtkernels.runtime.operator.declared import Operator
from rtkernels.runtime.operator.kinds import DenseFloat, InPlaceExact, Meta, Rows, UnitStride
from rtkernels.runtime.operator.main_grad import start_of
from rtkernels.runtime.operator.plan import Memory
from rtkernels.runtime.operator.registry import Op

_INPUTS = (torch.bfloat16, torch.float16)
_MAX_ROWS = 2**31 - 1


def _check(x: Meta, weight: Meta, bias: Meta | None = None) -> None:
    token("x", x.dtype, _INPUTS)
    token("weight", weight.dtype)
    if weight.dim() != 2:
        raise ArgumentError(f"weight has shape {tuple(weight.shape)}; expected [experts, hidden size]")
    if not x.shape or x.shape[-1] != weight.shape[1]:
        raise ArgumentError(f"x has shape {tuple(x.shape)}; expected [..., {weight.shape[1]}], the columns of weight")
    if x.rows > _MAX_ROWS:
        raise ArgumentError(f"x has {x.rows} rows; expected at most {_MAX_ROWS}")
    if bias is not None:
        token("bias", bias.dtype)
        check_same("bias", tuple(bias.shape), (weight.shape[0],), "shape", of="weight's rows")


def _check_dy(dy: Meta, x: Meta, experts: int) -> None:
    token("dy", dy.dtype)
    check_same("dy", tuple(dy.shape), (*x.shape[:-1], experts), "shape", of="x with weight's rows")


def _check_bwd(dy: Meta, x: Meta, weight: Meta) -> None:
    _check(x, weight)
    _check_dy(dy, x, weight.shape[0])


def _check_into(main_grad: Meta, dy: Meta, x: Meta) -> None:
    token("x", x.dtype, _INPUTS)
    if not x.shape or not dy.shape:
        raise ArgumentError("x and dy need at least one dimension")
    _check_dy(dy, x, dy.shape[-1])
    token("main_grad", main_grad.dtype, (torch.float32,))
    check_same("main_grad", tuple(main_grad.shape), (dy.shape[-1], x.shape[-1]), "shape", of="dy and x")
    check_same("main_grad", main_grad.device, x.device, "device index", of="dy and x")


def _bwd_padded(dy, x, weight, precision, need_x, need_weight) -> tuple[Tensor, Tensor]:
    """Compute the gradients for rows of x that do not fill vectors: columns of zeros are added."""
    depth = x.shape[-1]
    padded = (F.pad(t, (0, -depth % 8)) for t in (x, weight))
    dx, dweight = BACKWARD.launch(dy, *padded, precision, need_x, need_weight)
    return dx[..., :depth].contiguous(), dweight[..., :depth].contiguous() if need_weight else dweight


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _reference_fwd(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = (as_rows(x).float() @ weight.float().t()).view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias.float()


def _reference_bwd(dy: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool) -> tuple[Tensor, Tensor]:
    g = as_rows(dy).float()
    return (
        (g @ weight.float()).to(x.dtype).view(x.shape) if need_x else nothing(x),
        (g.t() @ as_rows(x).float()).to(weight.dtype).contiguous() if need_weight else nothing(x),
    )


def _reference_into(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    if dy.numel() and x.numel():
        main_grad.addmm_(as_rows(dy).float().t(), as_rows(x).float())


_X, _DY, _WEIGHT = Rows("x", None), DenseFloat("dy", None), UnitStride("weight", None)
FORWARD = Operator(
    "router_gemm_fwd", (_X, _WEIGHT, DenseFloat("bias", None, optional=True)), options="int precision", results="y",
    outputs=lambda x, weight: (Memory((*x.shape[:-1], weight.shape[0]), torch.float32),), plan=plan_fwd,
    reference=_reference_fwd, check=_check,
)  # fmt: skip
BACKWARD = Operator(
    "router_gemm_bwd", (_DY, _X, _WEIGHT), options="int precision, bool need_x, bool need_weight",
    results="dx dweight", plan=partial(plan_bwd, _bwd_padded), reference=_reference_bwd, check=_check_bwd,
    outputs=lambda x, weight, need_x, need_weight: (
        Memory.like(x) if need_x else None, Memory.like(weight) if need_weight else None,
    ),
)  # fmt: skip
BACKWARD_INTO = Operator(
    "router_gemm_bwd_into", (InPlaceExact("main_grad", None), _DY, _X), options="int precision", results="",
    plan=plan_into, reference=_reference_into, check=_check_into,
)  # fmt: skip

_forward = FORWARD.call


class _RouterGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, precision, main_grad):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.precision, ctx.bias_dtype = precision, None if bias is None else bias.dtype
        ctx.main_grad = main_grad  # not saved: later micro-batches may have changed it, which is the point
        ctx.start = start_of(weight, "a router") if main_grad is None else None
        return _forward(x, weight, bias, precision)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dx = dweight = dbias = None
        into = need_weight and ctx.main_grad is not None
        if need_weight and starts_from_result():
            dweight, need_weight, into = _in_blocks(ctx, dy, x, weight), False, False
        if need_x or (need_weight and not into):
            grads = BACKWARD.call(dy, x, weight, ctx.precision, need_x, need_weight and not into)
            dx = grads[0] if need_x else None
            dweight = grads[1] if need_weight and not into else dweight
        if into:
            BACKWARD_INTO(ctx.main_grad, dy, x, ctx.precision)
        if need_bias:
            dbias = as_rows(dy).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dweight, dbias, None, None


def _in_blocks(ctx: Any, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
    """Return the gradient of the weight, or add it to its main_grad: in fp32, in blocks of rows (level 3)."""
    total = ctx.main_grad if ctx.start is None else ctx.start.total
    given = total is not None
    if not given:
        total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    add_product_(total, as_rows(dy).float(), as_rows(x).float())
    if not given:
        return total.to(weight.dtype)
    return None if ctx.start is None else ctx.start.added()


_differentiable = applied(_RouterGemm)


@public(options={"precision": PRECISION})
def router_gemm(
    x: Tensor, weight: Tensor, *, bias: Tensor | None = None, precision: str = "high", main_grad: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``x @ weight.T + bias`` in fp32: the logits of a router.

    16-bit numbers are multiplied exactly by tensor cores. fp32 numbers (a weight, incoming gradients) are first split
    into a sum of 16-bit terms; `precision` sets their number. Relative errors (Frobenius norm) against exact
    arithmetic, for hidden sizes, expert and token counts up to 8192 and sums that do not cancel:

    ========= ====================== ====================== ===========================
    precision logits                 weight's gradient      x's gradient, before its
                                                            one rounding to x's dtype
    ========= ====================== ====================== ===========================
    "fast"    3e-3; 2e-5 if weight   3e-3                   5e-3; 1e-5 if x is fp16
              has x's dtype
    "high"    5e-6                   5e-6                   1e-5
    "exact"   1e-6                   1e-6                   1e-5
    ========= ====================== ====================== ===========================

    For fp16 x, the weight is split into fp16 terms that are scaled by powers of two per expert, so nothing overflows.
    The gradient of an fp16 x is computed from bf16 terms, which have the range of fp32, two per number for every
    precision: incoming gradients of any magnitude keep at least the 11 bits of fp16, and "fast" is not faster there. If
    exact arithmetic gives NaN or infinity, so does this function, but infinity may become NaN if fp32 numbers are
    involved. Results are deterministic. Differentiable once in x, weight and bias; only the needed gradients are
    computed, in fp32, and rounded once to the dtype of their tensor.

    Args:
        x: [..., hidden size], bfloat16 or float16, any strides; read in its own dtype. x is copied unless rows are
            unit-stride and their length and distance are multiples of 16 bytes. Any object with ``__dlpack__`` is
            accepted; results are then of the same kind.
        weight: [experts, hidden size], bfloat16, float16 or float32.
        bias: [experts], bfloat16, float16 or float32; added in fp32.
        precision: "fast", "high" or "exact".
        main_grad: [experts, hidden size], float32, contiguous. The backward pass then *adds* weight's gradient to it in
            place, in fp32, and ``weight.grad`` does not change.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        A contiguous fp32 tensor ``[..., experts]``.
    """
    level = PRECISIONS[precision]
    if main_grad is not None:
        check_main_grad(main_grad, weight)
    if is_grad_enabled() and needs_grad(x, weight, bias):
        return _differentiable(x, weight, bias, level, main_grad)
    return _forward(x, weight, bias, level)


OP = Op(
    "router_gemm", public=("router_gemm",), kernels=KERNELS, torch_ops=(FORWARD, BACKWARD, BACKWARD_INTO),
    uses=("column_absmax",),
)  # fmt: skip
