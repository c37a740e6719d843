"""Lightning attention in plain torch: what CPU tensors run, and what tests compare with; fp32, fp64 for float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def _sums(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _apart(length: int, decay: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return powers of the decay factor: [heads, i, j] for j <= i (else 0), and exponents 1 ... length [heads, i]."""
    i = torch.arange(length, device=decay.device, dtype=dtype)
    rates = decay.to(dtype).view(-1, 1)
    distance = i.view(-1, 1) - i
    within = torch.exp(-rates.unsqueeze(-1) * distance.clamp(min=0)).masked_fill(distance < 0, 0.0)
    return within, rates * (i + 1)


def _one(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Return out and the final state of one sequence [length, heads, width]."""
    dtype, length = _sums(q), q.shape[0]
    q, k, v = (t.to(dtype).transpose(0, 1) for t in (q, k, v))
    within, exponents = _apart(length, decay, dtype)
    out = (q @ k.transpose(-1, -2) * within) @ v
    rates = decay.to(dtype).view(-1, 1)
    after = torch.exp(exponents - rates * length)  # of row s: length - 1 - s steps
    final = (k * after.unsqueeze(-1)).transpose(-1, -2) @ v
    if state is not None:
        state = state.to(dtype)
        out = out + torch.exp(-exponents).unsqueeze(-1) * (q @ state)
        final = final + torch.exp(-rates * length).unsqueeze(-1) * state
    return (scale * out).transpose(0, 1), final


def _one_backward(
    g: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv and the gradient of the state of one sequence."""
    dtype, length = _sums(q), q.shape[0]
    g, q, k, v = (t.to(dtype).transpose(0, 1) for t in (g, q, k, v))
    within, exponents = _apart(length, decay, dtype)
    rates = decay.to(dtype).view(-1, 1)
    before, after = torch.exp(-exponents).unsqueeze(-1), torch.exp(exponents - rates * length).unsqueeze(-1)
    products, slopes = q @ k.transpose(-1, -2) * within, g @ v.transpose(-1, -2) * within
    dq, dk, dv = scale * slopes @ k, scale * slopes.transpose(-1, -2) @ q, scale * products.transpose(-1, -2) @ g
    dstate = scale * (before * q).transpose(-1, -2) @ g
    if state is not None:
        dq = dq + scale * before * (g @ state.to(dtype).transpose(-1, -2))
    if dfinal is not None:
        dfinal = dfinal.to(dtype)
        dk = dk + after * (v @ dfinal.transpose(-1, -2))
        dv = dv + after * (k @ dfinal)
        dstate = dstate + torch.exp(-rates * length).unsqueeze(-1) * dfinal
    return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1), dstate


def _sequences(q: Tensor, cu: Tensor | None) -> Iterator[tuple[int, int | slice]]:
    """Yield each sequence's number, and what selects its rows."""
    if cu is None:
        yield from ((b, b) for b in range(q.shape[0]))
    else:
        ends = cu.tolist()
        yield from ((b, slice(ends[b], max(ends[b + 1], ends[b]))) for b in range(len(ends) - 1))


def _nothing(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=x.device)


def forward(q, k, v, decay, initial_state, cu_seqlens, scale, wants_state=True):
    """Return out, of q's dtype, and the final state (an empty tensor unless wanted)."""
    batch = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    final = torch.zeros(batch, q.shape[-2], q.shape[-1], v.shape[-1], dtype=_sums(q), device=q.device)
    for b, rows in _sequences(q, cu_seqlens):
        state = None if initial_state is None else initial_state[b]
        part, final[b] = _one(q[rows], k[rows], v[rows], decay, state, scale)
        out[rows] = part.to(q.dtype)
    return out, final if wants_state else _nothing(q)


def backward(
    dout, dfinal_state, q, k, v, decay, initial_state, cu_seqlens, scale, wants_state=True, need_q=True, need_k=True,
    need_v=True, need_initial_state=True,
):  # fmt: skip
    """Return the gradients of q, k, v and the initial state; an empty tensor for what is not needed."""
    batch = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    grads = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)]
    dstate = torch.zeros(batch, q.shape[-2], q.shape[-1], v.shape[-1], dtype=_sums(q), device=q.device)
    for b, rows in _sequences(q, cu_seqlens):
        outer = None if dfinal_state is None or not wants_state else dfinal_state[b]
        state = None if initial_state is None else initial_state[b]
        parts = _one_backward(dout[rows], outer, q[rows], k[rows], v[rows], decay, state, scale)
        for grad, part in zip(grads, parts, strict=False):
            grad[rows] = part.to(grad.dtype)
        dstate[b] = parts[3]
    needed = (need_q, need_k, need_v, need_initial_state and initial_state is not None)
    return tuple(g if wanted else _nothing(q) for g, wanted in zip((*grads, dstate), needed, strict=True))


def step(q, k, v, decay, state, scale):
    """Return out [batch, heads, width of v]; updates `state`."""
    factor = torch.exp(-decay.float()).view(1, -1, 1, 1)
    state.copy_(factor * state + k.float().unsqueeze(-1) * v.float().unsqueeze(-2))
    return (scale * (q.float().unsqueeze(-2) @ state).squeeze(-2)).to(q.dtype)
