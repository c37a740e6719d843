"""Linear layer and cross entropy in slabs of the vocabulary: every sum over rows is one product, rounded once.

All logits exist, as one tensor for each slab, until the log-sum-exp of every row is known. Then slab after slab
becomes its gradient, adds to the gradient of the hidden states (fp32) and gives its rows of the weight's gradient. The
memory of that gradient holds logits before: those of a slab lie behind the rows that the slab and all before it write.
The peak is the logits, where whole logits need the weight's gradient next to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.ops.loss import cross_entropy_operators as rows_ops
from rtkernels.ops.loss.cross_entropy_parallel import combined
from rtkernels.ops.loss.cross_entropy_plan import MEAN
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.layout import nothing

_TILE, _CPU_COLUMNS = 128, 8192


def slab_columns(device: int) -> int:
    """Return the columns of a slab: a tile for each multiprocessor, so that no product ends with a round half empty."""
    return _TILE * device_info(device).sm_count if device >= 0 else _CPU_COLUMNS


def bounds(vocabulary: int, columns: int) -> list[tuple[int, int]]:
    """Return the first and the last column (exclusive) of each slab. A smaller slab comes first: see :func:`places`."""
    first = vocabulary % columns or columns
    ends = range(min(first, vocabulary), vocabulary + 1, columns)
    return [(max(0, end - columns), end) for end in ends]


def add_product(sums: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add ``a @ b`` to fp32 sums, or overwrite them with it if it is the first; no rounding to the factors' dtype."""
    if a.dtype == torch.float32 or not a.is_cuda:
        a, b = a.float(), b.float()
        torch.mm(a, b, out=sums) if first else sums.addmm_(a, b)
    elif first:
        torch.mm(a, b, out_dtype=torch.float32, out=sums)
    else:
        torch.addmm(sums, a, b, out_dtype=torch.float32, out=sums)


def places(memory: Tensor | None, rows: int, columns: list[int], size: int) -> list[Tensor | None]:
    """Return where logits ``[rows, columns]`` of slabs lie in the memory of the weight's gradient; None: elsewhere.

    Slab after slab is turned into ``columns * size`` elements of the gradient, from the start of the memory on, so the
    logits of a slab have to begin behind its own part of it, and behind the logits of the slab before. The part of the
    first slab holds no logits, so the smallest one is best.
    """
    found: list[Tensor | None] = []
    begin = written = 0
    for count in columns:
        written += count * size
        begin = max(begin, written)
        end = begin + rows * count
        fits = memory is not None and end <= memory.numel()
        found.append(memory[begin:end].view(rows, count) if fits else None)
        begin = end if fits else begin
    return found


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
        needs: Which gradients are wanted: of states, weight and bias.
    """
    ignore_index, smoothing, z_loss, softcap = options
    vocabulary = weight.shape[0]
    spans = bounds(vocabulary, slab_columns(weight.get_device()))
    slabs = [weight[first:end] for first, end in spans]
    need_hidden, need_weight, need_bias = needs
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if need_weight else None
    memory = None if dweight is None else dweight.view(-1)
    logits: list[Any] = []
    parts = []
    room = places(memory, states.shape[0], [len(slab) for slab in slabs], weight.shape[1])
    for (first, end), slab, place in zip(spans, slabs, room, strict=True):
        if bias is None:
            logits.append(torch.mm(states, slab.t(), out=place))
        else:
            logits.append(torch.addmm(bias[first:end], states, slab.t(), out=place))
        parts.append(functions.parts(logits[-1], labels, ignore_index, smoothing, softcap, first, vocabulary))
    loss, accuracy, stats, factor = combined(
        torch.stack(parts), labels, ignore_index, smoothing, z_loss, vocabulary, reduction
    )
    if g is None:
        g = torch.ones(1, dtype=torch.float32, device=states.device)
    rows = (labels, stats, factor if reduction == MEAN else None)
    dhidden = torch.empty(states.shape, dtype=torch.float32, device=states.device) if need_hidden else nothing(g)
    dbias = []
    for i, (first, end) in enumerate(spans):
        some, logits[i] = logits[i], None  # its memory is free after this round
        functions.gradient_in_place(g, some, *rows, *options, first, vocabulary)
        if need_hidden:
            add_product(dhidden, some, slabs[i], i == 0)
        if dweight is not None:
            torch.mm(some.t(), states, out=dweight[first:end])
        if need_bias:
            dbias.append(some.sum(0, dtype=torch.float32))
        del some
    return Results(
        loss,
        accuracy,
        stats.sum(0),
        dhidden.to(states.dtype) if need_hidden else dhidden,
        nothing(g) if dweight is None else dweight,
        torch.cat(dbias).to(states.dtype) if need_bias else nothing(g),
    )


def suits(rows: int, weight: Tensor, small: int) -> bool:
    """Return True if slabs are the best way: all logits in no more memory than the weight's gradient takes in fp32.

    With more rows, chunks whose weight gradients are added in fp32 need less. Up to `small` bytes of logits, one chunk
    has fewer launches, and in fp32 chunks of rows round nothing either.
    """
    vocabulary, size = weight.shape
    slab_bytes = rows * vocabulary * weight.element_size()
    return weight.dtype != torch.float32 and small < slab_bytes <= 4 * vocabulary * size
