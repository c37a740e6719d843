"""Divergence of two heads: torch's GEMMs around the kernels of `linear_divergence.cu`.

Forward, chunks of rows with the whole vocabulary, which gives all of a row's statistics and its gradient from one
product of each head. Slabs of the vocabulary where gradients come from logits that are computed again, since they are
rounded once, and where a group shares the vocabulary.
"""

from __future__ import annotations

from functools import partial
from math import prod

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.loss.linear_cross_entropy_slabs import add_product
from rtkernels.ops.loss.linear_divergence_rows import (
    FORWARD_KL,
    IGNORED,
    MIXED,
    PLAIN,
    STATS,
    WITH_KERNELS,
    Functions,
    kind_of,
)
from rtkernels.ops.loss.linear_logprob_checks import check_numbers
from rtkernels.ops.loss.linear_logprob_head import (
    CHUNK_BYTES,
    Head,
    Options,
    padded,
    rounded_product,
    row_memory,
    rows_of,
)
from rtkernels.runtime.checks import check_dtype, check_same, check_shape, token
from rtkernels.runtime.layout import nothing
from rtkernels.runtime.operator.declared import Argument, Dense, DenseFloat, Meta, Operator
from rtkernels.runtime.operator.plan import IN_TORCH, Memory, Steps

OF_LOGITS, OF_HIDDEN = 1, 2  # gradients that a forward pass keeps; 0: none
_TILE_ROWS = 128  # of a product
_FEWEST_ROWS = 16  # of a chunk, however little memory it may take


class Heads:
    """Student and teacher: slabs of their logits, all in the same memory; with `memory`, all columns in one."""

    def __init__(self, student, teacher, chunk_bytes: int, memory: list[Tensor] | None = None) -> None:
        options = Options(IGNORED, 1.0, 0.0, 1.0, True, chunk_bytes, 0, len(student[1]))
        flat = [(rows_of(hidden), weight, bias) for hidden, weight, bias in (student, teacher)]
        self.both = [Head(*tensors, options) for tensors in flat]
        if memory is not None:
            self.both[0].columns = len(student[1])
        self.both[1].columns = self.both[0].columns
        self.memory = memory or [head.memory(head.columns) for head in self.both]
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
    """Return int64 ``[rows, 1]``: `IGNORED` for rows that do not count, else 0."""
    rows = prod(hidden.shape[:-1]) if labels is None else labels.numel()
    if labels is None:
        return torch.zeros(rows, 1, dtype=torch.int64, device=hidden.device)
    return torch.where(labels.reshape(-1, 1) == ignore_index, IGNORED, 0)


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
    parts = torch.empty(STATS, len(ids), dtype=torch.float32, device=ids.device)
    if kind_of(beta) != MIXED:
        for start, end in heads.student.slabs():
            functions.add_parts(*heads.logits(start, end), ids, parts, temperature, beta, int(start == 0))
        return parts
    options = Options(IGNORED, 1.0, 0.0, temperature, True, 0, 0, len(heads.student.weight))
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


def chunks_of_rows(rows: int, vocabulary: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Return the first row of each chunk, and the one behind its last: about equal ones, in whole tiles of products."""
    limit = (chunk_bytes or CHUNK_BYTES) // (4 * vocabulary)
    limit = max(1, round(limit / _TILE_ROWS)) * _TILE_ROWS if limit >= _TILE_ROWS else max(limit, _FEWEST_ROWS)
    count = max(1, -(-rows // limit))
    each = min(limit, -(-rows // (count * _TILE_ROWS)) * _TILE_ROWS)
    return [(first, min(first + each, rows)) for first in range(0, rows, max(each, 1))]


def _forward(
    functions: Functions, student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias, teacher_bias,
    labels, ignore_index, beta, temperature, chunk_bytes, keeps,
):  # fmt: skip
    """The operator ``linear_divergence_fwd``: chunks of rows with all columns, so that no logit is computed twice."""
    states, teacher, weight = rows_of(student_hidden), rows_of(teacher_hidden), student_weight
    ids, device = row_ids(student_hidden, labels, ignore_index), states.device
    rows, vocabulary = len(states), len(weight)
    chunks = chunks_of_rows(rows, vocabulary, chunk_bytes)
    largest = max((end - first for first, end in chunks), default=0)
    memory = [torch.empty(largest, padded(vocabulary), dtype=torch.float32, device=device) for _ in range(2)]
    loss = torch.empty(rows, dtype=torch.float32, device=device)
    stats = torch.empty(STATS, rows, dtype=torch.float32, device=device)
    kept, ones = nothing(states), None
    if keeps:
        shape = (rows, padded(vocabulary)) if keeps == OF_LOGITS else states.shape
        kept = torch.empty(shape, dtype=states.dtype if keeps == OF_LOGITS else torch.float32, device=device)
        ones = torch.ones(largest, dtype=torch.float32, device=device)
    slab = torch.empty(memory[0].shape, dtype=states.dtype, device=device) if keeps == OF_HIDDEN else None
    for first, end in chunks:
        some, count = slice(first, end), end - first
        heads = Heads(
            (states[some], weight, student_bias), (teacher[some], teacher_weight, teacher_bias), 0,
            [each[:count] for each in memory],
        )  # fmt: skip
        found = parts_of(functions, heads, ids[some], beta, temperature)
        if kind_of(beta) != MIXED:
            loss[some] = finished(found, beta)[4]
        else:
            found[1].log_()
            found[3].log_()
            loss[some], found[4] = sums_of(functions, heads, found, ids[some], beta, temperature)
        stats[:, some] = found
        if keeps:
            out = (kept[some] if slab is None else slab[:count])[:, :vocabulary]
            logits = heads.logits(0, vocabulary)
            functions.gradient(*logits, out, ones[:count], found, ids[some], temperature, beta)
            if keeps == OF_HIDDEN:
                add_product(kept[some], out, weight, True)
    return loss.view(student_hidden.shape[:-1]), stats, kept


def _backward_kept(
    dloss, kept, student_hidden, student_weight, labels, ignore_index, keeps, need_hidden, need_weight, need_bias
):  # fmt: skip
    """The operator ``linear_divergence_bwd_kept``: from gradients of the sum of all rows' divergences.

    Those of the head multiply hidden states by the rows' incoming gradients, of which the largest is taken out first:
    equal ones, as those of a mean, then round nothing.
    """
    states, weight, dtype = rows_of(student_hidden), student_weight, student_hidden.dtype
    vocabulary, size = weight.shape
    g = dloss.reshape(-1, 1)
    if labels is not None:
        g = g.masked_fill(labels.reshape(-1, 1) == ignore_index, 0.0)
    dhidden, dweight, dbias = (nothing(states) for _ in range(3))
    if need_hidden:
        if keeps == OF_HIDDEN:
            sums = kept
        else:
            sums = torch.empty(states.shape, dtype=torch.float32, device=states.device)
            add_product(sums, kept[:, :vocabulary], weight, True)
        dhidden = torch.empty_like(states, memory_format=torch.contiguous_format)
        dhidden = torch.mul(sums, g, out=dhidden).view(student_hidden.shape)
    if need_weight:
        largest = g.abs().amax() if len(g) else g.new_ones(())
        largest = torch.where(largest == 0, 1.0, largest)
        scaled = torch.mul(states, g / largest, out=torch.empty_like(states, memory_format=torch.contiguous_format))
        dweight = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        # Whole tiles, so that gradients of logits begin at multiples of 16 bytes.
        columns = min(max(1, CHUNK_BYTES // (4 * max(size, 1) * _TILE_ROWS)) * _TILE_ROWS, vocabulary)
        memory = torch.empty(columns, size, dtype=torch.float32, device=weight.device)
        for first in range(0, vocabulary, columns):
            end = min(first + columns, vocabulary)
            sums = memory[: end - first]
            add_product(sums, kept[:, first:end].t(), scaled, True)
            torch.mul(sums, largest, out=dweight[first:end])
    if need_bias:
        columns = max(1, CHUNK_BYTES // (4 * max(len(states), 1)))
        each = [
            (kept[:, first : min(first + columns, vocabulary)] * g).sum(0) for first in range(0, vocabulary, columns)
        ]
        dbias = torch.cat(each).to(dtype)
    return dhidden, dweight, dbias


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
    check_shape("stats", stats.shape, (STATS, student_hidden.rows), "[5, rows]")
    check_shape("dloss", dloss.shape, student_hidden.shape[:-1], "that of student_hidden without its last one")


def _gradients(student_hidden, student_weight, student_bias, need_hidden, need_weight, need_bias, fp32_hidden_grad):
    of_hidden = torch.float32 if fp32_hidden_grad else student_hidden.dtype
    return (
        Memory(student_hidden.shape, of_hidden) if need_hidden else None,
        Memory.like(student_weight) if need_weight else None,
        Memory.like(student_bias) if need_bias else None,
    )


def _outputs_fwd(student_hidden, student_weight, keeps):
    rows, vocabulary = student_hidden.rows, student_weight.shape[0]
    kept = (
        None,
        Memory((rows, padded(vocabulary)), student_hidden.dtype),
        Memory((rows, student_hidden.shape[-1]), torch.float32),
    )
    return Memory(student_hidden.shape[:-1], torch.float32), Memory((STATS, rows), torch.float32), kept[keeps]


def _check_fwd(
    student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias, teacher_bias, labels, beta,
    temperature, chunk_bytes, keeps,
) -> None:  # fmt: skip
    heads = (student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias, teacher_bias)
    check_inputs(*heads, labels, beta, temperature, chunk_bytes)
    if keeps not in (0, OF_LOGITS, OF_HIDDEN):
        raise ArgumentError(f"keeps is {keeps}; expected 0, 1 or 2")


def _check_kept(dloss, kept, student_hidden, student_weight, labels, keeps, need_weight, need_bias) -> None:
    rows, (vocabulary, size) = student_hidden.rows, student_weight.shape
    if keeps not in (OF_LOGITS, OF_HIDDEN) or (keeps == OF_HIDDEN and (need_weight or need_bias)):
        raise ArgumentError(f"keeps is {keeps}; expected 1, or 2 without gradients of weight and bias")
    check_shape("dloss", dloss.shape, student_hidden.shape[:-1], "that of student_hidden without its last one")
    check_shape("kept", kept.shape, (rows, padded(vocabulary) if keeps == OF_LOGITS else size), "that of gradients")
    check_same(
        "kept", kept.dtype, student_hidden.dtype if keeps == OF_LOGITS else torch.float32, "dtype", of="gradients"
    )
    if labels is not None:
        check_dtype("labels", labels.dtype)
        check_shape("labels", labels.shape, student_hidden.shape[:-1], "that of student_hidden without its last one")


def _gradients_kept(student_hidden, student_weight, need_hidden, need_weight, need_bias):
    return (
        Memory(student_hidden.shape, student_hidden.dtype) if need_hidden else None,
        Memory.like(student_weight) if need_weight else None,
        Memory((student_weight.shape[0],), student_weight.dtype) if need_bias else None,
    )


TENSORS = (
    Argument("student_hidden"), Argument("student_weight", None), Argument("teacher_hidden"),
    Argument("teacher_weight", None), Argument("student_bias", None, optional=True),
    Argument("teacher_bias", None, optional=True), Argument("labels", None, optional=True),
)  # fmt: skip
OPTIONS = "int ignore_index, float beta, float temperature, int chunk_bytes"
FORWARD = Operator(
    "linear_divergence_fwd", TENSORS, options=f"{OPTIONS}, int keeps", results="loss stats kept", check=_check_fwd,
    outputs=_outputs_fwd, reference=partial(_forward, PLAIN), plans_empty=True,
    plan=lambda student_hidden: Steps(instead=partial(_forward, WITH_KERNELS)) if student_hidden.rows else IN_TORCH,
)  # fmt: skip
BACKWARD = Operator(
    "linear_divergence_bwd", (DenseFloat("dloss", None), *TENSORS, Dense("stats", None)),
    options=f"{OPTIONS}, bool need_hidden, bool need_weight, bool need_bias, bool fp32_hidden_grad",
    results="dhidden dweight dbias",
    outputs=_gradients, check=_check_bwd,
    plan=lambda student_hidden: Steps(instead=partial(_backward, WITH_KERNELS)) if student_hidden.rows else IN_TORCH,
    reference=partial(_backward, PLAIN), plans_empty=True,
)  # fmt: skip
BACKWARD_KEPT = Operator(
    "linear_divergence_bwd_kept",
    (DenseFloat("dloss", None), Dense("kept", None), Argument("student_hidden"), Argument("student_weight", None),
     Argument("labels", None, optional=True)),
    options="int ignore_index, int keeps, bool need_hidden, bool need_weight, bool need_bias",
    results="dhidden dweight dbias", outputs=_gradients_kept, check=_check_kept,
    plan=lambda student_hidden: Steps(instead=_backward_kept) if student_hidden.rows else IN_TORCH,
    reference=_backward_kept, plans_empty=True,
)  # fmt: skip
