"""Inputs of norms that write fp8 codes, and what their results must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import rtkernels
from rtkernels.ops.norm import norm_fp8 as module
from rtkernels.ops.quant.reference import quantize
from support.compare import assert_close, assert_same_bits

rms_norm_fp8, layer_norm_fp8, NormFp8 = rtkernels.rms_norm_fp8, rtkernels.layer_norm_fp8, module.NormFp8
EPS = 1e-5
LAYOUTS = ("row", "transposed", "both")


# ---- inputs: one list for every place -------------------------------------------------------------------------------


@dataclass
class Inputs:
    x: Tensor
    weight: Tensor | None = None
    residual: Tensor | None = None
    offset: float = 0.0
    bias: Tensor | None = None


Normal = Callable[..., Tensor]


def spaced(normal: Normal, rows: int, cols: int, *, every: int = 1, skip: int = 0, pad: int = 0) -> Tensor:
    """[rows, cols] out of a wider tensor: each `every`-th row, columns from `skip`, `pad` unused columns after."""
    return normal(rows * every, skip + cols + pad)[::every, skip : skip + cols]


CASES: dict[str, Callable[[Normal], Inputs]] = {
    "parts": lambda n: Inputs(n(132, 136), n(136)),
    "row": lambda n: Inputs(n(3, 2048), n(2048)),
    "no_weight": lambda n: Inputs(n(3, 512)),
    "weight_fp32": lambda n: Inputs(n(4, 1024), n(1024).float()),
    "weight_fp32_odd": lambda n: Inputs(n(4, 131), n(131).float()),
    "offset": lambda n: Inputs(n(2, 2, 264), n(264), offset=1.0),
    "one_dim": lambda n: Inputs(n(40), n(40)),
    "one_column": lambda n: Inputs(n(37, 1), n(1)),
    "odd": lambda n: Inputs(n(5, 331), n(331)),
    "odd_rows": lambda n: Inputs(n(257, 264), n(264)),
    "many_short_rows": lambda n: Inputs(n(530, 8), n(8)),
    "widest": lambda n: Inputs(n(2, 20480), n(20480)),
    "no_rows": lambda n: Inputs(n(0, 16), n(16)),
    "no_columns": lambda n: Inputs(n(4, 0), n(0)),
    "strided_rows": lambda n: Inputs(spaced(n, 5, 256, every=3, pad=16), n(256)),
    "unaligned": lambda n: Inputs(spaced(n, 5, 64, skip=1, pad=7), n(64)),
    "unaligned_weight": lambda n: Inputs(n(5, 64), n(65)[1:]),
    "transposed": lambda n: Inputs(n(64, 6).t(), n(64)),
    "expanded_rows": lambda n: Inputs(n(1, 128).expand(4, -1), n(128)),
    "weight_strided": lambda n: Inputs(n(4, 64), n(128)[::2]),
    "residual": lambda n: Inputs(n(5, 256), n(256), n(5, 256), offset=1.0),
    "residual_odd": lambda n: Inputs(n(3, 77), n(77), n(3, 77)),
    "residual_strided": lambda n: Inputs(spaced(n, 4, 64, pad=8), n(64), spaced(n, 4, 64, every=2)),
}


def make(case: str, dtype: torch.dtype, device: str, cases: dict[str, Callable[[Normal], Inputs]] = CASES) -> Inputs:
    """Build the tensors of a case: the same numbers on every device."""
    generator = torch.Generator().manual_seed(sum(map(ord, case)))

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 2).to(dtype).to(device)

    return cases[case](normal)


def expected(h: Tensor, inputs: Inputs, rstd: Tensor, layout: str, pow2: bool, scale_layout: str, keep: bool):
    """What must come out for a given rstd, to the bit. On the CPU: dividing by a number, CUDA tensors multiply."""
    h, rstd = h.cpu(), rstd.cpu()
    v = h.float() * rstd[..., None]
    if inputs.weight is not None:
        v = v * (inputs.weight.cpu().float() + inputs.offset)
    q = scale = q_t = scale_t = y = None
    if layout != "transposed":
        q, scale = quantize(v, "group", torch.float8_e4m3fn, pow2, scale_layout)
    if layout != "row":
        q_t, scale_t = quantize(v, "group_t", torch.float8_e4m3fn, pow2, "row")
    if keep:
        y = v.to(h.dtype).contiguous()
    return NormFp8(q, scale, q_t, scale_t, rstd, y, h if inputs.residual is not None else None)


def check(inputs: Inputs, layout: str, *, pow2: bool = False, column: bool = False, keep: bool = False) -> NormFp8:
    """Run one call: rstd within its error budget, everything else to the bit."""
    scale_layout = "column" if column and layout != "transposed" else "row"
    keep = keep and layout != "transposed"
    options = {"layout": layout, "pow2_scale": pow2, "scale_layout": scale_layout}
    x, weight = inputs.x, inputs.weight
    got = rms_norm_fp8(x, weight, eps=EPS, offset=inputs.offset, residual=inputs.residual, keep=keep, **options)
    h = x if inputs.residual is None else (x.float() + inputs.residual.float()).to(x.dtype).contiguous()
    assert got.rstd.shape == x.shape[:-1] and got.rstd.dtype == torch.float32
    exact = torch.rsqrt(h.double().square().sum(-1) / max(x.shape[-1], 1) + EPS)
    assert_close(got.rstd, exact, c=6 + x.shape[-1] ** 0.5 / 8, what="rstd")
    want = expected(h, inputs, got.rstd, layout, pow2, scale_layout, keep)
    compare(got, want)
    return got


def compare(got: NormFp8, want: NormFp8) -> None:
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.is_contiguous(), name
            assert_same_bits(a.cpu(), b.cpu(), name)


LAYER_NORM_CASES: dict[str, Callable[[Normal], Inputs]] = {
    "parts": lambda n: Inputs(n(132, 136), n(136), bias=n(136)),
    "plain": lambda n: Inputs(n(3, 512) + 100),
    "bias": lambda n: Inputs(n(2, 3, 40), bias=n(40)),
    "fp32": lambda n: Inputs(n(4, 1024), n(1024).float(), bias=n(1024).float()),
    "odd": lambda n: Inputs(n(5, 331), n(331), bias=n(331)),
    "widest": lambda n: Inputs(n(2, 20480), n(20480), bias=n(20480)),
    "residual": lambda n: Inputs(n(5, 256), n(256), n(5, 256), offset=1.0, bias=n(256)),
}
