"""ALiBi in ``attention``: against the formula in fp64, with gradients and the log-sum-exp."""

from __future__ import annotations

import pytest
import torch
from support.compare import running_on
from support.places import at

import rtkernels
from rtkernels.errors import ArgumentError


def exact(q, k, v, slopes, used=None, window=None):
    """Return result and log-sum-exp in fp64 of [batch, length, heads, width], with distances written out."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    queries, keys = q.shape[2], k.shape[2]
    results, sums = [], []
    for b in range(q.shape[0]):
        valid = keys if used is None else int(used[b])
        position = torch.arange(queries)[:, None] + valid - queries
        key = torch.arange(keys)[None]
        hidden = (key > position) | (key >= valid)
        if window is not None:
            hidden = hidden | (key < position - window)
        slope = (slopes if slopes.dim() == 1 else slopes[b]).double()[:, None, None]
        scores = q[b] @ k[b].transpose(1, 2) / q.shape[-1] ** 0.5 - slope * (position - key).abs()
        scores = scores.masked_fill(hidden, -torch.inf)
        results.append(scores.softmax(-1) @ v[b])
        sums.append(scores.logsumexp(-1))
    return torch.stack(results).transpose(1, 2), torch.stack(sums)


@pytest.mark.parametrize("case", ("square", "few_queries", "grouped", "per_batch", "used", "window"))
@at("cpu", "sm_80", "sm_90", "cuda")
def test_against_fp64(place: str, case: str) -> None:
    queries, kv_heads = (5 if case == "few_queries" else 70), 1 if case == "grouped" else 2
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, n, heads, 64, generator=g).to(torch.bfloat16)
        for n, heads in ((queries, 2), (70, kv_heads), (70, kv_heads))
    )
    slopes = torch.tensor([0.25, 0.7]) if case != "per_batch" else torch.tensor([[0.25, 0.7], [0.01, 0.0]])
    options = {"seqused_k": torch.tensor([70, 33], dtype=torch.int32)} if case == "used" else {}
    if case == "used":
        queries = 20
        q = q[:, :queries]
    if case == "window":
        options["window"] = 9
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    result, lse = exact(*wide, slopes, options.get("seqused_k"), options.get("window"))
    weights = torch.randn(result.shape, generator=g)
    wanted = torch.autograd.grad((result * weights).sum(), wide)
    with running_on(place) as device:
        leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
        options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        ours, our_lse = rtkernels.attention(
            *leaves, causal=True, alibi_slopes=slopes.to(device), return_lse=True, **options
        )
        grads = torch.autograd.grad((ours * weights.to(device)).sum(), leaves)
    torch.testing.assert_close(ours.cpu().double(), result, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(our_lse.cpu().double(), lse, rtol=1e-4, atol=1e-3)
    for mine, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(mine.cpu().double(), theirs, rtol=5e-2, atol=5e-2)


def test_refused() -> None:
    q = torch.randn(1, 4, 2, 64).bfloat16()
    slopes = torch.ones(2)
    for options, message in (
        ({}, "queries attend to later keys; expected causal=True"),
        ({"causal": True, "bias": torch.zeros(4, 4)}, "alibi_slopes and bias are both given"),
        ({"causal": True, "sinks": torch.zeros(2)}, "alibi_slopes and sinks are both given"),
        ({"causal": True, "alibi_slopes": torch.ones(3)}, r"shape \(3,\); expected \(2,\) or \(1, 2\)"),
        ({"causal": True, "alibi_slopes": 0.5}, "alibi_slopes is float"),
        ({"causal": True, "alibi_slopes": torch.ones(2, dtype=torch.int64)}, "alibi_slopes is torch.int64"),
        ({"causal": True, "alibi_slopes": torch.ones(2, requires_grad=True)}, "requires a gradient"),
    ):
        with pytest.raises(ArgumentError, match=message):
            rtkernels.attention(q, q, q, **({"alibi_slopes": slopes} | options))
    one_sided = rtkernels.attention(q, q, q, alibi_slopes=slopes, window=(None, 0))
    assert torch.equal(one_sided, rtkernels.attention(q, q, q, alibi_slopes=slopes, causal=True))
