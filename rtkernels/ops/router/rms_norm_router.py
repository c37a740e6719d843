"""The RMS norm in front of a router: normalised rows, their fp8 codes, and the logits."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.ops.norm.norm_fp8_operators import FORWARD as NORM
from rtkernels.ops.norm.statistics import backward
from rtkernels.ops.router import router_gemm as router
from rtkernels.ops.router.rms_norm_router_plan import KERNEL, check, outputs, plan
from rtkernels.ops.router.router_gemm_kernels import PRECISION, PRECISIONS
from rtkernels.runtime.call.public import public
from rtkernels.runtime.operator.autograd import applied, needs_grad, once_differentiable
from rtkernels.runtime.operator.declared import Dense, Operator, Rows
from rtkernels.runtime.operator.registry import Op


class NormRouter(NamedTuple):
    """Results of :func:`rms_norm_router` for x ``[..., n]``; all dense.

    Attributes:
        logits: float32 ``[..., experts]``.
        y: The normalised rows, of x's shape and dtype.
        q: float8_e4m3fn codes of them, of x's shape.
        scale: float32, one per 128 columns of a row, as :class:`rtkernels.ops.norm.norm_fp8.NormFp8` has them.
        rstd: float32, x's shape without the last dimension: ``1 / sqrt(mean(x^2) + eps)``.
    """

    logits: Tensor
    y: Tensor
    q: Tensor
    scale: Tensor
    rstd: Tensor


def _in_two(
    norm, multiply, x, weight, router_weight, eps, offset, precision, pow2_scale, scale_layout
) -> tuple[Tensor, ...]:
    """Normalise and then multiply by two operators, given as launchers or references."""
    given = x, weight, None, None, None, None
    q, scale, rstd, y = norm(*given, eps, offset, "row", pow2_scale, scale_layout, True, False)
    return multiply(y, router_weight, None, precision), y, q, scale, rstd


FORWARD = Operator(
    "rms_norm_router_fwd", (Rows("x", None), Dense("weight", None, optional=True), Dense("router_weight", None)),
    options="float eps, float offset, int precision, bool pow2_scale, str scale_layout",
    results="logits y q scale rstd", outputs=outputs, check=check, plans_empty=True,
    plan=partial(plan, partial(_in_two, NORM.launch, router.FORWARD.launch)),
    reference=partial(_in_two, NORM.reference, router.FORWARD.reference),
)  # fmt: skip


class _RmsNormRouter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, router_weight, eps, offset, precision, pow2_scale, scale_layout):
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.offset, ctx.precision = eps, offset, precision
        logits, y, *rest = FORWARD.call(x, weight, router_weight, eps, offset, precision, pow2_scale, scale_layout)
        ctx.save_for_backward(x, weight, router_weight, y)
        ctx.mark_non_differentiable(*rest)
        return logits, y, *rest

    @staticmethod
    @once_differentiable
    def backward(ctx, dlogits, dy, *_):
        x, weight, router_weight, y = ctx.saved_tensors
        want_x, want_weight, want_router = ctx.needs_input_grad[:3]
        dx = dweight = drouter = None
        if dlogits is not None:
            wanted = (want_x or want_weight, want_router)
            through, drouter_weight = router.BACKWARD.call(dlogits, y, router_weight, ctx.precision, *wanted)
            if wanted[0]:
                dy = through if dy is None else dy + through
            drouter = drouter_weight if want_router else None
        if dy is not None and (want_x or want_weight):
            dx, dweight, _ = backward(False, dy, x, weight, None, None, ctx.eps, ctx.offset, want_weight, False)
        return dx if want_x else None, dweight, drouter, *(None,) * 5


_differentiable = applied(_RmsNormRouter)


@public(options={"precision": PRECISION}, defaults={"eps": 1e-6})
def rms_norm_router(
    x: Tensor, weight: Tensor | None, router_weight: Tensor, *, eps: float | None = None, offset: float = 0,
    precision: str = "high", pow2_scale: bool = False, scale_layout: str = "row",
    out: tuple[Tensor | None, ...] | None = None,
) -> NormRouter:  # fmt: skip
    """Normalise rows, quantise them to fp8 (e4m3) and multiply them by a router's weight.

    The results are those of ``rms_norm_fp8(x, weight, keep=True)`` and ``router_gemm(y, router_weight)``: codes are
    computed from fp32 values, logits from the rounded y, with the errors of :func:`rtkernels.router_gemm` relative to
    exact products of that y. (Relative to an unrounded y, bfloat16 logits have an error of 1.7e-3 in both cases.)

    A single kernel is used if that is faster: on sm_90a, with bfloat16 x and router_weight, 1024 to 3072 columns (a
    multiple of 128), 64 to 256 experts (a multiple of 4), precision "fast" or "high", and enough rows to occupy 70 % of
    the SMs with 64 rows each. Otherwise the two functions run one after the other.

    Differentiable once in x, weight and router_weight, through ``logits`` and ``y``; codes, scales and rstd are not.

    Args:
        x: ``[..., n]``, bfloat16 or float16, any strides. Any object with ``__dlpack__`` is accepted; results are then
            of the same kind.
        weight: The norm's weight, ``[n]`` in x's dtype or float32. None for ones (`offset` is then not used).
        router_weight: ``[experts, n]``, bfloat16, float16 or float32.
        eps: Added to the mean square. Default: 1e-6.
        offset: Added to the norm's weight; 1.0 for models that store ``weight - 1``.
        precision: Precision of the logits: "fast", "high" or "exact", as for :func:`rtkernels.router_gemm`.
        pow2_scale: Round scales up to a power of two.
        scale_layout: Layout of the scales: "row" or "column".
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        A :class:`NormRouter`.
    """
    arguments = (x, weight, router_weight, eps, offset, PRECISIONS[precision], pow2_scale, scale_layout)
    if is_grad_enabled() and (needs_grad(x, weight) or needs_grad(router_weight)):
        return NormRouter(*_differentiable(*arguments))
    return NormRouter(*FORWARD.call(*arguments))


OP = Op(
    "rms_norm_router", public=("rms_norm_router",), kernels=(KERNEL,), torch_ops=(FORWARD,),
    uses=("norm_fp8", "rms_norm", "router_gemm", "column_absmax", "column_sum"),
)  # fmt: skip
