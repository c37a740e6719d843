"""Gated linear units: numerics at every place they can run, gradients, errors, compilation, and the GPU's own ways."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.compare import ROUNDOFF, assert_close, assert_no_worse, assert_same_bits, poisoned, running_on
from support.places import DTYPES, PLACES, at, emulated, error_tests, meta_on, order_test, short
from support.ways import assert_compiles, assert_equal_bits, captured
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.errors import ArgumentError
from rtkernels.ops.act import glu as module
from rtkernels.ops.act import glu_plan

glu = rtkernels.glu


def cut(x: Tensor, low: float = -math.inf, high: float = math.inf) -> Tensor:
    """Clamp with the slope docs/numerics.md states: 1 within the limits and at them, 0 beyond, NaN for NaN.

    The slope of torch's clamp exactly at a limit depends on the release.
    """
    return torch.where(x > high, high, torch.where(x < low, low, x))


ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "none": lambda x: x,
    "swiglu_oai": lambda x: cut(x, high=7.0) * torch.sigmoid(1.702 * cut(x, high=7.0)),
}
# For fp64: torch's own formulas lose their digits to cancellation where the result is small.
EXACT = ACTS | {
    "gelu_tanh": lambda x: x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    "gelu_erf": lambda x: x * 0.5 * torch.erfc(x * -math.sqrt(0.5)),
}


def plain_glu(x: Tensor, up: Tensor | None, weight: Tensor | None, act: str) -> Tensor:
    """The op in plain torch, rounding wherever torch rounds; exact enough in fp64."""
    gate, up = x.chunk(2, -1) if up is None else (x, up)
    if act == "swiglu_oai":
        up = cut(up, -7.0, 7.0) + 1
    y = (EXACT if x.dtype == torch.float64 else ACTS)[act](gate) * up
    return y if weight is None else y * weight.unsqueeze(-1)


# ---- inputs: one list for every place -------------------------------------------------------------------------------


@dataclass
class Inputs:
    x: Tensor
    up: Tensor | None = None
    weight: Tensor | None = None
    dy: Tensor | None = None  # made from the shape of the result if None

    def leaves(self, dtype: torch.dtype | None = None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return x, up and weight as leaves that want gradients; with a dtype, copies of it."""
        return tuple(
            t if t is None else (t.detach() if dtype is None else t.detach().to(dtype)).requires_grad_()
            for t in (self.x, self.up, self.weight)
        )


Normal = Callable[..., Tensor]


def _spaced(normal: Normal, rows: int, cols: int, *, every: int = 1, skip: int = 0, pad: int = 0) -> Tensor:
    """[rows, cols] out of a wider tensor: each `every`-th row, columns from `skip`, `pad` unused columns after."""
    return normal(rows * every, skip + cols + pad)[::every, skip : skip + cols]


CASES: dict[str, Callable[[Normal], Inputs]] = {
    "merged": lambda n: Inputs(n(5, 2 * 64)),
    "merged_3d": lambda n: Inputs(n(2, 3, 2 * 40)),
    "merged_1d": lambda n: Inputs(n(2 * 24)),
    "one_element": lambda n: Inputs(n(2)),
    "one_column": lambda n: Inputs(n(37, 2)),
    "odd": lambda n: Inputs(n(3, 2 * 33)),
    "odd_wide": lambda n: Inputs(n(2, 2 * 1027)),
    "several_strips": lambda n: Inputs(n(3, 2 * 2200)),
    "many_short_rows": lambda n: Inputs(n(530, 2 * 8)),
    "no_rows": lambda n: Inputs(n(0, 2 * 16)),
    "no_columns": lambda n: Inputs(n(4, 0), weight=n(4)),
    "separate": lambda n: Inputs(n(5, 64), n(5, 64)),
    "separate_strides": lambda n: Inputs(_spaced(n, 5, 64, pad=8), _spaced(n, 5, 64, every=2)),
    "separate_odd": lambda n: Inputs(n(4, 19), n(4, 19)),
    "strided_rows": lambda n: Inputs(_spaced(n, 5, 2 * 64, every=3, pad=16)),
    "unaligned": lambda n: Inputs(_spaced(n, 5, 2 * 64, skip=1, pad=7)),
    "unaligned_rows": lambda n: Inputs(_spaced(n, 5, 2 * 64, pad=1)),
    "transposed": lambda n: Inputs(n(2 * 16, 6).t()),
    "expanded_rows": lambda n: Inputs(n(1, 2 * 32).expand(4, -1), n(1, 2 * 32).expand(4, -1)),
    "dy_expanded": lambda n: Inputs(n(6, 2 * 64), dy=n(1).expand(6, 64)),
    "dy_rows_expanded": lambda n: Inputs(n(6, 2 * 64), dy=n(1, 64).expand(6, 64)),
    "dy_strided": lambda n: Inputs(n(6, 2 * 64), dy=_spaced(n, 6, 64, every=2, pad=8)),
    "dy_unaligned": lambda n: Inputs(n(6, 2 * 64), dy=_spaced(n, 6, 64, skip=3, pad=5)),
    "weight": lambda n: Inputs(n(6, 2 * 64), weight=n(6)),
    "weight_fp32": lambda n: Inputs(n(2, 3, 64), n(2, 3, 64), weight=n(2, 3).float()),
    "weight_scalar": lambda n: Inputs(n(2 * 24), weight=n(1)[0]),
    "weight_odd": lambda n: Inputs(n(5, 2 * 77), weight=n(5).float()),
    "weight_wide": lambda n: Inputs(n(2, 2 * 4400), weight=n(2)),
    "weight_wide_odd": lambda n: Inputs(n(2, 2 * 1301), weight=n(2)),
    "weight_many_rows": lambda n: Inputs(n(300, 2 * 8), weight=n(300)),
    "weight_strided": lambda n: Inputs(n(6, 2 * 16), weight=n(12)[::2]),
    "weight_expanded": lambda n: Inputs(n(6, 2 * 16), weight=n(1).expand(6)),
}


def make(case: str, dtype: torch.dtype, device: str) -> Inputs:
    """Build the tensors of a case: the same numbers on every device."""
    generator = torch.Generator().manual_seed(sum(map(ord, case)))

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 2).to(dtype).to(device)

    inputs = CASES[case](normal)
    if inputs.dy is None:
        shape = inputs.x.shape if inputs.up is not None else (*inputs.x.shape[:-1], inputs.x.shape[-1] // 2)
        inputs.dy = normal(*shape)
    return inputs


def check(inputs: Inputs, act: str) -> tuple[Tensor | None, ...]:
    """Run forward and backward and hold every element to its error budget; return result and gradients."""
    wide = inputs.leaves(torch.float64)
    exact = plain_glu(*wide, act)
    exact.backward(inputs.dy.double())
    leaves = inputs.leaves()
    y = glu(leaves[0], leaves[1], act=act, weight=leaves[2])
    assert y.dtype == inputs.x.dtype and y.is_contiguous() and y.shape == exact.shape
    quiet = glu(inputs.x.detach(), inputs.up, act=act, weight=inputs.weight)
    assert_same_bits(quiet, y.detach(), "result without gradients")
    y.backward(inputs.dy)

    with torch.no_grad():
        x, up, weight = wide
        gate, up = x.chunk(2, -1) if up is None else (x, up)
        w = 1.0 if weight is None else weight.unsqueeze(-1)
        g = inputs.dy.double()
        value = EXACT[act](gate)
        # One rounding to the stored type, and fp32 arithmetic (8 roundoffs of it) whose errors are relative to the
        # terms that were added (it shows where a slope crosses zero) and grow with the exponent in the tail of act.
        tail = 1 + gate.square()
        other = up.abs() + 1 if act == "swiglu_oai" else up
        dgate, dup = (g * w * other).abs() * tail, (g * w * value).abs() * tail
        terms = {
            "x": dgate if inputs.up is not None else torch.cat((dgate, dup), -1),
            "up": dup,
            "weight": ((g * value * other).abs() * tail).sum(-1),
        }

        def close(what: str, got: Tensor, reference: Tensor, fp32_terms: Tensor) -> None:
            slack = 8 * ROUNDOFF[torch.float32] / ROUNDOFF[got.dtype]
            assert_close(got, reference, scale=reference.abs() + slack * fp32_terms, what=what, c=1.01)

        close("y", y, exact, (value * other * w).abs() * tail)
        for name, leaf, reference in zip(terms, leaves, wide, strict=True):
            if leaf is not None:
                assert leaf.grad.dtype == leaf.dtype
                close(f"d{name}", leaf.grad, reference.grad, terms[name])
    return (y.detach(), *(leaf if leaf is None else leaf.grad for leaf in leaves))


@pytest.mark.parametrize("case", CASES)
@at()
def test_every_layout(place: str, case: str) -> None:
    with running_on(place) as device:
        check(make(case, torch.bfloat16, device), "silu")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(
    ("place", "act"),
    # No instruction of this op depends on the feature set: one activation is enough for sm_80.
    [pytest.param(p, a, marks=PLACES[p]) for p in PLACES for a in ACTS if p != "sm_80" or a == "silu"],
)
def test_every_activation(place: str, act: str, dtype: torch.dtype) -> None:
    cases = ("merged", "odd", "weight", "weight_odd")
    with running_on(place) as device:
        for case in cases:
            check(make(case, dtype, device), act)


@pytest.mark.parametrize("act", ACTS)
@at("cpu", "sm_90", "cuda")
def test_no_worse_than_torch(place: str, act: str) -> None:
    with running_on(place) as device:
        for dtype in DTYPES:
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(64, 2 * 256, generator=generator).to(dtype).to(device)
            dy = torch.randn(64, 256, generator=generator).to(dtype).to(device)
            results = []
            for run, like in ((glu, x), (plain_glu, x), (plain_glu, x.double())):
                leaf = like.detach().requires_grad_()
                y = run(leaf, act=act) if run is glu else run(leaf, None, None, act)
                y.backward(dy.to(like.dtype))
                results.append((y.detach(), leaf.grad))
            for what, ours, theirs, exact in zip(("y", "dx"), *results, strict=True):
                assert_no_worse(ours, theirs, exact, what=f"{what} {dtype}")


@pytest.mark.parametrize("act", ACTS)
@at("cpu", "sm_90", "cuda")
def test_nan_and_infinity_as_torch(place: str, act: str) -> None:
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 300.0, -300.0, 1e4, -1e4, 1.0, -1.0, 0.5] * 2)
    with running_on(place) as device:
        for dtype in (torch.float32, torch.bfloat16):
            gate = special[:16].to(dtype).to(device)
            ours, theirs = gate.clone().requires_grad_(), gate.double().requires_grad_()  # torch rounds at every step
            one = torch.ones_like(gate)
            y, wanted = glu(ours, one * 0 if act == "swiglu_oai" else one, act=act), ACTS[act](theirs)
            y.backward(one)
            wanted.backward(one.double())
            for got, other in ((y, wanted), (ours.grad, theirs.grad)):
                assert_close(got.detach(), other.detach().double(), c=4.0, what=f"{act} {dtype}")


@at("cpu", "sm_90", "cuda")
def test_gradient_at_the_limits_of_swiglu_oai(place: str) -> None:
    """Inputs exactly at a limit keep their gradient, whatever torch's clamp does there; those beyond have none."""
    inside = torch.tensor([7.0, -7.0, 6.96875])  # the neighbours of 7 in bf16 are 1/32 away
    beyond = torch.tensor([7.03125, -7.03125, torch.inf])
    limits = torch.cat((inside, beyond))
    with running_on(place) as device:
        for dtype in (torch.float32, torch.bfloat16):
            gate = torch.tensor([7.0, 7.03125], device=device, dtype=dtype).requires_grad_()
            glu(gate, torch.zeros_like(gate), act="swiglu_oai").sum().backward()
            s = 1 / (1 + math.exp(-1.702 * 7))
            wanted = torch.tensor([s + 1.702 * 7 * s * (1 - s), 0.0], dtype=torch.float64)
            assert_close(gate.grad, wanted, c=64.0, what=f"gate {dtype}")

            up = limits.clone().to(device, dtype).requires_grad_()
            glu(torch.full_like(up, 7.0), up, act="swiglu_oai").sum().backward()
            value = torch.full_like(inside, 7 * s, dtype=torch.float64)
            assert_close(up.grad, torch.cat((value, torch.zeros_like(value))), c=64.0, what=f"up {dtype}")


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    for case in ("merged", "weight", "odd"):
        with running_on("sm_90") as device:
            check(make(case, torch.bfloat16, device), "silu")


# ---- launch geometry ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", (1, 2, 3, 511, 65536, 10**6, 2**31 + 7))
@pytest.mark.parametrize("vectors", (1, 2, 3, 31, 32, 33, 176, 256, 257, 511, 512, 1792, 10**8))
@pytest.mark.parametrize("per_thread", (1, 2, 4))
def test_tile_covers_everything_once(rows: int, vectors: int, per_thread: int) -> None:
    (strips, high, deep), block, bits = glu_plan._tile(rows, vectors, per_thread)
    lanes, rows_at_once = (block, 1) if bits == 31 else (1 << bits, block >> bits)
    assert block % 32 == 0 and block <= 256 and lanes * rows_at_once == block
    assert strips < 2**31 and high <= 65535 and deep <= 65535
    assert (strips - 1) * lanes < vectors <= strips * lanes
    covered = high * deep * rows_at_once * per_thread
    assert rows <= covered < rows + (deep + 1) * rows_at_once * per_thread


# ---- autograd -------------------------------------------------------------------------------------------------------


@emulated
def test_rows_of_blocks_in_z() -> None:
    """Launchers use the third dimension of the grid from 65536 row blocks on: here the kernel by itself."""
    x, up, y = torch.randn(60, 16), torch.randn(60, 16), torch.full((60, 16), torch.nan)
    with rtkernels.emulate():
        run = rtkernels.emulator.on_host(glu_plan._FWD, ("fp32", "Silu", 4, 2))
        run((1, 2, 2), 32, (x, up, 0, y, 60, 16, 16, 16, 0, 2))  # 16 rows for each block
    assert_close(y, F.silu(x.double()) * up.double(), c=8)


def test_only_the_gradients_that_are_wanted() -> None:
    x, up, weight = torch.randn(4, 8), torch.randn(4, 8, requires_grad=True), torch.randn(4)
    glu(x, up, weight=weight).sum().backward()
    assert x.grad is None and weight.grad is None
    torch.testing.assert_close(up.grad, F.silu(x) * weight.unsqueeze(-1))
    weight.requires_grad_()
    (grad,) = torch.autograd.grad(glu(x, up.detach(), weight=weight).sum(), weight)
    torch.testing.assert_close(grad, (F.silu(x) * up).sum(-1).detach())


def test_second_order_is_refused() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    (first,) = torch.autograd.grad(glu(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# ---- errors ---------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (
        lambda: glu(torch.ones(4, 8, dtype=torch.float64)),
        "x has dtype float64; expected one of bfloat16, float16, float32",
    ),
    "no dimensions": (lambda: glu(torch.tensor(1.0)), "x has no dimensions; expected at least one"),
    "odd": (lambda: glu(torch.ones(4, 7)), "x has an odd last dimension, 7; expected gate and up of equal size"),
    "up shape": (lambda: glu(torch.ones(4, 8), torch.ones(4, 6)), r"up has shape \(4, 6\); expected \(4, 8\)"),
    "up dtype": (lambda: glu(torch.ones(8), torch.ones(8).half()), "up has dtype float16; expected float32"),
    "up device": (
        lambda: module.FORWARD.check(meta_on(0, torch.ones(4, 8)), meta_on(1, torch.ones(4, 8)), None, "silu"),
        "up has device index 1; expected 0, that of x",
    ),
    "weight shape": (
        lambda: glu(torch.ones(4, 8), weight=torch.ones(4, 1)),
        r"weight has shape \(4, 1\); expected \(4,\), one number for each row of x",
    ),
    "weight dtype": (
        lambda: glu(torch.ones(4, 8), weight=torch.ones(4).half()),
        "weight has dtype float16; expected one of float32",
    ),
    "weight device": (
        lambda: module.FORWARD.check(meta_on(0, torch.ones(4, 8)), None, meta_on(-1, torch.ones(4)), "silu"),
        "weight has device index -1; expected 0, that of x",
    ),
    "act": (lambda: glu(torch.ones(4, 8), act="swish"), "act is 'swish'; expected one of silu, gelu_tanh, gelu_erf"),
    "not a tensor": (lambda: glu([1.0, 2.0]), "expected a torch.Tensor or an array with __dlpack__"),
    "dy shape": (
        lambda: module.BACKWARD(torch.ones(4, 8), torch.ones(4, 8), None, None, "silu", False),
        r"dy has shape \(4, 8\); expected \(4, 4\), that of the result",
    ),
    "dy dtype": (
        lambda: module.BACKWARD(torch.ones(4, 4).half(), torch.ones(4, 8), None, None, "silu", False),
        "dy has dtype float16; expected float32",
    ),
    "weight_grad": (
        lambda: module.BACKWARD(torch.ones(4, 4), torch.ones(4, 8), None, None, "silu", True),
        "weight_grad is True but there is no weight",
    ),
}


test_error_messages, test_launchers_raise_the_same_messages = error_tests(BAD)


@pytest.mark.gpu
def test_devices_must_match() -> None:
    with pytest.raises(ArgumentError, match="up is on cpu; expected cuda:0"):
        glu(torch.ones(4, 8, device="cuda:0"), torch.ones(4, 8))
    with pytest.raises(ArgumentError, match="weight is on cuda:0; expected cpu, that of x"):
        glu(torch.ones(4, 8), weight=torch.ones(4, device="cuda:0"))


# ---- other ways to call it ------------------------------------------------------------------------------------------


@at("cpu", "cuda")
@pytest.mark.parametrize("dynamic", (False, True))
def test_torch_compile(place: str, dynamic: bool) -> None:
    def block(x: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        return glu(x * 2, act="gelu_tanh", weight=weight) + glu(up, up.flip(-1), act="relu2")

    def inputs(rows: int) -> list[Tensor]:
        return [torch.randn(shape, device=place) for shape in ((rows, 16), (rows, 8), (rows,))]

    assert_compiles(block, map(inputs, (3, 4)), dynamic=dynamic)


def test_numpy_in_numpy_out() -> None:
    x, weight = np.random.default_rng(0).standard_normal((2, 3, 8), dtype=np.float32)[:, :, :], np.ones((2, 3), "f4")
    y = glu(x, weight=weight)
    assert isinstance(y, np.ndarray)
    np.testing.assert_allclose(y, glu(torch.from_numpy(x)).numpy())
    np.testing.assert_allclose(glu(x, x, act="none"), x * x)


def test_bench_rows_agree_with_torch() -> None:
    for row in rows_of(module.OP.name):
        assert row.bytes == 8192 * int(row.shape.split("x")[-1]) * 2 * (3 if row.name == "glu_fwd" else 5)
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(4, 32, generator=generator), torch.randn(4, 16, generator=generator)
    rows = {row.name: row for row in rows_of(module.OP.name)}
    torch.testing.assert_close(rows["glu_fwd"].ours(x=x, act="silu"), rows["glu_fwd"].torch(x=x, act="silu"))
    inputs = {"dy": dy, "x": x, "act": "silu"}
    torch.testing.assert_close(rows["glu_bwd"].ours(**inputs), rows["glu_bwd"].torch(**inputs))


# ---- on the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ("merged", "weight", "weight_wide", "weight_odd"))
@at("sm_90", "cuda")
def test_equal_bits_twice(place: str, case: str) -> None:
    with running_on(place) as device:
        first, second = (check(make(case, torch.bfloat16, device), "silu") for _ in range(2))
    for a, b in zip(first, second, strict=True):
        if a is not None:
            assert_same_bits(a, b)


test_thread_order_does_not_matter = order_test(
    lambda case: check(make(case, torch.bfloat16, "cpu"), "silu"),
    *("odd", "weight_wide", "weight_odd", "weight_many_rows"),
)


@pytest.mark.gpu
def test_bench_shapes() -> None:
    with poisoned():
        for cols in (2048, 4096, 8192, 14336):
            generator = torch.Generator("cuda").manual_seed(cols)
            shape = (512, 2 * cols)
            x = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
            dy = torch.randn(512, cols, generator=generator, device="cuda", dtype=torch.bfloat16)
            weight = torch.randn(512, generator=generator, device="cuda")
            check(Inputs(x, dy=dy), "silu")
            check(Inputs(x, dy=dy, weight=weight), "silu")


@pytest.mark.gpu
def test_more_row_blocks_than_one_grid_dimension() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(140_000, 2 * 264, generator=generator, device="cuda", dtype=torch.bfloat16)
    with poisoned():
        check(Inputs(x, dy=x[:, :264]), "silu")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("shape", ((70_000, 2**15), (2**32 + 32,), (2**31 + 6, 2)), ids=str)
def test_beyond_two_to_the_31(shape: tuple[int, ...]) -> None:
    elements = torch.Size(shape).numel()
    if torch.cuda.mem_get_info()[0] < 7 * elements:
        pytest.skip("not enough free GPU memory")
    x = torch.ones(shape, device="cuda", dtype=torch.bfloat16)
    x.view(-1, shape[-1])[-3:].normal_()
    with poisoned():
        y = glu(x, act="none")
        dx = module.BACKWARD(y, x, None, None, "none", False)[0]
    halves = (*x.chunk(2, -1), y, *dx.chunk(2, -1))
    gate, up, last, dgate, dup = (t.view(-1, t.shape[-1])[-3:, -64:] for t in halves)
    assert_same_bits(last, gate * up)
    assert_same_bits(dgate, last * up)
    assert_same_bits(dup, last * gate)
    assert not y.isnan().any() and not dx.isnan().any()


@pytest.mark.gpu
def test_graph_capture_and_replay() -> None:
    x = torch.randn(64, 2 * 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(64, device="cuda")
    dy = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)

    def run() -> tuple[Tensor, ...]:
        return module.FORWARD(x, None, weight, "silu"), *module.BACKWARD(dy, x, None, weight, "silu", True)

    replay = captured(run)
    x.copy_(torch.randn_like(x))
    assert_equal_bits(replay(), run())


@pytest.mark.gpu
def test_two_streams() -> None:
    xs = [torch.randn(2048, 2 * 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    wanted = [glu(x) for x in xs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in xs]
    results: list[list[Tensor]] = [[], []]
    for _ in range(10):
        for x, stream, into in zip(xs, streams, results, strict=True):
            with torch.cuda.stream(stream):
                into.append(glu(x))
    torch.cuda.synchronize()
    for expected, got in zip(wanted, results, strict=True):
        for y in got:
            assert_same_bits(y, expected)
