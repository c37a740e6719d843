"""Inputs of group_rms_norm_gate, and what its results must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import rtkernels
from support.compare import ROUNDOFF, assert_close, assert_same_bits

gated = rtkernels.group_rms_norm_gate


def plain(x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float, layout: str) -> Tensor:
    """The op in plain torch, rounding wherever torch rounds."""
    x = x.reshape(*x.shape[: gate.dim() - 1], groups, -1)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.view(-1, x.shape[-1])
    if layout == "sequence_first":
        normed = normed.transpose(0, 1)
    return normed.reshape(gate.shape) * torch.sigmoid(gate)


# ---- inputs: one list for every place -------------------------------------------------------------------------------


@dataclass
class Inputs:
    x: Tensor
    gate: Tensor
    groups: int
    weight: Tensor | None = None
    layout: str = "same"
    dy: Tensor | None = None  # like gate if None
    eps: float = 1e-6

    def leaves(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return x, gate and weight as leaves that want gradients; with a dtype, copies of it."""
        return tuple(
            t if t is None else (t.detach() if dtype is None else t.detach().to(dtype)).requires_grad_()
            for t in (self.x, self.gate, self.weight)
        )


Normal = Callable[..., Tensor]


def same_layout(n: Normal, *shape: int, groups: int, weight: str = "full", **more: Any) -> Inputs:
    sizes = {"full": shape[-1], "shared": shape[-1] // groups}
    return Inputs(n(*shape), n(*shape), groups, None if weight == "none" else n(sizes[weight]), **more)


def sequence_first(n: Normal, b: int, s: int, c: int, groups: int, **more: Any) -> Inputs:
    return Inputs(n(b, s, c), n(s, b, c), groups, n(c), "sequence_first", **more)


def padded(n: Normal, *shape: int, skip: int = 0, pad: int = 0) -> Tensor:
    """A tensor out of one with wider rows: columns from `skip`, `pad` unused ones after."""
    return n(*shape[:-1], skip + shape[-1] + pad)[..., skip : skip + shape[-1]]


CASES: dict[str, Callable[[Normal], Inputs]] = {
    "plain": lambda n: same_layout(n, 2, 7, 64, groups=4),
    "one_group": lambda n: same_layout(n, 5, 64, groups=1),
    "one_dimension": lambda n: same_layout(n, 48, groups=3),
    "four_dimensions": lambda n: same_layout(n, 2, 2, 3, 32, groups=2),
    "shared": lambda n: same_layout(n, 2, 7, 64, groups=4, weight="shared"),
    "no_weight": lambda n: same_layout(n, 9, 64, groups=4, weight="none"),
    "weight_fp32": lambda n: Inputs(n(9, 64), n(9, 64), 2, n(64).float()),
    "weight_strided": lambda n: Inputs(n(3, 32), n(3, 32), 2, n(64)[::2]),
    "eps": lambda n: same_layout(n, 5, 64, groups=4, eps=0.5),
    "odd": lambda n: same_layout(n, 3, 5, 99, groups=3),
    "odd_shared": lambda n: same_layout(n, 11, 105, groups=7, weight="shared"),
    "odd_wide": lambda n: same_layout(n, 2, 2 * 1027, groups=2),
    "one_channel": lambda n: same_layout(n, 6, 5, groups=5),
    "one_element": lambda n: same_layout(n, 1, groups=1),
    "no_rows": lambda n: same_layout(n, 0, 16, groups=2),
    "no_channels": lambda n: same_layout(n, 4, 0, groups=3),
    "not_a_power_of_two": lambda n: same_layout(n, 9, 3 * 40, groups=3),
    "many_tokens": lambda n: same_layout(n, 530, 16, groups=2),
    "many_groups": lambda n: same_layout(n, 37, 8 * 24, groups=24),
    "two_warps": lambda n: same_layout(n, 6, 3 * 1024, groups=3),
    "two_warps_turned": lambda n: sequence_first(n, 2, 21, 2 * 512, 2),
    "two_warps_turned_unevenly": lambda n: sequence_first(n, 3, 15, 2 * 512, 2),
    "two_warps_apart": lambda n: Inputs(
        padded(n, 2, 13, 1024, pad=16), padded(n, 13, 2, 1024, pad=8), 2, n(512), "sequence_first"
    ),
    "two_warps_no_weight": lambda n: same_layout(n, 6, 3 * 512, groups=3, weight="none"),
    "two_warps_weight_fp32": lambda n: Inputs(n(6, 3 * 512), n(6, 3 * 512), 3, n(3 * 512).float()),
    "not_quite_two_warps": lambda n: same_layout(n, 9, 3 * 480, groups=3),
    "not_quite_four_warps": lambda n: sequence_first(n, 2, 5, 2 * 1016, 2),
    "slices": lambda n: same_layout(n, 9, 20 * 512, groups=20),
    "slices_shared": lambda n: same_layout(n, 9, 19 * 512, groups=19, weight="shared"),
    "rows_share_warps": lambda n: same_layout(n, 41, 2 * 384, groups=2),
    "four_rows_share_warps": lambda n: same_layout(n, 21, 3 * 320, groups=3),
    "eight_rows_share_warps": lambda n: same_layout(n, 43, 4 * 96, groups=4),
    "rows_share_warps_and_weights": lambda n: same_layout(n, 21, 5 * 192, groups=5, weight="shared"),
    "groups_not_equally_often": lambda n: same_layout(n, 25, 3 * 512, groups=3),
    "token_in_two_blocks": lambda n: same_layout(n, 9, 5 * 1280, groups=5),
    "widest": lambda n: same_layout(n, 2, 8192, groups=1),
    "wider": lambda n: same_layout(n, 2, 2 * 8208, groups=2),
    "turned": lambda n: sequence_first(n, 2, 9, 64, 4),
    "turned_odd": lambda n: sequence_first(n, 3, 5, 66, 2),
    "turned_many": lambda n: sequence_first(n, 3, 41, 32, 2),
    "turned_one_batch": lambda n: sequence_first(n, 1, 9, 64, 4),
    "turned_one_token": lambda n: sequence_first(n, 7, 1, 64, 4),
    "turned_more_batches": lambda n: sequence_first(n, 11, 3, 32, 2),
    "heads": lambda n: Inputs(n(2, 5, 8, 16), n(2, 5, 128), 4, n(128)),
    "heads_turned": lambda n: Inputs(n(2, 5, 8, 16), n(5, 2, 128), 4, n(32), "sequence_first"),
    "attention": lambda n: Inputs(n(2, 4, 9, 16).transpose(1, 2), n(2, 9, 64), 4, n(64)),
    "attention_turned": lambda n: Inputs(n(2, 4, 9, 16).transpose(1, 2), n(9, 2, 64), 4, n(64), "sequence_first"),
    "attention_copied": lambda n: Inputs(n(2, 4, 9, 16).transpose(1, 2), n(2, 9, 64), 2, n(64)),
    "attention_one_channel": lambda n: Inputs(n(2, 4, 9, 1).transpose(1, 2), n(2, 9, 4), 4, n(4)),
    "gate_transposed": lambda n: Inputs(n(3, 5, 32), n(5, 3, 32).transpose(0, 1), 2, n(32)),
    "gate_padded": lambda n: Inputs(n(3, 5, 32), padded(n, 3, 5, 32, pad=8), 2, n(32)),
    "x_padded": lambda n: Inputs(padded(n, 3, 5, 32, pad=16), n(5, 3, 32), 2, n(32), "sequence_first"),
    "x_unaligned": lambda n: Inputs(padded(n, 3, 5, 32, skip=1, pad=7), n(3, 5, 32), 2, n(32)),
    "x_channels_strided": lambda n: Inputs(n(32, 6).t(), n(6, 32), 2, n(32)),
    "x_uneven": lambda n: Inputs(n(2, 4, 3, 32)[:, :3].transpose(1, 2), n(2, 3, 3, 32), 2, n(32)),
    "x_expanded": lambda n: Inputs(n(1, 1, 32).expand(3, 4, -1), n(3, 4, 32), 2, n(32)),
    "dy_expanded": lambda n: same_layout(n, 6, 64, groups=4, dy=n(1).expand(6, 64)),
    "dy_rows_expanded": lambda n: sequence_first(n, 2, 6, 64, 4, dy=n(1, 1, 64).expand(6, 2, 64)),
    "dy_transposed": lambda n: sequence_first(n, 2, 6, 64, 4, dy=n(2, 6, 64).transpose(0, 1)),
    "dy_unaligned": lambda n: same_layout(n, 6, 64, groups=4, dy=padded(n, 6, 64, skip=3, pad=5)),
}


def make(case: str, dtype: torch.dtype, device: str) -> Inputs:
    """Build the tensors of a case: the same numbers on every device."""
    generator = torch.Generator().manual_seed(sum(map(ord, case)))

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 2).to(dtype).to(device)

    inputs = CASES[case](normal)
    if inputs.dy is None:
        inputs.dy = normal(*inputs.gate.shape)
    return inputs


def check(inputs: Inputs) -> tuple[Tensor | None, ...]:
    """Run forward and backward and hold every element to its error budget; return result and gradients."""
    options = {"groups": inputs.groups, "eps": inputs.eps, "layout": inputs.layout}
    wide = inputs.leaves(torch.float64)
    leaves = inputs.leaves()
    y = gated(*leaves, **options)
    assert y.dtype == inputs.x.dtype and y.is_contiguous() and y.shape == inputs.gate.shape
    quiet = gated(inputs.x.detach(), inputs.gate, inputs.weight, **options)
    assert_same_bits(quiet, y.detach(), "result without gradients")
    y.backward(inputs.dy)
    results = (y.detach(), *(leaf if leaf is None else leaf.grad for leaf in leaves))
    if y.numel() == 0:
        assert all(g is None or not g.any() for g in results)
        return results
    exact = plain(*wide, **options)
    exact.backward(inputs.dy.double())

    with torch.no_grad():
        swap = inputs.layout == "sequence_first"
        cols = inputs.gate.shape[-1] // inputs.groups

        def grouped(t: Tensor, turn: bool) -> Tensor:
            t = t.double().reshape(*t.shape[: inputs.gate.dim() - 1], inputs.groups, cols)
            return t.transpose(0, 1) if turn else t

        v, t, d = grouped(inputs.x, False), grouped(inputs.gate, swap), grouped(inputs.dy, swap)
        w = 1.0 if inputs.weight is None else inputs.weight.double().view(-1, cols)
        rstd = torch.rsqrt(v.square().mean(-1, keepdim=True) + inputs.eps)
        a = (d * w * torch.sigmoid(t)).abs()
        # The exponential's error grows with its argument; a sum's is relative to its terms.
        tail = 1 + t.abs()
        dx = (rstd * a + v.abs() * rstd**3 * (a * v.abs()).mean(-1, keepdim=True)) * tail.amax(-1, keepdim=True)
        dgate = wide[1].grad.abs() * (1 + inputs.gate.double().abs())
        dweight = (d * torch.sigmoid(t) * v * rstd).abs() * tail

        def close(what: str, got: Tensor, reference: Tensor, fp32_terms: Tensor) -> None:
            slack = 8 * ROUNDOFF[torch.float32] / ROUNDOFF[got.dtype]
            assert got.dtype == inputs.x.dtype or what == "dweight"
            assert_close(got, reference, scale=reference.abs() + slack * fp32_terms, what=what, c=1.01)

        close("y", y, exact, exact.abs() * (1 + inputs.gate.double().abs()))
        close("dx", leaves[0].grad, wide[0].grad, dx.reshape(inputs.x.shape))
        close("dgate", leaves[1].grad, wide[1].grad, dgate)
        if inputs.weight is not None:
            assert leaves[2].grad.dtype == inputs.weight.dtype
            close("dweight", leaves[2].grad, wide[2].grad, dweight.reshape(-1, inputs.weight.numel()).sum(0))
    return results
