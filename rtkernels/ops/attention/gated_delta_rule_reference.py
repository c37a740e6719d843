"""The gated delta rule in plain torch: what CPU tensors run, and what tests compare with; fp32, fp64 for float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_CHUNK = 64


def _sums(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def normalized(x: Tensor) -> Tensor:
    """Return x over its Euclidean norm, as ``l2norm`` has it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return out (without the scale) and the state behind a chunk [heads, length, width]."""
    length = q.shape[1]
    c = g.cumsum(-1)
    lower = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    # Masked before exp, so that no gradient is 0 * inf.
    decays = torch.exp((c.unsqueeze(-1) - c.unsqueeze(-2)).masked_fill(~lower, -torch.inf))
    before, after = torch.exp(c).unsqueeze(-1), torch.exp(c[:, -1:] - c).unsqueeze(-1)
    unit = torch.eye(length, dtype=q.dtype, device=q.device)
    solved = unit + (beta.unsqueeze(-1) * (k @ k.mT) * decays).tril(-1)
    rest = beta.unsqueeze(-1) * (v - before * (k @ state))
    update = torch.linalg.solve_triangular(solved, rest, upper=False, unitriangular=True)
    out = before * (q @ state) + (q @ k.mT * decays) @ update
    return out, torch.exp(c[:, -1]).view(-1, 1, 1) * state + (after * k).mT @ update


def _one(q, k, v, g, beta, state: Tensor, scale: float, l2norm: bool) -> tuple[Tensor, Tensor]:
    """Return out and the final state of one sequence [length, heads, width]."""
    dtype, each = _sums(q), v.shape[1] // max(q.shape[1], 1)
    q, k, v = (t.to(dtype).transpose(0, 1) for t in (q, k, v))
    if l2norm:
        q, k = normalized(q), normalized(k)
    q, k = (t.repeat_interleave(each, 0) for t in (q, k))
    g, beta = g.to(dtype).t().clamp(min=-104.0), beta.to(dtype).t()
    parts = []
    for begin in range(0, q.shape[1], _CHUNK):
        rows = slice(begin, begin + _CHUNK)
        part, state = _chunk(q[:, rows], k[:, rows], v[:, rows], g[:, rows], beta[:, rows], state)
        parts.append(part)
    out = torch.cat(parts, 1) if parts else v.new_zeros(v.shape)
    return scale * out.transpose(0, 1), state


def _sequences(q: Tensor, cu: Tensor | None) -> Iterator[tuple[int, int | slice]]:
    """Yield each sequence's number, and what selects its rows."""
    if cu is None:
        yield from ((b, b) for b in range(q.shape[0]))
    else:
        ends = cu.tolist()
        yield from ((b, slice(ends[b], max(ends[b + 1], ends[b]))) for b in range(len(ends) - 1))


def _nothing(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=x.device)


def _initial(q: Tensor, v: Tensor, state: Tensor | None, b: int) -> Tensor:
    if state is not None:
        return state[b].to(_sums(q))
    return torch.zeros(v.shape[-2], q.shape[-1], v.shape[-1], dtype=_sums(q), device=q.device)


def forward(q, k, v, g, beta, initial_state, cu_seqlens, scale, l2norm=False, wants_state=True):
    """Return out, of q's dtype, and the final state (an empty tensor unless wanted)."""
    batch = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = torch.zeros(v.shape, dtype=q.dtype, device=q.device)
    final = torch.zeros(batch, v.shape[-2], q.shape[-1], v.shape[-1], dtype=_sums(q), device=q.device)
    for b, rows in _sequences(q, cu_seqlens):
        state = _initial(q, v, initial_state, b)
        part, final[b] = _one(q[rows], k[rows], v[rows], g[rows], beta[rows], state, scale, l2norm)
        out[rows] = part.to(q.dtype)
    return out, final if wants_state else _nothing(q)


def backward(
    dout, dfinal_state, q, k, v, g, beta, initial_state, cu_seqlens, scale, l2norm=False, needs_state=False
):  # fmt: skip
    """Return the gradients of q, k, v, g, beta and the initial state (an empty tensor unless needed)."""
    inputs = (q, k, v, g, beta)
    grads = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in inputs]
    batch = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dstate = torch.zeros(batch, v.shape[-2], q.shape[-1], v.shape[-1], dtype=_sums(q), device=q.device)
    for b, rows in _sequences(q, cu_seqlens):
        if not q[rows].shape[0]:
            dstate[b] = 0.0 if dfinal_state is None else dfinal_state[b]
            continue
        with torch.enable_grad():
            leaves = [t[rows].detach().to(_sums(q)).requires_grad_() for t in inputs]
            state = _initial(q, v, initial_state, b).detach().requires_grad_()
            out, final = _one(*leaves, state, scale, l2norm)
            outer = torch.zeros_like(final) if dfinal_state is None else dfinal_state[b].to(final.dtype)
            parts = torch.autograd.grad((out, final), (*leaves, state), (dout[rows].to(out.dtype), outer))
        for grad, part in zip(grads, parts[:5], strict=True):
            grad[rows] = part.to(grad.dtype)
        dstate[b] = parts[5]
    return *grads, dstate if needs_state else _nothing(q)


def step(q, k, v, g, beta, state, scale, l2norm=False):
    """Return out [batch, heads, width of v]; updates `state`."""
    each, result_dtype, dtype = v.shape[1] // max(q.shape[1], 1), v.dtype, _sums(v)
    q, k, v = (t.to(dtype) for t in (q, k, v))
    if l2norm:
        q, k = normalized(q), normalized(k)
    q, k = (t.repeat_interleave(each, 1) for t in (q, k))
    decayed = torch.exp(g.to(dtype)).unsqueeze(-1).unsqueeze(-1) * state.to(dtype)
    update = beta.to(dtype).unsqueeze(-1) * (v - (k.unsqueeze(-2) @ decayed).squeeze(-2))
    decayed = decayed + k.unsqueeze(-1) * update.unsqueeze(-2)
    state.copy_(decayed)
    return (scale * (q.unsqueeze(-2) @ decayed).squeeze(-2)).to(result_dtype)
