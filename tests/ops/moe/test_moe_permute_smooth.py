"""Permuted rows as fp8 of scaled values: the bits of scaling and quantising row by row, or channel by channel."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_same_bits, poisoned, running_on
from support.fp8_cases import DEVICE_CODE, wild
from support.moe_permute_cases import close, numbers, on, routed
from support.places import ORDERS, at, emulated, error_tests
from torch import Tensor

import rtkernels
from rtkernels.ops.moe.moe_index_layout import MoeIndex

moe_permute_smooth, moe_permute_smooth_t = rtkernels.moe_permute_smooth, rtkernels.moe_permute_smooth_t
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INPUTS = (torch.bfloat16, torch.float32, E4M3, torch.float16, E5M2)


def some(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Wild numbers, finite if they are codes: torch cannot convert all others."""
    return wild(rows, cols, dtype) if dtype.itemsize > 1 else numbers(rows, cols).mul(20).to(dtype)


def rows_of(x: Tensor, index: MoeIndex) -> tuple[Tensor, Tensor]:
    """Tokens and experts of the rows, -1 in pad rows."""
    choice = index.slots.clamp(min=0).long()
    pad = index.slots < 0
    token = torch.where(pad, -1, choice // index.rows.shape[1])
    return token, torch.where(pad, -1, index.experts.flatten()[choice].long())


def test_reference_is_the_definition():
    index = routed(12, 5, 3, 4)
    x, smooth, scale = numbers(12, 24), numbers(5, 24, seed=2).abs() + 0.1, numbers(12, 3, seed=3)
    got = moe_permute_smooth(x, index, smooth, scale=scale, divide=True)
    token, expert = rows_of(x, index)
    for r in range(len(index.slots)):
        z = torch.zeros(24)
        if token[r] >= 0:
            z = x[token[r]] * scale[token[r]].repeat_interleave(8) * smooth[expert[r]].reciprocal()
        q, s = rtkernels.quantize_fp8(z[None], granularity="row")
        assert_same_bits(got.q[r], q[0])
        assert_same_bits(got.scale[r : r + 1], s)
    assert got.dot is None


@at(*DEVICE_CODE)
@pytest.mark.parametrize("cols", [64, 36, 1032, 8])
def test_rows_on_the_device(cols: int, place: str):
    index = routed(13, 5, 3, 4)
    smooth, count = numbers(5, cols, seed=2).abs() + 0.1, len(index.slots)
    for i, dtype in enumerate(INPUTS):
        x = some(13, cols, dtype)
        scale = (None, numbers(13, seed=3), numbers(13, 4, seed=3))[i % 3]
        fp8, pow2 = E5M2 if i == 4 else E4M3, i % 2 == 1
        options = {"dtype": fp8, "pow2_scale": pow2, "divide": i == 1}
        want = moe_permute_smooth(x, index, smooth, scale=scale, **options)
        with running_on(place) as device:
            there = None if scale is None else scale.to(device)
            got = moe_permute_smooth(x.to(device), on(device, index), smooth.to(device), scale=there, **options)
        assert_same_bits(got.q.cpu(), want.q, f"q of {dtype}")
        assert_same_bits(got.scale.cpu(), want.scale, f"scale of {dtype}")
        assert got.q.shape == (count, cols)


@at(*DEVICE_CODE)
def test_dot_products(place: str):
    index = routed(13, 5, 3, 4)
    smooth = numbers(5, 72, seed=2)
    for dtype, kind in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (E4M3, torch.bfloat16)):
        x, scale = numbers(13, 72).to(dtype), numbers(13, seed=3)
        other = numbers(len(index.slots), 72, dtype=kind, seed=4)
        want = moe_permute_smooth(x, index, smooth, scale=scale)
        with running_on(place) as device:
            args = x.to(device), on(device, index), smooth.to(device)
            got = moe_permute_smooth(*args, scale=scale.to(device), tokens=other.to(device))
        token, _ = rows_of(x, index)
        terms = x.double()[token] * scale.double()[token, None] * other.double() * (token >= 0)[:, None]
        close(got.dot.cpu(), terms.sum(1), terms.abs().sum(1), 20, f"dot of {dtype}")
        assert_same_bits(got.q.cpu(), want.q)
        assert_same_bits(got.scale.cpu(), want.scale)


@at("cpu", *DEVICE_CODE)
@pytest.mark.parametrize("case", [(150, 3, 2, 32, 136), (40, 9, 2, 1, 37)], ids=str)
def test_channels(case: tuple[int, ...], place: str):
    tokens, experts, top_k, pad, cols = case
    index = routed(tokens, experts, top_k, pad)
    count = len(index.slots)
    for i, dtype in enumerate(INPUTS[:4]):
        x = some(tokens, cols, dtype)
        row = None if i == 1 else numbers(count, seed=2)
        scale = numbers(tokens, seed=3) if i != 0 else None
        smooth = numbers(cols, seed=4) if i % 2 == 0 else None
        token, _ = rows_of(x, index)
        times = torch.ones(count) if scale is None else scale[token]
        times = times if row is None else times * row
        z = (x.float()[token] if smooth is None else x.float()[token] * smooth) * times[:, None]
        z = torch.where((token >= 0)[:, None], z, 0)
        with running_on(place) as device:
            factors = [None if t is None else t.to(device) for t in (row, scale, smooth)]
            got = moe_permute_smooth_t(
                x.to(device), on(device, index), factors[0], scale=factors[1], smooth=factors[2], pow2_scale=i == 2
            )
        q_t, scales = got.q_t.cpu(), got.scale.cpu()
        for e in range(experts):
            first, end = int(index.offsets[e]), int(index.offsets[e + 1])
            want = rtkernels.quantize_fp8(z[first:end].t().contiguous(), granularity="row", pow2_scale=i == 2)
            assert_same_bits(q_t[first * cols : end * cols].view(cols, -1), want[0], f"{dtype}, expert {e}")
            assert_same_bits(scales[e], want[1], f"scales of {dtype}, expert {e}")
        assert not q_t[int(index.offsets[-1]) * cols :].float().any()


@emulated
@pytest.mark.parametrize("order", ORDERS)
def test_order_of_threads_does_not_matter(order: str | int):
    index = routed(150, 3, 2, 32)
    x, row, smooth = wild(150, 136, torch.bfloat16), numbers(len(index.slots)), numbers(3, 136)
    want = *moe_permute_smooth_t(x, index, row), *moe_permute_smooth(x, index, smooth)[:2]
    with rtkernels.emulate("sm_90", order=order), poisoned():
        got = *moe_permute_smooth_t(x, index, row), *moe_permute_smooth(x, index, smooth)[:2]
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b, f"order {order}")


@at("cpu", *DEVICE_CODE)
def test_an_index_that_is_wrong_stays_inside(place: str):
    index = routed(20, 4, 2, 4)
    slots, experts, offsets = index.slots.clone(), index.experts.clone(), index.offsets.clone()
    slots[::5], experts[3:9], offsets[1] = 2**31 - 1, 2**30, 2**31 - 1
    with running_on(place) as device:
        bad = on(device, index._replace(slots=slots, experts=experts, offsets=offsets))
        x = torch.ones(20, 64, device=device)
        got = moe_permute_smooth(x, bad, torch.ones(4, 64, device=device))
        assert not got.q[::5].float().any()
        moe_permute_smooth_t(x, bad)


@at("cpu", *DEVICE_CODE)
def test_nothing_to_do(place: str):
    index = routed(4, 3, 2, rows=0)
    with running_on(place) as device:
        x, there = torch.ones(4, 16, device=device), on(device, index)
        assert moe_permute_smooth(x, there, torch.ones(3, 16, device=device)).q.shape == (0, 16)
        got = moe_permute_smooth_t(x, there)
        assert got.q_t.shape == (0,) and got.scale.shape == (3, 16)


INDEX, X, S = routed(4, 3, 2), torch.ones(4, 16), torch.ones(3, 16)
BAD = {
    "smooth": (lambda: moe_permute_smooth(X, INDEX, S[:, 1:]), r"smooth has shape \(3, 15\); expected"),
    "smooth dtype": (lambda: moe_permute_smooth(X, INDEX, S.half()), "smooth has dtype float16; expected one of"),
    "scale": (lambda: moe_permute_smooth(X, INDEX, S, scale=X[:, :3]), "expected a divisor of the 16 columns of x"),
    "tokens": (lambda: moe_permute_smooth(X, INDEX, S, tokens=X), r"tokens has shape \(4, 16\); expected \(8, 16\)"),
    "x": (lambda: moe_permute_smooth(X.double(), INDEX, S), "x has dtype float64; expected one of"),
    "factor": (lambda: moe_permute_smooth_t(X, INDEX, X[0]), r"row_factor has shape \(16,\); expected \(8,\)"),
    "columns": (lambda: moe_permute_smooth_t(X, INDEX, smooth=S[0, 1:]), r"smooth has shape \(15,\); expected \(16,\)"),
}
test_errors, test_errors_in_the_launchers = error_tests(BAD)


def emulated_coverage() -> None:
    """Launch every kernel of the op in the emulator; the registry's test asks for it when this file has not run."""
    with rtkernels.emulate("sm_90"):
        moe_permute_smooth(X, INDEX, S)
        moe_permute_smooth_t(X.bfloat16(), INDEX)
