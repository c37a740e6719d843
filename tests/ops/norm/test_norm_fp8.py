"""Normalisation to fp8: 1/rms to its error budget, then codes and scales bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import assert_close, assert_same_bits, running_on
from support.norm_fp8_cases import (
    CASES,
    EPS,
    LAYER_NORM_CASES,
    LAYOUTS,
    Inputs,
    NormFp8,
    check,
    compare,
    layer_norm_fp8,
    make,
    rms_norm_fp8,
)
from support.places import DTYPES, ORDERS, at, emulated, short
from torch import Tensor

import rtkernels
from rtkernels.ops.norm import norm_fp8_operators as operators
from rtkernels.ops.norm import norm_fp8_plan as plans
from rtkernels.ops.norm import norm_fp8_ring_plan as ring
from rtkernels.ops.quant.reference import quantize
from rtkernels.runtime.launch.plans import Plans


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make one launch compute statistics and tiles together, for small inputs too; `long`: as for long rows."""

    def switch(*, long: bool = False) -> None:
        monkeypatch.setattr(plans, "_TOGETHER_BYTES", 1)
        monkeypatch.setattr(ring, "_MIN_BYTES", 1 << 60)
        if long:
            monkeypatch.setattr(plans, "_STATS_BYTES", 0)
            monkeypatch.setattr(plans, "_MAX_STATS_BYTES", 0)
        Plans.forget_all()

    yield switch
    Plans.forget_all()


# ---- numerics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@at("cpu", "sm_90", "cuda")
def test_every_layout(place: str, case: str) -> None:
    with running_on(place) as device:
        inputs = make(case, torch.bfloat16, device)
        check(inputs, "row", column=True)
        check(inputs, "transposed", pow2=True)
        check(inputs, "both", keep=True)


@pytest.mark.parametrize("case", ("parts", "odd", "residual"))
@at("sm_80")
def test_older_devices(place: str, case: str) -> None:
    with running_on(place) as device:
        for layout in LAYOUTS:
            check(make(case, torch.bfloat16, device), layout)


@pytest.mark.parametrize("case", ("parts", "odd", "residual"))
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=short)
@at("cpu", "sm_90", "cuda")
def test_every_dtype(place: str, dtype: torch.dtype, case: str) -> None:
    with running_on(place) as device:
        inputs = make(case, dtype, device)
        check(inputs, "row", pow2=True, keep=True)
        check(inputs, "both", pow2=True, column=True)


@at("cpu", "sm_90", "cuda")
def test_statistics_and_tiles_together(place: str, together: Callable[..., None]) -> None:
    rows, cols = (1100, 264) if place != "cuda" else (40_000, 1032)
    with running_on(place) as device:
        generator = torch.Generator().manual_seed(3)
        x, weight, bias = (torch.randn(*s, generator=generator).bfloat16().to(device)
                           for s in ((rows, cols), (cols,), (cols,)))  # fmt: skip
        together()
        check(Inputs(x, weight), "both")
        check_layer_norm(Inputs(x, weight, bias=bias), "both")
        used = list(operators.FORWARD._plans.values())
        together(long=True)
        check(Inputs(x, weight), "transposed")
        used += list(operators.FORWARD._plans.values())
        assert place == "cpu" or all(plan.steps[-1].arguments[-4] for plan in used), "no block computed statistics"


def check_layer_norm(inputs: Inputs, layout: str, **options: Any) -> NormFp8:
    """Run one call: statistics and dequantised values within their error budgets."""
    x, weight, bias = inputs.x, inputs.weight, inputs.bias
    got = layer_norm_fp8(
        x, weight, bias, eps=EPS, offset=inputs.offset, residual=inputs.residual, layout=layout, **options
    )
    h = (x if inputs.residual is None else (x.float() + inputs.residual.float()).to(x.dtype)).double()
    mean = h.mean(-1)
    exact = (h - mean[..., None]) * torch.rsqrt(h.var(-1, unbiased=False) + EPS)[..., None]
    assert_close(got.mean, mean, scale=h.abs().mean(-1), c=8 + x.shape[-1] ** 0.5, what="mean")
    assert_close(got.rstd, torch.rsqrt(h.var(-1, unbiased=False) + EPS), c=8 + x.shape[-1] ** 0.5 / 8, what="rstd")
    if weight is not None:
        exact = exact * (weight.double() + inputs.offset)
    if bias is not None:
        exact = exact + bias.double()
    flat = exact.reshape(-1, exact.shape[-1]).float().cpu()
    if got.q is not None:
        q, scale = quantize(flat, "group", torch.float8_e4m3fn, options.get("pow2_scale", False), "row")
        assert_codes(got.q.reshape(flat.shape), q, got.scale.reshape(scale.shape), scale)
    if got.q_t is not None:
        q, scale = quantize(flat, "group_t", torch.float8_e4m3fn, options.get("pow2_scale", False), "row")
        assert_codes(got.q_t, q, got.scale_t, scale)
    if got.y is not None:
        assert_close(got.y, exact, c=16.0, what="y")
    if inputs.residual is not None:
        assert_same_bits(got.sum.double(), h, "sum")
    return got


def assert_codes(q: Tensor, want: Tensor, scale: Tensor, want_scale: Tensor) -> None:
    """Compare codes of values that differ in their last bits: few codes differ, and none by more than one."""
    # The largest of a column may be the small difference of a number and its row's mean.
    torch.testing.assert_close(scale.cpu(), want_scale, rtol=4e-5, atol=0)
    a, b = q.cpu().view(torch.uint8).int(), want.view(torch.uint8).int()
    small = (a & 0x7F) + (b & 0x7F) <= 2  # around zero the sign may differ
    distance = torch.where(small, 0, (a - b).abs())
    assert distance.max() <= 1 and (distance != 0).float().mean() < 2e-3


@pytest.mark.parametrize("case", LAYER_NORM_CASES)
@at("cpu", "sm_90", "cuda")
def test_layer_norm(place: str, case: str) -> None:
    with running_on(place) as device:
        inputs = make(case, torch.bfloat16, device, LAYER_NORM_CASES)
        check_layer_norm(inputs, "row", keep=True)
        check_layer_norm(inputs, "transposed", pow2_scale=True)
        check_layer_norm(inputs, "both", keep=True)


@pytest.mark.parametrize("case", ("parts", "odd", "one_dim", "transposed", "no_rows"))
@at("cpu", "sm_90", "cuda")
def test_recomputing(place: str, case: str) -> None:
    with running_on(place) as device:
        inputs = make(case, torch.bfloat16, device)
        first = check(inputs, "both", keep=True)
        for rstd in (first.rstd, first.rstd[..., None].expand(*first.rstd.shape, 2)[..., 0]):
            again = rms_norm_fp8(inputs.x, inputs.weight, offset=inputs.offset, layout="transposed", rstd=rstd)
            compare(again, NormFp8(q_t=first.q_t, scale_t=first.scale_t))
        again = rms_norm_fp8(inputs.x, inputs.weight, offset=inputs.offset, keep=True, rstd=first.rstd)
        compare(again, NormFp8(q=first.q, scale=first.scale, y=first.y))
        result = layer_norm_fp8(inputs.x, inputs.weight, layout="both")
        again = layer_norm_fp8(inputs.x, inputs.weight, layout="both", rstd=result.rstd, mean=result.mean)
        compare(again, result._replace(rstd=None, mean=None))


# ---- smoothing ------------------------------------------------------------------------------------------------------


SMOOTH_CASES = ("parts", "odd", "offset", "weight_fp32", "one_dim", "residual", "unaligned", "no_rows", "transposed")


@pytest.mark.parametrize("case", SMOOTH_CASES)
@at("cpu", "sm_90", "cuda")
def test_smoothing(place: str, case: str) -> None:
    with running_on(place) as device:
        inputs = make(case, torch.bfloat16, device)
        x, weight, n = inputs.x, inputs.weight, inputs.x.shape[-1]
        smooth = torch.linspace(0.5, 2.0, n, device=device)
        smooth[0] = 0.0
        options = {"offset": inputs.offset, "residual": inputs.residual, "smooth": smooth}
        got = rms_norm_fp8(x, weight, eps=EPS, calibrate=True, keep=True, **options)
        h = x if inputs.residual is None else got.sum
        v = (h.float() * got.rstd[..., None]).cpu()
        if weight is not None:
            v = v * (weight.float() + inputs.offset).cpu()
        flat = v.reshape(-1, n)
        q, scale = quantize(flat / smooth.cpu().clamp(min=1e-30), "row", torch.float8_e4m3fn, False, "row")
        amax = flat.abs().amax(0) if flat.numel() else torch.zeros(n)
        want = NormFp8(q.reshape(x.shape), scale.reshape(x.shape[:-1]), rstd=got.rstd, y=v.to(x.dtype).contiguous(),
                       sum=None if inputs.residual is None else h, amax=amax)  # fmt: skip
        compare(got, want)


@at("cpu", "sm_90", "cuda")
def test_smoothing_layer_norm(place: str) -> None:
    with running_on(place) as device:
        inputs = make("parts", torch.bfloat16, device, LAYER_NORM_CASES)
        smooth = torch.linspace(0.5, 2.0, 136, device=device)
        got = layer_norm_fp8(inputs.x, inputs.weight, inputs.bias, eps=EPS, smooth=smooth, calibrate=True, keep=True)
        wide = [t.double() for t in (inputs.x, inputs.weight, inputs.bias)]
        exact = torch.nn.functional.layer_norm(wide[0], (136,), wide[1], wide[2], EPS)
        q, scale = quantize((exact / smooth).float().cpu(), "row", torch.float8_e4m3fn, False, "row")
        assert_codes(got.q, q, got.scale, scale.reshape(-1))
        torch.testing.assert_close(got.amax.double(), exact.abs().amax(0), rtol=1e-5, atol=1e-5)
        assert_close(got.y, exact, c=16.0, what="y")


@emulated
def test_maxima_of_rows_too_long_for_shared_memory() -> None:
    x = torch.randn(2, 60_000)
    with rtkernels.emulate("sm_90"):
        got = rms_norm_fp8(x, smooth=torch.ones(60_000), calibrate=True)
    v = x * got.rstd[:, None]
    assert_same_bits(got.amax, v.abs().amax(0), "amax")


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    with running_on("sm_90") as device:
        for layout in LAYOUTS:
            check(make("parts", torch.bfloat16, device), layout)
        rms_norm_fp8(torch.ones(2, 8), smooth=torch.ones(8))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ring, "_MIN_BYTES", 0)
            x = torch.ones(16, 128, dtype=torch.bfloat16)
            for layout in ("transposed", "both"):
                rms_norm_fp8(x, layout=layout, rstd=torch.ones(16))
            rms_norm_fp8(torch.ones(16, 264, dtype=torch.bfloat16), layout="both")
    Plans.forget_all()


@emulated
@pytest.mark.parametrize("order", ORDERS)
def test_thread_order_does_not_matter(order: str | int, together: Callable[[], None]) -> None:
    together()

    def run() -> list[NormFp8]:
        inputs = [make(case, torch.bfloat16, "cpu") for case in ("parts", "odd", "row", "residual", "odd_rows")]
        found = [check(i, layout) for i in inputs for layout in LAYOUTS]
        found += [layer_norm_fp8(i.x, i.weight, i.weight, layout=layout) for i in inputs[:2] for layout in LAYOUTS]
        smooth = [(i.x, i.weight, i.weight.float().abs()) for i in inputs[:2]]
        return found + [rms_norm_fp8(x, w, smooth=s, calibrate=True) for x, w, s in smooth]

    with rtkernels.emulate("sm_90"):
        want = run()
    with rtkernels.emulate("sm_90", order):
        for a, b in zip(run(), want, strict=True):
            compare(a, b)


@at("cpu", "sm_90", "cuda")
def test_special_values(place: str) -> None:
    with running_on(place) as device:
        x = torch.ones(130, 256, device=device)
        x[0] = 0.0
        x[1, 3] = math.nan
        x[2, 4] = math.inf
        x[3] = 1e-30
        huge = torch.ones(256, device=device)
        huge[5] = 3e38
        beyond = x[3:].clone()
        beyond[2:, 5] = 3.0  # times 3e38: infinite, which no scale takes into account
        for layout in LAYOUTS:
            check(Inputs(x[3:]), layout)
            check(Inputs(beyond, huge), layout)
            check(Inputs(beyond.bfloat16(), huge), layout)
            got = rms_norm_fp8(x, eps=EPS, layout=layout)
            if layout != "transposed":
                q = got.q.view(torch.uint8)
                assert not q[0].any() and (got.scale[0] == torch.tensor(1e-30)).all()
                assert (q[1] == 0x7F).all() and (got.scale[1] == torch.tensor(1e-30)).all()
                assert q[2, 4] == 0x7F and not q[2, :4].any() and (q[4] == 0x7E).all()
            if layout != "row":
                q = got.q_t.view(torch.uint8).t()
                assert not q[0].any() and (q[1] == 0x7F).all() and (q[4] == 0x7E).all()
                assert q[2, 4] == 0x7F and not q[2, :4].any()


def test_shapes() -> None:
    x = torch.randn(2, 3, 200)
    shapes = {
        layout + scales: [None if t is None else tuple(t.shape) for t in rms_norm_fp8(
            x, layout=layout, scale_layout=scales)]
        for layout, scales in (("row", "row"), ("both", "column"), ("transposed", "row"))
    }  # fmt: skip
    assert shapes == {
        "rowrow": [(2, 3, 200), (2, 3, 2), None, None, (2, 3), None, None, None, None],
        "bothcolumn": [(2, 3, 200), (2, 6), (200, 6), (1, 200), (2, 3), None, None, None, None],
        "transposedrow": [None, None, (200, 6), (1, 200), (2, 3), None, None, None, None],
    }
