"""Writing through indices on our kernels: scatter along any dimension, assignment by index_put; equal indices."""

from __future__ import annotations

import pytest
import torch
from support.overrides import compare, device_of, numbers, taken, views
from support.places import at, emulated

import rtkernels

SLOW = pytest.mark.slow
OTHERS = (torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.complex64)
DTYPES = [torch.float32, *(pytest.param(t, marks=SLOW) for t in OTHERS)]
PLACES = ("sm_80", "sm_90", "cuda")


def _places(n: int, count: int, shape: tuple[int, ...], dim: int) -> torch.Tensor:
    """Return `count` different indices below n along `dim`, other ones for each other coordinate."""
    sizes = [count if i == dim else size for i, size in enumerate(shape)]
    return torch.rand([n if i == dim else size for i, size in enumerate(shape)]).argsort(dim).narrow(
        dim, 0, count
    ).view(sizes)  # fmt: skip


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter(place: str, dtype: torch.dtype) -> None:
    for x in [x for x in views(dtype) if x.dim()]:
        own = 0 not in x.stride()
        for dim in range(x.dim()):
            n = x.shape[dim]
            smaller = tuple(max(1, size - 1) for size in x.shape)
            for index in (_places(n, n, x.shape, dim), _places(n, max(1, n - 2), smaller, dim).int()):
                src = numbers(dtype, *(size + 1 for size in index.shape))
                compare(place, "scatter", lambda x, i, s, d=dim: x.scatter(d, i, s), x, index, src)
                if own:
                    compare(place, "scatter", lambda x, i, s, d=dim: _kept(x).scatter_(d, i, s), x, index, src)
                if dtype.is_complex:
                    continue  # a number: torch's
                compare(place, "scatter", lambda x, i, d=dim: x.scatter(d - x.dim(), i, 1), x, index)
                if own:
                    compare(place, "scatter", lambda x, i, d=dim: _kept(x).scatter_(d, i, 3), x, index)


def _kept(x: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, gaps included."""
    whole = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype, device=x.device)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_assigned(place: str, dtype: torch.dtype) -> None:
    """One tensor of indices along any dimension, two along neighbouring ones; values that are expanded."""
    for x in [*(x for x in views(dtype) if x.dim() and 0 not in x.stride()), numbers(dtype, 9, 3, 16)]:
        for dim in range(x.dim()):
            n = x.shape[dim]
            index = torch.randperm(n)[: max(1, n - 1)]
            index[0] -= n
            given = (*[None] * dim, index)
            whole = numbers(dtype, *x.shape[:dim], len(index), *x.shape[dim + 1 :])
            for values in (whole, numbers(dtype, 1)[0], whole.narrow(dim, 0, 1)[..., :1]):
                put = lambda x, v, given=given: torch.ops.aten.index_put_(_kept(x), _to(given, x), v)  # noqa: E731
                compare(place, "index_put_", put, x, values)
    x = numbers(dtype, 5, 4, 3, 16)
    for given in (
        (torch.tensor([4, 0, -2]), torch.tensor([1, 1, 3])),
        (torch.tensor([[4], [0]]), torch.tensor([1, -1, 2], dtype=torch.int32)),
        (None, torch.tensor([[1, 0], [3, 2]]), torch.tensor(2)),
        (torch.tensor([[4, 1, 0], [2, 3, -5]])[:, :2],),
    ):
        values = numbers(dtype, *x[given if given[0] is not None else (slice(None), *given[1:])].shape)
        compare(place, "index_put", lambda x, v, g=given: torch.ops.aten.index_put(x, _to(g, x), v), x, values)
        compare(place, "index_put", lambda x, g=given: torch.ops.aten.index_put(x, _to(g, x), x[0, 0, 0, 0]), x)


def _to(indices: tuple[torch.Tensor | None, ...], x: torch.Tensor) -> list[torch.Tensor | None]:
    return [None if index is None else index.to(x.device) for index in indices]


@emulated
@at(*PLACES)
def test_one_of_several_elements_stays(place: str) -> None:
    device = device_of(place)
    x, src = torch.zeros(4, 64, device=device), torch.randn(300, 64, device=device)
    index = torch.randint(0, 3, (300, 64), device=device)
    rows = index[:, 0].contiguous()
    with taken(place, ["scatter", "index_put"]):
        found = x.scatter(0, index, src)
        by_rows = x.clone().index_put_((rows,), src)
    for i in range(3):
        assert ((src == found[i]) & (index == i)).any(0).all()
        assert ((src == by_rows[i]) & (rows == i)[:, None]).any(0).all()
    assert not found[3].any() and not by_rows[3].any()


@emulated
@at(*PLACES)
def test_gradients(place: str) -> None:
    index = _places(5, 4, (5, 6), 0)

    def gradients(x: torch.Tensor, src: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, src = x.detach().requires_grad_(), src.detach().requires_grad_()
        y = x.scatter(0, index.to(x.device), src) * x.index_put((index[:, 0].to(x.device),), src).sin()
        return torch.autograd.grad(y.sum(), (x, src))

    compare(place, ["scatter", "index_put"], gradients, torch.randn(5, 6), torch.randn(4, 6), ours=False)


@emulated
@at(*PLACES)
def test_what_torch_keeps(place: str) -> None:
    """Deterministic mode, reductions, sums, masks, several tensors of indices, conversions: never a wrong result."""
    device = device_of(place)
    x, index = torch.randn(5, 6, device=device), _places(5, 4, (5, 6), 0).to(device)
    src, rows = torch.randn(4, 6, device=device), torch.tensor([3, 0, 1, 4], device=device)
    cases = {
        "mask": lambda x: x.index_put((x > 0,), x[0, 0]),
        "three": lambda x: x.view(5, 3, 2).index_put((rows, rows % 3, rows % 2), src[:, 0]),
        "apart": lambda x: torch.ops.aten.index_put(x.view(5, 3, 2), [rows, None, rows % 2], src[:, :3]),
        "complex number": lambda x: x.to(torch.complex64).scatter(0, index, 1 + 2j),
        "float to int": lambda x: x.long().scatter(0, index, 2.5),
        "no indices": lambda x: x.scatter(0, index[:0], src),
        "reduce": lambda x: x.scatter(0, index, src, reduce="multiply"),
    }
    for name, call in cases.items():
        want = call(x)
        rtkernels.aten.reset()
        with taken(place, ["scatter", "index_put"]):
            assert torch.equal(call(x), want), name
        assert not sum(row["ours"] for row in rtkernels.report(as_rows=True)), name
    torch.use_deterministic_algorithms(True)
    try:
        with taken(place, ["scatter", "index_put"]):
            x.scatter(0, index, src)
            x.index_put((rows,), src)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not sum(row["ours"] for row in rtkernels.report(as_rows=True))


@emulated
@at(*PLACES[:2])
def test_bad_arguments_are_torchs(place: str) -> None:
    x, src, index = torch.randn(5, 6), torch.randn(4, 6), torch.zeros(4, 6, dtype=torch.int64)
    same = torch.arange(5)
    for call in (
        lambda: x.scatter(0, index + 5, src),
        lambda: x.scatter(0, index - 1, src),
        lambda: x.scatter(2, index, src),
        lambda: x.scatter(0, index, src[:3]),
        lambda: x.scatter(0, index, src.double()),
        lambda: x[:, :1].expand(5, 6).scatter_(0, index, src),
        lambda: same.scatter_(0, same, 1),
        lambda: torch.ops.aten.index_put_(x.clone(), [same[:2] + 9], src[:2]),
        lambda: torch.ops.aten.index_put_(x.clone(), [same[:2]], src[:3]),
    ):
        with pytest.raises((RuntimeError, IndexError)) as torchs:
            call()
        with taken(place, ["scatter", "index_put"]), pytest.raises(torchs.type):
            call()
