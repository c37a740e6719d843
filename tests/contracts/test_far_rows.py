"""Row offsets are 64-bit: a row may begin more than 2^31 elements after the first one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.far_rows import assert_finds_far_rows, far_rows
from support.places import emulated

import rtkernels
from rtkernels.ops.act import glu
from rtkernels.ops.index import adding, embedding, gathering, row_moves_operators, scattering
from rtkernels.ops.layout import transpose
from rtkernels.ops.loss import cross_entropy_operators, cross_entropy_plan, divergence_operators, divergence_plan
from rtkernels.ops.norm import layer_norm, norm_fp8_operators, rms_norm
from rtkernels.ops.pointwise import inplace
from rtkernels.ops.quant import column_absmax, quantize_fp8, smooth_quant, swizzle
from rtkernels.ops.reduce import row_dot, softmax
from rtkernels.ops.router import topk, topk_router, topk_router_plan
from rtkernels.ops.scan import running
from rtkernels.ops.window import pooling, upsampling

COLS = 128
F8 = torch.float8_e4m3fn


def _near(rows: int = 2) -> torch.Tensor:
    return torch.ones(rows, COLS)


def _glu_backward(which: int) -> None:
    given = [_near(), _near(), _near()]
    given[which] = far_rows(COLS)
    glu.BACKWARD(*given, None, "silu", False)


def _topk_router() -> None:
    topk_router.FORWARD(far_rows(COLS), None, 2, topk_router_plan.SOFTMAX, 1, 1, 1, 1.0, 1e-20, False, False)


def _far_planes() -> torch.Tensor:
    return far_rows(COLS).unflatten(1, (1, 8, 16))


def _far_lines() -> torch.Tensor:
    return far_rows(COLS)[None, None]


def _scattered(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    scattering.scatter(x, source, [torch.tensor([1, 0])[:, None].expand(x.shape)], 0)
    return x


CALLS: dict[str, Callable[[], object]] = {
    "glu": lambda: glu.FORWARD(far_rows(COLS), None, None, "silu"),
    "glu_gate": lambda: glu.FORWARD(far_rows(COLS), _near(), None, "silu"),
    "glu_narrow": lambda: glu.FORWARD(far_rows(COLS - 2), None, None, "silu"),
    "glu_up": lambda: glu.FORWARD(_near(), far_rows(COLS), None, "silu"),
    "glu_dy": lambda: _glu_backward(0),
    "glu_gate_bwd": lambda: _glu_backward(1),
    "glu_up_bwd": lambda: _glu_backward(2),
    "glu_weight_grad": lambda: glu.BACKWARD(far_rows(COLS), _near(), _near(), _near()[:, 0].clone(), "silu", True),
    "rms_norm": lambda: rms_norm.FORWARD(far_rows(COLS), None, 1e-6, 0.0),
    "rms_norm_residual": lambda: rms_norm.ADD_FORWARD(_near(), far_rows(COLS), None, 1e-6, 0.0),
    "rms_norm_bwd": lambda: rms_norm.BACKWARD(_near(), far_rows(COLS), None, None, 1e-6, 0.0, False),
    "layer_norm": lambda: layer_norm.FORWARD(far_rows(COLS), None, None, 1e-6, 0.0),
    "norm_fp8": lambda: norm_fp8_operators.FORWARD(
        far_rows(COLS), None, None, None, None, None, 1e-6, 0.0, "row", False, "row", False, False
    ),
    "softmax": lambda: softmax.FORWARD(far_rows(COLS), None, 1.0, False),
    "row_dot": lambda: row_dot.FORWARD(_near(), far_rows(COLS)),
    "add_in_place": lambda: inplace.ADD(_near(), far_rows(COLS), None, 1.0, 1.0),
    "quantize_row": lambda: quantize_fp8.QUANTIZE(far_rows(COLS), "row", F8, False, "row"),
    "quantize_tensor": lambda: quantize_fp8.QUANTIZE(far_rows(COLS), "tensor", F8, False, "row"),
    "quantize_group": lambda: quantize_fp8.QUANTIZE(far_rows(COLS), "group", F8, False, "row"),
    "quantize_smooth": lambda: smooth_quant.SMOOTH(far_rows(COLS), _near()[0], None, F8, False, False),
    "column_absmax": lambda: column_absmax.ABSMAX(far_rows(COLS), None, None),
    "topk": lambda: topk.FORWARD(far_rows(COLS), 2, False),
    "topk_router": _topk_router,
    "router_loss": lambda: rtkernels.router_z_loss(far_rows(COLS)),
    "cross_entropy": lambda: cross_entropy_operators.FORWARD(
        far_rows(COLS), torch.zeros(2, dtype=torch.int64), -100, 0.0, 0.0, 0.0, cross_entropy_plan.NONE, False
    ),
    "divergence": lambda: divergence_operators.EACH(
        far_rows(COLS), _near(), None, -100, divergence_plan.LOGARITHM, 0.0
    ),
    "embedding": lambda: embedding.FORWARD(far_rows(COLS), torch.tensor([1]), 0),
    "row_select": lambda: row_moves_operators.SELECT(far_rows(COLS), torch.tensor([1]), None),
    "transpose": lambda: transpose.TRANSPOSE(far_rows(COLS), 0, 1, 1),
    "add_rows": lambda: adding.add_rows(_near(), torch.tensor([1, 0]), far_rows(COLS), 0),
    "add_rows_by_elements": lambda: adding.add_rows(
        _near()[:, 1:].clone(), torch.tensor([1, 0]), far_rows(COLS - 1), 0
    ),
    "select_rows": lambda: gathering.gather(far_rows(COLS), torch.tensor([1]), 0, select=True),
    "select_units": lambda: gathering.gather(far_rows(COLS - 2), torch.tensor([1]), 0, select=True),
    "gather_staged": lambda: gathering.gather(far_rows(COLS), torch.zeros(2, 32).long(), 1),
    "gather_elements": lambda: gathering.gather(far_rows(COLS), torch.ones(1, COLS).long(), 0),
    "scatter_from": lambda: _scattered(_near(), far_rows(COLS)),
    "scatter_to": lambda: _scattered(far_rows(COLS), _near()),
    "running_rows": lambda: running.running(far_rows(COLS), "sum", 1),
    "running_columns": lambda: running.running(far_rows(COLS), "maximum", 0),
    "avg_pool": lambda: pooling.avg_pool(_far_planes(), (4, 8), (2, 2, 2, 2, 0, 0), True, 0),
    "avg_pool_lines": lambda: pooling.avg_pool(_far_lines(), (1, 64), (2, 2, 2, 2, 0, 0), True, 0),
    "avg_pool_of_any_window": lambda: pooling.avg_pool(_far_lines(), (1, 32), (2, 4, 2, 4, 0, 0), True, 0),
    "max_pool": lambda: pooling.max_pool(_far_planes(), (4, 8), (2, 2, 2, 2, 0, 0), (1, 1)),
    "max_pool_lines": lambda: pooling.max_pool(_far_lines(), (1, 64), (2, 2, 2, 2, 0, 0), (1, 1)),
    "max_pool_of_any_window": lambda: pooling.max_pool(_far_lines(), (1, 32), (2, 4, 2, 4, 0, 0), (1, 1)),
    "upsample": lambda: upsampling.upsample_nearest(_far_planes(), (24, 16), (1 / 3, 1.0)),
    "upsample_lines": lambda: upsampling.upsample_nearest(_far_lines(), (6, COLS + 1), (1 / 3, 1.0)),
    "upsample_twice": lambda: upsampling.upsample_nearest(_far_planes(), (16, 32), (0.5, 0.5)),
    "swizzle": lambda: swizzle.SWIZZLE(far_rows(COLS, torch.uint8)),
}


@pytest.mark.one_in(3)
@emulated
@pytest.mark.parametrize("name", CALLS)
def test_rows_further_apart_than_32_bits(name: str) -> None:
    assert_finds_far_rows(CALLS[name])
