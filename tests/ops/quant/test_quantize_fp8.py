"""fp8 quantisation: codes and scales bit for bit at every place they can be computed."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from support.compare import assert_same_bits, poisoned, running_on
from support.fp8_cases import DEVICE_CODE, SHAPES, VIEWS, same_strides, wild
from support.fp8_reference import E4M3, E5M2, FP8, encode, slow
from support.places import DTYPES, ORDERS, at, emulated, meta_on
from torch import Tensor

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.ops.quant import quantize_fp8 as module

quantize_fp8, dequantize_fp8 = rtkernels.quantize_fp8, rtkernels.dequantize_fp8
RECIPES = [("tensor", "row"), ("row", "row"), ("group", "row"), ("group", "column"), ("group_t", "row")]
RECIPES += [("block", "row")]
recipes = pytest.mark.parametrize(("granularity", "layout"), RECIPES, ids=map("-".join, RECIPES))


def same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], what: str) -> None:
    assert_same_bits(got[1].cpu(), want[1].cpu(), f"scale, {what}")
    assert_same_bits(got[0].cpu(), want[0].cpu(), f"codes, {what}")
    assert got[0].is_contiguous() and got[1].is_contiguous()


# ---- numerics -------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@recipes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_is_the_recipe(granularity: str, layout: str, dtype: torch.dtype):
    for rows, cols in SHAPES:
        x = wild(rows, cols, dtype, seed=rows)
        for fp8 in FP8:
            for pow2 in (False, True):
                q, scale = quantize_fp8(x, granularity=granularity, dtype=fp8, pow2_scale=pow2, scale_layout=layout)
                codes, scales = slow(x, granularity, layout, fp8, pow2)
                np.testing.assert_array_equal(scale.numpy(), scales)
                np.testing.assert_array_equal(q.view(torch.uint8).numpy(), codes)


@at(*DEVICE_CODE)
@recipes
def test_device_code_gives_the_bits_of_the_reference(granularity: str, layout: str, place: str):
    for i, (name, dtype) in enumerate(product(VIEWS, DTYPES)):
        x, options = VIEWS[name](dtype), {"granularity": granularity, "scale_layout": layout}
        for fp8 in FP8 if name in ("33x257", "misaligned", "one long row") else FP8[i % 2 :][:1]:
            pow2 = bool(i // 2 % 2)
            want = quantize_fp8(x, dtype=fp8, pow2_scale=pow2, **options)
            back = dequantize_fp8(*want, dtype=dtype, **options)
            with running_on(place) as device:
                got = quantize_fp8(same_strides(x, device), dtype=fp8, pow2_scale=pow2, **options)
                again = dequantize_fp8(*(t.to(device) for t in want), dtype=dtype, **options).cpu()
            same(got, want, f"{name}, {dtype}, {fp8}")
            assert torch.equal(again.nan_to_num(nan=7.0), back.nan_to_num(nan=7.0)), f"back, {name}, {dtype}"
            assert torch.equal(again.isnan(), back.isnan())


@at(*DEVICE_CODE)
@pytest.mark.parametrize("granularity", ["tensor", "group"])
def test_back_from_dense_codes(granularity: str, place: str):
    # Blocks with a run of 2048 elements each, none of them shorter.
    q, scale = quantize_fp8(wild(48, 128, torch.float32), granularity=granularity)
    for dtype in DTYPES:
        want = dequantize_fp8(q, scale, granularity=granularity, dtype=dtype)
        with running_on(place) as device:
            got = dequantize_fp8(q.to(device), scale.to(device), granularity=granularity, dtype=dtype).cpu()
        assert torch.equal(got.nan_to_num(nan=7.0), want.nan_to_num(nan=7.0)), dtype


@emulated
@recipes
@pytest.mark.parametrize("order", ORDERS)
def test_order_of_threads_does_not_matter(granularity: str, layout: str, order: str | int):
    x = wild(130, 136, torch.bfloat16)
    want = quantize_fp8(x, granularity=granularity, scale_layout=layout)
    with rtkernels.emulate("sm_90", order=order), poisoned():
        got = quantize_fp8(x, granularity=granularity, scale_layout=layout)
    same(got, want, f"order {order}")


@at("cpu", *DEVICE_CODE)
def test_the_recipe_for_a_floor_on_amax(place: str):
    x = torch.randn(6, 200, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 2, 6)[:, None]
    groups = torch.nn.functional.pad(x, (0, 56)).unflatten(-1, (2, 128))
    for pow2 in (False, True):
        floor = 2.0**-22 if pow2 else 1e-4 / 448  # the next power of two
        with running_on(place) as device:
            there = x.to(device)
            s = quantize_fp8(there, granularity="group", pow2_scale=pow2)[1].clamp_min(floor)
            q = quantize_fp8(there * (1 / s).repeat_interleave(128, -1)[..., : x.shape[-1]], 1.0)[0]
        want = groups.abs().amax(-1).clamp(min=1e-4) / 448
        if pow2:
            want = 2.0 ** want.log2().ceil()
        torch.testing.assert_close(s.cpu(), want, rtol=1e-6, atol=0)
        restored = q.cpu().float() * s.cpu().repeat_interleave(128, -1)[:, :200]
        # Half a step of e4m3: relative, or 2^-10 of a scale below its normal numbers.
        step = torch.maximum(x.abs() * 2**-4, s.cpu().repeat_interleave(128, -1)[:, :200] * 2**-10)
        assert ((restored - x).abs() <= 1.001 * step).all()


@at("cpu", *DEVICE_CODE)
def test_given_scale(place: str):
    for dtype in DTYPES:
        for fp8 in FP8:
            for name in ("130x136", "misaligned", "transposed", "no rows"):
                x = VIEWS[name](dtype)
                for value in (0.02, 1.0, 3e-39, math.inf, 0.0, math.nan):
                    with running_on(place) as device:
                        scale = torch.tensor([value], device=device)
                        q, returned = quantize_fp8(same_strides(x, device), scale, dtype=fp8)
                    with np.errstate(all="ignore"):
                        codes = encode(x.float().numpy() * (np.float32(1) / np.float32(value)), fp8)
                    np.testing.assert_array_equal(q.cpu().view(torch.uint8).numpy(), codes, err_msg=f"{name} {value}")
                    assert returned.data_ptr() == scale.data_ptr()


@at("cpu", *DEVICE_CODE)
@recipes
def test_special_values(granularity: str, layout: str, place: str):
    options = {"granularity": granularity, "scale_layout": layout}
    with running_on(place) as device:
        zero, scale = quantize_fp8(torch.zeros(16, 128, device=device), **options)
        assert not zero.view(torch.uint8).any()
        assert (scale == torch.tensor(1e-30, device=device)).all()
        _, scale = quantize_fp8(torch.zeros(16, 128, device=device), pow2_scale=True, **options)
        assert (scale == 2.0**-99).all()
        # Neither NaN nor an infinity affects the scale of its neighbours.
        x = torch.full((128, 128), 2.0, device=device)
        x[5, 7], x[6, 7], x[7, 7], x[8, 7] = math.nan, -math.nan, math.inf, -math.inf
        q, scale = quantize_fp8(x, **options)
        q = q.view(torch.uint8).t() if granularity == "group_t" else q.view(torch.uint8)
        assert (scale == torch.tensor(2.0, device=device) / 448).all()
        assert q[5:9, 7].tolist() == [0x7F, 0x7F, 0x7E, 0xFE]
        assert (q.flatten()[:600] == 0x7E).all()
        q, scale = quantize_fp8(torch.full((3, 5), math.inf, device=device), **options)
        assert (q.view(torch.uint8) == 0x7E).all() and (scale == torch.tensor(1e-30, device=device)).all()
        most = torch.finfo(torch.float32).max
        q, scale = quantize_fp8(torch.full((3, 5), most, device=device), dtype=E5M2, **options)
        assert (q.view(torch.uint8) == 0x7B).all() and scale.isfinite().all()
        back = dequantize_fp8(q, scale, dtype=torch.float32, **options)
        assert (back / most - 1).abs().max() < 2e-7
        q, scale = quantize_fp8(torch.full((3, 5), -1e-40, device=device), **options)
        assert (q.view(torch.uint8) == 0x80).all()


@recipes
def test_round_trip_error(granularity: str, layout: str):
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(3))
    for fp8, unit in ((E4M3, 2.0**-4), (E5M2, 2.0**-3)):
        q, scale = quantize_fp8(x, granularity=granularity, dtype=fp8, scale_layout=layout)
        y = dequantize_fp8(q, scale, granularity=granularity, dtype=torch.float32, scale_layout=layout)
        step = scale.max() * (2.0**-9 if fp8 == E4M3 else 2.0**-16)
        assert ((y - x).abs() <= 1.001 * torch.maximum(unit * x.abs(), step / 2)).all()


def test_leading_dimensions_and_shapes():
    x = torch.randn(2, 3, 200)
    shapes = {g + layout: [tuple(t.shape) for t in quantize_fp8(x, granularity=g, scale_layout=layout)]
              for g, layout in RECIPES}  # fmt: skip
    assert shapes == {
        "tensorrow": [(2, 3, 200), ()],
        "rowrow": [(2, 3, 200), (2, 3)],
        "grouprow": [(2, 3, 200), (2, 3, 2)],
        "groupcolumn": [(2, 3, 200), (2, 6)],
        "group_trow": [(200, 6), (1, 200)],
        "blockrow": [(2, 3, 200), (1, 2)],
    }
    assert [tuple(t.shape) for t in quantize_fp8(torch.randn(5), granularity="row")] == [(5,), ()]


# ---- errors ---------------------------------------------------------------------------------------------------------

X, Q = torch.ones(3, 130), torch.ones(3, 130).to(E4M3)
BAD = {
    "x has dtype float64; expected one of bfloat16, float16, float32": lambda: quantize_fp8(X.double()),
    "the result has dtype bfloat16; expected one of float8_e4m3fn": lambda: quantize_fp8(X, dtype=torch.bfloat16),
    "granularity is 'column'; expected one of 'tensor', 'row'": lambda: quantize_fp8(X, granularity="column"),
    "scale_layout is 'T'; expected one of 'row', 'column'": lambda: quantize_fp8(X, scale_layout="T"),
    "'column' goes with granularity 'group' only, not with 'row'": lambda: quantize_fp8(
        X, granularity="row", scale_layout="column"
    ),
    "x has no dimensions; expected at least one": lambda: quantize_fp8(torch.tensor(1.0)),
    r"scale has shape \(2,\); expected one element": lambda: quantize_fp8(X, torch.ones(2)),
    "scale has dtype bfloat16; expected one of float32": lambda: quantize_fp8(X, torch.ones(1).bfloat16()),
    "scale has device index 0; expected -1, that of x": lambda: module.STATIC.check(
        meta_on(-1, X), meta_on(0, torch.ones(())), E4M3
    ),
    "scale can be given for granularity 'tensor' only": lambda: quantize_fp8(X, torch.ones(1), granularity="row"),
    "pow2_scale rounds computed scales": lambda: quantize_fp8(X, torch.ones(1), pow2_scale=True),
    "x is a list; expected a torch.Tensor or an array with __dlpack__": lambda: quantize_fp8([1.0]),
    "q has dtype float32; expected one of float8_e4m3fn": lambda: dequantize_fp8(X, torch.ones(())),
    "q has dtype uint8; expected one of float8_e4m3fn": lambda: dequantize_fp8(Q.view(torch.uint8), torch.ones(())),
    "q has dtype float8_e4m3fn; expected float8_e5m2, as code_dtype says, or uint8": lambda: dequantize_fp8(
        Q, torch.ones(()), code_dtype=E5M2
    ),
    "the result has dtype float8_e5m2; expected one of": lambda: dequantize_fp8(Q, torch.ones(()), dtype=E5M2),
    "q has no dimensions": lambda: dequantize_fp8(Q[0, 0], torch.ones(())),
    "'group_t' expects two dimensions": lambda: dequantize_fp8(Q[None], torch.ones(1, 3), granularity="group_t"),
    r"scale has shape \(3, 1\); expected \(3, 2\) for granularity 'group', scale_layout 'row'": lambda: dequantize_fp8(
        Q, torch.ones(3, 1), granularity="group"
    ),
    "scale has dtype float16; expected one of float32": lambda: dequantize_fp8(
        Q, torch.ones(3).half(), granularity="row"
    ),
    "scale is a NoneType; expected a torch.Tensor": lambda: dequantize_fp8(X.to(E4M3), None),
    "scale is '0.5'; expected a torch.Tensor": lambda: quantize_fp8(X, "0.5"),
    "scale has device index 0; expected -1, that of q": lambda: module.DEQUANTIZE.check(
        meta_on(-1, Q), meta_on(0, torch.ones(3)), "row", E4M3, torch.float32, "row"
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_errors(message: str):
    with pytest.raises(ArgumentError, match=message):
        BAD[message]()


@emulated
def test_launchers_check_too():
    with rtkernels.emulate(), pytest.raises(ArgumentError, match="granularity is 'column'"):
        quantize_fp8(X, granularity="column")


# ---- torch and other libraries --------------------------------------------------------------------------------------


@recipes
def test_compile(granularity: str, layout: str):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def round_trip(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, scale = quantize_fp8(x * 2, granularity=granularity, scale_layout=layout)
        return q, scale, dequantize_fp8(q, scale, granularity=granularity, scale_layout=layout)

    x = torch.randn(9, 136, requires_grad=True)
    q, scale, y = round_trip(x)
    same((q, scale), quantize_fp8(x * 2, granularity=granularity, scale_layout=layout), "compiled")
    assert y.dtype == torch.bfloat16 and not y.requires_grad


def test_results_do_not_require_grad():
    x = torch.randn(3, 5, requires_grad=True)
    for scale in (None, torch.ones((), requires_grad=True)):
        q, used = quantize_fp8(x, scale)
        assert not q.requires_grad and not used.requires_grad


def test_numpy():
    x = np.random.default_rng(0).standard_normal((5, 130), np.float32)
    q, scale = quantize_fp8(x, granularity="group")
    want_q, want_scale = quantize_fp8(torch.from_numpy(x), granularity="group")
    assert isinstance(q, np.ndarray) and isinstance(scale, np.ndarray)
    np.testing.assert_array_equal(q.view(np.uint8), want_q.view(torch.uint8).numpy())
    np.testing.assert_array_equal(scale, want_scale.numpy())
    back = dequantize_fp8(q.view(np.uint8), scale, granularity="group", dtype=torch.float32, code_dtype=E4M3)
    np.testing.assert_array_equal(
        back, dequantize_fp8(want_q, want_scale, granularity="group", dtype=torch.float32).numpy()
    )


# ---- GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@recipes
def test_graph_capture_streams_and_determinism(granularity: str, layout: str):
    options = {"granularity": granularity, "scale_layout": layout}
    x = torch.randn(300, 1000, device="cuda", dtype=torch.bfloat16)
    first = quantize_fp8(x, **options)
    dequantize_fp8(*first, **options)  # loads its kernel, which a capture cannot
    for _ in range(3):
        same(quantize_fp8(x, **options), first, "again")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantize_fp8(x, **options)
        back = dequantize_fp8(*captured, **options)
    x.mul_(-3)
    graph.replay()
    same(captured, quantize_fp8(x, **options), "replay")
    assert_same_bits(back, dequantize_fp8(*captured, **options))
    inputs = [x * k for k in (1, 5)]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results = []
    for _ in range(8):
        for stream, value in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(quantize_fp8(value, **options))
    torch.cuda.synchronize()
    for i, result in enumerate(results):
        same(result, quantize_fp8(inputs[i % 2].cpu(), **options), "two streams")


@pytest.mark.gpu
@pytest.mark.slow
@recipes
def test_beyond_two_to_the_31_elements(granularity: str, layout: str):
    rows, cols = 2**18 + 256, 8200
    tail = wild(256, cols, torch.bfloat16)
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    x[-256:] = tail.cuda()
    options = {"granularity": granularity, "scale_layout": layout}
    with poisoned():
        q, scale = quantize_fp8(x, **options)
        y = dequantize_fp8(q, scale, **options)
    want_q, want_scale = quantize_fp8(tail, **options)
    transposed = granularity == "group_t"
    assert_same_bits((q[:, -256:] if transposed else q[-256:]).contiguous().cpu(), want_q, "codes")
    if granularity in ("group_t", "block"):
        scale = scale[-2:]
    elif granularity != "tensor":
        scale = scale[:, -256:].contiguous() if layout == "column" else scale[-256:]
    assert_same_bits(scale.cpu(), want_scale, "scales")
    assert not q[: 16 if transposed else 4096].view(torch.uint8)[:, :4096].any()
    assert not y[:4096].any()
    want = dequantize_fp8(want_q, want_scale, **options)
    assert torch.equal(y[-256:].cpu().nan_to_num(7.0), want.nan_to_num(7.0))


def emulated_coverage() -> None:
    """Launch every kernel of the op in the emulator; the registry's test asks for it when this file has not run."""
    x = torch.randn(20, 136, dtype=torch.bfloat16)
    with rtkernels.emulate("sm_90"):
        for granularity, layout in RECIPES:
            options = {"granularity": granularity, "scale_layout": layout}
            dequantize_fp8(*quantize_fp8(x, **options), **options)
            dequantize_fp8(*quantize_fp8(x[:, 1:], **options), **options)
        for granularity in ("group", "block"):
            quantize_fp8(x, granularity=granularity, with_transposed=True)
        quantize_fp8(torch.randn(1, 17000), granularity="row")
        quantize_fp8(x[:, :128])  # by two kernels, as rows are apart
