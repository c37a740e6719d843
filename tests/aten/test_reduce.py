"""Reductions of aten on our kernels: every shape class, odd strides, NaN and ties, slices of long reductions."""

from __future__ import annotations

import pytest
import torch
from support.overrides import compare, numbers, taken, views
from support.places import at, emulated

from rtkernels.ops.reduce import reduction
from rtkernels.runtime.launch.plans import Plans

SLOW = pytest.mark.slow
PLACES = ("sm_90", "cuda")
ONE_DIM = {
    "sum": lambda x, d: x.sum(d),
    "max": lambda x, d: tuple(x.max(d)),
}
MORE_ONE_DIM = {
    "min": lambda x, d: tuple(x.min(d, keepdim=True)),
    "prod": lambda x, d: x.prod(d),
    "argmax": lambda x, d: x.argmax(d),
    "argmin": lambda x, d: x.argmin(d, keepdim=True),
}
ANY_DIMS = {
    "amax": lambda x, d: x.amax(d),
    "amin": lambda x, d: x.amin(d, keepdim=True),
    "any": lambda x, d: x.any(d),
    "all": lambda x, d: x.all(d),
    "count_nonzero": lambda x, d: x.count_nonzero(d),
}
FLOAT = {
    "mean": lambda x, d: x.mean(d, keepdim=True),
    "std": lambda x, d: x.std(d, correction=0),
    "var_mean": lambda x, d: torch.var_mean(x, d, correction=0),
    **{f"norm_{p}": lambda x, d, p=p: torch.linalg.vector_norm(x, p, d) for p in (0, 1, 2, 3, torch.inf, -torch.inf)},
}
ALL = {**ONE_DIM, **MORE_ONE_DIM, **ANY_DIMS, **FLOAT}
QUICK = ("sum", "max")
TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool)


def _torch_has(name: str, dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or (name not in FLOAT and not (dtype == torch.bool and name.startswith("arg")))


CASES = [
    pytest.param(name, dtype, marks=() if name in QUICK and dtype == torch.float32 else SLOW, id=f"{name}-{dtype}")
    for name in ALL for dtype in TYPES if _torch_has(name, dtype)
]  # fmt: skip


@emulated
@at(*PLACES)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_dimensions(place: str, name: str, dtype: torch.dtype) -> None:
    function = ALL[name]
    torch.manual_seed(0)
    for x in views(dtype):
        for dim in range(x.dim()):
            compare(place, "red", lambda x, dim=dim: function(x, dim), x)
        if x.dim() > 2 and name not in ONE_DIM and name not in MORE_ONE_DIM:
            compare(place, "red", lambda x: function(x, (0, -1)), x)


@emulated
@at(*PLACES)
@pytest.mark.parametrize("n", [1, 3000, 10007, pytest.param(40000, marks=SLOW)])
def test_whole_tensor_in_slices(place: str, n: int) -> None:
    torch.manual_seed(n)
    x = numbers(torch.float32, n)
    x[n // 2] = 9.0
    compare(place, "red", lambda x: (x.sum(), torch.var_mean(x, correction=0)), x, rtol=1e-5, atol=1e-4)
    compare(place, "red", lambda x: x.argmax(), x)


@emulated
@at(*PLACES)
@pytest.mark.parametrize(
    ("shape", "dim"), [((2000, 6), 0), pytest.param((3, 700, 5), 1, marks=SLOW), ((2, 9000), 1)], ids=str
)
def test_few_results_of_many(place: str, shape: tuple[int, ...], dim: int) -> None:
    x = numbers(torch.float32, *shape)
    compare(place, "red", lambda x: x.sum(dim), x, rtol=1e-5, atol=1e-4)
    compare(place, "red", lambda x: x.max(dim), x)


@emulated
@at("sm_90", "cuda")
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=SLOW)])
def test_shapes_of_blocks(place: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of threads that share a row or a column, with and without slices, rows that end within a batch."""
    torch.manual_seed(3)
    long, high = torch.randint(-30, 30, (2, 4104)).to(dtype), torch.randint(-30, 30, (203, 72)).to(dtype)
    for shape in ((32, 1), (64, 1), (128, 3), (256, 2)):
        monkeypatch.setattr(reduction, "row_shape", lambda *_, shape=shape: shape)
        Plans.forget_all()
        compare(place, "red", lambda x: (x.sum(1), *x.max(1)), long)
    for shape in ((256, 32, 1), (512, 8, 1), (512, 16, 3), (128, 4, 2)):
        monkeypatch.setattr(reduction, "column_shape", lambda *_, shape=shape: shape)
        Plans.forget_all()
        compare(place, "red", lambda x: (x.sum(0), *x.max(0)), high)
        compare(place, "red", lambda x: (x.sum(0), *x.max(0)), high[:, :41])
    monkeypatch.undo()
    Plans.forget_all()


@emulated
@at("sm_90", "cuda")
def test_ties_have_the_first_index(place: str) -> None:
    x = torch.zeros(3, 700, device="cuda" if place == "cuda" else "cpu")
    with taken(place, "red"):
        assert torch.equal(x.max(1).indices.cpu(), torch.zeros(3, dtype=torch.int64))
        assert x.t().argmax().item() == 0


@emulated
@at(*PLACES)
def test_other_forms(place: str) -> None:
    x = torch.randn(5, 7)
    compare(place, "red", lambda x: torch.sum(x, 1, out=torch.empty(5, device=x.device)), x)
    compare(place, "red", lambda x: (x.trace(), x.t().trace()), x)


@emulated
def test_what_torch_does() -> None:
    """float64, empty reductions and other result dtypes fall back to torch; the results are still right."""
    for function in (
        lambda: torch.ones(3, 5, dtype=torch.float64).sum(0),
        lambda: torch.ones(0, 5).sum(0),
        lambda: torch.ones(3, 5).sum(0, dtype=torch.float64),
        lambda: torch.ones(3, 5, dtype=torch.int32).sum(0, dtype=torch.int32),
    ):
        compare("sm_90", "red", function, ours=False)


@emulated
def test_uint8_stays_uint8() -> None:
    x = torch.tensor([[1, 0], [2, 3]], dtype=torch.uint8)
    with taken("sm_90", "red"):
        assert x.any(0).dtype == torch.uint8
        assert x.all(0).tolist() == [1, 0]


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    x = torch.zeros(2**31 + 7, dtype=torch.uint8, device="cuda")
    x[2**31 + 3] = 1
    with taken("cuda", "red"):
        assert x.argmax().item() == 2**31 + 3
        assert x.sum().item() == 1


@pytest.mark.gpu
def test_a_captured_graph_sees_new_data() -> None:
    x = torch.randn(300, 4099, device="cuda")
    with taken("cuda", "red"):
        x.sum(1), x.sum(0), x.sum()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = x.sum(1), x.sum(0), x.sum()
        x.normal_()
        graph.replay()
    for got, want in zip(result, (x.sum(1), x.sum(0), x.sum()), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-2)


@emulated
@at(*PLACES)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (9000,)], ids=str)
def test_pairs(place: str, shape: tuple[int, ...]) -> None:
    a, b = torch.randn(shape), torch.randn(shape)
    loss = torch.nn.functional.mse_loss
    compare(place, "red", lambda a, b: (loss(a, b), loss(a, b, reduction="sum")), a, b, rtol=1e-5, atol=1e-5)
    nan = a.clone()
    nan[-1] = torch.nan
    for x, y, equal_nan in ((a, a, False), (a, a * (1 + 1e-4), False), (nan, nan, False), (nan, nan, True)):
        want = torch.allclose(x, y, equal_nan=equal_nan)
        with taken(place, "red"):
            assert torch.allclose(x, y, equal_nan=equal_nan) == want
