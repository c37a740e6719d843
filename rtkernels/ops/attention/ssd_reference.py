"""Mamba-2's SSD in plain torch: what CPU tensors run, and what tests compare with; fp32, fp64 for float64."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.attention.gated_delta_rule_reference import initial, nothing, one, one_backward, sequences, sums


def forward(q, k, v, g, beta, skip, initial_state, cu_seqlens, wants_state=True):
    """Return out, of q's dtype, and the final state (an empty tensor unless wanted)."""
    batch = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = torch.zeros(v.shape, dtype=q.dtype, device=q.device)
    final = torch.zeros(batch, v.shape[-2], q.shape[-1], v.shape[-1], dtype=sums(q), device=q.device)
    for b, rows in sequences(q, cu_seqlens):
        state = initial(q, v, initial_state, b)
        part, final[b] = one(q[rows], k[rows], v[rows], g[rows], beta[rows], state, 1.0, False, False)
        if skip is not None:
            part = part + skip.to(part.dtype).unsqueeze(-1) * v[rows]
        out[rows] = part.to(q.dtype)
    return out, final if wants_state else nothing(q)


def backward(dout, dfinal_state, q, k, v, g, beta, skip, initial_state, cu_seqlens, needs_state=False):
    """Return the gradients of q, k, v, g, beta and the initial state (an empty tensor unless needed)."""
    inputs = (q, k, v, g, beta)
    grads = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in inputs]
    batch = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dstate = torch.zeros(batch, v.shape[-2], q.shape[-1], v.shape[-1], dtype=sums(q), device=q.device)
    for b, rows in sequences(q, cu_seqlens):
        if not q[rows].shape[0]:
            dstate[b] = 0.0 if dfinal_state is None else dfinal_state[b]
            continue
        state = initial(q, v, initial_state, b)
        outer = torch.zeros_like(state) if dfinal_state is None else dfinal_state[b].to(state.dtype)
        parts = one_backward(dout[rows], outer, *(t[rows] for t in inputs), state, 1.0, False, False)
        if skip is not None:
            parts[2] = parts[2] + skip.to(parts[2].dtype).unsqueeze(-1) * dout[rows]
        for grad, part in zip(grads, parts[:5], strict=True):
            grad[rows] = part.to(grad.dtype)
        dstate[b] = parts[5]
    return *grads, dstate if needs_state else nothing(q)


def time_step(dt: Tensor, bias: Tensor | None, softplus: bool, low: float, high: float) -> Tensor:
    """Return the time steps from what a projection gives, fp32."""
    dtype = dt.dtype if dt.dtype.itemsize > 2 else torch.float32  # promote_types would end a recorded call
    time = dt.to(dtype) if bias is None else dt.to(dtype) + bias.to(dtype)
    if softplus:
        time = torch.nn.functional.softplus(time)
    return time.clamp(low, high) if low > 0.0 or high < float("inf") else time


def step(x, dt, rate, b, c, skip, bias, state, softplus, low, high):
    """Return out [batch, heads, width of x]; updates `state` [batch, heads, width of x, width of b]."""
    dtype, each = sums(x), x.shape[1] // b.shape[1]
    time = time_step(dt.to(dtype), bias, softplus, low, high)
    decay = torch.exp(rate.to(dtype) * time).unsqueeze(-1).unsqueeze(-1)
    keys, queries = (t.to(dtype).repeat_interleave(each, 1) for t in (b, c))
    values = x.to(dtype)
    new = decay * state.to(dtype) + (time.unsqueeze(-1) * values).unsqueeze(-1) * keys.unsqueeze(-2)
    state.copy_(new)
    out = (new @ queries.unsqueeze(-1)).squeeze(-1)
    return (out if skip is None else out + skip.to(dtype).unsqueeze(-1) * values).to(x.dtype)
