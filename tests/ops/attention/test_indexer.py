"""indexer_logits and indexer_topk: against float64; ranges, pages, ties, codes."""

from __future__ import annotations

import pytest
import torch
from support.attention_exact import assert_near
from support.compare import poisoned, running_on
from support.places import at, error_tests
from torch import Tensor

from rtkernels import indexer_logits, indexer_topk

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(q, k, weights, scales=None) -> Tensor:
    scores = torch.einsum("thd,sd->ths", q.double(), k.double()).relu()
    logits = (scores * weights.double().unsqueeze(-1)).sum(1)
    return logits if scales is None else logits * scales.double()


# tokens, heads, keys, width, type
CASES = {
    "one": (1, 1, 1, 8, BF16),
    "as models": (3, 64, 130, 128, E4M3),
    "odd": (34, 5, 9, 40, FP16),
    "many heads": (2, 70, 33, 128, BF16),
}


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, place: str) -> None:
    tokens, heads, keys, width, dtype = CASES[name]
    q, k, weights = (
        random(tokens, heads, width).to(dtype),
        random(keys, width, seed=1).to(dtype),
        random(tokens, heads, seed=2),
    )
    scales = random(keys, seed=3).abs()
    starts = (torch.arange(tokens) % 3).int()
    ends = (keys - torch.arange(tokens) % 5).int()
    want = exact(q, k, weights, scales)
    with running_on(place) as device, poisoned():
        given = [t.to(device) for t in (q, k, weights)]
        assert_near(indexer_logits(*given), exact(q, k, weights).to(device), 2.0**-16)
        got = indexer_logits(
            *given, key_scales=scales.to(device), starts=starts.to(device), ends=ends.to(device)
        ).cpu()  # fmt: skip
    places = torch.arange(keys)
    inside = (places >= starts.unsqueeze(1)) & (places < ends.unsqueeze(1))
    assert bool((got[~inside] == -torch.inf).all())
    if inside.any():
        assert_near(got.masked_fill(~inside, 0.0), want.masked_fill(~inside, 0.0), 2.0**-16)


@at("sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("dtype", (BF16, E4M3), ids=str)
def test_operands_at_any_address(dtype: torch.dtype, place: str) -> None:
    """Views that begin inside of 16 bytes, of each operand."""
    q, k, weights = random(3, 4, 32).to(dtype), random(21, 32, seed=1).to(dtype), random(3, 4, seed=2)
    want = exact(q, k, weights)
    with running_on(place) as device, poisoned():
        for moved in range(3):
            given = [t.to(device) for t in (q, k, weights)]
            behind = torch.empty(given[moved].numel() + 1, dtype=given[moved].dtype, device=device)[1:]
            given[moved] = behind.view(given[moved].shape).copy_(given[moved])
            assert given[moved].data_ptr() % 16
            assert_near(indexer_logits(*given), want.to(device), 2.0**-16)
            assert torch.equal(indexer_topk(*given, 5).cpu(), best(indexer_logits(*given).cpu(), 5))


@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize("dtype", (BF16, E4M3), ids=str)
def test_pages(dtype: torch.dtype, place: str) -> None:
    q, k, weights = random(3, 4, 32).to(dtype), random(7, 16, 32, seed=1).to(dtype), random(3, 4, seed=2)
    table = torch.tensor([[3, 0], [6, 99999], [5, 2]], dtype=torch.int32)  # the second page of a token is not needed
    ends = torch.tensor([32, 11, 20], dtype=torch.int32)
    scales = random(7, 16, seed=4).abs()
    with running_on(place) as device, poisoned():
        table_here = table.clamp(max=6) if place == "cpu" else table
        got = indexer_logits(
            *(t.to(device) for t in (q, k, weights)), key_scales=scales.to(device), ends=ends.to(device),
            page_table=table_here.to(device),
        ).cpu()  # fmt: skip
    for t, end in enumerate(ends.tolist()):
        pages = table[t].clamp(max=6).long()
        rows, factors = k.float()[pages].flatten(0, 1)[:end], scales[pages].flatten()[:end]
        assert_near(got[t, :end], exact(q[t : t + 1], rows, weights[t : t + 1], factors)[0], 2.0**-16)
        assert bool((got[t, end:] == -torch.inf).all())


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("dtype", (BF16, E4M3))
def test_entries_behind_the_last_page_may_be_any_numbers(dtype: torch.dtype, place: str) -> None:
    q, k, weights = random(4, 2, 32).to(dtype), random(9, 16, 32, seed=1).to(dtype), random(4, 2, seed=2)
    table, ends = torch.tensor([[3, 1, 8, 5]], dtype=torch.int32).repeat(4, 1), torch.tensor([0, 5, 16, 40]).int()
    used = torch.arange(4) < torch.tensor([[0], [1], [1], [3]])
    with running_on(place) as device:
        q, k, weights, ends = (t.to(device) for t in (q, k, weights, ends))
        tables = [table.where(used, torch.full_like(table, other)).to(device) for other in (0, -1, 9, 2**31 - 1)]
        logits = [indexer_logits(q, k, weights, ends=ends, page_table=t) for t in tables]
        chosen = [indexer_topk(q, k, weights, 6, ends=ends, page_table=t) for t in tables]
    for results in (logits, chosen):
        assert all(torch.equal(result, results[0]) for result in results[1:])


def best(logits: Tensor, count: int) -> Tensor:
    rows = []
    for row in logits.tolist():
        order = sorted((i for i, x in enumerate(row) if x != -torch.inf), key=lambda i: (-row[i], i))[:count]
        rows.append(sorted(order) + [-1] * (count - len(order)))
    return torch.tensor(rows, dtype=torch.int32)


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("count", (0, 1, 7, 600, 1500))
def test_best(count: int, place: str) -> None:
    """Small integers: scores are exact, and many are equal."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-2, 3, (3, 4, 8), generator=generator).to(BF16)
    k = torch.randint(-2, 3, (1100, 8), generator=generator).to(BF16)
    weights = torch.randint(-2, 3, (3, 4), generator=generator).float()
    ends = torch.tensor([1100, 5, 700], dtype=torch.int32)
    with running_on(place) as device, poisoned():
        given = [t.to(device) for t in (q, k, weights)]
        logits = indexer_logits(*given, ends=ends.to(device)).cpu()
        got = indexer_topk(*given, count, ends=ends.to(device)).cpu()
    assert torch.equal(got, best(logits, count))


@at("cpu", "sm_80", "cuda")
def test_chosen_keys_go_into_sparse_attention(place: str) -> None:
    from rtkernels import sparse_mla

    with running_on(place) as device:
        q, k, weights = (
            t.to(device) for t in (random(6, 4, 32).to(BF16), random(6, 32, seed=1).to(BF16), random(6, 4, seed=2))
        )
        positions = torch.arange(6, dtype=torch.int32, device=device)
        indices = indexer_topk(q, k, weights, 3, ends=positions + 1)
        assert bool((indices <= positions.unsqueeze(1)).all()) and indices[0].tolist() == [0, -1, -1]
        kv = random(6, 64, seed=4).to(BF16).to(device)
        out = sparse_mla(random(6, 2, 64, seed=5).to(BF16).to(device), kv, indices, value_width=64)
        assert_near(out[0], kv[:1].double().expand(2, 64), 2.0**-7)


@at("cpu", "sm_80", "cuda")
def test_empty(place: str) -> None:
    with running_on(place) as device:
        q, k, weights = (torch.ones(*s, device=device).to(BF16) for s in ((2, 3, 16), (0, 16), (2, 3)))
        assert indexer_logits(q, k, weights).shape == (2, 0)
        assert bool((indexer_topk(q, k, weights, 4) == -1).all())
        assert indexer_topk(q[:0], k, weights[:0], 4).shape == (0, 4)
        k, ends = torch.ones(5, 16, device=device).to(BF16), torch.tensor([1, 3], dtype=torch.int32, device=device)
        chosen = indexer_topk(q[:, :0], k, weights[:, :0], 2, ends=ends)  # all scores are 0
        assert chosen.tolist() == [[0, -1], [0, 1]]


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    for name in CASES:
        test_logits(name, "sm_90")
    test_best(7, "sm_90")


_Q, _K, _W, _E = torch.ones(2, 3, 16).bfloat16(), torch.ones(5, 16).bfloat16(), torch.ones(2, 3), torch.ones(2).int()
test_errors_on_the_cpu, test_errors_in_the_launchers = error_tests(
    {
        "q": (lambda: indexer_logits(_Q[0], _K, _W), r"q has shape \(3, 16\); expected \[tokens, heads, width\]"),
        "dtype": (lambda: indexer_logits(_Q.float(), _K, _W), "q has dtype torch.float32; expected bfloat16"),
        "k": (lambda: indexer_logits(_Q, _K[:, :8], _W), "k has width 8; expected 16"),
        "weights": (lambda: indexer_logits(_Q, _K, _W[:1]), r"weights has shape \(1, 3\); expected \(2, 3\)"),
        "ends": (
            lambda: indexer_logits(_Q, _K, _W, ends=_E.long()),
            r"ends is torch.int64 \(2,\); expected int32 \[2\]",
        ),
        "pages": (lambda: indexer_logits(_Q, _K, _W, page_table=_E), r"k has shape \(5, 16\); expected \[pages, page"),
        "count": (lambda: indexer_topk(_Q, _K, _W, -1), "count is -1; expected at least 0"),
    }
)
