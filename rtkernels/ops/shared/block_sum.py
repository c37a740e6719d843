"""Sums over rows for gradients of biases and norms, added in blocks of rows to what earlier calls summed. Not public.

Calls over parts of a batch leave the bits of one call over the whole, if it is cut at multiples of ``BLOCK_ROWS`` rows
(level 3 of ``batch_invariant``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.checks import check_same
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import TYPES, WIDTH, vector_bytes
from rtkernels.runtime.operator.declared import InPlaceExact, Meta, Operator, Rows, misaligned
from rtkernels.runtime.operator.main_grad import Start
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

BLOCK_ROWS = 128
_UNIT = "shared/block_sum.cu"
_THREADS, _WARPS, _ADD_THREADS, _MAX_GRID = 256, 8, 128, 65535
_STATISTICS = Kernel(
    _UNIT, "row_statistics", template="T", max_registers=48,
    args="x:ptr mean:ptr rstd:ptr rows:i64 cols:i64 x_stride:i64 eps:f64", variants=TYPES,
)  # fmt: skip
_SUM = Kernel(
    _UNIT, "block_sum", template="T VEC", max_registers=128,
    args="dy:ptr x:ptr mean:ptr rstd:ptr partial:ptr rows:i64 cols:i64 dy_stride:i64 x_stride:i64 block_rows:i64",
    variants=[(t, vec) for t, width in WIDTH.items() for vec in (width, 1)],
)  # fmt: skip
_ADD = Kernel(
    _UNIT, "block_sum_add", template="THREADS", max_registers=48,
    args="partial:ptr total:ptr blocks:i64 cols:i64", variants=[(_ADD_THREADS,)],
)  # fmt: skip


def _check(total: Meta, dy: Meta, x: Meta | None, block_rows: int) -> None:
    check_same("total", tuple(total.shape), tuple(dy.shape[-1:]), "shape", of="a row of dy")
    check_same("total", total.device, dy.device, "device index", of="dy")
    if x is not None:
        check_same("x", x.dtype, dy.dtype, "dtype", of="dy")
        check_same("x", tuple(x.shape), tuple(dy.shape), "shape", of="dy")
        check_same("x", x.device, dy.device, "device index", of="dy")
    if block_rows < 1:
        raise ArgumentError(f"block_rows is {block_rows}; expected 1 or more")


def _plan(
    total: Meta, dy: Meta, x: Meta | None, eps: float, centred: bool, block_rows: int, device: int
) -> Steps:  # fmt: skip
    rows, cols, size = dy.rows, dy.shape[-1], dy.dtype.itemsize
    strides = dy.row_stride, 0 if x is None else x.row_stride
    vec = WIDTH[dy.token] if vector_bytes(misaligned(dy, x), cols * size, *(s * size for s in strides)) == 16 else 1
    blocks = -(-rows // block_rows)
    steps, scratch = [], {"partial": Memory((blocks, cols), torch.float32)}
    mean = "mean" if centred and x is not None else 0
    if x is not None:
        scratch["rstd"] = Memory((rows,), torch.float32)
        if centred:
            scratch["mean"] = Memory((rows,), torch.float32)
        launch = _STATISTICS.bind((dy.token,), device, -(-rows // _WARPS), _THREADS)
        steps.append(Step(launch, "x", mean, "rstd", rows, cols, strides[1], eps))
    launch = _SUM.bind((dy.token, vec), device, (-(-cols // (32 * vec)), min(blocks, _MAX_GRID)), _THREADS)
    tensors = "dy", "x" if x is not None else 0, mean, "rstd" if x is not None else 0, "partial"
    steps.append(Step(launch, *tensors, rows, cols, *strides, block_rows))
    launch = _ADD.bind((_ADD_THREADS,), device, -(-cols // _ADD_THREADS), _ADD_THREADS)
    return Steps(*steps, Step(launch, "partial", "total", blocks, cols), scratch=scratch)


def _reference(total: Tensor, dy: Tensor, x: Tensor | None, eps: float, centred: bool, block_rows: int) -> None:
    terms = dy.float()
    if x is not None:
        h = x.float()
        h = h - h.mean(-1, keepdim=True) if centred else h
        terms = terms * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    for block in terms.flatten(0, -2).split(block_rows):
        total += block.sum(0)


BLOCK_SUM = Operator(
    "block_sum_", (InPlaceExact("total", (torch.float32,)), Rows("dy"), Rows("x", optional=True)),
    options="float eps, bool centred, int block_rows", results="", plan=_plan, reference=_reference, check=_check,
)  # fmt: skip


def add_rows_(
    total: Tensor, dy: Tensor, x: Tensor | None = None, eps: float = 0.0, *, centred: bool = False,
    block_rows: int = BLOCK_ROWS,
) -> None:  # fmt: skip
    """Add the rows of `dy`, or of dy times the normalised rows of `x`, to `total` (fp32 ``[cols]``, contiguous)."""
    BLOCK_SUM(total, dy, x, eps, centred, block_rows)


def weight_gradient(
    start: Start | None, weight: Tensor, dy: Tensor, x: Tensor | None = None, eps: float = 0.0, *,
    centred: bool = False, block_rows: int = BLOCK_ROWS,
) -> Tensor | None:  # fmt: skip
    """Return the gradient of a weight of a norm, or of a bias; or add it to `start`, and return what autograd gets."""
    total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if start is None else start.total
    add_rows_(total, dy, x, eps, centred=centred, block_rows=block_rows)
    return total.to(weight.dtype) if start is None else start.added()


OP = Op("block_sum", public=(), kernels=(_STATISTICS, _SUM, _ADD), torch_ops=(BLOCK_SUM,))
