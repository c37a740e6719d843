"""Benchmark rows of ``group_rms_norm_gate``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.norm.group_rms_norm_gate import BACKWARD, FORWARD, _torch_bwd, _torch_fwd


def rows() -> Iterator[Row]:
    for batch, sequence, channels, groups in ((2, 4096, 2048, 4), (1, 4096, 4096, 4), (2, 4096, 2048, 16)):
        n = batch * sequence * channels * 2  # bytes of x
        names = {"groups": groups, "eps": 1e-6, "layout": "sequence_first"}

        def make(
            device: str, generator: torch.Generator, *, backward: bool, sizes=(batch, sequence, channels), names=names
        ) -> dict[str, Any]:
            def normal(*size: int) -> Tensor:
                return torch.randn(*size, dtype=torch.bfloat16, device=device, generator=generator)

            b, s, c = sizes
            inputs = {"x": normal(b, s, c), "gate": normal(s, b, c), "weight": normal(c), **names}
            return {"dy": normal(s, b, c), **inputs} if backward else inputs

        shape = f"b{batch}s{sequence}c{channels}g{groups}"
        yield Row(
            name="gate_fwd",
            shape=shape,
            make=lambda device, g, make=make: make(device, g, backward=False),
            ours=lambda x, gate, weight, groups, eps, layout: FORWARD(
                x, gate, weight, groups, eps, layout, "sigmoid", False
            ),
            torch=_torch_fwd,
            bytes=3 * n + 2 * channels,
        )
        yield Row(
            name="gate_bwd",
            shape=shape,
            make=lambda device, g, make=make: make(device, g, backward=True),
            ours=lambda dy, x, gate, weight, groups, eps, layout: BACKWARD(
                dy, x, gate, weight, groups, eps, layout, "sigmoid", False, True
            ),
            torch=_torch_bwd,
            bytes=5 * n + 4 * channels,
        )

    # Heads behind a gated delta rule (Qwen3-Next), and groups of a Mamba-2 layer (Nemotron-H).
    for tokens, channels, groups, gate_first in ((8192, 4096, 32, False), (8192, 8192, 8, True)):
        n, form = tokens * channels * 2, "first" if gate_first else "last"
        options = {"groups": groups, "eps": 1e-6, "layout": "same", "act": "silu", "gate_first": gate_first}

        def make_silu(
            device: str, generator: torch.Generator, *, backward: bool, sizes=(tokens, channels), options=options
        ) -> dict[str, Any]:
            x, gate, dy = torch.randn(3, *sizes, dtype=torch.bfloat16, device=device, generator=generator)
            count = sizes[1] if options["gate_first"] else sizes[1] // options["groups"]
            weight = torch.randn(count, dtype=torch.bfloat16, device=device, generator=generator)
            inputs = {"x": x, "gate": gate, "weight": weight, **options}
            return {"dy": dy, **inputs} if backward else inputs

        yield Row(
            name="gate_silu_fwd",
            shape=f"{tokens}x{channels}g{groups} {form}",
            make=lambda device, g, make=make_silu: make(device, g, backward=False),
            ours=lambda **given: FORWARD(*given.values()),
            torch=_torch_fwd,
            bytes=3 * n,
        )
        yield Row(
            name="gate_silu_bwd",
            shape=f"{tokens}x{channels}g{groups} {form}",
            make=lambda device, g, make=make_silu: make(device, g, backward=True),
            ours=lambda **given: BACKWARD(*given.values(), True),
            torch=_torch_bwd,
            bytes=5 * n,
        )
