"""What a divergence does to rows of two heads' fp32 logits: by the kernels of `linear_divergence.cu`, or in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.loss import cross_entropy_plan as plans
from rtkernels.ops.loss import linear_logprob_operators as linear
from rtkernels.ops.shared.constants import constant
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT, divisor, group_threads
from rtkernels.runtime.operator.declared import Argument, Dense, InPlace, Meta, Primitive
from rtkernels.runtime.operator.plan import Step, Steps

FORWARD_KL, REVERSE_KL, MIXED = 0, 1, 2
IGNORED = -100  # what rows that do not count have for an id
STATS = 5  # top and level of student and teacher, then what gradients are centred at
_THREADS = 256
_VEC = 4

_UNIT = "loss/linear_divergence.cu"
_PARTS = Kernel(
    _UNIT, "linear_divergence_parts", template="T", max_registers=64, variants=[("fp32",)],
    args="student:ptr teacher:ptr ids:ptr parts:ptr rows:i64 cols:i64 student_stride:i64 teacher_stride:i64 "
    "ignore_index:i64 threads_per_row:i64 kind:i64 begins:i64 temperature:f64",
)  # fmt: skip
_SUMS = Kernel(
    _UNIT, "linear_divergence_sums", template="T", max_registers=64, variants=[("fp32",)],
    args="student:ptr teacher:ptr stats:ptr ids:ptr sums:ptr rows:i64 cols:i64 student_stride:i64 teacher_stride:i64 "
    "ignore_index:i64 threads_per_row:i64 kind:i64 begins:i64 temperature:f64 beta:f64",
)  # fmt: skip
_GRAD = Kernel(
    _UNIT, "linear_divergence_grad", template="T D", max_registers=64,
    variants=[("fp32", d) for d in ("fp32", "bf16", "fp16")],
    args="student:ptr teacher:ptr dx:ptr dloss:ptr stats:ptr ids:ptr rows:i64 cols:i64 student_stride:i64 "
    "teacher_stride:i64 dx_stride:i64 ignore_index:i64 kind:i64 segments:i64 by_segments:i64 temperature:f64 beta:f64",
)  # fmt: skip
KERNELS = (_PARTS, _SUMS, _GRAD)


def kind_of(beta: float) -> int:
    """Return which divergence a weight of the teacher means, by the convention of ``jsd``."""
    return FORWARD_KL if beta == 0.0 else REVERSE_KL if beta == 1.0 else MIXED


def _plan_parts(student: Meta, teacher: Meta, temperature: float, beta: float, device: int) -> Steps:
    rows, cols = student.shape
    threads = group_threads(-(-cols // (2 * _VEC)), _THREADS)
    launch = _PARTS.bind(("fp32",), device, *plans.row_grid(rows, threads))
    sizes = rows, cols, student.row_stride, teacher.row_stride, IGNORED, threads, kind_of(beta), "begins"
    return Steps(Step(launch, "student", "teacher", "ids", "parts", *sizes, temperature))


def _plan_sums(student: Meta, teacher: Meta, temperature: float, beta: float, device: int) -> Steps:
    rows, cols = student.shape
    threads = group_threads(-(-cols // (2 * _VEC)), _THREADS)
    launch = _SUMS.bind(("fp32",), device, *plans.row_grid(rows, threads))
    sizes = rows, cols, student.row_stride, teacher.row_stride, IGNORED, threads, kind_of(beta), "begins"
    return Steps(Step(launch, "student", "teacher", "stats", "ids", "sums", *sizes, temperature, beta))


def _plan_grad(
    student: Meta, teacher: Meta, dlogits: Meta, temperature: float, beta: float, device: int
) -> Steps:  # fmt: skip
    rows, cols = student.shape
    segments = -(-cols // (_THREADS * _VEC))
    if rows * segments > GRID_LIMIT:
        raise ArgumentError(f"student_hidden has {rows} rows, more than one launch can take")
    launch = _GRAD.bind(("fp32", dlogits.token), device, rows * segments, _THREADS)
    strides = student.row_stride, teacher.row_stride, dlogits.row_stride
    tensors = "student", "teacher", "dlogits", "dloss", "stats", "ids"
    numbers = IGNORED, kind_of(beta), segments, divisor(segments), temperature, beta
    return Steps(Step(launch, *tensors, rows, cols, *strides, *numbers))


_LOGITS = Argument("student", None), Argument("teacher", None)
_ADD_PARTS = Primitive(
    "linear_divergence_parts", (*_LOGITS, Dense("ids", None), InPlace("parts", None)),
    "float temperature, float beta, int begins", results="", plan=_plan_parts, numbers="begins",
)  # fmt: skip
_ADD_SUMS = Primitive(
    "linear_divergence_sums", (*_LOGITS, Dense("stats", None), Dense("ids", None), InPlace("sums", None)),
    "float temperature, float beta, int begins", results="", plan=_plan_sums, numbers="begins",
)  # fmt: skip
_MAKE_GRAD = Primitive(
    "linear_divergence_grad",
    (*_LOGITS, InPlace("dlogits", None, over="student"), Dense("dloss", None), Dense("stats", None),
     Dense("ids", None)),
    "float temperature, float beta", results="", plan=_plan_grad,
)  # fmt: skip

# ---- in plain torch -------------------------------------------------------------------------------------------------


def _log_probabilities(logits: Tensor, stats: Tensor, temperature: float) -> Tensor:
    top, level = (t.unsqueeze(-1) for t in stats)
    return logits / temperature - torch.where(top == -torch.inf, 0.0, top) - level


def _pair(student: Tensor, teacher: Tensor, stats: Tensor, temperature: float, beta: float) -> tuple[Tensor, ...]:
    """Return log q, log p, and log m for a mixture."""
    log_q = _log_probabilities(student, stats[:2], temperature)
    log_p = _log_probabilities(teacher, stats[2:4], temperature)
    if kind_of(beta) != MIXED:
        return log_q, log_p, log_q
    of_p, of_q = (constant(weight, log_q.dtype, log_q.device).log() for weight in (beta, 1.0 - beta))
    return log_q, log_p, torch.logaddexp(log_p + of_p, log_q + of_q)


def _times(log: Tensor, x: Tensor) -> Tensor:
    """``exp(log) * x``, 0 where the former is."""
    p = log.exp()
    return torch.where(p == 0, 0.0, p * x)


def _add_parts_plain(student, teacher, ids, parts, temperature, beta, begins) -> None:
    own, other = (teacher, student) if kind_of(beta) == FORWARD_KL else (student, teacher)
    own, other = own / temperature, other / temperature
    ignored = ids.view(-1) == IGNORED
    found = []
    for z in (own, other):
        top = torch.where(z.isnan(), -torch.inf, z).amax(-1)
        power = (z - torch.where(top == -torch.inf, 0.0, top).unsqueeze(-1)).exp()
        found += [top.masked_fill(ignored, 0.0), power.sum(-1).masked_fill(ignored, 1.0), power]
    cross = torch.where(found[2] == 0, 0.0, found[2] * (own - other)).sum(-1).masked_fill(ignored, 0.0)
    tops, sums = torch.stack((found[0], found[3])), torch.stack((found[1], found[4]))
    places = (2, 0) if kind_of(beta) == FORWARD_KL else (0, 2)
    if not begins:
        old_tops, old_sums = parts[list(places)], parts[[place + 1 for place in places]]
        top = torch.maximum(tops, old_tops)
        new, old = (torch.where(t == -torch.inf, 0.0, (t - top).exp()) for t in (tops, old_tops))
        both = ignored.expand(2, -1)
        sums = torch.where(both, sums, new * sums + old * old_sums)
        cross, tops = torch.where(ignored, cross, new[0] * cross + old[0] * parts[4]), top
    for i, place in enumerate(places):
        parts[place], parts[place + 1] = tops[i], sums[i]
    parts[4] = cross


def _add_sums_plain(student, teacher, stats, ids, sums, temperature, beta, begins) -> None:
    log_q, log_p, log_m = _pair(student, teacher, stats, temperature, beta)
    mixed = torch.zeros_like(sums[0])
    if kind_of(beta) == FORWARD_KL:
        found = _times(log_p, log_p - log_q).sum(-1)
    elif kind_of(beta) == REVERSE_KL:
        found = _times(log_q, log_q - log_p).sum(-1)
    else:
        mixed = _times(log_q, log_q - log_m).sum(-1)
        found = beta * _times(log_p, log_p - log_m).sum(-1) + (1.0 - beta) * mixed
    more = torch.stack((found, mixed)).masked_fill(ids.view(-1) == IGNORED, 0.0)
    sums.copy_(more if begins else sums + more)


def _grad_plain(student, teacher, dlogits, dloss, stats, ids, temperature, beta) -> None:
    log_q, log_p, log_m = _pair(student, teacher, stats, temperature, beta)
    centre = stats[4].unsqueeze(-1)
    if kind_of(beta) == FORWARD_KL:
        d = log_q.exp() - log_p.exp()
    elif kind_of(beta) == REVERSE_KL:
        d = _times(log_q, log_q - log_p - centre)
    else:
        d = (1.0 - beta) * _times(log_q, log_q - log_m - centre)
    d = d * (dloss.view(-1, 1) / temperature)
    dlogits.copy_(d.masked_fill(ids == IGNORED, 0.0))


class Functions(NamedTuple):
    rows: linear.Functions
    add_parts: Callable[..., None]
    add_sums: Callable[..., None]
    gradient: Callable[..., None]


WITH_KERNELS = Functions(linear.KERNELS, _ADD_PARTS, _ADD_SUMS, _MAKE_GRAD)
PLAIN = Functions(linear.PLAIN, _add_parts_plain, _add_sums_plain, _grad_plain)
