"""Attention in plain torch: what CPU tensors run, and what tests compare with. fp32 sums, fp64 for float64 inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.attention.checks import heads_first_strides


def _sums(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def seen(
    lq: int, lkv: int, keys: Tensor | int, left: int, right: int, kv_limit: Tensor | None, device: torch.device
) -> Tensor:
    """Return which keys each query sees, bool [batch or 1, 1, lq, lkv]; `keys`: how many count, int or [batch]."""
    i = torch.arange(lq, dtype=torch.int64, device=device).view(1, lq, 1)
    j = torch.arange(lkv, dtype=torch.int64, device=device).view(1, 1, lkv)
    keys = keys.long().clamp(0, lkv).view(-1, 1, 1) if isinstance(keys, Tensor) else min(keys, lkv)
    own = i + (keys - lq)  # the key that is aligned with the query
    mask = (j < keys) & (i >= 0)
    if left >= 0:
        mask = mask & (j >= own - left)
    if right >= 0:
        mask = mask & (j <= own + right)
    if kv_limit is not None:
        mask = mask & (j < kv_limit.long().unsqueeze(-1))
    return mask.unsqueeze(1)


def _by_head(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Return [batch, length, heads_kv, width] as [batch, heads, length, width]."""
    return x.to(dtype).repeat_interleave(heads // max(x.shape[2], 1), dim=2).transpose(1, 2)


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, mask: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Return masked scores and the derivative of a score by the product, from [batch, heads, length, width]."""
    s = torch.matmul(q, k.transpose(-1, -2)) * scale
    slope = torch.full((), scale, dtype=s.dtype, device=s.device)
    if softcap < 0:
        s = s.clamp(max=-softcap)
    elif softcap:
        s = softcap * torch.tanh(s / softcap)
        slope = (1.0 - (s / softcap).square()) * scale
    if bias is not None:
        s = s + bias.to(s.dtype)
    return s.masked_fill(~mask, float("-inf")), slope


def _countable(x: Tensor, mask: Tensor) -> Tensor:
    """Return x [batch, heads, lkv, width] with zeros at keys that no query sees: what lies there may be anything."""
    return x.masked_fill(~mask.any(dim=2).unsqueeze(-1), 0.0)


def _forward(q, k, v, sinks, bias, mask, scale, softcap):
    dtype, heads = _sums(q), q.shape[2]
    k, v = _countable(_by_head(k, heads, dtype), mask), _countable(_by_head(v, heads, dtype), mask)
    s, _ = _scores(_by_head(q, heads, dtype), k, bias, mask, scale, softcap)
    if sinks is not None:
        column = sinks.to(dtype).view(1, heads, 1, 1).expand(s.shape[0], heads, s.shape[2], 1)
        lse = torch.logsumexp(torch.cat([s, column], dim=-1), dim=-1)
    elif s.shape[-1]:
        lse = torch.logsumexp(s, dim=-1)
    else:
        lse = s.new_full(s.shape[:-1], float("-inf"))
    shift = lse.masked_fill(lse == float("-inf"), 0.0)
    out = torch.matmul(torch.exp(s - shift.unsqueeze(-1)), v)
    return out.transpose(1, 2), lse


def _backward(dout, dlse, q, k, v, out, lse, sinks, bias, mask, scale, softcap):
    dtype, heads, heads_kv = _sums(q), q.shape[2], k.shape[2]
    qh, kh, vh = _by_head(q, heads, dtype), _by_head(k, heads, dtype), _by_head(v, heads, dtype)
    kh, vh = _countable(kh, mask), _countable(vh, mask)
    s, slope = _scores(qh, kh, bias, mask, scale, softcap)
    nothing = (lse == float("-inf")).unsqueeze(-1)
    p = torch.exp(s - lse.to(dtype).unsqueeze(-1).masked_fill(nothing, 0.0)).masked_fill(nothing, 0.0)
    g, o = dout.to(dtype).transpose(1, 2), out.to(dtype).transpose(1, 2)
    rest = -(g * o).sum(-1, keepdim=True)
    if dlse is not None:
        rest = rest + dlse.to(dtype).unsqueeze(-1)
    ds = p * (torch.matmul(g, vh.transpose(-1, -2)) + rest) * slope
    ds = ds.masked_fill(~mask, 0.0)

    def by_kv_head(x: Tensor) -> Tensor:
        return x.transpose(1, 2).unflatten(2, (heads_kv, heads // heads_kv)).sum(3)

    dq = torch.matmul(ds, kh).transpose(1, 2)
    dk = by_kv_head(torch.matmul(ds.transpose(-1, -2), qh))
    dv = by_kv_head(torch.matmul(p.transpose(-1, -2), g))
    dsinks = None
    if sinks is not None:
        taken = torch.exp(sinks.to(dtype).view(1, heads, 1) - lse.to(dtype))  # by the sink, of each row
        dsinks = (taken * rest.squeeze(-1)).sum((0, 2))
    dbias = None
    if bias is not None:
        dbias = (p * (torch.matmul(g, vh.transpose(-1, -2)) + rest)).masked_fill(~mask, 0.0).sum_to_size(bias.shape)
    return dq, dk, dv, dsinks, dbias


def _laid_out(x: Tensor, dtype: torch.dtype, heads_first: bool) -> Tensor:
    """Return a copy of [batch, length, heads, width] in the memory order that the operator promises."""
    if not heads_first:
        return x.to(dtype).contiguous().clone()
    result = torch.empty_strided(x.shape, heads_first_strides(x.shape), dtype=dtype, device=x.device)
    return result.copy_(x)


def _sequences(cu_q: Tensor, cu_k: Tensor, lengths: Tensor | None):
    """Yield slices of queries and keys of each packed sequence, and how many of its keys count."""
    q_ends, k_ends = cu_q.tolist(), cu_k.tolist()
    counts = lengths.tolist() if lengths is not None else [2**31] * (len(q_ends) - 1)
    for b, count in enumerate(counts):
        keys = max(k_ends[b + 1] - k_ends[b], 0)
        yield slice(q_ends[b], q_ends[b + 1]), slice(k_ends[b], k_ends[b] + keys), min(keys, max(count, 0))


def _bias_of(bias: Tensor | None, sequence: int, mask: Tensor) -> Tensor | None:
    """Return the bias of a packed sequence as [1, heads, queries, keys]."""
    if bias is None:
        return None
    at = 0 if bias.shape[0] == 1 else sequence
    return bias[at : at + 1, :, : mask.shape[-2], : mask.shape[-1]]


def forward(
    q, k, v, sinks, bias, lengths, kv_limit, cu_q, cu_k, scale, left, right, softcap, max_q=0, max_k=0,
    heads_first=False, backend="auto",
):  # fmt: skip
    """Return out, of q's dtype, and lse, as problem.py says."""
    if cu_q is None:
        keys = k.shape[1] if lengths is None else lengths
        mask = seen(q.shape[1], k.shape[1], keys, left, right, kv_limit, q.device)
        out, lse = _forward(q, k, v, sinks, bias, mask, scale, softcap)
        return _laid_out(out, q.dtype, heads_first), lse.contiguous()
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=_sums(q), device=q.device)
    for b, (rows, columns, keys) in enumerate(_sequences(cu_q, cu_k, lengths)):
        qs, ks, vs = q[rows].unsqueeze(0), k[columns].unsqueeze(0), v[columns].unsqueeze(0)
        mask = seen(qs.shape[1], ks.shape[1], keys, left, right, None, q.device)
        part, part_lse = _forward(qs, ks, vs, sinks, _bias_of(bias, b, mask), mask, scale, softcap)
        out[rows], lse[:, rows] = part[0].to(out.dtype), part_lse[0]
    return out, lse


def backward(
    dout, dlse, q, k, v, out, lse, sinks, bias, lengths, kv_limit, cu_q, cu_k, scale, left, right, softcap, max_q=0,
    max_k=0, heads_first=False, backend="auto", need_q=True, need_k=True, need_v=True, need_sinks=True,
    need_bias=True,
):  # fmt: skip
    """Return dq, dk, dv, of q's dtype, dsinks and dbias; an empty tensor for what is not needed."""
    if cu_q is None:
        keys = k.shape[1] if lengths is None else lengths
        mask = seen(q.shape[1], k.shape[1], keys, left, right, kv_limit, q.device)
        dq, dk, dv, dsinks, dbias = _backward(dout, dlse, q, k, v, out, lse, sinks, bias, mask, scale, softcap)
    else:
        dq, dk, dv = (
            torch.zeros_like(q, dtype=_sums(q)),
            torch.zeros_like(k, dtype=_sums(q)),
            torch.zeros_like(v, dtype=_sums(q)),
        )
        dbias = None
        dsinks = None if sinks is None else torch.zeros(q.shape[1], dtype=_sums(q), device=q.device)
        for b, (rows, columns, keys) in enumerate(_sequences(cu_q, cu_k, lengths)):
            one = [t[rows].unsqueeze(0) for t in (dout, q, out)]
            ks, vs = k[columns].unsqueeze(0), v[columns].unsqueeze(0)
            mask = seen(one[1].shape[1], ks.shape[1], keys, left, right, None, q.device)
            dlse_part = None if dlse is None else dlse[:, rows].unsqueeze(0)
            parts = _backward(
                one[0], dlse_part, one[1], ks, vs, one[2], lse[:, rows].unsqueeze(0), sinks, _bias_of(bias, b, mask),
                mask, scale, softcap,
            )  # fmt: skip
            dq[rows], dk[columns], dv[columns] = parts[0][0], parts[1][0], parts[2][0]
            if dsinks is not None:
                dsinks += parts[3]
    results = []
    for needed, grad, dtype in ((need_q, dq, q.dtype), (need_k, dk, q.dtype), (need_v, dv, q.dtype)):
        first = heads_first and cu_q is None
        results.append(
            _laid_out(grad, dtype, first) if needed else torch.empty(0, dtype=torch.float32, device=q.device)
        )
    wanted = need_sinks and sinks is not None
    results.append(dsinks.to(_sums(q)) if wanted else torch.empty(0, dtype=torch.float32, device=q.device))
    wanted = need_bias and bias is not None
    results.append(
        dbias.to(bias.dtype).contiguous() if wanted else torch.empty(0, dtype=torch.float32, device=q.device)
    )
    return tuple(results)
