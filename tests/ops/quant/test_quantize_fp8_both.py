"""fp8 codes of a matrix and of its transposed from one read: the bits of two separate quantisations."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from support.compare import assert_same_bits, poisoned, running_on
from support.fp8_cases import DEVICE_CODE, VIEWS, same_strides, wild
from support.fp8_reference import E4M3, FP8, slow
from support.places import DTYPES, ORDERS, at, emulated
from support.ways import captured
from torch import Tensor

import rtkernels
from rtkernels.errors import ArgumentError

quantize_fp8, dequantize_fp8 = rtkernels.quantize_fp8, rtkernels.dequantize_fp8
RECIPES = [("group", "row"), ("group", "column"), ("block", "row")]
recipes = pytest.mark.parametrize(("granularity", "layout"), RECIPES, ids=map("-".join, RECIPES))


def apart(x: Tensor, granularity: str, layout: str, **options) -> tuple[Tensor, ...]:
    """The four results by themselves, from the plain-torch versions."""
    q, scale = quantize_fp8(x, granularity=granularity, scale_layout=layout, **options)
    if granularity == "group":
        return q, scale, *quantize_fp8(x, granularity="group_t", **options)
    return q, scale, q.t().contiguous(), scale.t()


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...], what: str) -> None:
    for name, a, b in zip(("q", "scale", "q_t", "scale_t"), got, want, strict=True):
        assert_same_bits(a.cpu(), b.cpu(), f"{name}, {what}")


@recipes
def test_reference_is_the_recipe(granularity: str, layout: str):
    x = wild(130, 136, torch.bfloat16)
    got = quantize_fp8(x, granularity=granularity, scale_layout=layout, with_transposed=True)
    codes, scales = slow(x, granularity, layout, E4M3, False)
    if granularity == "group":
        codes_t, scales_t = slow(x, "group_t", "row", E4M3, False)
    else:
        codes_t, scales_t = codes.T, scales.T
    for tensor, array in zip(got, (codes, scales, codes_t, scales_t), strict=True):
        bits = tensor.view(torch.uint8) if tensor.dtype == E4M3 else tensor
        np.testing.assert_array_equal(bits.numpy(), array)


@at(*DEVICE_CODE)
@recipes
def test_device_code_gives_the_bits_of_the_reference(granularity: str, layout: str, place: str):
    for i, (name, dtype) in enumerate(product(VIEWS, DTYPES)):
        x, fp8, pow2 = VIEWS[name](dtype), FP8[i % 2], bool(i // 2 % 2)
        options = {"granularity": granularity, "dtype": fp8, "pow2_scale": pow2}
        want = apart(x, layout=layout, **options)
        with running_on(place) as device:
            got = quantize_fp8(same_strides(x, device), scale_layout=layout, with_transposed=True, **options)
        same(got, want, f"{name}, {dtype}, {fp8}")
        assert got.q.is_contiguous() and got.q_t.is_contiguous() and got.scale.is_contiguous()


@emulated
@recipes
@pytest.mark.parametrize("order", ORDERS)
def test_order_of_threads_does_not_matter(granularity: str, layout: str, order: str | int):
    x = wild(130, 136, torch.bfloat16)
    with rtkernels.emulate("sm_90", order=order), poisoned():
        got = quantize_fp8(x, granularity=granularity, scale_layout=layout, with_transposed=True)
    same(got, apart(x, granularity, layout), f"order {order}")


@recipes
def test_shapes_and_the_way_back(granularity: str, layout: str):
    x = torch.randn(2, 3, 200)
    both = quantize_fp8(x, granularity=granularity, scale_layout=layout, with_transposed=True)
    assert both.q.shape == x.shape and both.q_t.shape == (200, 6)
    assert tuple(both.scale_t.shape) == ((1, 200) if granularity == "group" else (2, 1))
    options = {"dtype": torch.float32}
    rows = dequantize_fp8(both.q, both.scale, granularity=granularity, scale_layout=layout, **options)
    back = "group_t" if granularity == "group" else "block"
    columns = dequantize_fp8(both.q_t, both.scale_t, granularity=back, **options)
    if granularity == "block":
        columns = columns.t()
    for y in (rows, columns.reshape(x.shape)):
        assert ((y - x).abs() <= 2.0**-4 * x.abs() + 1e-4).all()


@pytest.mark.parametrize("granularity", ["tensor", "row", "group_t"])
def test_granularities_without_a_transposed_version(granularity: str):
    message = f"layout 'both' \\(with_transposed\\) goes with granularity 'group' and 'block', not '{granularity}'"
    with pytest.raises(ArgumentError, match=message):
        quantize_fp8(torch.ones(3, 4), granularity=granularity, with_transposed=True)


def test_other_errors():
    with pytest.raises(ArgumentError, match="layout 'both' requires computed scales"):
        quantize_fp8(torch.ones(3, 4), torch.ones(()), with_transposed=True)
    with pytest.raises(ArgumentError, match="x has dtype int32"):
        quantize_fp8(torch.ones(3, 4, dtype=torch.int32), granularity="block", with_transposed=True)


@recipes
def test_compile_and_no_grad(granularity: str, layout: str):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def both(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(quantize_fp8(x * 2, granularity=granularity, scale_layout=layout, with_transposed=True))

    x = torch.randn(9, 136, requires_grad=True)
    got = both(x)
    same(got, apart(x * 2, granularity, layout), "compiled")
    assert not any(t.requires_grad for t in got)


def test_numpy():
    x = np.random.default_rng(0).standard_normal((5, 130), np.float32)
    got = quantize_fp8(x, granularity="group", with_transposed=True)
    want = quantize_fp8(torch.from_numpy(x), granularity="group", with_transposed=True)
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, np.ndarray)
        np.testing.assert_array_equal(a.view(np.uint8), b.view(torch.uint8).numpy())


@pytest.mark.gpu
@recipes
def test_graph_capture(granularity: str, layout: str):
    x = torch.randn(300, 1000, device="cuda", dtype=torch.bfloat16)
    options = {"granularity": granularity, "scale_layout": layout, "with_transposed": True}
    replay = captured(lambda: quantize_fp8(x, **options))
    x.mul_(-3)
    same(replay(), apart(x.cpu(), granularity, layout), "replay")


@pytest.mark.gpu
@pytest.mark.slow
@recipes
def test_beyond_two_to_the_31_elements(granularity: str, layout: str):
    rows, cols = 2**18 + 256, 8200
    tail = wild(256, cols, torch.bfloat16)
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    x[-256:] = tail.cuda()
    with poisoned():
        both = quantize_fp8(x, granularity=granularity, scale_layout=layout, with_transposed=True)
    want = apart(tail, granularity, layout)
    assert_same_bits(both.q[-256:].cpu(), want[0], "q")
    assert_same_bits(both.q_t[:, -256:].contiguous().cpu(), want[2], "q_t")
    assert not both.q[:4096].view(torch.uint8).any() and not both.q_t[:, :4096].view(torch.uint8).any()


def test_layout_says_the_same_as_the_older_names() -> None:
    x, counts = torch.randn(40, 256), torch.tensor([40])
    for granularity in ("group", "block"):
        ours = quantize_fp8(x, granularity=granularity, layout="both")
        older = quantize_fp8(x, granularity=granularity, with_transposed=True)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(ours, older, strict=True))
    with pytest.raises(ArgumentError, match="layout is 'transposed'; expected 'row' or 'both'"):
        quantize_fp8(x, granularity="group", layout="transposed")
    for layout in ("row", "transposed", "both"):
        ours, older = (rtkernels.quantize_fp8_experts(x, counts, **{name: layout}) for name in ("layout", "output"))
        assert all(a is b is None or torch.equal(a.float(), b.float()) for a, b in zip(ours, older, strict=True))
