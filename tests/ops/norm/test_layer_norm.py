"""Layer normalisation: numerics at every place it can run, gradients, errors, compilation, and the GPU's own ways."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_no_worse, running_on
from support.layer_norm_cases import CASES, check, layer_norm, make
from support.places import DTYPES, at, emulated, short

import rtkernels
from rtkernels.ops.norm import layer_norm_plan as plans
from rtkernels.runtime import targets
from rtkernels.runtime.launch.device import DeviceInfo, device_info, shared_limit
from rtkernels.runtime.operator.declared import Meta


@pytest.mark.parametrize("case", CASES)
@at()
def test_every_layout(place: str, case: str) -> None:
    with running_on(place) as device:
        check(make(case, torch.bfloat16, device))


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=short)
@at()
def test_every_dtype(place: str, dtype: torch.dtype) -> None:
    cases = ("both", "odd", "weight_fp32", "residual", "residual_odd", "far_mean", "hidden_12288", "one_column")
    cases += ("rows_of_1536", "hidden_4096", "hidden_10752", "hidden_16384")
    with running_on(place) as device:
        for case in cases:
            check(make(case, dtype, device))


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    for case in ("both", "residual", "residual_many_rows", "odd", "rows_of_2048", "hidden_20480"):
        with running_on("sm_90") as device:
            check(make(case, torch.bfloat16, device))
    with running_on("sm_80") as device:  # without TMA another kernel computes gradients
        check(make("both", torch.bfloat16, device))


@at("sm_90", "cuda")
def test_no_worse_than_torch(place: str) -> None:
    with running_on(place) as device:
        for dtype in DTYPES:
            generator = torch.Generator().manual_seed(1)
            x, dy = (torch.randn(64, 512, generator=generator).to(dtype).to(device) for _ in range(2))
            weight, bias = (torch.randn(512, generator=generator).to(dtype).to(device) for _ in range(2))
            results = []
            for wide in (False, False, True):
                leaves = [(t.double() if wide else t).detach().requires_grad_() for t in (x, weight, bias)]
                y = layer_norm(*leaves) if not results else F.layer_norm(leaves[0], (512,), *leaves[1:])
                y.backward(dy.to(y.dtype))
                results.append((y.detach(), *(leaf.grad for leaf in leaves)))
            for what, ours, theirs, exact in zip(("y", "dx", "dweight", "dbias"), *results, strict=True):
                factor = 1.05 if dtype != torch.float32 else 1.5  # rsqrt is approximate to 2 units
                assert_no_worse(ours, theirs, exact, what=f"{what} {dtype}", factor=factor)


@at("cpu", "sm_90", "cuda")
def test_nan_and_infinity_as_torch(place: str) -> None:
    with running_on(place) as device:
        for special in (torch.nan, torch.inf, -torch.inf):
            for cols in (32, 33):
                x = torch.randn(4, cols, device=device)
                x[1, 7] = special
                ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
                y, wanted = layer_norm(ours), F.layer_norm(theirs, (cols,))
                y.sum().backward()
                wanted.sum().backward()
                assert torch.equal(y.isnan(), wanted.isnan()) and y[1].isnan().all()
                assert torch.equal(ours.grad.isnan(), theirs.grad.isnan())


# Rows that each of the kernels gets, in the emulator and on a GPU with 132 SMs.
SHAPES = ((3, 40), (5, 1000), (3, 1003), (23, 1536), (9, 4096), (17, 2040), (1, 20480))
GPU_SHAPES = ((1200, 1536), (700, 2040), (400, 4096), (300, 12288))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@at()
def test_rows_of_equal_numbers_give_the_bias(place: str, dtype: torch.dtype) -> None:
    """Bit for bit, as in torch, although 1/sqrt(eps) amplifies every rounding of the mean by 300."""
    with running_on(place) as device:
        for rows, cols in SHAPES + (GPU_SHAPES if place == "cuda" else ()):
            bias = torch.randn(cols, device=device).to(dtype)
            x = torch.full((rows, cols), 30000.123, device=device).to(dtype).requires_grad_()
            weight = torch.ones(cols, device=device, dtype=dtype, requires_grad=True)
            y = layer_norm(x, weight, bias)
            assert torch.equal(y, bias.expand_as(y)), (rows, cols)
            y.backward(torch.ones_like(y))
            assert weight.grad.abs().max() == 0, (rows, cols)
            assert x.grad.abs().max() < 1e-2, (rows, cols)  # 300 * (1 - 1)
            for layout in ("row", "both") if cols < 1100 else ():
                kept = rtkernels.layer_norm_fp8(x.detach(), bias=bias, keep=True, layout=layout).y
                assert torch.equal(kept, bias.expand_as(kept)), (rows, cols, layout)


@at("cpu", "sm_80", "sm_90", "cuda")
def test_squares_that_overflow_give_0_as_in_torch(place: str) -> None:
    with running_on(place) as device:
        for dtype in (torch.bfloat16, torch.float32):
            for rows, cols in SHAPES + (GPU_SHAPES if place == "cuda" else ()):
                x = (torch.randn(rows, cols, device=device) * 1e20).to(dtype).requires_grad_()
                y = layer_norm(x)
                y.backward(torch.ones_like(y))
                assert (y == 0).all() and (x.grad == 0).all(), (dtype, rows, cols)
                if cols > 1100:
                    continue
                codes = rtkernels.layer_norm_fp8(x.detach(), layout="both")
                for t in (codes.q, codes.q_t):
                    assert (t.float() == 0).all(), (dtype, rows, cols)
                smooth = rtkernels.layer_norm_fp8(x.detach(), smooth=torch.ones(cols, device=device))
                assert (smooth.q.float() == 0).all(), (dtype, rows, cols)


@at("cpu", "sm_80", "sm_90", "cuda")
def test_no_worse_than_torch_far_from_0(place: str) -> None:
    """fp32, a mean 70 to 300000 times the deviation; root mean squares of the errors of y and dx over all rows."""
    with running_on(place) as device:
        generator = torch.Generator().manual_seed(2)
        for rows, cols in SHAPES + (GPU_SHAPES if place == "cuda" else ()):
            for mean, deviation in ((1000, 0.01), (30000, 0.1), (-7, 0.1)):
                x = (torch.randn(rows, cols, generator=generator).double() * deviation + mean).float().to(device)
                dy = torch.randn(rows, cols, generator=generator).to(device)
                results = []
                for t in (x, x, x.double()):
                    leaf = t.clone().requires_grad_()
                    y = F.layer_norm(leaf, (cols,)) if results else layer_norm(leaf)
                    y.backward(dy.to(y.dtype))
                    results.append((y.detach().double(), leaf.grad.double()))
                for what, ours, theirs, exact in zip(("y", "dx"), *results, strict=True):
                    error, other = ((t - exact).square().mean().sqrt() for t in (ours, theirs))
                    assert error <= 1.05 * other + 1e-6 * exact.square().mean().sqrt(), (what, rows, cols, mean)


def test_the_mean_costs_no_digits() -> None:
    x = torch.randn(8, 4096, dtype=torch.float64) + 1000
    got = layer_norm(x.float())
    exact = F.layer_norm(x.float().double(), (4096,))
    assert (got - exact).abs().max() < 2e-4  # E[x^2] - E[x]^2 in fp32 would be wrong in the first digit


# ---- launch geometry ------------------------------------------------------------------------------------------------


def test_rows_that_get_a_block_each() -> None:
    target = targets.parse("sm_90a")
    info = DeviceInfo("test", target, 132, shared_limit(target))
    for rows, vectors, chunks, threads in (
        (1, 1, 2, 32),
        (128, 128, 2, 128),
        (128, 500, 2, 512),
        (128, 1024, 2, 512),
        (128, 2048, 2, 1024),
        (128, 2049, 2, 0),  # does not fit into registers
        (128, 4096, 4, 1024),
        (264, 512, 2, 512),
        (265, 512, 2, 0),  # more than are resident at a time
    ):
        assert plans._small_threads(info, rows, vectors, chunks) == threads, (rows, vectors)


@emulated
@pytest.mark.parametrize("rows", (1, 3, 4, 5, 64, 1000))
def test_backward_plans_hold_together(rows: int) -> None:
    with rtkernels.emulate("sm_90"):
        layer_norm(torch.zeros(1, 8))  # makes device -1 an sm_90
        for cols in (8, 16, 24, 256, 1000, 2048, 4096, 5120, 8192, 16384):
            meta = Meta(torch.bfloat16, torch.Size((rows, cols)), (cols, 1), -1, 0)
            vector = Meta(torch.bfloat16, torch.Size((cols,)), (1,), -1, 0)
            steps = plans.plan_bwd(meta, meta, vector, vector, None, 1e-5, 0.0, True, -1)
            assert len(steps.steps) == 2 and "stats" not in steps.scratch
            assert 1 <= steps.scratch["partial"].shape[0] <= device_info(-1).sm_count


def test_bytes_in_flight() -> None:
    target = targets.parse("sm_90a")
    info = DeviceInfo("test", target, 132, shared_limit(target))
    assert [plans._bulk_ring(info, rows, 512, 2, 2, 16).stages for rows in (1024, 2048, 8192)] == [2, 3, 2]
