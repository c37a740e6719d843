"""Products of tcgen05 in the emulator: every kind of operands, tails in all directions, and what is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import rtkernels as rtk
from rtkernels.errors import RtkError
from rtkernels.ops.quant.pack import swizzle_scales

SIZES = [(1, 1, 64), (5, 300, 256), (257, 140, 448)]
ORDERED = [*((size, "forward") for size in SIZES), *((SIZES[-1], order) for order in ("reverse", 7))]
mm = partial(rtk.scaled_mm, backend="tcgen05")


def _near(found: Tensor, wanted: Tensor) -> None:
    """Compare fp32 results with exact ones; sums of products of few bits lose almost nothing."""
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6 * wanted.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "order"), [*ORDERED, ((129, 257, 200), "forward")])
def test_16_bits(size: tuple[int, int, int], dtype: torch.dtype, order: str | int) -> None:
    m, n, k = size
    a, b = torch.randn(m, k + 8).to(dtype)[:, :k], torch.randn(n, k).to(dtype)
    with rtk.emulate("sm_100", order=order):
        _near(mm(a, b, out_dtype=torch.float32), a.double() @ b.double().T)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("size", SIZES)
def test_fp8_with_everything(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = size
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    scale_a, scale_b = torch.rand(m) + 0.5, torch.rand(n) + 0.5
    bias, add = torch.randn(n).bfloat16(), torch.randn(m, n)
    wanted = (a.double() * scale_a[:, None]) @ (b.double() * scale_b[:, None]).T + bias + add
    with rtk.emulate("sm_100"):
        _near(mm(a, b, scale_a, scale_b, bias=bias, add=add, act="relu", out_dtype=torch.float32), wanted.relu())
        one = mm(a, b, scale_a[:1], scale_b[:1], recipe="tensor", out_dtype=torch.bfloat16)
    exact = a.double() @ b.double().T * scale_a[0] * scale_b[0]
    assert (one.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.parametrize(("size", "order"), ORDERED)
def test_block_formats(size: tuple[int, int, int], order: str | int) -> None:
    m, n, k = size
    x, w = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    with rtk.emulate("sm_100", order=order):
        for quantize, dequantize in ((rtk.quantize_mxfp8, rtk.dequantize_mxfp8), (_nvfp4, _from_nvfp4)):
            (a, scale_a), (b, scale_b) = quantize(x)[:2], quantize(w)[:2]
            wanted = dequantize(a, scale_a).double() @ dequantize(b, scale_b).double().T
            _near(mm(a, b, swizzle_scales(scale_a), swizzle_scales(scale_b), out_dtype=torch.float32), wanted)


def _nvfp4(x: Tensor) -> tuple[Tensor, ...]:
    return rtk.quantize_nvfp4(x, global_scale=1.0)


def _from_nvfp4(codes: Tensor, scales: Tensor) -> Tensor:
    return rtk.dequantize_nvfp4(codes, scales, 1.0)


def test_scales_behind_the_end_of_k_are_not_read() -> None:
    x = torch.randn(40, 64).bfloat16()
    with rtk.emulate("sm_100"):
        codes, scales = rtk.quantize_mxfp8(x)[:2]
        blocks = swizzle_scales(scales)
        padding = swizzle_scales(torch.ones_like(scales.view(torch.uint8))) == 0
        spoilt = blocks.view(torch.uint8).masked_fill(padding, 255).view(blocks.dtype)  # NaN
        assert torch.equal(mm(codes, codes, spoilt, spoilt), mm(codes, codes, blocks, blocks))


def test_it_is_taken_by_name_only() -> None:
    a = torch.randn(256, 256).bfloat16()
    assert rtk.explain(rtk.scaled_mm, a, a, target="10.0").backend == "mma"
    assert "never run" in str(rtk.explain(rtk.scaled_mm, a, a, target="10.0", backend="tcgen05"))


@pytest.mark.parametrize(
    ("target", "dtype", "change", "reason"),
    [
        ("sm_90", torch.bfloat16, {}, "sm_90a has no tcgen05"),
        ("sm_100", torch.bfloat16, {"b_layout": "kn"}, "operands have rows of k"),
        ("sm_100", torch.float8_e4m3fn, {"scale_a": torch.ones(256, 2), "scale_b": torch.ones(2, 2)}, "scales are"),
    ],
)
def test_refusals(target: str, dtype: torch.dtype, change: dict, reason: str) -> None:
    a = torch.randn(256, 256).to(dtype)
    with rtk.emulate(target), pytest.raises(RtkError, match=reason):
        mm(a, a, **change)
