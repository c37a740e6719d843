"""Benchmark rows of ``moe_permute_fp8``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.moe.moe_permute import CASES, Case, make, padded_rows
from bench.rows.row import Row
from rtkernels.ops.moe.moe_permute_fp8 import QUANTIZE
from rtkernels.ops.shared.fp8_layout import FP8_DTYPES, groups_of


def _bytes(case: Case) -> int:
    blocks = case.rows // 128 + case.used // 2
    codes = 2 * case.rows * case.cols + 4 * (case.rows * groups_of(case.cols) + blocks * case.cols)
    return 2 * case.tokens * case.cols + codes + 4 * case.rows


def _plain(x: Tensor, rows: Tensor, slots: Tensor, **_: Any) -> Tensor:
    """The codes by rows in plain torch, without the layout of scales by expert; returns the codes."""
    y = padded_rows(x, slots, rows.shape[1])
    y = y if y.dtype == torch.float64 else y.float()
    scale = (y.unflatten(1, (-1, 128)).abs().amax(-1) / 448).clamp(min=1e-30)
    codes = (y * (1 / scale).repeat_interleave(128, 1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale.t().contiguous(), codes.t().contiguous()
    return codes


def rows() -> Iterator[Row]:
    for case in CASES:
        yield Row(
            name="permute_pad_quant",
            shape=case.shape,
            make=lambda device, g, case=case: make(case, device, g, "x"),
            ours=lambda x, rows, slots, offsets, **_: QUANTIZE(
                x, rows, slots, offsets, None, None, "both", FP8_DTYPES[0], False
            ),
            torch=_plain,
            bytes=_bytes(case),
        )
