"""RMS normalisation: numerics at every place it can run, gradients, errors, compilation, and the GPU's own ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.compare import ROUNDOFF, assert_close, assert_no_worse, assert_same_bits, poisoned, running_on
from support.places import DTYPES, at, error_tests, order_test, short
from support.ways import assert_compiles
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.errors import ArgumentError
from rtkernels.ops.norm import rms_norm as module

rms_norm = rtkernels.rms_norm
EPS = 1e-5


def plain(h: Tensor, weight: Tensor | None, offset: float) -> Tensor:
    """The op in plain torch, exact in fp64."""
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)
    return y if weight is None else y * (weight + offset)


# ---- inputs: one list for every place -------------------------------------------------------------------------------


@dataclass
class Inputs:
    x: Tensor
    weight: Tensor | None = None
    residual: Tensor | None = None
    offset: float = 0.0
    dy: Tensor | None = None  # drawn in the shape of x if None
    dsum: Tensor | None = None


Normal = Callable[..., Tensor]


def _spaced(normal: Normal, rows: int, cols: int, *, every: int = 1, skip: int = 0, pad: int = 0) -> Tensor:
    """[rows, cols] out of a wider tensor: each `every`-th row, columns from `skip`, `pad` unused columns after."""
    return normal(rows * every, skip + cols + pad)[::every, skip : skip + cols]


CASES: dict[str, Callable[[Normal], Inputs]] = {
    "short": lambda n: Inputs(n(5, 64), n(64)),
    "row": lambda n: Inputs(n(3, 2048), n(2048)),
    "no_weight": lambda n: Inputs(n(3, 512)),
    "no_weight_wide": lambda n: Inputs(n(2, 16384)),
    "weight_fp32": lambda n: Inputs(n(4, 1024), n(1024).float()),
    "offset": lambda n: Inputs(n(4, 256), n(256), offset=1.0),
    "three_dims": lambda n: Inputs(n(2, 3, 320), n(320)),
    "one_dim": lambda n: Inputs(n(40), n(40)),
    "one_column": lambda n: Inputs(n(37, 1), n(1)),
    "odd": lambda n: Inputs(n(5, 33), n(33)),
    "odd_fp32": lambda n: Inputs(n(5, 331), n(331).float()),
    "even": lambda n: Inputs(n(5, 1030), n(1030)),
    "many_short_rows": lambda n: Inputs(n(530, 8), n(8)),
    "many_rows": lambda n: Inputs(n(130, 256), n(256)),
    "more_than_the_ring_holds": lambda n: Inputs(n(42, 2040), n(2040)),
    "a_row_more": lambda n: Inputs(n(45, 2040), n(2040)),
    "many_wide_rows": lambda n: Inputs(n(66, 3080), n(3080)),
    "wide": lambda n: Inputs(n(5, 8192), n(8192)),
    "wider": lambda n: Inputs(n(2, 9216), n(9216)),
    "four_vectors_a_thread": lambda n: Inputs(n(23, 10752), n(10752)),
    "four_vectors_and_8_columns": lambda n: Inputs(n(13, 8200), n(8200).float(), offset=1.0),
    "four_full_vectors": lambda n: Inputs(n(17, 16384), n(16384)),
    "four_vectors_no_weight": lambda n: Inputs(n(9, 9000)),
    "widest": lambda n: Inputs(n(2, 20480), n(20480)),
    "wide_odd": lambda n: Inputs(n(2, 20001), n(20001)),
    "no_rows": lambda n: Inputs(n(0, 16), n(16)),
    "no_columns": lambda n: Inputs(n(4, 0), n(0)),
    "strided_rows": lambda n: Inputs(_spaced(n, 5, 256, every=3, pad=16), n(256)),
    "unaligned": lambda n: Inputs(_spaced(n, 5, 64, skip=1, pad=7), n(64)),
    "unaligned_rows": lambda n: Inputs(_spaced(n, 5, 64, pad=1), n(64)),
    "unaligned_weight": lambda n: Inputs(n(5, 64), n(65)[1:]),
    "unaligned_weight_fp32": lambda n: Inputs(_spaced(n, 5, 64, skip=2, pad=2), n(65).float()[1:]),
    "transposed": lambda n: Inputs(n(64, 6).t(), n(64)),
    "expanded_rows": lambda n: Inputs(n(1, 128).expand(4, -1), n(128)),
    "weight_strided": lambda n: Inputs(n(4, 64), n(128)[::2]),
    "weight_expanded": lambda n: Inputs(n(4, 64), n(1).expand(64)),
    "dy_expanded": lambda n: Inputs(n(6, 128), n(128), dy=n(1).expand(6, 128)),
    "dy_rows_expanded": lambda n: Inputs(n(6, 128), n(128), dy=n(1, 128).expand(6, 128)),
    "dy_strided": lambda n: Inputs(n(6, 64), n(64), dy=_spaced(n, 6, 64, every=2, pad=8)),
    "dy_unaligned": lambda n: Inputs(n(6, 64), n(64), dy=_spaced(n, 6, 64, skip=3, pad=5)),
    "residual": lambda n: Inputs(n(5, 256), n(256), n(5, 256), offset=1.0),
    "residual_wide": lambda n: Inputs(n(3, 8192), n(8192), n(3, 8192)),
    "residual_10752": lambda n: Inputs(n(23, 10752), n(10752), n(23, 10752)),
    "residual_16384": lambda n: Inputs(n(9, 16384), n(16384).float(), n(9, 16384)),
    "residual_widest": lambda n: Inputs(n(2, 20480), n(20480), n(2, 20480)),
    "residual_odd": lambda n: Inputs(n(3, 77), n(77), n(3, 77)),
    "residual_strided": lambda n: Inputs(_spaced(n, 4, 64, pad=8), n(64), _spaced(n, 4, 64, every=2)),
    "residual_expanded": lambda n: Inputs(n(4, 64), n(64), n(1, 64).expand(4, 64), dsum=n(1).expand(4, 64)),
    "residual_no_rows": lambda n: Inputs(n(0, 16), n(16), n(0, 16)),
}


def make(case: str, dtype: torch.dtype, device: str) -> Inputs:
    """Build the tensors of a case: the same numbers on every device."""
    generator = torch.Generator().manual_seed(sum(map(ord, case)))

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 2).to(dtype).to(device)

    inputs = CASES[case](normal)
    inputs.dy = normal(*inputs.x.shape) if inputs.dy is None else inputs.dy
    if inputs.residual is not None and inputs.dsum is None:
        inputs.dsum = normal(*inputs.x.shape)
    return inputs


def check(inputs: Inputs) -> list[Tensor]:
    """Run forward and backward and hold every element to its error budget; return results and gradients."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (inputs.x, inputs.weight, inputs.residual)]
    x, weight, residual = leaves
    before = [None if t is None else t.detach().clone() for t in leaves]
    result = rms_norm(x, weight, eps=EPS, offset=inputs.offset, residual=residual)
    quiet = rms_norm(inputs.x.detach(), inputs.weight, eps=EPS, offset=inputs.offset, residual=inputs.residual)
    y, h = (result, x) if residual is None else result
    if residual is not None:
        assert_same_bits(h.detach(), (x.float() + residual.float()).to(x.dtype).detach(), "sum")
        assert_same_bits(quiet[1], h.detach(), "sum without gradients")
    assert_same_bits(quiet if residual is None else quiet[0], y.detach(), "result without gradients")
    assert y.dtype == x.dtype and y.is_contiguous() and y.shape == x.shape
    with_sum = residual is not None
    torch.autograd.backward([y, h][: 1 + with_sum], [inputs.dy, inputs.dsum][: 1 + with_sum])
    for leaf, copy in zip(leaves, before, strict=True):
        if leaf is not None:
            assert_same_bits(leaf.detach(), copy, "an input after the call")

    wide_h = h.detach().double().requires_grad_()
    wide_w = None if weight is None else weight.detach().double().requires_grad_()
    exact = plain(wide_h, wide_w, inputs.offset)
    exact.backward(inputs.dy.double())
    with torch.no_grad():
        # One rounding to the stored type; fp32 sums along rows (and down columns for dweight) add errors relative to
        # the terms that were added, which shows where a gradient nearly cancels.
        cols = max(h.shape[-1], 1)
        rstd = torch.rsqrt(wide_h.square().mean(-1, keepdim=True) + EPS)
        gain = 1.0 if weight is None else wide_w + inputs.offset
        g = (inputs.dy.double() * gain).abs()
        terms = rstd * g + wide_h.abs() * rstd**3 * (g * wide_h.abs()).mean(-1, keepdim=True)
        noise = (8 + cols**0.5 / 8) * ROUNDOFF[torch.float32]

        def close(what: str, got: Tensor, reference: Tensor, fp32_terms: Tensor) -> None:
            slack = noise / ROUNDOFF[got.dtype]
            assert_close(got, reference, scale=reference.abs() + slack * fp32_terms, what=what, c=1.01)

        close("y", y, exact, exact.abs())
        dsum = 0.0 if residual is None else inputs.dsum.double()
        close("dx", x.grad, wide_h.grad + dsum, terms + (dsum.abs() if residual is not None else 0.0))
        grads = [x.grad]
        if residual is not None:
            assert_same_bits(residual.grad, x.grad, "dresidual")
        if weight is not None:
            assert weight.grad.dtype == weight.dtype
            products = (inputs.dy.double() * wide_h * rstd).abs().reshape(h.shape[:-1].numel(), h.shape[-1]).sum(0)
            close("dweight", weight.grad, wide_w.grad, products)
            grads.append(weight.grad)
    return [y.detach(), *grads]


@pytest.mark.parametrize("case", CASES)
@at()
def test_every_layout(place: str, case: str) -> None:
    with running_on(place) as device:
        check(make(case, torch.bfloat16, device))


@pytest.mark.parametrize(
    "case",
    ("short", "row", "odd", "wide", "wide_odd", "residual", "residual_wide", "four_full_vectors", "residual_10752"),
)
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=short)
@at("cpu", "sm_90", "cuda")
def test_every_dtype(place: str, dtype: torch.dtype, case: str) -> None:
    with running_on(place) as device:
        check(make(case, dtype, device))


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    for case in ("short", "odd", "residual", "widest"):
        with running_on("sm_90") as device:
            check(make(case, torch.bfloat16, device))


test_thread_order_does_not_matter = order_test(
    lambda case: check(make(case, torch.bfloat16, "cpu")),
    *("short", "many_short_rows", "more_than_the_ring_holds", "many_wide_rows", "odd", "residual_wide"),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@at("sm_90", "cuda")
def test_no_worse_than_torch(place: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        generator = torch.Generator().manual_seed(1)
        x, dy = (torch.randn(64, 512, generator=generator).to(dtype).to(device) for _ in range(2))
        w = torch.randn(512, generator=generator).to(dtype).to(device)
        results = []
        for kind in ("ours", "torch", "exact"):
            leaves = [t.to(torch.float64 if kind == "exact" else dtype).detach().requires_grad_() for t in (x, w)]
            run = rms_norm if kind == "ours" else lambda a, b, eps: F.rms_norm(a, (a.shape[-1],), b, eps)
            y = run(*leaves, eps=EPS)
            y.backward(dy.to(y.dtype))
            results.append((y.detach(), *(leaf.grad for leaf in leaves)))
        for what, ours, theirs, exact in zip(("y", "dx", "dweight"), *results, strict=True):
            # fp32 sums of 64 products: both are within two roundoffs, and chance decides which one is nearer.
            factor = 1.25 if (what, dtype) == ("dweight", torch.float32) else 1.05
            assert_no_worse(ours, theirs, exact, factor=factor, what=f"{what} {dtype}")


@at("cpu", "sm_90", "cuda")
def test_nan_and_infinity_stay_in_their_row(place: str) -> None:
    with running_on(place) as device:
        x = torch.ones(4, 256, dtype=torch.bfloat16, device=device)
        x[1, 7], x[2, 3] = torch.nan, torch.inf
        y = rms_norm(x, eps=EPS)
        assert y[1].isnan().all() and y[2, 3].isnan() and (y[2, 4:] == 0).all()
        assert (y[[0, 3]] == 1).all()


# ---- autograd and the dispatcher ------------------------------------------------------------------------------------


def test_only_the_gradients_that_are_wanted() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8, requires_grad=True)
    rms_norm(x, weight).sum().backward()
    assert x.grad is None and weight.grad is not None
    x.requires_grad_()
    (dx,) = torch.autograd.grad(rms_norm(x, weight.detach()).sum(), x)
    assert dx.shape == x.shape


def test_gradient_of_the_sum_alone() -> None:
    x, residual = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    rms_norm(x, residual=residual)[1].sum().backward()
    assert (x.grad == 1).all() and (residual.grad == 1).all()
    assert x.grad.data_ptr() != residual.grad.data_ptr()


def test_second_order_is_refused() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    (first,) = torch.autograd.grad(rms_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# ---- errors ---------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (
        lambda: rms_norm(torch.ones(4, 8).double()),
        "x has dtype float64; expected one of bfloat16, float16, float32",
    ),
    "no dimensions": (lambda: rms_norm(torch.tensor(1.0)), "x has no dimensions; expected at least one"),
    "weight shape": (
        lambda: rms_norm(torch.ones(4, 8), torch.ones(7)),
        r"weight has shape \(7,\); expected \(8,\), the last dimension of x",
    ),
    "weight dtype": (
        lambda: rms_norm(torch.ones(4, 8), torch.ones(8).half()),
        "weight has dtype float16; expected one of float32",
    ),
    "residual shape": (
        lambda: rms_norm(torch.ones(4, 8), residual=torch.ones(4, 7)),
        r"residual has shape \(4, 7\); expected \(4, 8\), that of x",
    ),
    "residual dtype": (
        lambda: rms_norm(torch.ones(4, 8), residual=torch.ones(4, 8).half()),
        "residual has dtype float16; expected float32, that of x",
    ),
    "dy shape": (
        lambda: module.BACKWARD(torch.ones(4, 7), torch.ones(4, 8), None, None, 1e-6, 0.0, False),
        r"dy has shape \(4, 7\); expected \(4, 8\), that of h",
    ),
    "dy dtype": (
        lambda: module.BACKWARD(torch.ones(4, 8).half(), torch.ones(4, 8), None, None, 1e-6, 0.0, False),
        "dy has dtype float16; expected float32, that of h",
    ),
    "weight_grad": (
        lambda: module.BACKWARD(torch.ones(4, 8), torch.ones(4, 8), None, None, 1e-6, 0.0, True),
        "weight_grad is True but there is no weight",
    ),
    "not a tensor": (lambda: rms_norm([1.0, 2.0]), "x is a list; expected a torch.Tensor or an array with __dlpack__"),
    "mixed kinds": (
        lambda: rms_norm(torch.ones(4, 8), np.ones(8, "f4")),
        "weight is a ndarray beside a torch.Tensor; expected all array arguments to be tensors",
    ),
}


test_error_messages, test_launchers_raise_the_same_messages = error_tests(BAD)


@pytest.mark.gpu
def test_devices_must_match() -> None:
    x = torch.ones(4, 8, device="cuda")
    with pytest.raises(ArgumentError, match="weight is on cpu; expected cuda:0"):
        rms_norm(x, torch.ones(8))
    with pytest.raises(ArgumentError, match="residual is on cpu; expected cuda:0"):
        rms_norm(x, residual=torch.ones(4, 8))


# ---- other ways to call it ------------------------------------------------------------------------------------------


@at("cpu", "cuda")
@pytest.mark.parametrize("dynamic", (False, True))
def test_torch_compile(place: str, dynamic: bool) -> None:
    def block(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        y, total = rms_norm(x * 2, weight, offset=1.0, residual=residual)
        return rms_norm(y, weight) + total

    def inputs(rows: int) -> list[Tensor]:
        return [torch.randn(shape, device=place) for shape in ((rows, 16), (16,), (rows, 16))]

    assert_compiles(block, map(inputs, (3, 4)), dynamic=dynamic)


def test_numpy_in_numpy_out() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 8), dtype=np.float32)
    y, total = rms_norm(x, np.ones(8, "f4"), residual=x)
    assert isinstance(y, np.ndarray) and isinstance(total, np.ndarray)
    np.testing.assert_allclose(total, 2 * x)
    np.testing.assert_allclose(y, rms_norm(torch.from_numpy(2 * x)).numpy())


def test_bench_rows_agree_with_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    dy, x = (torch.randn(4, 32, generator=generator) for _ in range(2))
    inputs = {"x": x, "weight": torch.randn(32, generator=generator), "eps": EPS}
    for row in rows_of(module.OP.name):
        given = {"dy": dy, **inputs} if row.name == "rms_norm_bwd" else inputs
        torch.testing.assert_close(row.ours(**given), row.torch(**given))


# ---- on the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ("row", "many_rows", "wide", "wide_odd", "residual", "four_vectors_a_thread"))
@at("sm_90", "cuda")
def test_equal_bits_twice(place: str, case: str) -> None:
    with running_on(place) as device:
        first, second = (check(make(case, torch.bfloat16, device)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", (2048, 4096, 5120, 7168, 8192, 16384))
def test_bench_shapes(cols: int) -> None:
    generator = torch.Generator("cuda").manual_seed(cols)
    x, dy, residual = (
        torch.randn(1000, cols, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    weight = torch.randn(cols, generator=generator, device="cuda", dtype=torch.bfloat16)
    with poisoned():
        check(Inputs(x, weight, dy=dy))
        check(Inputs(x, weight, residual, dy=dy, dsum=dy))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("shape", ((70_000, 2**15), (2**31 + 6, 1), (3, 2**30)), ids=str)
def test_beyond_two_to_the_31(shape: tuple[int, int]) -> None:
    elements = torch.Size(shape).numel()
    if torch.cuda.mem_get_info()[0] < 7 * elements:
        pytest.skip("not enough free GPU memory")
    x = torch.ones(shape, device="cuda", dtype=torch.bfloat16)
    x[-1].normal_()
    with poisoned():
        y = rms_norm(x, eps=0.0)
        dx, _ = module.BACKWARD(y, x, None, None, 0.0, 0.0, False)
    assert not y.isnan().any() and not dx.isnan().any()
    assert_close(y[-1], plain(x[-1:].double(), None, 0.0)[0] if shape[1] > 1 else x[-1].double().sign(), c=2.0)
    assert (y[0] == 1).all()
