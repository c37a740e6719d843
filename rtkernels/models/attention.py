"""Attention of transformers' models by ours, through its attention interface.

The interface is a table of functions by name; a model's configuration has the name. Registering a name changes no other
model. Masks: where transformers needs none (causal, without padding) ours is by lengths alone; where it makes one, of
booleans or numbers, it is added to the scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.models.recognize import NotRecognized

NAME = "rtkernels"
_BEFORE = "_rtkernels_attention_before"


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return ``[batch, queries, heads, width]`` of q, k and v ``[batch, heads, length, width]``, and None."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and attention_mask is None and query.shape[2] > 1
    if dropout or query.dtype not in (torch.bfloat16, torch.float16) or query.shape[-1] % 8 or query.shape[-1] > 256:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if softcap is None and s_aux is None:
            return ALL_ATTENTION_FUNCTIONS["sdpa"](
                module,
                query,
                key,
                value,
                attention_mask,
                dropout=dropout,
                scaling=scaling,
                is_causal=is_causal,
                **kwargs,
            )
    bias = attention_mask
    if bias is not None:
        bias = bias[..., : key.shape[2]]
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, -torch.inf)
        elif bias.dtype not in (query.dtype, torch.float32):
            bias = bias.to(query.dtype)
    out = rtkernels.attention(
        query, key, value, scale=scaling, causal=causal, softcap=softcap or 0.0, sinks=s_aux, bias=bias, layout="bhld"
    )
    return out.transpose(1, 2), None


def replace_attention(model: nn.Module) -> None:
    """Let a model's attention be ours.

    Raises:
        NotRecognized: The model does not use the attention interface.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    config = getattr(model, "config", None)
    before = getattr(config, "_attn_implementation", None)
    by_interface = getattr(model, "_supports_attention_backend", False) or getattr(model, "_supports_sdpa", False)
    if before is None or not by_interface:
        raise NotRecognized("it does not use the attention interface of transformers")
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(NAME)
    model.__dict__[_BEFORE] = before


def restore_attention(model: nn.Module) -> None:
    """Undo :func:`replace_attention`."""
    before = model.__dict__.pop(_BEFORE, None)
    if before is not None:
        model.set_attn_implementation(before)
