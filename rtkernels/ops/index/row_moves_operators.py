"""The operators that move whole rows: launchers, and the same in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.index import row_moves_plan as plans
from rtkernels.ops.index.embedding import sum_rows
from rtkernels.ops.index.row_moves_plan import CHUNK_PLANS, LIMIT, SELECT_PLANS
from rtkernels.runtime.layout import address, check_same, may_overlap, metadata, nothing, row_stride, token
from rtkernels.runtime.operator.operator import MutatingOp, TorchOp

# ---- select: launchers and the same in plain torch ------------------------------------------------------------------


def _select(
    x: Tensor, indices: Tensor, scale: Tensor | None, out: Tensor | None, after_chunks: bool
) -> tuple[Tensor, Tensor]:
    if x.dtype.is_complex:
        x = x.resolve_conj()
    source, target = x.data_ptr(), address(out)
    plan = SELECT_PLANS[
        metadata(x), metadata(indices), metadata(scale), metadata(out), (source | target) & 15, after_chunks
    ]
    if plan is None:
        dense = None if scale is None else scale.contiguous()
        return _select(x.contiguous(), indices.contiguous(), dense, out, False)
    launch, integers, memory, scale_memory = plan
    y = memory[0](*memory[1]) if out is None else out
    moved = nothing(x) if scale is None else scale_memory[0](*scale_memory[1])
    if launch is not None:
        scales = (0, 0) if scale is None else (scale.data_ptr(), moved.data_ptr())
        launch(indices.data_ptr(), source, y.data_ptr(), *scales, *integers)
    return y, moved


def _launch_select(x: Tensor, indices: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    return _select(x, indices, scale, None, False)


def _launch_select_into(out: Tensor, x: Tensor, indices: Tensor, scale: Tensor | None) -> Tensor:
    moved = _select(x.clone() if may_overlap(x, out) else x, indices, scale, out, False)[1]
    _count_version(out)
    return moved


def _reference_select(x: Tensor, indices: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    plans.check_select(metadata(x), metadata(indices), metadata(scale))
    return plans.select(x, indices), nothing(x) if scale is None else plans.select(scale, indices)


def _reference_select_into(out: Tensor, x: Tensor, indices: Tensor, scale: Tensor | None) -> Tensor:
    plans.check_select(metadata(x), metadata(indices), metadata(scale))
    plans.check_out(metadata(out), metadata(x), indices.shape[0])
    y, moved = _reference_select(x, indices, scale)
    out.copy_(y)
    return moved


def _fake_select(x, indices, scale):
    count = indices.shape[0]
    moved = nothing(x) if scale is None else scale.new_empty((count, *scale.shape[1:]))
    return x.new_empty((count, x.shape[1])), moved


def _fake_select_into(out, x, indices, scale):
    return nothing(x) if scale is None else scale.new_empty((indices.shape[0], *scale.shape[1:]))


def _count_version(t: Tensor) -> None:
    """Tell autograd that a tensor was overwritten."""
    if not t.is_inference():
        torch.autograd.graph.increment_version(t)


# ---- scatter --------------------------------------------------------------------------------------------------------


def _check_scatter(x: Tensor, indices: Tensor, rows: int, weights: Tensor | None) -> None:
    token("x", x.dtype)
    if x.dim() != 2:
        raise ArgumentError(f"x has {x.dim()} dimensions; expected 2, [rows, columns]")
    plans.check_indices("indices", metadata(indices), x.get_device())
    if indices.shape[0] != x.shape[0]:
        raise ArgumentError(
            f"indices has shape {tuple(indices.shape)}; expected {(x.shape[0],)}, one for each row of x"
        )
    if not 0 <= rows <= LIMIT or x.shape[0] > LIMIT:
        raise ArgumentError(f"rows is {rows} and x has {x.shape[0]} rows; expected 0 to 2^31 - 1 of either")
    if weights is not None:
        token("weights", weights.dtype)
        if weights.shape != indices.shape or weights.get_device() != x.get_device():
            raise ArgumentError(
                f"weights has shape {tuple(weights.shape)} on device index {weights.get_device()}; expected "
                f"{tuple(indices.shape)} on {x.get_device()}, one for each row of x"
            )


def _check_scatter_into(out: Tensor, x: Tensor, indices: Tensor, weights: Tensor | None) -> None:
    _check_scatter(x, indices, out.shape[0] if out.dim() else 0, weights)
    token("out", out.dtype)
    if out.dim() != 2 or out.shape[1] != x.shape[1] or out.get_device() != x.get_device():
        raise ArgumentError(
            f"out has shape {tuple(out.shape)} on device index {out.get_device()}; expected (rows, {x.shape[1]}) on "
            f"{x.get_device()}"
        )
    step = row_stride(out.shape, out.stride())
    if step is None or (out.shape[0] > 1 and step < out.shape[1]):
        raise ArgumentError(f"out has strides {out.stride()}; expected unit-stride rows that do not overlap")


def _dense_weights(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.float().contiguous()


def _launch_scatter(x: Tensor, indices: Tensor, rows: int, weights: Tensor | None) -> Tensor:
    _check_scatter(x, indices, rows, weights)
    if x.numel() == 0 or rows == 0:
        return torch.zeros((rows, x.shape[1]), dtype=x.dtype, device=x.device)
    out = torch.empty((rows, x.shape[1]), dtype=x.dtype, device=x.device)
    sum_rows(out, x, indices, 0, -1, False, _dense_weights(weights))
    return out


def _launch_scatter_into(out: Tensor, x: Tensor, indices: Tensor, weights: Tensor | None, accumulate: bool) -> None:
    _check_scatter_into(out, x, indices, weights)
    x = x.clone() if may_overlap(x, out) else x
    if not accumulate and (x.numel() == 0 or not out.is_contiguous()):
        out.zero_()
        accumulate = True
    if x.numel() and out.numel():
        sum_rows(out, x, indices, 0, -1, accumulate, _dense_weights(weights))
    _count_version(out)


def _sums(x: Tensor, indices: Tensor, rows: int, weights: Tensor | None) -> Tensor:
    wide = x.float() if weights is None else x.float() * weights.float()[:, None]
    local = indices.long()
    local = torch.where((local >= 0) & (local < rows), local, rows)
    return torch.zeros((rows + 1, x.shape[1]), device=x.device).index_add_(0, local, wide)[:rows]


def _reference_scatter(x: Tensor, indices: Tensor, rows: int, weights: Tensor | None) -> Tensor:
    _check_scatter(x, indices, rows, weights)
    return _sums(x, indices, rows, weights).to(x.dtype)


def _reference_scatter_into(out: Tensor, x: Tensor, indices: Tensor, weights: Tensor | None, accumulate: bool) -> None:
    _check_scatter_into(out, x, indices, weights)
    sums = _sums(x, indices, out.shape[0], weights)
    out.copy_(out.float() + sums if accumulate else sums)


def _fake_scatter(x, indices, rows, weights):
    return x.new_empty((rows, x.shape[1]))


def _fake_scatter_into(out, x, indices, weights, accumulate):
    return None


# ---- chunks ---------------------------------------------------------------------------------------------------------


def _chunk_rows(counts: Tensor, order: Tensor, x: Tensor, inverse: bool) -> Tensor:
    rows = x.shape[0]
    x_bytes = ((rows - 1) * x.stride(0) + x.shape[1]) * x.element_size() if x.numel() else 0
    launch, integers, asked, memory = CHUNK_PLANS[metadata(counts), metadata(order), rows, x_bytes]
    if launch is None:
        return plans.chunk_rows(counts, order, rows, inverse)
    source = memory[0](*memory[1])
    launch(counts.data_ptr(), order.data_ptr(), source.data_ptr(), *integers, int(inverse), x.data_ptr(), *asked)
    return source


def _launch_chunks(
    x: Tensor, counts: Tensor, order: Tensor, scale: Tensor | None, inverse: bool
) -> tuple[Tensor, Tensor]:
    _check_rows(x, scale)
    check_same("counts", counts.get_device(), x.get_device(), "device index")
    x = x if row_stride(x.shape, x.stride()) is not None else x.contiguous()
    scale = None if scale is None else scale.contiguous()
    source = _chunk_rows(counts.contiguous(), order.contiguous(), x, inverse)
    return _select(x, source, scale, None, True)


def _reference_chunks(
    x: Tensor, counts: Tensor, order: Tensor, scale: Tensor | None, inverse: bool
) -> tuple[Tensor, Tensor]:
    _check_rows(x, scale)
    plans.check_chunks(metadata(counts), metadata(order), x.shape[0])
    return _reference_select(x, plans.chunk_rows(counts, order, x.shape[0], inverse), scale)


def _check_rows(x: Tensor, scale: Tensor | None) -> None:
    anything = (torch.int32, torch.Size((0,)), (1,), x.get_device())
    plans.check_select(metadata(x), anything, metadata(scale))


def _fake_chunks(x, counts, order, scale, inverse):
    return x.new_empty(x.shape), nothing(x) if scale is None else scale.new_empty(scale.shape)


SELECT = TorchOp(
    "index_select_fwd(Tensor x, Tensor indices, Tensor? scale) -> (Tensor, Tensor)",
    launch=_launch_select,
    reference=_reference_select,
    fake=_fake_select,
)
SELECT_INTO = MutatingOp(
    "index_select_into(Tensor(a!) out, Tensor x, Tensor indices, Tensor? scale) -> Tensor",
    launch=_launch_select_into,
    reference=_reference_select_into,
    fake=_fake_select_into,
)
SCATTER = TorchOp(
    "scatter_add_fwd(Tensor x, Tensor indices, SymInt rows, Tensor? weights) -> Tensor",
    launch=_launch_scatter,
    reference=_reference_scatter,
    fake=_fake_scatter,
)
SCATTER_INTO = MutatingOp(
    "scatter_add_into(Tensor(a!) out, Tensor x, Tensor indices, Tensor? weights, bool accumulate) -> ()",
    launch=_launch_scatter_into,
    reference=_reference_scatter_into,
    fake=_fake_scatter_into,
)
CHUNKS = TorchOp(
    "sort_chunks_fwd(Tensor x, Tensor counts, Tensor order, Tensor? scale, bool inverse) -> (Tensor, Tensor)",
    launch=_launch_chunks,
    reference=_reference_chunks,
    fake=_fake_chunks,
)
