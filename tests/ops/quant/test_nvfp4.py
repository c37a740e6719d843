"""NVFP4 and MX formats: codes and scales bit for bit, rules of rounding, swizzled scales, products, errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.compare import running_on
from support.inference import EVERYWHERE, assert_captures, normal_numbers, results
from support.places import at, error_tests
from torch import Tensor

import rtkernels
from rtkernels.ops.quant import nvfp4_plan, pack
from rtkernels.ops.shared import block_formats as formats
from rtkernels.runtime.launch.plans import Plans

normal = normal_numbers(0)
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def same_bits(got: list[Any], wanted: list[Any]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.itemsize > 1:  # a NaN may have any sign
            a, b = (t.masked_fill(t.isnan(), 1e30) for t in (a, b))
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def rows(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    x = normal(rows, cols, dtype=torch.float32) * torch.randn(rows, 1, generator=torch.Generator().manual_seed(1)).exp()
    x[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    x[-1, :16] = 0
    x[1, :16] *= 1e-6  # scales at the lower end of their range
    x = x.to(dtype)
    x[0, 0] = torch.nan  # a vectorised conversion may flip its sign, and no product on a GPU preserves it
    return x


RULES = {
    "two levels": {},
    "one level, swizzled": {"swizzled": True, "global_scale": 1.0},
    "up, away": {"scale_rule": "ceil", "elem_rule": "away", "global_scale": torch.tensor(0.01)},
    "search, zero": {"scale_rule": "mse", "elem_rule": "zero", "channel_scale": torch.linspace(0.5, 2, 48)},
}


@EVERYWHERE
@pytest.mark.parametrize("rule", RULES)
def test_nvfp4_has_the_bits_of_the_reference(where: str, rule: str) -> None:
    x, options = rows(131, 48, torch.bfloat16), RULES[rule]
    wanted = results(rtkernels.quantize_nvfp4, "cpu", x, **options)
    same_bits(results(rtkernels.quantize_nvfp4, where, x, **options), wanted)
    back = {"swizzled": options.get("swizzled", False)}
    same_bits(
        results(rtkernels.dequantize_nvfp4, where, *wanted, **back),
        results(rtkernels.dequantize_nvfp4, "cpu", *wanted, **back),
    )


@EVERYWHERE
def test_quotients_next_to_ties(where: str) -> None:
    """Ratios of small integers are ties except for the rounding of the steps."""
    sixteenths = torch.arange(-56, 57).float() / 16
    x = sixteenths[torch.randint(113, (96, 64), generator=torch.Generator().manual_seed(2))].bfloat16()
    x[0, 0] = 3.5  # of which 2688 is a multiple
    for elem_rule in formats.ELEMENT_RULES:
        for scale_rule in ("rne", "ceil"):
            options = {"elem_rule": elem_rule, "scale_rule": scale_rule}
            wanted = results(rtkernels.quantize_nvfp4, "cpu", x, **options)
            same_bits(results(rtkernels.quantize_nvfp4, where, x, **options), wanted)


def _two_part_quotients_agree(steps: Tensor, bits: int) -> bool:
    """Whether quotients by a reciprocal in two parts (common/block_formats.cuh) fall on the same side of all ties as
    divisions.

    Each rounding is one of fp64 to fp32: what is rounded is exact in fp64.
    """

    def rounded(v: Tensor) -> Tensor:
        return v.float().double()

    inverse = rounded(1 / steps)
    rest = rounded(rounded(1 - inverse * steps) * inverse)
    low = rounded(rest + rest.abs() * 2.0**-23)
    for tie in (1.0, 1.25, 1.5, 1.75):
        unit = torch.exp2(torch.floor(torch.log2(tie * steps)) - (bits - 1))
        below = torch.floor(tie * steps / unit) * unit
        for v in (below, below + unit):
            quotient = rounded(v * inverse + rounded(v * low))
            if not torch.equal((quotient - tie).sign(), (rounded(v / steps) - tie).sign()):
                return False
    return True


@pytest.mark.parametrize("every", [997, pytest.param(1, marks=pytest.mark.slow)])
def test_two_parts_of_a_reciprocal_are_enough_for_16_bits(every: int) -> None:
    """For all steps, up to powers of two, and the numbers of bf16 (8 bits) and fp16 (11) next to each tie."""
    for first in range(0, 1 << 23, 1 << 20):
        parts = torch.arange(first, min(first + (1 << 20), 1 << 23)).flip(0)[::every]  # the last one is the hardest
        steps = 1 + parts.double() / (1 << 23)
        assert all(_two_part_quotients_agree(steps, bits) for bits in (8, 11))


def test_threads_that_have_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvfp4_plan, "device_info", lambda device: SimpleNamespace(sm_count=1))
    monkeypatch.setattr(nvfp4_plan, "_THREADS", 32)
    Plans.forget_all()
    x = rows(131, 48, torch.bfloat16)
    for quantize in (rtkernels.quantize_nvfp4, rtkernels.quantize_mxfp8):
        for options in ({}, {"swizzled": True}):
            same_bits(results(quantize, "sm_90", x, **options), results(quantize, "cpu", x, **options))
    Plans.forget_all()


def emulated_coverage() -> None:
    for rule in ("two levels", "search, zero"):
        test_nvfp4_has_the_bits_of_the_reference("sm_90", rule)
    test_scales_are_swizzled("sm_90")


@pytest.mark.slow
@EVERYWHERE
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
@pytest.mark.parametrize("shape", ((1, 2), (3, 50), (5, 136), (2, 4104)))
def test_nvfp4_of_any_shape(where: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = rows(*shape, dtype) if shape[1] > 16 else normal(*shape, dtype=dtype)
    for given in (x, normal(shape[1], shape[0], dtype=dtype).t(), normal(shape[0], shape[1] + 1, dtype=dtype)[:, 1:]):
        for options in ({}, {"swizzled": True, "scale_rule": "mse"}):
            wanted = results(rtkernels.quantize_nvfp4, "cpu", given, **options)
            same_bits(results(rtkernels.quantize_nvfp4, where, given, **options), wanted)


@pytest.mark.slow
@EVERYWHERE
@pytest.mark.parametrize("swizzled", (False, True))
def test_mx_has_the_bits_of_the_reference(where: str, swizzled: bool) -> None:
    x = rows(5, 96, torch.bfloat16)
    calls = [(rtkernels.quantize_mxfp8, rtkernels.dequantize_mxfp8, {"rule": "ocp"})]
    calls += [(rtkernels.quantize_mxfp8, rtkernels.dequantize_mxfp8, {"rule": "nv", "dtype": torch.float8_e5m2})]
    calls += [(rtkernels.quantize_mxfp4, rtkernels.dequantize_mxfp4, {"rule": rule}) for rule in ("ocp", "nv")]
    for quantize, dequantize, options in calls:
        wanted = results(quantize, "cpu", x, swizzled=swizzled, **options)
        same_bits(results(quantize, where, x, swizzled=swizzled, **options), wanted)
        back = results(dequantize, "cpu", *wanted, swizzled=swizzled)
        same_bits(results(dequantize, where, *wanted, swizzled=swizzled), back)


def test_the_reference_is_that_of_packed_weights() -> None:
    x = torch.randn(33, 128)
    same_bits(list(rtkernels.quantize_nvfp4(x)), list(pack.quantize_nvfp4(x)))
    same_bits(list(rtkernels.quantize_mxfp8(x)), list(pack.quantize_mx(x)))
    same_bits(list(rtkernels.quantize_mxfp4(x, rule="nv")), list(pack.quantize_mx(x, "e2m1", rule="nv")))


def test_ties_go_where_the_rule_says() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = torch.cat([ties, -ties, torch.tensor([6.0, -6.0])]).unsqueeze(0)
    expected = {"rne": [0, 1, 1, 2, 2, 4, 4], "away": [0.5, 1, 1.5, 2, 3, 4, 6], "zero": [0, 0.5, 1, 1.5, 2, 3, 4]}
    for rule, values in expected.items():
        codes, scale, g = rtkernels.quantize_nvfp4(x, global_scale=1.0, elem_rule=rule)
        found = rtkernels.dequantize_nvfp4(codes, scale, g, dtype=torch.float32)[0]
        assert scale.float().item() == 1.0
        assert found[:7].tolist() == values and found[7:14].tolist() == [-v for v in values]


def test_scales_follow_their_rule() -> None:
    x = normal(64, 64, dtype=torch.float32)
    _, nearest, _ = rtkernels.quantize_nvfp4(x, global_scale=1.0)
    _, up, _ = rtkernels.quantize_nvfp4(x, global_scale=1.0, scale_rule="ceil")
    sixth = x.unflatten(-1, (-1, 16)).abs().amax(-1) / 6
    assert (up.float() >= sixth).all() and (up.view(torch.uint8) - nearest.view(torch.uint8) <= 1).all()

    def error(rule: str) -> Tensor:
        back = rtkernels.dequantize_nvfp4(
            *rtkernels.quantize_nvfp4(x, global_scale=1.0, scale_rule=rule), dtype=torch.float32
        )
        return (back - x).square().unflatten(-1, (-1, 16)).sum(-1)

    assert (error("mse") <= error("rne")).all()
    codes, scale, _ = rtkernels.quantize_nvfp4(torch.full((1, 16), 1e-9), global_scale=1.0)
    assert scale.view(torch.uint8).item() == 0 and codes.eq(0).all()  # a scale that underflows gives zeros
    _, scale, _ = rtkernels.quantize_nvfp4(torch.full((1, 16), 1e6), global_scale=1.0)
    assert scale.view(torch.uint8).item() == 0x7E


@at("cpu", "sm_90", "cuda")
def test_scales_are_swizzled(place: str) -> None:
    for count, cols in ((1, 16), (130, 80), (128, 64), (300, 4096), (0, 64)):
        scales = torch.randint(0, 120, (count, -(-cols // 16)), dtype=torch.uint8)
        with running_on(place) as device:
            on_device = scales.to(device)
            padded = torch.nn.functional.pad(on_device, (0, 3))[:, : scales.shape[1]]
            flat = rtkernels.nvfp4_swizzle(on_device)
            coded = rtkernels.nvfp4_swizzle(padded.view(torch.float8_e4m3fn))
            assert coded.dtype == torch.float8_e4m3fn and torch.equal(coded.view(torch.uint8), flat)
            assert flat.numel() == rtkernels.nvfp4_scale_bytes(count, cols)
            assert torch.equal(rtkernels.nvfp4_unswizzle(flat, count, cols).cpu(), scales)
            flat = flat.cpu()
        if not count:
            continue
        r, b, tiles = count - 1, scales.shape[1] - 1, -(-scales.shape[1] // 4)
        byte = ((r // 128) * tiles + b // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + b % 4
        assert flat[byte] == scales[r, b]
        assert int(flat.int().sum()) == int(scales.int().sum())  # the rest is 0


def test_codes_go_into_products() -> None:
    a, w = normal(9, 64, dtype=torch.float32), normal(16, 64, dtype=torch.float32)
    exact = a @ w.t()
    for swizzled in (False, True):
        (qa, sa, ga), (qw, sw, gw) = (rtkernels.quantize_nvfp4(t, swizzled=swizzled) for t in (a, w))
        product = rtkernels.scaled_mm(qa, qw, sa, sw, recipe="nvfp4", global_scale=ga * gw, out_dtype=torch.float32)
        back = [
            rtkernels.dequantize_nvfp4(q, s, g, swizzled=swizzled, dtype=torch.float32)
            for q, s, g in ((qa, sa, ga), (qw, sw, gw))
        ]
        torch.testing.assert_close(product, back[0] @ back[1].t(), rtol=1e-4, atol=1e-4)
        assert (product - exact).norm() < 0.2 * exact.norm()
        (qa, sa), (qw, sw) = (rtkernels.quantize_mxfp8(t, swizzled=swizzled) for t in (a, w))
        product = rtkernels.scaled_mm(qa, qw, sa, sw, recipe="mx32", out_dtype=torch.float32)
        assert (product - exact).norm() < 0.06 * exact.norm()


def test_memory_that_is_given_and_empty_tensors() -> None:
    x = normal(4, 32)
    codes, scales = torch.empty(4, 16, dtype=torch.uint8), torch.empty(4, 2, dtype=torch.float8_e4m3fn)
    found = rtkernels.quantize_nvfp4(x, out=codes, scale_out=scales)
    assert found[0] is codes and found[1] is scales
    for shape in ((0, 32), (3, 0), (2, 0, 32)):
        found = rtkernels.quantize_nvfp4(torch.empty(shape), swizzled=False)
        assert found[0].shape == (*shape[:-1], shape[-1] // 2)
        assert rtkernels.dequantize_nvfp4(*found).shape == shape


@pytest.mark.gpu
def test_a_graph_takes_new_values() -> None:
    x, g = normal(128, 256).cuda(), torch.tensor(0.02, device="cuda")
    codes = torch.empty(128, 128, dtype=torch.uint8, device="cuda")
    scales = torch.empty(128, 16, dtype=torch.float8_e4m3fn, device="cuda")
    assert_captures(lambda: rtkernels.quantize_nvfp4(x, global_scale=g, out=codes, scale_out=scales))
    assert_captures(lambda: rtkernels.quantize_nvfp4(x, swizzled=True))


X = torch.ones(2, 32)
BAD = {
    "odd columns": (lambda: rtkernels.quantize_nvfp4(torch.ones(2, 7)), "x has 7 columns; expected a multiple of 2"),
    "rule": (lambda: rtkernels.quantize_nvfp4(X, scale_rule="up"), "scale_rule is 'up'; expected one of 'rne'"),
    "element rule": (lambda: rtkernels.quantize_nvfp4(X, elem_rule="up"), "elem_rule is 'up'; expected one of 'rne'"),
    "scale below 0": (lambda: rtkernels.quantize_nvfp4(X, global_scale=-1.0), "global_scale is -1.0; expected"),
    "channels": (lambda: rtkernels.quantize_nvfp4(X, channel_scale=torch.ones(3)), "channel_scale has shape"),
    "dtype": (lambda: rtkernels.quantize_nvfp4(X.double()), "x has dtype float64; expected one of"),
    "out": (lambda: rtkernels.quantize_nvfp4(X, out=torch.empty(2, 16)), "out has dtype float32; expected uint8"),
    "codes": (lambda: rtkernels.dequantize_mxfp8(X, X), "codes has dtype torch.float32; expected float8_e4m3fn"),
    "scales": (
        lambda: rtkernels.dequantize_nvfp4(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8)),
        "scales is torch.uint8 .2, 3.; expected torch.float8_e4m3fn .2, 2.",
    ),
    "bytes": (lambda: rtkernels.nvfp4_unswizzle(torch.zeros(7, dtype=torch.uint8), 2, 32), "scales has 7 bytes; expe"),
    "mx rule": (lambda: rtkernels.quantize_mxfp4(X, rule="up"), "^rule is 'up'; expected one of 'ocp'"),
}
test_errors_on_the_cpu, test_errors_in_the_launchers = error_tests(BAD)


def test_every_code_comes_back() -> None:
    for sign in (1.0, -1.0):
        x = sign * VALUES.repeat(2).unsqueeze(0)
        assert torch.equal(formats.decode_e2m1(formats.pack(formats.encode_e2m1(x))), x)
