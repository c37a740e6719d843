"""The three products of the router on a device: operands made ready, kernels launched."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rtkernels.ops.quant.column_absmax import ABSMAX
from rtkernels.ops.router import router_gemm_kernels as kernels
from rtkernels.ops.router import router_gemm_tiles as tiles
from rtkernels.ops.router.router_gemm_kernels import (
    DEPTH,
    TILE,
    input_gradient_terms,
    packed_pairs,
    promote_blocks,
    term_pairs,
    terms,
    uses_wgmma,
)
from rtkernels.runtime.launch.tensor_map import matrix_map
from rtkernels.runtime.layout import DTYPE_TOKEN, address


class Operand(NamedTuple):
    """A matrix with rows a multiple of 16 bytes apart, or several terms of one, stacked."""

    tensor: Tensor
    token: str
    rows: int
    cols: int
    pitch: int
    count: int = 1
    scale: Tensor | None = None

    def map(self, box_rows: int, box_cols: int, promote: bool = True):
        """Return the tensor map of all terms."""
        rows = self.count * self.rows
        first = self.tensor.data_ptr()
        return matrix_map(first, self.token, rows, self.cols, self.pitch, box_rows, box_cols, promote=promote)

    @property
    def step(self) -> int:
        """Elements from term to term."""
        return self.rows * self.pitch


def aligned(t: Tensor) -> Operand:
    """Return a matrix as an operand, copied with zeros behind its rows if they do not fill 16-byte pieces."""
    (rows, cols), size, pitch = t.shape, t.element_size(), t.stride(0)
    piece = 16 // size
    if rows == 1:
        pitch = cols
    if cols % piece or pitch % piece or pitch < cols or t.stride(1) != 1 or t.data_ptr() % 16:
        pitch = -(-cols // piece) * piece
        wide = torch.zeros(rows, pitch, dtype=t.dtype, device=t.device)
        wide[:, :cols] = t
        t = wide
    return Operand(t, DTYPE_TOKEN[t.dtype], rows, cols, pitch)


def split(t: Tensor, into: str, count: int, largest: Tensor | None = None) -> Operand:
    """Return the terms of a matrix; for fp16 scaled by row, or by the largest magnitudes of the columns.

    One kernel, which the next one may overlap.
    """
    if t.stride(1) != 1 and t.shape[1] > 1:
        t = t.contiguous()
    (rows, cols), size, device = t.shape, t.element_size(), t.get_device()
    stride = t.stride(0) if rows > 1 else cols
    pitch = -(-cols // 8) * 8
    dtype = torch.bfloat16 if into == "bf16" else torch.float16
    out = torch.empty(count, rows, pitch, dtype=dtype, device=t.device)
    by_row = into == "fp16" and largest is None
    scale = torch.empty(rows, dtype=torch.float32, device=t.device) if by_row else None
    wide = cols % 8 == 0 and stride * size % 16 == 0 and t.data_ptr() % 16 == 0
    source = DTYPE_TOKEN[t.dtype]
    kernels.SPLIT_PLANS[device, source, into, rows, cols, by_row](
        t.data_ptr(), out.data_ptr(), address(scale), address(largest), rows, cols, stride, pitch, count, int(wide)
    )
    return Operand(out, into, rows, cols, pitch, count, scale)


def _add_up(partial: Tensor, out: Tensor, bias: Tensor | None, accumulate: bool = False) -> None:
    """Write (or add) the sum over the first dimension of `partial`, and bias, to dense `out`.

    Rows of `partial` past those of `out` are padding.
    """
    count, cols = out.numel(), out.shape[-1]
    splits, step = partial.shape[0], partial.stride(0)
    wide = count % 4 == 0 and step % 4 == 0 and out.data_ptr() % (4 * out.element_size()) == 0
    kernels.SUM_PLANS[out.get_device(), DTYPE_TOKEN[out.dtype], count](
        partial.data_ptr(), out.data_ptr(), address(bias), count, step, cols, splits, int(accumulate), int(wide)
    )


def _mma(
    a: Operand, b: Operand, across: tuple[bool, bool], out: Tensor, splits_allowed: bool, precision: int,
    bias: Tensor | None = None, scale: Tensor | None = None, by_row: bool = False,
) -> tuple[Tensor, int]:  # fmt: skip
    """Launch the mma.sync kernel; return where the results of how many splits are."""
    m, k = (a.cols, a.rows) if across[0] else (a.rows, a.cols)
    n = b.cols if across[1] else b.rows
    key = (out.get_device(), a.token, *across, m, n, k, splits_allowed)
    launch, splits, each = kernels.MMA_PLANS[key]
    if splits > 1:
        out, bias = torch.empty(splits, m, n, dtype=torch.float32, device=out.device), None
    pairs = term_pairs(a.count, b.count)
    kind = {"fp32": 0, "bf16": 1, "fp16": 2}[DTYPE_TOKEN[out.dtype]]
    launch(
        a.tensor.data_ptr(), b.tensor.data_ptr(), out.data_ptr(), address(bias), address(scale), m, n, k,
        a.pitch, b.pitch, a.step, b.step, packed_pairs(pairs), len(pairs), each,
        promote_blocks(precision) * len(pairs), kind, int(by_row),
    )  # fmt: skip
    return out, splits


def logits(x: Tensor, weight: Tensor, bias: Tensor | None, precision: int) -> Tensor:
    """Return ``x @ weight.T + bias`` in fp32, dense. x [rows, depth], weight [experts, depth], none of them empty."""
    wgmma = uses_wgmma(x.get_device())
    left = aligned(x)
    bias = None if bias is None else bias.float().contiguous()
    y = torch.empty(left.rows, weight.shape[0], dtype=torch.float32, device=x.device)
    same = weight.dtype == x.dtype
    count = terms(DTYPE_TOKEN[weight.dtype], left.token, precision)
    right = aligned(weight) if same else split(weight, left.token, count)
    if wgmma:
        _logits(left, right, bias, y, not same, precision)
        return y
    out, splits = _mma(left, right, (False, False), y, True, precision, bias, right.scale)
    if splits > 1:
        _add_up(out, y, bias)
    return y


def _logits(left: Operand, right: Operand, bias: Tensor | None, y: Tensor, after_split: bool, precision: int) -> None:
    rows, experts, depth = left.rows, right.rows, left.cols
    key = (y.get_device(), left.token, right.count, rows, experts, depth, after_split)
    launch, tile = kernels.FWD_PLANS[key]
    x_rows, weight_rows = tiles.box_rows(rows, tile.rows), tiles.box_rows(experts, tile.columns)
    promote = right.count > 1  # where x is most of what is read, more at a time is slower
    x_map = left.map(x_rows, DEPTH, promote)
    # The copy engine writes rows of multiples of 16 bytes.
    by_copy_engine = tile.splits == 1 and experts % 4 == 0
    out_map = Operand(y, "fp32", rows, experts, experts).map(64, 32) if by_copy_engine else x_map
    launch(
        x_map, right.map(weight_rows, DEPTH, promote), out_map, y.data_ptr(), address(bias), address(right.scale),
        rows, experts, depth, x_rows, weight_rows, right.count, tile.stages, tile.splits, promote_blocks(precision),
        int(by_copy_engine),
    )  # fmt: skip


def input_gradient(dy: Tensor, weight: Tensor, dtype: torch.dtype, precision: int) -> Tensor:
    """Return ``dy @ weight`` rounded to `dtype`, dense. dy fp32 [rows, experts], none of them empty."""
    device, wgmma = dy.get_device(), uses_wgmma(dy.get_device())
    dx = torch.empty(dy.shape[0], weight.shape[1], dtype=dtype, device=dy.device)
    count = input_gradient_terms(DTYPE_TOKEN[dtype], precision)
    raw = weight.dtype == torch.bfloat16
    left = aligned(dy) if wgmma else split(dy, "bf16", count)
    right = aligned(weight) if raw else split(weight, "bf16", count)
    if wgmma:
        rows, experts, depth = left.rows, left.cols, right.cols
        launch, parts, each = kernels.DX_PLANS[device, count, right.count, rows, depth, not raw]
        half = int(dtype == torch.float16)
        out = dx if depth % 8 == 0 else dx.new_empty(rows, -(-depth // 8) * 8)
        result = Operand(out, DTYPE_TOKEN[dtype], rows, depth, out.shape[1])
        maps = left.map(TILE, 32), right.map(DEPTH, DEPTH), result.map(64, 64)
        launch(*maps, experts, depth, parts, each, half)
        if out is not dx:
            dx.copy_(out[:, :depth])
    else:
        _mma(left, right, (False, True), dx, False, precision)
    return dx


def weight_gradient(
    dy: Tensor, x: Tensor, out: Tensor, precision: int, *, accumulate: bool = False, after_other: bool = False
) -> None:
    """Write (or add) ``dy.T @ x`` to dense `out`. dy fp32 [tokens, experts], x [tokens, depth], none of them empty.

    Args:
        dy: Incoming gradient.
        x: bf16 or fp16.
        out: [experts, depth], any of the three types; fp32 to accumulate.
        precision: One of the three.
        accumulate: Add.
        after_other: The previous kernel of the stream is one of these, and nothing here comes from it.
    """
    device, wgmma = x.get_device(), uses_wgmma(x.get_device())
    right = aligned(x)
    count = terms("fp32", right.token, precision)
    largest = ABSMAX.launch(dy, None, None) if right.token == "fp16" else None
    direct = out.dtype == torch.float32 and not accumulate
    if wgmma:
        left = aligned(dy)
        sizes = (left.rows, left.cols, right.cols)
        overlap = after_other and largest is None and left.tensor is dy and right.tensor is x
        key = (device, right.token, count, *sizes, overlap)
        plan = kernels.DW_PLANS[key]
        splits, tokens = plan.splits, plan.stage_tokens
        direct = direct and splits == 1
        partial = out if direct else torch.empty(splits, *out.shape, dtype=torch.float32, device=x.device)
        maps = left.map(tokens, 32), right.map(tokens, DEPTH)
        if plan.turns:
            plan.launch(*maps, partial.data_ptr(), *sizes, plan.each)
        else:
            scale, promote = address(largest), promote_blocks(precision)
            plan.launch(*maps, partial.data_ptr(), scale, *sizes, plan.each, promote)
    else:
        left = split(dy, right.token, count, largest)
        partial = out if direct else torch.empty(out.shape, dtype=torch.float32, device=x.device)
        partial, splits = _mma(left, right, (True, True), partial, True, precision, None, largest, True)
        direct = direct and splits == 1
    if not direct:
        _add_up(partial.view(splits, *out.shape), out, None, accumulate)
