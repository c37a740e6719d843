"""Benchmark rows of ``quantize_fp8`` and ``dequantize_fp8``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row, in_fp32
from rtkernels.ops.quant.quantize_fp8 import BOTH, DEQUANTIZE, QUANTIZE, STATIC
from rtkernels.ops.quant.quantize_fp8_plan import scale_shape
from rtkernels.ops.quant.reference import block_of
from rtkernels.ops.shared.fp8_layout import GROUP
from rtkernels.runtime.operator.operator import TorchOp


def _rows_of(quantize: TorchOp, both: TorchOp, static: TorchOp, dequantize: TorchOp) -> Iterator[Row]:
    """Yield the benchmark rows of the operators given."""
    e4m3, rows = torch.float8_e4m3fn, 8192
    for cols in (2048, 4096, 8192):
        n, groups, shape = rows * cols, cols // GROUP, f"{rows}x{cols}"

        def make(device: str, generator: torch.Generator, cols: int = cols) -> dict[str, Any]:
            return {"x": torch.randn(8192, cols, dtype=torch.bfloat16, device=device, generator=generator)}

        def make_scaled(device: str, generator: torch.Generator, make: Callable = make) -> dict[str, Any]:
            return {**make(device, generator), "scale": torch.tensor(0.01, device=device)}

        def make_codes(device: str, generator: torch.Generator, make: Callable = make) -> dict[str, Any]:
            q, scale = quantize(make(device, generator)["x"], "group", e4m3, False, "row")
            return {"q": q, "scale": scale}

        scales = {"tensor": 1, "row": rows, "group": rows * groups, "group_t": rows // GROUP * cols}
        scales["block"] = rows // GROUP * groups
        for granularity, count in scales.items():
            yield Row(
                name=f"quantize_fp8_{granularity}",
                shape=shape,
                make=make,
                ours=lambda x, g=granularity: quantize(x, g, e4m3, False, "row"),
                torch=_torch_quantize(granularity),
                # The scale of a whole tensor is known only after reading it: two reads and a write.
                bytes=(5 if granularity == "tensor" else 3) * n + 4 * count,
            )
        for granularity in ("group", "block"):
            yield Row(
                name=f"quantize_fp8_{granularity}_both",
                shape=shape,
                make=make,
                ours=lambda x, g=granularity: both(x, g, e4m3, False, "row"),
                torch=_torch_both(granularity),
                bytes=4 * n + 4 * (scales["block"] if granularity == "block" else scales["group"] + scales["group_t"]),
            )
        yield Row(
            name="quantize_fp8_static",
            shape=shape,
            make=make_scaled,
            ours=lambda x, scale: static(x, scale, e4m3),
            torch=lambda x, scale: (in_fp32(x) * (1 / scale)).clamp(-448, 448).to(e4m3),
            bytes=3 * n + 4,
        )
        yield Row(
            name="dequantize_fp8_group",
            shape=shape,
            make=make_codes,
            ours=lambda q, scale: dequantize(q, scale, "group", e4m3, torch.bfloat16, "row"),
            torch=_torch_dequantize,
            bytes=3 * n + 4 * rows * groups,
        )


def _torch_quantize(granularity: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return the plain torch of a recipe for a matrix whose sides are multiples of 128."""

    def recipe(x: Tensor) -> tuple[Tensor, Tensor]:
        v = in_fp32(x).t() if granularity == "group_t" else in_fp32(x)
        down, across = block_of(granularity, *v.shape)
        blocks = v.reshape(v.shape[0] // down, down, v.shape[1] // across, across)
        factor = (blocks.abs().amax((1, 3), keepdim=True) / 448).clamp(min=1e-30)
        q = (blocks * (1 / factor)).clamp(-448, 448).to(torch.float8_e4m3fn).reshape(v.shape)
        scale = factor.reshape(factor.shape[0], factor.shape[2])
        if granularity == "group_t":
            scale = scale.t()
        return q, scale.reshape(scale_shape(x.shape, granularity, "row"))

    return recipe


def _torch_both(granularity: str) -> Callable[[Tensor], tuple[Tensor, ...]]:
    along, down = _torch_quantize(granularity), _torch_quantize("group_t")

    def recipe(x: Tensor) -> tuple[Tensor, ...]:
        q, scale = along(x)
        if granularity == "block":
            return q, scale, q.t().contiguous(), scale.new_empty(0)
        return q, scale, *down(x)

    return recipe


def _torch_dequantize(q: Tensor, scale: Tensor) -> Tensor:
    groups = in_fp32(q).unflatten(-1, (-1, GROUP)) * scale[..., None]
    return groups.flatten(-2).to(scale.dtype if scale.dtype == torch.float64 else torch.bfloat16)


def rows() -> Iterator[Row]:
    """Yield the benchmark rows."""
    yield from _rows_of(QUANTIZE, BOTH, STATIC, DEQUANTIZE)
