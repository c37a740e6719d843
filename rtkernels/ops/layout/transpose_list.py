"""Transposing many matrices of one shape in one launch, wherever each of them lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from rtkernels.ops.layout.transpose_plan import list_steps, padded
from rtkernels.runtime.launch.tables import Tables, check_list, upload
from rtkernels.runtime.layout import GRID_LIMIT
from rtkernels.runtime.operator.declared import Operator, Tensors
from rtkernels.runtime.operator.plan import Memory, StepPlan, Steps
from rtkernels.runtime.torch_private import TENSOR_TYPES, is_dynamo_compiling


class _Table:
    """The addresses of dense matrices ``[rows, cols]``, on the device."""

    def __init__(self, lists: Sequence[Sequence[Tensor]], device: int) -> None:
        matrices = lists[0]
        self.device, self.count, self.size = device, len(matrices), matrices[0].itemsize
        self.rows, self.cols = matrices[0].shape
        addresses = [t.data_ptr() for t in matrices]
        self.misaligned = int(numpy.bitwise_or.reduce(addresses)) & 15
        self._words = upload(numpy.array(addresses, numpy.int64), device, lambda: dict(enumerate(matrices)))
        self.plans: dict[Any, StepPlan] = {}

    @property
    def address(self) -> int:
        """Of the words."""
        return self._words.data_ptr()


def _check(lists: Sequence[Sequence[Tensor]]) -> None:
    first = lists[0][0]
    check_list("matrices", lists[0], (first.dtype,), first.device)


def _plan(table: _Table, pad_to: int) -> Steps:
    return list_steps(table.count, table.rows, table.cols, table.size, table.misaligned, pad_to, table.device)


def _outputs(matrices: Sequence[Tensor], pad_to: int) -> tuple[Memory]:
    rows, cols = matrices[0].shape
    return (Memory((len(matrices), cols, padded(rows, pad_to)), matrices[0].dtype),)


def _reference(matrices: Sequence[Tensor], pad_to: int) -> Tensor:
    (memory,) = _outputs(matrices, pad_to)
    dtype = torch.uint8 if memory.dtype.itemsize == 1 else memory.dtype
    result = torch.zeros(memory.shape, dtype=dtype, device=matrices[0].device).view(memory.dtype)
    for y, x in zip(result, matrices, strict=True):
        y[:, : x.shape[0]].copy_(x.t())
    return result


MATRICES = Operator(
    "transpose_list", (Tensors("matrices"),), options="int pad_to", results="y", outputs=_outputs,
    tables=Tables(_Table, _check), plan=_plan, reference=_reference,
)  # fmt: skip


def one_launch_fits(xs: Sequence[Any]) -> bool:
    """Return True for dense matrices of one shape and dtype, without gradients, whose memory holds their values."""
    first = xs[0]
    if is_dynamo_compiling() or type(first) not in TENSOR_TYPES or first.dim() != 2 or not first.numel():
        return False
    if first.itemsize > 4 or -(-first.shape[0] // 16) * -(-first.shape[1] // 16) * len(xs) > GRID_LIMIT:
        return False
    return all(
        type(x) in TENSOR_TYPES
        and (x.shape, x.dtype, x.device) == (first.shape, first.dtype, first.device)
        and x.is_contiguous()
        and not (x.is_neg() or x.is_conj())
        and not (x.requires_grad and torch.is_grad_enabled())
        for x in xs
    )
