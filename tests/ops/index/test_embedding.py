"""Embedding: look-up and gradient at every place they can run, accumulation, ranges, errors, the GPU's own ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_close, assert_same_bits, running_on
from support.places import DTYPES, ORDERS, at, emulated, error_tests, meta_on, order_test, short
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels import emulator
from rtkernels.ops.index import embedding as module
from rtkernels.ops.index import embedding_order as order
from rtkernels.ops.index import embedding_plan as plans
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.operator.plan import StepPlan, Steps

embedding, embedding_grad_ = rtkernels.embedding, rtkernels.embedding_grad_


# ---- inputs: one list for every place -------------------------------------------------------------------------------


@dataclass
class Inputs:
    ids: Tensor
    rows: int
    dy: Tensor
    padding: int | None = None
    start: int = 0


Normal = Callable[..., Tensor]
Ids = Callable[..., Tensor]


def _heavy(ids: Ids) -> Tensor:
    """Few ids with thousands of tokens in between many with one."""
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


def exact_sums(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The gradient in fp64, and the sum of magnitudes."""
    cols = inputs.dy.shape[-1]
    padding = inputs.padding if inputs.padding is None or inputs.padding >= 0 else inputs.padding + inputs.rows
    ids = inputs.ids.reshape(-1).long()
    kept = (ids >= inputs.start) & (ids < inputs.start + inputs.rows)
    if padding is not None:
        kept &= ids != padding
    dy = inputs.dy.reshape(len(ids), cols)[kept].double()
    zeros = torch.zeros(inputs.rows, cols, dtype=torch.float64, device=dy.device)
    local = ids[kept] - inputs.start
    return zeros.index_add(0, local, dy), zeros.index_add(0, local, dy.abs())


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
    """Return the list that the passes make, however few tokens there are."""
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
        r"main_grad has strides \(0, 1\); expected unit-stride rows that do not overlap",
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
