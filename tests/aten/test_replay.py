"""Replayed calls: which calls skip their handlers, and that they use their own tensors."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from support.overrides import device_of, taken
from support.places import at

import rtkernels
from rtkernels.aten import replay, table
from rtkernels.runtime.depends import MISS
from rtkernels.runtime.launch.plans import Plans


def x() -> torch.Tensor:
    return torch.randn(6, 40)


y = x
CALLS = {
    "neg": lambda: torch.ops.aten.neg(x()),
    "add.Tensor": lambda: torch.ops.aten.add.Tensor(x(), y(), alpha=2),
    "add_.Tensor": lambda: torch.ops.aten.add_.Tensor(x(), y()),
    "mul.Tensor": lambda: torch.ops.aten.mul.Tensor(x(), 3.0),
    "neg.out": lambda: torch.ops.aten.neg.out(x(), out=torch.empty(6, 40)),
    "clone": lambda: torch.ops.aten.clone(x().mT, memory_format=torch.contiguous_format),
    "masked_fill.Scalar": lambda: torch.ops.aten.masked_fill.Scalar(x(), x() > 0, 0.5),
    "triu": lambda: torch.ops.aten.triu(x(), 1),
    "glu": lambda: torch.ops.aten.glu(x(), 1),
    "sum.dim_IntList": lambda: torch.ops.aten.sum.dim_IntList(x(), [1]),
    "sum.IntList_out": lambda: torch.ops.aten.sum.IntList_out(x(), [1], out=torch.full((6,), 77.0)),
    "max.dim": lambda: torch.ops.aten.max.dim(x(), 1),
    "_softmax": lambda: torch.ops.aten._softmax(x(), 0, False),
    "_softmax_backward_data": lambda: torch.ops.aten._softmax_backward_data(x(), y(), 1, torch.float32),
    "native_layer_norm": lambda: torch.ops.aten.native_layer_norm(x(), [40], torch.randn(40), None, 1e-5),
    "native_layer_norm_backward": lambda: torch.ops.aten.native_layer_norm_backward(
        x(), y(), [40], torch.randn(6, 1), torch.rand(6, 1), torch.randn(40), torch.randn(40), [True, True, True]
    ),
    "cummax": lambda: torch.ops.aten.cummax(x(), 1),
    "sort": lambda: torch.ops.aten.sort(x(), 1),
    "avg_pool2d": lambda: torch.ops.aten.avg_pool2d(torch.randn(1, 6, 8), [2, 2]),
}
ONLY_ON_CUDA = {  # there, or values would have to be looked at
    "index.Tensor": lambda: torch.ops.aten.index.Tensor(x(), [None, torch.randint(-40, 40, (5, 3))]),
    "_index_put_impl_": lambda: torch.ops.aten._index_put_impl_(
        x(), [torch.randint(-6, 6, (9,))], torch.randn(9, 40), True, True
    ),
    "index_add": lambda: torch.ops.aten.index_add(x(), 0, torch.randint(0, 6, (9,)), torch.randn(9, 40), alpha=3),
    "index_add_": lambda: torch.ops.aten.index_add_(x(), 0, torch.randint(0, 6, (9000,)), torch.randn(9000, 40)),
    "scatter_add": lambda: torch.ops.aten.scatter_add(
        x(), 0, torch.randint(0, 6, (9000, 1)).expand(-1, 40), torch.randn(9000, 40)
    ),
    "embedding_dense_backward": lambda: torch.ops.aten.embedding_dense_backward(
        x(), torch.randint(0, 9, (6,)), 9, -1, False
    ),
}


@pytest.fixture(autouse=True)
def _nothing_known():
    Plans.forget_all()
    yield
    Plans.forget_all()


def replay_on_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay calls of an overload whose calls are replayed on CUDA only."""
    row = table.row_of(name)
    # Another handler, because an override keeps what it prepared for one.
    monkeypatch.setitem(table.table(), name, dataclasses.replace(row, replays=True, handler=partial(row.handler)))


def known(name: str, place: str) -> list:
    return [k.replay for k in replay.known_calls(name, "CUDA" if place == "cuda" else "CPU").values()]


@at("sm_80", "cuda")
@pytest.mark.parametrize("name", [*CALLS, *ONLY_ON_CUDA])
def test_the_next_call_is_repeated_with_its_own_tensors(place: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS.get(name) or ONLY_ON_CUDA[name]
    if name in ONLY_ON_CUDA:
        replay_on_cpu(name, monkeypatch)
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        with torch.device(device_of(place)):
            want = call()
            torch.manual_seed(seed)
            with taken(place, name):
                got = call()
        assert [result is not None for result in known(name, place)] == [True]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, want)), strict=True):
            assert a.stride() == b.stride()


@pytest.mark.parametrize(
    "between",
    [
        torch.Tensor.neg_,
        lambda result: result.copy_(result + 1),
        lambda result: result.mul_(result.sum().item()),
        torch.zero_,
    ],
    ids=["in_place", "copy", "host", "zeros"],
)
def test_what_torch_computes_in_between_is_not_left_out(between, monkeypatch: pytest.MonkeyPatch) -> None:
    row = table.row_of("neg")

    def handler(x: torch.Tensor) -> torch.Tensor:
        return between(row.handler(x))

    monkeypatch.setitem(table.table(), "neg", dataclasses.replace(row, handler=handler))
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        a = x()
        want = between(-a)
        with taken("sm_80", "neg"):
            got = torch.ops.aten.neg(a)
        torch.testing.assert_close(got, want)
    ((calls,),) = [replay.known_calls("neg", "CPU").values()]
    assert calls.replay is None and "torch's own" in calls.why_not


def test_arguments_that_are_one_tensor() -> None:
    a, b = x(), y()
    with taken("sm_80", "add"):
        got = [torch.add(*args) for args in ((a, a), (a, b), (a, a), (b, b), (b, a), (a, b))]
    torch.testing.assert_close(got, [2 * a, a + b, 2 * a, 2 * b, a + b, a + b])
    assert [result is not None for result in known("add.Tensor", "sm_80")] == [True, True]


def test_arguments_that_share_memory() -> None:
    """Halves of an argument and another view of its memory: addresses alone cannot tell them apart."""
    buffer = torch.randn(3, 64)
    want = torch.ops.aten.addcmul(buffer[0], buffer[1], buffer[2])
    with taken("sm_80", ["addcmul", "addr"]):
        got = [torch.ops.aten.addcmul(buffer[0], buffer[1], buffer[2]) for _ in range(3)]
        grad = [torch.ops.aten.addr(buffer[:2, :2], buffer[0, :2], buffer[1, :2]) for _ in range(3)]
    torch.testing.assert_close(got, [want] * 3)
    torch.testing.assert_close(grad, [torch.addr(buffer[:2, :2], buffer[0, :2], buffer[1, :2])] * 3)


def test_memory_that_overlaps_goes_to_torch() -> None:
    buffer = torch.randn(48)
    with taken("sm_80", "add"):
        torch.randn(32).add_(torch.randn(32))
        (result,) = known("add_.Tensor", "sm_80")
        out, other = buffer[4:36], buffer[0:32]
        assert result is not None and result(out, other, out.data_ptr(), other.data_ptr(), 1) is MISS
        with pytest.raises(RuntimeError, match="single memory location"):
            buffer[4:36].add_(buffer[0:32])


def test_sources_that_overlap_are_not_added_by_a_repeated_call(monkeypatch: pytest.MonkeyPatch) -> None:
    replay_on_cpu("index_add_", monkeypatch)
    buffer, index = torch.randn(64, 16), torch.arange(8)
    with taken("sm_80", "index_add_"):
        torch.randn(8, 16).index_add_(0, index, torch.randn(8, 16))
        (result,) = known("index_add_", "sm_80")
        for first in (0, 7, -7):  # rows of the source in the memory of the result
            out, source = buffer[8:16], buffer[8 + first : 16 + first]
            assert result(out, index, source, out.data_ptr(), index.data_ptr(), source.data_ptr()) is MISS


def test_numbers_are_told_apart() -> None:
    a = torch.full((4, 8), 3, dtype=torch.int32)
    with taken("sm_80", ["mul", "fill"]):
        assert [(a * number).dtype for number in (2, 2.0, 2, 2.0)] == [torch.int32, torch.float32] * 2
        assert [torch.fill(torch.ones(8), zero).signbit().all().item() for zero in (0.0, -0.0, 0.0)] == [0, 1, 0]


def test_what_torch_does_is_remembered() -> None:
    rtkernels.aten.reset()
    a = torch.ones(4, dtype=torch.float64)
    with taken("sm_80", "neg"):
        assert [torch.neg(a).tolist() for _ in range(3)] == [[-1.0] * 4] * 3
    (row,) = rtkernels.report(as_rows=True)
    assert row["why"] == {"float64": 3} and len(known("neg", "sm_80")) == 1


def test_results_of_another_size_each_time() -> None:
    with taken("sm_80", "scan"):
        for a in (torch.tensor([1, 0, 1, 0]), torch.tensor([1, 1, 1, 0])):
            assert torch.nonzero(a).numel() == a.sum()


def test_integers_become_the_default_dtype_of_the_call() -> None:
    a = torch.arange(1, 9, dtype=torch.int32)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32]
    try:
        with taken("sm_80", ["mul", "sqrt", "div"]):
            for dtype in [d for d in dtypes for _ in range(2)]:
                torch.set_default_dtype(dtype)
                assert [t.dtype for t in (a * 2.5, a.sqrt(), a / a)] == [dtype] * 3
                assert (a.float() * 2.5).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_every_nan_is_the_same_number() -> None:
    a = torch.randn(4, 8)
    with taken("sm_80", ["masked_fill", "mul"]):
        for _ in range(3):
            assert torch.masked_fill(a, a > 0, float("nan")).isnan().equal(a > 0)
            assert (a * float("nan")).isnan().all()
        assert len(known("masked_fill.Scalar", "sm_80")) == len(known("mul.Tensor", "sm_80")) == 1


def test_a_call_with_aligned_tensors_is_not_like_one_with_others() -> None:
    buffer = torch.randn(4 * 64 + 1)
    with taken("sm_80", "sum"):
        for _ in range(3):
            buffer[1:].view(4, 64).sum(1)
        buffer[:-1].view(4, 64).sum(1)
    assert len(known("sum.dim_IntList", "sm_80")) == 2


NUMBER_FOR_TENSOR = ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor")
FLOATS = (2.5, -0.0, 0.0, 1e-3, float("nan"), -float("inf"), -3.0, 3e38, 7.25)


def takes_float(name: str, argument: object) -> bool:
    """Return True for an argument of an overload that replays take any float for; Python gives few Tensors as such."""
    wanted = str(argument.type) != "Tensor" or (name in NUMBER_FOR_TENSOR and argument.name == "other")
    return argument.name in table.table()[name].passes and wanted


def with_float(name: str, x: torch.Tensor, number: float) -> torch.Tensor:
    args, kwargs = [], {}
    for argument in table.schema_of(name).arguments:
        value = number if takes_float(name, argument) else x if "Tensor" in str(argument.type) else None
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")(*args, **kwargs)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t if t.dtype == torch.bool else t.nan_to_num(nan=12345.0).view(torch.int32)


@pytest.mark.parametrize("name", [
    name for name in sorted(table.table()) if not name.startswith("bitwise") and "out" not in name and "_." not in name
    and any(takes_float(name, argument) for argument in table.schema_of(name).arguments)
])  # fmt: skip
def test_numbers_that_change_are_passed_to_launches(name: str) -> None:
    tensor = torch.tensor([[1.5, -2.0, 0.0, 3.0]] * 3)
    with taken("sm_80", name):
        got = [with_float(name, tensor, number) for number in FLOATS]
        (repeated,) = known(name, "sm_80")
        assert repeated is not None
        fresh = []
        for number in FLOATS:
            Plans.forget_all()
            fresh.append(with_float(name, tensor, number))
    for number, a, b in zip(FLOATS, got, fresh, strict=True):
        assert bits(a).equal(bits(b)), number


def test_numbers_that_are_one_object_are_told_apart() -> None:
    a = torch.ones(8)
    with taken("sm_80", "add"):
        same = [torch.add(a, a, alpha=2.0), torch.ops.aten.add.Tensor(a, 2.0, alpha=2.0)]
        others = [torch.add(a, a, alpha=3.0), torch.ops.aten.add.Tensor(a, 2.0, alpha=3.0)]
        others.append(torch.ops.aten.add.Tensor(a, 4.0, alpha=2.0))
    assert [t[0].item() for t in (*same, *others)] == [3.0, 5.0, 4.0, 7.0, 9.0]


def test_a_number_that_does_not_fit_goes_to_torch() -> None:
    half = torch.ones(8, dtype=torch.float16)
    with taken("sm_80", "fill"):
        for number in (2.0, 3.0):
            assert torch.fill(half, number)[0] == number
        with pytest.raises(RuntimeError, match="overflow"):
            torch.fill(half, 1e30)
        assert torch.fill(half, 4.0)[0] == 4.0
