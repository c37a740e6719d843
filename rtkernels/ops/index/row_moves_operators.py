"""The operators that move whole rows, and the same in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.ops.index import row_moves_plan as plans
from rtkernels.runtime.layout import may_overlap, nothing
from rtkernels.runtime.operator.declared import Dense, DenseFloat, InPlace, Operator, Rows
from rtkernels.runtime.operator.plan import Memory

_X, _INDICES = Rows("x", None), Dense("indices", None)
_SCALE, _WEIGHTS = Dense("scale", None, optional=True), DenseFloat("weights", None, optional=True)

# ---- select ---------------------------------------------------------------------------------------------------------


def _reference_select(x: Tensor, indices: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    return plans.select(x, indices), nothing(x) if scale is None else plans.select(scale, indices)


def _reference_select_into(out: Tensor, x: Tensor, indices: Tensor, scale: Tensor | None) -> Tensor:
    y, moved = _reference_select(x, indices, scale)
    out.copy_(y)
    return moved


def _moved(indices, scale):
    return None if scale is None else Memory((indices.shape[0], *scale.shape[1:]), torch.float32)


def _apart(out: Tensor, x: Tensor, *rest: Any) -> tuple[Any, ...]:
    return out, x.clone() if may_overlap(x, out) else x, *rest


SELECT = Operator(
    "index_select_fwd", (_X, _INDICES, _SCALE), results="y moved",
    outputs=lambda x, indices, scale: (Memory((indices.shape[0], x.shape[1]), x.dtype), _moved(indices, scale)),
    plan=plans.plan_select, reference=_reference_select, check=plans.check_select,
)  # fmt: skip
SELECT_INTO = Operator(
    "index_select_into", (InPlace("out", None), _X, _INDICES, _SCALE), results="moved",
    outputs=lambda out, x, indices, scale: (_moved(indices, scale),), plan=plans.plan_select_into,
    reference=_reference_select_into, check=plans.check_select_into, prepare=_apart,
)  # fmt: skip

# ---- scatter --------------------------------------------------------------------------------------------------------


def _sums(x: Tensor, indices: Tensor, rows: int, weights: Tensor | None) -> Tensor:
    values = x.float() if weights is None else x.float() * weights.float()[:, None]
    local = indices.long()
    local = torch.where((local >= 0) & (local < rows), local, rows)
    return torch.zeros((rows + 1, x.shape[1]), dtype=torch.float32, device=x.device).index_add_(0, local, values)[:rows]


def _reference_scatter(x: Tensor, indices: Tensor, rows: int, weights: Tensor | None) -> Tensor:
    return _sums(x, indices, rows, weights).to(x.dtype)


def _reference_scatter_into(out: Tensor, x: Tensor, indices: Tensor, weights: Tensor | None, accumulate: bool) -> None:
    sums = _sums(x, indices, out.shape[0], weights)
    out.copy_(out.float() + sums if accumulate else sums)


def _prepare_scatter(
    out: Tensor, x: Tensor, indices: Tensor, weights: Tensor | None, accumulate: bool
) -> tuple[Any, ...]:
    """Keep x apart from out, and clear an out that is not dense and aligned: kernels write 16 zero bytes at a time."""
    if not accumulate and (not out.is_contiguous() or out.data_ptr() & 15):
        SCATTER_INTO.check(*SCATTER_INTO.values(out, x, indices, weights, accumulate))
        x = x.clone() if may_overlap(x, out) else x
        out.zero_()
        accumulate = True
    return _apart(out, x, indices, weights, accumulate)


SCATTER = Operator(
    "scatter_add_fwd", (_X, _INDICES, "SymInt rows", _WEIGHTS), results="out",
    outputs=lambda x, indices, rows, weights: (Memory((rows, x.shape[1]), x.dtype),),
    plan=plans.plan_scatter, reference=_reference_scatter, check=plans.check_scatter,
)  # fmt: skip
SCATTER_INTO = Operator(
    "scatter_add_into", (InPlace("out", None), _X, _INDICES, _WEIGHTS), options="bool accumulate", results="",
    plan=plans.plan_scatter_into, reference=_reference_scatter_into, check=plans.check_scatter_into,
    prepare=_prepare_scatter,
)  # fmt: skip

# ---- chunks ---------------------------------------------------------------------------------------------------------


def _reference_chunks(
    x: Tensor, counts: Tensor, order: Tensor, scale: Tensor | None, inverse: bool
) -> tuple[Tensor, Tensor]:
    return _reference_select(x, plans.chunk_rows(counts, order, x.shape[0], inverse), scale)


CHUNKS = Operator(
    "sort_chunks_fwd", (_X, Dense("counts", None), Dense("order", None), _SCALE), options="bool inverse",
    results="y moved",
    outputs=lambda x, counts, order, scale, inverse: (Memory(x.shape, x.dtype), _moved(x, scale)),
    plan=plans.plan_chunks, reference=_reference_chunks, check=plans.check_chunks,
)  # fmt: skip
