"""What an attention is, as plain data: the same description serves every operator and every backend.

For a sequence b and a head h, whose keys are those of head ``h // (heads_q // heads_kv)``::

    s[i, j] = scale * sum over d of q[i, d] * k[j, d]
    s       = softcap * tanh(s / softcap)           where there is a softcap
    s       = min(s, -softcap)                      where that is negative; its derivative counts as 1
    s       = s + bias[b, h, i, j]                  where there is a bias
    lse[i]  = log(sum over seen j of exp(s[i, j]) + exp(sinks[h]))
    out[i]  = sum over seen j of exp(s[i, j] - lse[i]) * v[j]

Query i sees keys ``lo(i) <= j < hi(i)``; with ``keys = min(lkv, lengths[b])`` (``lkv`` without lengths) and
``shift = keys - lq``, which aligns the last query with the last key::

    lo(i) = max(0, i + shift - left)                 0 without a left limit
    hi(i) = min(keys, i + shift + right + 1, kv_limit[b, i])       causal: right is 0

A query that sees nothing has out 0 and lse ``-inf`` (the sink alone, where there is one).

A backend (``ops/shared/backend.py``) returns the launches: of the forward pass, or of the backward pass if ``backward``
is set. Its steps name their tensors ``q``, ``k``, ``v``, ``sinks``, ``bias``, ``lengths``, ``kv_limit``, ``cu_q``,
``cu_k``, ``out`` and ``lse`` (which always exists), backward ``dout``, ``dlse``, ``dq``, ``dk``, ``dv``, ``dsinks``,
``dbias`` as well. What is absent has the address 0.

Shapes. Without ``varlen``: q [batch, lq, heads_q, d_qk], k [batch, lkv, heads_kv, d_qk], v [.., d_v], out [batch, lq,
heads_q, d_v], lse and dlse fp32 [batch, heads_q, lq], dense. With it, q is [total_q, heads_q, d_qk] and so on, sequence
b has rows cu_q[b] to cu_q[b + 1] and keys cu_k[b] to cu_k[b + 1] (int32 [batch + 1]), lq and lkv are the largest
lengths, and lse is [heads_q, total_q]. lengths is int32 [batch]. sinks is [heads_q], dsinks fp32 [heads_q]. dbias is
dense, of the bias's shape and dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rtkernels.runtime.operator.plan import Memory


class Strides(NamedTuple):
    """Elements from one sequence, row (token) and head to the next; elements of a head are contiguous.

    ``aligned``: the address and all three are multiples of 16 bytes. ``batch`` is 0 of packed sequences.
    """

    batch: int
    row: int
    head: int
    aligned: bool = True


class Bias(NamedTuple):
    """An additive bias [batch or 1, heads_q or 1, lq, lkv]: its type, strides in elements (0: broadcast), and sizes."""

    token: str
    batch: int
    head: int
    row: int
    column: int
    batches: int = 1
    heads: int = 1


class Attention(NamedTuple):
    """One attention. ``token``: "bf16" or "fp16", of q, k, v, out and all gradients but that of sinks.

    ``left``, ``right``: how many keys to each side of its own a query sees, -1 for all; causal is right = 0.
    ``softcap``: 0 for none, negative for a cut-off. ``sinks``: element type, None for none. ``lengths``, ``varlen``:
    there are such tensors. ``kv_limit``: None, or elements from one sequence's limits (int32, one per query) to the
    next one's, 0 if they are shared. ``total_q``, ``total_k``: rows of packed sequences. ``dlse``: backward has a
    gradient of lse. ``wants``: gradients that backward makes, of "q", "k", "v", "s" (sinks), "b" (bias). ``dout``,
    ``dq``, ``dk``, ``dv``: as for q; None for dense.
    """

    batch: int
    heads_q: int
    heads_kv: int
    lq: int
    lkv: int
    d_qk: int
    d_v: int
    token: str
    q: Strides
    k: Strides
    v: Strides
    out: Strides
    scale: float
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    sinks: str | None = None
    bias: Bias | None = None
    lengths: bool = False
    kv_limit: int | None = None
    varlen: bool = False
    total_q: int = 0
    total_k: int = 0
    dout: Strides | None = None
    dlse: bool = False
    wants: str = "qkv"
    dq: Strides | None = None
    dk: Strides | None = None
    dv: Strides | None = None
    backward: bool = False

    @property
    def title(self) -> str:
        """Sizes and type, for messages."""
        rows = f"{self.rows_q} x {self.rows_k} packed" if self.varlen else f"{self.batch} x {self.lq} x {self.lkv}"
        heads = f"{self.heads_q} heads" if self.group == 1 else f"{self.heads_q} heads over {self.heads_kv}"
        width = f"{self.d_qk}" if self.d_qk == self.d_v else f"{self.d_qk} and {self.d_v}"
        return f"{rows}, {heads} of {width} elements, {self.token}{', backward' if self.backward else ''}"

    @property
    def group(self) -> int:
        """Query heads that share a head of keys."""
        return self.heads_q // self.heads_kv

    @property
    def rows_q(self) -> int:
        """Rows of q in all sequences."""
        return self.total_q if self.varlen else self.batch * self.lq

    @property
    def rows_k(self) -> int:
        """Rows of k in all sequences."""
        return self.total_k if self.varlen else self.batch * self.lkv

    def lse_strides(self) -> tuple[int, int]:
        """Elements of lse from one sequence to the next (0 of packed ones, whose rows differ) and from head to head."""
        return (0, self.total_q) if self.varlen else (self.heads_q * self.lq, self.lq)


def key_gradients(problem: Attention) -> tuple[tuple[str, str], dict[str, Memory]]:
    """Return the outputs of kernels that compute both dk and dv, and scratch for one that was not requested."""
    p, scratch = problem, {}
    names = tuple(f"d{x}" if x in p.wants else f"unwanted_d{x}" for x in "kv")
    keys = (p.total_k,) if p.varlen else (p.batch, p.lkv)
    for name, d in zip(names, (p.d_qk, p.d_v), strict=True):
        if name.startswith("unwanted"):
            scratch[name] = Memory((*keys, p.heads_kv, d), torch.bfloat16 if p.token == "bf16" else torch.float16)
    return names, scratch


def dense(rows: int, heads: int, width: int, varlen: bool) -> Strides:
    """Return the strides of a dense tensor [batch, rows, heads, width], or of packed sequences."""
    return Strides(0 if varlen else rows * heads * width, heads * width, width, heads * width * 2 % 16 == 0)
