"""Attention with the signature and the meaning of ``torch.nn.functional.scaled_dot_product_attention``."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.attention import attention
from rtkernels.runtime.call.public import public
from rtkernels.runtime.operator.arguments import Within
from rtkernels.runtime.operator.registry import Op

_NO_DROPOUT = Within("float", "dropout_p == 0", "0: attention here has no dropout (apply it to the result)")


@public(options={"dropout_p": _NO_DROPOUT})
def sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    *, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``F.scaled_dot_product_attention`` with our kernels; same arguments and result.

    It can replace torch's function: ``F.scaled_dot_product_attention = rtkernels.sdpa``. Differentiable in query, key
    and value. Unlike in ``attention``, `is_causal` is aligned to the first query and key, as in torch.

    Args:
        query: bfloat16 or float16 [..., heads, queries, width] (any number of leading dimensions).
        key: [..., heads, keys, width].
        value: [..., heads, keys, width of value].
        attn_mask: Broadcasts to [..., heads, queries, keys]: bool (True: attend), or floating-point, added to scores.
            Must not require a gradient.
        dropout_p: Must be 0.
        is_causal: Query i attends to keys up to i.
        scale: Factor of the scores. Default: ``1 / sqrt(width)``.
        enable_gqa: key and value may have fewer heads than query.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        [..., heads, queries, width of value], of query's dtype; 0 for queries whose keys are all masked.

    Raises:
        ArgumentError: dropout_p is not 0 (there is no dropout), or the arguments do not match.
    """
    if is_causal and attn_mask is not None:
        raise ArgumentError("attn_mask and is_causal are both given; expected one of them")
    if attn_mask is None and _fit(query, key, value, is_causal, enable_gqa):
        return attention(query, key, value, scale=scale, causal=is_causal, layout="bhld")
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, Tensor) or t.dim() < 2:
            raise ArgumentError(f"{name} is {_spelled(t)}; expected a tensor [..., heads, length, width]")
    if query.shape[-1] != key.shape[-1]:
        raise ArgumentError(f"key has a width of {key.shape[-1]}; expected {query.shape[-1]}, that of query")
    if query.dim() < 3 or key.dim() < 3 or value.dim() < 3:
        query, key, value = (t.unsqueeze(0) if t.dim() == 2 else t for t in (query, key, value))
        return sdpa(query, key, value, attn_mask, 0.0, is_causal, scale).squeeze(0)
    heads, batch = query.shape[-3], torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    if not enable_gqa:
        heads = torch.broadcast_shapes((heads,), (key.shape[-3],), (value.shape[-3],))[0]
    queries, keys = query.shape[-2], key.shape[-2]
    q = query.expand(*batch, heads, *query.shape[-2:])
    k, v = ((t if enable_gqa else t.expand(*t.shape[:-3], heads, *t.shape[-2:])) for t in (key, value))
    k, v = (t.expand(*batch, *t.shape[-3:]) for t in (k, v))
    q, k, v = (t.reshape(batch.numel(), *t.shape[-3:]) for t in (q, k, v))
    bias = _as_bias(attn_mask, query, (*batch, heads, queries, keys))
    window = None
    if is_causal:
        # Ours aligns the last query with the last key: keys that nobody sees go, queries behind the last key see all.
        k, v = k[..., :queries, :], v[..., :queries, :]
        window = (None, max(queries - keys, 0))
    result = attention(q, k, v, scale=scale, window=window, bias=bias, layout="bhld")
    return result.reshape(*batch, *result.shape[-3:])


def _fit(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool) -> bool:
    """Return whether ``attention`` accepts these without broadcasting, which saves host time."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return False
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    (batch, heads, queries, _), of_key, of_value = query.shape, key.shape, value.shape
    return (
        of_key[:3] == of_value[:3]
        and of_key[0] == batch
        and (enable_gqa or of_key[1] == heads)
        and (not is_causal or of_key[2] == queries)
    )


def _as_bias(mask: Tensor | None, query: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    if mask is None:
        return None
    try:
        mask = mask.expand(shape)
    except RuntimeError:
        raise ArgumentError(
            f"attn_mask has shape {tuple(mask.shape)}; expected one that broadcasts to {shape}"
        ) from None
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=mask.device)
        mask = torch.where(_collapsed(mask), zero, float("-inf")).expand(shape)
    return mask if len(shape) == 4 else mask.reshape(-1, *shape[-3:])


def _collapsed(mask: Tensor) -> Tensor:
    """Return a mask with a size of 1 in place of dimensions that were expanded, so that they are not written out."""
    for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if size > 1 and stride == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _spelled(t: object) -> str:
    return f"of shape {tuple(t.shape)}" if isinstance(t, Tensor) else f"a {type(t).__name__}"


OP = Op("sdpa", public=("sdpa",), kernels=(), torch_ops=(), uses=("attention", "decode"))
