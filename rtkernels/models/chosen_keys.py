"""DeepSeek's sparse attention (DeepSeek-V3.2, GLM-MoE-DSA): the indexer with ``indexer_logits``, and ``sparse_mla``.

As in ``fused_layers``, a module is replaced only if the sources of its methods are those this code was written for.

The indexer returns what transformers' returns, without a score for every head in memory. The attention that follows
reads the latents of the chosen keys, while transformers expands all latents to heads and masks those that were not
chosen. That is another order of the same products, so it is done where it takes fewer of them (decoding, and prompts
much longer than the choice), in 16 bits and without gradients; other calls run the model's own attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.models import replace
from rtkernels.models.fused_layers import form_of
from rtkernels.models.merged import has_watched_child, is_plain
from rtkernels.models.probe import HALVES, NotRecognized, Recognized
from rtkernels.models.rope_view import replaced_global, viewed
from rtkernels.models.rotations import rope

Forward = Callable[..., Any]
Names = tuple[tuple[str, tuple[str, ...]], ...]
# Hashes of the forward; transformers 5.23: DeepSeek-V3.2, GLM-MoE-DSA.
INDEXERS = {"7c7a5e6f91d64075": "apply_rotary_pos_emb", "7bf95bc551fba83c": "apply_rotary_pos_emb_interleave"}
# Hashes of forward and expand_kv; whether the forward returns the indices, too.
ATTENTIONS = {("7149a4be7547346b", "b90d6aa936d075ac"): False, ("d72f757569f62f43", "b90d6aa936d075ac"): True}
_MAX_LATENT, _MAX_WIDTH, _MAX_INDEX_WIDTH = 512, 576, 128  # of sparse_mla and indexer_logits
_SCORES = 2**24  # at a time


def is_known(module: nn.Module) -> bool:
    """Return True if a module is an attention over keys that an indexer chooses, in a form that is known here."""
    return hasattr(module, "indexer") and _form(module) is not None


def _form(module: nn.Module) -> bool | None:
    original = replace.original_of(type(module))
    expand = getattr(original, "expand_kv", None)
    return None if expand is None else ATTENTIONS.get((form_of(original.forward), form_of(expand)))


def replace_both(module: nn.Module) -> None:
    """Give an attention and its indexer our forwards.

    Raises:
        NotRecognized: The indexer is another one, or an instance has a forward of its own.
    """
    replace.check_own_forward(module)
    names = _names(module)
    if module.indexer is not None:
        replace.change(module.indexer, _indexer_kind(module.indexer, bool(names)))
    options = (("names", names), ("with_indices", _form(module)))
    replace.change(module, Recognized("chosen_keys", options))


def _indexer_kind(module: nn.Module, rotates: bool) -> Recognized:
    """Return how an indexer is replaced; its rotation, too, if that of its attention was."""
    forward = replace.original_of(type(module)).forward
    # torch.no_grad() wraps it; a wrapper of another library may do anything.
    plain = getattr(forward, "__globals__", {}).get("__name__") == "torch.utils._contextlib"
    rotation = INDEXERS.get(form_of(inspect.unwrap(forward))) if plain else None
    if rotation is None:
        raise NotRecognized("the forward of its indexer is none that is known here")
    names = ((rotation, rope(inspect.unwrap(forward).__globals__[rotation])),) if rotates else ()
    return Recognized("indexer", (("names", names), ("rotation", rotation)))


def _names(module: nn.Module) -> Names:
    """Return which rotations of a module's file are replaced."""
    kind = replace.replaced(module)
    return dict(kind.options)["names"] if kind is not None and kind.kind == "rope" else ()


# ---- the indexer ----------------------------------------------------------------------------------------------------


def _indexer(original: type[nn.Module], names: Names, rotation: str) -> Forward:
    own, rotate = original.forward, replaced_global(inspect.unwrap(original.forward), names, rotation)

    @torch.no_grad()
    def forward(
        self, hidden_states, q_resid, position_embeddings, attention_mask, position_ids=None, past_key_values=None
    ):  # fmt: skip
        x, width, rotary = hidden_states, self.head_dim, self.qk_rope_head_dim
        halves = x.dtype in HALVES and self.wq_b.weight.dtype == self.wk.weight.dtype == x.dtype
        if not halves or width % 8 or width > _MAX_INDEX_WIDTH or torch.is_autocast_enabled(x.device.type):
            return own(self, x, q_resid, position_embeddings, attention_mask, position_ids, past_key_values)
        q = self.wq_b(q_resid).view(*x.shape[:2], self.n_heads, width)
        k = self.k_norm(self.wk(x)).unsqueeze(2)
        heads = [t.split([rotary, width - rotary], -1) for t in (q, k)]
        rotated = rotate(heads[0][0], heads[1][0], *position_embeddings, unsqueeze_dim=2)
        q, k = (torch.cat((a, b[1]), -1) for a, b in zip(rotated, heads, strict=True))
        k = k.squeeze(2)
        if past_key_values is not None:
            k = past_key_values.update_indexer(k, self.layer_idx)
        weights = self.weights_proj(x.to(self.weights_proj.weight.dtype)).float()
        return _best(q, k, weights * (self.n_heads**-0.5 * self.softmax_scale), attention_mask, self.index_topk)

    return forward


def _best(q: Tensor, k: Tensor, weights: Tensor, mask: Tensor, count: int) -> Tensor:
    """Return the indices of the best keys ``[batch, tokens, count or keys]``, int32, in any order."""
    batch, tokens, keys = q.shape[0], q.shape[1], k.shape[1]
    count, best = min(count, keys), torch.empty((batch, tokens, min(count, keys)), dtype=torch.int32, device=q.device)
    if tokens == 1:  # all sequences at once: each is a page of keys
        table = torch.arange(batch, dtype=torch.int32, device=q.device).unsqueeze(1)
        logits = rtkernels.indexer_logits(q[:, 0], k.contiguous(), weights[:, 0], page_table=table)
        return _top(logits.unsqueeze(1), mask, count)
    step = max(_SCORES // max(keys, 1), 1)
    for b in range(batch):
        own = mask[b if mask.shape[0] > 1 else 0]
        for first in range(0, tokens, step):
            rows = slice(first, first + step)
            logits = rtkernels.indexer_logits(q[b, rows], k[b], weights[b, rows])
            best[b, rows] = _top(logits, own[rows], count)
    return best


def _top(logits: Tensor, mask: Tensor, count: int) -> Tensor:
    logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    return logits.topk(count, dim=-1).indices.int()


# ---- the attention --------------------------------------------------------------------------------------------------


def _fits(self: nn.Module, x: Tensor, mask: Any, given: dict[str, Any]) -> bool:
    """Return True if a call can read latents: no gradients or dropout, 16 bits, a boolean mask, a plain expansion."""
    latent, rotary, expand = self.kv_lora_rank, self.qk_rope_head_dim, self.kv_b_proj
    return (
        x.dtype in HALVES
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
        and not (self.training and self.attention_dropout)
        and not given.get("output_attentions")
        and isinstance(mask, Tensor)
        and mask.dtype == torch.bool
        and mask.dim() == 4
        and is_plain(expand)
        and expand.bias is None
        and expand.weight.dtype == x.dtype
        and not has_watched_child(self, [name for name in self._modules if name != "kv_b_proj"])
        and latent % 8 == rotary % 8 == 0
        and latent <= _MAX_LATENT
        and latent + rotary <= _MAX_WIDTH
    )


def _takes_fewer_products(self: nn.Module, tokens: int, keys: int, chosen: int) -> bool:
    """Return True if a head of all tokens takes fewer multiplications by latents than by expanded keys."""
    latent, expanded = self.kv_lora_rank, self.qk_nope_head_dim + self.v_head_dim
    by_latents = tokens * chosen * (2 * latent + self.qk_rope_head_dim) + tokens * latent * expanded
    return by_latents < tokens * keys * (expanded + self.qk_rope_head_dim) + keys * latent * expanded


def _attention(original: type[nn.Module], names: Names, with_indices: bool) -> Forward:
    separate = viewed(original.forward, dict(names))
    rotate = replaced_global(original.forward, names, "apply_rotary_pos_emb_interleave")

    def forward(
        self, hidden_states, position_embeddings, attention_mask, past_key_values=None, position_ids=None,
        prev_topk_indices=None, **kwargs,
    ):  # fmt: skip
        x, mask, cache = hidden_states, attention_mask, past_key_values
        keys = mask.shape[-1] if isinstance(mask, Tensor) else 0
        chosen = min(keys, self.config.index_topk)
        if not _fits(self, x, mask, kwargs) or not _takes_fewer_products(self, x.shape[1], keys, chosen):
            more = {"prev_topk_indices": prev_topk_indices} if with_indices else {}
            return separate(self, x, position_embeddings, mask, cache, position_ids, **more, **kwargs)
        (batch, tokens), sizes = x.shape[:2], [self.qk_nope_head_dim, self.qk_rope_head_dim]
        latent, width = self.kv_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim
        q_resid = self.q_a_layernorm(self.q_a_proj(x))
        heads = self.q_b_proj(q_resid).view(batch, tokens, -1, self.qk_head_dim).transpose(1, 2)
        q_pass, q_rot = heads.split(sizes, -1)
        kv, k_rot = self.kv_a_proj_with_mqa(x).split([latent, self.qk_rope_head_dim], -1)
        kv = self.kv_a_layernorm(kv).unsqueeze(1)
        q_rot, k_rot = rotate(q_rot, k_rot.unsqueeze(1), *position_embeddings)
        if cache is not None:
            kv, k_rot = cache.update(kv, k_rot, self.layer_idx)
        keys = kv.shape[2]
        indices = prev_topk_indices
        if self.indexer is not None:
            indices = self.indexer(x, q_resid, position_embeddings, mask[:, 0], position_ids, past_key_values=cache)
        # Masked keys are among the indices where there are fewer others.
        counts = mask[:, 0].expand(batch, -1, -1).gather(-1, indices.long())
        behind = torch.arange(0, batch * keys, max(keys, 1), dtype=torch.int32, device=x.device).view(-1, 1, 1)
        rows = torch.where(counts, indices + behind, -1).flatten(0, 1).contiguous()
        by_head = self.kv_b_proj.weight.view(-1, self.qk_nope_head_dim + self.v_head_dim, latent)
        queries = x.new_empty(batch * tokens, q_pass.shape[1], width)
        absorbed = q_pass.transpose(0, 1).flatten(1, 2) @ by_head[:, : self.qk_nope_head_dim]  # [heads, tokens, latent]
        queries[..., :latent].copy_(absorbed.transpose(0, 1))
        queries[..., latent:].copy_(q_rot.transpose(1, 2).flatten(0, 1))
        latents = torch.cat((kv, k_rot), -1).flatten(0, 2)
        out = rtkernels.sparse_mla(queries, latents, rows, scale=self.scaling, value_width=latent)
        values = out.transpose(0, 1) @ by_head[:, self.qk_nope_head_dim :].mT  # [heads, tokens, value]
        result = self.o_proj(values.transpose(0, 1).reshape(batch, tokens, -1))
        return (result, None, indices) if with_indices else (result, None)

    return forward


replace.register("indexer", _indexer)
replace.register("chosen_keys", _attention)
