"""Running sums, maxima and minima along one dimension, in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.shared.strided import FLOATS, TOKEN, Dims, merged
from rtkernels.runtime.invariance import choice_rows
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT
from rtkernels.runtime.operator.declared import Argument, Meta, Primitive
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_THREADS = 256
_BYTES = 32  # RTK_SCAN_BYTES of cuda_src/scan/scan.cu: what a thread reads of a tile
_SLICE = 4096  # elements of a slice, at least
_FLOAT_TOKENS = ("bf16", "fp16", "fp32")
_INT_TOKENS = ("i64", "i32", "u8")
_VARIANTS = [
    *((t, t, f"Running{s}<float>") for t in _FLOAT_TOKENS for s in ("Sum", "Maximum")),
    *((t, "i64", "RunningSum<rtk::i64>") for t in _INT_TOKENS),
    *((t, t, "RunningMaximum<rtk::i64>") for t in _INT_TOKENS),
]
_ROWS = Kernel(
    "scan/scan.cu", "scan_rows", template="T Out Scan", max_registers=80, tier="aten", variants=_VARIANTS,
    args="x:ptr y:ptr indices:ptr partial:ptr rows:i64 n:i64 x_row:i64 x_step:i64 slices:i64 per_slice:i64 "
    "threads_per_row:i64 aligned:i64 totals:i64 flip:i64",
)  # fmt: skip
_COLUMNS = Kernel(
    "scan/scan.cu", "scan_columns", template="T Out Scan", max_registers=96, tier="aten", variants=_VARIANTS,
    args="x:ptr y:ptr indices:ptr partial:ptr columns:i64 n:i64 inner:i64 x_row:i64 x_step:i64 x_inner:i64 slices:i64 "
    "per_slice:i64 totals:i64 flip:i64",
)  # fmt: skip


def _split(shape: tuple[int, ...], stride: tuple[int, ...], dim: int) -> tuple[Dims, Dims] | None:
    """Return the merged dimensions before and after `dim`, at most one each, or None."""
    listed = list(zip(shape, stride, strict=True))
    outer, inner = merged(listed[:dim]), merged(listed[dim + 1 :])
    if len(outer) > 1 or len(inner) > 1:
        return None
    return outer or [(1, 0)], inner or [(1, 0)]


def _plan(x: Meta, kind: str, dim: int, flip: bool, device: int) -> Steps:
    ((outer, x_row),), ((inner, x_inner),) = _split(x.shape, x.stride, dim)
    n, x_step = x.shape[dim], x.stride[dim]
    floating, size = x.dtype in FLOATS, x.dtype.itemsize
    token, sums = TOKEN[x.dtype], kind == "sum"
    out = token if floating or not sums else "i64"
    variant = token, out, f"Running{'Sum' if sums else 'Maximum'}<{'float' if floating else 'rtk::i64'}>"
    bytes_each = (4 if floating else 8) * (1 if sums else 2)
    wanted = 3 * device_info(device).sm_count
    columns = outer * inner
    if inner == 1:
        vector = 4 if size == 1 else (_BYTES if floating and sums else 16) // size
        aligned = x_step == 1 and n % vector == 0 and x_row % vector == 0 and x.misaligned % min(vector * size, 16) == 0
        vector = vector if aligned else 1
        threads = _THREADS if n > 32 * vector * 8 else 32
        slices = max(1, min(wanted // max(choice_rows(columns), 1), n // _SLICE, 512)) if threads == _THREADS else 1
        tile = threads * vector
        per_slice = -(-n // (slices * tile)) * tile
        slices = -(-n // per_slice)
        kernel, grid = _ROWS, -(-columns * slices // (_THREADS // threads))
        numbers = columns, n, x_row, x_step, slices, per_slice, threads, int(aligned)
    else:
        slices = max(1, min(wanted * _THREADS // choice_rows(columns), n // 64, 512))
        per_slice = -(-n // slices)
        slices = -(-n // per_slice)
        kernel, grid = _COLUMNS, -(-columns * slices // _THREADS)
        numbers = columns, n, inner, x_row, x_step, x_inner, slices, per_slice
    if grid > GRID_LIMIT:
        raise OverflowError("more blocks than a grid has")
    launch, indices = kernel.bind(variant, device, grid, _THREADS), 0 if sums else "indices"
    if slices == 1:
        return Steps(Step(launch, "x", "y", indices, 0, *numbers, 0, int(flip)))
    return Steps(
        Step(launch, "x", "y", indices, "partial", *numbers, 1, int(flip)),
        Step(launch, "x", "y", indices, "partial", *numbers, 0, int(flip)),
        scratch={"partial": Memory((columns * slices * bytes_each,), torch.uint8)},
    )


def _outputs(x: Meta, kind: str, dim: int, flip: bool) -> tuple[Memory, Memory | None]:
    if kind == "sum":
        return Memory(x.shape, x.dtype if x.dtype in FLOATS else torch.int64), None
    return Memory(x.shape, x.dtype), Memory(x.shape, torch.int64)


_SCAN = Primitive(
    "running", (Argument("x", None),), "kind, dim, flip", results="y indices", outputs=_outputs, plan=_plan
)


def running(x: Tensor, kind: str, dim: int, *, flip: bool = False) -> tuple[Tensor, Tensor]:
    """Scan one dimension.

    Args:
        x: bfloat16, float16, float32, int64, int32, uint8 or bool; not empty, at least one dimension. Copied if the
            dimensions before or after `dim` are not evenly spaced.
        kind: "sum", or "maximum": the largest so far, NaN above all, and the index of the last that equals it.
        dim: At least 0. Maxima: of less than 2^31 elements.
        flip: Minima instead.

    Returns:
        Dense: running values (sums of integers as int64), and their indices or a stand-in.
    """
    if _split(x.shape, x.stride(), dim) is None:
        x = x.contiguous()
    return _SCAN(x, kind, dim, flip)


OP = Op("running", public=(), kernels=(_ROWS, _COLUMNS), torch_ops=())
__all__ = ["OP", "running"]
