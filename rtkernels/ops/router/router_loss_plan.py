"""The kernels of the router's losses, how they are launched, and the same in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.router.warp_rows import KIND, check_rows
from rtkernels.ops.shared.experts import MAX_EXPERTS
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import fresh_zeros
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import (
    GRID_LIMIT,
    address,
    check_same,
    metadata,
    row_count,
    row_stride,
    rowed,
    vector_bytes,
)
from rtkernels.runtime.operator.operator import TorchOp

Z, SOFTMAX, SIGMOID, PLAIN = range(4)  # which loss; of load balancing, what the scores are
_UNIT, _PIECE, _WARPS, _BLOCKS_PER_SM = "router/losses.cu", 4, 8, 4
_ROWS_TOGETHER, _MOST_TOGETHER = 4, 2 * 32 * _PIECE  # rows that a warp has at a time in router_z_fwd; their columns
_DIMS = "rows:i64 experts:i64 x_stride:i64 inner:i64 interleaved:i64 number_kind:i64"

_FWD_ARGS = f"x:ptr counts:ptr partial:ptr loss:ptr ticket:ptr {_DIMS} whole:i64 loss_kind:i64 factor:f64"
_BWD_ARGS = f"g:ptr x:ptr counts:ptr dx:ptr {_DIMS} whole_in:i64 whole_out:i64 loss_kind:i64 factor:f64"


def _kernel(entry: str, args: str, registers: int) -> Kernel:
    return Kernel(_UNIT, entry, template="PIECE", args=args, variants=[(_PIECE,)], max_registers=registers)


_FWD, _BWD = _kernel("router_loss_fwd", _FWD_ARGS, 64), _kernel("router_loss_bwd", _BWD_ARGS, 64)
_Z_FWD, _Z_BWD = _kernel("router_z_fwd", _FWD_ARGS, 128), _kernel("router_z_bwd", _BWD_ARGS, 128)
_COUNTS = Kernel(
    _UNIT,
    "router_counts",
    template="I",
    args="indices:ptr counts:ptr length:i64 top_k:i64 experts:i64 first_step:i64 row_step:i64",
    variants=[("i32",), ("i64",)],
    max_registers=48,
)


# ---- launchers ------------------------------------------------------------------------------------------------------


class Sequences(NamedTuple):
    """Which rows share counts."""

    number: int
    length: int
    inner: int  # 0 if all rows do, else the size of the second dimension
    interleaved: bool  # every inner-th row, not inner rows in a row


def sequences_of(shape: Sequence[int], sequence_dim: int) -> Sequences:
    """Return the sequences of logits or indices of that shape; a sequence_dim of -1 makes one of all rows."""
    if sequence_dim == -1:
        return Sequences(1, row_count(shape), 0, False)
    if len(shape) != 3 or sequence_dim not in (0, 1):
        raise ArgumentError(
            f"sequence_dim is {sequence_dim} for logits of shape {tuple(shape)}; expected 0 or 1, and three dimensions"
        )
    return Sequences(shape[1 - sequence_dim], shape[sequence_dim], shape[1], sequence_dim == 0)


def _check(x: tuple[Any, ...], counts: tuple[Any, ...] | None, sequence_dim: int, k: int) -> Sequences:
    check_rows("logits", x, MAX_EXPERTS, "experts")
    sequences, experts = sequences_of(x[1], sequence_dim), x[1][-1]
    if k < 1:
        raise ArgumentError(f"k is {k}; expected at least 1")
    if counts is None:
        return sequences
    if counts[0] != torch.int32:
        raise ArgumentError(f"counts has dtype {str(counts[0])[6:]}; expected int32")
    wanted = (experts,) if sequence_dim == -1 else (sequences.number, experts)
    if tuple(counts[1]) != wanted:
        raise ArgumentError(f"counts has shape {tuple(counts[1])}; expected {wanted}")
    check_same("counts", counts[3], x[3], "device index", of="logits")
    return sequences


def _factor(shape: Sequence[int], sequences: Sequences, kind: int, k: int, coefficient: float) -> float:
    """Return what the sum over rows is multiplied with. Operators work it out: graphs must not depend on the rows."""
    rows = row_count(shape)
    if rows == 0:
        return 0.0
    return coefficient / rows if kind == Z else coefficient * shape[-1] / (k * sequences.length * rows)


def _plan(x, counts, align: int, out_align: int | None, kind: int, sequence_dim: int, k: int):
    sequences = _check(x, counts, sequence_dim, k)
    dtype, shape, stride, device = x
    rows, experts, size = row_count(shape), shape[-1], dtype.itemsize
    if rows == 0:
        return None, 0, (), 0.0
    piece, step, backward = _PIECE * size, row_stride(shape, stride), out_align is not None
    whole = [int(vector_bytes(align, step * size, experts * size, most=piece) == piece)]
    if backward:
        whole.append(int(vector_bytes(out_align, experts * size, most=piece) == piece))
    numbers = (rows, experts, step, sequences.inner, int(sequences.interleaved), KIND[dtype], *whole, kind)
    most = _WARPS * _BLOCKS_PER_SM * device_info(device).sm_count
    if kind == Z and dtype == torch.float32 and experts <= _MOST_TOGETHER and all(whole):
        kernel, units = (_Z_BWD, rows) if backward else (_Z_FWD, -(-rows // _ROWS_TOGETHER))
        rounds = 1 if backward else -(-units // most)
    else:
        kernel, units = _BWD if backward else _FWD, rows
        rounds = -(-rows // most)
    grid = -(-units // (_WARPS * rounds))
    launch = kernel.bind((_PIECE,), device, min(grid, GRID_LIMIT), 32 * _WARPS)
    return launch, grid, numbers, _factor(shape, sequences, kind, k, 1.0)


_PLANS = Plans(_plan)


def _launch_fwd(x, counts, kind, sequence_dim, k, coefficient):
    if x.dim():
        x = rowed(x)
    counts = None if counts is None else counts.contiguous()
    x_address = x.data_ptr()
    key = metadata(x), metadata(counts), x_address & 15, None, kind, sequence_dim, k
    launch, grid, numbers, factor = _PLANS[key]
    if launch is None:
        return torch.zeros((), device=x.device)
    loss = torch.empty((), dtype=torch.float32, device=x.device)
    partial = torch.empty(grid, dtype=torch.float32, device=x.device)
    ticket = fresh_zeros(x.get_device(), 1)
    pointers = x_address, address(counts), partial.data_ptr(), loss.data_ptr(), ticket.data_ptr()
    launch(*pointers, *numbers, coefficient * factor)
    return loss


def _launch_bwd(g, x, counts, kind, sequence_dim, k, coefficient):
    _check_g(g)
    if x.dim():
        x = rowed(x)
    counts = None if counts is None else counts.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x_address, out = x.data_ptr(), dx.data_ptr()
    key = metadata(x), metadata(counts), x_address & 15, out & 15, kind, sequence_dim, k
    launch, _, numbers, factor = _PLANS[key]
    if launch is not None:
        launch(g.data_ptr(), x_address, address(counts), out, *numbers, coefficient * factor)
    return dx


def _check_g(g: Tensor) -> None:
    if g.dtype != torch.float32 or g.numel() != 1:
        raise ArgumentError(f"g has dtype {str(g.dtype)[6:]} and shape {tuple(g.shape)}; expected one float32 number")


def _check_indices(indices: Tensor, experts: int, sequence_dim: int) -> Sequences:
    if indices.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"indices has dtype {str(indices.dtype)[6:]}; expected one of int32, int64")
    if not indices.dim():
        raise ArgumentError("indices has no dimensions; expected at least one")
    if not 1 <= experts <= MAX_EXPERTS:
        raise ArgumentError(f"experts is {experts}; expected 1 to {MAX_EXPERTS}")
    return sequences_of(indices.shape, sequence_dim)


def _plan_counts(device: int, wide: bool, sequences: int, experts: int):
    return _COUNTS.bind(("i64" if wide else "i32",), device, sequences, 1024 if device >= 0 else 64, 4 * experts)


_COUNTS_PLANS = Plans(_plan_counts)


def _launch_counts(indices, experts, sequence_dim):
    number, length, inner, interleaved = _check_indices(indices, experts, sequence_dim)
    indices = indices.contiguous()
    counts = torch.empty(_counts_shape(number, experts, sequence_dim), dtype=torch.int32, device=indices.device)
    if counts.numel() == 0 or indices.numel() == 0:
        return counts.zero_()
    launch = _COUNTS_PLANS[indices.get_device(), indices.dtype == torch.int64, number, experts]
    first_step, row_step = (1, inner) if interleaved else (length, 1)
    launch(indices.data_ptr(), counts.data_ptr(), length, indices.shape[-1], experts, first_step, row_step)
    return counts


def _counts_shape(sequences: int, experts: int, sequence_dim: int) -> tuple[int, ...]:
    return (experts,) if sequence_dim == -1 else (sequences, experts)


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _of_rows(counts: Tensor, sequences: Sequences) -> Tensor:
    """Return the counts each row is weighed with."""
    if sequences.inner == 0:
        return counts.float()
    if sequences.interleaved:
        return counts.float().repeat(sequences.length, 1)
    return counts.float().repeat_interleave(sequences.length, 0)


def _plain_scores(x: Tensor, kind: int) -> Tensor:
    """Return scores whose sum is 1, or 0 for a row of -inf."""
    if kind == SOFTMAX:
        return torch.where((x == -torch.inf).all(-1, keepdim=True), 0.0, torch.softmax(x, -1))
    s = torch.sigmoid(x)
    total = s.sum(-1, keepdim=True)
    return s / torch.where(total == 0, 1.0, total)


def _reference_fwd(x, counts, kind, sequence_dim, k, coefficient):
    sequences = _check(metadata(x), metadata(counts), sequence_dim, k)
    wide, factor = x.float().reshape(-1, x.shape[-1]), _factor(x.shape, sequences, kind, k, coefficient)
    if kind == Z:
        return torch.logsumexp(wide, -1).square().sum() * factor
    s = wide if kind == PLAIN else _plain_scores(wide, kind)
    return (s * _of_rows(counts, sequences)).sum() * factor


def _reference_bwd(g, x, counts, kind, sequence_dim, k, coefficient):
    sequences = _check(metadata(x), metadata(counts), sequence_dim, k)
    _check_g(g)
    wide = x.float().reshape(-1, x.shape[-1])
    scale = g.reshape(()) * _factor(x.shape, sequences, kind, k, coefficient)
    if kind == Z:
        dx = 2 * scale * torch.logsumexp(wide, -1, keepdim=True) * torch.softmax(wide, -1)
    else:
        weights = _of_rows(counts, sequences)
        if kind == PLAIN:
            dx = (scale * weights).expand_as(wide)
        else:
            s = _plain_scores(wide, kind)
            dx = scale * s * (weights - (s * weights).sum(-1, keepdim=True))
            if kind == SIGMOID:
                dx = dx * (1 - torch.sigmoid(wide))
    return dx.reshape(x.shape).to(x.dtype).contiguous()


def reference_counts(indices, experts, sequence_dim):
    number, length, inner, interleaved = _check_indices(indices, experts, sequence_dim)
    rows = row_count(indices.shape)
    flat = indices.reshape(rows, indices.shape[-1]).long()
    place = torch.arange(rows, device=indices.device)
    sequence = torch.zeros_like(place) if inner == 0 else place % inner if interleaved else place // length
    valid = (flat >= 0) & (flat < experts)
    key = torch.where(valid, sequence[:, None] * experts + flat, number * experts).reshape(-1)
    counts = torch.zeros(number * experts + 1, dtype=torch.int32, device=indices.device)
    counts = counts.scatter_add(0, key, torch.ones_like(key, dtype=torch.int32))[:-1]
    return counts.view(_counts_shape(number, experts, sequence_dim)).clone()


def _fake_fwd(x, counts, kind, sequence_dim, k, coefficient):
    return x.new_empty((), dtype=torch.float32)


def _fake_bwd(g, x, counts, kind, sequence_dim, k, coefficient):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_counts(indices, experts, sequence_dim):
    number = sequences_of(indices.shape, sequence_dim).number
    return indices.new_empty(_counts_shape(number, experts, sequence_dim), dtype=torch.int32)


# Of load balancing, the loss is divided by k and multiplied by the number of experts; of Z, k is not used.
_OPTIONS = "Tensor x, Tensor? counts, int kind, int sequence_dim, int k, float coefficient"
FORWARD = TorchOp(
    f"router_loss_fwd({_OPTIONS}) -> Tensor",
    launch=_launch_fwd,
    reference=_reference_fwd,
    fake=_fake_fwd,
)
BACKWARD = TorchOp(
    f"router_loss_bwd(Tensor g, {_OPTIONS}) -> Tensor",
    launch=_launch_bwd,
    reference=_reference_bwd,
    fake=_fake_bwd,
)
COUNTS = TorchOp(
    "router_counts(Tensor indices, int experts, int sequence_dim) -> Tensor",
    launch=_launch_counts,
    reference=reference_counts,
    fake=_fake_counts,
)
KERNELS = (_FWD, _BWD, _Z_FWD, _Z_BWD, _COUNTS)
