"""Index of routed tokens: lists and maps, padding, capacity, hostile input, at every place it can be built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import running_on
from support.fresh_memory import fresh_memory
from support.places import ORDERS, at, emulated, error_tests
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from bench.rows.moe import moe_index as bench_rows
from rtkernels import MoeIndex, moe_index, moe_row_id_map, moe_rows
from rtkernels.ops.moe import moe_index as module
from rtkernels.ops.moe import moe_index_plan as plans
from rtkernels.runtime.launch.plans import Plans

# ---- inputs, and what must come out ---------------------------------------------------------------------------------


@dataclass
class Case:
    routing: Tensor
    experts: int
    multiple_of: int = 1
    rows: int | None = None
    top_k: int | None = None


def one_by_one(choices: list[list[int]], experts: int, multiple_of: int, rows: int, dropped: int = 0) -> list[Any]:
    """Build the index by its definition."""
    members: list[list[int]] = [[] for _ in range(experts)]
    top_k = len(choices[0]) if choices else 0
    for t, row in enumerate(choices):
        for j, e in enumerate(row):
            if 0 <= e < experts:
                members[e].append(t * top_k + j)
            elif e != -1:
                dropped += 1
    row_of, expert_of = [-1] * (len(choices) * top_k), [-1] * (len(choices) * top_k)
    slots, counts, offsets, at = [-1] * rows, [], [0], 0
    for e, slots_of_e in enumerate(members):
        kept = slots_of_e[: max(rows - at, 0)]
        for i, slot in enumerate(kept):
            row_of[slot], expert_of[slot], slots[at + i] = at + i, e, slot
        dropped += len(slots_of_e) - len(kept)
        counts.append(len(kept))
        at = min(at + -(-len(slots_of_e) // multiple_of) * multiple_of, rows)
        offsets.append(at)
    return [row_of, expert_of, slots, counts, offsets, dropped]


def wanted_index(case: Case) -> list[Any]:
    choices, dropped = case.routing.tolist(), 0
    top_k = case.top_k
    if case.routing.dtype in plans.MAP_DTYPES:
        top_k = case.experts if top_k is None else top_k
        lists = [[e for e, flag in enumerate(row) if flag] for row in choices]
        dropped = sum(len(row[top_k:]) for row in lists)
        choices = [(row + [-1] * top_k)[:top_k] for row in lists]
    rows = case.rows
    if rows is None:
        rows = moe_rows(sum(map(len, choices)), 1, case.experts, case.multiple_of)
    return one_by_one(choices, case.experts, case.multiple_of, rows, dropped)


def check(case: Case, device: str) -> MoeIndex:
    routing = case.routing.to(device)
    if case.routing.storage_offset():
        routing = torch.cat((routing.new_zeros(1), routing.flatten()))[1:].view(routing.shape)
    options = {"multiple_of": case.multiple_of, "rows": case.rows}
    index = moe_index(routing, case.experts, top_k=case.top_k, **options)
    assert isinstance(index, MoeIndex)
    top_k = index.rows.shape[1]
    assert index.rows.shape == index.experts.shape == (len(routing), top_k)
    for name, got, wanted in zip(MoeIndex._fields, index, wanted_index(case), strict=True):
        assert got.dtype == torch.int32 and got.is_contiguous(), name
        assert got.flatten().tolist() == (wanted if isinstance(wanted, list) else [wanted]), name
    if routing.dtype in plans.MAP_DTYPES and case.top_k is None:
        dense, counts, offsets = moe_row_id_map(routing, **options)
        assert dense.dtype == torch.int32 and dense.shape == routing.shape
        assert torch.equal(counts, index.counts) and torch.equal(offsets, index.offsets)
        flags = routing != 0
        token, choice = torch.nonzero(flags, as_tuple=True)
        assert torch.equal(dense[flags], index.rows[token, (flags.cumsum(1) - 1)[token, choice]])
        assert dense[~flags].eq(-1).all()
    return index


def _random(tokens: int, top_k: int, experts: int, low: int = 0, high: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(tokens * 1000 + experts)
    return torch.randint(low, experts + high, (tokens, top_k), generator=generator)


def _map(tokens: int, experts: int, share: float = 0.3) -> Tensor:
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens + experts)) < share


def _wild() -> Tensor:
    """Numbers that are no expert, and some that would be if only their lower halves were read."""
    numbers = [0, 5, 6, -1, -2, 2**31, 2**32 + 1, -(2**62), 2**63 - 1, -(2**63), 2**31 - 1, -(2**31), 3, -1, 1, 4]
    return torch.tensor(numbers).repeat(9).view(-1, 4)


def _bytes() -> Tensor:
    values = torch.tensor([0, 1, 2, 127, 128, 255, 0, 0], dtype=torch.uint8)
    return values[_random(70, 12, 8)]


LISTS: dict[str, Callable[[], Case]] = {
    "plain": lambda: Case(_random(40, 3, 8), 8, 4),
    "one_token": lambda: Case(_random(1, 1, 5), 5),
    "one_expert": lambda: Case(_random(33, 2, 1), 1, 16),
    "no_tokens": lambda: Case(_random(0, 3, 5), 5, 8),
    "no_tokens_some_rows": lambda: Case(_random(0, 3, 5), 5, 8, rows=70),
    "no_choices": lambda: Case(_random(7, 0, 5), 5, 8, rows=3),
    "int32": lambda: Case(_random(300, 4, 40).int(), 40, 16),
    "odd": lambda: Case(_random(333, 3, 37), 37, 7),
    "all_to_one": lambda: Case(torch.full((600, 2), 3), 9, 16),
    "half_empty": lambda: Case(_random(200, 4, 32) * 2, 64, 8),
    "twice_the_same": lambda: Case(_random(90, 1, 6).repeat(1, 3), 6, 4),
    "more_choices_than_experts": lambda: Case(_random(50, 6, 3), 3, 2),
    "none_made": lambda: Case(torch.full((50, 2), -1), 4, 16, rows=40),
    "wild": lambda: Case(_wild(), 6, 4),
    "wild_int32": lambda: Case(_wild().clamp(-(2**31), 2**31 - 1).int(), 6, 4),
    "wild_and_few_rows": lambda: Case(_wild(), 6, 4, rows=21),
    "few_rows": lambda: Case(_random(100, 4, 16, -1, 1), 16, 16, rows=150),
    "no_rows": lambda: Case(_random(100, 4, 16), 16, 16, rows=0),
    "one_row": lambda: Case(_random(100, 4, 16), 16, 1, rows=1),
    "more_rows_than_needed": lambda: Case(_random(30, 2, 4), 4, 8, rows=1000),
    "rows_end_inside_padding": lambda: Case(torch.tensor([[0], [0], [1]]), 2, 8, rows=5),
    "large_multiple": lambda: Case(_random(30, 2, 4), 4, 300, rows=1500),
    "largest_multiple": lambda: Case(_random(30, 2, 4), 4, 2**31 - 1, rows=100),
    "several_tiles": lambda: Case(_random(3001, 3, 20, -1), 20, 16),
    "1025_experts": lambda: Case(_random(1200, 4, 1025), 1025, 2),
    "4096_experts": lambda: Case(_random(700, 4, 4096, -1, 1), 4096, 3),
    "strided": lambda: Case(_random(80, 6, 10)[::2, 1::2], 10, 4, top_k=3),
}
MAPS: dict[str, Callable[[], Case]] = {
    "map": lambda: Case(_map(60, 16), 16, 4),
    "map_limited": lambda: Case(_map(60, 16), 16, 4, top_k=3),
    "map_odd": lambda: Case(_map(61, 13), 13, 8),
    "map_odd_limited": lambda: Case(_map(61, 13), 13, 8, top_k=2, rows=90),
    "map_bytes": lambda: Case(_bytes(), 12, 8),
    "map_all_set": lambda: Case(torch.ones(700, 4, dtype=torch.bool), 4, 16),
    "map_none_set": lambda: Case(torch.zeros(20, 4, dtype=torch.bool), 4, 16),
    "map_no_tokens": lambda: Case(_map(0, 4), 4, 16, rows=5),
    "map_few_rows": lambda: Case(_map(60, 16), 16, 4, rows=70),
    "map_one_expert": lambda: Case(_map(50, 1), 1, 4),
    "map_unaligned": lambda: Case(_map(9, 16).flatten()[16:].view(8, 16), 16, 4),
    "map_transposed": lambda: Case(_map(16, 9).t(), 16, 4),
    "map_tall": lambda: Case(_map(2300, 8), 8, 2),
    "map_wide_odd": lambda: Case(_map(19, 1027, 0.01), 1027, 2, rows=10_000),
    "map_4096_experts": lambda: Case(_map(35, 4096, 0.002), 4096, 2, rows=20_000),
}
CASES = LISTS | MAPS


@pytest.mark.parametrize("case", CASES)
@at()
def test_every_case(place: str, case: str) -> None:
    with running_on(place) as device:
        check(CASES[case](), device)


@pytest.mark.parametrize("width", (2, 4))
@pytest.mark.parametrize("case", ("odd", "several_tiles", "wild_and_few_rows", "map_limited", "map_tall"))
@at("sm_80", "sm_90", "cuda")
def test_small_chunks_and_wide_counts(place: str, case: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_on(place) as device:
        monkeypatch.setattr(plans, "MIN_CHOICES", 8)
        monkeypatch.setattr(plans, "MIN_FLAGS", 8)
        monkeypatch.setattr(plans, "MANY_CHOICES", 0)
        monkeypatch.setattr(plans, "MANY_FLAGS", 0)
        monkeypatch.setattr(plans, "count_bytes", lambda most: width)
        Plans.forget_all()
        check(CASES[case](), device)
        Plans.forget_all()


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    with running_on("sm_90") as device:
        for case in ("plain", "map"):
            check(CASES[case](), device)


@emulated
@pytest.mark.parametrize("order", ORDERS)
def test_thread_order_does_not_matter(order: str | int) -> None:
    with rtkernels.emulate("sm_90", order):
        for case in ("odd", "wild_and_few_rows", "several_tiles", "map", "map_tall"):
            check(CASES[case](), "cpu")


@emulated
@pytest.mark.parametrize("case", ("plain", "more_rows_than_needed", "few_rows", "none_made", "map", "map_limited"))
def test_every_place_is_written(case: str) -> None:
    """Padding, and the rest of a token's list: zeros there would be choices of expert 0, and rows of slot 0."""
    with rtkernels.emulate("sm_90"), fresh_memory(0):
        check(CASES[case](), "cpu")


def test_rows_in_the_worst_case() -> None:
    assert moe_rows(10, 2, 4) == 20
    assert moe_rows(10, 2, 4, 16) == 80  # 20 choices and 4 * 15 pads
    assert moe_rows(1, 2, 8, 16) == 32 and moe_rows(3, 9, 4, 1) == 12 and moe_rows(0, 2, 4, 16) == 0
    for tokens, top_k, experts, multiple in ((7, 2, 5, 4), (3, 3, 3, 16), (40, 1, 7, 8)):
        most = moe_rows(tokens, top_k, experts, multiple)
        used = [int(moe_index(_map(tokens, experts, s), top_k=top_k, multiple_of=multiple, rows=10_000).offsets[-1])
                for s in (0.1, 0.5, 1.0)]  # fmt: skip
        assert max(used) <= most


def test_rows_can_be_passed_to_grouped_products() -> None:
    index = moe_index(_random(30, 2, 4), 4, multiple_of=8)
    padded = index.offsets.diff()
    assert padded.remainder(8).eq(0).all() and (padded - index.counts).lt(8).all() and index.counts.sum() == 60
    slots = index.slots[index.rows.flatten().long()]
    assert torch.equal(slots, torch.arange(60, dtype=torch.int32))


def test_numpy_in_numpy_out() -> None:
    index = moe_index(_random(20, 2, 4).numpy(), 4)
    assert isinstance(index, MoeIndex) and isinstance(index.rows, np.ndarray)
    dense, counts, _ = moe_row_id_map(_map(20, 4).numpy())
    assert isinstance(dense, np.ndarray) and counts.sum() == (dense >= 0).sum()


@pytest.mark.parametrize("dynamic", (False, True))
@at("cpu", "cuda")
def test_torch_compile(place: str, dynamic: bool) -> None:
    def both(routing: Tensor, routing_map: Tensor) -> tuple[Tensor, ...]:
        index = moe_index(routing, 8, multiple_of=4)
        return *index, *moe_index(routing_map, top_k=3), *moe_row_id_map(routing_map, 4, 200)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    inputs = _random(40, 3, 8).to(place), _map(40, 8).to(place)
    for got, wanted in zip(compiled(*inputs), both(*inputs), strict=True):
        assert torch.equal(got, wanted)


# ---- errors ---------------------------------------------------------------------------------------------------------

LIST, MAP = torch.tensor([[0, 1], [2, 3]]), torch.ones(3, 4, dtype=torch.bool)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: moe_index(LIST.float(), 4), "routing has dtype float32; expected int32 or int64 for the experts"),
    "rank": (lambda: moe_index(LIST[0], 4), r"routing has shape \(2,\); expected two dimensions"),
    "no experts": (lambda: moe_index(LIST, 0), "num_experts is 0; expected 1 to 4096"),
    "too many experts": (lambda: moe_index(LIST, 4097), "num_experts is 4097; expected 1 to 4096"),
    "experts not given": (lambda: moe_index(LIST), "num_experts is None; expected the number of experts"),
    "experts of a map": (lambda: moe_index(MAP, 5), r"routing has shape \(3, 4\); expected \(3, 5\)"),
    "top_k of a list": (lambda: moe_index(LIST, 4, top_k=3), r"routing has shape \(2, 2\); expected \(2, 3\)"),
    "top_k": (lambda: moe_index(MAP, top_k=5), "top_k is 5; expected 1 to 4, the number of experts"),
    "top_k of 0": (lambda: moe_index(MAP, top_k=0), "top_k is 0; expected 1 to 4"),
    "multiple": (lambda: moe_index(LIST, 4, multiple_of=0), r"multiple_of is 0; expected 1 to 2\^31 - 1"),
    "rows": (lambda: moe_index(LIST, 4, rows=-1), r"rows is -1; expected 0 to 2\^31 - 1"),
    "rows by default": (lambda: moe_index(LIST, 4, multiple_of=2**30), r"rows is 4294967296; expected 0 to 2\^31 - 1"),
    "choices": (
        lambda: moe_index(torch.zeros(1, dtype=torch.int32).expand(2**20, 2048), 4, rows=1),
        r"1048576 tokens with 2048 choices each; expected fewer than 2\^31 choices",
    ),
    "map dtype": (lambda: moe_row_id_map(LIST), "routing_map has dtype int64; expected one of bool, uint8"),
    "map rank": (lambda: moe_row_id_map(MAP[0]), r"routing_map has shape \(4,\); expected \[tokens, experts\]"),
    "map multiple": (lambda: moe_row_id_map(MAP, 0), "multiple_of is 0; expected 1"),
    "not a tensor": (lambda: moe_index([[1]], 4), "expected a torch.Tensor or an array with __dlpack__"),
}


test_error_messages, test_launchers_raise_the_same_messages = error_tests(BAD)


def test_bench_rows_agree_with_torch() -> None:
    g = torch.Generator().manual_seed(0)
    for row in (bench_rows._row_id(96, 16, 4, 16), bench_rows._index_row("", 96, 16, 4, 8)):
        inputs = row.make("cpu", g)
        got, wanted = row.ours(**inputs), row.torch(**inputs)
        for a, b in zip(got, wanted, strict=True) if isinstance(got, tuple) else ((got, wanted),):
            assert torch.equal(a, b)


# ---- on the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("multiple_of", (1, 16, 128))
@pytest.mark.parametrize("experts", (1, 32, 256, 1000, 4096))
@pytest.mark.parametrize("tokens", (1, 4095, 8192, 100_003, 1_500_000))
def test_bench_shapes(tokens: int, experts: int, multiple_of: int) -> None:
    generator = torch.Generator("cuda").manual_seed(tokens)
    routing = torch.randint(-1, experts + 1, (tokens, min(experts, 8)), device="cuda", generator=generator)
    rows = moe_rows(tokens, routing.shape[1], experts, multiple_of)
    for given in (routing, routing.clamp(max=0)):
        for capacity in (rows, rows // 2):
            args = (given, experts, routing.shape[1], multiple_of, capacity)
            with running_on("cuda"):
                got = module.INDEX(*args)
            for name, a, b in zip(MoeIndex._fields, got, module.INDEX.reference(*args), strict=True):
                assert torch.equal(a, b), name
    if tokens * experts > 2**27:
        return
    routing_map = torch.rand(tokens, experts, device="cuda", generator=generator) < 8 / experts
    for op, args in ((module.ROW_ID_MAP, (multiple_of, rows)), (module.INDEX, (experts, 1, 1, rows))):
        with running_on("cuda"):
            got = op(routing_map, *args)
        for a, b in zip(got, op.reference(routing_map, *args), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.slow
def test_beyond_two_to_the_31() -> None:
    tokens, experts = 2**20 + 3, 2052
    if torch.cuda.mem_get_info()[0] < 6 * tokens * experts:
        pytest.skip("not enough free GPU memory")
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool, device="cuda")
    routing_map[:, 7] = True
    routing_map[-1] = True
    dense, counts, offsets = moe_row_id_map(routing_map, 16, 2**23)
    assert counts[7] == tokens and counts.sum() == tokens + experts - 1
    assert torch.equal(dense[:, 7] - offsets[7], torch.arange(tokens, dtype=torch.int32, device="cuda"))
    assert dense[-1, -1] == offsets[-2] and dense[:-1, 8:].eq(-1).all()


@pytest.mark.gpu
def test_graph_capture_and_replay() -> None:
    routing = torch.randint(0, 64, (8192, 8), device="cuda")
    routing_map = torch.rand(8192, 64, device="cuda") < 0.1

    def run() -> tuple[Tensor, ...]:
        return *moe_index(routing, 64, multiple_of=16), *moe_index(routing_map, top_k=8), *moe_row_id_map(routing_map)

    replay = captured(run)
    routing.copy_(torch.randint_like(routing, -1, 70))
    routing_map.logical_not_()
    assert_equal_bits(replay(), run())


@pytest.mark.gpu
def test_two_streams() -> None:
    cases = [torch.randint(0, 64, (8192, 8), device="cuda"), torch.randint(0, 64, (20_000, 2), device="cuda")]
    wanted = [moe_index(case, 64, multiple_of=16) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(5):
        got = []
        for stream, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                got.append(moe_index(case, 64, multiple_of=16))
        torch.cuda.synchronize()
        for a, b in zip(got, wanted, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
