"""embedding: errors, torch.compile, arrays, and what only a GPU shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_close, assert_same_bits
from support.embedding_cases import Inputs, embedding, embedding_grad_, exact_sums
from support.places import at, error_tests, meta_on
from support.ways import assert_equal_bits, captured
from torch import Tensor

from bench.rows import rows_of
from rtkernels.ops.index import embedding as module

# ---- errors ---------------------------------------------------------------------------------------------------------


IDS, WEIGHT, DY = torch.tensor([1, 2]), torch.ones(4, 8), torch.ones(2, 8)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "ids dtype": (lambda: embedding(IDS.float(), WEIGHT), "ids has dtype float32; expected one of int32, int64"),
    "weight dtype": (lambda: embedding(IDS, WEIGHT.double()), "weight has dtype float64; expected one of bfloat16"),
    "weight rank": (lambda: embedding(IDS, WEIGHT[0]), r"weight has 1 dimensions; expected 2, \[rows, columns\]"),
    "weight type": (lambda: embedding(IDS, [1.0]), "weight is a list; expected a torch.Tensor"),
    "padding": (
        lambda: embedding(IDS, WEIGHT, padding_idx=-5),
        "padding_idx is -5; expected 0 or more, or -4 to -1 for a whole vocabulary of 4",
    ),
    "padding in a part": (lambda: embedding(IDS, WEIGHT, padding_idx=-1, vocab_start=4), "padding_idx is -1"),
    "start": (lambda: embedding(IDS, WEIGHT, vocab_start=-1), "vocab_start is -1; expected 0 or more"),
    "main_grad shape": (
        lambda: embedding(IDS, WEIGHT, main_grad=torch.ones(5, 8)),
        r"main_grad has shape \(5, 8\); expected \(4, 8\), that of weight",
    ),
    "main_grad columns": (
        lambda: embedding_grad_(torch.ones(4, 9), IDS, DY),
        r"main_grad has shape \(4, 9\); expected \(rows, 8\)",
    ),
    "main_grad dtype": (lambda: embedding_grad_(WEIGHT.double(), IDS, DY), "main_grad has dtype float64"),
    "main_grad strides": (
        lambda: embedding_grad_(torch.ones(8, 4).t(), IDS, DY),
        r"main_grad has strides \(1, 4\); expected unit-stride rows that do not overlap",
    ),
    "main_grad overlap": (
        lambda: embedding_grad_(torch.ones(1, 8).expand(4, 8), IDS, DY),
        r"main_grad has strides \(0, 1\) for shape \(4, 8\); expected memory of its own for every element",
    ),
    "dy shape": (
        lambda: embedding_grad_(torch.ones(4, 8), IDS, torch.ones(3, 8)),
        r"dy has shape \(3, 8\); expected \(2, 'columns'\), the shape of ids and columns",
    ),
    "dy dtype": (lambda: embedding_grad_(torch.ones(4, 8), IDS, DY.double()), "dy has dtype float64"),
    "device": (
        lambda: module.FORWARD.check(meta_on(0, torch.ones(4, 8)), meta_on(-1, IDS), 0),
        "ids has device index -1; expected 0, that of weight",
    ),
    "rows": (lambda: module.BACKWARD(DY, IDS, -1, 0, -1), "rows is -1; expected 0 or more"),
    "not a tensor": (lambda: embedding([1], WEIGHT), "expected a torch.Tensor or an array with __dlpack__"),
}

test_error_messages, test_launchers_raise_the_same_messages = error_tests(BAD)


# ---- other ways to call it ------------------------------------------------------------------------------------------


@at("cpu", "cuda")
@pytest.mark.parametrize("dynamic", (False, True))
def test_torch_compile(place: str, dynamic: bool) -> None:
    def block(ids: Tensor, weight: Tensor) -> Tensor:
        return embedding(ids, weight, padding_idx=2) * 2 + embedding(ids, weight, vocab_start=3)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (5, 7):
        ids = torch.randint(0, 12, (tokens,), device=place)
        weight = torch.randn(12, 8, device=place)
        grads = []
        for function in (compiled, block):
            leaf = weight.clone().requires_grad_()
            function(ids, leaf).square().sum().backward()
            grads.append(leaf.grad)
        torch.testing.assert_close(*grads)
    main = [torch.zeros(12, 8, device=place) for _ in range(2)]
    add = torch.compile(embedding_grad_, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for function, out in zip((add, embedding_grad_), main, strict=True):
        function(out, ids, torch.ones(7, 8, device=place))
    torch.testing.assert_close(*main)
    accumulate = torch.compile(lambda *a: embedding(*a[:2], main_grad=a[2]).sum(), fullgraph=True, backend="aot_eager")
    leaf = weight.clone().requires_grad_()
    accumulate(ids, leaf, main[0]).backward()
    assert leaf.grad is None
    embedding(ids, leaf, main_grad=main[1]).sum().backward()
    torch.testing.assert_close(*main)


def test_numpy_in_numpy_out() -> None:
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((6, 8), dtype=np.float32)
    ids = np.array([[1, 5], [0, 9]])
    y = embedding(ids, weight)
    assert isinstance(y, np.ndarray)
    np.testing.assert_array_equal(y[0], weight[ids[0]])
    np.testing.assert_array_equal(y[1, 1], np.zeros(8))
    main = np.zeros((6, 8), dtype=np.float32)
    embedding_grad_(main, ids, np.ones((2, 2, 8), dtype=np.float32))
    assert main.sum() == 24


def test_bench_rows_agree_with_torch() -> None:
    rows = {row.name: row for row in rows_of(module.OP.name)}
    weight, ids, dy = torch.randn(20, 16), torch.randint(0, 20, (30,)), torch.randn(30, 16)
    forward, backward = rows["embedding_fwd"], rows["embedding_bwd"]
    torch.testing.assert_close(forward.ours(ids=ids, weight=weight), forward.torch(ids=ids, weight=weight))
    inputs = {"ids": ids, "dy": dy, "weight": weight}
    torch.testing.assert_close(backward.ours(**inputs), backward.torch(**inputs))
    into = rows["embedding_bwd_into_fp32"]
    main = torch.zeros(20, 16)
    into.ours(dy=dy, ids=ids, main_grad=main)
    torch.testing.assert_close(
        into.ours(dy=dy, ids=ids, main_grad=main), into.exact(dy=dy, ids=ids, main_grad=main).float()
    )


# ---- on the GPU -----------------------------------------------------------------------------------------------------


def _big(tokens: int, high: int, rows: int, cols: int, device: str = "cuda") -> Inputs:
    generator = torch.Generator(device).manual_seed(tokens)
    ids = torch.randint(0, high, (tokens,), device=device, generator=generator)
    return Inputs(ids, rows, torch.randn(tokens, cols, device=device, generator=generator).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("high", (1, 3, 100, 10_000, 157_184))
@pytest.mark.parametrize("tokens", (1, 33, 4095, 8192, 16_384, 16_385, 100_003))
def test_bench_shapes(tokens: int, high: int) -> None:
    inputs = _big(tokens, high, 157_184, 256)
    sums, magnitudes = exact_sums(inputs)
    first, second = (module.BACKWARD(inputs.dy, inputs.ids, inputs.rows, 0, -1) for _ in range(2))
    assert_same_bits(first, second)
    assert_close(first, sums, scale=sums.abs() + 2.0**-12 * magnitudes, c=1.01, what="gradient")
    for dtype in (torch.float32, torch.bfloat16):
        mains = [torch.ones(inputs.rows, 256, device="cuda", dtype=dtype) for _ in range(2)]
        for main in mains:
            module.ADD(main, inputs.dy, inputs.ids, 0, -1)
        assert_same_bits(*mains)
        slack = 64 * 2.0**-24 / torch.finfo(dtype).eps
        assert_close(mains[0], sums + 1, scale=(sums + 1).abs() + slack * (1 + magnitudes), c=1.01, what="main_grad")


@pytest.mark.gpu
@pytest.mark.slow
def test_beyond_two_to_the_31() -> None:
    rows, cols = 2**20 + 3, 2056
    if torch.cuda.mem_get_info()[0] < 16 * rows * cols:
        pytest.skip("not enough free GPU memory")
    ids = torch.tensor([0, rows - 1, rows - 1, rows, 5], device="cuda")
    dy = torch.ones(5, cols, device="cuda", dtype=torch.bfloat16)
    grad = module.BACKWARD(dy, ids, rows, 0, -1)
    assert grad[-1].eq(2).all() and grad[0].eq(1).all() and grad[5].eq(1).all()
    assert grad.sum(dtype=torch.float64).item() == 4 * cols
    assert module.FORWARD(grad, ids, 0)[1].eq(2).all()
    many = (rows - 1 - torch.arange(rows, device="cuda")).clamp_max(7)
    grad.fill_(1)
    out = module.BACKWARD(grad, many, 8, 0, -1)
    assert out[:7, 0].eq(1).all() and out[7].eq(torch.tensor(float(rows - 7)).bfloat16()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", (8192, 20_000))
def test_graph_capture_and_replay(tokens: int) -> None:
    inputs = _big(tokens, 1000, 5000, 512)
    main = torch.zeros(5000, 512, device="cuda")

    def run() -> tuple[Tensor, ...]:
        grad = module.BACKWARD(inputs.dy, inputs.ids, 5000, 0, -1)
        module.ADD(main, inputs.dy, inputs.ids, 0, -1)
        return grad, module.FORWARD(grad, inputs.ids, 0)

    replay = captured(run)
    inputs.ids.copy_(torch.randint_like(inputs.ids, 0, 300))
    main.zero_()
    replayed = *replay(), main.clone()
    main.zero_()
    assert_equal_bits(replayed, (*run(), main))


@pytest.mark.gpu
def test_two_streams() -> None:
    cases = [_big(8192, 500, 3000, 512), _big(4096, 3000, 3000, 512)]
    wanted = [module.BACKWARD(c.dy, c.ids, c.rows, 0, -1) for c in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(5):
        got = []
        for stream, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                got.append(module.BACKWARD(case.dy, case.ids, case.rows, 0, -1))
        torch.cuda.synchronize()
        for a, b in zip(got, wanted, strict=True):
            assert_same_bits(a, b)
