"""Single calls in which torch's operators on our kernels once differed from torch's own."""

from __future__ import annotations

import pytest
import torch
from support.overrides import taken
from support.places import emulated

import rtkernels
from rtkernels.aten import row
from rtkernels.aten.table import NotHandled

INF, NAN = float("inf"), float("nan")


def _same(function, families: str | list[str]) -> None:
    """Compare a result, or the type of an exception, with torch's."""

    def outcome():
        try:
            return function()
        except Exception as error:
            return type(error)

    want = outcome()
    with taken("sm_80", families):
        got = [outcome() for _ in range(2)]
    for one in got:
        if isinstance(want, torch.Tensor):
            assert one.dtype == want.dtype and one._version == want._version
            torch.testing.assert_close(one, want, rtol=0, atol=0, equal_nan=True)
            assert one.is_floating_point() is False or torch.equal(one.signbit(), want.signbit())
        else:
            assert one == want


@emulated
@pytest.mark.parametrize("name", ("fmod", "remainder"))
@pytest.mark.parametrize("number", (3, -2, 300))
def test_0d_integers_and_numbers(name: str, number: int) -> None:
    """300 does not fit int8: torch wraps it, and so must an override that passes the call on."""
    for dtype in (torch.int8, torch.int64):
        seven = torch.tensor(100, dtype=dtype)
        _same(lambda x=seven: getattr(torch, name)(x, number), name)
        _same(lambda x=seven: getattr(torch, name)(x, number, out=torch.empty((), dtype=x.dtype)), name)


@emulated
def test_numbers_that_do_not_fit() -> None:
    _same(lambda: torch.pow(-1, torch.arange(4, dtype=torch.uint8)), "pow")
    _same(lambda: torch.remainder(-1, torch.tensor([True, True])), "remainder")
    _same(lambda: torch.add(torch.tensor(1, dtype=torch.int8), 1000), "add")
    rtkernels.aten.reset()
    _same(lambda: torch.pow(300, torch.arange(-2, 5, dtype=torch.int8)), "pow")
    assert not any(row["torch"] for row in rtkernels.report(as_rows=True))  # its kernels for CUDA may refuse 300


@emulated
def test_numbers_that_torch_cannot_convert() -> None:
    """Finite ones beyond the largest of a dtype: torch raises where it converts a number, not where it promotes."""
    half = torch.tensor([0.5, 2.0], dtype=torch.float16)
    mask = torch.tensor([True, False])
    for number in (1e30, -1e30, 65510.0, INF, -INF, 65504.0):
        _same(lambda n=number: torch.pow(half, n), "pow")
        _same(lambda n=number: half.masked_fill(mask, n), "masked_fill")
        _same(lambda n=number: half.clone().fill_(n), "fill")
        _same(lambda n=number: torch.nn.functional.threshold(half, n, 1.0), "threshold")
        _same(lambda n=number: torch.addr(torch.ones(2, 2).half(), half, half, beta=n), "addr")
        _same(lambda n=number: half > n, "gt")
        _same(lambda n=number: half.clamp(max=n), "clamp")
    for number in (1e39, -1e39):
        _same(lambda n=number: torch.add(half, half, alpha=n), "add")
        _same(lambda n=number: half.clamp(n), "clamp")


@emulated
def test_bounds_that_are_nan() -> None:
    """torch ignores a single NaN bound in `clamp` on CUDA and fills with NaN elsewhere, so these calls go to torch."""
    x = torch.randn(8)
    for function in (
        lambda: x.clamp(NAN), lambda: x.clamp(max=NAN), lambda: x.clamp(NAN, 1.0), lambda: x.clamp_min(NAN),
        lambda: torch.clamp(x, NAN, out=torch.empty(8)),
    ):  # fmt: skip
        rtkernels.aten.reset()
        _same(function, ["clamp", "clamp_min", "clamp_max"])
        assert not any(row["ours"] for row in rtkernels.report(as_rows=True))


@emulated
def test_gradient_of_a_weight_that_is_absent() -> None:
    x, rstd = torch.randn(5, 33), torch.rand(5, 1)
    with rtkernels.emulate("sm_80"):
        assert isinstance(row._rms_norm_backward(x, x, [33], rstd, None, [True, True]), NotHandled)
        dx, dw = row._rms_norm_backward(x, x, [33], rstd, None, [True, False])
    assert dx.shape == x.shape and dw is None


@emulated
def test_bools_are_not_subtracted() -> None:
    x, flags = torch.ones(3), torch.tensor([True, False, True])
    for function in (
        lambda: x - True, lambda: x - flags, lambda: flags - x, lambda: torch.rsub(x, flags),
        lambda: x.clone().sub_(flags),
    ):  # fmt: skip
        _same(function, ["sub", "rsub"])


@emulated
def test_nan_to_num_keeps_the_sign_of_zero() -> None:
    _same(lambda: torch.nan_to_num(torch.tensor([NAN, 1.0]), nan=-0.0), "nan_to_num")


@emulated
@pytest.mark.parametrize("name", ("uniform_", "normal_", "exponential_", "bernoulli_"))
def test_versions_of_fills(name: str) -> None:
    x = torch.empty(8)
    with taken("sm_80", "rng"):
        getattr(x, name)()
        assert x._version == 1
        getattr(x, name)()
    assert x._version == 2


@emulated
def test_versions_of_random_results() -> None:
    x = torch.ones(8)
    with taken("sm_80", "rng"):
        results = [torch.rand(8), torch.randn(8), torch.rand_like(x), torch.randn_like(x), torch.normal(x, x)]
        results += [torch.normal(x, 1.0), torch.normal(0.0, x), *torch.native_dropout(x, 0.5, True)]
    assert [tensor._version for tensor in results] == [0] * len(results)


@emulated
def test_negative_deviations_are_refused() -> None:
    x = torch.ones(8)
    for function in (
        lambda: x.clone().normal_(std=-1), lambda: torch.normal(x, -1.0), lambda: torch.normal(x, -x),
        lambda: torch.normal(0.0, torch.tensor([1.0, NAN])), lambda: x.clone().normal_(std=NAN),
    ):  # fmt: skip
        _same(function, "rng")


@emulated
def test_dropped_infinities_are_nan() -> None:
    x = torch.tensor([NAN, INF, -INF, 1.0]).repeat(64)
    with taken("sm_80", "rng"):
        y, mask = torch.native_dropout(x, 0.5, True)
    torch.testing.assert_close(y, x * mask * 2.0, rtol=0, atol=0, equal_nan=True)
    assert not mask.all() and mask.any()


@emulated
def test_extremes_of_zeros() -> None:
    """As on CUDA: the positive zero is larger."""
    a, b = torch.tensor([0.0, -0.0, -0.0]), torch.tensor([-0.0, 0.0, -0.0])
    with taken("sm_80", ["maximum", "minimum", "clamp"]):
        assert torch.maximum(a, b).signbit().tolist() == [False, False, True]
        assert torch.minimum(a, b).signbit().tolist() == [True, True, True]
        assert a.clamp(min=b, max=b + 1).signbit().tolist() == [False, False, True]


@emulated
def test_orders_of_products_are_those_of_cuda() -> None:
    """Intermediate results that overflow in other orders than that of torch's CUDA kernels."""
    big, small = torch.tensor([1e30]), torch.tensor([1e-30])
    with taken("sm_80", ["addcmul", "glu_backward", "softplus_backward", "_softmax_backward_data"]):
        assert torch.addcmul(big * 0, big, small, value=1e20).item() == pytest.approx(1e20)
        x = torch.tensor([1e20, 60.0])  # the slope of the gate is 0 in fp32 beyond 17, about 1e-26 before rounding
        got = torch.ops.aten.glu_backward(torch.tensor([1e20]), torch.tensor([1e20, -50.0]), 0)
        gate = torch.sigmoid(torch.tensor(-50.0))
        torch.testing.assert_close(got, torch.stack([gate * 1e20, (1 - gate) * gate * 1e20 * 1e20]))
        assert x.isfinite().all()
        top = torch.finfo(torch.float32).max
        dy, y = torch.tensor([[top, -top, -top]]), torch.tensor([[0.25, 0.5, 0.25]])
        got = torch.ops.aten._softmax_backward_data(dy, y, 1, torch.float32)
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), (y.double() * (dy.double() - (dy.double() * y.double()).sum())))


@emulated
@pytest.mark.parametrize("cols", (5, 64, 1024))
def test_rms_norm_of_infinities(cols: int) -> None:
    """A sum of squares that is infinite makes finite elements 0, not NaN; also where squares overflow."""
    x = torch.randn(4, cols)
    x[0, 1], x[1, 2], x[2, 3] = INF, NAN, 1e30
    weight = torch.randn(cols)
    with rtkernels.emulate("sm_80"):
        y, rstd = row._rms_norm(x, [cols], weight, 1e-5)
        dx, dw = row._rms_norm_backward(torch.ones_like(x), x, [cols], rstd, weight, [True, True])
    want = torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5)
    torch.testing.assert_close(rstd, want, equal_nan=True)
    torch.testing.assert_close(y, x * want * weight, equal_nan=True)
    assert y[0].isnan().tolist() == [i == 1 for i in range(cols)] and y[1].isnan().all() and (y[2] == 0).all()
    assert dx[0].isnan().all() and dx[1].isnan().all() and (dx[2] == 0).all() and dx[3].isfinite().all()
    assert dw[1].isnan()


@emulated
@pytest.mark.parametrize("dim", (0, 1))
def test_softmax_of_an_infinity(dim: int) -> None:
    x = torch.randn(6, 6)
    x[2, 3] = INF
    _same(lambda: torch.softmax(x, dim).isnan(), "_softmax")


@emulated
def test_norms_keep_the_sign_of_zero() -> None:
    x = torch.tensor([[-0.0, 1.0, -1.0, 0.0]])
    with rtkernels.emulate("sm_80"):
        y, _ = row._rms_norm(x, [4], None, 1e-5)
    assert y.signbit().tolist() == [[True, False, True, False]]


@emulated
def test_integers_divided_by_zero() -> None:
    """0; torch on CUDA leaves it undefined, its CPU kernels raise."""
    x, zero = torch.tensor([-7, 0, 7]), torch.zeros(3, dtype=torch.int64)
    with taken("sm_80", ["div", "floor_divide", "remainder", "fmod"]):
        for function in (
            torch.remainder, torch.fmod, torch.floor_divide, lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        ):  # fmt: skip
            assert function(x, zero).tolist() == [0, 0, 0]


@emulated
def test_isclose_is_one_kernel() -> None:
    x = torch.randn(8)
    assert torch.isclose(x, x)._version == 1
    with taken("sm_80", "isclose"):
        assert torch.isclose(x, x)._version == 0


@emulated
@pytest.mark.parametrize(("at", "cols"), ((0, 8), (3, 8), (7, 8), (0, 2), (1, 2), (2, 6), (5, 33)))
def test_means_of_infinities_are_not_finite(at: int, cols: int) -> None:
    x = torch.randn(2, cols)
    x[0, at] = INF
    with taken("sm_80", "native_layer_norm"):
        y, mean, rstd = torch.native_layer_norm(x, [cols], None, None, 1e-5)
    assert y[0].isnan().all() and rstd[0].isnan() and not mean[0].isfinite()
    assert y[1].isfinite().all()


@emulated
def test_layer_norm_of_large_numbers() -> None:
    """Their mean is finite though their sum is not; the variance is infinite."""
    x = torch.full((1, 8), torch.finfo(torch.float32).max)
    x[0, 0] = 0.0
    with taken("sm_80", "native_layer_norm"):
        y, mean, rstd = torch.native_layer_norm(x, [8], None, None, 1e-5)
    assert mean.isfinite() and rstd.item() == 0.0 and (y == 0).all()


@emulated
def test_one_rounding() -> None:
    """Products that overflow in fp16 on the way to a result that does not."""
    big, small = torch.tensor([60000.0], dtype=torch.float16), torch.tensor([2.0], dtype=torch.float16)
    with taken("sm_80", "addcmul"):
        assert torch.addcmul(-big, big, small).item() == 60000.0
    x = big.clone().requires_grad_()  # the difference is 120000: torch's CUDA kernel has inf
    with taken("sm_80", "mse_loss_backward"):
        torch.nn.functional.mse_loss(x, -big, reduction="none").backward(small / 8)
    assert x.grad.item() == 60000.0


@emulated
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_division_by_numbers_is_that_of_cuda(dtype: torch.dtype) -> None:
    """torch's CUDA kernels multiply by the reciprocal of a number, which affects the rounding modes."""
    x = torch.tensor([49.0, 41.0, 1e-42, 7.0, -7.5, 0.0, INF, NAN], dtype=dtype)
    for number in (49, 41.0, 3, -2.5, 1e-42, INF, 0.0):
        divisor = torch.tensor(number, dtype=torch.float32)
        inverse = 1.0 / divisor
        with taken("sm_80", ["div", "floor_divide"]):
            plain, cut = x / number, torch.div(x, number, rounding_mode="trunc")
        torch.testing.assert_close(plain, (x.float() * inverse).to(dtype), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(cut, (x.float() * inverse).trunc().to(dtype), rtol=0, atol=0, equal_nan=True)


@emulated
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_numbers_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, 300.0, 1000.0, 2.0], dtype=dtype)
    with taken("sm_80", "threshold"):
        assert torch.nn.functional.threshold(x, 0.1, -1.0)[0] == -1.0  # torch's CPU kernel rounds it for float16 only
    with taken("sm_80", "pow"):
        got = [torch.pow(x, -2), torch.pow(x, 1.1), torch.pow(x, 3)]
    square = (x.float() * x.float()).to(dtype).float()
    want = [1.0 / square, x.float() ** torch.tensor(1.1, dtype=dtype).float(), square * x.float()]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


@emulated
@pytest.mark.parametrize("number", (65519, 65520, -100000, 2**62))
def test_integers_beyond_float16(number: int) -> None:
    x = torch.tensor([65504.0, -65504.0, INF, -INF, NAN, 1.0], dtype=torch.float16)
    _same(lambda: torch.eq(x, number), "eq")
    _same(lambda: torch.lt(x, number), "lt")
    finite = x[x.isfinite()]  # the sign of a NaN depends on torch's version
    _same(lambda: torch.fmod(finite, number), "fmod")
