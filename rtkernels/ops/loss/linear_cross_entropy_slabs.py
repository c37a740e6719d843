"""Linear layer and cross entropy in slabs of the vocabulary: every sum over rows is one product, rounded once.

The logits of a slab are needed two times: for the log-sum-exp of the rows, then as what becomes their gradient, adds to
the gradient of the hidden states (fp32) and gives the slab's rows of the weight's gradient. In between they lie in the
memory of that gradient, behind the rows that the slab and all before it write; when it is full, in memory of their own
of up to 9/16 of its size; the rest is multiplied a second time. So the peak is 25/16 of the weight's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rtkernels.ops.loss import cross_entropy_operators as rows_ops
from rtkernels.ops.loss.cross_entropy_parallel import combined
from rtkernels.ops.loss.cross_entropy_plan import MEAN
from rtkernels.runtime.invariance import level
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.layout import nothing

_TILE = 128  # columns of a slab for each SM
_CPU_COLUMNS = 8192  # of a slab
_KEPT_SIXTEENTHS = 9  # of the weight's gradient: memory for logits that do not fit into it


def slab_columns(device: int) -> int:
    """Return the columns of a slab: a tile for each SM, so that no product ends with a round half empty."""
    return _TILE * device_info(device).sm_count if device >= 0 else _CPU_COLUMNS


class Slab(NamedTuple):
    """Columns of the logits that are computed and turned into gradients together."""

    first: int
    end: int
    place: int | None = None  # first element of its logits in the memory of the weight's gradient
    is_kept: bool = True  # False: multiplied a second time when its gradient is made


def plan(rows: int, vocabulary: int, size: int, columns: int) -> list[Slab]:
    """Return slabs of up to `columns` columns, in the order in which they become gradients.

    Slab after slab is turned into ``size`` elements of the weight's gradient for each column, from the start of its
    memory on, so the logits of a slab have to begin behind its own part of it, and behind those of the slab before. The
    part of the first slab holds no logits, so the smallest one comes first.
    """
    slabs: list[Slab] = []
    begin = last = 0
    while last < vocabulary:
        end = last + (columns if slabs else vocabulary % columns or columns)
        begin = max(begin, end * size)
        if begin + rows * (end - last) > vocabulary * size:
            break
        slabs.append(Slab(last, end, begin))
        begin += rows * (end - last)
        last = end
    half = columns // 2
    kept_end = last + vocabulary * size * _KEPT_SIXTEENTHS // (16 * rows * half) * half
    while last < vocabulary:
        is_kept = last < kept_end
        end = min(last + columns, kept_end if is_kept else vocabulary, vocabulary)
        slabs.append(Slab(last, end, None, is_kept))
        last = end
    return slabs


def add_product(sums: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add ``a @ b`` to fp32 sums, or overwrite them with it if it is the first; no rounding to the factors' dtype."""
    if a.dtype == torch.float32 or not a.is_cuda:
        a, b = a.float(), b.float()
        torch.mm(a, b, out=sums) if first else sums.addmm_(a, b)
    elif first:
        torch.mm(a, b, out_dtype=torch.float32, out=sums)
    else:
        torch.addmm(sums, a, b, out_dtype=torch.float32, out=sums)


class Functions(NamedTuple):
    """What is done to the logits of a slab: by kernels, or in plain torch."""

    parts: Callable[..., Tensor]
    gradient_in_place: Callable[..., None]


KERNELS = Functions(rows_ops.PARTS.launch, rows_ops.BACKWARD_IN_PLACE.launch)
PLAIN = Functions(rows_ops.PARTS.reference, rows_ops.BACKWARD_IN_PLACE.reference)


class Results(NamedTuple):
    """As the operator returns them, for flat rows."""

    loss: Tensor
    accuracy: Tensor
    lse: Tensor  # [rows]
    dhidden: Tensor
    dweight: Tensor
    dbias: Tensor


def run(
    functions: Functions, states: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, g: Tensor | None,
    options: tuple[int, float, float, float], reduction: int, needs: Sequence[bool],
) -> Results:  # fmt: skip
    """Return loss and gradients.

    Args:
        functions: For the logits of a slab.
        states: ``[rows, hidden size]``.
        weight: ``[vocabulary, hidden size]``.
        labels: ``[rows]``, dense.
        bias: ``[vocabulary]``, or None.
        g: fp32 ``[rows]``, the gradient of every row's loss; None for that of the reduced loss.
        options: ignore_index, label_smoothing, z_loss, softcap.
        reduction: NONE, MEAN or SUM.
        needs: Which gradients are wanted: of states, weight (always: its memory holds logits) and bias.
    """
    ignore_index, smoothing, z_loss, softcap = options
    vocabulary, size = weight.shape
    need_hidden, _, need_bias = needs
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    slabs = plan(len(states), vocabulary, size, slab_columns(weight.get_device()))

    def logits_of(slab: Slab) -> Tensor:
        of_slab, out = weight[slab.first : slab.end].t(), None
        if slab.place is not None:
            shape = len(states), slab.end - slab.first
            out = dweight.view(-1)[slab.place : slab.place + math.prod(shape)].view(shape)
        if bias is None:
            return torch.mm(states, of_slab, out=out)
        return torch.addmm(bias[slab.first : slab.end], states, of_slab, out=out)

    logits: dict[Slab, Tensor] = {}
    parts = []
    for slab in reversed(slabs):  # those that are not kept come before there is much to keep
        some = logits_of(slab)
        parts.append(functions.parts(some, labels, ignore_index, smoothing, softcap, slab.first, vocabulary))
        if slab.is_kept:
            logits[slab] = some
        del some
    loss, accuracy, stats, factor = combined(
        torch.stack(parts[::-1]), labels, ignore_index, smoothing, z_loss, vocabulary, reduction
    )
    if g is None:
        g = torch.ones(1, dtype=torch.float32, device=states.device)
    rows = (labels, stats, factor if reduction == MEAN else None)
    dhidden = torch.empty(states.shape, dtype=torch.float32, device=states.device) if need_hidden else nothing(g)
    dbias = []
    for slab in slabs:
        first, end = slab[:2]
        some = logits.pop(slab) if slab.is_kept else logits_of(slab)  # its memory is free after this round
        functions.gradient_in_place(g, some, *rows, *options, first, vocabulary)
        if need_hidden:
            add_product(dhidden, some, weight[first:end], first == 0)
        torch.mm(some.t(), states, out=dweight[first:end])
        if need_bias:
            dbias.append(some.sum(0, dtype=torch.float32))
        del some
    return Results(
        loss,
        accuracy,
        stats.sum(0),
        dhidden.to(states.dtype) if need_hidden else dhidden,
        dweight,
        torch.cat(dbias).to(states.dtype) if need_bias else nothing(g),
    )


def suits(rows: int, weight: Tensor, small: int, twice: bool) -> bool:
    """Return True if slabs are the best way: nothing is multiplied a second time, or `twice` allows it.

    It pays if the gradient is to be rounded once, as long as logits take no more memory than fp32 sums of it would. Up
    to `small` bytes of logits, one chunk has fewer launches; in fp32 chunks of rows round nothing either.
    """
    vocabulary, size = weight.shape
    slab_bytes = rows * vocabulary * weight.element_size()
    limit = (4 if twice else 3) * vocabulary * size
    return not level() and weight.dtype != torch.float32 and small < slab_bytes <= limit
