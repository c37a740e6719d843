"""The tables behind the multi-tensor ops: where every tensor is, and how the lists are cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.tables import Tables, check_list, same_order, upload
from rtkernels.runtime.layout import FLOAT_DTYPES, GRID_LIMIT
from rtkernels.runtime.operator.plan import StepPlan

THREADS = 256
_RESIDENT = 8  # blocks of an SM, about
_ROUNDS = 4
_HEADER = 3  # words of a record before its addresses; cuda_src/multi/list.cuh
_ALIGNED = 1 << 32
_KIND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_OTHER = 3  # codes and integers, whose type a kernel knows
_SHIFTS = (12, 16)  # a chunk has 4096 to 65536 elements


class Table:
    """One or more lists of tensors that are walked together, on the device.

    Attributes:
        address: Of the words.
        tensors: How many there are in each list.
        chunks: How many there are in all.
        shift: Elements of a whole chunk, as a power of two.
        plans: Those of operators for this table, by name and options.

    Args:
        lists: Lists of the same length.
        device: CUDA ordinal, or -1.
        scalars: Indices of lists whose tensors have other elements than those of the first list.
    """

    def __init__(self, lists: Sequence[Sequence[Tensor]], device: int, scalars: Sequence[int] = ()) -> None:
        self.device, self.tensors, self.lists = device, len(lists[0]), len(lists)
        sizes = numpy.array(list(map(Tensor.numel, lists[0])), numpy.int64)
        self.shift = _shift(int(sizes.sum()), device)
        counts = -(-sizes >> self.shift)
        self.chunks = int(counts.sum())
        if self.chunks > GRID_LIMIT:
            raise ArgumentError(
                f"the list has {int(sizes.sum())} elements; expected at most {GRID_LIMIT << self.shift}"
            )
        width = _HEADER + self.lists
        words = numpy.empty(self.tensors * width + self.chunks, numpy.int64)
        records = words[: self.tensors * width].reshape(self.tensors, width)
        records[:, 0] = sizes
        records[:, 2] = numpy.cumsum(counts) - counts
        kinds = numpy.zeros(self.tensors, numpy.int64)
        for i, tensors in enumerate(lists):
            records[:, _HEADER + i] = list(map(Tensor.data_ptr, tensors))
            kinds |= numpy.array([_KIND.get(t.dtype, _OTHER) for t in tensors], numpy.int64) << 2 * i
        addresses = [_HEADER + i for i in range(self.lists) if i not in scalars]
        aligned = (numpy.bitwise_or.reduce(records[:, addresses], axis=1) & 15) == 0
        records[:, 1] = kinds | numpy.where(aligned, _ALIGNED, 0)
        words[self.tensors * width :] = numpy.repeat(numpy.arange(self.tensors), counts)

        def targets() -> dict[int, Tensor]:
            return {
                t * width + _HEADER + i: tensor
                for i, tensors in enumerate(lists)
                for t, tensor in enumerate(tensors)
                if tensor.numel()
            }

        self._words = upload(words, device, targets)
        self.plans: dict[Any, StepPlan] = {}

    @property
    def address(self) -> int:
        """The address of the words (read at every launch, so that the emulator sees the tensor)."""
        return self._words.data_ptr()

    @property
    def walkers(self) -> int:
        """Blocks of a kernel that walks over the chunks: soon through if there is nothing to do, and still balanced."""
        return max(min(self.chunks, _ROUNDS * _RESIDENT * device_info(self.device).sm_count), 1)


def _shift(elements: int, device: int) -> int:
    # Some 16 rounds of full occupancy: enough for the hardware to even them out, few enough partial results.
    wanted = elements // (16 * _RESIDENT * device_info(device).sm_count)
    return min(max(wanted.bit_length(), _SHIFTS[0]), _SHIFTS[1])


def check_one(tensors: Sequence[Tensor], name: str = "tensors") -> None:
    """Raise an ArgumentError unless a list can be walked."""
    if len(tensors):
        first = tensors[0]
        check_list(name, tensors, FLOAT_DTYPES, getattr(first, "device", torch.device("cpu")))


def check_together(
    name: str, tensors: Sequence[Tensor], of: str, others: Sequence[Tensor],
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES,
) -> None:  # fmt: skip
    """Raise an ArgumentError unless a list can be walked together with another one that was checked."""
    if len(tensors) != len(others):
        raise ArgumentError(f"{name} has {len(tensors)} tensors; expected {len(others)}, as many as {of}")
    if not len(tensors):
        return
    check_list(name, tensors, dtypes, others[0].device)
    if tensors is others:
        return
    for i, (t, other) in enumerate(zip(tensors, others, strict=True)):
        if t.shape != other.shape:
            raise ArgumentError(f"{name}[{i}] has shape {tuple(t.shape)}; expected {tuple(other.shape)}, as {of}[{i}]")
        if not same_order(t, other):
            raise ArgumentError(
                f"{name}[{i}] has strides {tuple(t.stride())}; expected {tuple(other.stride())}, as {of}[{i}]"
            )


def _check_two(lists: Sequence[Sequence[Tensor]]) -> None:
    check_one(lists[0], "outputs")
    check_together("inputs", lists[1], "outputs", lists[0])


ONE = Tables(Table, lambda lists: check_one(lists[0]))
TWO = Tables(Table, _check_two)
