"""The k largest numbers of every row, and their backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.ops.router import warp_rows
from rtkernels.ops.router.warp_rows import COLUMNS, KIND, OCTET, WARP_COLUMNS, check_k, check_rows
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import check_dimensions, check_dtype, check_same, token
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT, vector_bytes
from rtkernels.runtime.operator.arguments import Among
from rtkernels.runtime.operator.autograd import applied, needs_grad, once_differentiable
from rtkernels.runtime.operator.declared import Dense, Meta, Operator, Rows
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

MAX_COLUMNS = 32 * WARP_COLUMNS
_WARPS = 8
_UNIT = "router/topk.cu"
_ARGS = "x:ptr values:ptr indices:ptr rows:i64 cols:i64 x_stride:i64 k:i64 kind:i64 whole:i64 indices_int64:i64"
_OCTET_THREADS = 128
_FWD = Kernel(_UNIT, "topk_fwd", template="V", args=_ARGS, variants=[(v,) for v in COLUMNS], max_registers=64)
_FWD_OCTETS = Kernel(_UNIT, "topk_fwd_octets", template="SIZE", args=_ARGS, variants=[(2,), (4,)], max_registers=64)
_FWD_BLOCK = Kernel(_UNIT, "topk_fwd_block", template="V", args=_ARGS, variants=[(COLUMNS[-1],)], max_registers=64)
_BWD = Kernel(
    _UNIT, "topk_bwd", template="SIZE", max_registers=40,
    args="g:ptr indices:ptr dx:ptr rows:i64 cols:i64 k:i64 whole:i64 indices_int64:i64", variants=[(2,), (4,)],
)  # fmt: skip


class TopK(NamedTuple):
    """What ``topk`` returns.

    Attributes:
        values: ``[..., k]``, the largest numbers of each row, largest first.
        indices: ``[..., k]``, their columns.
    """

    values: Tensor
    indices: Tensor


# ---- plans ----------------------------------------------------------------------------------------------------------


def _check(x: Meta, k: int) -> None:
    check_rows("x", x, MAX_COLUMNS)
    check_k(k, x.shape[-1])


def _plan_fwd(x: Meta, k: int, wide: bool, device: int) -> Steps:
    rows, cols, stride = x.rows, x.shape[-1], x.row_stride
    v = warp_rows.lane_columns(cols)
    if cols > WARP_COLUMNS:
        warps = -(-cols // WARP_COLUMNS)
        launch = _FWD_BLOCK.bind((v,), device, min(rows, GRID_LIMIT), 32 * warps, 8 * warps * k)
    elif warp_rows.takes_octets(x, k):
        grid = -(-rows * OCTET // _OCTET_THREADS)
        launch = _FWD_OCTETS.bind((x.dtype.itemsize,), device, min(grid, GRID_LIMIT), _OCTET_THREADS)
    else:
        launch = _FWD.bind((v,), device, min(-(-rows // _WARPS), GRID_LIMIT), 32 * _WARPS)
    numbers = rows, cols, stride, k, KIND[x.dtype], int(warp_rows.whole_vectors(x, v)), int(wide)
    return Steps(Step(launch, "x", "values", "indices", *numbers))


def _check_bwd(g: Meta, indices: Meta, cols: int) -> None:
    token("g", g.dtype)
    check_dtype("indices", indices.dtype)
    check_same("indices", indices.shape, g.shape, "shape", of="g")
    check_dimensions("g", g.shape)
    check_k(g.shape[-1], cols)


def _plan_bwd(g: Meta, indices: Meta, cols: int, device: int) -> Steps:
    rows, size = g.rows, g.dtype.itemsize
    launch = _BWD.bind((size,), device, min(-(-rows // 8), GRID_LIMIT), 256)
    numbers = rows, cols, g.shape[-1], int(vector_bytes(cols * size) == 16), int(indices.dtype == torch.int64)
    return Steps(Step(launch, "g", "indices", "dx", *numbers))


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def sort_key(x: Tensor) -> Tensor:
    """Return int64 numbers in the order of x: NaN above all, zeros equal."""
    v = torch.where(x == 0, 0.0, x.float())
    bits = torch.where(v.isnan(), torch.nan, v).view(torch.int32).long()
    return torch.where(v.isnan(), 1 << 40, torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits))


def largest(key: Tensor, k: int) -> Tensor:
    """Return the columns of the k largest keys of each row, equal ones in ascending order."""
    return torch.sort(key, dim=-1, descending=True, stable=True).indices[..., :k]


def _reference_fwd(x: Tensor, k: int, wide: bool) -> tuple[Tensor, Tensor]:
    indices = largest(sort_key(x), k)
    return x.gather(-1, indices).contiguous(), indices.to(torch.int64 if wide else torch.int32).contiguous()


def _reference_bwd(g: Tensor, indices: Tensor, cols: int) -> Tensor:
    return torch.zeros((*g.shape[:-1], cols), dtype=g.dtype, device=g.device).scatter_(-1, indices.long(), g)


def _outputs(x, k, wide):
    shape = (*x.shape[:-1], k)
    return Memory(shape, x.dtype), Memory(shape, torch.int64 if wide else torch.int32)


FORWARD = Operator(
    "topk_fwd", (Rows("x", None),), options="int k, bool wide", results="values indices", outputs=_outputs,
    plan=_plan_fwd, reference=_reference_fwd, check=_check,
)  # fmt: skip
BACKWARD = Operator(
    "topk_bwd", (Dense("g", None), Dense("indices", None)), options="int cols", results="dx",
    outputs=lambda g, cols: (Memory((*g.shape[:-1], cols), g.dtype),), plan=_plan_bwd, reference=_reference_bwd,
    check=_check_bwd,
)  # fmt: skip
_forward = FORWARD.call


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k, int64):
        ctx.set_materialize_grads(False)
        values, indices = _forward(x, k, int64)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        ctx.cols = x.shape[-1]
        return values, indices

    @staticmethod
    @once_differentiable
    def backward(ctx, g, _):
        if g is None:
            return None, None, None
        (indices,) = ctx.saved_tensors
        return BACKWARD.call(g, indices, ctx.cols), None, None


_differentiable = applied(_TopK)


@public(options={"index_dtype": Among((torch.int32, torch.int64), "torch.int32 or torch.int64")})
def topk(
    x: Tensor, k: int, *, index_dtype: torch.dtype = torch.int64, out: tuple[Tensor | None, ...] | None = None
) -> TopK:
    """Return the k largest numbers of each row (the last dimension) and their indices, largest first.

    Exact for every input: equal numbers are always in the order of their columns, lowest first; NaN is larger than
    everything, as in torch; -0 and +0 are equal. Values keep their bits. Differentiable once in x: the gradient goes to
    the selected columns; other columns get 0.

    Args:
        x: bfloat16, float16 or float32, with 1 to 8192 columns; any leading dimensions and strides (copied unless rows
            are unit-stride and evenly spaced). Any object with ``__dlpack__`` is accepted; results are then of the same
            kind.
        k: How many numbers, 1 to 64 and at most the number of columns.
        index_dtype: ``torch.int64`` or ``torch.int32``.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        TopK: ``values`` in x's dtype and ``indices``, contiguous, in x's shape with k as the last dimension.
    """
    int64 = index_dtype is torch.int64
    if is_grad_enabled() and needs_grad(x):
        return TopK(*_differentiable(x, k, int64))
    return TopK(*_forward(x, k, int64))


OP = Op("topk", public=("topk",), kernels=(_FWD, _FWD_OCTETS, _FWD_BLOCK, _BWD), torch_ops=(FORWARD, BACKWARD))
