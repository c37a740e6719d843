"""The three products of the router as steps: preparing operands, launching kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.ops.gemm import cluster_plan
from rtkernels.ops.gemm.product import Matrix, Product
from rtkernels.ops.quant.column_absmax import column_steps
from rtkernels.ops.router import router_gemm_kernels as kernels
from rtkernels.ops.router import router_gemm_tiles as tiles
from rtkernels.ops.router.router_gemm_kernels import DEPTH, TILE, promote_blocks, terms
from rtkernels.runtime.invariance import level, refuse_weight_gradient
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.layout import DTYPE_TOKEN, row_count
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.operator.plan import Boxes, Memory, Step, Steps, matrix_boxes

_SKINNY_ROWS, _SKINNY_DEPTH = 32, 8192  # up to which products of few rows are faster (H200)


class Operand(NamedTuple):
    """A matrix with rows a multiple of 16 bytes apart, or several terms of one, stacked."""

    name: str
    token: str
    rows: int
    cols: int
    pitch: int
    count: int = 1
    scale: str | int = 0

    def map(self, box_rows: int, box_cols: int, promote: bool = True) -> Boxes:
        """Return the tensor map of all terms."""
        rows = self.count * self.rows
        return matrix_boxes(self.name, self.token, rows, self.cols, self.pitch, box_rows, box_cols, promote=promote)

    @property
    def step(self) -> int:
        """Elements from term to term."""
        return self.rows * self.pitch


class _Work:
    """Steps of a call as they are put together, and what they need."""

    def __init__(self, device: int, precision: int) -> None:
        self.device, self.precision, self.wgmma = device, precision, kernels.uses_wgmma(device)
        self.steps: list[Step] = []
        self.scratch: dict[str, Memory] = {}
        self.converted: dict[str, Callable[[Tensor], Tensor]] = {}

    def finished(self) -> Steps:
        return Steps(*self.steps, scratch=self.scratch, converted=self.converted)

    def aligned(self, name: str, meta: Meta) -> Operand:
        """Return a tensor of rows as an operand, copied with zeros behind its rows if they do not fill vectors."""
        rows, cols, vector = meta.rows, meta.shape[-1], 16 // meta.dtype.itemsize
        pitch = cols if rows == 1 else meta.row_stride
        if cols % vector or pitch % vector or pitch < cols or meta.misaligned:
            pitch = -(-cols // vector) * vector
            self.converted[name] = partial(_padded, pitch=pitch)
        return Operand(name, meta.token, rows, cols, pitch)

    def split(self, name: str, meta: Meta, into: str, count: int, largest: str | int = 0) -> Operand:
        """Return the terms of a matrix; for fp16 scaled by row, or by the largest magnitudes of the columns.

        One kernel, which the next one may overlap.
        """
        rows, cols, size = meta.rows, meta.shape[-1], meta.dtype.itemsize
        stride, pitch = meta.row_stride if rows > 1 else cols, -(-cols // 8) * 8
        # The two gradients may want other terms of the same matrix.
        out, by_row = f"{name}_{into}_{count}_terms", into == "fp16" and not largest
        scale = f"{out}_scale"
        self.scratch[out] = Memory((count, rows, pitch), torch.bfloat16 if into == "bf16" else torch.float16)
        if by_row:
            self.scratch[scale] = Memory((rows,), torch.float32)
        aligned16 = cols % 8 == 0 and stride * size % 16 == 0 and not meta.misaligned
        launch = kernels.split_launch(self.device, meta.token, into, rows, cols, by_row)
        sizes = rows, cols, stride, pitch, count, int(aligned16)
        self.steps.append(Step(launch, name, out, scale if by_row else 0, largest, *sizes))
        return Operand(out, into, rows, cols, pitch, count, scale if by_row else 0)

    def add_up(
        self, source: str, out: str, out_dtype: torch.dtype, rows: int, cols: int, splits: int, *, bias: str | int = 0,
        accumulate: bool = False, aligned: bool = True,
    ) -> None:  # fmt: skip
        """Write (or add) the sum of `splits` matrices, and bias, to dense `out`."""
        count = rows * cols
        launch = kernels.sum_launch(self.device, DTYPE_TOKEN[out_dtype], count)
        numbers = count, count, cols, splits, int(accumulate), int(count % 4 == 0 and aligned)
        self.steps.append(Step(launch, source, out, bias, *numbers))

    def partial(self, splits: int, rows: int, cols: int) -> str:
        """Return the name of memory for the results of several splits."""
        self.scratch["partial"] = Memory((splits, rows, cols), torch.float32)
        return "partial"

    def mma(
        self, a: Operand, b: Operand, across: tuple[bool, bool], out: str, out_dtype: torch.dtype,
        splits_allowed: bool, bias: str | int = 0, scale: str | int = 0, by_row: bool = False,
    ) -> tuple[str, int]:  # fmt: skip
        """Launch the mma.sync kernel; return where the results of how many splits are."""
        m, k = (a.cols, a.rows) if across[0] else (a.rows, a.cols)
        n = b.cols if across[1] else b.rows
        launch, splits, each = kernels.mma_launch(self.device, a.token, *across, m, n, k, splits_allowed)
        if splits > 1:
            out, out_dtype, bias = self.partial(splits, m, n), torch.float32, 0
        pairs = kernels.term_pairs(a.count, b.count)
        kind = {"fp32": 0, "bf16": 1, "fp16": 2}[DTYPE_TOKEN[out_dtype]]
        numbers = (
            m, n, k, a.pitch, b.pitch, a.step, b.step, kernels.packed_pairs(pairs), len(pairs), each,
            promote_blocks(self.precision) * len(pairs), kind, int(by_row),
        )  # fmt: skip
        self.steps.append(Step(launch, a.name, b.name, out, bias, scale, *numbers))
        return out, splits


def _padded(t: Tensor, pitch: int) -> Tensor:
    """Return the rows of a tensor in dense memory with zeros behind each."""
    cols = t.shape[-1]
    padded = torch.zeros(row_count(t.shape), pitch, dtype=t.dtype, device=t.device)
    padded[:, :cols] = t.reshape(-1, cols)
    return padded


def _renamed(step: Step) -> Step:
    """Return a launch of a product with the names of the router's tensors."""
    names = {"a": "x", "b": "weight", "out": "y"}
    return Step(step.launch, *(names.get(x, x) if isinstance(x, str) else x for x in step.arguments))


def plan_fwd(x: Meta, weight: Meta, bias: Meta | None, precision: int, device: int) -> Steps:
    """Return ``x @ weight.T + bias`` in fp32."""
    work = _Work(device, precision)
    left, same = work.aligned("x", x), weight.dtype == x.dtype
    count = terms(weight.token, left.token, precision)
    right = work.aligned("weight", weight) if same else work.split("weight", weight, left.token, count)
    rows, experts, depth = left.rows, right.rows, left.cols
    if same and precision == kernels.FAST and rows <= _SKINNY_ROWS and depth <= _SKINNY_DEPTH and not level():
        product = Product(
            rows, experts, depth, *(Matrix(t.token, t.pitch) for t in (left, right)), Matrix("fp32", experts),
            bias=None if bias is None else bias.token,
        )  # fmt: skip
        if cluster_plan.unsupported(product, device_info(device).target) is None:
            work.steps += [_renamed(step) for step in cluster_plan.steps(product, device).steps]
            return work.finished()
    if not work.wgmma:
        out, splits = work.mma(left, right, (False, False), "y", torch.float32, not level(), "bias", right.scale)
        if splits > 1:
            work.add_up(out, "y", torch.float32, rows, experts, splits, bias="bias")
        return work.finished()
    launch, tile = kernels.forward_launch(device, left.token, right.count, rows, experts, depth, not same)
    x_rows, weight_rows = tiles.box_rows(rows, tile.rows), tiles.box_rows(experts, tile.columns)
    promote = right.count > 1  # where x is nearly all that is read, more at a time is slower
    x_map = left.map(x_rows, DEPTH, promote)
    # TMA writes rows whose size is a multiple of 16 bytes.
    by_copy_engine = tile.splits == 1 and experts % 4 == 0
    out_map = Operand("y", "fp32", rows, experts, experts).map(64, 32) if by_copy_engine else x_map
    sizes = rows, experts, depth, x_rows, weight_rows, right.count, tile.stages, tile.splits
    maps = x_map, right.map(weight_rows, DEPTH, promote), out_map
    numbers = promote_blocks(precision), int(by_copy_engine)
    work.steps.append(Step(launch, *maps, "y", "bias", right.scale, *sizes, *numbers))
    return work.finished()


def plan_bwd(
    padded: Callable[..., Any], dy: Meta, x: Meta, weight: Meta, precision: int, need_x: bool, need_weight: bool,
    device: int,
) -> Steps:  # fmt: skip
    """Return the steps of the gradients; `padded` serves rows of x that do not fill vectors."""
    work = _Work(device, precision)
    if need_x and work.wgmma and x.shape[-1] % 8:
        return Steps(instead=padded)
    if need_x:
        _input_gradient(work, dy, weight, x.dtype)
    if need_weight:
        _weight_gradient(work, dy, x, "dweight", weight.dtype, after_other=need_x)
    return work.finished()


def _input_gradient(work: _Work, dy: Meta, weight: Meta, dtype: torch.dtype) -> None:
    """Add what writes ``dy @ weight`` to dx, rounded to `dtype`. dy is dense fp32."""
    count, raw = kernels.input_gradient_terms(DTYPE_TOKEN[dtype], work.precision), weight.dtype == torch.bfloat16
    left = work.aligned("dy", dy) if work.wgmma else work.split("dy", dy, "bf16", count)
    right = work.aligned("weight", weight) if raw else work.split("weight", weight, "bf16", count)
    if not work.wgmma:
        work.mma(left, right, (False, True), "dx", dtype, False)
        return
    rows, experts, depth = left.rows, left.cols, right.cols
    launch, parts, each = kernels.input_gradient_launch(work.device, count, right.count, rows, depth, not raw)
    result = Operand("dx", DTYPE_TOKEN[dtype], rows, depth, depth)
    maps = left.map(TILE, 32), right.map(DEPTH, DEPTH), result.map(64, 64)
    work.steps.append(Step(launch, *maps, experts, depth, parts, each, int(dtype == torch.float16)))


def _weight_gradient(
    work: _Work, dy: Meta, x: Meta, out: str, out_dtype: torch.dtype, *, accumulate: bool = False,
    after_other: bool = False, aligned_out: bool = True,
) -> None:  # fmt: skip
    """Add what writes (or adds) ``dy.T @ x`` to dense `out`. dy is dense fp32; `out` is fp32 to accumulate.

    `after_other`: the previous kernel of the stream is one of these, and nothing here comes from it.
    """
    refuse_weight_gradient("the gradient of a router's weight")
    right = work.aligned("x", x)
    count, largest = terms("fp32", right.token, work.precision), 0
    left = work.aligned("dy", dy) if work.wgmma else None
    tokens, experts, depth = right.rows, dy.shape[-1], right.cols
    if right.token == "fp16":
        rows = dy._replace(shape=(tokens, experts), stride=(left.pitch if left else experts, 1), misaligned=0)
        steps, scratch = column_steps(rows, work.device, ("dy", 0, 0, "largest"), partial="largest_parts")
        work.steps += steps
        work.scratch |= scratch | {"largest": Memory((experts,), torch.float32)}
        largest = "largest"
    direct = out_dtype == torch.float32 and not accumulate
    if left is not None:
        overlap = after_other and not largest and not {"dy", "x"}.intersection(work.converted)
        plan = kernels.weight_gradient_launch(work.device, right.token, count, tokens, experts, depth, overlap)
        splits, direct = plan.splits, direct and plan.splits == 1
        source = out if direct else work.partial(splits, experts, depth)
        maps = left.map(plan.stage_tokens, 32), right.map(plan.stage_tokens, DEPTH)
        if plan.pingpong:
            work.steps.append(Step(plan.launch, *maps, source, tokens, experts, depth, plan.each))
        else:
            numbers = tokens, experts, depth, plan.each, promote_blocks(work.precision)
            work.steps.append(Step(plan.launch, *maps, source, largest, *numbers))
    else:
        left = work.split("dy", dy, right.token, count, largest)
        source = out if direct else work.partial(1, experts, depth)
        source, splits = work.mma(left, right, (True, True), source, torch.float32, True, 0, largest, True)
        direct = direct and splits == 1
    if not direct:
        options = {"accumulate": accumulate, "aligned": aligned_out}
        work.add_up(source, out, out_dtype, experts, depth, splits, **options)


def plan_into(main_grad: Meta, dy: Meta, x: Meta, precision: int, device: int) -> Steps:
    """Return what adds ``dy.T @ x`` to main_grad."""
    work = _Work(device, precision)
    options = {"accumulate": True, "aligned_out": main_grad.misaligned == 0}
    _weight_gradient(work, dy, x, "main_grad", torch.float32, **options)
    return work.finished()
