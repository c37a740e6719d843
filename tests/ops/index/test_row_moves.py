"""Rows selected and scattered, and chunks of them reordered, at every place they can run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_close, assert_same_bits, running_on
from support.places import DTYPES, ORDERS, at, emulated, error_tests, short
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from bench.rows.index import row_moves as bench_rows
from rtkernels import index_select, scatter_add, sort_chunks
from rtkernels.ops.index import row_moves as module
from rtkernels.ops.index import row_moves_operators as operators
from rtkernels.ops.index import row_moves_plan as plans
from rtkernels.runtime.launch.plans import Plans

WILD = [0, 12, -1, 5, 5, 13, 2**40, -7, 2**32 + 3, -(2**63)]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def selected(x: Tensor, indices: list[int]) -> Tensor:
    """The rows one by one, zeros for those that do not exist."""
    kept = x.contiguous().view(torch.uint8)  # torch cannot join fp8 tensors
    step = kept.numel() // len(x)
    rows = [kept.view(-1)[i * step : i * step + step] if 0 <= i < len(x) else kept.new_zeros(step) for i in indices]
    return torch.cat(rows).view(x.dtype).view(len(indices), *x.shape[1:])


# ---- index_select ---------------------------------------------------------------------------------------------------

KINDS = (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64)


@pytest.mark.parametrize("kind", KINDS, ids=short)
@at()
def test_index_select(place: str, kind: torch.dtype) -> None:
    with running_on(place) as device:
        for cols in (1, 7, 16, 40, 2056):
            x, scale = normal(13, cols, dtype=kind), normal(13, 3)
            wanted = selected(x, WILD)
            indices = torch.tensor(WILD, device=device)
            x, scale = x.to(device), scale.to(device)
            y = index_select(x, indices)
            assert y.is_contiguous()
            assert_same_bits(y.cpu(), wanted)
            for factors in (scale, scale[:, 0], scale[:, 1:], normal(13, 300).to(device)):
                y, moved = index_select(x, indices, scale=factors)
                assert_same_bits(y.cpu(), wanted)
                assert_same_bits(moved.cpu(), selected(factors.cpu(), WILD))
            narrow = torch.tensor([i if abs(i) < 2**31 else 99 for i in WILD], dtype=torch.int32, device=device)
            assert_same_bits(index_select(x, narrow).cpu(), wanted)


@at()
def test_index_select_into_rows_and_scales(place: str) -> None:
    with running_on(place) as device:
        x, indices = normal(7, 24).to(device), torch.tensor([3, 0, -1, 3], device=device)
        for scale in (normal(7).to(device), normal(7, 5).to(device)):
            out = torch.empty(4, 24, device=device), torch.empty(4, *scale.shape[1:], device=device)
            found = index_select(x, indices, scale=scale, out=out)
            assert found[0] is out[0] and found[1] is out[1]
            for given, source in zip(out, (x, scale), strict=True):
                rows = source.cpu().view(7, -1)
                assert_same_bits(given.cpu().view(4, -1), selected(rows, indices.tolist()))


@at()
def test_index_select_layouts(place: str) -> None:
    with running_on(place) as device:
        base = normal(26, 40).to(device)
        indices = torch.tensor([3, 0, 12, -1, 3], device=device)
        for x in (base[::2, 8:24], base[::2, 1:9], base.t()[:13], base[:1].expand(13, 40)):
            wanted = selected(x.cpu(), indices.tolist())
            assert_same_bits(index_select(x, indices).cpu(), wanted)
            holder = torch.full((5, x.shape[1] + 8), 7.0, device=device)
            part = holder[:, 4 : 4 + x.shape[1]]
            assert index_select(x, indices, out=part) is part
            assert_same_bits(part.cpu(), wanted)
            assert holder[:, :4].eq(7).all() and holder[:, 4 + x.shape[1] :].eq(7).all()
        assert_same_bits(index_select(base, indices.repeat_interleave(2)[::2]), index_select(base, indices))
        assert index_select(base, indices[:0]).shape == (0, 40)
        assert index_select(base[:, :0], indices).shape == (5, 0)
        assert index_select(base[:0], indices).eq(0).all()
        y, moved = index_select(base[:, :0], indices, scale=base[:, 0])
        assert y.shape == (5, 0) and torch.equal(moved.cpu(), selected(base[:, :1].cpu(), indices.tolist()).flatten())


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@at("cpu", "sm_90", "cuda")
def test_gradient_of_index_select(place: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        x = normal(9, 16, dtype=dtype).to(device).requires_grad_()
        indices = torch.tensor([0, 3, 3, -1, 8, 9, 3], device=device)
        dy = normal(7, 16, dtype=dtype).to(device)
        y, _ = index_select(x, indices, scale=torch.ones(9, device=device))
        y.backward(dy)
        exact = torch.zeros(10, 16, dtype=torch.float64, device=device)
        exact.index_add_(0, torch.where(indices < 0, 9, indices), dy.double())
        assert_close(x.grad, exact[:9], c=2, scale=exact[:9].abs() + 1)


# ---- scatter_add ----------------------------------------------------------------------------------------------------


def exact_sums(x: Tensor, indices: Tensor, rows: int, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    terms = x.double() if weights is None else x.double() * weights.double()[:, None]
    target = torch.where((indices >= 0) & (indices < rows), indices.long(), rows)
    zeros = torch.zeros(rows + 1, x.shape[1], dtype=torch.float64, device=x.device)
    return zeros.index_add(0, target, terms)[:rows], zeros.index_add(0, target, terms.abs())[:rows]


SCATTERS: dict[str, tuple[int, int, int]] = {  # rows of x, columns, rows of the result
    "plain": (60, 16, 9),
    "odd": (71, 7, 13),
    "one_target": (700, 8, 1),
    "many_targets": (50, 16, 3000),
    "wide": (40, 2056, 7),
}


@pytest.mark.parametrize("weighted", (False, True), ids=("plain", "weighted"))
@pytest.mark.parametrize("case", SCATTERS)
@at()
def test_scatter_add(place: str, case: str, weighted: bool) -> None:
    count, cols, rows = SCATTERS[case]
    with running_on(place) as device:
        generator = torch.Generator().manual_seed(count)
        indices = torch.randint(-1, rows + 1, (count,), generator=generator).to(device)
        x = normal(count, cols, dtype=torch.bfloat16).to(device)
        weights = torch.rand(count, generator=generator).to(device) if weighted else None
        sums, magnitudes = exact_sums(x, indices, rows, weights)
        y = scatter_add(x, indices, rows, weights=weights)
        assert y.dtype == x.dtype and y.is_contiguous()
        assert_close(y, sums, scale=sums.abs() + 2.0**-11 * magnitudes, c=1.01)
        assert_same_bits(scatter_add(x, indices.int(), rows, weights=weights), y)
        holder = torch.full((rows, cols + 8), 3.0, device=device)
        for out in (torch.full((rows, cols), 3.0, device=device), holder[:, 4 : cols + 4]):
            scatter_add(x, indices, out=out, weights=weights, accumulate=True)
            assert_close(out, sums + 3, scale=(sums + 3).abs() + 64 * (magnitudes + 3), c=1.01)
            assert scatter_add(x, indices, rows, out=out, weights=weights) is out
            assert_close(out, sums, scale=sums.abs() + 64 * magnitudes, c=1.01)
        assert holder[:, :4].eq(3).all() and holder[:, cols + 4 :].eq(3).all()


@at()
def test_results_in_the_memory_of_x(place: str) -> None:
    with running_on(place) as device:
        rows = torch.arange(2000, device=device).flip(0)
        for move in (index_select, scatter_add):
            x = torch.randn(2000, 8, device=device)
            wanted = x.flip(0)
            assert torch.equal(move(x, rows, out=x), wanted)


@at()
def test_scatter_add_of_nothing(place: str) -> None:
    with running_on(place) as device:
        x, indices = normal(5, 8).to(device), torch.tensor([0, 1, 1, 0, 2], device=device)
        assert scatter_add(x[:0], indices[:0], 3).eq(0).all()
        assert scatter_add(x, indices, 0).shape == (0, 8)
        assert scatter_add(x[:, :0], indices, 3).shape == (3, 0)
        out = torch.ones(3, 8, device=device)
        assert scatter_add(x[:0], indices[:0], out=out, accumulate=True).eq(1).all()
        assert scatter_add(x[:0], indices[:0], out=out).eq(0).all()


@at("cpu", "sm_90", "cuda")
def test_gradients_of_scatter_add(place: str) -> None:
    with running_on(place) as device:
        indices = torch.tensor([0, 3, 3, -1, 2, 4, 3], device=device)
        x, weights = normal(7, 16).to(device).requires_grad_(), normal(7).to(device).requires_grad_()
        dy = normal(4, 16, seed=1).to(device)
        scatter_add(x, indices, 4, weights=weights).backward(dy)
        inside = ((indices >= 0) & (indices < 4))[:, None]
        gathered = torch.where(inside, dy[indices.clamp(0, 3)], 0.0)
        torch.testing.assert_close(x.grad, gathered * weights.detach()[:, None])
        torch.testing.assert_close(weights.grad, (gathered * x.detach()).sum(-1))
        x.grad = None
        scatter_add(x, indices, 4).backward(dy)
        torch.testing.assert_close(x.grad, gathered)


# ---- sort_chunks ----------------------------------------------------------------------------------------------------

CHUNKS: dict[str, tuple[int, list[int], list[int]]] = {  # rows, counts, order
    "plain": (13, [3, 0, 5, 1, 4], [3, 2, 4, 0, 1]),
    "same_order": (13, [3, 0, 5, 1, 4], [0, 1, 2, 3, 4]),
    "one_chunk": (5, [5], [0]),
    "none": (5, [], []),
    "rows_left_over": (20, [3, 0, 5, 1, 4], [3, 2, 4, 0, 1]),
    "too_many_rows": (10, [3, 0, 5, 1, 4], [3, 2, 4, 0, 1]),
    "no_rows": (0, [3, 1], [1, 0]),
    "negative": (9, [3, -4, 2**31 - 1, 1], [2, 1, 3, 0]),
    "not_a_permutation": (13, [3, 2, 5, 1, 2], [4, 2, 4, 9, -1]),
    "many": (900, [i % 3 for i in range(900)], list(reversed(range(900)))),
}


def moved_by_hand(rows: int, counts: list[int], order: list[int]) -> list[int]:
    """The source of each row."""
    edges = [0]
    for count in counts:
        edges.append(min(edges[-1] + max(count, 0), rows))
    named = [c for i, c in enumerate(order) if 0 <= c < len(counts) and c not in order[:i]]
    source = [r for c in named for r in range(edges[c], edges[c + 1])]
    return source + [-1] * (rows - len(source))


@pytest.mark.parametrize("case", CHUNKS)
@at()
def test_sort_chunks(place: str, case: str) -> None:
    rows, counts_list, order_list = CHUNKS[case]
    source = moved_by_hand(rows, counts_list, order_list)
    with running_on(place) as device:
        for index_dtype in (torch.int32, torch.int64):
            counts = torch.tensor(counts_list, dtype=index_dtype, device=device)
            order = torch.tensor(order_list, dtype=index_dtype, device=device)
            x = normal(rows, 16, dtype=torch.bfloat16).to(device).requires_grad_()
            scale = normal(rows, 2).to(device)
            y, moved = sort_chunks(x, counts, order, scale=scale)
            assert_same_bits(y.detach().cpu(), selected(x.detach().cpu(), source) if rows else x.detach().cpu())
            assert_same_bits(moved.cpu(), selected(scale.cpu(), source) if rows else scale.cpu())
            y.backward(torch.arange(rows, device=device)[:, None].expand(rows, 16).to(torch.bfloat16))
            back = torch.zeros(rows, 16)
            for target, row in enumerate(source):
                if row >= 0:
                    back[row] = target
            assert_same_bits(x.grad.cpu(), back.bfloat16())


@at("sm_90", "cuda")
def test_more_chunks_than_fit_into_shared_memory(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_on(place) as device:
        counts = torch.tensor([3, 0, 5, 1, 4], device=device)
        order = torch.tensor([3, 2, 4, 0, 1], device=device)
        x = normal(15, 8).to(device)
        wanted = sort_chunks(x, counts, order)
        monkeypatch.setattr(plans, "SHARED_CHUNKS", 4)
        Plans.forget_all()
        assert_same_bits(sort_chunks(x, counts, order), wanted)
        Plans.forget_all()


@at("cpu", "cuda")
def test_the_most_chunks(place: str) -> None:
    counts = torch.ones(plans.MAX_CHUNKS, dtype=torch.int32, device=place)
    x = torch.arange(plans.MAX_CHUNKS, device=place)[:, None]
    order = torch.arange(plans.MAX_CHUNKS - 1, -1, -1, device=place)
    assert torch.equal(sort_chunks(x, counts, order), x.flip(0))


# ---- all of them ----------------------------------------------------------------------------------------------------


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    test_sort_chunks("sm_90", "plain")
    with rtkernels.emulate("sm_90"):
        rtkernels.id_bounds(torch.arange(4100))


@emulated
@pytest.mark.parametrize("order", ORDERS)
def test_thread_order_does_not_matter(order: str | int) -> None:
    x, indices = normal(300, 16, dtype=torch.bfloat16), torch.arange(300) % 7 - 1
    counts, places = torch.arange(24), torch.randperm(24, generator=torch.Generator().manual_seed(0))

    def run() -> tuple[Tensor, ...]:
        return (
            index_select(x, indices),
            scatter_add(x, indices, 6, weights=normal(300)),
            sort_chunks(x, counts, places),
            operators.CHUNKS(x, counts, places, None, True)[0],
        )

    with rtkernels.emulate("sm_90"):
        wanted = run()
    with rtkernels.emulate("sm_90", order):
        for a, b in zip(run(), wanted, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("dynamic", (False, True))
@at("cpu", "cuda")
def test_torch_compile(place: str, dynamic: bool) -> None:
    counts, order = torch.tensor([3, 4, 2], device=place), torch.tensor([2, 0, 1], device=place)
    indices = torch.tensor([1, 2, 2, -1, 5], device=place)

    def all_three(x: Tensor) -> Tensor:
        y = scatter_add(index_select(sort_chunks(x, counts, order), indices), indices, 6)
        return y.square().sum()

    grads = []
    for function in (torch.compile(all_three, fullgraph=True, backend="aot_eager", dynamic=dynamic), all_three):
        x = normal(9, 8).to(place).requires_grad_()
        function(x).backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)

    def into(out: Tensor, x: Tensor) -> Tensor:
        index_select(x, indices, out=out[:5])
        return scatter_add(x[:5], indices, out=out, accumulate=True)

    outs = [torch.ones(6, 8, device=place) for _ in range(2)]
    x = normal(9, 8).to(place)
    compiled = torch.compile(into, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for function, out in zip((compiled, into), outs, strict=True):
        function(out, x)
    torch.testing.assert_close(*outs)


def test_numpy_in_numpy_out() -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert isinstance(index_select(x, np.array([2, 0])), np.ndarray)
    np.testing.assert_array_equal(scatter_add(x, np.array([0, 0, 1, 1]), 2), [x[0] + x[1], x[2] + x[3]])
    np.testing.assert_array_equal(sort_chunks(x, np.array([1, 3]), np.array([1, 0])), x[[1, 2, 3, 0]])


def test_second_order_is_refused() -> None:
    x, i = normal(4, 8).requires_grad_(), torch.tensor([1, 2])
    for y in (index_select(x, i), scatter_add(x[:2], i, 4), sort_chunks(x, i, i)):
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()


def test_bench_rows_agree_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_rows, "_TOKENS", 300)
    monkeypatch.setattr(bench_rows, "_COLS", 16)
    for row in rows_of(module.OP.name):
        inputs = row.make("cpu", torch.Generator().manual_seed(0))
        torch.testing.assert_close(row.ours(**inputs), row.torch(**inputs), rtol=0.05, atol=0.05)


# ---- errors ---------------------------------------------------------------------------------------------------------

X, I2, LEAF = torch.ones(4, 8), torch.tensor([1, 2]), torch.ones(4, 8, requires_grad=True)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "x rank": (lambda: index_select(X[0], I2), r"x has 1 dimensions; expected 2, \[rows, columns\]"),
    "x dtype": (lambda: index_select(X.to(torch.complex128), I2), "x has dtype complex128; expected elements of 1, 2"),
    "indices dtype": (lambda: index_select(X, I2.float()), "indices has dtype float32; expected one of int32, int64"),
    "indices rank": (lambda: index_select(X, I2[None]), r"indices has shape \(1, 2\); expected one dimension"),
    "scale dtype": (lambda: index_select(X, I2, scale=X[:, 0].double()), "scale has dtype float64; expected float32"),
    "scale shape": (
        lambda: index_select(X, I2, scale=X[:3]),
        r"scale has shape \(3, 8\); expected \(4,\) or \(4, 'any'",
    ),
    "out shape": (lambda: index_select(X, I2, out=X.clone()), r"out has shape \(4, 8\); expected \(2, 8\)"),
    "out dtype": (
        lambda: index_select(X, I2, out=X[:2].double()),
        "out has dtype float64; expected float32, that of x",
    ),
    "out strides": (lambda: index_select(X, I2, out=torch.ones(8, 2).t()), r"out has strides \(1, 2\); expected unit"),
    "out and grad": (lambda: index_select(LEAF, I2, out=X[:2]), "out is given and a tensor requires grad"),
    "scatter dtype": (lambda: scatter_add(X.double(), I2, 3), "x has dtype float64; expected one of bfloat16"),
    "scatter rank": (lambda: scatter_add(X[0], I2, 3), "x has 1 dimensions; expected 2"),
    "scatter indices": (lambda: scatter_add(X, I2, 3), r"indices has shape \(2,\); expected \(4,\), one for each row"),
    "scatter rows": (lambda: scatter_add(X[:2], I2, -1), "rows is -1 and x has 2 rows; expected 0 to"),
    "scatter nothing": (lambda: scatter_add(X[:2], I2), "out is None, rows None, accumulate False; expected rows"),
    "scatter to nothing": (lambda: scatter_add(X[:2], I2, 3, accumulate=True), "out is None, rows 3, accumulate True"),
    "scatter weights": (lambda: scatter_add(X[:2], I2, 3, weights=X[:, 0]), r"weights has shape \(4,\) on device"),
    "scatter out": (lambda: scatter_add(X[:2], I2, out=torch.ones(3, 9)), r"out has shape \(3, 9\) on device index -1"),
    "scatter out dtype": (lambda: scatter_add(X[:2], I2, out=X.double()), "out has dtype float64"),
    "scatter out strides": (
        lambda: scatter_add(X[:2], I2, out=torch.ones(1, 8).expand(3, 8)),
        r"out has strides \(0, 1\) for shape \(3, 8\); expected memory of its own for every element",
    ),
    "scatter rows of out": (lambda: scatter_add(X[:2], I2, 5, out=X.clone()), "rows is 5; expected 4, the rows of out"),
    "scatter out and grad": (lambda: scatter_add(LEAF, I2, out=X), "out is given and a tensor requires grad"),
    "counts": (lambda: sort_chunks(X, I2.float(), I2), "counts has dtype float32; expected one of int32, int64"),
    "order": (lambda: sort_chunks(X, I2, I2[:1]), r"order has shape \(1,\); expected \(2,\), that of counts"),
    "too many": (lambda: sort_chunks(X, *[torch.zeros(65537).int()] * 2), "there are 65537 chunks; expected no more"),
    "chunks of a row": (lambda: sort_chunks(X[0], I2, I2), "x has 1 dimensions; expected 2"),
    "not a tensor": (lambda: index_select([1.0], I2), "expected a torch.Tensor or an array with __dlpack__"),
}


test_error_messages, test_launchers_raise_the_same_messages = error_tests(BAD)

# ---- on the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("count", (1, 4095, 16_384, 65_536, 200_003))
def test_bench_shapes(count: int) -> None:
    generator = torch.Generator("cuda").manual_seed(count)
    x = torch.randn(count, 512, device="cuda", generator=generator).bfloat16()
    indices = torch.randint(-1, 8193, (count,), device="cuda", generator=generator)
    weights = torch.rand(count, device="cuda", generator=generator)
    for factors in (None, weights):
        first, second = (scatter_add(x, indices, 8192, weights=factors) for _ in range(2))
        assert_same_bits(first, second)
        sums, magnitudes = exact_sums(x, indices, 8192, factors)
        assert_close(first, sums, scale=sums.abs() + 2.0**-11 * magnitudes, c=1.01)
    assert_same_bits(index_select(x, indices), plans.select(x, indices))
    for chunks in (1, 7, 256, 8192, 8193):
        counts = torch.randint(0, 2 * count // chunks + 2, (chunks,), device="cuda", generator=generator)
        order = torch.randperm(chunks, device="cuda", generator=generator)
        source = plans.chunk_rows(counts, order, count, False)
        assert_same_bits(sort_chunks(x, counts, order), plans.select(x, source))


@pytest.mark.gpu
@pytest.mark.slow
def test_beyond_two_to_the_31() -> None:
    rows, cols = 2**20 + 3, 2056
    if torch.cuda.mem_get_info()[0] < 12 * rows * cols:
        pytest.skip("not enough free GPU memory")
    x = torch.arange(rows, device="cuda").to(torch.uint8)[:, None].expand(rows, cols).contiguous()
    counts, order = torch.tensor([5, rows - 5], device="cuda"), torch.tensor([1, 0], device="cuda")
    y = sort_chunks(x, counts, order)
    assert torch.equal(y[-5:], x[:5]) and torch.equal(y[:-5], x[5:])
    assert torch.equal(index_select(y, torch.tensor([rows - 1, 0], device="cuda")), x[[4, 5]])


@pytest.mark.gpu
def test_graph_capture_and_replay() -> None:
    x = torch.randn(4096, 512, device="cuda").bfloat16()
    indices = torch.randint(-1, 4096, (4096,), device="cuda")
    counts, order = torch.full((64,), 64, device="cuda"), torch.randperm(64, device="cuda")

    def run() -> tuple[Tensor, ...]:
        return index_select(x, indices), scatter_add(x, indices, 1000), sort_chunks(x, counts, order)

    replay = captured(run)
    indices.copy_(torch.randint_like(indices, -1, 300))
    counts.copy_(torch.randint_like(counts, 0, 90))
    order.copy_(order.flip(0))
    assert_equal_bits(replay(), run())
