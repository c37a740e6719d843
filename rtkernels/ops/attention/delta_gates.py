"""Gates of the gated delta rule: log decays and strengths of raw gates, and their gradients. Not public."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.mma_plan import ANY_TYPE
from rtkernels.runtime.checks import FLOAT_DTYPES, check_tensor
from rtkernels.runtime.invariance import refuse_weight_gradient
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import TYPES, check_same, nothing, vector_bytes
from rtkernels.runtime.operator.arguments import check_number
from rtkernels.runtime.operator.autograd import applied, once_differentiable
from rtkernels.runtime.operator.declared import Dense, Meta, Operator, Rows, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_FLOAT32 = torch.float32
_THREADS, _BLOCKS, _ROWS = 256, 512, 8  # blocks at most and rows of a thread at least, unless rows are few
_SUM_THREADS = 1024
_UNIT = "attention/delta_gates.cu"
_SIZES = "rows:i64 columns:i64 heads:i64 inner:i64 g_stride:i64 beta_stride:i64 tiles:i64 slice:i64 flags:i64 bound:f64"
_VARIANTS = [(token, n) for (token,) in TYPES for n in (1, 4)]
_FWD = Kernel(
    _UNIT, "delta_gates_fwd", template="T N", max_registers=64,
    args=f"g:ptr beta:ptr a_log:ptr dt_bias:ptr decay:ptr strength:ptr {_SIZES} factor:f64", variants=_VARIANTS,
)  # fmt: skip
_BWD = Kernel(
    _UNIT, "delta_gates_bwd", template="T N", max_registers=64,
    args="ddecay:ptr dstrength:ptr g:ptr beta:ptr a_log:ptr dt_bias:ptr dg:ptr dbeta:ptr partial:ptr "
    f"{_SIZES} factor:f64",
    variants=_VARIANTS,
)  # fmt: skip
_SUM = Kernel(
    _UNIT, "delta_gates_sum", template="THREADS", max_registers=64,
    args="partial:ptr drate:ptr dbias:ptr slices:i64 columns:i64 inner:i64 flags:i64", variants=[(_SUM_THREADS,)],
)  # fmt: skip


# ---- plans: g is [rows, heads * inner], beta [rows, heads] ----------------------------------------------------------


def flags(sigmoid: bool, *tensors: Meta | None) -> int:
    """Return the argument of kernels: of g, beta, A_log and dt_bias."""
    types = (0 if t is None else ANY_TYPE[t.token] for t in tensors)
    return int(sigmoid) | sum(kind << (4 + 3 * i) for i, kind in enumerate(types))


class _Shape:
    """How the kernels are launched."""

    def __init__(self, beta: Meta, g: Meta | None, strengths: bool, *others: Meta | None) -> None:
        heads = beta.shape[-1]
        self.rows, columns, self.n = beta.rows, 0 if g is None else g.shape[-1], 1
        if g is not None:
            size = g.dtype.itemsize
            vectors_fit = vector_bytes(g.misaligned, columns * size, g.row_stride * size) >= 4 * size
            self.n = 4 if vectors_fit and not misaligned(*others) else 1
        vectors = columns // self.n
        self.tiles, more = -(-vectors // _THREADS), -(-heads // _THREADS) if strengths else 0
        lanes = _THREADS // max(min(vectors or heads, _THREADS), 1)
        slices = max(min(-(-self.rows // (_ROWS * lanes)), _BLOCKS // max(self.tiles, 1)), 1)
        self.slice = max(-(-self.rows // slices), 1)
        self.slices = -(-self.rows // self.slice)
        self.grid = (self.tiles + more, self.slices)
        self.heads, self.columns, self.inner = heads, columns, columns // heads if heads else 0
        self.strides = tuple(0 if t is None else t.row_stride for t in (g, beta))
        self.token = "fp32" if g is None else g.token

    def numbers(self, flag: int) -> tuple[int | str, ...]:
        """Return the arguments of both kernels after their tensors."""
        sizes = (self.rows, self.columns, self.heads, self.inner, *self.strides, self.tiles, self.slice)
        return *sizes, flag, "lower_bound", "factor"


def _check(beta, g, A_log, dt_bias) -> None:
    if (g is None) is not (A_log is None) or (g is None and dt_bias is not None):
        raise ArgumentError("g and A_log go together, and dt_bias with them; expected all or none of them")
    if g is None:
        return
    heads = beta.shape[-1] if beta.shape else 0
    if not heads or g.shape[:-1] != beta.shape[:-1] or g.shape[-1] % heads or g.shape[-1] > _THREADS * heads:
        raise ArgumentError(
            f"g has shape {tuple(g.shape)}; expected columns for each head of beta, {tuple(beta.shape)}"
        )
    check_same("A_log", tuple(A_log.shape), (heads,), "shape", of="heads of beta")
    if dt_bias is not None:
        check_same("dt_bias", dt_bias.numel(), g.shape[-1], "size", of="a row of g")


def _plan(beta, g, A_log, dt_bias, sigmoid, device) -> Steps:
    shape = _Shape(beta, g, True)
    launch = _FWD.bind((shape.token, shape.n), device, shape.grid, _THREADS)
    names = ("g", "beta", "A_log", "dt_bias", "decay", "strength")
    return Steps(Step(launch, *names, *shape.numbers(flags(sigmoid, g, beta, A_log, dt_bias))))


def _plan_backward(
    beta, g, A_log, dt_bias, ddecay, sigmoid, need_g, need_beta, need_factors, device
) -> Steps:  # fmt: skip
    shape = _Shape(beta, g if need_g or need_factors else None, need_beta, ddecay)
    launch = _BWD.bind((shape.token, shape.n), device, shape.grid, _THREADS)
    flag = flags(sigmoid, g, beta, A_log, dt_bias)
    names = ("ddecay", "dstrength", "g", "beta", "A_log", "dt_bias", "dg" if need_g else 0, "dbeta" if need_beta else 0)
    first = Step(launch, *names, "partial" if need_factors else 0, *shape.numbers(flag))
    if not need_factors:
        return Steps(first)
    total = _SUM.bind((_SUM_THREADS,), device, shape.heads, _SUM_THREADS)
    dbias = 0 if dt_bias is None else "dbias"
    second = Step(total, "partial", "drate", dbias, shape.slices, shape.columns, shape.inner, flag)
    scratch = {"partial": Memory((2, shape.slices, shape.columns), _FLOAT32)}
    return Steps(first, second, scratch=scratch)


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _raw(g: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return biased logits and rates of columns."""
    dtype = torch.promote_types(g.dtype, _FLOAT32)
    x = g.to(dtype) if dt_bias is None else g.to(dtype) + dt_bias.to(dtype).flatten()
    return x, A_log.to(dtype).exp().repeat_interleave(g.shape[-1] // A_log.shape[0])


def log_decay(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float) -> Tensor:
    """Return log decays of raw gates [.., columns], fp32; a bound of 0 is none."""
    if A_log is None:
        return g
    x, rate = _raw(g, A_log, dt_bias)
    return lower_bound * torch.sigmoid(rate * x) if lower_bound < 0 else -rate * torch.nn.functional.softplus(x)


def strength(beta: Tensor, sigmoid: bool, factor: float) -> Tensor:
    """Return what updates are multiplied by, fp32."""
    beta = beta.to(torch.promote_types(beta.dtype, _FLOAT32))
    return factor * (beta.sigmoid() if sigmoid else beta)


def _reference(beta, g, A_log, dt_bias, lower_bound, sigmoid, factor):
    decay = nothing(beta) if g is None else log_decay(g, A_log, dt_bias, lower_bound).contiguous()
    return decay, strength(beta, sigmoid, factor).contiguous()


def _sigmoid_slope(x: Tensor) -> Tensor:
    e = torch.exp(-x.abs())
    return e / (1 + e).square()


def _reference_backward(
    beta, g, A_log, dt_bias, ddecay, dstrength, lower_bound, sigmoid, factor, need_g, need_beta, need_factors
):  # fmt: skip
    dg = dbeta = drate = dbias = None
    if need_g or need_factors:
        x, rate = _raw(g, A_log, dt_bias)
        if lower_bound < 0:
            by_x = lower_bound * _sigmoid_slope(rate * x) * rate
            by_rate = (by_x * x).masked_fill(by_x == 0, 0)
        else:
            by_x, by_rate = -rate * x.sigmoid(), -rate * torch.nn.functional.softplus(x)
        dx, of_rate = ((ddecay * t).masked_fill(ddecay == 0, 0) for t in (by_x, by_rate))
        dg = dx.to(g.dtype) if need_g else None
        if need_factors:
            columns = g.shape[-1] // max(A_log.shape[0], 1)
            drate = of_rate.flatten(0, -2).sum(0).unflatten(0, (A_log.shape[0], columns)).sum(1).to(A_log.dtype)
            dbias = None if dt_bias is None else dx.flatten(0, -2).sum(0).view(dt_bias.shape).to(dt_bias.dtype)
    if need_beta:
        slope = _sigmoid_slope(beta.to(dstrength.dtype)) if sigmoid else torch.ones_like(dstrength)
        dbeta = (factor * dstrength * slope).masked_fill(dstrength == 0, 0).to(beta.dtype)
    return tuple(nothing(beta) if t is None else t.contiguous() for t in (dg, dbeta, drate, dbias))


# ---- operators ------------------------------------------------------------------------------------------------------

_TENSORS = (
    Rows("beta"), Rows("g", optional=True), Dense("A_log", optional=True), Dense("dt_bias", optional=True)
)  # fmt: skip


def _outputs(beta, g) -> tuple[Memory | None, ...]:
    return tuple(None if t is None else Memory(tuple(t.shape), _FLOAT32) for t in (g, beta))


def _backward_outputs(beta, g, A_log, dt_bias, need_g, need_beta, need_factors) -> tuple[Memory | None, ...]:
    needs = (need_g, need_beta, need_factors, need_factors and dt_bias is not None)
    given = zip((g, beta, A_log, dt_bias), needs, strict=True)
    return tuple(Memory(tuple(t.shape), t.dtype) if need else None for t, need in given)


def _check_backward(beta, g, A_log, dt_bias, ddecay, dstrength, need_g, need_beta, need_factors) -> None:
    _check(beta, g, A_log, dt_bias)
    for name, grad, t, need in (
        ("ddecay", ddecay, g, need_g or need_factors),
        ("dstrength", dstrength, beta, need_beta),
    ):
        if need and (grad is None or t is None):
            raise ArgumentError(f"{name} is needed; expected it and the gate that it belongs to")
        if grad is not None and t is not None:
            check_same(name, tuple(grad.shape), tuple(t.shape), "shape", of="g" if t is g else "beta")


FORWARD = Operator(
    "delta_gates_fwd", _TENSORS, options="float lower_bound, bool sigmoid, float factor",
    numbers="lower_bound factor", results="decay strength", outputs=_outputs, plan=_plan, reference=_reference,
    check=_check,
)  # fmt: skip
BACKWARD = Operator(
    "delta_gates_bwd",
    (*_TENSORS, Dense("ddecay", (_FLOAT32,), optional=True), Dense("dstrength", (_FLOAT32,), optional=True)),
    options="float lower_bound, bool sigmoid, float factor, bool need_g, bool need_beta, bool need_factors",
    numbers="lower_bound factor", results="dg dbeta drate dbias", outputs=_backward_outputs, plan=_plan_backward,
    reference=_reference_backward, check=_check_backward, plans_empty=True,
)  # fmt: skip


class _DeltaGates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, beta, g, A_log, dt_bias, lower_bound, sigmoid, factor):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(beta, g, A_log, dt_bias)
        ctx.options = (lower_bound, sigmoid, factor)
        return FORWARD.call(beta, g, A_log, dt_bias, *ctx.options)

    @staticmethod
    @once_differentiable
    def backward(ctx, ddecay, dstrength):
        beta, g, rate, bias = ctx.needs_input_grad[:4]
        need = [g and ddecay is not None, beta and dstrength is not None, (rate or bias) and ddecay is not None]
        if not any(need):
            return (None,) * 7
        dg, dbeta, *others = BACKWARD.call(*ctx.saved_tensors, ddecay, dstrength, *ctx.options, *need)
        grads, wanted = (dbeta, dg, *others), (need[1], need[0], rate and need[2], bias and need[2])
        return *(grad if yes else None for grad, yes in zip(grads, wanted, strict=True)), None, None, None


_differentiable = applied(_DeltaGates)


# ---- options of public functions ------------------------------------------------------------------------------------


def loadable(name: str, t: Tensor | None) -> Tensor | None:
    """Return a tensor in a dtype that kernels read, fp32 instead of other floating-point ones."""
    if t is None or t.dtype in FLOAT_DTYPES:
        return t
    if not t.dtype.is_floating_point:
        raise ArgumentError(f"{name} has dtype {str(t.dtype).removeprefix('torch.')}; expected a floating-point one")
    return t.float()


def check_options(
    g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None, beta_scale: float,
    heads: int, shape: Sequence[int],
) -> tuple[float, float]:  # fmt: skip
    """Return the bound (0 without one) and beta's factor.

    Args:
        shape: That of g without batch and length: [heads] or [heads, width].

    Raises:
        ArgumentError: Options do not go together, or a tensor or number is none that gates take.
    """
    given = {"g": g, "A_log": A_log, "dt_bias": dt_bias}
    for name in ("A_log", "dt_bias"):
        if given[name] is not None:
            check_tensor(name, given[name])
    if A_log is None:
        extra = "dt_bias" if dt_bias is not None else "lower_bound" if lower_bound is not None else ""
        if extra:
            raise ArgumentError(f"{extra} is given, but A_log is None; expected A_log, which says that g is raw")
    elif g is None:
        raise ArgumentError("A_log is given, but g is None; expected raw gates")
    else:
        check_same("A_log", tuple(A_log.shape), (heads,), "shape", of="heads of v")
    if dt_bias is not None and tuple(dt_bias.shape) != (math.prod(shape),):
        check_same("dt_bias", tuple(dt_bias.shape), tuple(shape), "shape", of="g without batch and length")
    if lower_bound is not None and not -math.inf < check_number("lower_bound", lower_bound) < 0:
        raise ArgumentError(f"lower_bound is {lower_bound}; expected a negative number, which no log decay goes below")
    factor = float(check_number("beta_scale", beta_scale))
    if not -math.inf < factor < math.inf:  # as Dynamo traces it, where the number is a symbol
        raise ArgumentError(f"beta_scale is {beta_scale}; expected a finite number")
    return 0.0 if lower_bound is None else float(lower_bound), factor


def gates(
    g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float, sigmoid: bool,
    factor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return log decays and strengths in fp32; g is [.., heads] or [.., heads, width], beta [.., heads]."""
    raw = None if A_log is None else loadable("g", g)
    if raw is not None and g.dim() > beta.dim():
        raw = raw.flatten(-2)
    if raw is None and not sigmoid and factor == 1.0:
        return g.float(), beta.float()
    factors = (loadable(name, t) for name, t in (("A_log", A_log), ("dt_bias", dt_bias)))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (A_log, dt_bias)):
        refuse_weight_gradient("gated_delta_rule's gradient of A_log or dt_bias")
    values: tuple[Any, ...] = (loadable("beta", beta), raw, *factors, lower_bound, sigmoid, factor)
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in values[:4])
    decay, strengths = _differentiable(*values) if differentiated else FORWARD.call(*values)
    return g.float() if raw is None else decay.view(g.shape), strengths


OP = Op("delta_gates", public=(), kernels=(_FWD, _BWD, _SUM), torch_ops=(FORWARD, BACKWARD))
