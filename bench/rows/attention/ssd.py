"""Benchmark rows of ``ssd``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bench.rows.row import Row, gradients_of, in_fp32
from rtkernels.ops.attention import gated_delta_rule_reference as reference
from rtkernels.ops.attention import ssd_reference
from rtkernels.ops.attention.ssd import BACKWARD, ssd, ssd_step

_SIZES = ((1, 8192, 128, 8), (1, 8192, 128, 1), (8, 4096, 64, 1))  # batch, length, heads and groups; Mamba-2, Bamba
_WIDTH, _STATE = 64, 128


def host(x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    heads, numbers, rate = x.view(-1, 16, 64), x[:, :16].float(), -torch.ones(16, device=x.device)
    state = torch.zeros(heads.shape[0], 16, 64, 64, device=x.device)
    keys = heads[:, :1]
    return {
        "ssd": lambda: ssd(heads[None], numbers[None], rate, keys[None], keys[None], dt_softplus=True),
        "ssd_step": lambda: ssd_step(heads, numbers, rate, keys, keys, state, dt_softplus=True),
    }


def _scan(x, dt, g, B, C, D):
    """The same chunks in plain torch, as transformers' own code has them; differentiable."""
    dtype = in_fp32(x).dtype
    zero = torch.zeros(x.shape[2], B.shape[3], x.shape[3], device=x.device, dtype=dtype)
    outs = [reference.one(C[b], B[b], x[b], g[b], dt[b], zero, 1.0, False, False)[0] for b in range(x.shape[0])]
    return (torch.stack(outs) + D.to(dtype).unsqueeze(-1) * x).to(x.dtype)


def _plain(x, dt, A, B, C, D):
    return _scan(x, dt, A.to(in_fp32(x).dtype) * dt.to(in_fp32(x).dtype), B, C, D)


def _gradients(dy, x, dt, A, B, C, D, g):
    """Those that the operator returns, by autograd; its g is ``A * dt``."""
    return gradients_of(partial(_scan, D=D))(dy, x=x, dt=dt, g=g, B=B, C=C)


def _ours_bwd(dy, x, dt, A, B, C, D, g):
    dc, db, dx, dg, ddt = BACKWARD(dy, None, C, B, x, g, dt, D, None, None, False)[:5]
    return dx, ddt, dg, db, dc


def rows() -> Iterator[Row]:
    for batch, length, heads, groups in _SIZES:
        tokens = batch * length

        def make(
            device: str, generator: torch.Generator, batch=batch, length=length, heads=heads, groups=groups
        ) -> dict[str, Any]:
            def normal(*sizes: int) -> torch.Tensor:
                return torch.randn(sizes, device=device, generator=generator)

            keys = [(normal(batch, length, groups, _STATE) * _STATE**-0.25).bfloat16() for _ in range(2)]
            dt = torch.rand(batch, length, heads, device=device, generator=generator)
            x = normal(batch, length, heads, _WIDTH).bfloat16()
            return {"x": x, "dt": dt, "A": -normal(heads).abs(), "B": keys[0], "C": keys[1], "D": normal(heads)}

        def make_bwd(device: str, generator: torch.Generator, make=make) -> dict[str, Any]:
            given = make(device, generator)
            dy = torch.randn(given["x"].shape, device=device, generator=generator).to(given["x"].dtype)
            return {"dy": dy, **given, "g": given["A"] * given["dt"]}

        values, keys = 2 * tokens * heads * _WIDTH, 2 * tokens * groups * _STATE
        shape = f"{batch}x{length} {heads} heads of {_WIDTH}, {groups} groups of {_STATE}"
        yield Row(
            name="ssd_fwd", shape=shape, make=make,
            ours=lambda x, dt, A, B, C, D: ssd(x, dt, A, B, C, D=D), torch=_plain,
            bytes=2 * values + 2 * keys + 4 * tokens * heads,
        )  # fmt: skip
        yield Row(
            name="ssd_bwd", shape=shape, make=make_bwd, ours=_ours_bwd, torch=_gradients,
            bytes=3 * values + 4 * keys + 16 * tokens * heads,
        )  # fmt: skip

    def make_step(device: str, generator: torch.Generator) -> dict[str, Any]:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=generator)

        keys = [normal(128, 8, _STATE).bfloat16() for _ in range(2)]
        dt = torch.rand(128, 128, device=device, generator=generator)
        given = {"x": normal(128, 128, _WIDTH).bfloat16(), "dt": dt, "A": -normal(128).abs()}
        given |= {"B": keys[0], "C": keys[1], "D": normal(128)}
        return given | {"state": torch.zeros(128, 128, _WIDTH, _STATE, device=device)}

    def plain_step(x, dt, A, B, C, D, state):
        return state, ssd_reference.step(x, dt, A, B, C, D, None, state, False, 0.0, float("inf"))

    def exact_step(**given: torch.Tensor) -> Any:
        """Of the second of two calls: results are compared in memory that the first one has used."""
        doubled = {name: t.double() for name, t in given.items()}
        plain_step(**doubled)
        return plain_step(**doubled)

    yield Row(
        name="ssd_step", shape=f"128 sequences, 128 heads of {_WIDTH}, 8 groups of {_STATE}", make=make_step,
        ours=lambda x, dt, A, B, C, D, state: (state, ssd_step(x, dt, A, B, C, state, D=D)),
        torch=plain_step, exact=exact_step, bytes=2 * 4 * 128 * 128 * _WIDTH * _STATE,
    )  # fmt: skip
