"""Divergence of two heads in slabs of the vocabulary: torch's GEMMs around the kernels of `linear_divergence.cu`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.loss import cross_entropy_plan as plans
from rtkernels.ops.loss import linear_logprob_operators as linear
from rtkernels.ops.loss.linear_cross_entropy_slabs import add_product
from rtkernels.ops.loss.linear_logprob_checks import check_numbers
from rtkernels.ops.loss.linear_logprob_head import Head, Options, rounded_product, row_memory, rows_of
from rtkernels.runtime.checks import check_dtype, check_same, check_shape, token
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT, divisor, group_threads, nothing
from rtkernels.runtime.operator.declared import Argument, Dense, DenseFloat, InPlace, Meta, Operator, Primitive
from rtkernels.runtime.operator.plan import IN_TORCH, Memory, Step, Steps

FORWARD_KL, REVERSE_KL, MIXED = 0, 1, 2
_IGNORED = -100  # what rows that do not count have for an id
_STATS = 5  # top and level of student and teacher, then what gradients are centred at
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
    sizes = rows, cols, student.row_stride, teacher.row_stride, _IGNORED, threads, kind_of(beta), "begins"
    return Steps(Step(launch, "student", "teacher", "ids", "parts", *sizes, temperature))


def _plan_sums(student: Meta, teacher: Meta, temperature: float, beta: float, device: int) -> Steps:
    rows, cols = student.shape
    threads = group_threads(-(-cols // (2 * _VEC)), _THREADS)
    launch = _SUMS.bind(("fp32",), device, *plans.row_grid(rows, threads))
    sizes = rows, cols, student.row_stride, teacher.row_stride, _IGNORED, threads, kind_of(beta), "begins"
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
    numbers = _IGNORED, kind_of(beta), segments, divisor(segments), temperature, beta
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
    weights = torch.tensor([beta, 1.0 - beta], dtype=log_q.dtype, device=log_q.device).log()
    return log_q, log_p, torch.logaddexp(log_p + weights[0], log_q + weights[1])


def _times(log: Tensor, x: Tensor) -> Tensor:
    """``exp(log) * x``, 0 where the former is."""
    p = log.exp()
    return torch.where(p == 0, 0.0, p * x)


def _add_parts_plain(student, teacher, ids, parts, temperature, beta, begins) -> None:
    own, other = (teacher, student) if kind_of(beta) == FORWARD_KL else (student, teacher)
    own, other = own / temperature, other / temperature
    ignored = ids.view(-1) == _IGNORED
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
    more = torch.stack((found, mixed)).masked_fill(ids.view(-1) == _IGNORED, 0.0)
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
    dlogits.copy_(d.masked_fill(ids == _IGNORED, 0.0))


class Functions(NamedTuple):
    rows: linear.Functions
    add_parts: Callable[..., None]
    add_sums: Callable[..., None]
    gradient: Callable[..., None]


WITH_KERNELS = Functions(linear.KERNELS, _ADD_PARTS, _ADD_SUMS, _MAKE_GRAD)
PLAIN = Functions(linear.PLAIN, _add_parts_plain, _add_sums_plain, _grad_plain)

# ---- slabs ----------------------------------------------------------------------------------------------------------


class Heads:
    """Student and teacher: slabs of their logits, all in the same memory."""

    def __init__(self, student, teacher, chunk_bytes: int) -> None:
        options = Options(_IGNORED, 1.0, 0.0, 1.0, True, chunk_bytes, 0, len(student[1]))
        flat = [(rows_of(hidden), weight, bias) for hidden, weight, bias in (student, teacher)]
        self.both = [Head(*tensors, options) for tensors in flat]
        self.both[1].columns = self.both[0].columns
        self.memory = [head.memory(head.columns) for head in self.both]
        self._current: tuple[int, int] | None = None
        self._logits: list[Tensor] = []

    @property
    def student(self) -> Head:
        return self.both[0]

    def logits(self, start: int, end: int) -> list[Tensor]:
        """Return the logits of both in some columns, unless they are still there."""
        if self._current != (start, end):
            of_heads = zip(self.both, self.memory, strict=True)
            self._logits = [head.logits(start, end, memory) for head, memory in of_heads]
            self._current = (start, end)
        return self._logits


def row_ids(hidden: Tensor, labels: Tensor | None, ignore_index: int) -> Tensor:
    """Return int64 ``[rows, 1]``: `_IGNORED` for rows that do not count, else 0."""
    rows = hidden.numel() // max(hidden.shape[-1], 1) if labels is None else labels.numel()
    if labels is None:
        return torch.zeros(rows, 1, dtype=torch.int64, device=hidden.device)
    return torch.where(labels.reshape(-1, 1) == ignore_index, _IGNORED, 0)


def finished(parts: Tensor, beta: float) -> Tensor:
    """Return the stats of KL(P || Q) or KL(Q || P), in the memory of the parts; the last one is the divergence."""
    own, other = (2, 0) if kind_of(beta) == FORWARD_KL else (0, 2)
    cross = parts[4] / parts[own + 1]
    parts[1].log_()
    parts[3].log_()
    # Differences of the tops and of the levels: a common offset of the scores costs no digits.
    parts[4] = cross - (parts[own] - parts[other]) - (parts[own + 1] - parts[other + 1])
    return parts


def parts_of(functions: Functions, heads: Heads, ids: Tensor, beta: float, temperature: float) -> Tensor:
    """Return the parts ``[5, rows]`` of all columns, as the kernel has them; the last is 0 for a mixture."""
    parts = torch.empty(_STATS, len(ids), dtype=torch.float32, device=ids.device)
    if kind_of(beta) != MIXED:
        for start, end in heads.student.slabs():
            functions.add_parts(*heads.logits(start, end), ids, parts, temperature, beta, int(start == 0))
        return parts
    options = Options(_IGNORED, 1.0, 0.0, temperature, True, 0, 0, len(heads.student.weight))
    memory = [row_memory(heads.student.states, ids) for _ in heads.both]
    for start, end in heads.student.slabs():
        for logits, (of_rows, targets) in zip(heads.logits(start, end), memory, strict=True):
            functions.rows.add_parts(logits, ids, None, of_rows, targets, options, 0, start)
    for place, (of_rows, _) in enumerate(memory):
        parts[2 * place : 2 * place + 2] = of_rows[:2]
    parts[4] = 0.0
    return parts


def sums_of(
    functions: Functions, heads: Heads, stats: Tensor, ids: Tensor, beta: float, temperature: float
) -> Tensor:  # fmt: skip
    """Return ``[2, rows]``: the divergence, and KL(Q || M) of a mixture, over all columns."""
    sums = torch.empty(2, len(ids), dtype=torch.float32, device=ids.device)
    slabs = list(heads.student.slabs())
    for start, end in reversed(slabs):  # the last slab is still there
        begins = int((start, end) == slabs[-1])
        functions.add_sums(*heads.logits(start, end), stats, ids, sums, temperature, beta, begins)
    return sums


def _forward(
    functions: Functions, student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias, teacher_bias,
    labels, ignore_index, beta, temperature, chunk_bytes,
):  # fmt: skip
    """The operator ``linear_divergence_fwd``."""
    heads = Heads(
        (student_hidden, student_weight, student_bias), (teacher_hidden, teacher_weight, teacher_bias), chunk_bytes
    )
    ids = row_ids(student_hidden, labels, ignore_index)
    stats = parts_of(functions, heads, ids, beta, temperature)
    if kind_of(beta) != MIXED:
        stats = finished(stats, beta)
        return stats[4].clone().view(student_hidden.shape[:-1]), stats
    stats[1].log_()
    stats[3].log_()
    sums = sums_of(functions, heads, stats, ids, beta, temperature)
    stats[4] = sums[1]
    return sums[0].clone().view(student_hidden.shape[:-1]), stats


def _backward(
    functions: Functions, dloss, student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias,
    teacher_bias, labels, stats, ignore_index, beta, temperature, chunk_bytes, need_hidden, need_weight, need_bias,
    fp32_hidden_grad,
):  # fmt: skip
    """The operator ``linear_divergence_bwd``."""
    heads = Heads(
        (student_hidden, student_weight, student_bias), (teacher_hidden, teacher_weight, teacher_bias), chunk_bytes
    )
    ids, g = row_ids(student_hidden, labels, ignore_index), dloss.reshape(-1)
    states, weight, dtype = heads.student.states, student_weight, student_hidden.dtype
    slab = None if dtype == torch.float32 else heads.student.memory(heads.student.columns, dtype)
    dhidden = torch.zeros(states.shape, dtype=torch.float32, device=states.device) if need_hidden else nothing(states)
    dweight = torch.empty(weight.shape, dtype=dtype, device=weight.device) if need_weight else nothing(states)
    dbias = []
    for start, end in heads.student.slabs():
        logits = heads.logits(start, end)
        out = logits[0] if slab is None else slab[:, : end - start]
        functions.gradient(*logits, out, g, stats, ids, temperature, beta)
        if need_hidden:
            add_product(dhidden, out, weight[start:end], start == 0)
        if need_weight:
            rounded_product(dweight[start:end], out.t(), states)
        if need_bias:
            dbias.append(out.sum(0, dtype=torch.float32))
    return (
        dhidden.to(torch.float32 if fp32_hidden_grad else dtype).view(student_hidden.shape) if need_hidden else dhidden,
        dweight,
        torch.cat(dbias).to(dtype) if need_bias else nothing(states),
    )


# ---- checks and operators -------------------------------------------------------------------------------------------


def check_inputs(
    student_hidden: Meta, student_weight: Meta, teacher_hidden: Meta, teacher_weight: Meta, student_bias: Meta | None,
    teacher_bias: Meta | None, labels: Meta | None, beta: float, temperature: float, chunk_bytes: int,
) -> None:  # fmt: skip
    """Raise an ArgumentError for arguments that do not fit together."""
    if not 0.0 <= beta <= 1.0:
        raise ArgumentError(f"beta is {beta}; expected 0 to 1")
    check_numbers(1.0, 0.0, temperature, chunk_bytes)
    of_heads = ("student", student_hidden, student_weight, student_bias), (
        "teacher", teacher_hidden, teacher_weight, teacher_bias
    )  # fmt: skip
    for name, hidden, weight, bias in of_heads:
        token(f"{name}_hidden", hidden.dtype)
        if weight.dim() != 2 or not 0 < weight.shape[0] < 2**31:
            raise ArgumentError(f"{name}_weight has shape {tuple(weight.shape)}; expected [vocabulary, hidden size]")
        if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
            raise ArgumentError(
                f"{name}_hidden has shape {tuple(hidden.shape)}; expected [..., {weight.shape[1]}], the hidden size of "
                f"{name}_weight"
            )
        check_same(f"{name}_weight", weight.dtype, hidden.dtype, "dtype", of=f"{name}_hidden")
        if bias is not None:
            check_same(f"{name}_bias", bias.dtype, hidden.dtype, "dtype", of=f"{name}_hidden")
            check_shape(f"{name}_bias", bias.shape, (weight.shape[0],), f"the rows of {name}_weight")
    rows = tuple(student_hidden.shape[:-1])
    check_same("teacher_hidden", tuple(teacher_hidden.shape[:-1]), rows, "rows", of="student_hidden")
    check_same("teacher_weight", teacher_weight.shape[0], student_weight.shape[0], "rows", of="student_weight")
    if labels is not None:
        check_dtype("labels", labels.dtype)
        check_shape("labels", labels.shape, rows, "that of student_hidden without its last one")


def _check_bwd(
    dloss, student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias, teacher_bias, labels, stats,
    beta, temperature, chunk_bytes,
) -> None:  # fmt: skip
    heads = (student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias, teacher_bias)
    check_inputs(*heads, labels, beta, temperature, chunk_bytes)
    check_shape("stats", stats.shape, (_STATS, student_hidden.rows), "[5, rows]")
    check_shape("dloss", dloss.shape, student_hidden.shape[:-1], "that of student_hidden without its last one")


def _gradients(student_hidden, student_weight, student_bias, need_hidden, need_weight, need_bias, fp32_hidden_grad):
    of_hidden = torch.float32 if fp32_hidden_grad else student_hidden.dtype
    return (
        Memory(student_hidden.shape, of_hidden) if need_hidden else None,
        Memory.like(student_weight) if need_weight else None,
        Memory.like(student_bias) if need_bias else None,
    )


TENSORS = (
    Argument("student_hidden"), Argument("student_weight", None), Argument("teacher_hidden"),
    Argument("teacher_weight", None), Argument("student_bias", None, optional=True),
    Argument("teacher_bias", None, optional=True), Argument("labels", None, optional=True),
)  # fmt: skip
OPTIONS = "int ignore_index, float beta, float temperature, int chunk_bytes"
FORWARD = Operator(
    "linear_divergence_fwd", TENSORS, options=OPTIONS, results="loss stats", check=check_inputs,
    outputs=lambda student_hidden: (
        Memory(student_hidden.shape[:-1], torch.float32), Memory((_STATS, student_hidden.rows), torch.float32),
    ),
    plan=lambda student_hidden: Steps(instead=partial(_forward, WITH_KERNELS)) if student_hidden.rows else IN_TORCH,
    reference=partial(_forward, PLAIN), plans_empty=True,
)  # fmt: skip
BACKWARD = Operator(
    "linear_divergence_bwd", (DenseFloat("dloss", None), *TENSORS, Dense("stats", None)),
    options=f"{OPTIONS}, bool need_hidden, bool need_weight, bool need_bias, bool fp32_hidden_grad",
    results="dhidden dweight dbias",
    outputs=_gradients, check=_check_bwd,
    plan=lambda student_hidden: Steps(instead=partial(_backward, WITH_KERNELS)) if student_hidden.rows else IN_TORCH,
    reference=partial(_backward, PLAIN), plans_empty=True,
)  # fmt: skip
