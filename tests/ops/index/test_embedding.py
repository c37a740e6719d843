"""Embedding: look-up and gradient at every place they can run, accumulation, ranges, errors, the GPU's own ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.compare import assert_close, assert_same_bits, running_on
from support.embedding_cases import Inputs, embedding, embedding_grad_, exact_sums
from support.places import DTYPES, ORDERS, at, emulated, order_test, short
from torch import Tensor

import rtkernels
from rtkernels import emulator
from rtkernels.ops.index import embedding as module
from rtkernels.ops.index import embedding_order as order
from rtkernels.ops.index import embedding_plan as plans
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.operator.plan import StepPlan, Steps

Normal = Callable[..., Tensor]
Ids = Callable[..., Tensor]


def _heavy(ids: Ids) -> Tensor:
    """A few ids with thousands of tokens among many with one."""
    values = ids(1700, high=500)
    return torch.where(values < 220, torch.full_like(values, 7), torch.where(values < 330, 11, values))


def _runs(*lengths: int) -> Tensor:
    return torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])


# Runs of equal rows that begin and end at, before and after the edges of windows of 32 tokens. The order of rows in the
# list is that of spread keys: 0 first, any order after it, so several runs of odd lengths reach many positions.
EDGES = (31, 2, 32, 33, 1, 63, 64, 65, 1, 30, 96, 97, 5, 27, 34)

CASES: dict[str, Callable[[Normal, Ids], Inputs]] = {
    "plain": lambda n, i: Inputs(i(5, high=20), 20, n(5, 16)),
    "many": lambda n, i: Inputs(i(200, high=50), 50, n(200, 16)),
    "rare": lambda n, i: Inputs(i(150, high=3000), 3000, n(150, 8)),
    "several_dimensions": lambda n, i: Inputs(i(2, 3, 4, high=9), 9, n(2, 3, 4, 40)),
    "one_token": lambda n, i: Inputs(i(1, high=3), 3, n(1, 8)),
    "scalar_id": lambda n, i: Inputs(i(1, high=3)[0], 3, n(8)),
    "one_row": lambda n, i: Inputs(i(70, high=1), 1, n(70, 8)),
    "all_equal": lambda n, i: Inputs(i(1500, high=1) + 4, 9, n(1500, 8)),
    "two_ids": lambda n, i: Inputs(i(400, high=2) * 5, 9, n(400, 8)),
    "edges": lambda n, i: Inputs(_runs(*EDGES), len(EDGES), n(sum(EDGES), 8)),
    "edges_reversed": lambda n, i: Inputs(_runs(*EDGES).flip(0), len(EDGES), n(sum(EDGES), 8)),
    "heavy": lambda n, i: Inputs(_heavy(i), 500, n(1700, 8)),
    # One long run ends and the next begins in window 32, the first of the second group of windows.
    "groups_meet": lambda n, i: Inputs(_runs(32 * 32 + 10, 200), 2, n(32 * 32 + 210, 8)),
    "wide_rows": lambda n, i: Inputs(i(80, high=20), 20, n(80, 2056)),
    "odd": lambda n, i: Inputs(i(70, high=13), 13, n(70, 7)),
    "odd_wide": lambda n, i: Inputs(i(70, high=13), 13, n(70, 131)),
    "one_column": lambda n, i: Inputs(i(70, high=13), 13, n(70, 1)),
    "int32": lambda n, i: Inputs(i(90, high=30).int(), 30, n(90, 16)),
    "padding": lambda n, i: Inputs(i(90, high=6), 6, n(90, 16), padding=3),
    "padding_last": lambda n, i: Inputs(i(90, high=6), 6, n(90, 16), padding=-1),
    "only_padding": lambda n, i: Inputs(i(40, high=1) + 2, 6, n(40, 16), padding=2),
    "range": lambda n, i: Inputs(i(200, high=60), 20, n(200, 16), start=25),
    "range_padding": lambda n, i: Inputs(i(200, high=60), 20, n(200, 16), start=25, padding=30),
    "nobody_in_range": lambda n, i: Inputs(i(50, high=9), 20, n(50, 16), start=100),
    "wild_ids": lambda n, i: Inputs(torch.tensor([3, -1, 2**40, -(2**62), 19, 20, 3, 2**32 + 3]), 20, n(8, 16)),
    "large_vocabulary": lambda n, i: Inputs(i(100, high=300_000), 300_000, n(100, 1)),
    "no_tokens": lambda n, i: Inputs(i(0, high=4), 4, n(0, 16)),
    "no_columns": lambda n, i: Inputs(i(5, high=4), 4, n(5, 0)),
    "no_rows": lambda n, i: Inputs(i(5, high=4), 0, n(5, 16)),
    "strided_ids": lambda n, i: Inputs(i(80, high=9)[::2], 9, n(40, 16)),
    "expanded_dy": lambda n, i: Inputs(i(40, high=9), 9, n(1, 16).expand(40, 16)),
    "strided_dy": lambda n, i: Inputs(i(40, high=9), 9, n(80, 32)[::2, 8:24]),
    "unaligned_dy": lambda n, i: Inputs(i(40, high=9), 9, n(40, 17)[:, 1:]),
    "transposed_dy": lambda n, i: Inputs(i(40, high=9), 9, n(16, 40).t()),
}


def make(case: str, dtype: torch.dtype, device: str) -> Inputs:
    """Build the tensors of a case: the same numbers on every device."""
    generator = torch.Generator().manual_seed(sum(map(ord, case)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    def ids(*shape: int, high: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    inputs = CASES[case](normal, ids)
    inputs.ids = inputs.ids.to(device)
    return inputs


def check(inputs: Inputs, main_dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Look up, differentiate and accumulate, and hold every element to its error budget."""
    dtype, device, cols = inputs.dy.dtype, inputs.dy.device, inputs.dy.shape[-1]
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(inputs.rows, cols, generator=generator).to(dtype).to(device).requires_grad_()
    options = {"padding_idx": inputs.padding, "vocab_start": inputs.start}
    y = embedding(inputs.ids, weight, **options)
    local = inputs.ids.long() - inputs.start
    inside = (local >= 0) & (local < inputs.rows)
    wanted = torch.zeros(*inputs.ids.shape, cols, dtype=dtype, device=device)
    wanted[inside] = weight.detach()[local[inside]]
    assert y.is_contiguous()
    assert_same_bits(y.detach(), wanted, "y")
    assert_same_bits(embedding(inputs.ids, weight.detach(), **options), wanted, "y without gradients")

    y.backward(inputs.dy)
    sums, magnitudes = exact_sums(inputs)
    slack = 64 * 2.0**-24 / torch.finfo(dtype).eps  # fp32 sums: a few roundings of the largest partial sum
    assert weight.grad.dtype == dtype
    assert_close(weight.grad, sums, scale=sums.abs() + slack * magnitudes, c=1.01, what="gradient")

    main = torch.randn(inputs.rows, cols, generator=generator).to(main_dtype or dtype).to(device)
    before = main.clone()
    gradient, weight.grad = weight.grad, None
    embedding(inputs.ids, weight, **options, main_grad=main).backward(inputs.dy)
    assert weight.grad is None
    total, terms = before.double() + sums, before.double().abs() + magnitudes
    slack = 64 * 2.0**-24 / torch.finfo(main.dtype).eps
    assert_close(main, total, scale=total.abs() + slack * terms, c=1.01, what="main_grad")
    untouched = magnitudes.sum(-1) == 0
    assert_same_bits(main[untouched], before[untouched], "rows without tokens")
    return y.detach(), gradient, main


@pytest.mark.parametrize("case", CASES)
@at()
def test_every_case(place: str, case: str) -> None:
    with running_on(place) as device:
        check(make(case, torch.bfloat16, device))


@pytest.mark.parametrize("main_dtype", DTYPES, ids=short)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@at("cpu", "sm_90", "cuda")
def test_every_pair_of_types(place: str, dtype: torch.dtype, main_dtype: torch.dtype) -> None:
    with running_on(place) as device:
        for case in ("many", "odd", "two_ids"):
            check(make(case, dtype, device), main_dtype)


def ordered(ids: Tensor, counters: Tensor, fill: Tensor | None, rows: int, start: int, padding: int) -> Tensor:
    """Return the list that the passes produce, however few tokens there are."""
    meta = Meta(ids.dtype, ids.shape, ids.stride(), -1, 0)
    target, size = (0, 0) if fill is None else ("fill", fill.nbytes)
    steps, scratch, name = order.order_steps(meta, "ids", target, rows, start, padding, counters.numel(), size, -1)
    result = {name: scratch.pop(name)}
    plan = StepPlan("order", ("ids", "counters", "fill"), (), result, "single", Steps(*steps, scratch=scratch), -1)
    return plan.run(ids.data_ptr(), counters.data_ptr(), 0 if fill is None else fill.data_ptr())


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    with running_on("sm_90") as device:
        check(make("plain", torch.bfloat16, device))
        inputs = make("plain", torch.bfloat16, device)
        with emulator.recording():
            ordered(inputs.ids, torch.zeros(3, dtype=torch.int32), None, inputs.rows, 0, -1)
        with rtkernels.batch_invariant(3):
            rtkernels.embedding_grad_(torch.zeros(4, 8), torch.tensor([1, 1, 3]), torch.ones(3, 8))


@at("sm_90", "cuda")
def test_sort_in_passes(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_on(place) as device:
        monkeypatch.setattr(plans, "SORT_LIMIT", 0)
        for case in ("edges", "range_padding", "heavy", "wild_ids", "one_token", "int32", "large_vocabulary"):
            wanted = None
            for bits, least in ((9, 512), (3, 32)):  # one to three passes, and up to seven; few chunks, and many
                monkeypatch.setattr(order, "MAX_DIGIT_BITS", bits)
                monkeypatch.setattr(order, "MIN_TOKENS", least)
                Plans.forget_all()
                got = check(make(case, torch.bfloat16, device))
                for a, b in zip(got, wanted or got, strict=True):
                    assert_same_bits(a, b)
                wanted = got
        Plans.forget_all()


@emulated
@pytest.mark.parametrize("threads", ("forward", *ORDERS))
def test_list_of_the_passes(threads: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "MIN_TOKENS", 64)
    monkeypatch.setattr(order, "MAX_DIGIT_BITS", 4)
    Plans.forget_all()
    ids = torch.randint(-2, 620, (700,), generator=torch.Generator().manual_seed(0))
    counters, fill = torch.full((5,), -1, dtype=torch.int32), torch.ones(4001)
    with rtkernels.emulate("sm_90", threads), emulator.recording():
        entries = ordered(ids, counters, fill, 600, 3, 50)
    pairs = sorted((i - 3, t) for t, i in enumerate(ids.tolist()) if 3 <= i < 603 and i != 50)
    assert [(e & 0xFFFFFFFF, e >> 32) for e in entries.tolist()[: len(pairs)]] == pairs
    assert entries[len(pairs) :].eq(0xFFFFFFFF).all() and counters.eq(0).all() and fill.eq(0).all()
    Plans.forget_all()


@at("sm_90", "cuda")
def test_windows_of_several_warps(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_on(place) as device:
        monkeypatch.setattr(plans, "MAX_WINDOWS", 9)
        Plans.forget_all()
        for case in ("edges", "heavy", "many"):
            check(make(case, torch.bfloat16, device))
        Plans.forget_all()


test_thread_order_does_not_matter = order_test(
    lambda case: check(make(case, torch.bfloat16, "cpu")),
    *("edges", "heavy", "groups_meet", "range_padding", "odd"),
)


@at()
def test_parts_of_a_vocabulary_add_up(place: str) -> None:
    with running_on(place) as device:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(30, 16, generator=generator).to(device)
        ids = torch.randint(0, 30, (50,), generator=generator).to(device)
        dy = torch.randn(50, 16, generator=generator).to(device)
        whole = weight.clone().requires_grad_()
        y = embedding(ids, whole, padding_idx=4)
        y.backward(dy)
        total = torch.zeros_like(y)
        for start, end in ((0, 11), (11, 12), (12, 30)):
            part = weight[start:end].clone().requires_grad_()
            piece = embedding(ids, part, padding_idx=4, vocab_start=start)
            piece.backward(dy)
            total += piece.detach()
            torch.testing.assert_close(part.grad, whole.grad[start:end], rtol=1e-6, atol=1e-6)
        assert_same_bits(total, y.detach())


@at()
def test_accumulates_over_calls(place: str) -> None:
    with running_on(place) as device:
        main = torch.zeros(9, 8, device=device)
        ids = torch.tensor([1, 1, 3], device=device)
        for _ in range(3):
            embedding_grad_(main, ids, torch.ones(3, 8, device=device, dtype=torch.bfloat16))
        assert main[:, 0].tolist() == [0, 6, 0, 3, 0, 0, 0, 0, 0]
        view = torch.zeros(9, 24, device=device)  # rows with something beside them
        embedding_grad_(view[:, 8:16], ids, torch.ones(3, 8, device=device))
        assert view.sum().item() == 24 and view[1, 8:16].eq(2).all()


def test_agrees_with_torch() -> None:
    weight, ids = torch.randn(12, 8), torch.randint(0, 12, (4, 6))
    for padding in (None, 3, -2):
        ours, theirs = (weight.clone().requires_grad_() for _ in range(2))
        y = embedding(ids, ours, padding_idx=padding)
        wanted = torch.nn.functional.embedding(ids, theirs, padding_idx=padding)
        torch.testing.assert_close(y, wanted)
        for t in (y, wanted):
            t.square().sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert embedding(ids.t(), weight).is_contiguous()


def test_nan_and_infinity_stay_in_their_row() -> None:
    dy = torch.ones(3, 8)
    dy[1, 2], dy[2, 3] = torch.nan, torch.inf
    for place in ("cpu", "sm_90") if rtkernels.emulator.unavailable() is None else ("cpu",):
        with running_on(place):
            grad = module.BACKWARD(dy, torch.tensor([0, 1, 1]), 3, 0, -1)
        assert grad[1, 2].isnan() and grad[1, 3] == torch.inf and grad[0].eq(1).all() and grad[2].eq(0).all()


def test_main_grad_is_noticed_by_autograd() -> None:
    main = torch.zeros(4, 8)
    scale = torch.ones(4, 8, requires_grad=True)
    product = (scale * main).sum()
    embedding_grad_(main, torch.tensor([1]), torch.ones(1, 8))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_second_order_is_refused() -> None:
    weight = torch.randn(4, 8, requires_grad=True)
    (first,) = torch.autograd.grad(embedding(torch.tensor([1, 2]), weight).square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
