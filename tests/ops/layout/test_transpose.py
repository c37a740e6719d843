"""Transposes: the bits of torch's own, padding, experts, gradients, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_same_bits, running_on
from support.fp8_cases import same_strides
from support.places import ORDERS, at, emulated, error_tests, short
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.ops.layout import transpose as module
from rtkernels.ops.layout import transpose_plan as plans

transpose, transpose_experts = rtkernels.transpose, rtkernels.transpose_experts
DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def numbers(*shape: int, dtype: torch.dtype = torch.int16) -> Tensor:
    """Arbitrary bits."""
    count = torch.Size(shape).numel()
    bits = (torch.arange(count) * 2654435761 + 12345) % 2**31
    return bits.to(torch.int32).view(torch.uint8)[: count * dtype.itemsize].view(dtype).view(shape)


def expected(x: Tensor, dim0: int, dim1: int, pad_to: int = 1) -> Tensor:
    y = x.contiguous().view(BITS[x.itemsize]).transpose(dim0, dim1)
    return torch.nn.functional.pad(y, (0, -y.shape[-1] % pad_to)).contiguous().view(x.dtype)


# name: (tensor, dim0, dim1, pad_to)
CASES: dict[str, Callable[[torch.dtype], tuple[Tensor, int, int, int]]] = {
    "square": lambda t: (numbers(128, 128, dtype=t), 0, 1, 1),
    "several tiles": lambda t: (numbers(272, 528, dtype=t), 0, 1, 1),
    "odd": lambda t: (numbers(67, 131, dtype=t), 0, 1, 1),
    "one row": lambda t: (numbers(1, 80, dtype=t), 0, 1, 1),
    "one column": lambda t: (numbers(80, 1, dtype=t), -1, -2, 1),
    "one element": lambda t: (numbers(1, 1, dtype=t), 0, 1, 1),
    "empty": lambda t: (numbers(0, 5, dtype=t), 0, 1, 1),
    "empty, padded": lambda t: (numbers(5, 0, dtype=t), 0, 1, 32),
    "no rows, padded": lambda t: (numbers(0, 5, dtype=t), 0, 1, 32),
    "padded to 32": lambda t: (numbers(77, 96, dtype=t), 0, 1, 32),
    "padded beyond a tile": lambda t: (numbers(3, 32, dtype=t), 0, 1, 300),
    "padded, odd": lambda t: (numbers(10, 33, dtype=t), 0, 1, 7),
    "rows apart": lambda t: (numbers(96, 256, dtype=t)[::2, :64], 0, 1, 1),
    "misaligned": lambda t: (numbers(48, 129, dtype=t)[:, 1:49], 0, 1, 1),
    "transposed already": lambda t: (numbers(48, 32, dtype=t).t(), 0, 1, 1),
    "expanded": lambda t: (numbers(1, 64, dtype=t).expand(48, 64), 0, 1, 1),
    "three, last two": lambda t: (numbers(5, 32, 48, dtype=t), 1, 2, 1),
    "three, last two, padded": lambda t: (numbers(3, 20, 48, dtype=t), 1, 2, 32),
    "three, first two": lambda t: (numbers(5, 7, 32, dtype=t), 0, 1, 1),
    "three, first two, odd": lambda t: (numbers(5, 7, 33, dtype=t), 0, 1, 1),
    "three, ends": lambda t: (numbers(32, 3, 48, dtype=t), 0, -1, 1),
    "four, heads": lambda t: (numbers(2, 6, 4, 32, dtype=t), 1, 2, 1),
    "four, heads, strided": lambda t: (numbers(2, 6, 8, 64, dtype=t)[:, :, ::2, :32], 1, 2, 1),
    "four, first two": lambda t: (numbers(3, 2, 5, 16, dtype=t), 0, 1, 1),
    "four, first and third": lambda t: (numbers(3, 2, 5, 16, dtype=t), 0, 2, 1),
    "four, last two": lambda t: (numbers(2, 3, 16, 32, dtype=t), 2, 3, 1),
    "four, last and second": lambda t: (numbers(2, 16, 3, 32, dtype=t), 1, 3, 16),
    "long rows": lambda t: (numbers(2, 3, 5000, dtype=t), 0, 1, 1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@at()
def test_bits(place: str, dtype: torch.dtype) -> None:
    for name, make in CASES.items():
        x, dim0, dim1, pad_to = make(dtype)
        with running_on(place) as device:
            got = transpose(same_strides(x, device), dim0, dim1, pad_to=pad_to)
        assert got.is_contiguous(), name
        assert_same_bits(got.cpu(), expected(x, dim0, dim1, pad_to), name)


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("dtype", (torch.bool, torch.int8, torch.int16, torch.float16, torch.int32), ids=short)
def test_other_dtypes(place: str, dtype: torch.dtype) -> None:
    x = (numbers(48, 64, dtype=torch.int8) & 1).to(dtype)
    with running_on(place) as device:
        got = transpose(x.to(device))
    assert got.dtype == dtype and torch.equal(got.cpu(), x.t())


# ---- experts --------------------------------------------------------------------------------------------------------

COUNTS = [
    ([5, 0, 130, 16, 1], 48, 32),
    ([0, 0, 70, 0], 64, 1),
    ([16, 144, 32], 272, 16),
    ([0, 0], 8, 4),
    ([1] * 40, 33, 3),
]


def check_experts(x: Tensor, counts: Tensor, pad_to: int, place: str) -> None:
    cols, rows = x.shape[1], x.shape[0]
    with running_on(place) as device:
        got = transpose_experts(same_strides(x, device), counts.to(device), pad_to=pad_to).cpu()
    assert got.numel() == (rows + (pad_to - 1) * min(len(counts), rows)) * cols
    first = place_ = 0
    for count in counts.tolist():
        end = min(first + max(count, 0), rows)
        size = -(-(end - first) // pad_to) * pad_to
        part = got[place_ * cols : (place_ + size) * cols].view(cols, size)
        assert_same_bits(part, expected(x[first:end], 0, 1, pad_to) if size else part, f"{counts}")
        first, place_ = end, place_ + size
    assert not got[place_ * cols :].view(BITS[x.itemsize]).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@at()
def test_experts(place: str, dtype: torch.dtype) -> None:
    for i, (counts, cols, pad_to) in enumerate(COUNTS):
        kind = (torch.int32, torch.int64)[i % 2]
        check_experts(numbers(sum(counts), cols, dtype=dtype), torch.tensor(counts, dtype=kind), pad_to, place)


@at("cpu", "sm_90", "cuda")
def test_experts_with_odd_counts_and_strides(place: str) -> None:
    check_experts(numbers(40, 64)[:, :48], torch.tensor([10, -7, 12]), 8, place)
    check_experts(numbers(40, 48), torch.tensor([10, 2**40, 12]), 8, place)
    check_experts(numbers(48, 40).t(), torch.tensor([10, 0, 30]), 8, place)


@emulated
@pytest.mark.parametrize("order", ORDERS)
def test_order_of_threads_does_not_matter(order: str | int) -> None:
    with rtkernels.emulate("sm_90", order=order):
        for dtype in DTYPES:
            for case in ("several tiles", "odd"):
                x, dim0, dim1, _ = CASES[case](dtype)
                assert_same_bits(transpose(x, dim0, dim1), expected(x, dim0, dim1))
    x = numbers(152, 48)
    want = transpose_experts(x, torch.tensor(COUNTS[0][0]), pad_to=32)
    with rtkernels.emulate("sm_90", order=order):
        assert_same_bits(transpose_experts(x, torch.tensor(COUNTS[0][0]), pad_to=32), want)


# ---- gradients ------------------------------------------------------------------------------------------------------


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("case", ("square", "padded, odd", "four, heads", "four, last and second"))
def test_gradient(place: str, case: str) -> None:
    x, dim0, dim1, pad_to = CASES[case](torch.int16)
    with running_on(place) as device:
        leaf = torch.randn(x.shape, device=device).requires_grad_()
        y = transpose(leaf, dim0, dim1, pad_to=pad_to)
        dy = torch.randn(y.shape, device=device)
        y.backward(dy)
        want = dy[..., : leaf.transpose(dim0, dim1).shape[-1]].transpose(dim0, dim1)
        assert_same_bits(leaf.grad, want.contiguous())


def test_second_order() -> None:
    x = torch.randn(4, 6, dtype=torch.float32, requires_grad=True)
    (first,) = torch.autograd.grad(transpose(x).pow(3).sum(), x, create_graph=True)
    first.sum().backward()
    torch.testing.assert_close(x.grad, 6 * x.detach())


# ---- errors, other ways to call it ----------------------------------------------------------------------------------

X, C = torch.ones(4, 8), torch.tensor([1, 3])
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: transpose(X.double()), "x has dtype float64; expected one with elements of 1, 2 or 4 bytes"),
    "rank": (lambda: transpose(X[0]), r"x has shape \(8,\); expected two to four dimensions"),
    "dim": (lambda: transpose(X, 0, 2), "dim1 is 2; expected -2 to 1 for x with 2 dimensions"),
    "same": (lambda: transpose(X, 0, -2), "dim0 is 0 and dim1 is -2: the same dimension of x"),
    "pad": (lambda: transpose(X, pad_to=0), "pad_to is 0; expected 1 to 65536"),
    "pad inner": (lambda: transpose(X[None], 0, 1, pad_to=8), "pad_to is 8; expected 1 unless the last dimension"),
    "not a tensor": (lambda: transpose([1.0]), "expected a torch.Tensor or an array with __dlpack__"),
    "counts dtype": (lambda: transpose_experts(X, C.float()), "counts has dtype float32; expected int32 or int64"),
    "counts shape": (lambda: transpose_experts(X, C[None]), r"counts has shape \(1, 2\); expected one dimension"),
    "x shape": (lambda: transpose_experts(X[0], C), r"x has shape \(8,\); expected two dimensions, rows sorted"),
    "rows": (
        lambda: plans.check_experts((torch.int8, (2**31, 4), (4, 1), 0), (torch.int64, (2,), (1,), 0), 1),
        "expected less than 2.31 with padding",
    ),
}


test_errors, test_launchers_raise_the_same_messages = error_tests(BAD)


@at("cpu", "cuda")
def test_torch_compile(place: str) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return transpose(x * 2, pad_to=4) + 1, transpose_experts(x * 2, counts)

    x, counts = torch.randn(6, 10, device=place, requires_grad=True), torch.tensor([2, 4], device=place)
    got = run(x, counts)
    torch.testing.assert_close(got[0], transpose(x * 2, pad_to=4) + 1)
    assert_same_bits(got[1], transpose_experts(x * 2, counts))
    got[0].sum().backward()
    assert (x.grad == 2).all() and not got[1].requires_grad


def test_numpy_in_numpy_out() -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(transpose(x), x.T)
    assert isinstance(transpose_experts(x, np.array([1, 2])), np.ndarray)


def test_bench_rows_agree_with_torch() -> None:
    rows = {row.name: row for row in rows_of(module.OP.name)}
    x = torch.randn(2, 6, 4, 8)
    assert_same_bits(rows["transpose_heads"].ours(x=x), rows["transpose_heads"].torch(x=x))
    assert_same_bits(rows["transpose"].ours(x=x[0, 0]), rows["transpose"].torch(x=x[0, 0]))


def emulated_coverage() -> None:
    """Launch every kernel of the op in the emulator; test_registry.py checks that it does."""
    with rtkernels.emulate("sm_90"):
        transpose(X)
        transpose(X[None], 0, 1)
        transpose_experts(X, C)
        transpose([X.clone(), X.clone()])


# ---- on the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_graph_replays_with_other_counts_on_a_side_stream() -> None:
    x, counts = numbers(1000, 64).cuda(), torch.tensor([100, 0, 900], device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        transpose_experts(x, counts, pad_to=32), transpose(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured, plain = transpose_experts(x, counts, pad_to=32), transpose(x)
    for new in ([1000, 0, 0], [3, 500, 497]):
        counts.copy_(torch.tensor(new))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(captured.cpu(), transpose_experts(x.cpu(), torch.tensor(new), pad_to=32))
        assert_same_bits(plain.cpu(), x.cpu().t().contiguous())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.uint8, torch.bfloat16), ids=short)
@pytest.mark.parametrize("shape", ((2**17, 2**14 + 16), (2**16 + 1, 2**15 + 1), (2**31 + 16, 1)), ids=str)
def test_beyond_two_to_the_31(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randint(0, 100, shape, device="cuda", dtype=torch.uint8).to(dtype)
    got = transpose(x)
    assert all(torch.equal(got[i : i + 1024], x[:, i : i + 1024].t()) for i in range(0, shape[1], 1024))


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float8_e4m3fn))
def test_matrices_of_a_list_in_one_launch(place: str, dtype: torch.dtype) -> None:
    matrices = [numbers(33 + i, 48, dtype=dtype)[i:].clone() for i in range(3)]
    for pad_to in (1, 32):
        with running_on(place) as device:
            found = transpose([x.to(device) for x in matrices], pad_to=pad_to)
        for x, y in zip(matrices, found, strict=True):
            assert_same_bits(y.cpu(), expected(x, 0, 1, pad_to))


@at("cpu", "sm_90", "cuda")
def test_conjugates_in_a_list(place: str) -> None:
    """Their memory holds the conjugate values."""
    x = torch.view_as_complex(torch.randn(2, 5, 6, 2).half())
    with running_on(place) as device:
        found = transpose([t.conj() for t in x.to(device).clone().unbind()])
        also = transpose([t.clone().conj() for t in x.to(device)])
    for y, z, t in zip(found, also, x, strict=True):
        for result in (y, z):
            assert torch.equal(
                torch.view_as_real(result.cpu().resolve_conj()), torch.view_as_real(t.conj_physical().t())
            )
