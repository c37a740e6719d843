"""Normalisation to fp8: 1/rms to its error budget, then codes and scales bit for bit; gradients, errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_close, assert_same_bits, running_on
from support.places import DTYPES, ORDERS, at, emulated, error_tests, meta_on, short
from support.ways import captured
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.emulator import _launch
from rtkernels.errors import ResidencyError
from rtkernels.ops.norm import norm_fp8 as module
from rtkernels.ops.norm import norm_fp8_operators as operators
from rtkernels.ops.norm import norm_fp8_plan as plans
from rtkernels.ops.norm import norm_fp8_ring_plan as ring
from rtkernels.ops.quant.reference import quantize
from rtkernels.runtime.launch import memory
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.plans import Plans

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


def _spaced(normal: Normal, rows: int, cols: int, *, every: int = 1, skip: int = 0, pad: int = 0) -> Tensor:
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
    "strided_rows": lambda n: Inputs(_spaced(n, 5, 256, every=3, pad=16), n(256)),
    "unaligned": lambda n: Inputs(_spaced(n, 5, 64, skip=1, pad=7), n(64)),
    "unaligned_weight": lambda n: Inputs(n(5, 64), n(65)[1:]),
    "transposed": lambda n: Inputs(n(64, 6).t(), n(64)),
    "expanded_rows": lambda n: Inputs(n(1, 128).expand(4, -1), n(128)),
    "weight_strided": lambda n: Inputs(n(4, 64), n(128)[::2]),
    "residual": lambda n: Inputs(n(5, 256), n(256), n(5, 256), offset=1.0),
    "residual_odd": lambda n: Inputs(n(3, 77), n(77), n(3, 77)),
    "residual_strided": lambda n: Inputs(_spaced(n, 4, 64, pad=8), n(64), _spaced(n, 4, 64, every=2)),
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


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make one launch work out statistics and tiles together, for small inputs too; `long`: as for long rows."""

    def switch(*, long: bool = False) -> None:
        monkeypatch.setattr(plans, "_TOGETHER_BYTES", 1)
        monkeypatch.setattr(ring, "_MIN_BYTES", 1 << 60)
        if long:
            monkeypatch.setattr(plans, "_STATS_BYTES", 0)
            monkeypatch.setattr(plans, "_MAX_STATS_BYTES", 0)
        Plans.forget_all()

    yield switch
    Plans.forget_all()


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
        assert place == "cpu" or all(plan.steps[-1].arguments[-4] for plan in used), "no block made statistics"


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
    """Compare codes of values that differ in their last bits: hardly any differ, and none by more than one code."""
    # The largest of a column may be the small difference of a number and its row's mean.
    torch.testing.assert_close(scale.cpu(), want_scale, rtol=4e-5, atol=0)
    a, b = q.cpu().view(torch.uint8).int(), want.view(torch.uint8).int()
    small = (a & 0x7F) + (b & 0x7F) <= 2  # around zero the sign may differ
    distance = torch.where(small, 0, (a - b).abs())
    assert distance.max() <= 1 and (distance != 0).float().mean() < 2e-3


LAYER_NORM_CASES: dict[str, Callable[[Normal], Inputs]] = {
    "parts": lambda n: Inputs(n(132, 136), n(136), bias=n(136)),
    "plain": lambda n: Inputs(n(3, 512) + 100),
    "bias": lambda n: Inputs(n(2, 3, 40), bias=n(40)),
    "fp32": lambda n: Inputs(n(4, 1024), n(1024).float(), bias=n(1024).float()),
    "odd": lambda n: Inputs(n(5, 331), n(331), bias=n(331)),
    "widest": lambda n: Inputs(n(2, 20480), n(20480), bias=n(20480)),
    "residual": lambda n: Inputs(n(5, 256), n(256), n(5, 256), offset=1.0, bias=n(256)),
}


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
        made = layer_norm_fp8(inputs.x, inputs.weight, layout="both")
        again = layer_norm_fp8(inputs.x, inputs.weight, layout="both", rstd=made.rstd, mean=made.mean)
        compare(again, made._replace(rstd=None, mean=None))


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
        beyond[2:, 5] = 3.0  # times 3e38: infinite, which no scale sees
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


# ---- gradients ------------------------------------------------------------------------------------------------------


class _Multiplied(torch.autograd.Function):
    """Stands for a product with the codes: uses them, and hands the gradient to the place of y."""

    @staticmethod
    def forward(ctx, q, scale, y):
        groups = q.float().unflatten(-1, (-1, 128)) * scale[..., None]
        return groups.flatten(-2)

    @staticmethod
    def backward(ctx, grad):
        return None, None, grad.to(torch.bfloat16)


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("layout", ("row", "both"))
@pytest.mark.parametrize("with_residual", (False, True))
@pytest.mark.parametrize("keep", (False, True))
def test_gradients_are_those_of_rms_norm(place: str, layout: str, with_residual: bool, keep: bool) -> None:
    with running_on(place) as device:
        inputs = make("residual", torch.bfloat16, device)
        leaves, ours, theirs = [inputs.x, inputs.weight, inputs.residual][: 2 + with_residual], [], []
        dy, dsum = inputs.x * 3, inputs.x * 5
        for run, grads in ((rms_norm_fp8, ours), (rtkernels.rms_norm, theirs)):
            x, weight, *rest = (t.detach().clone().requires_grad_() for t in leaves)
            residual = rest[0] if rest else None
            if run is rms_norm_fp8:
                got = run(x, weight, eps=EPS, offset=1.0, residual=residual, layout=layout, keep=keep)
                assert not any(t.requires_grad for t in got[:5] if t is not None)
                y, total = got.y, got.sum
                if keep:
                    assert_close(y, rtkernels.rms_norm(x, weight, eps=EPS, offset=1.0, residual=residual)[0].double()
                                 if with_residual else rtkernels.rms_norm(x, weight, eps=EPS, offset=1.0).double(),
                                 c=2.0)  # fmt: skip
                else:
                    assert y.isnan().all() and y.untyped_storage().nbytes() == 2
                y = _Multiplied.apply(got.q, got.scale, y)
            else:
                y, total = result if isinstance(result := run(
                    x, weight, eps=EPS, offset=1.0, residual=residual), tuple) else (result, None)  # fmt: skip
            wanted = [(y, dy.to(y.dtype)), (total, dsum)][: 1 + with_residual]
            torch.autograd.backward(*map(list, zip(*wanted, strict=True)))
            grads += [t.grad for t in (x, weight, *rest)]
        for a, b in zip(ours, theirs, strict=True):
            assert_same_bits(a, b, "gradient")


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("with_residual", (False, True))
@pytest.mark.parametrize("smooth", (False, True))
def test_gradients_are_those_of_layer_norm(place: str, with_residual: bool, smooth: bool) -> None:
    with running_on(place) as device:
        inputs = make("residual", torch.bfloat16, device, LAYER_NORM_CASES)
        leaves = [inputs.x, inputs.weight, inputs.bias, inputs.residual][: 3 + with_residual]
        more = {"smooth": torch.ones(256, device=device), "calibrate": True} if smooth else {}
        found = []
        for fp8 in (True, False):
            x, weight, bias, *rest = own = [t.detach().clone().requires_grad_() for t in leaves]
            options = {"eps": EPS, "offset": 1.0, "residual": rest[0] if rest else None}
            if fp8:
                got = layer_norm_fp8(x, weight, bias, **options, **more)
                y, total = got.y, got.sum
            else:
                made = rtkernels.layer_norm(x, weight, bias, **options)
                y, total = made if with_residual else (made, None)
            pairs = [(y, inputs.x * 3), (total, inputs.x * 5)][: 1 + with_residual]
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
            found.append([t.grad for t in own])
        for a, b in zip(*found, strict=True):
            assert_same_bits(a, b, "gradient")


def test_only_what_is_wanted() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8, requires_grad=True)
    rms_norm_fp8(x, weight).y.sum().backward()
    assert x.grad is None and weight.grad is not None
    assert rms_norm_fp8(x, weight.detach()).y is None
    with torch.no_grad():
        assert rms_norm_fp8(x, weight).y is None
    x.requires_grad_()
    residual = torch.randn(4, 8, requires_grad=True)
    rms_norm_fp8(x, weight, residual=residual).sum.sum().backward()
    assert (x.grad == 1).all() and (residual.grad == 1).all()
    rstd = torch.ones(4)
    assert not rms_norm_fp8(x, weight, layout="transposed", rstd=rstd).scale_t.requires_grad


# ---- errors ---------------------------------------------------------------------------------------------------------

X = torch.ones(4, 8)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: rms_norm_fp8(X.double()), "x has dtype float64; expected one of bfloat16, float16, float32"),
    "no dimensions": (lambda: rms_norm_fp8(torch.tensor(1.0)), "x has no dimensions; expected at least one"),
    "weight shape": (lambda: rms_norm_fp8(X, torch.ones(7)), r"weight has shape \(7,\); expected \(8,\), the last"),
    "weight dtype": (lambda: rms_norm_fp8(X, torch.ones(8).half()), "weight has dtype float16; expected one of"),
    "residual shape": (
        lambda: rms_norm_fp8(X, residual=torch.ones(4, 7)),
        r"residual has shape \(4, 7\); expected \(4, 8\), that of x",
    ),
    "residual dtype": (
        lambda: rms_norm_fp8(X, residual=X.half()),
        "residual has dtype float16; expected float32, that of x",
    ),
    "layout": (
        lambda: rms_norm_fp8(X, layout="column"),
        "layout is 'column'; expected one of 'row', 'transposed', 'both'",
    ),
    "scale layout": (
        lambda: rms_norm_fp8(X, scale_layout="both"),
        "scale_layout is 'both'; expected one of 'row', 'column'",
    ),
    "no scales of rows": (
        lambda: rms_norm_fp8(X, layout="transposed", scale_layout="column"),
        "scale_layout 'column' is for the scales of rows; layout 'transposed' has none",
    ),
    "rstd residual": (
        lambda: rms_norm_fp8(X, rstd=torch.ones(4), layout="transposed", residual=X),
        "rstd goes without residual: give the sum",
    ),
    "rstd dtype": (
        lambda: rms_norm_fp8(X, rstd=torch.ones(4).half(), layout="transposed"),
        "rstd has dtype float16; expected one of float32",
    ),
    "rstd shape": (
        lambda: rms_norm_fp8(X, rstd=torch.ones(4, 1), layout="transposed"),
        r"rstd has shape \(4, 1\); expected \(4,\), one per row of x",
    ),
    "keep": (
        lambda: rms_norm_fp8(X, layout="transposed", keep=True),
        "keep goes with layout 'row' or 'both', not 'transposed'",
    ),
    "device": (
        lambda: operators.FORWARD.check(
            meta_on(0, X), meta_on(-1, torch.ones(8)), *[None] * 4, 1e-6, 0.0, "row", False, "row", False, False
        ),
        "weight has device index -1; expected 0, that of x",
    ),
    "no codes": (lambda: rms_norm_fp8(X, layout="none"), "expected one of 'row', 'transposed', 'both'"),
    "bias shape": (lambda: layer_norm_fp8(X, None, torch.ones(7)), r"bias has shape \(7,\); expected \(8,\)"),
    "bias dtype": (
        lambda: layer_norm_fp8(X.half(), torch.ones(8).half(), torch.ones(8)),
        "bias has dtype float32; expected float16, that of weight",
    ),
    "mean alone": (lambda: layer_norm_fp8(X, mean=torch.ones(4)), "mean and rstd come together"),
    "rstd alone": (lambda: layer_norm_fp8(X, rstd=torch.ones(4)), "mean and rstd come together"),
    "smooth layout": (lambda: rms_norm_fp8(X, smooth=torch.ones(8), layout="both"), "smooth goes with layout 'row'"),
    "smooth shape": (lambda: rms_norm_fp8(X, smooth=torch.ones(7)), r"smooth has shape \(7,\); expected \(8,\)"),
    "smooth dtype": (lambda: rms_norm_fp8(X, smooth=torch.ones(8).half()), "smooth has dtype float16; expected one of"),
    "calibrate": (lambda: rms_norm_fp8(X, calibrate=True), "calibrate goes with smooth"),
    "not a tensor": (lambda: rms_norm_fp8([1.0, 2.0]), "expected a torch.Tensor or an array with __dlpack__"),
    "mixed kinds": (
        lambda: rms_norm_fp8(X, np.ones(8, "f4")),
        "weight is a ndarray beside a torch.Tensor; expected all array arguments to be tensors",
    ),
}


test_error_messages, test_launchers_raise_the_same_messages = error_tests(BAD)


# ---- other ways to call it ------------------------------------------------------------------------------------------


@at("cpu", "cuda")
@pytest.mark.parametrize("dynamic", (False, True))
def test_torch_compile(place: str, dynamic: bool) -> None:
    def block(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        got = rms_norm_fp8(x * 2, weight, offset=1.0, residual=residual, layout="both", keep=True)
        smooth = layer_norm_fp8(x, weight.detach(), smooth=weight.detach().abs(), calibrate=True)
        return got.y, got.sum, got.scale * 2, got.scale_t, got.q.float(), got.q_t.float(), smooth.scale, smooth.amax

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (3, 4):
        tensors = [torch.randn(*shape, device=place) for shape in ((rows, 16), (16,), (rows, 16))]
        torch.testing.assert_close(compiled(*tensors), block(*tensors))
        grads = []
        for function in (compiled, block):
            leaves = [t.clone().requires_grad_() for t in tensors]
            y, total, *_ = function(*leaves)
            (y.square().sum() + total.sum()).backward()
            grads.append([t.grad for t in leaves])
        torch.testing.assert_close(*grads)


def test_numpy_in_numpy_out() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 8), dtype=np.float32)
    got = rms_norm_fp8(x, np.ones(8, "f4"), residual=x)
    want = rms_norm_fp8(torch.from_numpy(x), residual=torch.from_numpy(x))
    assert isinstance(got, NormFp8) and isinstance(got.scale, np.ndarray) and got.q_t is None
    np.testing.assert_array_equal(got.scale, want.scale.numpy())
    np.testing.assert_allclose(got.sum, 2 * x)


def test_bench_rows_agree_with_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = {"x": torch.randn(256, 384, generator=generator), "weight": torch.randn(384, generator=generator)}
    scales = set()
    for row in rows_of(module.OP.name):
        given = {**inputs, "rstd": torch.rand(256, generator=generator)} if row.name.endswith("_t") else inputs
        scales.add((row.name, tuple(row.ours(**given)[1].shape)))
        for ours, theirs in zip(row.ours(**given), row.torch(**given), strict=True):
            if ours.element_size() == 1:
                assert (ours.view(torch.uint8) == theirs.view(torch.uint8)).float().mean() > 0.999
            else:
                torch.testing.assert_close(ours, theirs)
    assert scales >= {("rms_norm_fp8_both", (256, 3)), ("rms_norm_fp8_both_column", (3, 256))}


# ---- on the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("cols", (1536, 2048, 4096, 5120, 7168, 8192, 16384))
def test_bench_shapes(cols: int) -> None:
    generator = torch.Generator("cuda").manual_seed(cols)
    x, residual = (torch.randn(1000, cols, generator=generator, device="cuda").bfloat16() for _ in range(2))
    weight = torch.randn(cols, generator=generator, device="cuda").bfloat16()
    inputs = Inputs(x, weight)
    with running_on("cuda"):
        for layout in LAYOUTS:
            compare(check(inputs, layout, column=True), check(inputs, layout, column=True))
            check(replace(inputs, residual=residual), layout, pow2=True, keep=True)


RING_CASES: dict[str, Callable[[Normal], Inputs]] = {
    "tiles": lambda n: Inputs(n(4096, 512), n(512)),
    "parts": lambda n: Inputs(n(272, 136), n(136), offset=1.0),
    "pairs": lambda n: Inputs(n(400, 1272), n(1272)),  # of tiles, so that scales of neighbours are written together
    "few_rows": lambda n: Inputs(n(16, 4104), n(4104).float()),
    "strided": lambda n: Inputs(_spaced(n, 1040, 640, every=2, pad=8)),
    "many": lambda n: Inputs(n(20_000, 1032), n(1032)),
}


def _both_and_transposed(inputs: Inputs, first: NormFp8, **options: Any) -> None:
    """Make the codes of `first` again from its 1/rms, by rows and transposed, or transposed."""
    for layout, scale_layout in (("both", "row"), ("both", "column"), ("transposed", "row")):
        tensors = {"weight": inputs.weight, "offset": inputs.offset, "rstd": first.rstd}
        again = rms_norm_fp8(inputs.x, layout=layout, scale_layout=scale_layout, **tensors, **options)
        q, scale = (first.q, first.scale) if layout == "both" else (None, None)
        if scale_layout == "column":
            scale = scale.t().contiguous()
        compare(again, NormFp8(q, scale, first.q_t, first.scale_t))


@emulated
@pytest.mark.parametrize("order", ("forward", *ORDERS))
def test_recomputing_by_tensor_copies(order: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_MIN_BYTES", 0)
    monkeypatch.setattr(_launch, "launched", set())  # of this test alone
    for case in ("parts", "pairs"):
        inputs = make(case, torch.bfloat16, "cpu", RING_CASES)
        inputs.x[3, 5], inputs.x[7, 9], inputs.x[-1] = math.inf, math.nan, 0.0
        with rtkernels.emulate("sm_80"):
            first = rms_norm_fp8(inputs.x, inputs.weight, layout="both", offset=inputs.offset)
        Plans.forget_all()
        with rtkernels.emulate("sm_90", order=order):
            _both_and_transposed(inputs, first)
        Plans.forget_all()
    assert "norm_fp8_ring" in {entry for _, entry in rtkernels.emulator.launched()}


@emulated
def test_sums_by_tensor_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_MIN_BYTES", 0)
    Plans.forget_all()
    with running_on("sm_90") as device:
        inputs = make("parts", torch.bfloat16, device, RING_CASES)
        check(replace(inputs, residual=inputs.x.flip(0)), "both")
    assert all("map_" in plan.source for plan in operators.FORWARD._plans.values())
    Plans.forget_all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=short)
@pytest.mark.parametrize("case", RING_CASES)
def test_recomputing_with_the_copy_engine(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(case, dtype, "cuda", RING_CASES)
    inputs.x[3, 5], inputs.x[7, 9], inputs.x[-1] = math.inf, math.nan, 0.0
    options = {"pow2_scale": case == "parts"}
    monkeypatch.setattr(ring, "_MIN_BYTES", 1 << 60)
    Plans.forget_all()
    first = rms_norm_fp8(inputs.x, inputs.weight, layout="both", offset=inputs.offset, **options)
    monkeypatch.setattr(ring, "_MIN_BYTES", 0)
    Plans.forget_all()
    for _ in range(2):
        _both_and_transposed(inputs, first, **options)
    with running_on("cuda"):
        for layout in ("both", "transposed"):
            check(replace(make(case, dtype, "cuda", RING_CASES), residual=torch.ones_like(inputs.x)), layout)
    if ring.RING.supports(device_info(inputs.x.get_device()).target):
        assert all("map_" in plan.source for plan in operators.FORWARD._plans.values())
    Plans.forget_all()


def check_odd(inputs: Inputs, eps: float = EPS) -> None:
    """1/rms as in fp64 where it is finite, codes to the bit for what it is."""
    got = rms_norm_fp8(inputs.x, inputs.weight, eps=eps, layout="both")
    exact = torch.rsqrt(inputs.x.double().square().mean(-1) + eps)
    assert_close(got.rstd, exact, c=12, what="rstd")
    compare(got, expected(inputs.x, inputs, got.rstd, "both", False, "row", False))


@emulated
@pytest.mark.parametrize("order", ("forward", *ORDERS))
def test_reading_once_emulated(order: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_MIN_BYTES", 0)
    monkeypatch.setattr(_launch, "launched", set())  # of this test alone
    Plans.forget_all()
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=g).bfloat16() for shape in ((144, 520), (520,)))
    with rtkernels.emulate("sm_90", order=order):
        for pow2 in (False, True):  # three blocks, two pairs of tiles each
            check(Inputs(x, weight, offset=0.5), "both", pow2=pow2, column=pow2)
        # What does not fit into a sum of whole numbers, in some rows; then the same memory for fewer rows.
        x[1], x[2, 3], x[3, 4], x[130] = x[1] * 1e12, math.inf, math.nan, 0.0
        check_odd(Inputs(x, weight))
        check_odd(Inputs(x[:128] * 1e-9, weight), eps=0.0)
        check(Inputs(x[16:], weight), "both")
    assert memory._kept and all(not zeros.any() for zeros in memory._kept.values())
    assert "norm_fp8_single_read" in {entry for _, entry in rtkernels.emulator.launched()}
    Plans.forget_all()


@emulated
def test_fewer_multiprocessors_than_blocks_that_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of three pairs of tiles: three blocks at least, or statistics first and then tiles."""
    monkeypatch.setattr(ring, "_MIN_BYTES", 0)
    x = torch.randn(144, 520, generator=torch.Generator().manual_seed(0)).bfloat16()
    for room, once in ((4, True), (3, True), (2, False), (0, False)):
        monkeypatch.setattr(ring.SINGLE_READ, "max_resident_blocks", lambda *args, room=room: room)
        Plans.forget_all()
        with rtkernels.emulate("sm_90"):
            check(Inputs(x), "both")
        (plan,) = operators.FORWARD._plans.values()
        assert ("kept_zeros" in plan.source) == once, room
    Plans.forget_all()


@emulated
def test_a_launch_that_is_not_resident_is_made_in_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has the last word: what it refuses is not tried on that device any more."""
    tried = []

    def refused(*args: Any) -> None:
        tried.append(args)
        raise ResidencyError("3 blocks of 640 threads must run at the same time")

    monkeypatch.setattr(ring, "_MIN_BYTES", 0)
    monkeypatch.setattr(ring, "_refused", set())
    monkeypatch.setattr(ring.SINGLE_READ, "bind", lambda *args, **options: refused)
    x = torch.randn(144, 520, generator=torch.Generator().manual_seed(0)).bfloat16()
    Plans.forget_all()
    with rtkernels.emulate("sm_90"):
        for _ in range(2):
            check(Inputs(x), "both")
        check(Inputs(x[:128]), "both")  # another plan
    assert len(tried) == 1 and ring._refused == {-1}
    Plans.forget_all()


@pytest.mark.gpu
def test_the_driver_refuses_and_two_passes_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2048, 4096, device="cuda").bfloat16()
    if not ring.SINGLE_READ.supports(device_info(x.get_device()).target):
        pytest.skip("for GPUs with a bulk copy engine")
    monkeypatch.setattr(ring, "_refused", set())
    Plans.forget_all()
    first = check(Inputs(x), "both")
    room = ring.SINGLE_READ.max_resident_blocks(("bf16",), 0, ring._THREADS, ring._SINGLE_READ_SHARED)
    monkeypatch.setattr(ring, "single_read_blocks", lambda matrix: room + 1)
    Plans.forget_all()
    second = check(Inputs(x), "both")
    assert ring._refused == {x.get_device()}
    assert_close(second.rstd, first.rstd.double(), c=12, what="rstd")
    Plans.forget_all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=short)
@pytest.mark.parametrize("case", [case for case in RING_CASES if case != "parts"])
def test_reading_once(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(case, dtype, "cuda", RING_CASES)
    if not ring.SINGLE_READ.supports(device_info(inputs.x.get_device()).target):
        pytest.skip("for GPUs with a bulk copy engine")
    monkeypatch.setattr(ring, "_MIN_BYTES", 0)
    Plans.forget_all()
    with running_on("cuda"):
        first = check(inputs, "both")
        check(inputs, "both", pow2=True, column=True)
        for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                again = [rms_norm_fp8(inputs.x, inputs.weight, eps=EPS, layout="both") for _ in range(20)]
            torch.cuda.synchronize()
            for one in again[::19]:
                compare(one, first)
    assert all("kept_zeros" in plan.source for plan in operators.FORWARD._plans.values())
    inputs.x[3, 5], inputs.x[7, 9], inputs.x[-1] = math.inf, math.nan, 0.0
    first = rms_norm_fp8(inputs.x, inputs.weight, eps=EPS, layout="both")
    assert first.rstd[3] == 0 and first.rstd[7].isnan() and abs(first.rstd[-1] * EPS**0.5 - 1) < 1e-6
    _both_and_transposed(inputs, first)
    Plans.forget_all()


@pytest.mark.gpu
def test_reading_once_in_the_widest_strips() -> None:
    """Rows of as many pairs of tiles as blocks can add to a sum, and each of them odd: the count must not suffer."""
    x = torch.randn(256, 32768, device="cuda").bfloat16()
    Plans.forget_all()
    x[1], x[2, ::256], x[3] = math.inf, math.nan, x[3] * 1e15
    first = rms_norm_fp8(x, layout="both", eps=EPS)
    if ring.SINGLE_READ.supports(device_info(x.get_device()).target):
        assert all("kept_zeros" in plan.source for plan in operators.FORWARD._plans.values())
    assert first.rstd[1] == 0 and first.rstd[2].isnan()
    exact = torch.rsqrt(x.double().square().mean(-1) + EPS)
    assert_close(first.rstd[3:], exact[3:], c=30, what="rstd")
    _both_and_transposed(Inputs(x), first)


@pytest.mark.gpu
def test_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    for least in (ring._MIN_BYTES, 0):
        monkeypatch.setattr(ring, "_MIN_BYTES", least)
        Plans.forget_all()
        _check_cuda_graph()
    Plans.forget_all()


def _check_cuda_graph() -> None:
    x, weight = torch.randn(256, 2048, device="cuda").bfloat16(), torch.randn(2048, device="cuda").bfloat16()
    replay = captured(lambda: rms_norm_fp8(x, weight, layout="both"))
    x.copy_(torch.randn_like(x))
    compare(replay(), rms_norm_fp8(x, weight, layout="both"))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("shape", ((70_000, 2**15), (2**24 + 5, 136)), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_beyond_two_to_the_31(shape: tuple[int, int], layout: str) -> None:
    elements = torch.Size(shape).numel()
    if torch.cuda.mem_get_info()[0] < 5 * elements:
        pytest.skip("not enough free GPU memory")
    x = torch.ones(shape, device="cuda", dtype=torch.bfloat16)
    x[-1].normal_()
    got = rms_norm_fp8(x, eps=0.0, layout=layout)
    want = rms_norm_fp8(x[-1:], eps=0.0, layout="row")
    torch.testing.assert_close(got.rstd[-1], want.rstd[0])  # kernels add up in different orders
    assert got.rstd[0] == 1
    if got.q is not None:
        assert (got.q[-1].view(torch.uint8) == want.q[0].view(torch.uint8)).float().mean() > 0.99
        assert (got.q[:-1].view(torch.uint8) == 0x7E).all()
    if got.q_t is not None:
        assert (got.q_t[:, :128].view(torch.uint8) == 0x7E).all()
        assert (got.scale_t[0] == want.scale.new_tensor(1.0) / 448).all()
