"""Smooth and per-channel fp8: the bits of the slow recipe, calibration, experts, the way back, errors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_close, assert_same_bits, running_on
from support.fp8_cases import DEVICE_CODE, VIEWS, same_strides, wild
from support.fp8_reference import E4M3, E5M2, slow
from support.places import DTYPES, ORDERS, at, emulated, error_tests, short
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.ops.quant import smooth_quant as module

quantize_fp8_smooth, dequantize_fp8_smooth = rtkernels.quantize_fp8_smooth, rtkernels.dequantize_fp8_smooth
quantize_fp8, dequantize_fp8 = rtkernels.quantize_fp8, rtkernels.dequantize_fp8


def factors(size: int, seed: int = 0) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed)) * 3 + 0.1


def product(x: Tensor, column: Tensor | None = None, row: Tensor | None = None) -> Tensor:
    """z as a matrix, by NumPy: every product rounded to fp32."""
    z = x.float().reshape(x.shape[:-1].numel(), x.shape[-1]).numpy()
    with np.errstate(all="ignore"):
        z = z if column is None else z * column.numpy()
        z = z if row is None else z * row.numpy()[:, None]
    return torch.from_numpy(z)


def same(got: tuple[Tensor, Tensor], z: Tensor, dtype: torch.dtype, pow2: bool, what: str, pad_to: int = 0) -> None:
    """Compare with the slow recipe for z, whose rows share scales; pad_to: for transposed codes."""
    q, scale = (t.cpu() for t in got[:2])
    if z.numel() == 0:
        assert q.numel() == 0 or not q.view(torch.uint8).any()
        return
    codes, scales = slow(z.t() if pad_to else z, "row", "row", dtype, pow2)
    if pad_to:
        codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % pad_to)))
    np.testing.assert_array_equal(q.view(torch.uint8).reshape(codes.shape).numpy(), codes, err_msg=what)
    np.testing.assert_array_equal(scale.flatten().numpy(), scales, err_msg=what)


# ---- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@at()
def test_rows(place: str, dtype: torch.dtype) -> None:
    for i, (name, view) in enumerate(VIEWS.items()):
        x, code, pow2 = view(dtype), (E4M3, E5M2)[i % 2], i % 3 == 0
        smooth = factors(x.shape[-1])
        with running_on(place) as device:
            moved = same_strides(x, device)
            got = quantize_fp8_smooth(moved, smooth.to(device), dtype=code, pow2_scale=pow2)
            more = quantize_fp8_smooth(moved, smooth.to(device), dtype=code, pow2_scale=pow2, with_amax=True)
        assert got.amax is None and got.q.is_contiguous() and got.q.dtype == code
        same(got, product(x, smooth), code, pow2, name)
        assert_same_bits(more.q.cpu(), got.q.cpu(), name)
        assert_same_bits(more.scale.cpu(), got.scale.cpu(), name)
        assert_same_bits(more.amax.cpu(), rtkernels.column_absmax(x), name)


@at("cpu", *DEVICE_CODE)
def test_divide_and_leading_dimensions(place: str) -> None:
    x, smooth = wild(24, 72, torch.bfloat16).view(2, 3, 4, 72), factors(80)[3:75]
    with running_on(place) as device:
        got = quantize_fp8_smooth(x.to(device), same_strides(smooth, device), divide=True)
    assert got.q.shape == x.shape and got.scale.shape == x.shape[:-1]
    reciprocal = torch.from_numpy(np.float32(1) / smooth.numpy())
    same(got, product(x, reciprocal), E4M3, False, "divided")


@at("cpu", *DEVICE_CODE)
def test_experts(place: str) -> None:
    x, counts = wild(40, 72, torch.bfloat16), [3, 0, 30, 5]
    smooth = torch.stack([factors(72, seed) for seed in range(4)])
    lines = smooth.repeat_interleave(torch.tensor([3, 0, 30, 7]), 0)
    with running_on(place) as device:
        for kind in (torch.int32, torch.int64):
            for view in (slice(None), slice(1, None)):
                got = quantize_fp8_smooth(
                    same_strides(x[:, view], device),
                    smooth[:, view].to(device),
                    counts=torch.tensor(counts, dtype=kind, device=device),
                )
                same(got, product(x[:, view], lines[:, view]), E4M3, False, "experts")


# ---- columns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@at()
def test_channels(place: str, dtype: torch.dtype) -> None:
    for i, (name, view) in enumerate(VIEWS.items()):
        if name == "one long row":
            continue
        x, code, pow2, pad_to = view(dtype), (E4M3, E4M3, E5M2)[i % 3], i % 2 == 0, (1, 32, 7)[i % 3]
        row, column = factors(x.shape[0], 1), factors(x.shape[1], 2)
        with running_on(place) as device:
            moved, row_there, column_there = same_strides(x, device), row.to(device), column.to(device)
            plain = quantize_fp8(moved, granularity="channel", dtype=code, pow2_scale=pow2)
            options = {"granularity": "channel", "dtype": code, "pow2_scale": pow2, "pad_to": pad_to}
            rows = quantize_fp8_smooth(moved, row_factor=row_there, **options)
            both = quantize_fp8_smooth(moved, column_there, row_factor=row_there, **options)
        assert plain[0].shape == (x.shape[1], x.shape[0]) and plain[1].shape == x.shape[1:]
        same(plain, product(x), code, pow2, name, pad_to=1)
        same(rows, product(x, None, row), code, pow2, f"{name}, rows", pad_to)
        same(both, product(x, column, row), code, pow2, f"{name}, both", pad_to)


@at("cpu", *DEVICE_CODE)
def test_codes_quantised_anew(place: str) -> None:
    # From codes of one recipe to transposed ones of another: dequantised on the way, never stored in between.
    for cols in (64, 72, 33):
        x, smooth, other = torch.randn(150, cols), factors(cols), factors(150, 3)
        first = quantize_fp8_smooth(x, smooth, divide=True)
        with running_on(place) as device:
            got = quantize_fp8_smooth(
                first.q.to(device),
                smooth.to(device),
                row_factor=(first.scale * other).to(device),
                granularity="channel",
                pad_to=16,
            )
        z = product(first.q, smooth, first.scale * other)
        same(got, z, E4M3, False, f"{cols}", pad_to=16)
        back = dequantize_fp8_smooth(
            got.q, got.scale, row_factor=other.to(got.q.device), granularity="channel", rows=150, dtype=torch.float32
        )
        assert (back.cpu() - x).norm() < 0.06 * x.norm()


@emulated
@pytest.mark.parametrize("order", ORDERS)
def test_order_of_threads_does_not_matter(order: str | int) -> None:
    x, smooth, row = wild(150, 264, torch.bfloat16), factors(264), factors(150)
    with rtkernels.emulate("sm_90", order=order):
        same(quantize_fp8_smooth(x, smooth, with_amax=True), product(x, smooth), E4M3, False, "rows")
        got = quantize_fp8_smooth(x, smooth, row_factor=row, granularity="channel")
    same(got, product(x, smooth, row), E4M3, False, "channel", pad_to=1)


# ---- the way back ---------------------------------------------------------------------------------------------------


@at("cpu", *DEVICE_CODE)
@pytest.mark.parametrize("code", (E4M3, E5M2), ids=short)
def test_there_and_back(place: str, code: torch.dtype) -> None:
    x, smooth, row = torch.randn(70, 40), factors(40), factors(70)
    counts = torch.tensor([30, 40])
    step = {E4M3: 2.0**-4, E5M2: 2.0**-3}[code] * 1.001
    with running_on(place) as device:
        there = [t.to(device) for t in (x, smooth, row)]
        lines, counts = torch.stack([there[1], there[1] * 2]), counts.to(device)
        for name, scales, back_options in (
            ("row", (there[1],), {}),
            ("row, divided", (there[1],), {"divide": True}),
            ("experts", (lines,), {"counts": counts}),
            ("channel", (there[1],), {"granularity": "channel", "row_factor": there[2]}),
            ("channel, divided", (there[1],), {"granularity": "channel", "divide": True}),
        ):
            got = quantize_fp8_smooth(there[0], *scales, dtype=code, **back_options)
            for dtype in (torch.float32, torch.bfloat16):
                y = dequantize_fp8_smooth(got.q, got.scale, *scales, dtype=dtype, **back_options)
                assert y.dtype == dtype and y.shape == x.shape, name
                error = (y.cpu().double() - x.double()).abs()
                # Small values are multiples of the smallest step, whose size depends on the factors.
                assert (error <= step * x.abs() + 0.02 + (0.01 * x.abs() if dtype == torch.bfloat16 else 0)).all(), name


@at("cpu", *DEVICE_CODE)
def test_channels_there_and_back(place: str) -> None:
    x = torch.randn(300, 40, generator=torch.Generator().manual_seed(3))
    with running_on(place) as device:
        q, scale = quantize_fp8(x.to(device), granularity="channel")
        y = dequantize_fp8(q, scale, granularity="channel", dtype=torch.float32)
    exact = q.cpu().float().double().t() * scale.cpu().double()
    assert_close(y.cpu(), exact, c=1.01)
    assert ((y.cpu() - x).abs() <= 2.0**-4 * x.abs() + 2.0**-10 * scale.cpu()).all()


def test_smooth_factors() -> None:
    amax, weight = torch.tensor([4.0, 0.0, 16.0]), torch.tensor([1.0, 4.0, 9.0])
    torch.testing.assert_close(rtkernels.smooth_factors(amax, floor=0.25), torch.tensor([0.5, 2.0, 0.25]))
    torch.testing.assert_close(rtkernels.smooth_factors(amax, weight, floor=1.0), torch.tensor([0.5, 2.0, 0.75]))
    got = rtkernels.smooth_factors(amax, weight, floor=1.0, pow2=True)
    assert got.tolist() == [0.5, 2.0, 1.0]


@at("cpu", "sm_90", "cuda")
def test_shards_make_the_whole(place: str) -> None:
    weight, smooth = wild(9, 40, torch.float32).nan_to_num(0.0, 0.0, 0.0), factors(40)
    for factor, code in ((None, E4M3), (smooth, E4M3), (smooth, E5M2)):
        want = (
            quantize_fp8(weight, granularity="row", dtype=code)
            if factor is None
            else quantize_fp8_smooth(weight, factor, dtype=code)[:2]
        )
        for cuts in ((0, 360), (0, 80, 360), (0, 100, 130, 330, 360), (0, 5, 35, 40, 41, 360)):
            with running_on(place) as device:
                q = torch.full((9, 40), 0.5, device=device).to(code)
                scale = torch.zeros(9, device=device)
                for begin, end in pairwise(cuts):
                    edges = want[1][[begin // 40, (end - 1) // 40]].to(device)
                    there = None if factor is None else factor.to(device)
                    shard = weight.view(-1)[begin:end].to(device)
                    got = rtkernels.quantize_fp8_shard_(q, scale, shard, begin, there, edge_scales=edges)
                    assert got[0] is q and got[1] is scale
            assert_same_bits(q.cpu(), want[0], f"{cuts}")
            assert_same_bits(scale.cpu(), want[1], f"{cuts}")


@at("cpu", "sm_80", "sm_90", "cuda")
def test_edge_scales_of_shards(place: str) -> None:
    weight = wild(4, 40, torch.float32).nan_to_num(0.0, 0.0, 0.0)
    exact = quantize_fp8(weight, granularity="row")[1]
    want = quantize_fp8(weight, granularity="row", pow2_scale=True)
    assert not torch.equal(exact, want[1])
    with running_on(place) as device:
        for stores in (True, False):
            q, scale = torch.zeros(4, 40, device=device).to(E4M3), torch.full((4,), -1.0, device=device)
            for begin, end in pairwise((0, 50, 55, 90, 160)):
                shard = weight.view(-1)[begin:end].to(device)
                edges = exact[[begin // 40, (end - 1) // 40]].to(device)
                before = scale.clone()
                rtkernels.quantize_fp8_shard_(
                    q, scale, shard, begin, edge_scales=edges, pow2_scale=True, store_first_scale=stores
                )
                changed = (scale != before).nonzero().flatten().tolist()
                assert changed == [row for row in range(4) if begin <= row * 40 < end]
            assert_same_bits(q.cpu(), want[0], "codes")
            assert_same_bits(scale.cpu(), want[1], "scales")
        # A shard that begins inside a row, alone: its first scale is stored, or left out.
        for stores, first in ((True, want[1][1].item()), (False, -1.0)):
            q, scale = torch.zeros(4, 40, device=device).to(E4M3), torch.full((4,), -1.0, device=device)
            rtkernels.quantize_fp8_shard_(
                q, scale, weight.view(-1)[50:90].to(device), 50, edge_scales=exact[1:3].to(device), pow2_scale=True,
                store_first_scale=stores,
            )  # fmt: skip
            assert scale.tolist() == [-1.0, first, want[1][2].item(), -1.0]


def test_edge_scales_that_are_no_numbers() -> None:
    q, scale, edges = torch.zeros(2, 8).to(E4M3), torch.zeros(2), torch.tensor([torch.nan, torch.inf])
    rtkernels.quantize_fp8_shard_(q, scale, torch.ones(8), 4, edge_scales=edges, pow2_scale=True)
    assert scale[0].isnan() and scale[1].isinf()


# ---- errors, other ways to call it ----------------------------------------------------------------------------------

X, S, C = torch.ones(4, 8), torch.ones(8), torch.tensor([1, 3])
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: quantize_fp8_smooth(X.double(), S), "x has dtype float64; expected one of"),
    "result": (lambda: quantize_fp8_smooth(X, S, dtype=torch.float16), "the result has dtype float16; expected one of"),
    "no tensor": (lambda: quantize_fp8_smooth(X, [1.0]), "smooth is a list beside a torch.Tensor"),
    "alpha": (lambda: rtkernels.smooth_factors(S, alpha=2.0), "alpha is 2.0; expected 0 to 1"),
    "smooth shape": (
        lambda: quantize_fp8_smooth(X, S[:4]),
        r"smooth has shape \(4,\); expected \(8,\), one per column",
    ),
    "smooth dtype": (lambda: quantize_fp8_smooth(X, S.half()), "smooth has dtype float16; expected one of float32"),
    "no smooth": (lambda: quantize_fp8_smooth(X), "smooth is None; granularity 'row' needs"),
    "granularity": (lambda: quantize_fp8_smooth(X, S, granularity="block"), "granularity is 'block'; expected one of"),
    "row factor": (lambda: quantize_fp8_smooth(X, S, row_factor=S[:4]), "row_factor requires granularity 'channel'"),
    "row factor shape": (
        lambda: quantize_fp8_smooth(X, row_factor=S, granularity="channel"),
        r"row_factor has shape \(8,\); expected \(4,\), one per row of x",
    ),
    "pad": (lambda: quantize_fp8_smooth(X, S, pad_to=4), "pad_to is 4; expected 1 for granularity 'row'"),
    "pad range": (lambda: quantize_fp8_smooth(X, granularity="channel", pad_to=0), "pad_to is 0; expected 1 to 65536"),
    "counts": (lambda: quantize_fp8_smooth(X, S, counts=C), r"smooth has shape \(8,\); expected int32 or int64"),
    "counts length": (
        lambda: quantize_fp8_smooth(X, S.expand(3, 8), counts=C),
        "counts has length 2; expected 3, that of smooth",
    ),
    "channel": (lambda: quantize_fp8_smooth(X, S, counts=C, granularity="channel"), "require granularity 'row'"),
    "shard": (
        lambda: rtkernels.quantize_fp8_shard_(X.to(E4M3), X[:, 0].clone(), S, 30),
        r"shard has shape \(8,\) and offset 30; expected one dimension, inside the 32 elements of q",
    ),
    "shard edges": (
        lambda: rtkernels.quantize_fp8_shard_(X.to(E4M3), X[:, 0].clone(), S, 3),
        r"edge_scales: expected float32 \[2\], the scales of the first and last row",
    ),
    "no dimensions": (lambda: quantize_fp8(X[0, 0], granularity="channel"), "x has no dimensions"),
    "scale layout": (
        lambda: quantize_fp8(X, granularity="channel", scale_layout="column"),
        "granularity 'channel' requires scale_layout 'row' and layout 'row'",
    ),
    "scale shape": (
        lambda: dequantize_fp8(X.to(E4M3), S, granularity="channel"),
        r"scale has shape \(8,\); expected \(4,\) for granularity 'channel'",
    ),
}


test_errors, test_launchers_raise_the_same_messages = error_tests(BAD)


@at("cpu", "cuda")
def test_torch_compile(place: str) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: Tensor, smooth: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        first = quantize_fp8_smooth(x * 2, smooth, with_amax=True)
        second = quantize_fp8_smooth(x, torch.stack([smooth, smooth]), counts=counts)
        q, scale = quantize_fp8(x, granularity="channel")
        return *first, second.q, second.scale, q, scale, dequantize_fp8(q, scale, granularity="channel")

    x = torch.randn(4, 8, device=place, requires_grad=True)
    results = run(x, S.to(place), C.to(place))
    assert not any(t.requires_grad for t in results)
    assert_same_bits(results[0], quantize_fp8_smooth(x * 2, S.to(place)).q)
    assert_same_bits(results[5], quantize_fp8(x, granularity="channel")[0])


def test_bench_rows_agree_with_torch() -> None:
    x = torch.randn(16, 32).bfloat16()
    for row in rows_of(module.OP.name):
        inputs = {"x": x} if row.name == "quantize_fp8_channel" else {"x": x, "smooth": factors(32)}
        for got, want in zip(row.ours(**inputs), row.torch(**inputs), strict=True):
            torch.testing.assert_close(got.float(), want.float(), rtol=0.07, atol=1e-6)


def emulated_coverage() -> None:
    """Launch every kernel of the op in the emulator; test_registry.py checks that it does."""
    with rtkernels.emulate("sm_90"):
        quantize_fp8_smooth(X, S)
        quantize_fp8(X, granularity="channel")


# ---- on the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("cols", (4096, 8192, 16384, 20000))
def test_bench_shapes(cols: int) -> None:
    x, smooth = wild(300, cols, torch.bfloat16), factors(cols)
    got = quantize_fp8_smooth(x.cuda(), smooth.cuda(), with_amax=True)
    want = quantize_fp8_smooth(x, smooth, with_amax=True)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a.cpu(), b)
    for a, b in zip(quantize_fp8(x.cuda(), granularity="channel"), quantize_fp8(x, granularity="channel"), strict=True):
        assert_same_bits(a.cpu(), b)


@pytest.mark.gpu
def test_graph_capture() -> None:
    x, smooth = torch.randn(300, 128, device="cuda"), factors(128).cuda()

    def run() -> tuple[Tensor, ...]:
        return *quantize_fp8_smooth(x, smooth, with_amax=True), *quantize_fp8(x, granularity="channel")

    replay = captured(run)
    x.copy_(torch.randn_like(x))
    assert_equal_bits(replay(), run())


@pytest.mark.gpu
@pytest.mark.slow
def test_beyond_two_to_the_31() -> None:
    tail = wild(130, 2**15, torch.bfloat16).nan_to_num(0.0, 0.0, 0.0)
    x = torch.zeros(2**16 + 130, 2**15, dtype=torch.bfloat16, device="cuda")
    x[-130:] = tail.cuda()
    smooth = factors(2**15)
    got, want = quantize_fp8_smooth(x, smooth.cuda()), quantize_fp8_smooth(tail, smooth)
    assert_same_bits(got.q[-130:].cpu(), want.q)
    q, scale = quantize_fp8(x, granularity="channel")
    assert_same_bits(scale.cpu(), quantize_fp8(tail, granularity="channel")[1])
    assert_same_bits(q[:, -130:].cpu(), quantize_fp8(tail, granularity="channel")[0])
