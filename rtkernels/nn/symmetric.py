"""Products summed over the GPUs of a group through memory that each of them can address, without NCCL.

The memory is torch's (``torch.distributed._symmetric_memory``): GPUs of one machine connected by NVLink. Every rank
reads what all ranks have, which suits the few rows of a decoding step. Tested on one GPU, and with two ranks in the
emulator; never run or measured on several GPUs. Import this module by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError, RtkError
from rtkernels.ops.gemm.scaled_mm import scaled_mm
from rtkernels.ops.multi.symmetric_memory import MAX_RANKS, SIGNAL, SLOTS, SUM, table_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class SymmetricBuffer:
    """One tensor of each rank of a group, which the kernels of all ranks can address.

    Attributes:
        tensor: This rank's.
        rank: Of this process.

    Args:
        tensors: Those of all ranks, as this process addresses them: equal shapes, contiguous.
        pads: int32 ``[8 * ranks]`` of all ranks likewise, zeros before the first signal.
        rank: Of this process.
    """

    def __init__(self, tensors: Sequence[Tensor], pads: Sequence[Tensor], rank: int) -> None:
        if not 1 <= len(tensors) <= MAX_RANKS or len(pads) != len(tensors) or not 0 <= rank < len(tensors):
            raise ArgumentError(
                f"{len(tensors)} tensors, {len(pads)} pads and rank {rank}; expected one of each for 1 to {MAX_RANKS} "
                f"ranks, and a rank among them"
            )
        first = tensors[0]
        for t in tensors:
            if t.dtype not in _DTYPES or t.shape != first.shape or t.dtype != first.dtype or not t.is_contiguous():
                raise ArgumentError(
                    f"tensors has one of shape {tuple(t.shape)} and {t.dtype}; expected contiguous ones of "
                    f"{tuple(first.shape)} and {first.dtype}, float32, bfloat16 or float16"
                )
        for pad in pads:
            if pad.dtype != torch.int32 or pad.shape != (SLOTS * len(tensors),) or not pad.is_contiguous():
                raise ArgumentError(f"a pad is {tuple(pad.shape)} {pad.dtype}; expected int32 [{SLOTS * len(tensors)}]")
        self.tensor, self.rank, self.ranks = tensors[rank], rank, len(tensors)
        self._kept = tuple(tensors), tuple(pads)
        self._tables = table_of(tensors), table_of(pads)
        self._memory: tuple[Any, ...] = ()

    @classmethod
    def allocate(cls, *size: int, group: Any, dtype: torch.dtype = torch.float32) -> SymmetricBuffer:
        """Allocate a buffer on the current CUDA device; a collective call of all ranks.

        Args:
            *size: Shape of each rank's tensor.
            group: The process group; its ranks are GPUs of one machine.
            dtype: float32, bfloat16 or float16.
        """
        from torch.distributed import _symmetric_memory as symmetric

        own = symmetric.empty(*size, dtype=dtype, device="cuda")
        handle = symmetric.rendezvous(own, group)
        words = SLOTS * handle.world_size
        pad = symmetric.empty(words, dtype=torch.int32, device="cuda").zero_()
        of_pads = symmetric.rendezvous(pad, group)
        torch.cuda.synchronize()
        torch.distributed.barrier(group)  # before the first signal all pads are zeros
        ranks = range(handle.world_size)
        buffer = cls(
            [handle.get_buffer(r, own.shape, dtype) for r in ranks],
            [of_pads.get_buffer(r, (words,), torch.int32) for r in ranks], handle.rank,
        )  # fmt: skip
        buffer._memory = own, pad, handle, of_pads  # the others' views do not keep it
        return buffer

    def _signal(self, slot: int, arrives: bool, waits: bool) -> None:
        if not isinstance(slot, int) or not 0 <= slot < SLOTS:
            raise ArgumentError(f"slot is {slot!r}; expected an integer from 0 to {SLOTS - 1}")
        if SIGNAL.can_launch(self.tensor):
            SIGNAL(self._tables[1], self.rank, slot, arrives, waits)
            return
        _, pads = self._kept
        for peer in range(self.ranks):
            if arrives:
                pads[peer][slot * self.ranks + self.rank] += 1
        own = pads[self.rank][slot * self.ranks : (slot + 1) * self.ranks]
        if waits:
            if not own.all():
                raise RtkError("a rank has not signalled; on the CPU the ranks of one process take turns")
            own -= 1

    def arrive(self, slot: int = 0) -> None:
        """Signal all ranks that what this rank has launched so far is done, in stream order."""
        self._signal(slot, True, False)

    def wait(self, slot: int = 0) -> None:
        """Let later launches of this stream wait for one signal of each rank."""
        self._signal(slot, False, True)

    def barrier(self, slot: int = 0) -> None:
        """``arrive`` and ``wait`` in one launch. All ranks call it, and no host waits."""
        self._signal(slot, True, True)

    def sum(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the sum of all ranks' tensors, added in fp32 in the order of ranks; the same bits on all ranks.

        Args:
            dtype: Of the result: the buffer's (default), or any of the three for float32 buffers.
        """
        dtype, own = dtype or self.tensor.dtype, self.tensor
        if dtype not in _DTYPES or own.dtype not in (torch.float32, dtype):
            raise ArgumentError(
                f"dtype is {dtype}; expected {own.dtype}" + ", or 16 bits" * (own.dtype == torch.float32)
            )
        aligned = all(t.data_ptr() % 16 == 0 for t in self._kept[0])
        if own.numel() == 0:
            return own.new_empty(own.shape, dtype=dtype)
        if not SUM.can_launch(own):
            return torch.stack([t.float() for t in self._kept[0]]).sum(0).to(dtype)
        return SUM(self._tables[0], own.numel(), own.dtype, dtype, aligned).view(own.shape)


def all_reduce_mm(
    x: Tensor, weight: Tensor, buffer: SymmetricBuffer, *, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the sum of ``x @ weight.T`` over all ranks: a layer whose inputs are split between GPUs.

    Four launches: the product into the buffer, a barrier, the sum, and a barrier, after which the buffer can be
    written again. They can be captured in a CUDA graph. Not differentiable.

    Args:
        x: ``[..., k]``: this rank's columns.
        weight: ``[n, k]``: this rank's columns.
        buffer: Of at least as many elements as the result; float32 keeps sums exact to the last rounding.
        bias: ``[n]``, added once.
        dtype: Of the result. Default: x's.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        raise ArgumentError("a tensor requires grad; all_reduce_mm has no gradient: call it under torch.no_grad()")
    shape = (*x.shape[:-1], weight.shape[0])
    if buffer.tensor.shape != shape:
        raise ArgumentError(f"buffer has shape {tuple(buffer.tensor.shape)}; expected {shape}, the result's")
    scaled_mm(x, weight, out=buffer.tensor, bias=bias if buffer.rank == 0 else None)
    buffer.barrier(0)
    y = buffer.sum(dtype or x.dtype)
    buffer.barrier(1)
    return y
