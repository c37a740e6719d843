"""Causal language models of the transformers library with random weights, so small that a step takes milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 128
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(kind: str, **changes: Any) -> nn.Module:
    """Return a model of a ``model_type`` in fp32, in training mode, the same at every call."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind)
    for name, value in {**_SIZES, **changes}.items():
        if hasattr(config, name) and not _is_computed(config, name):
            setattr(config, name, value)
    for name, value in list(vars(config).items()):  # a model that repeats its own loss
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    if getattr(config, "n_shared_experts", 1) is None:
        config.n_shared_experts = 1
    if hasattr(config, "head_dim") and hasattr(config, "qk_rope_head_dim"):
        config.head_dim, config.num_key_value_heads = _SIZES["qk_rope_head_dim"], config.num_attention_heads
        config.qk_head_dim = _SIZES["qk_nope_head_dim"] + _SIZES["qk_rope_head_dim"]
    if getattr(config, "layer_types", None) is not None and not _is_computed(config, "layer_types"):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    model = AutoModelForCausalLM.from_config(config).float().train()
    for parameter in model.parameters():  # norms begin as ones or zeros, which hides mistakes
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


def _is_computed(config: Any, name: str) -> bool:
    """Return True for a property that cannot be set."""
    found = getattr(type(config), name, None)
    return isinstance(found, property) and found.fset is None


def tokens(batch: int = 2, length: int = 17, seed: int = 0) -> Tensor:
    """Return token ids without padding."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss_and_gradients(model: nn.Module, ids: Tensor | None = None, **kwargs: Any) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of one step, and the gradient of every parameter that has one."""
    ids = tokens() if ids is None else ids
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, **kwargs)
    out.loss.backward()
    return out.loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def largest_error(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest relative error (Frobenius norm) of all gradients.

    Small gradients are compared with 1e-6 of the largest one instead; those below 1e-9 of it, before and now, are zero
    except for rounding and count as equal.
    """
    if got.keys() != wanted.keys():
        raise AssertionError(f"gradients of {got.keys() ^ wanted.keys()} are missing")
    largest = max(float(g.norm()) for g in wanted.values())
    errors = [0.0]
    for name, gradient in wanted.items():
        size = float(gradient.norm())
        if not (size <= 1e-9 * largest and float(got[name].norm()) <= 1e-9 * largest):  # NaN does not count as zero
            errors.append(float((got[name] - gradient).norm()) / max(size, 1e-6 * largest))
    return float(torch.tensor(errors).max())  # NaN if one of them is


@torch.no_grad()
def assert_greedy_tokens(
    got: Tensor, model: nn.Module, start: int, *, allowed: float, never: Sequence[int] = (), **given: Any
) -> None:
    """Check that each token from `start` on is the model's choice after the tokens before it, or ties with that.

    Args:
        got: Generated ids with their prompts, without padding.
        model: The model that says which token comes next.
        start: Length of the prompts.
        allowed: Distance of tokens that tie, as a share of the largest logit.
        never: Tokens that must not be generated.
        given: Other inputs of the model, such as images.
    """
    logits = model(input_ids=got, attention_mask=torch.ones_like(got), **given).logits[:, start - 1 : -1].float()
    limit = allowed * float(logits.abs().max())
    logits[..., list(never)] = -torch.inf
    behind = logits.amax(-1) - logits.gather(-1, got[:, start:, None])[..., 0]
    if not (behind <= limit).all():
        places = (~(behind <= limit)).nonzero().tolist()
        raise AssertionError(f"tokens at {places} are {behind.max():.3g} behind the first choice, allowed: {limit:.3g}")
