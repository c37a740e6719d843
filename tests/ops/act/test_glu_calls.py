"""Gated activations: errors, torch.compile, arrays, and what only a GPU shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_same_bits, poisoned, running_on
from support.glu_cases import Inputs, check, glu, make
from support.places import at, error_tests, meta_on, order_test
from support.ways import assert_compiles, assert_equal_bits, captured
from torch import Tensor

from bench.rows import rows_of
from rtkernels.errors import ArgumentError
from rtkernels.ops.act import glu as module

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
