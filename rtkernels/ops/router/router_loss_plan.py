"""The kernels of the router's losses, how they are launched, and the same in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.router.warp_rows import KIND, check_rows
from rtkernels.ops.shared.experts import MAX_EXPERTS
from rtkernels.runtime.checks import check_dimensions, check_dtype, check_shape
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT, row_count, vector_bytes
from rtkernels.runtime.operator.declared import Argument, Dense, Meta, Operator, Rows
from rtkernels.runtime.operator.plan import Memory, Step, Steps

Z, SOFTMAX, SIGMOID, PLAIN = range(4)  # which loss; of load balancing, what the scores are
_UNIT = "router/losses.cu"
_VECTOR = 4
_WARPS = 8
_BLOCKS_PER_SM = 4
_ROWS_TOGETHER = 4  # rows that a warp has at a time in router_z_fwd
_MAX_TOGETHER = 2 * 32 * _VECTOR  # their columns
_DIMS = "rows:i64 experts:i64 x_stride:i64 inner:i64 interleaved:i64 number_kind:i64"

_FWD_ARGS = f"x:ptr counts:ptr partial:ptr loss:ptr ticket:ptr {_DIMS} whole:i64 loss_kind:i64 factor:f64"
_BWD_ARGS = f"g:ptr x:ptr counts:ptr dx:ptr {_DIMS} whole_in:i64 whole_out:i64 loss_kind:i64 factor:f64"


def _kernel(entry: str, args: str, registers: int) -> Kernel:
    return Kernel(_UNIT, entry, template="VEC", args=args, variants=[(_VECTOR,)], max_registers=registers)


_FWD, _BWD = _kernel("router_loss_fwd", _FWD_ARGS, 64), _kernel("router_loss_bwd", _BWD_ARGS, 64)
_Z_FWD, _Z_BWD = _kernel("router_z_fwd", _FWD_ARGS, 128), _kernel("router_z_bwd", _BWD_ARGS, 128)
_COUNTS = Kernel(
    _UNIT, "router_counts", template="I", max_registers=48,
    args="indices:ptr counts:ptr length:i64 top_k:i64 experts:i64 first_step:i64 row_step:i64",
    variants=[("i32",), ("i64",)],
)  # fmt: skip


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


def _check(x: Meta, counts: Meta | None, sequence_dim: int, k: int) -> None:
    check_rows("logits", x, MAX_EXPERTS, "experts")
    sequences = sequences_of(x.shape, sequence_dim)
    if k < 1:
        raise ArgumentError(f"k is {k}; expected at least 1")
    if counts is None:
        return
    if counts.dtype != torch.int32:
        raise ArgumentError(f"counts has dtype {str(counts.dtype)[6:]}; expected int32")
    check_shape("counts", counts.shape, _counts_shape(sequences.number, x.shape[-1], sequence_dim))


def _check_bwd(g: Meta, x: Meta, counts: Meta | None, sequence_dim: int, k: int) -> None:
    if g.dtype != torch.float32 or g.numel() != 1:
        raise ArgumentError(f"g has dtype {str(g.dtype)[6:]} and shape {tuple(g.shape)}; expected one float32 number")
    _check(x, counts, sequence_dim, k)


def _factor(shape: Sequence[int], sequences: Sequences, kind: int, k: int, coefficient: float) -> float:
    """Return what the sum over rows is multiplied with. Operators work it out: graphs must not depend on the rows."""
    rows = row_count(shape)
    if rows == 0:
        return 0.0
    return coefficient / rows if kind == Z else coefficient * shape[-1] / (k * sequences.length * rows)


def _work(
    x: Meta, kind: int, sequence_dim: int, k: int, coefficient: float, device: int, backward: bool
) -> tuple[Any, int, tuple[float, ...]]:
    """Return the launch, its blocks and its numbers."""
    sequences = sequences_of(x.shape, sequence_dim)
    rows, experts, size = x.rows, x.shape[-1], x.dtype.itemsize
    vector, stride = _VECTOR * size, x.row_stride
    whole = [int(vector_bytes(x.misaligned, stride * size, experts * size, limit=vector) == vector)]
    if backward:
        whole.append(int(vector_bytes(experts * size, limit=vector) == vector))
    limit = _WARPS * _BLOCKS_PER_SM * device_info(device).sm_count
    if kind == Z and x.dtype == torch.float32 and experts <= _MAX_TOGETHER and all(whole):
        kernel, units = (_Z_BWD, rows) if backward else (_Z_FWD, -(-rows // _ROWS_TOGETHER))
        rounds = 1 if backward else -(-units // limit)
    else:
        kernel, units = _BWD if backward else _FWD, rows
        rounds = -(-rows // limit)
    grid = -(-units // (_WARPS * rounds))
    launch = kernel.bind((_VECTOR,), device, min(grid, GRID_LIMIT), 32 * _WARPS)
    factor = coefficient * _factor(x.shape, sequences, kind, k, 1.0)
    numbers = rows, experts, stride, sequences.inner, int(sequences.interleaved), KIND[x.dtype], *whole, kind, factor
    return launch, grid, numbers


def _plan_fwd(x: Meta, kind: int, sequence_dim: int, k: int, coefficient: float, device: int) -> Steps:
    launch, grid, numbers = _work(x, kind, sequence_dim, k, coefficient, device, False)
    step = Step(launch, "x", "counts", "partial", "loss", "ticket", *numbers)
    return Steps(step, scratch={"partial": Memory((grid,), torch.float32)}, zeros={"ticket": 1})


def _plan_bwd(x: Meta, kind: int, sequence_dim: int, k: int, coefficient: float, device: int) -> Steps:
    launch, _, numbers = _work(x, kind, sequence_dim, k, coefficient, device, True)
    return Steps(Step(launch, "g", "x", "counts", "dx", *numbers))


def _check_indices(indices: Meta, experts: int, sequence_dim: int) -> None:
    check_dtype("indices", indices.dtype)
    check_dimensions("indices", indices.shape)
    if not 1 <= experts <= MAX_EXPERTS:
        raise ArgumentError(f"experts is {experts}; expected 1 to {MAX_EXPERTS}")
    sequences_of(indices.shape, sequence_dim)


def _plan_counts(indices: Meta, experts: int, sequence_dim: int, device: int) -> Steps:
    number, length, inner, interleaved = sequences_of(indices.shape, sequence_dim)
    variant = ("i64" if indices.dtype == torch.int64 else "i32",)
    launch = _COUNTS.bind(variant, device, number, 1024 if device >= 0 else 64, 4 * experts)
    first_step, row_step = (1, inner) if interleaved else (length, 1)
    return Steps(Step(launch, "indices", "counts", length, indices.shape[-1], experts, first_step, row_step))


def _counts_outputs(indices, experts, sequence_dim):
    number = sequences_of(indices.shape, sequence_dim).number
    return (Memory(_counts_shape(number, experts, sequence_dim), torch.int32),)


def _counts_shape(sequences: int, experts: int, sequence_dim: int) -> tuple[int, ...]:
    return (experts,) if sequence_dim == -1 else (sequences, experts)


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _of_rows(counts: Tensor, sequences: Sequences) -> Tensor:
    """Return the counts each row is weighed with."""
    if counts.dim() == 1:
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
    sequences = sequences_of(x.shape, sequence_dim)
    v, factor = x.float().reshape(-1, x.shape[-1]), _factor(x.shape, sequences, kind, k, coefficient)
    if kind == Z:
        return torch.logsumexp(v, -1).square().sum() * factor
    s = v if kind == PLAIN else _plain_scores(v, kind)
    return (s * _of_rows(counts, sequences)).sum() * factor


def _reference_bwd(g, x, counts, kind, sequence_dim, k, coefficient):
    sequences = sequences_of(x.shape, sequence_dim)
    v = x.float().reshape(-1, x.shape[-1])
    scale = g.reshape(()) * _factor(x.shape, sequences, kind, k, coefficient)
    if kind == Z:
        dx = 2 * scale * torch.logsumexp(v, -1, keepdim=True) * torch.softmax(v, -1)
    else:
        weights = _of_rows(counts, sequences)
        if kind == PLAIN:
            dx = (scale * weights).expand_as(v)
        else:
            s = _plain_scores(v, kind)
            dx = scale * s * (weights - (s * weights).sum(-1, keepdim=True))
            if kind == SIGMOID:
                dx = dx * (1 - torch.sigmoid(v))
    return dx.reshape(x.shape).to(x.dtype).contiguous()


def reference_counts(indices, experts, sequence_dim):
    number, length, inner, interleaved = sequences_of(indices.shape, sequence_dim)
    rows = row_count(indices.shape)
    flat = indices.reshape(rows, indices.shape[-1]).long()
    place = torch.arange(rows, dtype=torch.int64, device=indices.device)
    sequence = torch.zeros_like(place) if inner == 0 else place % inner if interleaved else place // length
    valid = (flat >= 0) & (flat < experts)
    key = torch.where(valid, sequence[:, None] * experts + flat, number * experts).reshape(-1)
    counts = torch.zeros(number * experts + 1, dtype=torch.int32, device=indices.device)
    counts = counts.scatter_add(0, key, torch.ones_like(key, dtype=torch.int32))[:-1]
    return counts.view(_counts_shape(number, experts, sequence_dim)).clone()


# The loss of load balancing is divided by k and multiplied by the number of experts; Z does not use k.
_INPUTS = Rows("x", None), Dense("counts", None, optional=True)
_OPTIONS = "int kind, int sequence_dim, int k, float coefficient"
FORWARD = Operator(
    "router_loss_fwd", _INPUTS, options=_OPTIONS, results="loss", outputs=lambda: (Memory((), torch.float32),),
    plan=_plan_fwd, reference=_reference_fwd, check=_check,
)  # fmt: skip
BACKWARD = Operator(
    "router_loss_bwd", (Argument("g", None), *_INPUTS), options=_OPTIONS, results="dx",
    outputs=lambda x: (Memory.like(x),), plan=_plan_bwd, reference=_reference_bwd, check=_check_bwd,
)  # fmt: skip
COUNTS = Operator(
    "router_counts", (Dense("indices", None),), options="int experts, int sequence_dim", results="counts",
    outputs=_counts_outputs, plan=_plan_counts, reference=reference_counts, check=_check_indices,
)  # fmt: skip
KERNELS = (_FWD, _BWD, _Z_FWD, _Z_BWD, _COUNTS)
