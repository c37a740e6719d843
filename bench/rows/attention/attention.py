"""Benchmark rows of ``attention``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from bench.rows.row import Row
from rtkernels.ops.attention.attention import BACKWARD, FORWARD, attention, attention_varlen

# batch, heads of q, heads of k and v, length, width, causal
_SIZES = (
    (4, 16, 16, 4096, 128, False),
    (4, 16, 16, 4096, 128, True),
    (1, 32, 8, 16384, 128, True),
    (4, 32, 32, 4096, 64, True),
    (2, 16, 16, 4096, 256, True),
)
BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}
_BACKWARD_SIZES = (_SIZES[0], _SIZES[1], _SIZES[3], _SIZES[4])


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    if causal:
        scores = scores + torch.full_like(scores[0, 0], float("-inf")).triu(1 + k.shape[2] - q.shape[2])
    return (scores.softmax(-1).to(q.dtype) @ v).transpose(1, 2)


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


def _of_head(q: torch.Tensor, k: torch.Tensor, head: int) -> slice:
    """Return the heads of q that share this one of k and v."""
    group = q.shape[2] // k.shape[2]
    return slice(head * group, (head + 1) * group)


def head_by_head(plain: Any, dtype: torch.dtype | None = None) -> Any:
    """Return `plain` applied to one sequence and one head of k and v at a time: all scores would not fit on a device.

    Args:
        plain: The forward of q, k and v in plain torch.
        dtype: What q, k and v are converted to before, unless None.
    """

    @functools.wraps(plain)  # peers differentiate what its signature names
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        sequences = []
        for b in range(q.shape[0]):
            heads = []
            for h in range(k.shape[2]):
                of_q = _of_head(q, k, h)
                given = (q[b : b + 1, :, of_q], k[b : b + 1, :, h : h + 1], v[b : b + 1, :, h : h + 1])
                heads.append(plain(*(t if dtype is None else t.to(dtype) for t in given)))
            sequences.append(torch.cat(heads, 2))
        return torch.cat(sequences)

    return run


def too_large(pairs: int) -> bool:
    """Return whether plain torch computes so many scores head by head, because it holds several copies of them."""
    return pairs > 1 << 31


def _gradients(plain: Any) -> Any:
    """Return a function for the gradients of q, k and v by autograd, one sequence and head of k and v at a time."""

    def run(dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
        results = [torch.empty_like(t) for t in (q, k, v)]
        for b in range(q.shape[0]):
            for h in range(k.shape[2]):
                at = [(slice(b, b + 1), slice(None), heads) for heads in (_of_head(q, k, h), *[slice(h, h + 1)] * 2)]
                leaves = [t[i].detach().requires_grad_() for t, i in zip((q, k, v), at, strict=True)]
                grads = torch.autograd.grad(plain(*leaves), leaves, dy[at[0]])
                for to, i, grad in zip(results, at, grads, strict=True):
                    to[i] = grad
        return tuple(results)

    return run


def backward_row(
    name: str, shape: str, make: Any, plain: Any, scale: float, causal: bool, products: int, nbytes: int
) -> Row:
    """Return a row of gradients, which are computed from q, k, v, the result and its lse.

    Args:
        name: Of the row.
        shape: That of the forward row.
        make: Of the forward row: q, k and v.
        plain: The forward in plain torch.
        scale: Factor of the products.
        causal: Whether the last query sees all keys.
        products: Operations of a forward and a backward product for each pair of a query and a key that see each other.
        nbytes: Bytes of all tensors.
    """
    options = (scale, -1, 0 if causal else -1, 0.0, 0, 0, False, "auto")

    def make_all(device: str, generator: torch.Generator) -> dict[str, Any]:
        given = make(device, generator)
        q, k, v = given["q"], given["k"], given["v"]
        out, lse = FORWARD(q, k, v, *[None] * 6, *options)
        dy = torch.randn(out.shape, device=device, generator=generator).to(out.dtype)
        # The last two are for peers.
        return {"dy": dy, "q": q, "k": k, "v": v, "out": out, "lse": lse, "causal": causal, "scale": scale}

    def ours(dy, q, k, v, out, lse, **_):
        return BACKWARD(dy, None, q, k, v, out, lse, *[None] * 6, *options, True, True, True, False, False)[:3]

    return Row(name=name, shape=shape, make=make_all, ours=ours, torch=_gradients(plain), bytes=nbytes, flops=products)


def _on_backend(name: str, causal: bool, backward: bool) -> Any:
    """Return an adapter of one backend of torch's attention."""

    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dy: torch.Tensor | None = None, **_: Any) -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, name)

        def forward(*given: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return _fused(*given, causal)

        if not backward:
            return lambda: forward(q, k, v)
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = forward(*leaves)
        return lambda: torch.autograd.grad(out, leaves, dy, retain_graph=True)

    return prepare


def backends(causal: bool, backward: bool) -> dict[str, Any]:
    """Return adapters of cuDNN's and flash attention in torch, which chooses one of them by itself."""
    return {key: _on_backend(name, causal, backward) for key, name in BACKENDS.items()}


def pair(batch: int, heads: int, heads_kv: int, length: int, width: int, causal: bool) -> tuple[Row, Row]:
    """Return the forward and the backward row of a size."""

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        shapes = {"q": heads, "k": heads_kv, "v": heads_kv}
        given = {
            name: torch.randn(batch, length, count, width, device=device, generator=generator).bfloat16()
            for name, count in shapes.items()
        }
        return {**given, "causal": causal}

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = causal) -> torch.Tensor:
        return _plain(q, k, v, causal)

    mask, pairs = "causal" if causal else "full", batch * heads * length**2 // (2 if causal else 1)
    shape = f"{batch}x{length} {heads}/{heads_kv} heads of {width} {mask}"
    forward = Row(
        name="attention_fwd",
        shape=shape,
        make=make,
        ours=lambda q, k, v, causal: attention(q, k, v, causal=causal),
        torch=head_by_head(plain) if too_large(batch * heads * length**2) else plain,
        exact=head_by_head(plain, torch.float64),
        fused=_fused,
        bytes=2 * batch * length * width * (2 * heads + 2 * heads_kv),
        flops=pairs * 4 * width,
        backends=backends(causal, backward=False),
    )
    backward = backward_row(
        "attention_bwd", shape, make, plain, width**-0.5, causal, pairs * 10 * width,
        2 * batch * length * width * (4 * heads + 4 * heads_kv),
    )  # fmt: skip
    return forward, dataclasses.replace(backward, backends=backends(causal, backward=True))


def rows() -> Iterator[Row]:
    for size in _SIZES:
        forward, backward = pair(*size)
        yield forward
        if size in _BACKWARD_SIZES:
            yield backward

    def make_packed(device: str, generator: torch.Generator) -> dict[str, Any]:
        qkv = torch.randn(16384, 3, 16, 128, device=device, generator=generator).bfloat16()
        ends = torch.arange(0, 16385, 2048, dtype=torch.int32, device=device)
        return {"q": qkv[:, 0], "k": qkv[:, 1], "v": qkv[:, 2], "ends": ends}

    yield Row(
        name="attention_varlen_fwd",
        shape="8 x 2048 of a packed qkv, 16 heads of 128 causal",
        make=make_packed,
        ours=lambda q, k, v, ends: attention_varlen(q, k, v, ends, ends, 2048, 2048, causal=True),
        torch=lambda q, k, v, ends: _plain(*(t.view(8, 2048, 16, 128) for t in (q, k, v)), True).flatten(0, 1),
        fused=lambda q, k, v, ends: _fused(*(t.view(8, 2048, 16, 128) for t in (q, k, v)), True).flatten(0, 1),
        bytes=2 * 16384 * 16 * 128 * 4,
        flops=8 * 16 * 2048**2 // 2 * 4 * 128,
    )
