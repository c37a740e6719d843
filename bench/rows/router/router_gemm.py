"""Benchmark rows of ``router_gemm``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.router.router_gemm import BACKWARD, FORWARD
from rtkernels.ops.router.router_gemm_kernels import EXACT, FAST, HIGH


def _torch_fwd(x: Tensor, weight: Tensor) -> Tensor:
    math_dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(math_dtype) @ weight.to(math_dtype).t()


def _torch_fused(x: Tensor, weight: Tensor) -> Tensor:
    """torch's own product with an fp32 result, of operands of one 16-bit type."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def _torch_bwd(dy: Tensor, x: Tensor, weight: Tensor, parts: str) -> Any:
    math_dtype = torch.promote_types(x.dtype, torch.float32)
    g = dy.to(math_dtype)
    dx = (g @ weight.to(math_dtype)).to(x.dtype) if "x" in parts else None
    dweight = (g.t() @ x.to(math_dtype)).to(weight.dtype) if "w" in parts else None
    return {"x": dx, "w": dweight, "xw": (dx, dweight)}[parts]


def _ours_bwd(dy: Tensor, x: Tensor, weight: Tensor, level: int, parts: str) -> Any:
    dx, dweight = BACKWARD(dy, x, weight, level, "x" in parts, "w" in parts)
    return {"x": dx, "w": dweight, "xw": (dx, dweight)}[parts]


def _inputs(device: str, generator: torch.Generator, sizes: tuple[int, int, int], dtype: torch.dtype, backward: bool):
    rows, experts, depth = sizes
    x = torch.randn(rows, depth, dtype=torch.bfloat16, device=device, generator=generator)
    weight = (torch.randn(experts, depth, device=device, generator=generator) * 0.02).to(dtype)
    if not backward:
        return {"x": x, "weight": weight}
    return {"dy": torch.randn(rows, experts, device=device, generator=generator) * 1e-3, "x": x, "weight": weight}


_VARIANTS = {"bf16": (torch.bfloat16, HIGH), "high": (torch.float32, HIGH), "exact": (torch.float32, EXACT)}


# Of the forward alone: tokens that do not fill tiles, expert counts between those of one and of several tiles.
FORWARD_VARIANTS = {"fast": (torch.bfloat16, FAST), "high": (torch.float32, HIGH)}


_FORWARD_SIZES = (
    (12289, 160, 2048), (12289, 160, 6144), (4096, 64, 7168), (4096, 8, 4096), (8192, 384, 4096), (8192, 512, 4096),
)  # fmt: skip


def forward_row(sizes: tuple[int, int, int], name: str, dtype: torch.dtype, level: int) -> Row:
    """Return the forward row of tokens, experts and depth."""
    rows, experts, depth = sizes
    return Row(
        name="router_gemm_fwd",
        shape=f"{rows}x{experts}x{depth}_{name}",
        make=partial(_inputs, sizes=sizes, dtype=dtype, backward=False),
        ours=lambda x, weight: FORWARD(x, weight, None, level),
        torch=_torch_fwd,
        fused=_torch_fused if dtype == torch.bfloat16 else None,
        bytes=2 * rows * depth + 4 * rows * experts + experts * depth * dtype.itemsize,
        flops=2 * rows * experts * depth,
    )


def rows() -> Iterator[Row]:
    """Weights of bf16, as linghe has them, and of fp32 with the two precisions."""
    for sizes in ((8192, 256, 2048), (2048, 256, 8192)):
        rows, experts, depth = sizes
        x_bytes, y_bytes = 2 * rows * depth, 4 * rows * experts
        for name, (dtype, level) in _VARIANTS.items():
            yield forward_row(sizes, name, dtype, level)
            w_bytes = experts * depth * dtype.itemsize
            for which, parts in (("dx", "x"), ("dw", "w"), ("bwd", "xw")):
                yield Row(
                    name=f"router_gemm_{which}",
                    shape=f"{rows}x{experts}x{depth}_{name}",
                    make=partial(_inputs, sizes=sizes, dtype=dtype, backward=True),
                    ours=partial(_ours_bwd, level=level, parts=parts),
                    torch=partial(_torch_bwd, parts=parts),
                    bytes=y_bytes + len(parts) * (x_bytes + w_bytes),
                    flops=2 * len(parts) * rows * experts * depth,
                )
    for sizes in _FORWARD_SIZES:
        for name, (dtype, level) in FORWARD_VARIANTS.items():
            yield forward_row(sizes, name, dtype, level)
