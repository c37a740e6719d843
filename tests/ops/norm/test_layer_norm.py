"""Layer normalisation: numerics at every place it can run, gradients, errors, compilation, and the GPU's own ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.compare import ROUNDOFF, assert_close, assert_no_worse, assert_same_bits, poisoned, running_on
from support.places import DTYPES, at, emulated, error_tests, meta_on, order_test, short
from support.ways import assert_compiles, assert_equal_bits, captured
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.ops.norm import layer_norm as module
from rtkernels.ops.norm import layer_norm_plan as plans
from rtkernels.runtime import targets
from rtkernels.runtime.launch.device import DeviceInfo, device_info, shared_limit
from rtkernels.runtime.operator.declared import Meta

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


def _spaced(normal: Normal, rows: int, cols: int, *, every: int = 1, skip: int = 0, pad: int = 0) -> Tensor:
    """[rows, cols] out of a wider tensor: each `every`-th row, columns from `skip`, `pad` unused columns after."""
    return normal(rows * every, skip + cols + pad)[::every, skip : skip + cols]


def _both(n: Normal, rows: int, cols: int, **more: Any) -> Inputs:
    return Inputs(n(rows, cols), n(cols), n(cols), **more)


CASES: dict[str, Callable[[Normal], Inputs]] = {
    "plain": lambda n: Inputs(n(5, 64)),
    "weight": lambda n: Inputs(n(5, 64), n(64)),
    "bias": lambda n: Inputs(n(5, 64), None, n(64)),
    "both": lambda n: _both(n, 6, 320),
    "both_3d": lambda n: Inputs(n(2, 3, 40), n(40), n(40)),
    "both_1d": lambda n: Inputs(n(48), n(48), n(48)),
    "one_element": lambda n: _both(n, 1, 1),
    "one_column": lambda n: _both(n, 37, 1),
    "odd": lambda n: _both(n, 3, 33),
    "odd_wide": lambda n: _both(n, 3, 1027),
    "even_odd": lambda n: _both(n, 9, 1002),
    "hidden_1536": lambda n: _both(n, 9, 1536),
    "hidden_2048": lambda n: _both(n, 5, 2048),
    "hidden_4096": lambda n: _both(n, 9, 4096),
    "hidden_5120": lambda n: _both(n, 5, 5120),
    "rows_of_1536": lambda n: _both(n, 23, 1536),
    "rows_of_2048": lambda n: _both(n, 17, 2048),
    "rows_of_5120": lambda n: _both(n, 14, 5120),
    "hidden_12288": lambda n: _both(n, 5, 12288, residual=n(5, 12288)),
    "hidden_20480": lambda n: _both(n, 5, 20480),
    "many_short_rows": lambda n: _both(n, 530, 8),
    "more_than_the_ring_holds": lambda n: _both(n, 66, 4080),
    "a_row_more": lambda n: _both(n, 61, 2040),
    "residual_many_rows": lambda n: _both(n, 130, 520, residual=n(130, 520)),
    "no_rows": lambda n: _both(n, 0, 16),
    "no_columns": lambda n: _both(n, 4, 0),
    "strided_rows": lambda n: Inputs(_spaced(n, 5, 64, every=3, pad=16), n(64), n(64)),
    "unaligned": lambda n: Inputs(_spaced(n, 5, 64, skip=1, pad=7), n(64), n(64)),
    "unaligned_rows": lambda n: Inputs(_spaced(n, 5, 64, pad=1), n(64)),
    "unaligned_weight": lambda n: Inputs(n(5, 64), n(65)[1:], n(67)[3:]),
    "strided_weight": lambda n: Inputs(n(5, 64), n(128)[::2], n(128)[::2]),
    "expanded_weight": lambda n: Inputs(n(5, 64), n(1).expand(64), n(1).expand(64)),
    "transposed": lambda n: Inputs(n(48, 6).t(), n(48), n(48)),
    "expanded_rows": lambda n: Inputs(n(1, 64).expand(4, -1), n(64), n(64)),
    "dy_expanded": lambda n: _both(n, 6, 64, dy=n(1).expand(6, 64)),
    "dy_rows_expanded": lambda n: _both(n, 6, 64, dy=n(1, 64).expand(6, 64)),
    "dy_strided": lambda n: _both(n, 6, 64, dy=_spaced(n, 6, 64, every=2, pad=8)),
    "dy_unaligned": lambda n: _both(n, 6, 64, dy=_spaced(n, 6, 64, skip=3, pad=5)),
    "weight_fp32": lambda n: Inputs(n(6, 640), n(640).float(), n(640).float()),
    "weight_fp32_even": lambda n: Inputs(n(3, 1024), n(1024).float(), n(1024).float()),
    "weight_fp32_rows": lambda n: Inputs(n(17, 2048), n(2048).float(), n(2048).float()),
    "weight_fp32_odd": lambda n: Inputs(n(6, 77), n(77).float(), n(77).float()),
    "weight_fp32_wide": lambda n: Inputs(n(5, 9216), n(9216).float(), n(9216).float()),
    "offset": lambda n: _both(n, 6, 128, offset=1.0),
    "residual": lambda n: _both(n, 6, 640, residual=n(6, 640)),
    "residual_plain": lambda n: Inputs(n(6, 64), residual=n(6, 64)),
    "residual_odd": lambda n: _both(n, 6, 129, residual=n(6, 129)),
    "residual_strided": lambda n: _both(n, 6, 64, residual=_spaced(n, 6, 64, every=2, pad=8)),
    "residual_dsum_strided": lambda n: _both(n, 6, 64, residual=n(6, 64), dsum=_spaced(n, 6, 64, pad=8)),
    "bulk_offset": lambda n: _both(n, 6, 640, offset=1.0),
    "bulk_weight": lambda n: Inputs(n(6, 640), n(640)),
    "bulk_strided": lambda n: Inputs(
        _spaced(n, 9, 640, every=2, pad=16),
        n(640),
        n(640),
        residual=n(9, 640),
        dy=_spaced(n, 9, 640, every=3),
        dsum=_spaced(n, 9, 640, pad=8),
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


@pytest.mark.parametrize("case", CASES)
@at()
def test_every_layout(place: str, case: str) -> None:
    with running_on(place) as device:
        check(make(case, torch.bfloat16, device))


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=short)
@at()
def test_every_dtype(place: str, dtype: torch.dtype) -> None:
    cases = ("both", "odd", "weight_fp32", "residual", "residual_odd", "far_mean", "hidden_12288", "one_column")
    cases += ("rows_of_1536", "hidden_4096")
    with running_on(place) as device:
        for case in cases:
            check(make(case, dtype, device))


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    for case in ("both", "residual", "residual_many_rows", "odd", "rows_of_2048", "hidden_20480"):
        with running_on("sm_90") as device:
            check(make(case, torch.bfloat16, device))
    with running_on("sm_80") as device:  # without a copy engine another kernel makes gradients
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


# Rows that each of the kernels gets, in the emulator and on a GPU of 132 multiprocessors.
SHAPES = ((3, 40), (5, 1000), (3, 1003), (23, 1536), (9, 4096), (17, 2040), (1, 20480))
GPU_SHAPES = ((1200, 1536), (700, 2040), (400, 4096), (300, 12288))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@at()
def test_rows_of_equal_numbers_give_the_bias(place: str, dtype: torch.dtype) -> None:
    """To the bit, as in torch, though 1/sqrt(eps) makes 300 of every rounding of the mean."""
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
        (265, 512, 2, 0),  # more than are there at a time
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
    assert [plans._bulk_ring(info, rows, 512, 2).stages for rows in (1024, 2048, 8192)] == [2, 3, 2]


# ---- autograd -------------------------------------------------------------------------------------------------------


def test_only_the_gradients_that_are_wanted() -> None:
    x, weight, bias, dy = torch.randn(4, 8), torch.randn(8), torch.randn(8), torch.randn(4, 8)
    tensors = {"x": x, "weight": weight, "bias": bias}
    wide = {name: t.double().requires_grad_() for name, t in tensors.items()}
    F.layer_norm(wide["x"], (8,), wide["weight"], wide["bias"], EPS).backward(dy.double())
    for wanted in ({"x"}, {"weight"}, {"bias"}, {"weight", "bias"}, {"x", "bias"}):
        leaves = {name: t.clone().requires_grad_(name in wanted) for name, t in tensors.items()}
        layer_norm(**leaves).backward(dy)
        for name, leaf in leaves.items():
            if name in wanted:
                torch.testing.assert_close(leaf.grad, wide[name].grad.float(), atol=1e-5, rtol=1e-5)
            else:
                assert leaf.grad is None


def test_gradient_through_the_sum_alone() -> None:
    x, residual = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    layer_norm(x, residual=residual)[1].sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 8)) and torch.equal(residual.grad, torch.ones(4, 8))


def test_second_order_is_refused() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    (first,) = torch.autograd.grad(layer_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# ---- errors ---------------------------------------------------------------------------------------------------------


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (
        lambda: layer_norm(torch.ones(4, 8, dtype=torch.float64)),
        "x has dtype float64; expected one of bfloat16, float16, float32",
    ),
    "no dimensions": (lambda: layer_norm(torch.tensor(1.0)), "x has no dimensions; expected at least one"),
    "weight shape": (
        lambda: layer_norm(torch.ones(4, 8), torch.ones(4)),
        r"weight has shape \(4,\); expected \(8,\), the last dimension of x",
    ),
    "weight dtype": (
        lambda: layer_norm(torch.ones(4, 8), torch.ones(8).half()),
        "weight has dtype float16; expected one of float32",
    ),
    "weight device": (
        lambda: module.FORWARD.check(meta_on(0, torch.ones(4, 8)), meta_on(1, torch.ones(8)), None, 1e-5, 0.0),
        "weight has device index 1; expected 0, that of x",
    ),
    "bias shape": (
        lambda: layer_norm(torch.ones(4, 8), None, torch.ones(4, 8)),
        r"bias has shape \(4, 8\); expected \(8,\), the last dimension of x",
    ),
    "bias dtype": (
        lambda: layer_norm(torch.ones(4, 8).half(), torch.ones(8).half(), torch.ones(8)),
        "bias has dtype float32; expected float16, that of weight",
    ),
    "bias device": (
        lambda: module.FORWARD.check(meta_on(0, torch.ones(4, 8)), None, meta_on(-1, torch.ones(8)), 1e-5, 0.0),
        "bias has device index -1; expected 0, that of x",
    ),
    "residual shape": (
        lambda: layer_norm(torch.ones(4, 8), residual=torch.ones(8)),
        r"residual has shape \(8,\); expected \(4, 8\), that of x",
    ),
    "residual dtype": (
        lambda: layer_norm(torch.ones(4, 8), residual=torch.ones(4, 8).half()),
        "residual has dtype float16; expected float32, that of x",
    ),
    "residual device": (
        lambda: module.ADD_FORWARD.check(
            meta_on(0, torch.ones(4, 8)), meta_on(2, torch.ones(4, 8)), None, None, 1e-5, 0.0
        ),
        "residual has device index 2; expected 0, that of x",
    ),
    "not a tensor": (lambda: layer_norm([1.0, 2.0]), "expected a torch.Tensor or an array with __dlpack__"),
    "dy shape": (
        lambda: module.BACKWARD(torch.ones(4, 4), torch.ones(4, 8), None, None, None, EPS, 0.0, False),
        r"dy has shape \(4, 4\); expected \(4, 8\), that of h",
    ),
    "dsum dtype": (
        lambda: module.BACKWARD(
            torch.ones(4, 8), torch.ones(4, 8), None, None, torch.ones(4, 8).half(), EPS, 0.0, False
        ),
        "dsum has dtype float16; expected float32, that of h",
    ),
    "parameter_grad": (
        lambda: module.BACKWARD(torch.ones(4, 8), torch.ones(4, 8), None, None, None, EPS, 0.0, True),
        "parameter_grad is True but there is neither weight nor bias",
    ),
}


test_error_messages, test_launchers_raise_the_same_messages = error_tests(BAD)


# ---- other ways to call it ------------------------------------------------------------------------------------------


@at("cpu", "cuda")
@pytest.mark.parametrize("dynamic", (False, True))
def test_torch_compile(place: str, dynamic: bool) -> None:
    def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y, h = layer_norm(x * 2, weight, bias, residual=x)
        return layer_norm(y, weight) + h

    def inputs(rows: int) -> list[Tensor]:
        return [torch.randn(shape, device=place) for shape in ((rows, 16), (16,), (16,))]

    assert_compiles(block, map(inputs, (3, 4)), dynamic=dynamic)


def test_numpy_in_numpy_out() -> None:
    x, weight = np.random.default_rng(0).standard_normal((2, 3, 8), dtype=np.float32), np.full(8, 2, "f4")
    y, h = layer_norm(x, weight, residual=x)
    assert isinstance(y, np.ndarray)
    np.testing.assert_allclose(h, x + x)
    np.testing.assert_allclose(y, layer_norm(torch.from_numpy(x + x)).numpy() * 2, rtol=1e-5, atol=1e-6)


def test_bench_rows_agree_with_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    dy, x = torch.randn(2, 4, 32, generator=generator)
    weight, bias = torch.randn(2, 32, generator=generator)
    rows = {row.name: row for row in rows_of(module.OP.name)}
    inputs = {"x": x, "weight": weight, "bias": bias, "eps": EPS}
    forward, backward = rows["layer_norm_fwd"], rows["layer_norm_bwd"]
    torch.testing.assert_close(forward.ours(**inputs), forward.torch(**inputs))
    torch.testing.assert_close(forward.ours(**inputs), forward.fused(**inputs))
    torch.testing.assert_close(backward.ours(dy=dy, **inputs), backward.torch(dy=dy, **inputs))


# ---- on the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ("both", "odd", "residual", "hidden_4096", "hidden_20480", "many_short_rows"))
@at("sm_90", "cuda")
def test_equal_bits_twice(place: str, case: str) -> None:
    with running_on(place) as device:
        first, second = (check(make(case, torch.bfloat16, device)) for _ in range(2))
    for name in first:
        assert_same_bits(first[name], second[name])


test_thread_order_does_not_matter = order_test(
    lambda case: check(make(case, torch.bfloat16, "cpu")).values(),
    *("odd", "residual", "more_than_the_ring_holds", "residual_many_rows", "many_short_rows", "rows_of_2048"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", (1024, 1536, 2048, 4096, 5120, 7168, 8192, 12288, 16384, 65536))
def test_bench_shapes(cols: int) -> None:
    generator = torch.Generator("cuda").manual_seed(cols)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    x, dy, weight, bias = normal(3000, cols), normal(3000, cols), normal(cols), normal(cols)
    with poisoned():
        check(Inputs(x, weight, bias, dy=dy))
        check(Inputs(x, weight.float(), bias.float(), residual=dy, dy=dy, dsum=x))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("shape", ((70_000, 2**15), (2**31 + 6, 1), (2**28 + 1, 8)), ids=str)
def test_beyond_two_to_the_31(shape: tuple[int, ...]) -> None:
    if torch.cuda.mem_get_info()[0] < 9 * torch.Size(shape).numel():
        pytest.skip("not enough free GPU memory")
    x = torch.ones(shape, device="cuda", dtype=torch.bfloat16)
    x[-3:].normal_()
    y = layer_norm(x)
    wanted = F.layer_norm(x[-3:].float(), (shape[-1],), eps=EPS)
    torch.testing.assert_close(y[-3:].float(), wanted, atol=2e-2, rtol=1e-2)
    assert (y[:3] == 0).all() and not y.isnan().any()


@pytest.mark.gpu
def test_graph_capture_and_replay() -> None:
    x, dy = (torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight, bias = torch.rand(2, 1024, device="cuda", dtype=torch.bfloat16).unbind()

    def run() -> tuple[Tensor, ...]:
        y = module.FORWARD(x, weight, bias, EPS, 0.0)
        return y, *module.BACKWARD(dy, x, weight, bias, None, EPS, 0.0, True)

    replay = captured(run)
    x.copy_(torch.randn_like(x))
    assert_equal_bits(replay(), run())
