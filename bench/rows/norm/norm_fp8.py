"""Benchmark rows of ``norm_fp8``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.norm.norm_fp8_operators import FORWARD
from rtkernels.ops.shared.fp8_layout import E4M3, GROUP


def rows() -> Iterator[Row]:
    rows = 8192
    for cols in (2048, 4096, 8192):
        n = rows * cols
        small = 2 * cols + 4 * rows  # weight and rstd

        def make(device: str, generator: torch.Generator, cols: int = cols, rstd: bool = False) -> dict[str, Any]:
            def normal(*shape: int) -> Tensor:
                return torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)

            x = normal(8192, cols)
            known = {"rstd": torch.rsqrt(x.float().square().mean(-1) + 1e-6)} if rstd else {}
            return {"x": x, "weight": normal(cols), **known}

        def run(x: Tensor, weight: Tensor, layout: str, scales: str, rstd: Tensor | None = None) -> list[Tensor]:
            options = (1e-6, 0.0, layout, False, scales, False, False)
            return FORWARD(x, weight, None, None, rstd, None, *options)

        for name, layout, scales, codes in (
            ("both", "both", "row", 2),
            ("both_column", "both", "column", 2),
            ("row", "row", "row", 1),
        ):
            yield Row(
                name=f"rms_norm_fp8_{name}",
                shape=f"{rows}x{cols}",
                make=make,
                ours=lambda x, weight, layout=layout, scales=scales, run=run: run(x, weight, layout, scales),
                torch=_torch(layout, scales),
                bytes=(2 + codes) * n + 4 * codes * n // GROUP + small,
            )
        yield Row(
            name="rms_norm_fp8_t",
            shape=f"{rows}x{cols}",
            make=lambda device, g, make=make: make(device, g, rstd=True),
            ours=lambda x, weight, rstd, run=run: run(x, weight, "transposed", "row", rstd),
            torch=_torch("transposed"),
            bytes=3 * n + 4 * n // GROUP + small,
        )


def _torch(layout: str, scales: str = "row") -> Callable[..., list[Tensor]]:
    """Return the plain torch of a layout for a matrix whose sides are multiples of 128."""

    def run(x: Tensor, weight: Tensor, rstd: Tensor | None = None) -> list[Tensor]:
        h = x if x.dtype == torch.float64 else x.float()
        given, r = rstd is not None, rstd
        if r is None:
            r = torch.rsqrt(h.square().mean(-1) + 1e-6)
        v = h * r[:, None] * weight
        results = []
        for along in [v] * (layout != "transposed") + [v.t()] * (layout != "row"):
            groups = along.reshape(along.shape[0], -1, GROUP)
            scale = (groups.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30)
            q = (groups * (1 / scale)).clamp(-448, 448).to(E4M3).reshape(along.shape)
            scale = scale.squeeze(-1)
            results += [q, scale if along is v and scales == "row" else scale.t()]
        return results if given else [*results, r]

    return run
