"""Cross entropy with class weights, and of targets that are probabilities: kernels, operators, reductions."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.loss import cross_entropy_plan as plans
from rtkernels.ops.loss import reference
from rtkernels.ops.loss.label_report import reported
from rtkernels.runtime.checks import check_same, token
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import group_threads, row_blocks, vector_bytes
from rtkernels.runtime.operator.autograd import applied, constant, needs_grad, once_differentiable
from rtkernels.runtime.operator.declared import Operator
from rtkernels.runtime.operator.kinds import Aligned, Dense, DenseFloat, Meta, Rows, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.torch_private import is_dynamo_compiling

_UNIT = "loss/cross_entropy_soft.cu"
_VARIANTS = [
    (t, p, vec) for t, width in (("bf16", 8), ("fp16", 8), ("fp32", 4)) for p in dict.fromkeys((t, "fp32"))
    for vec in (width, 1)
]  # fmt: skip
_SIZES = (
    "rows:i64 cols:i64 x_stride:i64 target_stride:i64 labels_int64:i64 ignore_index:i64 threads_per_row:i64 keep:f64 "
    "spread:f64 softcap:f64"
)
_FWD = Kernel(
    _UNIT, "cross_entropy_soft_fwd", template="T P VEC", max_registers=64, variants=_VARIANTS,
    args=f"x:ptr target:ptr labels:ptr weight:ptr loss:ptr stats:ptr report:ptr {_SIZES}",
)  # fmt: skip
_BWD = Kernel(
    _UNIT, "cross_entropy_soft_bwd", template="T P VEC", max_registers=64, variants=_VARIANTS,
    args=f"dloss:ptr x:ptr target:ptr labels:ptr weight:ptr stats:ptr dx:ptr report:ptr {_SIZES}",
)  # fmt: skip
KERNELS = (_FWD, _BWD)


def _work(logits: Meta, target: Meta | None, labels: Meta | None) -> tuple[tuple, tuple, tuple]:
    """Return variant, grid and block, and the sizes that both kernels take."""
    size, cols = logits.dtype.itemsize, logits.shape[-1]
    multiples = [misaligned(logits, target), cols * size, logits.row_stride * size]
    stride, probabilities = 0, "fp32"
    if target is not None:
        stride, probabilities = target.row_stride, target.token
        multiples += [cols * target.dtype.itemsize, stride * target.dtype.itemsize]
    vec = 16 // size if vector_bytes(*multiples) == 16 and cols % (16 // size) == 0 else 1
    threads = group_threads(-(-cols // (2 * vec)), 256)
    int64 = int(labels is not None and labels.dtype == torch.int64)
    return (logits.token, probabilities, vec), row_blocks(logits.rows, threads), (
        logits.rows, cols, logits.row_stride, stride, int64, threads,
    )  # fmt: skip


def _numbers(sizes: tuple, ignore_index: int, smoothing: float, softcap: float) -> tuple:
    *shape, threads = sizes
    return *shape, ignore_index, threads, 1.0 - smoothing, smoothing / sizes[1], softcap


def _plan_fwd(
    logits: Meta, target: Meta | None, labels: Meta | None, weight: Meta | None, ignore_index: int,
    label_smoothing: float, softcap: float, device: int,
) -> Steps:  # fmt: skip
    variant, grid, sizes = _work(logits, target, labels)
    tensors = "logits", "target", "labels", "weight", "losses", "stats", "report"
    numbers = _numbers(sizes, ignore_index, label_smoothing, softcap)
    return Steps(Step(_FWD.bind(variant, device, *grid), *tensors, *numbers), **reported(device))


def _plan_bwd(
    dloss: Meta, logits: Meta, target: Meta | None, labels: Meta | None, weight: Meta | None, stats: Meta,
    ignore_index: int, label_smoothing: float, softcap: float, device: int,
) -> Steps:  # fmt: skip
    variant, grid, sizes = _work(logits, target, labels)
    tensors = "dloss", "logits", "target", "labels", "weight", "stats", "dlogits", "report"
    numbers = _numbers(sizes, ignore_index, label_smoothing, softcap)
    step = Step(_BWD.bind(variant, device, *grid), *tensors, *numbers)
    return Steps(step, **(reported(device) | {"after": None}))


# ---- checks ---------------------------------------------------------------------------------------------------------


def _check(
    logits: Meta, target: Meta | None, labels: Meta | None, weight: Meta | None, label_smoothing: float, softcap: float
) -> None:
    if (target is None) == (labels is None):
        raise ArgumentError("target and labels are both given or both None; expected one of them")
    if labels is not None:
        plans.check(logits, labels)
    else:
        check_target(logits, target)
    plans.check_options(label_smoothing, 0.0, softcap, plans.NONE)
    if weight is not None:
        check_same("weight", tuple(weight.shape), (logits.shape[-1],), "shape", of="[classes]")
        check_same("weight", weight.dtype, torch.float32, "dtype", of="the operator")


def check_target(logits: Meta | Tensor, target: Meta | Tensor) -> None:
    """Raise an ArgumentError for probabilities that do not fit the logits."""
    token("logits", logits.dtype)
    token("labels", target.dtype)
    if not len(logits.shape):
        raise ArgumentError("logits has no dimensions; expected [..., vocabulary]")
    check_same("labels", tuple(target.shape), tuple(logits.shape), "shape", of="logits, as probabilities,")
    if target.dtype not in (logits.dtype, torch.float32):
        raise ArgumentError(f"labels has dtype {target.dtype}; expected that of logits, {logits.dtype}, or float32")
    if not 0 < logits.shape[-1] < 2**31:
        raise ArgumentError(f"logits has {logits.shape[-1]} columns; expected 1 to 2^31 - 1")


def _check_bwd(dloss, logits, target, labels, weight, stats, label_smoothing, softcap) -> None:
    _check(logits, target, labels, weight, label_smoothing, softcap)
    check_same("dloss", tuple(dloss.shape), tuple(logits.shape[:-1]), "shape", of="the rows of logits")
    check_same("stats", tuple(stats.shape), (3, logits.rows), "shape", of="[3, rows]")


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _weighted(logits, target, labels, weight, ignore_index, smoothing, softcap) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores, q, and the rows that count."""
    cols = logits.shape[-1]
    z = reference.capped(logits, softcap).reshape(-1, cols)
    if target is None:
        reference.check_range(labels, ignore_index, cols)
        flat = labels.reshape(-1).long()
        counts = flat != ignore_index
        p = torch.zeros_like(z).scatter_(1, torch.where(counts, flat, 0).unsqueeze(1), 1.0)
    else:
        p, counts = target.reshape(-1, cols).float(), torch.ones_like(z[:, 0], dtype=torch.bool)
    q = (1.0 - smoothing) * p + smoothing / cols
    return z, q if weight is None else q * weight, counts


def _reference_fwd(logits, target, labels, weight, ignore_index, label_smoothing, softcap):
    z, q, counts = _weighted(logits, target, labels, weight, ignore_index, label_smoothing, softcap)
    top = torch.where(z.isnan(), -torch.inf, z).amax(-1)
    below = torch.where(top == -torch.inf, 0.0, top).unsqueeze(-1) - z
    level, whole = (-below).exp().sum(-1).log(), q.sum(-1)
    losses = (whole * level + (q * below).sum(-1)).masked_fill(~counts, 0.0)
    stats = torch.stack((top, level, whole)).masked_fill(~counts, 0.0)
    return losses.reshape(logits.shape[:-1]).contiguous(), stats


def _reference_bwd(dloss, logits, target, labels, weight, stats, ignore_index, label_smoothing, softcap):
    z, q, counts = _weighted(logits, target, labels, weight, ignore_index, label_smoothing, softcap)
    top, level, whole = (row.unsqueeze(-1) for row in stats)
    g = dloss.float().reshape(-1, 1)
    d = (z - torch.where(top == -torch.inf, 0.0, top)).exp() * (g * whole * (-level).exp()) - g * q
    if softcap:
        d = d * (1 - (z / softcap).square())
    return d.masked_fill(~counts.unsqueeze(-1), 0.0).to(logits.dtype).reshape(logits.shape).contiguous()


_TENSORS = (
    Rows("logits", None), Rows("target", None, optional=True), Dense("labels", None, optional=True),
    Aligned("weight", None, optional=True),
)  # fmt: skip
_OPTIONS = "int ignore_index, float label_smoothing, float softcap"
FORWARD = Operator(
    "cross_entropy_soft_fwd", _TENSORS, options=_OPTIONS, results="losses stats", plan=_plan_fwd,
    outputs=lambda logits: (
        Memory(tuple(logits.shape[:-1]), torch.float32), Memory((3, logits.rows), torch.float32),
    ),
    reference=_reference_fwd, check=_check,
)  # fmt: skip
BACKWARD = Operator(
    "cross_entropy_soft_bwd", (DenseFloat("dloss", None), *_TENSORS, Dense("stats", None)), options=_OPTIONS,
    results="dlogits", outputs=lambda logits: (Memory.like(logits),), plan=_plan_bwd, reference=_reference_bwd,
    check=_check_bwd,
)  # fmt: skip


# ---- calls ----------------------------------------------------------------------------------------------------------


class _Soft(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, labels, weight, ignore_index, smoothing, softcap):
        ctx.set_materialize_grads(False)
        losses, stats = FORWARD.call(logits, target, labels, weight, ignore_index, smoothing, softcap)
        ctx.save_for_backward(logits, target, labels, weight, stats)
        ctx.options = ignore_index, smoothing, softcap
        ctx.mark_non_differentiable(stats)
        return losses, stats

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, _stats):
        if dloss is None:
            return (None,) * 7
        logits, target, labels, weight, stats = ctx.saved_tensors
        return BACKWARD.call(dloss, logits, target, labels, weight, stats, *ctx.options), *(None,) * 6


_differentiable = applied(_Soft)


def soft_losses(
    logits: Tensor, target: Tensor | None, labels: Tensor | None, weight: Tensor | None, options: tuple
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, and its log-sum-exp. `options`: ignore_index, smoothing, softcap."""
    if is_grad_enabled() and needs_grad(logits):
        if is_dynamo_compiling():
            options = (options[0], *(constant(value) for value in options[1:]))
        losses, stats = _differentiable(logits, target, labels, weight, *options)
    else:
        losses, stats = FORWARD.call(logits, target, labels, weight, *options)
    return losses, stats.detach()[:2].sum(0).view(losses.shape)


def class_weights(weight: Tensor | None, logits: Tensor) -> Tensor | None:
    """Return the weights of the classes in float32, checked."""
    if weight is None:
        return None
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        kind = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise ArgumentError(f"weight is {kind}; expected a floating tensor [classes]")
    classes = logits.shape[-1] if logits.dim() else 0
    check_same("weight", tuple(weight.shape), (classes,), "shape", of="[classes]")
    if weight.requires_grad and is_grad_enabled():
        raise ArgumentError("weight requires a gradient; expected none: the loss is differentiable in logits only")
    return weight.float()


def reduced(losses: Tensor, labels: Tensor | None, weight: Tensor | None, ignore_index: int, reduction: int) -> Tensor:
    """Return the reduced loss: a mean divides by the weights of the labels, or by the rows for probabilities.

    Numbers of rows only are touched, and nothing is read on the host.
    """
    if reduction == plans.NONE:
        return losses
    total = losses.sum(dtype=torch.float32)
    if reduction == plans.SUM:
        return total
    if labels is None:
        return total / max(losses.numel(), 1)
    counts = labels != ignore_index
    whole = row_weights(labels, weight, counts).sum()
    return torch.where(counts.any(), total / whole, 0.0)


def row_weights(labels: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return the weight of each row's label, 0 where it is ignored. A bad label's own row is NaN already."""
    inside = torch.where(counts, labels, 0).long().clamp(0, weight.shape[0] - 1)
    return torch.where(counts, weight[inside], 0.0)
