"""Latent attention (DeepSeek-V3 and its relatives): rotation, keys and values of all heads in one op.

As in ``fused_layers``, a module is replaced only if the sources of its methods are those this code was written for.
transformers keeps the latents in the cache and expands them in every call, so the op computes the keys and values of
calls whose cache was empty, or that have none; others run as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import rtkernels
from rtkernels.models import replace
from rtkernels.models.recognize import NotRecognized, Recognized
from rtkernels.models.rope_view import viewed

Forward = Callable[..., Any]
# Hashes of forward and expand_kv: DeepSeek-V3, GLM4-MoE-Lite, Youtu; transformers 5.17 to 5.23.
FORMS = (("c5276ee8780c6fcd", "b90d6aa936d075ac"),)
_ROTATIONS = {
    True: ("apply_rotary_pos_emb_interleave", "neighbours to halves"),
    False: ("apply_rotary_pos_emb", "halves"),
}


def is_latent(module: nn.Module) -> bool:
    """Return True if a module may be a latent attention."""
    return "kv_a_proj_with_mqa" in module._modules and hasattr(type(module), "expand_kv")


def kind_of(module: nn.Module, form_of: Callable[[Forward], str]) -> Recognized:
    """Return how a latent attention is replaced.

    Raises:
        NotRecognized: It is another one.
    """
    original = replace.original_of(type(module))
    if (form_of(original.forward), form_of(original.expand_kv)) not in FORMS:
        raise NotRecognized("its forward is none that is known here")
    kind = replace.replaced(module)
    names = dict(kind.options)["names"] if kind is not None and kind.kind == "rope" else ()
    interleaved = bool(module.config.rope_interleave)
    name, form = _ROTATIONS[interleaved]
    found = dict(names).get(name)
    if found is None or found[0] != form or "inverse" in found:
        raise NotRecognized("its rotation was not replaced")
    return Recognized("fused_mla", (("names", names), ("interleaved", interleaved)))


def _heads(
    self: nn.Module, x: Any, latent: Tensor, k_rot: Tensor, tables: Any, interleaved: bool
) -> tuple[Tensor, ...]:
    """Return q, k and v ``[batch, heads, tokens, size]``."""
    batch, tokens = x.shape[:2]
    q = self.q_proj(x) if self.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
    q = q.view(batch, tokens, -1, self.qk_head_dim)
    kv = self.kv_b_proj(latent).view(batch, tokens, -1, self.qk_nope_head_dim + self.v_head_dim)
    return rtkernels.mla_rope(q, kv, k_rot, *tables, layout="bshd", output_layout="bhsd", interleaved=interleaved)


def _attention(original: type[nn.Module], names: Any, interleaved: bool) -> Forward:
    separate, file = viewed(original.forward, dict(names)), original.forward.__globals__
    functions, eager = file["ALL_ATTENTION_FUNCTIONS"], file["eager_attention_forward"]

    def forward(
        self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs
    ):  # fmt: skip
        x, cache = hidden_states, past_key_values
        cos = position_embeddings[0]
        if len(x.shape) != 3 or (cache is not None and x.shape[1] == 1) or cos.shape[-1] != self.qk_rope_head_dim:
            return separate(self, x, position_embeddings, attention_mask, cache, **kwargs)
        latent, k_rot = self.kv_a_proj_with_mqa(x).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        latent = self.kv_a_layernorm(latent)
        q, k, v = _heads(self, x, latent, k_rot, position_embeddings, interleaved)
        if cache is not None:
            rotated = k[:, :1, :, self.qk_nope_head_dim :]  # the same in all heads
            kept = cache.update(latent.unsqueeze(1), rotated, self.layer_idx)
            if kept[0].shape[2] != x.shape[1]:
                k, v = self.expand_kv(*kept)
        attend = functions.get_interface(self.config._attn_implementation, eager)
        dropout = self.attention_dropout if self.training else 0.0
        mixed, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(mixed.reshape(*x.shape[:-1], -1).contiguous()), weights

    return forward


replace.register("fused_mla", _attention)
