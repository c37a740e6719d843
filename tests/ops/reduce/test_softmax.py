"""Softmax and log-softmax: numerics at every place they can run, gradients, errors, compilation, the GPU's own ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import ROUNDOFF, assert_close, assert_no_worse, assert_same_bits, poisoned, running_on
from support.places import DTYPES, at, error_tests, meta_on, order_test, short
from support.ways import assert_compiles, assert_equal_bits, captured
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.errors import ArgumentError
from rtkernels.ops.reduce import softmax as module

softmax, log_softmax = rtkernels.softmax, rtkernels.log_softmax
FUNCTIONS = {"softmax": softmax, "log_softmax": log_softmax}

both = pytest.mark.parametrize("function", FUNCTIONS)


# ---- inputs: one list for every place -------------------------------------------------------------------------------


@dataclass
class Inputs:
    x: Tensor
    lengths: Tensor | None = None
    scale: float = 1.0
    dim: int = -1
    dy: Tensor | None = None


Normal = Callable[..., Tensor]


def _spaced(normal: Normal, rows: int, cols: int, *, every: int = 1, skip: int = 0, pad: int = 0) -> Tensor:
    """[rows, cols] out of a wider tensor: each `every`-th row, columns from `skip`, `pad` unused columns after."""
    return normal(rows * every, skip + cols + pad)[::every, skip : skip + cols]


def _lengths(x: Tensor, *values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=x.device)


def _limited(x: Tensor, *values: int, dtype: torch.dtype = torch.int64, **more: Any) -> Inputs:
    return Inputs(x, _lengths(x, *values, dtype=dtype), **more)


CASES: dict[str, Callable[[Normal], Inputs]] = {
    "plain": lambda n: Inputs(n(5, 64)),
    "three_dimensions": lambda n: Inputs(n(2, 3, 40)),
    "one_dimension": lambda n: Inputs(n(24)),
    "one_element": lambda n: Inputs(n(1, 1)),
    "one_column": lambda n: Inputs(n(37, 1)),
    "odd": lambda n: Inputs(n(3, 33)),
    "odd_wide": lambda n: Inputs(n(2, 1027)),
    "sub_warp": lambda n: Inputs(n(37, 136)),
    "one_warp": lambda n: Inputs(n(9, 1024)),
    "several_warps": lambda n: Inputs(n(5, 4096)),
    "padded_group": lambda n: Inputs(n(5, 5000)),
    "ring": lambda n: Inputs(n(9, 16640)),
    "ring_full": lambda n: Inputs(n(5, 32768)),
    "long": lambda n: Inputs(n(2, 40960)),
    "few_rows": lambda n: Inputs(n(4, 1032)),
    "few_rows_of_two_blocks": lambda n: Inputs(n(2, 10752)),
    "few_rows_of_four_blocks": lambda n: Inputs(n(1, 32776)),
    "few_rows_long": lambda n: Inputs(n(3, 151936)),
    "many_short_rows": lambda n: Inputs(n(530, 8)),
    "no_rows": lambda n: Inputs(n(0, 16)),
    "no_columns": lambda n: Inputs(n(4, 0)),
    "strided_rows": lambda n: Inputs(_spaced(n, 5, 64, every=3, pad=16)),
    "unaligned": lambda n: Inputs(_spaced(n, 5, 64, skip=1, pad=7)),
    "unaligned_rows": lambda n: Inputs(_spaced(n, 5, 64, pad=1)),
    "transposed": lambda n: Inputs(n(48, 6).t()),
    "expanded_rows": lambda n: Inputs(n(1, 64).expand(4, -1)),
    "first_dim": lambda n: Inputs(n(20, 6), dim=0),
    "middle_dim": lambda n: Inputs(n(3, 16, 5), dim=1),
    "negative_dim": lambda n: Inputs(n(3, 16, 5), dim=-2),
    "dy_expanded": lambda n: Inputs(n(6, 64), dy=n(1).expand(6, 64)),
    "dy_rows_expanded": lambda n: Inputs(n(6, 64), dy=n(1, 64).expand(6, 64)),
    "dy_strided": lambda n: Inputs(n(6, 64), dy=_spaced(n, 6, 64, every=2, pad=8)),
    "dy_unaligned": lambda n: Inputs(n(6, 64), dy=_spaced(n, 6, 64, skip=3, pad=5)),
    "scale": lambda n: Inputs(n(6, 64), scale=0.125),
    "scale_large": lambda n: Inputs(n(6, 64), scale=30.0),
    "scale_negative": lambda n: Inputs(n(6, 640), scale=-0.7),
    "scale_negative_odd": lambda n: Inputs(n(6, 77), scale=-0.7),
    "scale_zero": lambda n: Inputs(n(6, 100), scale=0.0),
    "lengths": lambda n: _limited(n(8, 64), 0, 1, 7, 8, 9, 63, 64, 70),
    "lengths_int32": lambda n: _limited(n(8, 128), 0, 1, 7, 8, 9, 127, 128, -3, dtype=torch.int32),
    "lengths_odd": lambda n: _limited(n(5, 77), 0, 1, 76, 77, 40),
    "lengths_scale": lambda n: _limited(n(5, 320), 0, 1, 300, 320, 41, scale=-0.5),
    "lengths_scale_zero": lambda n: _limited(n(5, 320), 0, 1, 300, 320, 41, scale=0.0),
    "lengths_wide": lambda n: _limited(n(6, 5000), 0, 5000, 4999, 1, 2500, 8),
    "lengths_ring": lambda n: _limited(n(6, 16640), 0, 16640, 16639, 1, 9000, 8),
    "lengths_long": lambda n: _limited(n(4, 33000), 0, 33000, 31111, 9),
    "lengths_few_rows": lambda n: _limited(n(2, 16392), 16391, 9, scale=-0.5),
    "lengths_few_rows_int32": lambda n: _limited(n(3, 4096), 0, 4096, 2047, dtype=torch.int32),
    "lengths_dim": lambda n: _limited(n(20, 4), 0, 20, 11, 3, dim=0),
    "lengths_strided": lambda n: Inputs(n(4, 24), _lengths(n(1), 3, 0, 24, 0, 9, 0, 5, 0)[::2]),
    "lengths_expanded": lambda n: Inputs(n(4, 24), _lengths(n(1), 5).expand(4)),
}


def make(case: str, dtype: torch.dtype, device: str) -> Inputs:
    """Build the tensors of a case: the same numbers on every device."""
    generator = torch.Generator().manual_seed(sum(map(ord, case)))

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 2).to(dtype).to(device)

    inputs = CASES[case](normal)
    if inputs.dy is None:
        inputs.dy = normal(*inputs.x.shape)
    return inputs


def exact_softmax(x: Tensor, lengths: Tensor | None, scale: float, log: bool) -> Tensor:
    """The op in fp64, over the last dimension."""
    if x.numel() == 0:
        return x.double()
    z = x.double() * scale
    if lengths is not None:
        past = torch.arange(x.shape[-1], device=x.device) >= lengths.unsqueeze(-1)
        z = z.masked_fill(past, -torch.inf)
    y = (torch.log_softmax if log else torch.softmax)(z, -1)
    return torch.where((z == -torch.inf).all(-1, keepdim=True), -torch.inf if log else 0.0, y)


def check(inputs: Inputs, function: str) -> tuple[Tensor, Tensor]:
    """Run forward and backward and hold every element to its error budget; return result and gradient."""
    log, dim, scale, lengths = function == "log_softmax", inputs.dim, inputs.scale, inputs.lengths
    options = {"dim": dim, "scale": scale, "lengths": lengths}
    leaf = inputs.x.detach().requires_grad_()
    y = FUNCTIONS[function](leaf, **options)
    assert y.dtype == inputs.x.dtype and y.shape == inputs.x.shape
    assert y.is_contiguous() or dim != -1
    assert_same_bits(FUNCTIONS[function](inputs.x.detach(), **options), y.detach(), "result without gradients")
    y.backward(inputs.dy)

    with torch.no_grad():
        x, y, g, dx = (t.detach().movedim(dim, -1) for t in (inputs.x, y, inputs.dy.double(), leaf.grad))
        exact = exact_softmax(x, lengths, scale, log)
        # fp32 arithmetic: a rounded difference of scores is an error of the exponent.
        spread = abs(scale) * (x.double().abs().amax(-1, keepdim=True) if x.numel() else 0.0)
        slack = 8 * ROUNDOFF[torch.float32] / ROUNDOFF[y.dtype]
        size = exact.abs().nan_to_num(0.0, 0.0, 0.0)
        terms = size + 10 + spread if log else size * (4 + spread)
        assert_close(y, exact, scale=size + slack * terms, what="y", c=1.01)
        # The gradient from the stored, rounded y, as the kernel has it.
        v = y.double()
        if lengths is not None:
            past = torch.arange(x.shape[-1], device=x.device) >= lengths.unsqueeze(-1)
            g, v = g.masked_fill(past, 0.0), v.masked_fill(past, -torch.inf if log else 0.0)
        p = v.exp() if log else v
        total = (g if log else g * p).sum(-1, keepdim=True)
        magnitude = (g if log else g * p).abs().sum(-1, keepdim=True)
        if log:
            wanted, terms = scale * (g - p * total), abs(scale) * (g.abs() + p * magnitude * (2 + spread))
        else:
            wanted, terms = scale * p * (g - total), abs(scale) * p * (g.abs() + magnitude)
        assert_close(dx, wanted, scale=wanted.abs() + slack * terms, what="dx", c=1.01)
    return y, dx


@pytest.mark.parametrize("case", CASES)
@both
@at()
def test_every_layout(place: str, function: str, case: str) -> None:
    with running_on(place) as device:
        check(make(case, torch.bfloat16, device), function)


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=short)
@both
@at()
def test_every_dtype(place: str, function: str, dtype: torch.dtype) -> None:
    cases = (
        "plain",
        "odd",
        "several_warps",
        "padded_group",
        "ring",
        "long",
        "few_rows_of_two_blocks",
        "scale_negative",
        "lengths",
        "lengths_odd",
    )
    with running_on(place) as device:
        for case in cases:
            check(make(case, dtype, device), function)


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    for case in ("plain", "one_warp", "odd", "ring", "few_rows"):
        with running_on("sm_90") as device:
            check(make(case, torch.bfloat16, device), "softmax")


@both
@at("sm_90", "cuda")
def test_no_worse_than_torch(place: str, function: str) -> None:
    with running_on(place) as device:
        for dtype in DTYPES:
            generator = torch.Generator().manual_seed(1)
            x, dy = ((torch.randn(64, 512, generator=generator) * 3).to(dtype).to(device) for _ in range(2))
            results = []
            for wide in (False, False, True):
                leaf = (x.double() if wide else x).detach().requires_grad_()
                y = (FUNCTIONS[function] if not results else getattr(torch, function))(leaf, -1)
                y.backward(dy.to(y.dtype))
                results.append((y.detach(), leaf.grad))
            for what, ours, theirs, exact in zip(("y", "dx"), *results, strict=True):
                factor = 1.05 if dtype != torch.float32 else 1.6  # both are within two roundoffs
                assert_no_worse(ours, theirs, exact, what=f"{what} {dtype}", factor=factor)


@pytest.mark.parametrize("cols", (32, 33, 5000, 16640, 40000))
@both
@at("cpu", "sm_90", "cuda")
def test_special_values(place: str, function: str, cols: int) -> None:
    nothing = -torch.inf if function == "log_softmax" else 0.0
    with running_on(place) as device:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(7, cols, device=device).to(dtype)
            x[0, 5] = torch.nan
            x[1, 6] = torch.inf
            x[2] = -torch.inf
            x[3, 1:] = -torch.inf
            x[4] = torch.finfo(dtype).min
            x[5] = torch.finfo(dtype).max
            x[6] = torch.nan
            y = FUNCTIONS[function](x)
            for row in (0, 1, 6):  # as torch
                assert y[row].isnan().all()
            assert (y[2] == nothing).all()
            assert y[3, 0] == (0.0 if function == "log_softmax" else 1.0) and (y[3, 1:] == nothing).all()
            even = torch.full((2, cols), 1 / cols, dtype=torch.float64, device=device)
            assert_close(y[4:6], even.log() if function == "log_softmax" else even, c=2.0, what="equal scores")
            alone = torch.cat([FUNCTIONS[function](row) for row in x.split(1)])  # one row has another kernel
            torch.testing.assert_close(alone, y, equal_nan=True)


def test_rows_without_scores_have_no_gradient() -> None:
    x = torch.full((2, 8), -torch.inf, requires_grad=True)
    softmax(x, lengths=torch.tensor([8, 0])).sum().backward()
    assert (x.grad == 0).all()


@both
@at()
def test_what_does_not_count_is_not_looked_at(place: str, function: str) -> None:
    with running_on(place) as device:
        for cols in (64, 77, 5000, 16640):
            x, dy = torch.randn(2, 3, cols, device=device).bfloat16()
            lengths = torch.tensor([0, 20, cols - 3], device=device)
            past = torch.arange(cols, device=device) >= lengths.unsqueeze(-1)
            results = []
            for value in (torch.nan, 1.0):
                leaf = x.masked_fill(past, value).requires_grad_()
                y = FUNCTIONS[function](leaf, lengths=lengths)
                y.backward(dy.masked_fill(past, value))
                assert (leaf.grad[past] == 0).all()
                results.append((y.detach(), leaf.grad))
            for first, second in zip(*results, strict=True):
                assert_same_bits(first, second)


# ---- in place -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", ("plain", "odd", "several_warps", "ring", "long", "strided_rows", "unaligned", "transposed", "first_dim")
    + ("lengths", "scale_negative", "no_rows", "three_dimensions"),
)  # fmt: skip
@both
@at()
def test_in_place(place: str, function: str, case: str) -> None:
    with running_on(place) as device:
        inputs = make(case, torch.bfloat16, device)
        options = {"dim": inputs.dim, "scale": inputs.scale, "lengths": inputs.lengths}
        wanted = FUNCTIONS[function](inputs.x, **options)
        address, stride = inputs.x.data_ptr(), inputs.x.stride()
        got = FUNCTIONS[function](inputs.x, **options, in_place=True)
        assert got is inputs.x and got.data_ptr() == address and got.stride() == stride
        assert_same_bits(got, wanted)


@both
@pytest.mark.parametrize("dim", (0, -1))
def test_in_place_gradient(function: str, dim: int) -> None:
    x, dy = torch.randn(2, 6, 8)
    grads = []
    for in_place in (False, True):
        leaf = x.clone().requires_grad_()
        FUNCTIONS[function](leaf * 2, dim, in_place=in_place).backward(dy)
        grads.append(leaf.grad)
    assert_same_bits(*grads)


def test_in_place_is_noticed_by_autograd() -> None:
    x = torch.randn(4, 8)
    weight = torch.randn(4, 8, requires_grad=True)
    product = (weight * x).sum()  # keeps x for the gradient of weight
    softmax(x, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with pytest.raises(ArgumentError, match="x is a leaf that requires grad"):
        softmax(weight, in_place=True)
    with torch.inference_mode():
        softmax(torch.randn(4, 8), in_place=True)


# ---- autograd -------------------------------------------------------------------------------------------------------


@both
def test_second_order_is_refused(function: str) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    (first,) = torch.autograd.grad(FUNCTIONS[function](x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# ---- errors ---------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (
        lambda: softmax(torch.ones(4, 8, dtype=torch.float64)),
        "x has dtype float64; expected one of bfloat16, float16, float32",
    ),
    "no dimensions": (lambda: softmax(torch.tensor(1.0)), "x has no dimensions; expected at least one"),
    "dim": (lambda: softmax(torch.ones(4, 8), 2), "dim is 2; expected -2 to 1 for x with 2 dimensions"),
    "lengths shape": (
        lambda: softmax(torch.ones(4, 8), lengths=torch.ones(8, dtype=torch.int32)),
        r"lengths has shape \(8,\); expected \(4,\), the shape of x without dim",
    ),
    "lengths dtype": (
        lambda: softmax(torch.ones(4, 8), lengths=torch.ones(4)),
        "lengths has dtype float32; expected one of int32, int64",
    ),
    "lengths device": (
        lambda: module.FORWARD.check(
            meta_on(0, torch.ones(4, 8)), meta_on(-1, torch.ones(4, dtype=torch.int32)), 1.0, False
        ),
        "lengths has device index -1; expected 0, that of x",
    ),
    "scale": (lambda: log_softmax(torch.ones(4, 8), scale=float("nan")), "scale is nan; expected a finite float32"),
    "scale too large": (lambda: softmax(torch.ones(4, 8), scale=1e39), r"scale is 1e\+39; expected a finite float32"),
    "overlap": (
        lambda: softmax(torch.ones(1, 8).expand(4, 8), in_place=True),
        r"x has strides \(0, 1\) for shape \(4, 8\); expected memory of its own for every element",
    ),
    "not a tensor": (lambda: softmax([1.0, 2.0]), "expected a torch.Tensor or an array with __dlpack__"),
    "dy shape": (
        lambda: module.BACKWARD(torch.ones(4, 4), torch.ones(4, 8), None, 1.0, False),
        r"dy has shape \(4, 4\); expected \(4, 8\), that of y",
    ),
    "dy dtype": (
        lambda: module.BACKWARD(torch.ones(4, 8).half(), torch.ones(4, 8), None, 1.0, False),
        "dy has dtype float16; expected float32, that of y",
    ),
}


test_error_messages, test_launchers_raise_the_same_messages = error_tests(BAD)


# ---- other ways to call it ------------------------------------------------------------------------------------------


@at("cpu", "cuda")
@pytest.mark.parametrize("dynamic", (False, True))
def test_torch_compile(place: str, dynamic: bool) -> None:
    def block(x: Tensor, lengths: Tensor) -> Tensor:
        y = softmax(x * 2, scale=0.5, lengths=lengths)
        return y + softmax(x + 1, 0) + softmax(x * 3, in_place=True)

    def inputs(rows: int) -> list[Tensor]:
        return [torch.randn(rows, 16, device=place), torch.arange(1, rows + 1, device=place)]

    assert_compiles(block, map(inputs, (3, 4)), dynamic=dynamic)


def test_numpy_in_numpy_out() -> None:
    x = np.random.default_rng(0).standard_normal((3, 8), dtype=np.float32)
    y = softmax(x, lengths=np.array([8, 3, 0]))
    assert isinstance(y, np.ndarray)
    np.testing.assert_allclose(y.sum(-1), [1, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(log_softmax(x), np.log(softmax(x)), rtol=1e-5, atol=1e-6)


def test_bench_rows_agree_with_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    dy, x = torch.randn(2, 4, 32, generator=generator)
    rows = {row.name: row for row in rows_of(module.OP.name)}
    forward, backward = rows["softmax_fwd"], rows["softmax_bwd"]
    y = forward.ours(x=x)
    torch.testing.assert_close(y, forward.torch(x=x))
    torch.testing.assert_close(y, forward.fused(x=x))
    torch.testing.assert_close(backward.ours(dy=dy, y=y, x=x), backward.torch(dy=dy, y=y, x=x))


# ---- on the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", ("plain", "odd", "several_warps", "lengths_ring", "long", "many_short_rows", "few_rows_of_two_blocks")
)
@at("sm_90", "cuda")
def test_equal_bits_twice(place: str, case: str) -> None:
    with running_on(place) as device:
        first, second = (check(make(case, torch.bfloat16, device), "softmax") for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b)


test_thread_order_does_not_matter = order_test(
    lambda case: check(make(case, torch.bfloat16, "cpu"), "softmax"),
    *("odd", "several_warps", "ring", "lengths", "many_short_rows"),
)


@pytest.mark.gpu
@both
@pytest.mark.parametrize("cols", (1024, 4096, 7168, 16384, 20000, 32768, 50257, 65536, 131072))
def test_bench_shapes(function: str, cols: int) -> None:
    generator = torch.Generator("cuda").manual_seed(cols)
    x, dy = (torch.randn(600, cols, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with poisoned():
        check(Inputs(x, dy=dy), function)
        check(Inputs(x.float()[:300], dy=dy.float()[:300]), function)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("shape", ((70_000, 2**15), (2**31 + 6, 1), (2, 2**31 + 8), (2**28 + 1, 8)), ids=str)
def test_beyond_two_to_the_31(shape: tuple[int, ...]) -> None:
    if torch.cuda.mem_get_info()[0] < 9 * torch.Size(shape).numel():
        pytest.skip("not enough free GPU memory")
    x = torch.ones(shape, device="cuda", dtype=torch.bfloat16)
    y = softmax(x, in_place=True)
    assert y is x
    wanted = torch.tensor(1 / shape[-1]).bfloat16().item()
    assert (x[0, :8] == wanted).all() and (x[-1, -8:] == wanted).all() and not x.isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("cols", (1024, 20480, 40960))
def test_graph_capture_and_replay(cols: int) -> None:
    x, dy = (torch.randn(64, cols, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def run() -> tuple[Tensor, ...]:
        y = module.FORWARD(x, None, 0.5, False)
        return y, module.BACKWARD(dy, y, None, 0.5, False)

    replay = captured(run)
    x.copy_(torch.randn_like(x))
    assert_equal_bits(replay(), run())
