"""Gated activations with fp8 results: errors, torch.compile, arrays, and what only a GPU shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_same_bits, poisoned
from support.glu_fp8_cases import Inputs, check, check_backward, counts, glu_fp8, glu_fp8_backward, judge, make_backward
from support.places import at, emulated, meta_on
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from bench.rows.act import glu_fp8 as bench_rows
from rtkernels.errors import ArgumentError
from rtkernels.ops.act import glu_fp8 as module
from rtkernels.ops.act import glu_fp8_plan as plans

# ---- errors ---------------------------------------------------------------------------------------------------------


X = torch.ones(4, 8)
BAD: dict[str, Callable[[], Any]] = {
    "x has dtype float64; expected one of bfloat16, float16, float32": lambda: glu_fp8(X.double()),
    "x has an odd last dimension, 7": lambda: glu_fp8(X[:, :7]),
    "act is 'swish'; expected one of silu": lambda: glu_fp8(X, act="swish"),
    "layout is 'column'; expected one of 'row', 'transposed', 'both'": lambda: glu_fp8(X, layout="column"),
    "scale_layout is 'T'; expected one of 'row', 'column'": lambda: glu_fp8(X, scale_layout="T"),
    "scale_layout 'column' is for the scales of rows": lambda: glu_fp8(X, layout="transposed", scale_layout="column"),
    "counts has dtype float32; expected one of int32, int64": lambda: glu_fp8(X, counts=torch.ones(2)),
    r"counts has shape \(2, 1\); expected one dimension": lambda: glu_fp8(X, counts=counts(2, 2)[:, None]),
    r"weight has shape \(8,\); expected \(4,\)": lambda: glu_fp8(X, weight=torch.ones(8)),
    r"up has shape \(4, 4\); expected \(4, 8\)": lambda: glu_fp8(X, X[:, :4]),
    "counts has device index 0; expected -1": lambda: module.FORWARD.check(
        meta_on(-1, X), None, None, meta_on(0, torch.ones(2, dtype=torch.int64)), "silu", "row", False, "row", False
    ),
    r"x has 2147483648 rows; expected fewer than 2\*\*31": lambda: plans.check_counts(None, 2**31),
    "expected a torch.Tensor or an array with __dlpack__": lambda: glu_fp8([1.0, 2.0]),
    r"dy has shape \(4, 8\); expected \(4, 4\), that of the result": lambda: glu_fp8_backward(X, X),
    "dy has dtype float16; expected float32": lambda: glu_fp8_backward(X[:, :4].half(), X),
    "keep is 'bf16'; expected one of 'fp8', 'dense', 'both'": lambda: glu_fp8_backward(X[:, :4], X, keep="bf16"),
    "weight_grad is True but there is no weight": lambda: glu_fp8_backward(
        X[:, :4], X, layout="transposed", weight_grad=True
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_errors(message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        BAD[message]()


@emulated
@pytest.mark.parametrize("message", BAD)
def test_launchers_raise_the_same_messages(message: str) -> None:
    with rtkernels.emulate(), pytest.raises(ArgumentError, match=message):
        BAD[message]()


# ---- torch and other libraries --------------------------------------------------------------------------------------


@at("cpu", "cuda")
@pytest.mark.parametrize("dynamic", (False, True))
def test_torch_compile(place: str, dynamic: bool) -> None:
    def block(x: Tensor, numbers: Tensor) -> tuple[Tensor, ...]:
        by_expert = glu_fp8(x * 2, counts=numbers, layout="both")
        plain = glu_fp8(x, act="gelu_tanh", scale_layout="column")
        return (*by_expert, plain.q, plain.scale)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (130, 140):
        x = torch.randn(rows, 2 * 136, device=place, requires_grad=True)
        numbers = counts(rows - 10, 10).to(place)
        for a, b in zip(compiled(x, numbers), block(x, numbers), strict=True):
            assert_same_bits(a, b)


def test_numpy_in_numpy_out() -> None:
    x = np.random.default_rng(0).standard_normal((3, 2 * 40), np.float32)
    got, wanted = glu_fp8(x, layout="both"), glu_fp8(torch.from_numpy(x), layout="both")
    assert isinstance(got, module.GluFp8)
    for a, b in zip(got, wanted, strict=True):
        assert isinstance(a, np.ndarray)
        np.testing.assert_array_equal(a.view(np.uint8), b.view(torch.uint8).numpy())


def test_backward_compiled_and_numpy() -> None:
    def run(dy: Tensor, x: Tensor, weight: Tensor, numbers: Tensor) -> tuple[Tensor, ...]:
        return tuple(glu_fp8_backward(dy, x * 2, weight=weight, counts=numbers, keep="both"))

    dy, x, weight = torch.randn(130, 128), torch.randn(130, 256), torch.rand(130)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(dy, x, weight, counts(30, 100)), run(dy, x, weight, counts(30, 100)), strict=True):
        assert_same_bits(a, b)
    got = glu_fp8_backward(dy.numpy(), (x * 2).numpy(), weight=weight.numpy(), counts=np.array([30, 100]), keep="both")
    for a, b in zip(got, run(dy, x, weight, counts(30, 100)), strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(torch.uint8).numpy())


def test_bench_rows() -> None:
    """Bytes are those of the issue's table; on a small shape the plain torch beside each row agrees with it."""
    bytes_of = {row.label: row.bytes for row in rows_of(module.OP.name)}
    assert bytes_of["glu_fp8_both 16384x1024"] == 50_855_936
    assert bytes_of["glu_fp8_bwd_both 16384x1024"] == 84_934_656
    assert bytes_of["expert_glu_fp8_both 116928x2048 32 experts"] == 726_416_128
    assert bytes_of["expert_glu_fp8_bwd_both 116928x2048 32 experts"] == 1_213_363_712
    for experts, rows in ((None, 300), ((16, 144, 0, 100), 260)):
        for row in bench_rows._pair("any", experts, rows, 256, module.FORWARD, module.BACKWARD):
            inputs = row.make("cpu", torch.Generator().manual_seed(0))
            for a, b in zip(row.ours(**inputs), row.torch(**inputs), strict=True):
                assert a.dtype == b.dtype
                torch.testing.assert_close(a.float(), b.float())


# ---- on the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_graph_replays_with_other_counts() -> None:
    x = torch.randn(1000, 2 * 256, device="cuda", dtype=torch.bfloat16)
    weight, numbers = torch.rand(1000, device="cuda"), counts(100, 0, 900).cuda()

    def run() -> module.GluFp8:
        return glu_fp8(x, weight=weight, counts=numbers, layout="both", scale_layout="column")

    replay = captured(run)
    x.normal_()
    numbers.copy_(counts(317, 600, 83))
    assert_equal_bits(replay(), run())
    judge(replay(), Inputs(x, None, weight).exact("silu"), numbers, layout="both", pow2=False, scales="column")


@pytest.mark.gpu
def test_bench_shapes() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 700, (32,), generator=generator)
    rows = int(numbers.sum())
    x = torch.randn(rows, 2 * 1024, generator=generator).bfloat16().cuda()
    weight = torch.randn(rows, generator=generator).cuda()
    with poisoned():
        check(Inputs(x, weight=weight, counts=numbers.cuda()), pow2=True, scales="column")
        check(Inputs(x[:2048, :1024].contiguous()))
        check_backward(Inputs(x, weight=weight, counts=numbers.cuda()), pow2=True, scales="column")
        check_backward(Inputs(x[:2048, :1024].contiguous()))


@pytest.mark.gpu
def test_backward_twice_and_in_a_graph() -> None:
    inputs = make_backward("experts", torch.bfloat16, "cuda")
    first = check_backward(inputs)
    dy = torch.randn(300, 256, generator=torch.Generator().manual_seed(3)).bfloat16().cuda()

    def run() -> tuple[Tensor, ...]:
        return glu_fp8_backward(dy, inputs.x, weight=inputs.weight, counts=inputs.counts, keep="both")

    assert_equal_bits(captured(run)(), first)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    rows, cols = 2**20 + 128, 1024
    x = torch.randn(rows, 2 * cols, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    whole = glu_fp8_backward(dy, x)
    part = glu_fp8_backward(dy[-128:], x[-128:])
    assert_same_bits(whole.q[-128:], part.q)
    assert_same_bits(whole.q_t[:, -128:].contiguous(), part.q_t)
    assert_same_bits(whole.scale_t[-1:], part.scale_t)


@pytest.mark.gpu
def test_streams() -> None:
    x = torch.randn(1000, 2 * 256, device="cuda", dtype=torch.bfloat16)
    expected, stream = glu_fp8(x, layout="both"), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = glu_fp8(x, layout="both")
    stream.synchronize()
    for a, b in zip(got, expected, strict=True):
        assert_same_bits(a, b)
