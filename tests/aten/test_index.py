"""Indexing on our kernels: elements and rows chosen along any dimension, sums into rows, embeddings."""

from __future__ import annotations

import pytest
import torch
from support.overrides import compare, device_of, numbers, taken, views
from support.places import at, emulated
from torch.nn import functional

SLOW = pytest.mark.slow
DTYPES = [torch.float32, *(pytest.param(t, marks=SLOW) for t in (torch.bfloat16, torch.int64, torch.bool))]
PLACES = ("sm_90", "cuda")


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather(place: str, dtype: torch.dtype) -> None:
    for x in [x for x in views(dtype) if x.dim()]:
        for dim in range(x.dim()):
            n, shape = x.shape[dim], list(x.shape)
            shape[dim] = n + 2
            one = [size if i == dim else 1 for i, size in enumerate(shape)]
            smaller = [max(1, size - 1) if i != dim else size for i, size in enumerate(shape)]
            for index in (
                torch.randint(0, n, shape),
                torch.randint(0, n, one).expand(shape),
                torch.randint(0, n, shape[::-1]).permute(*range(x.dim())[::-1]),
                torch.randint(0, n, smaller),
            ):
                compare(place, "idx", lambda x, index, dim=dim: x.gather(dim, index), x, index)


@emulated
@at(*PLACES)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(t, marks=SLOW) for t in (torch.float32, torch.int64))]
)
def test_gather_of_many(place: str, dtype: torch.dtype) -> None:
    """So many elements are taken from a row that it is read as a whole."""
    for x in (numbers(dtype, 7, 64), numbers(dtype, 3, 2, 48)[:, :1], numbers(dtype, 600, 16)):
        index = torch.randint(0, x.shape[-1], (*x.shape[:-1], 44))
        compare(place, "idx", lambda x, index: x.gather(-1, index), x, index)


@emulated
@at(*PLACES)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_index_select(place: str, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    for x in [*(x for x in views(dtype) if x.dim()), numbers(dtype, 5, 3, 16)]:
        for dim in range(x.dim()):
            index = torch.randint(0, x.shape[dim], (x.shape[dim] + 3,), dtype=index_dtype)
            compare(place, "idx", lambda x, index, dim=dim: x.index_select(dim, index), x, index)
            compare(place, "idx", lambda x, index, dim=dim: x.index_select(dim, index[::2]), x, index)


@emulated
@at(*PLACES)
def test_sums_into_rows(place: str) -> None:
    x, source, index = torch.randn(10, 6), torch.randn(7, 6), torch.randint(0, 10, (7,))
    compare(place, "idx", lambda x, i, s: x.index_add(0, i, s), x, index, source)
    compare(place, "idx", lambda x, i, s: x.clone().index_add_(0, i, s), x, index, source)
    compare(place, "idx", lambda x, i, s: x.scatter_add(0, i[:, None].expand(7, 6), s), x, index, source)


@emulated
@at(*PLACES)
@pytest.mark.parametrize(
    ("shape", "dim", "tokens"),
    [
        ((150, 20), 0, 70),  # two blocks of rows, lanes of a warp that share it
        ((3, 5, 33), 1, 300),  # rows of many tokens, an odd number of columns
        pytest.param((4, 1200), 0, 600, marks=SLOW),  # slices of columns
        pytest.param((21, 2052), 0, 40, marks=SLOW),  # two accesses of a row in a lane
        pytest.param((9, 4100), 0, 40, marks=SLOW),  # four of them
        pytest.param((2, 300, 16), 1, 9000, marks=SLOW),  # more tokens than one launch takes: torch's
    ],
)
def test_sums_along_a_dimension(place: str, shape: tuple[int, ...], dim: int, tokens: int) -> None:
    ours = tokens < 8192
    x, sizes = torch.randn(shape), (*shape[:dim], tokens, *shape[dim + 1 :])
    source, index = torch.randn(sizes), torch.randint(0, shape[dim], (tokens,))
    index[tokens // 2 :] = index[0]
    close = {"rtol": 1e-4, "atol": 1e-4}
    compare(place, "idx", lambda x, i, s: x.index_add(dim, i, s, alpha=0.5), x, index, source, ours=ours, **close)
    compare(place, "idx", lambda x, i, s: x.clone().index_add_(dim, i.int(), s), x, index, source, ours=ours, **close)
    where = (slice(None),) * dim
    put = lambda x, i, s: x.clone().index_put_((*where, i), s, accumulate=True)  # noqa: E731
    if dim == 0:
        compare(place, "idx", put, x, index - shape[0], source, **close)
        put = lambda x, i, s: x.clone().index_put_((i[::2],), s[::2].contiguous(), accumulate=True)  # noqa: E731
        compare(place, "idx", put, x, index, source, ours=False, **close)
        rows = lambda x, i, s: x.scatter_add(0, i[:, None].expand(-1, x.shape[1]), s.repeat(1, 2))  # noqa: E731
        compare(place, "idx", rows, x, index, source, **close)
        rows = lambda x, i, s: x.clone().scatter_add_(0, i[:, None].expand(-1, x.shape[1]), s)  # noqa: E731
        compare(place, "idx", rows, x, index, source, **close)


@emulated
@at(*PLACES)
def test_sums_of_rounded_rows(place: str) -> None:
    """Sums of bfloat16 are computed in float32 and rounded once, whatever the order of magnitudes."""
    x, source = torch.randn(9, 40).bfloat16(), torch.randn(30, 40).bfloat16()
    index = torch.randint(0, 9, (30,))
    want = x.double().index_add(0, index, source.double(), alpha=2).bfloat16()
    with taken(place, "idx"):
        got = x.to(device_of(place)).index_add(0, index.to(device_of(place)), source.to(device_of(place)), alpha=2)
    torch.testing.assert_close(got.cpu(), want, rtol=2**-8, atol=1e-3)


@emulated
@at(*PLACES)
def test_embedding(place: str) -> None:
    def gradient(weight: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = weight.clone().requires_grad_()
        y = functional.embedding(ids, weight, padding_idx=2)
        y.square().sum().backward()
        return y.detach(), weight.grad

    compare(place, "idx", gradient, torch.randn(10, 6), torch.randint(0, 10, (3, 5)))


@emulated
def test_errors_are_torchs() -> None:
    x = torch.randn(4, 5)
    for function in (
        lambda: x.gather(0, torch.tensor([[9]])),
        lambda: x.gather(0, torch.zeros(1, 6, dtype=torch.int64)),
        lambda: x.index_select(0, torch.tensor([-1])),
        lambda: x.index_select(2, torch.tensor([0])),
    ):
        with pytest.raises((IndexError, RuntimeError)) as torchs:
            function()
        with pytest.raises(torchs.type), taken("sm_90", "idx"):
            function()


@emulated
@at(*PLACES)
def test_indices_in_brackets(place: str) -> None:
    def both(x: torch.Tensor, index: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().clone().requires_grad_()
        y = x[index]
        y.backward(torch.arange(y.numel(), dtype=y.dtype, device=y.device).view(y.shape))
        return [y.detach(), x.grad]

    x = torch.randn(10, 6)
    for index in (torch.tensor([3, -1, 3, 0, 9, -10]), torch.tensor([[1, -2], [1, 5]])):
        compare(place, "idx", both, x, index)
        compare(place, "idx", lambda x, index: x[:, index % 6 - 3], x, index)
        compare(place, "idx", lambda x, index: x.long()[index], x, index)
    compare(place, "idx", lambda x, mask: x[mask], x, x[:, 0] > 0, ours=False)
    compare(place, "idx", lambda x, index: torch.ops.aten.index.Tensor(x[0], [index]), x, torch.tensor(-2))
