"""Attention in float64, written out with loops over sequences and heads: what tests of attention compare with."""

from __future__ import annotations

import torch
from torch import Tensor


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False, window=None,
    softcap: float = 0.0, clip: float | None = None, sinks: Tensor | None = None, bias: Tensor | None = None,
    kv_limit: Tensor | None = None, seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out [batch, queries, heads, width] and lse [batch, heads, queries]; differentiable in q, k, v and "
    "sinks."""
    batch, lq, heads, width = q.shape
    lkv, group = k.shape[1], heads // k.shape[2]
    scale = width**-0.5 if scale is None else scale
    left, right = (window, None) if isinstance(window, int) else window or (None, None)
    right = 0 if causal else right
    if bias is not None:
        bias = bias.double().expand(batch, heads, lq, lkv)
    outs, lses = [], []
    for b in range(batch):
        keys = lkv if seqused_k is None else int(seqused_k[b])
        for h in range(heads):
            s = q[b, :, h].double() @ k[b, :keys, h // group].double().T * scale
            if softcap:
                s = softcap * torch.tanh(s / softcap)
            if clip is not None:  # with the gradient of what is not cut off
                s = s - (s - s.clamp(max=clip)).detach()
            if bias is not None:
                s = s + bias[b, h, :, :keys]
            i = torch.arange(lq).view(-1, 1) + keys - lq
            j = torch.arange(keys).view(1, -1)
            seen = torch.ones(lq, keys, dtype=torch.bool)
            if left is not None:
                seen &= j >= i - left
            if right is not None:
                seen &= j <= i + right
            if kv_limit is not None:
                seen &= j < kv_limit.cpu().expand(batch, lq)[b].view(-1, 1)
            s = s.masked_fill(~seen.to(s.device), float("-inf"))
            if sinks is not None:
                s = torch.cat([s, sinks[h].double().expand(lq, 1)], 1)
            nothing = (s == float("-inf")).all(1)  # also without keys
            s = torch.cat([s.masked_fill(nothing.view(-1, 1), 0.0), s.new_full((lq, 1), float("-inf"))], 1)
            s = torch.where(nothing.view(-1, 1), torch.zeros_like(s), s)
            lse = torch.logsumexp(s, 1)
            p = torch.exp(s - lse.view(-1, 1)).masked_fill(nothing.view(-1, 1), 0.0)
            lse = lse.masked_fill(nothing, float("-inf"))
            outs.append(p[:, :keys] @ v[b, :keys, h // group].double())
            lses.append(lse)
    out = torch.stack(outs).view(batch, heads, lq, v.shape[-1]).transpose(1, 2)
    return out, torch.stack(lses).view(batch, heads, lq)


def assert_near(got: Tensor, exact: Tensor, tolerance: float, what: str = "result") -> None:
    """Check the largest error against the largest value of the exact result; infinities must agree."""
    got, exact = got.detach().double().cpu(), exact.detach().double().cpu()
    assert got.shape == exact.shape, f"{what}: {tuple(got.shape)}, expected {tuple(exact.shape)}"
    finite = exact.isfinite()
    assert torch.equal(got[~finite], exact[~finite]), f"{what}: infinities differ"
    if finite.any():
        error = (got[finite] - exact[finite]).abs().max().item()
        largest = max(exact[finite].abs().max().item(), 1e-3)
        assert error <= tolerance * largest, f"{what}: off by {error:.3g}, values up to {largest:.3g}"
