"""Multi-head latent attention in training: heads of q and k wider than those of v, by the kernels of ``attention``."""

from __future__ import annotations

from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import attention as base
from rtkernels.ops.attention.checks import LAYOUT, check_dims
from rtkernels.ops.attention.options import check_backend, default_scale, window_sides
from rtkernels.runtime.call.public import public
from rtkernels.runtime.operator.arguments import Within, check_integer
from rtkernels.runtime.operator.registry import Op

_CLIP_VALUE = Within("float", "0.0 < clip_value < float('inf')", "a positive number, or None for no limit")


@public(options={"layout": LAYOUT, "clip_value": _CLIP_VALUE})
def mla_attention(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, scale: float | None = None, causal: bool = True,
    clip_value: float | None = None, return_lse: bool = False, layout: str = "blhd", backend: str = "auto",
    out: Tensor | tuple[Tensor | None, ...] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return multi-head latent attention with keys and values expanded from the latent, the form used in training.

    Runs the kernels of ``attention`` and ``attention_varlen``: differentiable and deterministic, the heads of k divide
    those of q, and k and v may have different widths (192 and 128 for DeepSeek). Use ``mla_decode`` to decode from the
    latent.

    Args:
        q: bfloat16 or float16 [batch, queries, heads, width], or [tokens, heads, width] of packed sequences.
        k: [batch, keys, heads, width], or [tokens of keys, heads, width].
        v: Like k; its width may differ.
        cu_seqlens_q: int32 [sequences + 1] on the device, for packed sequences.
        cu_seqlens_k: The same for k and v. Default: `cu_seqlens_q`.
        max_seqlen_q: An upper bound of the queries in a packed sequence. Default: all tokens.
        max_seqlen_k: The same for keys. Default: `max_seqlen_q` if `cu_seqlens_k` is None.
        scale: Factor of the scores. Default: ``1 / sqrt(width of q)``.
        causal: Causal mask aligned to the last query, which attends to all keys.
        clip_value: Positive upper limit of the products of q and k, before `scale`. Default: no limit. Gradients ignore
            the limit.
        return_lse: Also return the log-sum-exp (lse) of the scores.
        layout: "blhd" or "bhld", the layout of q, k, v and the result; ignored for packed sequences.
        backend: "auto", or the name of a backend.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        The result of ``attention`` or ``attention_varlen``.
    """
    if cu_seqlens_q is None and cu_seqlens_k is not None:
        raise ArgumentError("cu_seqlens_k is given without cu_seqlens_q; expected both, or neither")
    dims = 4 if cu_seqlens_q is None else 3
    check_dims(dims, q=q, k=k, v=v)
    check_backend(backend)
    factor = default_scale(scale, q)
    cut_off = 0.0 if clip_value is None else -float(clip_value) * factor
    left, right = window_sides(None, causal)
    heads_first = layout == "bhld" and dims == 4
    if heads_first:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    lengths = (0, 0)
    if cu_seqlens_q is not None:
        lengths = _largest(q, k, cu_seqlens_k is None, max_seqlen_q, max_seqlen_k)
        if cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q:
            cu_seqlens_k = cu_seqlens_q.view(-1)  # Dynamo takes no tensor twice
    tensors = (q, k, v, None, None, None, None, cu_seqlens_q, cu_seqlens_k)
    out, lse = base.run(tensors, (factor, left, right, cut_off, *lengths, heads_first, backend), None)
    out = out.transpose(1, 2) if heads_first else out
    return (out, lse) if return_lse else out


def _largest(q: Tensor, k: Tensor, same: bool, of_q: int | None, of_k: int | None) -> tuple[int, int]:
    of_k = of_q if of_k is None and same else of_k
    return (
        q.shape[0] if of_q is None else check_integer("max_seqlen_q", of_q),
        k.shape[0] if of_k is None else check_integer("max_seqlen_k", of_k),
    )


OP = Op("mla", public=("mla_attention",), kernels=(), torch_ops=(), uses=("attention", "decode"))
