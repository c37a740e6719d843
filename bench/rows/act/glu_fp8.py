"""Benchmark rows of ``glu_fp8`` and ``glu_fp8_backward``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.rows.row import Row, in_fp32
from rtkernels.ops.act.glu_fp8 import BACKWARD, FORWARD
from rtkernels.ops.shared.fp8_layout import GROUP, groups_of, row_blocks_of
from rtkernels.runtime.operator.operator import TorchOp

# Rows of 32 experts, multiples of 16 between 2048 and 6144.
COUNTS = (
    *(4688, 3280, 5280, 2432, 2640, 2816, 5040, 2512, 3792, 2352, 2752, 5600, 5472, 2608, 4016, 2784),
    *(5520, 2528, 3056, 3872, 2544, 5296, 2448, 3856, 2416, 3136, 4416, 5472, 3216, 3008, 4560, 3520),
)


def _rows_of(forward: TorchOp, backward: TorchOp) -> Iterator[Row]:
    """Yield the benchmark rows of the operators given: both layouts, power-of-two scales in layout "column"."""
    for m, cols in ((16384, 512), (8192, 2048)):
        yield from _pair("glu_fp8", None, m, cols, forward, backward)
    yield from _pair("expert_glu_fp8", COUNTS, sum(COUNTS), 1024, forward, backward)


def _pair(
    name: str, counts: Sequence[int] | None, m: int, cols: int, forward: TorchOp, backward: TorchOp
) -> Iterator[Row]:
    n, shape = m * cols, f"{m}x{2 * cols}" + ("" if counts is None else f" {len(counts)} experts")
    blocks = groups_of(m) if counts is None else sum(map(groups_of, counts))
    scales = 4 * (m * groups_of(cols) + blocks * cols)
    weights = 0 if counts is None else 4 * m

    def make(device: str, generator: torch.Generator, *, with_dy: bool) -> dict[str, Any]:
        def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(*size, dtype=dtype, device=device, generator=generator)

        inputs = {"x": normal(m, 2 * cols)}
        if counts is not None:
            inputs["weight"] = normal(m, dtype=torch.float32)
            inputs["counts"] = torch.tensor(counts, dtype=torch.int32, device=device)
        return {"dy": normal(m, cols), **inputs} if with_dy else inputs

    def run_forward(x: Tensor, weight: Tensor | None = None, counts: Tensor | None = None) -> tuple[Tensor, ...]:
        return forward(x, None, weight, counts, "silu", "both", True, "column", False)

    def run_backward(
        dy: Tensor, x: Tensor, weight: Tensor | None = None, counts: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        wanted = weight is not None
        return backward(dy, x, None, weight, counts, "silu", "both", True, "column", False, "fp8", wanted)

    yield Row(
        name=f"{name}_both",
        shape=shape,
        make=lambda device, g: make(device, g, with_dy=False),
        ours=run_forward,
        torch=_torch_forward(counts),
        bytes=4 * n + 2 * n + scales + weights,
    )
    yield Row(
        name=f"{name}_bwd_both",
        shape=shape,
        make=lambda device, g: make(device, g, with_dy=True),
        ours=run_backward,
        torch=_torch_backward(counts),
        bytes=6 * n + 4 * n + 2 * scales + 2 * weights,
    )


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _recipe(blocks: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    scale = (blocks.abs().amax(dim, keepdim=True) / 448).clamp(min=1e-30)
    scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return (blocks / scale).to(torch.float8_e4m3fn), scale.squeeze(dim)


def _both(y: Tensor, counts: Sequence[int] | None) -> tuple[Tensor, ...]:
    """Return q, scale, q_t and scale_t as the op does; columns are a multiple of 128."""
    m, cols = y.shape
    q, scale = _recipe(y.view(m, cols // GROUP, GROUP), 2)
    results = [(scale.t(), *_columns(y))] if counts is None else []
    if counts is not None:
        parts = zip(y.split(list(counts)), scale.split(list(counts)), strict=True)
        results = [(s.t().flatten(), *_columns(part, flat=True)) for part, s in parts]
    scale, q_t, scale_t = (torch.cat(same) for same in zip(*results, strict=True))
    blocks = row_blocks_of(m, None if counts is None else len(counts))
    return q.view(m, cols), scale, q_t, F.pad(scale_t, (0, 0, 0, blocks - scale_t.shape[0]))


def _columns(y: Tensor, flat: bool = False) -> tuple[Tensor, Tensor]:
    m, cols = y.shape
    padded = F.pad(y, (0, 0, 0, -m % GROUP)).view(-1, GROUP, cols)
    codes, scale = _recipe(padded, 1)
    q_t = codes.view(-1, cols)[:m].t()
    return q_t.flatten() if flat else q_t.contiguous(), scale


def _torch_forward(counts: Sequence[int] | None) -> Callable[..., tuple[Tensor, ...]]:
    numbers = counts

    def forward(x: Tensor, weight: Tensor | None = None, counts: Tensor | None = None) -> tuple[Tensor, ...]:
        gate, up = in_fp32(x).chunk(2, -1)
        y = F.silu(gate) * up
        return _both(y if weight is None else y * weight[:, None], numbers)

    return forward


def _torch_backward(counts: Sequence[int] | None) -> Callable[..., tuple[Tensor, ...]]:
    numbers = counts

    def backward(
        dy: Tensor, x: Tensor, weight: Tensor | None = None, counts: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        gate, up = in_fp32(x).chunk(2, -1)
        g, s = in_fp32(dy), torch.sigmoid(gate)
        dweight = x.new_empty(0, dtype=torch.float32) if weight is None else (g * gate * s * up).sum(-1)
        if weight is not None:
            g = g * weight[:, None]
        dx = torch.cat((g * up * s * (1 + gate * (1 - s)), g * gate * s), -1)
        return *_both(dx, numbers), x.new_empty(0, dtype=torch.float32), dweight

    return backward


def rows() -> Iterator[Row]:
    """Yield the benchmark rows."""
    yield from _rows_of(FORWARD, BACKWARD)
