"""Inputs of layer_norm, and what its results must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import rtkernels
from support.compare import ROUNDOFF, assert_close, assert_same_bits

layer_norm = rtkernels.layer_norm
EPS = 1e-5


# ---- inputs: one list for every place -------------------------------------------------------------------------------


@dataclass
class Inputs:
    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    offset: float = 0.0
    dy: Tensor | None = None
    dsum: Tensor | None = None


Normal = Callable[..., Tensor]


def spaced(normal: Normal, rows: int, cols: int, *, every: int = 1, skip: int = 0, pad: int = 0) -> Tensor:
    """[rows, cols] out of a wider tensor: each `every`-th row, columns from `skip`, `pad` unused columns after."""
    return normal(rows * every, skip + cols + pad)[::every, skip : skip + cols]


def weight_and_bias(n: Normal, rows: int, cols: int, **more: Any) -> Inputs:
    return Inputs(n(rows, cols), n(cols), n(cols), **more)


CASES: dict[str, Callable[[Normal], Inputs]] = {
    "plain": lambda n: Inputs(n(5, 64)),
    "weight": lambda n: Inputs(n(5, 64), n(64)),
    "bias": lambda n: Inputs(n(5, 64), None, n(64)),
    "both": lambda n: weight_and_bias(n, 6, 320),
    "both_3d": lambda n: Inputs(n(2, 3, 40), n(40), n(40)),
    "both_1d": lambda n: Inputs(n(48), n(48), n(48)),
    "one_element": lambda n: weight_and_bias(n, 1, 1),
    "one_column": lambda n: weight_and_bias(n, 37, 1),
    "odd": lambda n: weight_and_bias(n, 3, 33),
    "odd_wide": lambda n: weight_and_bias(n, 3, 1027),
    "even_odd": lambda n: weight_and_bias(n, 9, 1002),
    "hidden_1536": lambda n: weight_and_bias(n, 9, 1536),
    "hidden_2048": lambda n: weight_and_bias(n, 5, 2048),
    "hidden_4096": lambda n: weight_and_bias(n, 9, 4096),
    "hidden_5120": lambda n: weight_and_bias(n, 5, 5120),
    "rows_of_1536": lambda n: weight_and_bias(n, 23, 1536),
    "rows_of_2048": lambda n: weight_and_bias(n, 17, 2048),
    "rows_of_5120": lambda n: weight_and_bias(n, 14, 5120),
    "hidden_12288": lambda n: weight_and_bias(n, 5, 12288, residual=n(5, 12288)),
    "hidden_10752": lambda n: weight_and_bias(n, 23, 10752),
    "hidden_16384": lambda n: weight_and_bias(n, 13, 16384, residual=n(13, 16384)),
    "hidden_8200_fp32": lambda n: Inputs(n(9, 8200), n(8200).float(), n(8200).float(), offset=1.0),
    "hidden_16384_fp32": lambda n: Inputs(n(9, 16384), n(16384).float(), n(16384).float()),
    "hidden_9000_plain": lambda n: Inputs(n(9, 9000), residual=n(9, 9000)),
    "hidden_20480": lambda n: weight_and_bias(n, 5, 20480),
    "many_short_rows": lambda n: weight_and_bias(n, 530, 8),
    "more_than_the_ring_holds": lambda n: weight_and_bias(n, 66, 4080),
    "a_row_more": lambda n: weight_and_bias(n, 61, 2040),
    "residual_many_rows": lambda n: weight_and_bias(n, 130, 520, residual=n(130, 520)),
    "no_rows": lambda n: weight_and_bias(n, 0, 16),
    "no_columns": lambda n: weight_and_bias(n, 4, 0),
    "strided_rows": lambda n: Inputs(spaced(n, 5, 64, every=3, pad=16), n(64), n(64)),
    "unaligned": lambda n: Inputs(spaced(n, 5, 64, skip=1, pad=7), n(64), n(64)),
    "unaligned_rows": lambda n: Inputs(spaced(n, 5, 64, pad=1), n(64)),
    "unaligned_weight": lambda n: Inputs(n(5, 64), n(65)[1:], n(67)[3:]),
    "strided_weight": lambda n: Inputs(n(5, 64), n(128)[::2], n(128)[::2]),
    "expanded_weight": lambda n: Inputs(n(5, 64), n(1).expand(64), n(1).expand(64)),
    "transposed": lambda n: Inputs(n(48, 6).t(), n(48), n(48)),
    "expanded_rows": lambda n: Inputs(n(1, 64).expand(4, -1), n(64), n(64)),
    "dy_expanded": lambda n: weight_and_bias(n, 6, 64, dy=n(1).expand(6, 64)),
    "dy_rows_expanded": lambda n: weight_and_bias(n, 6, 64, dy=n(1, 64).expand(6, 64)),
    "dy_strided": lambda n: weight_and_bias(n, 6, 64, dy=spaced(n, 6, 64, every=2, pad=8)),
    "dy_unaligned": lambda n: weight_and_bias(n, 6, 64, dy=spaced(n, 6, 64, skip=3, pad=5)),
    "weight_fp32": lambda n: Inputs(n(6, 640), n(640).float(), n(640).float()),
    "weight_fp32_even": lambda n: Inputs(n(3, 1024), n(1024).float(), n(1024).float()),
    "weight_fp32_rows": lambda n: Inputs(n(17, 2048), n(2048).float(), n(2048).float()),
    "weight_fp32_odd": lambda n: Inputs(n(6, 77), n(77).float(), n(77).float()),
    "weight_fp32_wide": lambda n: Inputs(n(5, 9216), n(9216).float(), n(9216).float()),
    "offset": lambda n: weight_and_bias(n, 6, 128, offset=1.0),
    "residual": lambda n: weight_and_bias(n, 6, 640, residual=n(6, 640)),
    "residual_plain": lambda n: Inputs(n(6, 64), residual=n(6, 64)),
    "residual_odd": lambda n: weight_and_bias(n, 6, 129, residual=n(6, 129)),
    "residual_strided": lambda n: weight_and_bias(n, 6, 64, residual=spaced(n, 6, 64, every=2, pad=8)),
    "residual_dsum_strided": lambda n: weight_and_bias(n, 6, 64, residual=n(6, 64), dsum=spaced(n, 6, 64, pad=8)),
    "bulk_offset": lambda n: weight_and_bias(n, 6, 640, offset=1.0),
    "bulk_weight": lambda n: Inputs(n(6, 640), n(640)),
    "bulk_strided": lambda n: Inputs(
        spaced(n, 9, 640, every=2, pad=16),
        n(640),
        n(640),
        residual=n(9, 640),
        dy=spaced(n, 9, 640, every=3),
        dsum=spaced(n, 9, 640, pad=8),
    ),
    "far_mean": lambda n: Inputs(n(6, 512) / 8 + 100, n(512), n(512)),
    "constant_rows": lambda n: Inputs(n(6, 1).expand(6, 64).contiguous(), n(64), n(64)),
}


def make(case: str, dtype: torch.dtype, device: str) -> Inputs:
    """Build the tensors of a case: the same numbers on every device."""
    generator = torch.Generator().manual_seed(sum(map(ord, case)))

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 2).to(dtype).to(device)

    inputs = CASES[case](normal)
    if inputs.dy is None:
        inputs.dy = normal(*inputs.x.shape)
    if inputs.residual is not None and inputs.dsum is None:
        inputs.dsum = normal(*inputs.x.shape)
    return inputs


def check(inputs: Inputs) -> dict[str, Tensor]:
    """Run forward and backward and hold every element to its error budget; return results and gradients."""
    names = ("x", "weight", "bias", "residual")
    leaves = {name: t.detach().requires_grad_() for name in names if (t := getattr(inputs, name)) is not None}
    y = layer_norm(**leaves, eps=EPS, offset=inputs.offset)
    with torch.no_grad():
        quiet = layer_norm(**leaves, eps=EPS, offset=inputs.offset)
    if inputs.residual is None:
        y.backward(inputs.dy)
        h = inputs.x.double()
    else:
        (y, total), quiet = y, quiet[0]
        assert_same_bits(total.detach(), (inputs.x.float() + inputs.residual.float()).to(inputs.x.dtype), "h")
        assert total.is_contiguous()
        torch.autograd.backward((y, total), (inputs.dy, inputs.dsum))
        h = total.detach().double()
    assert y.dtype == inputs.x.dtype and y.is_contiguous() and y.shape == inputs.x.shape
    assert_same_bits(quiet, y.detach(), "result without gradients")

    with torch.no_grad():
        n = h.shape[-1]
        g = inputs.dy.double()
        gain = 1.0 if inputs.weight is None else inputs.weight.double() + inputs.offset
        bias = 0.0 if inputs.bias is None else inputs.bias.double()
        mean = h.mean(-1, keepdim=True)
        d = h - mean
        rstd = (d.square().mean(-1, keepdim=True) + EPS).rsqrt()
        q = g * gain
        dh = rstd * (q - q.mean(-1, keepdim=True) - d * rstd.square() * (q * d).mean(-1, keepdim=True))
        # fp32 arithmetic, with errors relative to what was added: a difference from the mean carries the roundoff of
        # the row's numbers.
        size = rstd * (d.abs() + h.abs().amax(-1, keepdim=True) if n else h)
        dh_size = rstd * (
            q.abs() + q.abs().mean(-1, keepdim=True) + size * (q * rstd).abs().mul(size).mean(-1, keepdim=True)
        )
        if inputs.dsum is not None:
            dh, dh_size = dh + inputs.dsum.double(), dh_size + inputs.dsum.double().abs()
        rows = (-1, n) if n else (0, 0)
        exact = {
            "y": (d * rstd * gain + bias, (size * gain).abs() + (bias.abs() if inputs.bias is not None else 0.0)),
            "x": (dh, dh_size),
            "residual": (dh, dh_size),
            "weight": ((g * d * rstd).reshape(rows).sum(0), (g.abs() * size).reshape(rows).sum(0)),
            "bias": (g.reshape(rows).sum(0), g.abs().reshape(rows).sum(0)),
        }
        results = {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}
        for name, got in results.items():
            reference, terms = exact[name]
            assert got.dtype == (y if name == "y" else leaves[name]).dtype
            slack = 16 * ROUNDOFF[torch.float32] / ROUNDOFF[got.dtype]
            assert_close(got, reference, scale=reference.abs() + slack * terms, what=name, c=1.01)
    return results
