"""ALiBi in ``attention_varlen``: packed sequences, and packed queries over a paged cache, against fp64."""

from __future__ import annotations

import pytest
import torch
from support.compare import running_on
from support.places import at
from torch import Tensor

import rtkernels
from rtkernels.errors import ArgumentError

QUERIES, KEYS = (5, 0, 1, 70, 33), (40, 7, 21, 70, 90)


def one_sequence(q, k, v, slope, window, softcap, sinks) -> tuple[Tensor, Tensor]:
    """Return result [queries, heads, width] and log-sum-exp [heads, queries] in fp64; a window of -1 is all."""
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    behind = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
    scores = scores - slope[:, None, None] * behind.abs()
    hidden = ((behind > window[0]) if window[0] >= 0 else False) | ((-behind > window[1]) if window[1] >= 0 else False)
    if isinstance(hidden, Tensor):
        scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, q.shape[1], 1)), -1)
    return (scores.softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1), scores.logsumexp(-1)


def ends(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *counts), dtype=torch.int32).cumsum(0).int()


@pytest.mark.parametrize("case", ("one slope per head", "one per sequence", "window", "used"))
@at("cpu", "sm_80", "sm_90", "cuda")
def test_packed_sequences(place: str, case: str) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(counts) + 3, heads, 64, generator=g).bfloat16()
        for counts, heads in ((QUERIES, 4), (KEYS, 2), (KEYS, 2))
    )
    slopes = torch.rand(*((len(KEYS),) if case == "one per sequence" else ()), 4, generator=g)
    used = torch.tensor([33, 7, 30, 70, 50], dtype=torch.int32) if case == "used" else None
    window = 9 if case == "window" else None
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    cu_q, cu_k = ends(QUERIES), ends(KEYS)
    want, sums = torch.zeros(len(q), 4, 64, dtype=torch.float64), torch.full((4, len(q)), -torch.inf).double()
    parts = []
    for b, count in enumerate(KEYS):
        rows, first = slice(cu_q[b], cu_q[b + 1]), int(cu_k[b])
        columns = slice(first, first + (count if used is None else min(count, int(used[b]))))
        slope = (slopes if slopes.dim() == 1 else slopes[b]).double()
        part, lse = one_sequence(
            leaves[0][rows], leaves[1][columns], leaves[2][columns], slope, (window or -1, 0), 0.0, None
        )
        parts.append(part)
        want[rows], sums[:, rows] = part.detach(), lse.detach()
    weights = torch.randn(want.shape, generator=g)
    wanted = torch.autograd.grad((torch.cat(parts) * weights[: sum(QUERIES)]).sum(), leaves)
    with running_on(place) as device:
        own = [t.to(device).requires_grad_() for t in (q, k, v)]
        ours, lse = rtkernels.attention_varlen(
            *own, cu_q.to(device), cu_k.to(device), max(QUERIES), max(KEYS), causal=True, window=window,
            alibi_slopes=slopes.to(device), seqused_k=None if used is None else used.to(device), return_lse=True,
        )  # fmt: skip
        grads = torch.autograd.grad((ours * weights.to(device)).sum(), own)
    torch.testing.assert_close(ours.cpu().double(), want, rtol=2e-2, atol=1e-2)
    real = sum(QUERIES)
    torch.testing.assert_close(lse.cpu().double()[:, :real], sums[:, :real], rtol=1e-4, atol=2e-3)
    for mine, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(mine.cpu().double(), theirs, rtol=5e-2, atol=5e-2)


@at("sm_80", "sm_90", "cuda")
def test_largest_length_beyond_all_keys(place: str) -> None:
    """max_seqlen_k may be more than there are keys: the bias has no numbers for those."""
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(20, 2, 64, generator=g).bfloat16() for _ in range(3))
    cu, slopes = ends((7, 13)), torch.rand(2, generator=g)
    with running_on(place) as device:
        given = [t.to(device) for t in (q, k, v, cu, cu)]
        exactly, more = (
            rtkernels.attention_varlen(*given, 13, largest, causal=True, alibi_slopes=slopes.to(device))
            for largest in (13, 4096)
        )
    assert torch.equal(exactly, more)


@pytest.mark.parametrize("width", (64, 128, 72))
@pytest.mark.parametrize("case", ("causal", "all keys", "per sequence, capped", "window and sinks", "fp8", "one query"))
@at("cpu", "sm_80", "sm_90", "cuda")
def test_over_pages(place: str, case: str, width: int) -> None:
    if width != 64 and case not in ("causal", "fp8"):
        pytest.skip("other widths have the same scores")
    if width == 72 and case == "fp8":
        pytest.skip("codes come in 16 bytes")
    g = torch.Generator().manual_seed(1)
    queries = (1, 0, 1, 1, 1) if case == "one query" else QUERIES
    heads, kv_heads, page, table_row = 6, 2, 16, 6
    q = torch.randn(sum(queries) + 2, heads, width, generator=g).bfloat16()
    pages = torch.randperm(len(KEYS) * table_row, generator=g).int().view(len(KEYS), table_row)
    k, v = torch.randn(2, pages.numel(), page, kv_heads, width, generator=g).bfloat16()
    options: dict[str, object] = {"causal": case != "all keys"}
    softcap, sinks, window, scale = 0.0, None, (-1, -1 if case == "all keys" else 0), 1.0
    slopes = torch.rand(*((len(KEYS),) if "sequence" in case else ()), heads, generator=g)
    if "capped" in case:
        softcap = options["softcap"] = 3.0
    if "sinks" in case:
        sinks, window, options["window"] = torch.randn(heads, generator=g), (9, 0), 9
    if case == "fp8":
        k, v, scale = (4 * k).to(torch.float8_e4m3fn), (4 * v).to(torch.float8_e4m3fn), 0.25
        options |= {"k_scale": torch.tensor(scale), "v_scale": torch.tensor(scale)}
    cu_q = ends(queries)
    want, sums = torch.zeros(len(q), heads, width).double(), torch.zeros(heads, len(q)).double()
    for b, count in enumerate(KEYS):
        rows = slice(cu_q[b], cu_q[b + 1])
        mine = [scale * t[pages[b].long()].flatten(0, 1)[:count].double() for t in (k, v)]
        slope = (slopes if slopes.dim() == 1 else slopes[b]).double()
        want[rows], sums[:, rows] = one_sequence(
            q[rows].double(), *mine, slope, window, softcap, None if sinks is None else sinks.double()
        )
    with running_on(place) as device:
        given = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in options.items()}
        given |= {} if sinks is None else {"sinks": sinks.to(device)}
        out, lse = rtkernels.attention_varlen(
            q.to(device), k.to(device), v.to(device), cu_q.to(device), None, max(queries), max(KEYS),
            alibi_slopes=slopes.to(device), seqused_k=torch.tensor(KEYS, dtype=torch.int32, device=device),
            page_table=pages.to(device), return_lse=True, **given,
        )  # fmt: skip
    real = sum(queries)
    torch.testing.assert_close(out.cpu().double(), want, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse.cpu().double()[:, :real], sums[:, :real], rtol=1e-4, atol=2e-3)


def test_refused() -> None:
    q, cu = torch.randn(4, 2, 64).bfloat16(), torch.tensor([0, 4], dtype=torch.int32)

    def call(**options: object) -> None:
        rtkernels.attention_varlen(q, q, q, cu, cu, 4, 4, **({"causal": True, "alibi_slopes": torch.ones(2)} | options))

    for options, message in (
        ({"causal": False}, "queries attend to later keys; expected causal=True"),
        ({"sinks": torch.zeros(2)}, "alibi_slopes and sinks are both given"),
        ({"alibi_slopes": torch.ones(3)}, r"shape \(3,\); expected \(2,\) or \(1, 2\)"),
        ({"alibi_slopes": 0.5}, "alibi_slopes is float"),
        ({"alibi_slopes": torch.ones(2, requires_grad=True)}, "requires a gradient"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call(**options)
    cache, table = torch.zeros(1, 16, 2, 64).bfloat16(), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"alibi_slopes has shape \(1, 3\); expected \(2,\) or \(1, 2\)"):
        rtkernels.attention_varlen(
            q, cache, cache, cu, None, 4, 4, alibi_slopes=torch.ones(1, 3), page_table=table, seqused_k=cu[1:]
        )
