"""Norms, zeros, scaling, casting and clipping over lists of tensors."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from contracts.samples import samples_of
from support.compare import assert_close, assert_same_bits, running_on
from support.multi_tensor_cases import exact_norms
from support.places import DTYPES, ORDERS, at, emulated, short
from torch import Tensor

import rtkernels
from rtkernels.ops.multi import multi_tensor as module

ORDS = (2.0, 1.0, math.inf)


def mixed(device: str, seed: int = 0) -> list[Tensor]:
    """All dtypes, sizes around the vector and chunk sizes, empty, permuted and unaligned tensors."""
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g).to(device)

    return [
        normal(4096 * 2 + 13), normal(33, 7).bfloat16(), normal(0), normal(9001).half(), normal(64, 80).t(),
        normal(5000)[3:], normal(4097).bfloat16()[1:], normal(1)[0], normal(2, 3, 4).half().permute(2, 0, 1),
        normal(31), normal(17).bfloat16(), normal(8192).half()[5:4200],
    ]  # fmt: skip


# ---- norms ----------------------------------------------------------------------------------------------------------


@at()
@pytest.mark.parametrize("ord", ORDS)
def test_norms(place: str, ord: float) -> None:
    with running_on(place) as device:
        tensors = mixed(device)
        total, each = rtkernels.multi_norm(tensors, ord, per_tensor=True)
        alone = rtkernels.multi_norm(tensors, ord)
    exact_total, exact_each = exact_norms(tensors, ord)
    assert total.shape == () and total.dtype == each.dtype == torch.float32 and total.device.type == device
    assert_close(total.cpu(), exact_total, c=1.01)
    assert_close(each.cpu(), exact_each, c=1.01)
    assert_same_bits(alone, total)


@at()
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=short)
@pytest.mark.parametrize("value", (1e30, 1e-30, 3e38))
def test_squares_neither_overflow_nor_vanish(place: str, dtype: torch.dtype, value: float) -> None:
    with running_on(place) as device:
        x = torch.full((100,), value).to(device, dtype)
        got = rtkernels.multi_norm([x])
    assert_close(got.cpu(), x.double().norm().cpu(), c=1.01)


@at()
def test_sums_are_exact_to_the_last_bit_of_fp32(place: str) -> None:
    """One large number and many small ones that fp32 would drop one by one."""
    with running_on(place) as device:
        x = torch.full((20_001,), 1e-4, device=device)
        x[7] = 4096.0
        got = rtkernels.multi_norm([x], 1)
    assert_close(got.cpu(), x.double().abs().sum().cpu(), c=1.01)


@at()
def test_nan_and_infinity(place: str) -> None:
    with running_on(place) as device:
        ones = torch.ones(5000, device=device)
        inf, nan, both = ones.clone(), ones.clone(), ones.clone()
        inf[4999], nan[17], both[4000], both[3] = -math.inf, math.nan, math.nan, math.inf
        tensors = [ones, inf.bfloat16(), nan, both.half()]
        for ord in ORDS:
            total, each = rtkernels.multi_norm(tensors, ord, per_tensor=True)
            without = rtkernels.multi_norm(tensors[:2], ord)
            assert total.isnan() and without == math.inf
            assert each.isnan().tolist() == [False, False, True, True] and each[1] == math.inf


@at("cpu", "sm_90", "cuda")
def test_tensor_of_many_chunks(place: str) -> None:
    """Whole blocks add the partial results of such a tensor; its neighbours take a warp each."""
    sizes = (3, 1_060_000, 4096, 70_000)
    with running_on(place) as device:
        base = torch.randn(sum(sizes) + 8, generator=torch.Generator().manual_seed(1)).to(device)
        tensors = list(base[: sum(sizes)].split(sizes))
        total, each = rtkernels.multi_norm(tensors, per_tensor=True)
    exact_total, exact_each = exact_norms(tensors, 2.0)
    assert_close(total.cpu(), exact_total, c=1.01)
    assert_close(each.cpu(), exact_each, c=1.01)


@at("sm_90")
def test_neighbours_of_many_chunks(place: str) -> None:
    """A block adds up one such tensor after the other, through the same shared memory."""
    size = 255 * 4096 + 1
    with running_on(place) as device:
        tensors = [torch.full((size,), value, dtype=torch.bfloat16, device=device) for value in (1.0, 2.0)]
        _, each = rtkernels.multi_norm(tensors, per_tensor=True)
    assert_close(each, torch.tensor([1.0, 2.0], dtype=torch.float64) * size**0.5, c=1.01)


@at("cpu", "sm_80", "cuda")
def test_many_tensors(place: str) -> None:
    count = 300 if place == "sm_80" else 10_000
    with running_on(place) as device:
        base = torch.randn(count * 24, generator=torch.Generator().manual_seed(1)).to(device)
        tensors = [base[24 * i : 24 * i + i % 23] for i in range(count)]
        total, each = rtkernels.multi_norm(tensors, per_tensor=True)
        zeros = rtkernels.multi_count_zeros(tensors)
        rtkernels.multi_scale_(tensors, 0.0)
        after = rtkernels.multi_count_zeros(tensors)
    rows = base.cpu().view(count, 24).double()
    assert each.shape == (count,) and zeros == 0 and after == sum(i % 23 for i in range(count))
    assert (rows == 0).sum() == after
    mask = torch.arange(24) < (torch.arange(count) % 23)[:, None]
    fresh = torch.randn(count * 24, generator=torch.Generator().manual_seed(1)).view(count, 24).double() * mask
    assert_close(each.cpu(), fresh.norm(dim=1), c=1.01)
    assert_close(total.cpu(), fresh.norm(), c=1.01)


@emulated
@pytest.mark.parametrize("order", ORDERS)
def test_same_bits_in_every_order(order: str | int) -> None:
    tensors = mixed("cpu")
    results = []
    for which in ("forward", order):
        copies = [t.clone() for t in tensors]
        with rtkernels.emulate("sm_80", which):
            norm, each = rtkernels.multi_norm(copies, per_tensor=True)
            rtkernels.multi_clip_norm_(copies, 0.5)
        results.append([norm, each, *copies])
    for first, second in zip(*results, strict=True):
        assert_same_bits(first, second)


# ---- zeros ----------------------------------------------------------------------------------------------------------


@at()
def test_count_zeros(place: str) -> None:
    with running_on(place) as device:
        tensors = mixed(device)
        for i, t in enumerate(tensors):
            if t.numel() > 1:
                t[:: i + 2] = 0.0
                t[..., 0] = -0.0
        tensors[0][1], tensors[0][2] = math.nan, 1e-45  # neither is zero
        total, each = rtkernels.multi_count_zeros(tensors, per_tensor=True)
        alone = rtkernels.multi_count_zeros(tensors)
    want = [int((t.cpu().double() == 0).sum()) for t in tensors]
    assert total.dtype == each.dtype == torch.int64 and total.shape == ()
    assert each.tolist() == want and total == sum(want) == alone


# ---- scale, copy, clip ----------------------------------------------------------------------------------------------


@at()
@pytest.mark.parametrize("as_tensor", (False, True))
def test_scale(place: str, as_tensor: bool) -> None:
    with running_on(place) as device:
        tensors = mixed(device)
        before = [t.clone() for t in tensors]
        scale = torch.tensor(0.3, device=device)
        rtkernels.multi_scale_(tensors, scale if as_tensor else float(scale))
    for got, t in zip(tensors, before, strict=True):
        assert_same_bits(got, (t.float() * scale).to(t.dtype))


@at()
@pytest.mark.parametrize("to", DTYPES, ids=short)
def test_copy_casts(place: str, to: torch.dtype) -> None:
    with running_on(place) as device:
        inputs = mixed(device)
        outputs = [torch.full_like(t, math.nan, dtype=to) for t in inputs]
        outputs[5] = torch.full((len(inputs[5]) + 8,), math.nan, device=device, dtype=to)[1:-7]  # unaligned
        rtkernels.multi_copy_(outputs, inputs)
        scaled = [torch.full_like(t, math.nan) for t in outputs]
        rtkernels.multi_copy_(scaled, inputs, 1.7)
    for got, twice, t in zip(outputs, scaled, inputs, strict=True):
        assert_same_bits(got, t.to(to))
        assert_same_bits(twice, (t.float() * torch.tensor(1.7)).to(to))


@at()
@pytest.mark.parametrize("ord", ORDS)
def test_clip(place: str, ord: float) -> None:
    with running_on(place) as device:
        tensors = mixed(device)
        before = [t.clone() for t in tensors]
        norm = rtkernels.multi_clip_norm_(tensors, 0.75, ord)
    exact, _ = exact_norms(before, ord)
    assert_close(norm.cpu(), exact, c=1.01)
    factor = 0.75 / (norm + 1e-6)
    for got, t in zip(tensors, before, strict=True):
        assert_close(got.cpu(), (t.double() * factor.double()).cpu(), c=1.01 if got.dtype != torch.float32 else 2.0)


@at()
def test_clip_leaves_small_norms_alone(place: str) -> None:
    with running_on(place) as device:
        tensors = mixed(device)
        before = [t.clone() for t in tensors]
        rtkernels.multi_clip_norm_(tensors, 1e6)
    for got, t in zip(tensors, before, strict=True):
        assert_same_bits(got, t)


@at()
def test_clip_agrees_with_torch_on_odd_norms(place: str) -> None:
    for value, most in ((math.nan, 1.0), (math.inf, 1.0), (2.0, 0.0), (0.0, 1.0)):
        with running_on(place) as device:
            x, y = torch.ones(40, device=device), torch.ones(9, device=device)
            x[3] = value
            ours, theirs = [x, y], [torch.nn.Parameter(torch.zeros_like(t)) for t in (x, y)]
            for p, t in zip(theirs, ours, strict=True):
                p.grad = t.clone()
            rtkernels.multi_clip_norm_(ours, most)
            torch.nn.utils.clip_grad_norm_(theirs, most)
        for got, p in zip(ours, theirs, strict=True):
            torch.testing.assert_close(got, p.grad, equal_nan=True, rtol=1e-6, atol=0)


# ---- lists ----------------------------------------------------------------------------------------------------------


@at()
def test_empty_lists_and_empty_tensors(place: str) -> None:
    with running_on(place) as device:
        nothing = [torch.zeros(0, device=device), torch.zeros(3, 0, device=device).bfloat16()]
        for tensors in ([], (), nothing, rtkernels.tensor_list(nothing), iter([])):
            tensors = list(tensors) if not isinstance(tensors, (list, tuple)) else tensors
            total, each = rtkernels.multi_norm(tensors, per_tensor=True)
            assert total == 0 and each.tolist() == [0.0] * len(tensors)
            assert rtkernels.multi_norm(tensors, math.inf) == 0
            assert rtkernels.multi_count_zeros(tensors) == 0
            assert rtkernels.multi_clip_norm_(tensors, 1.0) == 0
            rtkernels.multi_scale_(tensors, 2.0)
            rtkernels.multi_copy_(tensors, tensors)


@at()
def test_tensor_list(place: str) -> None:
    with running_on(place) as device:
        tensors = mixed(device)
        listed = rtkernels.tensor_list(t for t in tensors)
        for _ in range(2):
            assert_same_bits(rtkernels.multi_norm(listed), rtkernels.multi_norm(tensors))
            assert rtkernels.multi_count_zeros(listed) == rtkernels.multi_count_zeros(tensors)
            rtkernels.multi_scale_(listed, 0.5)
            rtkernels.multi_copy_(listed, listed, 2.0)
            rtkernels.multi_clip_norm_(listed, 100.0)


@at()
def test_changes_between_calls_are_seen(place: str) -> None:
    with running_on(place) as device:
        x = torch.arange(64.0, device=device)
        for tensors in ([x], [x[:32]], [x[::2].contiguous()], [x[:16]], [x.view(8, 8)], [x], [x[16:32], x[:16]]):
            want = sum(float(t.double().sum()) for t in tensors)
            assert float(rtkernels.multi_norm(tensors, 1)) == want
        x += 1.0
        assert float(rtkernels.multi_norm([x], 1)) == 64 * 65 / 2
        x.data = torch.ones(64, device=device)
        assert float(rtkernels.multi_norm([x], 1)) == 64.0


def test_arrays_of_other_libraries() -> None:
    arrays = [numpy.ones(4, numpy.float32), numpy.full((2, 2), 2.0, numpy.float32)]
    assert rtkernels.multi_norm(arrays, 1) == 12.0
    rtkernels.multi_scale_(arrays, 3.0)
    assert arrays[1].tolist() == [[6.0, 6.0], [6.0, 6.0]]


@at()
def test_saved_tensors_notice_the_change(place: str) -> None:
    with running_on(place) as device:
        x = torch.ones(4, device=device)
        w = torch.ones(4, device=device, requires_grad=True)
        y = (w * x).sum()
        rtkernels.multi_scale_([x], 2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_tensor_subclasses_go_through_the_dispatcher() -> None:
    class Marked(Tensor):
        seen: list = []  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    marked = torch.ones(4).as_subclass(Marked)
    assert rtkernels.multi_norm([torch.ones(4), marked], 1) == 8.0
    assert module.REDUCE.overload in Marked.seen


def emulated_coverage() -> None:
    """Launch every kernel in the emulator."""
    with rtkernels.emulate("sm_80"):
        tensors = mixed("cpu")
        rtkernels.multi_clip_norm_(tensors, 0.1)
        for torch_op, args in samples_of(module.OP.name, "cpu"):
            torch_op(*args)
