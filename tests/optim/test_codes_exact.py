"""Codes that kernels write: the nearest ones, on both sides of every border between two codes."""

from __future__ import annotations

import pytest
import torch
from support.compare import running_on
from support.places import at
from torch import Tensor

from rtkernels.ops.multi import dynamic_codes, multi_adamw_codes

F32 = torch.float32
_NUMBERS = (None, None, None, 0.0, 0.0, 0.0, 1e-8, 0.0, False, 0, False)  # betas of 0: moments are g and its square
_OUTSIDE = 2.0**-19  # how far from a border, relatively, rounding in fp32 may still choose the code beyond it


def codes_written(place: str, numbers: Tensor, kind: str, signed: bool) -> Tensor:
    """Return the codes of numbers (roots of numbers without signs) of at most 1, in blocks that begin with 1."""
    block = dynamic_codes.BLOCKS[kind]
    rows = torch.nn.functional.pad(numbers, (0, -numbers.numel() % (block - 1))).reshape(-1, block - 1)
    grad = torch.cat([torch.ones(len(rows), 1), rows], 1).reshape(-1)
    with running_on(place) as device:
        zeros = torch.zeros_like(grad)
        pairs = [dynamic_codes.encode(zeros, kind, which) for which in (True, False)]
        moments, scales = ([[pair[k].to(device)] for pair in pairs] for k in (0, 1))
        weights = [torch.zeros_like(grad, device=device)]
        steps, origins = [torch.zeros((), device=device)], [torch.zeros(2, dtype=torch.int64, device=device)]
        multi_adamw_codes.STEP(weights, [grad.to(device)], *moments, steps, origins, *scales, [], *_NUMBERS)
    result = moments[0 if signed else 1][0].cpu().view(torch.uint8)
    assert torch.equal(scales[0][0].cpu(), torch.ones(len(rows)))
    if kind == "4bit":
        result = torch.stack([result >> 4, result & 15], 1).reshape(-1)
    return result.reshape(-1, block)[:, 1:].reshape(-1)[: numbers.numel()].long()


def borders(kind: str, signed: bool) -> Tensor:
    """Return the middles between neighbouring values, fp64."""
    values = dynamic_codes.code_map(kind, signed).double()
    return (values[1:] + values[:-1]) / 2


@at("sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("kind", ["8bit", "4bit"])
@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest(place: str, kind: str, signed: bool) -> None:
    edges = borders(kind, signed)
    ulps = torch.tensor([-4096.0, -64, -17, -16, -8, -2, -1, 0, 1, 2, 8, 16, 17, 64, 4096], dtype=torch.float64)
    near = (edges[:, None] * (1 + ulps * 2.0**-23)).reshape(-1)
    sweep = (torch.arange(103 << 5, 127 << 5, dtype=torch.int32) << 18).view(F32).double()  # of all binades
    sides = (sweep, -sweep) if signed else (sweep,)
    numbers = torch.cat([near, *sides, torch.tensor([0.0, 1.0, 1e-30], dtype=torch.float64)])
    numbers = (numbers if signed else numbers.sqrt()).float()
    exact = numbers.double() if signed else (numbers * numbers).double()
    found = codes_written(place, numbers, kind, signed)
    slack = exact.abs() * _OUTSIDE
    low, high = (torch.searchsorted(edges, side.contiguous()) for side in (exact - slack, exact + slack))
    assert bool(((found == low) | (found == high)).all())


@at("sm_80", "cuda")
@pytest.mark.parametrize("kind", ["8bit", "4bit"])
def test_values_are_those_of_the_map(place: str, kind: str) -> None:
    """A step that keeps moments as they are, of which the weight is the quotient."""
    first, second = (dynamic_codes.code_map(kind, signed) for signed in (True, False))
    m, v = (t.reshape(-1) for t in torch.meshgrid(first, second[1:], indexing="ij"))
    block = dynamic_codes.BLOCKS[kind]
    m, v = (torch.nn.functional.pad(t, (0, -t.numel() % (block - 1))).reshape(-1, block - 1) for t in (m, v))
    m, v = (torch.cat([torch.ones(len(t), 1), t], 1).reshape(-1) for t in (m, v))
    with running_on(place) as device:
        pairs = [dynamic_codes.encode(t, kind, i == 0) for i, t in enumerate((m, v))]
        moments, scales = ([[pair[k].to(device)] for pair in pairs] for k in (0, 1))
        before = [t[0].cpu().clone() for t in moments]
        weights, grads = ([torch.zeros_like(m, device=device)] for _ in range(2))
        steps, origins = [torch.zeros((), device=device)], [torch.zeros(2, dtype=torch.int64, device=device)]
        numbers = (None, None, None, 1e-4, 1 - 2.0**-20, 1 - 2.0**-20, 1e-8, 0.0, False, 0, False)
        multi_adamw_codes.STEP(weights, grads, *moments, steps, origins, *scales, [], *numbers)
    rest = 2.0**-20
    kept = [dynamic_codes.decode(codes, pair[1], i == 0, m.numel()).double() * (1 - rest)
            for i, (codes, pair) in enumerate(zip(before, pairs, strict=True))]  # fmt: skip
    expected = -1e-4 / rest * kept[0] / ((kept[1] / rest).sqrt() + 1e-8)
    assert torch.equal(moments[0][0].cpu().view(torch.uint8), before[0].view(torch.uint8))
    assert torch.equal(moments[1][0].cpu().view(torch.uint8), before[1].view(torch.uint8))
    torch.testing.assert_close(weights[0].cpu().double(), expected, rtol=2e-6, atol=1e-12)
