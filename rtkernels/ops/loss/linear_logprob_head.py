"""The linear layer in front of log-probabilities: slabs of its logits, and the memory of rows."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.ops.loss.linear_cross_entropy_slabs import add_product, slab_columns
from rtkernels.ops.loss.logprob_reference import PARTS as PART_ROWS
from rtkernels.runtime.invariance import level
from rtkernels.runtime.launch.device import device_info

CHUNK_BYTES = 256 << 20  # logits of a slab by default, about
_INVARIANT_COLUMNS = 1 << 14  # of a slab, with batch invariance
_STEP = 128  # columns: given chunk_bytes are rounded down to so many
_TILE = (128, 256)  # the largest tile of a product in cuBLAS
_PAD = 8  # elements: rows of logits begin at multiples of 16 bytes


class Options(NamedTuple):
    """The options that products and row kernels need."""

    ignore_index: int
    logit_scale: float
    softcap: float
    temperature: float
    fp32_logits: bool
    chunk_bytes: int
    first: int
    vocabulary: int


def padded(columns: int) -> int:
    """Return the distance between rows of so many logits."""
    return -(-columns // _PAD) * _PAD


def columns_of_slab(rows: int, vocabulary: int, itemsize: int, chunk_bytes: int, device: int) -> int:
    """Return the columns of a slab: as many as `chunk_bytes` hold, or for 0 about CHUNK_BYTES, in whole waves."""
    if level():  # whatever chunk_bytes are: the columns of a slab decide how rows are summed up
        return min(_INVARIANT_COLUMNS, vocabulary)
    a_column = max(rows, 1) * itemsize
    if chunk_bytes:
        columns = max(_STEP, chunk_bytes // a_column // _STEP * _STEP)
    else:
        wave = slab_columns(device)
        columns = max(1, round(CHUNK_BYTES / (a_column * wave))) * wave
    return min(columns, vocabulary)


def may_split(rows: int, columns: int, sms: int) -> bool:
    """Return True if cuBLAS may share the k of a product between blocks: it has fewer tiles than there are SMs."""
    return -(-rows // _TILE[0]) * -(-columns // _TILE[1]) < sms


def rounded_product(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    """Write ``a @ b + bias`` to `out` with one rounding.

    By default torch lets cuBLAS add the parts of a split k in 16 bits, each of them rounded, and the bias after them
    (``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction``; without it, the bias is still added to a
    rounded product). Products that may be split have fp32 results here, which are rounded after the bias is added.
    """
    rounds = out.is_cuda and out.dtype != torch.float32
    if rounds and not level() and may_split(*out.shape, device_info(out.get_device()).sm_count):
        sums = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        add_product(sums, a, b, True)
        out.copy_(sums if bias is None else sums.add_(bias))
    elif bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


class Head:
    """The linear layer: slabs of its logits."""

    def __init__(self, states: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> None:
        self.states, self.weight, self.bias = states, weight, bias
        self.dtype = torch.float32 if options.fp32_logits else states.dtype
        self.columns = columns_of_slab(
            len(states), len(weight), self.dtype.itemsize, options.chunk_bytes, weight.get_device()
        )

    def memory(self, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for logits of so many columns."""
        shape = len(self.states), padded(columns)
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.states.device)

    def slabs(self) -> Iterator[tuple[int, int]]:
        """Yield the first column of each slab, and the one behind its last."""
        for first in range(0, len(self.weight), self.columns):
            yield first, min(first + self.columns, len(self.weight))

    def logits(self, first: int, end: int, memory: Tensor) -> Tensor:
        """Compute logits of some columns, in the first columns of `memory`."""
        out, some = memory[:, : end - first], self.weight[first:end].t()
        bias = None if self.bias is None else self.bias[first:end]
        if self.dtype != self.states.dtype:
            add_product(out, self.states, some, True)
            return out if bias is None else out.add_(bias)
        rounded_product(out, self.states, some, bias)
        return out


def rows_of(hidden: Tensor) -> Tensor:
    """Return states as ``[rows, hidden size]``, also for a hidden size of 0."""
    return hidden.reshape(prod(hidden.shape[:-1]), hidden.shape[-1])


def flat_rows(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return states ``[rows, hidden size]`` and ids ``[rows, k]``."""
    states = rows_of(hidden)
    k = ids.shape[-1] if ids.dim() == hidden.dim() else 1
    return states, ids.reshape(len(states), k).contiguous()


def row_memory(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for the parts of rows and for the scores of their ids."""
    shape = {"dtype": torch.float32, "device": states.device}
    return torch.empty(PART_ROWS, len(ids), **shape), torch.empty(ids.shape[1], len(ids), **shape)


def candidates(hidden: Any, ids: Any) -> int:
    """Return how many ids a row has."""
    return ids.shape[-1] if ids.dim() == hidden.dim() else 1
