"""The gated delta rule in plain torch: what CPU tensors run, and what tests compare with; fp32, fp64 for float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rtkernels.ops.attention.delta_gates import log_decay, strength

_CHUNK = 64


def sums(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def normalized(x: Tensor) -> Tensor:
    """Return x over its Euclidean norm, as ``l2norm`` has it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class _Chunk:
    """One chunk [heads, length, width] behind a state; names as in gated_delta_rule.cuh.

    If it is not `corrected`, updates are beta v: the state does not meet keys.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, corrected: bool = True
    ) -> None:
        self.corrected = corrected
        self.q, self.k, self.v, self.beta, self.state, length = q, k, v, beta.unsqueeze(-1), state, q.shape[1]
        c = g.cumsum(-1)
        lower = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        self.decays = torch.exp((c.unsqueeze(-1) - c.unsqueeze(-2)).masked_fill(~lower, -torch.inf))
        self.before, self.after = torch.exp(c).unsqueeze(-1), torch.exp(c[:, -1:] - c).unsqueeze(-1)
        self.whole = torch.exp(c[:, -1]).view(-1, 1, 1)
        self.inner = q @ k.mT * self.decays
        if not corrected:
            self.rest, self.update = v, self.beta * v
            return
        self.keys = (k @ k.mT * self.decays).tril(-1)
        self.solved = torch.eye(length, dtype=q.dtype, device=q.device) + self.beta * self.keys
        self.rest = v - self.before * (k @ state)
        self.update = torch.linalg.solve_triangular(self.solved, self.beta * self.rest, upper=False, unitriangular=True)

    def results(self) -> tuple[Tensor, Tensor]:
        """Return out (without the scale) and the state behind the chunk."""
        out = self.before * (self.q @ self.state) + self.inner @ self.update
        return out, self.whole * self.state + (self.after * self.k).mT @ self.update

    def gradients(self, dout: Tensor, dstate: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v, g, beta and the state. `dout`: of out, `dstate`: of the state behind."""
        q, k, beta, before, after = self.q, self.k, self.beta, self.before, self.after
        dupdate = self.inner.mT @ dout + after * (k @ dstate)
        drest = dupdate
        if self.corrected:
            drest = torch.linalg.solve_triangular(self.solved.mT, dupdate, upper=True, unitriangular=True)
        dinner = (dout @ self.update.mT).tril()
        x, by_query, later = dinner * self.decays, dout @ self.state.mT, after * (self.update @ dstate.mT)
        dq = x @ k + before * by_query
        dk = x.mT @ q + later
        dbeta = (drest * self.rest).sum(-1)
        # What does not decay would cancel, and hide in its roundings what strong decays leave.
        weights, s = (dinner * self.inner).tril(-1), (k * later).sum(-1)
        s[:, -1] = 0.0
        dc = weights.sum(-1) - weights.sum(-2) - s + (before * q * by_query).sum(-1)
        dc[:, -1] += s.sum(-1) + (self.whole * self.state * dstate).sum((-2, -1))
        before_chunk = self.whole * dstate + (before * q).mT @ dout
        if self.corrected:
            dmatrix, by_state = -(drest @ self.update.mT).tril(-1), drest @ self.state.mT
            slope, weights = beta * dmatrix * self.decays, dmatrix * beta * self.keys
            dk = dk + (slope + slope.mT) @ k - beta * before * by_state
            dbeta = dbeta + (dmatrix * self.keys).sum(-1)
            dc = dc + weights.sum(-1) - weights.sum(-2) - (beta * before * k * by_state).sum(-1)
            before_chunk = before_chunk - (beta * before * k).mT @ drest
        dg = dc.flip(-1).cumsum(-1).flip(-1)
        return dq, dk, beta * drest, dg, dbeta, before_chunk


class _ChannelChunk:
    """The same with a decay for each channel of keys: g [heads, length, width]."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> None:
        self.q, self.k, self.v, self.beta, self.state, length = q, k, v, beta.unsqueeze(-1), state, q.shape[1]
        c = g.cumsum(1)
        lower = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().unsqueeze(-1)
        decays = torch.exp((c.unsqueeze(2) - c.unsqueeze(1)).masked_fill(~lower, -torch.inf))
        self.decayed = decays * k.unsqueeze(1)  # keys of earlier tokens, as later ones see them
        self.decays = decays
        self.before, self.after, self.whole = torch.exp(c), torch.exp(c[:, -1:] - c), torch.exp(c[:, -1]).unsqueeze(-1)
        self.inner = torch.einsum("hid,hijd->hij", q, self.decayed)
        keys = torch.einsum("hid,hijd->hij", k, self.decayed).tril(-1)
        self.solved = torch.eye(length, dtype=q.dtype, device=q.device) + self.beta * keys
        rest = self.beta * (v - (self.before * k) @ state)
        self.update = torch.linalg.solve_triangular(self.solved, rest, upper=False, unitriangular=True)

    def results(self) -> tuple[Tensor, Tensor]:
        """Return out (without the scale) and the state behind the chunk."""
        out = (self.before * self.q) @ self.state + self.inner @ self.update
        return out, self.whole * self.state + (self.after * self.k).mT @ self.update

    def gradients(self, dout: Tensor, dstate: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v, g, beta and the state; names as in kda_grads.cu."""
        q, k, beta, before = self.q, self.k, self.beta, self.before
        dupdate = self.inner.mT @ dout + (self.after * k) @ dstate
        drest = torch.linalg.solve_triangular(self.solved.mT, dupdate, upper=True, unitriangular=True)
        x, n = dout @ self.update.mT, -(drest @ self.update.mT).tril(-1)
        # dq and z without what does not decay, the same token's and the last token's part: as above.
        own, x = x.diagonal(dim1=1, dim2=2).unsqueeze(-1), x.tril(-1)
        dq = torch.einsum("hij,hijd->hid", x, self.decayed) + before * (dout @ self.state.mT)
        y = torch.einsum("hij,hijd->hid", n, self.decayed) - before * (drest @ self.state.mT)
        later = self.after * (self.update @ dstate.mT)
        last = later[:, -1].clone()
        later[:, -1] = 0.0
        columns = x.unsqueeze(-1) * q.unsqueeze(2) + (beta * n).unsqueeze(-1) * k.unsqueeze(2)
        z = (self.decays * columns).sum(1) + later
        dc = q * dq + beta * k * y - k * z
        dc[:, -1] += (k * later).sum(1) + self.whole.squeeze(-1) * (self.state * dstate).sum(-1)
        dq, z = dq + own * k, z + own * q
        z[:, -1] += last
        dbeta = (drest * self.v).sum(-1) + (k * y).sum(-1)
        before_chunk = self.whole * dstate + (before * q).mT @ dout - (beta * before * k).mT @ drest
        return dq, beta * y + z, beta * drest, dc.flip(1).cumsum(1).flip(1), dbeta, before_chunk


def _chunks(q, k, v, g, beta, state: Tensor, l2norm: bool, corrected: bool = True) -> Iterator[_Chunk | _ChannelChunk]:
    """Yield the chunks of one sequence [length, heads, width]."""
    dtype, each = sums(q), v.shape[1] // max(q.shape[1], 1)
    q, k, v = (t.to(dtype).transpose(0, 1) for t in (q, k, v))
    if l2norm:
        q, k = normalized(q), normalized(k)
    q, k = (t.repeat_interleave(each, 0) for t in (q, k))
    g, beta = g.to(dtype).transpose(0, 1).clamp(min=-104.0), beta.to(dtype).t()
    for begin in range(0, q.shape[1], _CHUNK):
        rows = slice(begin, begin + _CHUNK)
        parts = (q[:, rows], k[:, rows], v[:, rows], g[:, rows], beta[:, rows], state)
        chunk = _ChannelChunk(*parts) if g.dim() == 3 else _Chunk(*parts, corrected)
        state = chunk.results()[1]
        yield chunk


def one(
    q, k, v, g, beta, state: Tensor, scale: float, l2norm: bool, corrected: bool = True
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out and the final state of one sequence [length, heads, width]."""
    parts = []
    for chunk in _chunks(q, k, v, g, beta, state, l2norm, corrected):
        part, state = chunk.results()
        parts.append(part)
    out = torch.cat(parts, 1).transpose(0, 1) if parts else v.new_zeros(v.shape, dtype=sums(v))
    return scale * out, state


def _norm_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of x from that of ``normalized(x)``."""
    factor = torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    y = factor * x
    return factor * (dy - y * (y * dy).sum(-1, keepdim=True))


def one_backward(
    dout, dstate: Tensor, q, k, v, g, beta, state: Tensor, scale: float, l2norm: bool, corrected: bool = True
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, g, beta and the state of one sequence."""
    dout, found = (scale * dout.to(sums(q))).transpose(0, 1), []
    for number, chunk in reversed(list(enumerate(_chunks(q, k, v, g, beta, state, l2norm, corrected)))):
        *grads, dstate = chunk.gradients(dout[:, number * _CHUNK : (number + 1) * _CHUNK], dstate)
        found.insert(0, grads)
    dq, dk, dv, dg, dbeta = (torch.cat(parts, 1).transpose(0, 1) for parts in zip(*found, strict=True))
    dq, dk = (t.unflatten(1, (q.shape[1], -1)).sum(2) for t in (dq, dk))
    if l2norm:
        dq, dk = _norm_gradient(q.to(dq.dtype), dq), _norm_gradient(k.to(dk.dtype), dk)
    return [dq, dk, dv, dg, dbeta, dstate]


def sequences(q: Tensor, cu: Tensor | None) -> Iterator[tuple[int, int | slice]]:
    """Yield each sequence's number, and what selects its rows."""
    if cu is None:
        yield from ((b, b) for b in range(q.shape[0]))
    else:
        ends = cu.tolist()
        yield from ((b, slice(ends[b], max(ends[b + 1], ends[b]))) for b in range(len(ends) - 1))


def nothing(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=x.device)


def initial(q: Tensor, v: Tensor, state: Tensor | None, b: int) -> Tensor:
    if state is not None:
        return state[b].to(sums(q))
    return torch.zeros(v.shape[-2], q.shape[-1], v.shape[-1], dtype=sums(q), device=q.device)


def forward(q, k, v, g, beta, initial_state, cu_seqlens, scale, l2norm=False, wants_state=True):
    """Return out, of q's dtype, and the final state (an empty tensor unless wanted)."""
    batch = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = torch.zeros(v.shape, dtype=q.dtype, device=q.device)
    final = torch.zeros(batch, v.shape[-2], q.shape[-1], v.shape[-1], dtype=sums(q), device=q.device)
    for b, rows in sequences(q, cu_seqlens):
        state = initial(q, v, initial_state, b)
        part, final[b] = one(q[rows], k[rows], v[rows], g[rows], beta[rows], state, scale, l2norm)
        out[rows] = part.to(q.dtype)
    return out, final if wants_state else nothing(q)


def backward(
    dout, dfinal_state, q, k, v, g, beta, initial_state, cu_seqlens, scale, l2norm=False, needs_state=False
):  # fmt: skip
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
        parts = one_backward(dout[rows], outer, *(t[rows] for t in inputs), state, scale, l2norm)
        for grad, part in zip(grads, parts[:5], strict=True):
            grad[rows] = part.to(grad.dtype)
        dstate[b] = parts[5]
    return *grads, dstate if needs_state else nothing(q)


def step(
    q, k, v, g, beta, state, A_log=None, dt_bias=None, slots=None, scale=1.0, l2norm=False, lower_bound=0.0,
    sigmoid=False, factor=1.0,
):  # fmt: skip
    """Return out [batch, heads, width of v]; updates `state`."""
    if slots is not None:
        fits = ((slots >= 0) & (slots < state.shape[0])).nonzero().flatten()
        places, out = slots[fits].long(), torch.zeros(v.shape, dtype=v.dtype, device=v.device)
        rows, own = (t if t is None else t[fits] for t in (q, k, v, g, beta)), state[places]
        out[fits] = step(*rows, own, A_log, dt_bias, None, scale, l2norm, lower_bound, sigmoid, factor)
        state[places] = own
        return out
    each, result_dtype, dtype = v.shape[1] // max(q.shape[1], 1), v.dtype, sums(v)
    q, k, v = (t.to(dtype) for t in (q, k, v))
    if l2norm:
        q, k = normalized(q), normalized(k)
    q, k = (t.repeat_interleave(each, 1) for t in (q, k))
    g = beta.new_zeros(beta.shape) if g is None else g
    g = log_decay(g.flatten(1), A_log, dt_bias, lower_bound).view(g.shape).to(dtype)
    decay = torch.exp(g) if g.dim() == 3 else torch.exp(g).unsqueeze(-1)
    decayed = decay.unsqueeze(-1) * state.to(dtype)
    update = strength(beta.to(dtype), sigmoid, factor).unsqueeze(-1) * (v - (k.unsqueeze(-2) @ decayed).squeeze(-2))
    decayed = decayed + k.unsqueeze(-1) * update.unsqueeze(-2)
    state.copy_(decayed)
    return (scale * (q.unsqueeze(-2) @ decayed).squeeze(-2)).to(result_dtype)
