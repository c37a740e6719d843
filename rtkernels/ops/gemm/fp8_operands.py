"""fp8 operands of a product and of its two gradients: codes by rows and transposed, from one read where a kernel can.

8-bit tensor cores take both operands with the summed dimension unit-stride, so a matrix that is summed over its columns
in one product and over its rows in another is needed both ways: ``y = x w^T`` and ``dx = dy w`` take x, w, dy by rows
and w transposed, ``dw = dy^T x`` takes dy and x transposed. Pitches are multiples of 16 bytes, as TMA
demands: matrices of other sizes are copied with zeros at their ends, which add nothing to a sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.layout.transpose import TRANSPOSE
from rtkernels.ops.quant import hadamard, quantize_fp8
from rtkernels.ops.quant.quantize_fp8_channel import CHANNEL
from rtkernels.ops.quant.quantize_fp8_plan import FP8_DTYPES, groups_of
from rtkernels.runtime.layout import nothing, token
from rtkernels.runtime.operator.declared import Argument, Operator
from rtkernels.runtime.operator.plan import Memory, Steps
from rtkernels.runtime.operator.registry import Op

KINDS = ("group", "block", "row", "tensor", "hadamard")
PITCH = 16  # bytes, so codes, that a pitch is a multiple of
SIDE = 128  # of a block that shares a scale


def rounded(size: int, multiple: int) -> int:
    """Return the next multiple, at least one: a product over no rows at all sums zeros."""
    return (max(size, 1) + multiple - 1) // multiple * multiple


def _sizes(shape: tuple[int, ...], kind: str) -> tuple[int, int, int]:
    """Return matrices, rows and columns with what is added to them."""
    count = shape[0] if len(shape) == 3 else 1
    cols = rounded(shape[-1], PITCH)
    if kind in ("row", "hadamard"):  # their transposed codes are padded by themselves
        return 1, shape[-2], cols
    return count, rounded(shape[-2], SIDE if len(shape) == 3 else PITCH), cols


def _check(x: Any, kind: str, dtype: torch.dtype) -> None:
    token("x", x.dtype)
    token("the result", dtype, FP8_DTYPES)
    if kind not in KINDS:
        raise ArgumentError(f"kind is {kind!r}; expected one of {', '.join(map(repr, KINDS))}")
    if len(x.shape) != 2 and (len(x.shape) != 3 or kind != "block"):
        raise ArgumentError(f"x has shape {tuple(x.shape)}; expected a matrix, or three dimensions of kind 'block'")


def _quantized(
    x: Tensor, kind: str, dtype: torch.dtype, pow2_scale: bool, by_rows: bool, transposed: bool, rotation: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        return zeros_of(x, _outputs(x, kind, dtype, pow2_scale, by_rows, transposed, rotation))
    if kind in ("group", "block") and by_rows and transposed and x.dim() == 2 and not any(n % PITCH for n in x.shape):
        layout = "column" if kind == "group" else "row"  # nearly always, and without a step that can be left out
        q, scale, q_t, scale_t = quantize_fp8.BOTH(x, kind, dtype, pow2_scale, layout)
        return q, scale, q_t, scale_t.view(-1)
    if kind == "hadamard":
        codes = hadamard.QUANTIZE(x, rotation, dtype, pow2_scale) if by_rows else _none(x)
        if not transposed:
            return *codes, *_none(x)
        return *codes, *hadamard.QUANTIZE(TRANSPOSE(x, 0, 1, rotation), rotation, dtype, pow2_scale)
    given, (count, rows, cols) = x.shape[-2], _sizes(x.shape, kind)
    kept = count * rows if x.dim() == 3 else given  # of the codes by rows
    if (rows, cols) != x.shape[-2:]:
        x = F.pad(x, (0, cols - x.shape[-1], 0, rows - given))
    x = x.reshape(count * rows, cols)
    if kind == "row":
        codes = quantize_fp8.QUANTIZE(x, "row", dtype, pow2_scale, "row") if by_rows else _none(x)
        return *codes, *(CHANNEL(x, None, None, dtype, pow2_scale, PITCH) if transposed else _none(x))
    if kind == "tensor":
        q, scale = quantize_fp8.QUANTIZE(x, "tensor", dtype, pow2_scale, "row")
        q_t = TRANSPOSE(q, 0, 1, 1) if transposed else nothing(x)
        return q[:kept] if by_rows else nothing(x), scale, q_t, nothing(x)
    if kind == "group" and transposed and not by_rows:
        q_t, scale_t = quantize_fp8.QUANTIZE(x, "group_t", dtype, pow2_scale, "row")
        return *_none(x), q_t, scale_t.view(-1)
    layout, q_t, scale_t = "column" if kind == "group" else "row", *_none(x)
    if transposed:
        q, scale, q_t, scale_t = quantize_fp8.BOTH(x, kind, dtype, pow2_scale, layout)
    else:
        q, scale = quantize_fp8.QUANTIZE(x, kind, dtype, pow2_scale, layout)
    if kind == "group":
        return q[:kept], scale, q_t, scale_t.view(-1)
    return q[:kept] if by_rows else nothing(x), scale, q_t, scale_t


def zeros_of(x: Tensor, results: Iterable[Memory | None]) -> tuple[Tensor, ...]:
    """Return the results of an operator on a matrix without elements."""
    return tuple(
        [
            nothing(x) if r is None else torch.zeros(r.shape, dtype=torch.float32, device=x.device).to(r.dtype)
            for r in results
        ]
    )


def _none(x: Tensor) -> tuple[Tensor, Tensor]:
    return nothing(x), nothing(x)


def _outputs(
    x: Any, kind: str, dtype: torch.dtype, pow2_scale: bool, by_rows: bool, transposed: bool, rotation: int
) -> tuple[Memory | None, Memory | None, Memory | None, Memory | None]:
    given, (count, rows, cols) = x.shape[-2], _sizes(x.shape, kind)
    kept, flat = count * rows if len(x.shape) == 3 else given, count * rows
    if kind == "group":
        scale = (groups_of(cols), rows) if by_rows else (0,)
    elif kind == "block":
        scale = (groups_of(flat), groups_of(cols))
    elif kind == "tensor":
        scale = ()
    else:
        scale = (given if by_rows else 0,)
    depth = rounded(rows, {"row": PITCH, "hadamard": rotation}.get(kind, 1)) if len(x.shape) == 2 else flat
    of_columns = {"group": groups_of(rows) * cols, "row": cols, "hadamard": cols}.get(kind, 0)
    return (
        Memory((kept, cols), dtype) if by_rows else None,
        Memory(scale, torch.float32),
        Memory((cols, depth), dtype) if transposed else None,
        Memory((of_columns,), torch.float32) if transposed else None,
    )


# Sizes with a mark are rounded up to 16. q [rows, k']; scale, of kind "group" [k/128, rows'], of "block"
# [rows/128, k/128], of others [rows] or []; q_t [k', rows']; scale_t, flat, of "group" [rows/128, k'], of others [k'].
# Other operators do the work: a plan has no launches of its own.
OPERAND = Operator(
    "fp8_operand", (Argument("x", None),),
    options="str kind, ScalarType dtype, bool pow2_scale, bool by_rows, bool transposed, int rotation",
    results="q scale q_t scale_t", outputs=_outputs, check=_check, plan=lambda: Steps(instead=_quantized),
    reference=_quantized, plans_empty=True,
)  # fmt: skip


class Codes(NamedTuple):
    """One side of an operand, as ``scaled_mm`` takes it: codes ``[rows, depth]`` and their scales."""

    q: Tensor
    scale: Tensor


def rows_of(q: Tensor, scale: Tensor, kind: str) -> Codes:
    """Return the codes by rows of a matrix from the results of ``OPERAND``."""
    if kind != "group":
        return Codes(q, scale)
    # The rows that q has, without a comparison, which would tie a graph to some numbers of rows.
    along, down = scale.stride()
    return Codes(q, scale.as_strided((q.shape[0], scale.shape[0]), (down, along)))


def columns_of(q_t: Tensor, scale: Tensor, scale_t: Tensor, kind: str, columns: int) -> Codes:
    """Return the transposed codes of a matrix with `columns` columns from the results of ``OPERAND``."""
    if kind == "group":
        return Codes(q_t[:columns], scale_t.view(-1, q_t.shape[0]).t()[:columns])
    if kind == "block":
        return Codes(q_t[:columns], scale.t())
    return Codes(q_t[:columns], scale if kind == "tensor" else scale_t[:columns])


def expert_rows_of(q: Tensor, scale: Tensor, shape: tuple[int, ...]) -> Codes:
    """Return the codes of weights ``[experts, n, k]`` by rows: ``[experts, n, k']`` and ``[experts, n/128, k/128]``."""
    count, rows, cols = _sizes(shape, "block")
    return Codes(q.view(count, rows, cols)[:, : shape[1]], scale.view(count, rows // SIDE, groups_of(cols)))


def expert_columns_of(q_t: Tensor, scale: Tensor, shape: tuple[int, ...]) -> Codes:
    """Return those of the transposed weights: ``[experts, k, n']``, each expert a stretch of the columns of q_t."""
    count, rows, cols = _sizes(shape, "block")
    q = q_t.view(cols, count, rows).transpose(0, 1)[:, : shape[2], : rounded(shape[1], PITCH)]
    return Codes(q, scale.view(count, rows // SIDE, groups_of(cols)).transpose(1, 2))


OP = Op("fp8_operands", public=(), kernels=(), torch_ops=(OPERAND,))
