"""Pooling and nearest upsampling of aten on our kernels: padding, dilation, ceil mode, strides, NaN."""

from __future__ import annotations

import re

import pytest
import torch
from support.overrides import compare, taken
from support.places import at, emulated
from torch.nn import functional

from rtkernels.ops.window import pooling, pooling_bwd, upsampling

PLACES = ("sm_90", "cuda")
WINDOWS = [
    {"kernel_size": 2},
    {"kernel_size": (3, 2), "stride": (2, 1), "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
]


def inputs():
    """Yield planes of odd sizes and strides."""
    yield torch.randn(2, 3, 7, 5)
    yield torch.randn(3, 6, 7)
    yield torch.randn(5, 2, 7, 4).transpose(0, 3)
    x = torch.randn(1, 1, 6, 6)
    x[0, 0, 2, 3], x[0, 0, 5, 5] = torch.nan, -torch.inf
    yield x


@emulated
@at(*PLACES)
@pytest.mark.parametrize(
    "window", [*(pytest.param(w, marks=pytest.mark.slow) for w in WINDOWS[:2]), WINDOWS[2]], ids=str
)
def test_pools(place: str, window: dict) -> None:
    for x in inputs():
        compare(place, "win", lambda x: functional.avg_pool2d(x, **window), x)
        compare(place, "win", lambda x: functional.avg_pool2d(x, **window, count_include_pad=False), x)
        compare(place, "win", lambda x: functional.avg_pool2d(x, **window, divisor_override=3), x)
        compare(place, "win", lambda x: torch.ops.aten.max_pool2d_with_indices(x, *_listed(window)), x)


def with_gradient(function):
    """Return a function that gives its result and the gradient of its argument."""

    def both(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().clone().requires_grad_()
        y = function(x)
        y.backward(torch.arange(y.numel(), dtype=y.dtype, device=y.device).view(y.shape))
        return [y.detach(), x.grad]

    return both


@emulated
@at(*PLACES)
@pytest.mark.parametrize(
    "window", [*(pytest.param(w, marks=pytest.mark.slow) for w in WINDOWS[:2]), WINDOWS[2]], ids=str
)
def test_gradients_of_pools(place: str, window: dict) -> None:
    for x in (torch.randn(2, 3, 7, 5), torch.randn(3, 6, 7)):
        compare(place, "win", with_gradient(lambda x: functional.avg_pool2d(x, **window)), x)
        compare(place, "win", with_gradient(lambda x: functional.avg_pool2d(x, **window, count_include_pad=False)), x)
        compare(place, "win", with_gradient(lambda x: functional.avg_pool2d(x, **window, divisor_override=3)), x)
        for dilation in (1, 2):
            how = {**window, "dilation": dilation, "return_indices": True}
            compare(place, "win", with_gradient(lambda x, how=how: functional.max_pool2d(x, **how)[0]), x)


def _listed(window: dict) -> tuple:
    given = (window["kernel_size"], window.get("stride", ()), window.get("padding", 0))
    pairs = ([v, v] if isinstance(v, int) else list(v) for v in given)
    return *pairs, [1, 1], window.get("ceil_mode", False)


@emulated
@at(*PLACES)
def test_dilated_maximum(place: str) -> None:
    compare(
        place, "win", lambda x: torch.ops.aten.max_pool2d_with_indices(x, [2, 3], [1, 2], [1, 1], [2, 1]),
        torch.randn(2, 3, 7, 9),
    )  # fmt: skip


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_upsample_twice(place: str, dtype: torch.dtype) -> None:
    """Whole vectors: rows of 16 bytes, planes that are apart."""
    x = torch.randn(2, 3, 5, 24)[:, 1:].to(dtype)
    double = lambda x: functional.interpolate(x, scale_factor=2, mode="nearest")  # noqa: E731
    compare(place, "win", double, x, rtol=0, atol=0)
    compare(place, "win", with_gradient(double), x.contiguous(), rtol=2**-7, atol=1e-5)


@emulated
@at(*PLACES)
def test_pools_of_vectors(place: str) -> None:
    """Gradients with 16 bytes per thread, warps with all windows inside the input, more rows than one thread has."""
    long_rows = torch.randn(1, 1, 7, 130)
    compare(place, "win", lambda x: functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False), long_rows)
    compare(place, "win", lambda x: torch.ops.aten.max_pool2d_with_indices(x, [2, 2], [1, 1], [1, 1]), long_rows)
    x = torch.randn(2, 2, 9, 16)
    for window in (
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 2},
        {"kernel_size": (2, 5), "stride": 3},
    ):
        compare(place, "win", with_gradient(lambda x, window=window: functional.avg_pool2d(x, **window)), x)
        how = {**window, "return_indices": True}
        compare(place, "win", with_gradient(lambda x, how=how: functional.max_pool2d(x, **how)[0]), x)


@emulated
@pytest.mark.parametrize("step", [2**29, 2**31 - 1, 2**31, 2**63 - 1])
def test_steps_that_leave_32_bits_are_torchs(step: int) -> None:
    """A warp with its first windows inside the input: nothing is read for windows that do not exist."""
    x = torch.randn(1, 1, 3, 60)
    for function in (torch.ops.aten.avg_pool2d, torch.ops.aten.max_pool2d_with_indices):
        for how in ([[3, 3], [step, 1]], [[3, 3], [1, step]]):
            try:
                want = function(x, *how)
            except RuntimeError as error:
                with taken("sm_90", "win"), pytest.raises(RuntimeError, match=re.escape(str(error)[:40])):
                    function(x, *how)
                continue
            compare("sm_90", "win", lambda x, function=function, how=how: function(x, *how), x, ours=False)
            with taken("sm_90", "win"):
                torch.testing.assert_close(function(x, *how), want)


@emulated
def test_windows_of_elements_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions among so many elements take 64-bit divisions; tested here with few elements."""
    for module in (pooling, pooling_bwd, upsampling):
        monkeypatch.setattr(module, "divisors", lambda count, *sizes: (0,) * len(sizes))
    x = torch.randn(3, 2, 5, 8).transpose(0, 1)
    for window in ({"kernel_size": 3, "stride": 2, "padding": 1}, {"kernel_size": (1, 2)}):
        compare("sm_90", "win", with_gradient(lambda x, window=window: functional.avg_pool2d(x, **window)), x)
        how = {**window, "return_indices": True}
        compare("sm_90", "win", with_gradient(lambda x, how=how: functional.max_pool2d(x, **how)[0]), x)
    for scale in (2, 3):
        bigger = lambda x, scale=scale: functional.interpolate(x, scale_factor=scale, mode="nearest")  # noqa: E731
        compare("sm_90", "win", bigger, x, rtol=0, atol=0)
        compare("sm_90", "win", with_gradient(bigger), x.contiguous())


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_upsample_of_vectors(place: str, dtype: torch.dtype) -> None:
    """16 bytes of the result from columns that are apart, at odd addresses, and by factors that are not 2."""
    x = torch.randn(2, 3, 4, 20).to(dtype)
    for part in (x[..., 1:17], x[..., ::2][..., 1:9], x[:, :2, :, 1:9].transpose(2, 3), x[..., :8].contiguous()):
        for scale in (2, 4, (2, 4), (0.5, 8)):
            bigger = lambda x, scale=scale: functional.interpolate(x, scale_factor=scale, mode="nearest")  # noqa: E731
            compare(place, "win", bigger, part, rtol=0, atol=0)
            compare(place, "win", with_gradient(bigger), part.contiguous(), rtol=2**-6, atol=1e-5)


@emulated
@at(*PLACES)
@pytest.mark.parametrize("how", [{"size": (9, 3)}, {"scale_factor": 2.0}, {"scale_factor": (1.5, 0.7)}], ids=str)
def test_upsample_nearest(place: str, how: dict) -> None:
    for x in (x for x in inputs() if x.dim() == 4):
        compare(place, "win", lambda x: functional.interpolate(x, mode="nearest", **how), x, rtol=0, atol=0)
        compare(place, "win", with_gradient(lambda x: functional.interpolate(x, mode="nearest", **how)), x.contiguous())
