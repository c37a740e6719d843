"""The k largest numbers of every row, and their backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from rtkernels import interop
from rtkernels.errors import ArgumentError
from rtkernels.ops.router.warp_rows import (
    COLUMNS,
    KIND,
    OCTET,
    WARP_COLUMNS,
    check_k,
    check_rows,
    lane_columns,
    takes_octets,
    whole_pieces,
)
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import allocator, dense_strides
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import GRID_LIMIT, check_same, metadata, row_count, row_stride, token, vector_bytes
from rtkernels.runtime.operator.autograd import needs_grad, once_differentiable
from rtkernels.runtime.operator.operator import TorchOp
from rtkernels.runtime.operator.registry import Op

MAX_COLUMNS = 32 * WARP_COLUMNS
_WARPS = 8
_UNIT = "router/topk.cu"
_ARGS = "x:ptr values:ptr indices:ptr rows:i64 cols:i64 x_stride:i64 k:i64 kind:i64 whole:i64 wide:i64"
_FEW_THREADS = 128
_FWD = Kernel(_UNIT, "topk_fwd", template="V", args=_ARGS, variants=[(v,) for v in COLUMNS], max_registers=64)
_FEW = Kernel(_UNIT, "topk_few", template="SIZE", args=_ARGS, variants=[(2,), (4,)], max_registers=64)
_FWD_WIDE = Kernel(_UNIT, "topk_fwd_wide", template="V", args=_ARGS, variants=[(COLUMNS[-1],)], max_registers=64)
_BWD = Kernel(
    _UNIT,
    "topk_bwd",
    template="SIZE",
    args="g:ptr indices:ptr dx:ptr rows:i64 cols:i64 k:i64 whole:i64 wide:i64",
    variants=[(2,), (4,)],
    max_registers=40,
)


class TopK(NamedTuple):
    """What ``topk`` returns.

    Attributes:
        values: ``[..., k]``, the largest numbers of each row, largest first.
        indices: ``[..., k]``, their columns.
    """

    values: Tensor
    indices: Tensor


# ---- launchers ------------------------------------------------------------------------------------------------------

_INDEX_DTYPES = (torch.int32, torch.int64)


def _check(x: tuple[Any, ...], k: int) -> None:
    check_rows("x", x, MAX_COLUMNS)
    check_k(k, x[1][-1])


def _plan_fwd(x, align: int, k: int, index_dtype: torch.dtype):
    """Return ``(launch, integers, allocator, layouts of both results)``; None if x must be copied first."""
    _check(x, k)
    dtype, shape, stride, device = x
    rows, cols = row_count(shape), shape[-1]
    out = (*shape[:-1], k)
    layouts = [(tuple(out), dense_strides(out), d) for d in (dtype, index_dtype)]
    memory = (allocator(device), *layouts)
    if rows == 0:
        return None, (), *memory
    step = row_stride(shape, stride)
    if step is None:
        return None
    v = lane_columns(cols)
    if cols > WARP_COLUMNS:
        warps = -(-cols // WARP_COLUMNS)
        launch = _FWD_WIDE.bind((v,), device, min(rows, GRID_LIMIT), 32 * warps, 8 * warps * k)
    elif takes_octets(x, align, k):
        grid = -(-rows * OCTET // _FEW_THREADS)
        launch = _FEW.bind((dtype.itemsize,), device, min(grid, GRID_LIMIT), _FEW_THREADS)
    else:
        launch = _FWD.bind((v,), device, min(-(-rows // _WARPS), GRID_LIMIT), 32 * _WARPS)
    whole = whole_pieces(x, align, v)
    return launch, (rows, cols, step, k, KIND[dtype], int(whole), int(index_dtype == torch.int64)), *memory


_FWD_PLANS = Plans(_plan_fwd)


def _launch_fwd(x: Tensor, k: int, wide: bool) -> tuple[Tensor, Tensor]:
    address = x.data_ptr()
    key = (x.dtype, x.shape, x.stride(), x.get_device()), address & 15, k, torch.int64 if wide else torch.int32
    plan = _FWD_PLANS[key]
    if plan is None:
        return _launch_fwd(x.contiguous(), k, wide)
    launch, args, allocate, values_layout, indices_layout = plan
    values, indices = allocate(*values_layout), allocate(*indices_layout)
    if launch is not None:
        launch(address, values.data_ptr(), indices.data_ptr(), *args)
    return values, indices


def _check_bwd(g: Tensor, indices: Tensor, cols: int) -> None:
    token("g", g.dtype)
    if indices.dtype not in _INDEX_DTYPES:
        raise ArgumentError(f"indices has dtype {str(indices.dtype)[6:]}; expected one of int32, int64")
    check_same("indices", indices.shape, g.shape, "shape", of="g")
    check_same("indices", indices.get_device(), g.get_device(), "device index", of="g")
    if not g.dim():
        raise ArgumentError("g has no dimensions; expected at least one")
    check_k(g.shape[-1], cols)


def _plan_bwd(dtype: torch.dtype, rows: int, cols: int, device: int, align: int):
    size = dtype.itemsize
    whole = vector_bytes(align, cols * size) == 16
    return _BWD.bind((size,), device, min(-(-rows // 8), GRID_LIMIT), 256), int(whole)


_BWD_PLANS = Plans(_plan_bwd)


def _launch_bwd(g: Tensor, indices: Tensor, cols: int) -> Tensor:
    _check_bwd(g, indices, cols)
    g, indices = g.contiguous(), indices.contiguous()
    dx = torch.empty((*g.shape[:-1], cols), dtype=g.dtype, device=g.device)
    rows = row_count(g.shape)
    if rows:
        out = dx.data_ptr()
        launch, whole = _BWD_PLANS[g.dtype, rows, cols, g.get_device(), out & 15]
        wide = int(indices.dtype == torch.int64)
        launch(g.data_ptr(), indices.data_ptr(), out, rows, cols, g.shape[-1], whole, wide)
    return dx


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def sort_key(x: Tensor) -> Tensor:
    """Return int64 numbers in the order of x: NaN above all, zeros equal."""
    wide = torch.where(x == 0, 0.0, x.float())
    bits = torch.where(wide.isnan(), torch.nan, wide).view(torch.int32).long()
    return torch.where(wide.isnan(), 1 << 40, torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits))


def largest(key: Tensor, k: int) -> Tensor:
    """Return the columns of the k largest keys of each row, equal ones in ascending order."""
    return torch.sort(key, dim=-1, descending=True, stable=True).indices[..., :k]


def _reference_fwd(x: Tensor, k: int, wide: bool) -> tuple[Tensor, Tensor]:
    _check(metadata(x), k)
    indices = largest(sort_key(x), k)
    return x.gather(-1, indices).contiguous(), indices.to(torch.int64 if wide else torch.int32).contiguous()


def _reference_bwd(g: Tensor, indices: Tensor, cols: int) -> Tensor:
    _check_bwd(g, indices, cols)
    return torch.zeros((*g.shape[:-1], cols), dtype=g.dtype, device=g.device).scatter_(-1, indices.long(), g)


def _fake_fwd(x, k, wide):
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64 if wide else torch.int32)


def _fake_bwd(g, indices, cols):
    return g.new_empty((*g.shape[:-1], cols))


FORWARD = TorchOp(
    "topk_fwd(Tensor x, int k, bool wide) -> (Tensor, Tensor)",
    launch=_launch_fwd,
    reference=_reference_fwd,
    fake=_fake_fwd,
)
BACKWARD = TorchOp(
    "topk_bwd(Tensor g, Tensor indices, int cols) -> Tensor",
    launch=_launch_bwd,
    reference=_reference_bwd,
    fake=_fake_bwd,
)
_forward = FORWARD.call


# ---- public ---------------------------------------------------------------------------------------------------------


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k, wide):
        ctx.set_materialize_grads(False)
        values, indices = FORWARD(x, k, wide)
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
        return BACKWARD(g, indices, ctx.cols), None, None


def topk(x: Tensor, k: int, *, index_dtype: torch.dtype = torch.int64) -> TopK:
    """Return the k largest numbers of each row (the last dimension) and where they are, largest first.

    Exact for every input: equal numbers come in the order of their columns, lowest first, always; NaN counts as larger
    than everything, as in torch; -0 and +0 are equal. Values keep their bits. Differentiable once in x: the gradient
    goes to the chosen columns, the others get 0.

    Args:
        x: bfloat16, float16 or float32, with 1 to 8192 columns; any leading dimensions and strides (a copy is made
            unless rows are unit-stride and evenly spaced). May be any object with ``__dlpack__``; the results are then
            of its kind.
        k: 1 to 64, at most the number of columns.
        index_dtype: ``torch.int64`` or ``torch.int32``.

    Returns:
        TopK: ``values`` of x's dtype and ``indices``, dense, of x's shape with k in place of the last dimension.
    """
    if not isinstance(x, Tensor):
        return TopK(*interop.call(topk, x, k, index_dtype=index_dtype))
    if index_dtype is not torch.int64 and index_dtype is not torch.int32:
        raise ArgumentError(f"index_dtype is {index_dtype}; expected torch.int32 or torch.int64")
    wide = index_dtype is torch.int64
    if is_grad_enabled() and needs_grad(x):
        return TopK(*_TopK.apply(x, k, wide))
    return TopK(*_forward(x, k, wide))


OP = Op(
    "topk",
    public=("topk",),
    kernels=(_FWD, _FEW, _FWD_WIDE, _BWD),
    torch_ops=(FORWARD, BACKWARD),
)
