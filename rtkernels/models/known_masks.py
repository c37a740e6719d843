"""Masks that a model would create from metadata alone, given to it before its forward.

For a batch without padding, transformers checks on the device whether the positions are those of packed sequences, and
waits for the answer, so the device is idle at the start of every forward. If the model computes the positions itself,
or gets ``cu_seq_lens_q``, the answer is known: :func:`create_masks` passes the masks that the model would create.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from rtkernels.models.fused_layers import form_of
from rtkernels.models.mask_form import PACKING, MaskForm, Packing
from rtkernels.runtime.torch_private import is_dynamo_compiling

NAME = "rtkernels"  # of our attention in a configuration
# Hashes of the forwards of models that use attention_mask only to create causal masks, and what decides whether a layer
# has a window: nothing, the configuration's sliding_window, or its type of layer.
_MODELS = {
    "7d6ea2c2b23e0906": None,  # Llama, GLM, GLM4, OLMo, OLMo2, Ernie 4.5, HunYuan: none has a window
    "ce4bfe471b568905": None,  # DeepSeek-V2, DeepSeek-V3, GLM4-MoE
    "a4e04405d94dd416": "layer_types",  # Qwen2, Qwen3, SmolLM3
    "1a554494893b124d": "layer_types",  # Gemma 2
    "d694f0174cea9bcb": "layer_types",  # Gemma 3
    "44c8c65785399f8b": "layer_types",  # GPT-OSS
    "f8bf70f4aae92100": "layer_types",  # OLMo 3
    "a20c59e141641c74": "sliding_window",  # Mistral, Phi-3
    "e6823f08e7c2e423": "sliding_window",  # Mixtral, Qwen3-MoE
}


def packing_in(kwargs: dict[str, Any], tokens: Tensor) -> Packing | None:
    """Return packed sequences from the arguments that transformers' collator adds for flash attention."""
    given = [kwargs.get(name) for name in PACKING]
    if any(value is None for value in given) or tokens.shape[0] != 1 or is_dynamo_compiling():
        return None
    ends = [cu.to(tokens.device, torch.int32) for cu in given[:2]]
    length = tokens.shape[2 if tokens.dim() == 4 else 1]
    return Packing(*ends, *(n if isinstance(n, int) else length for n in given[2:]))


def _form(model: nn.Module) -> str:
    return form_of(inspect.unwrap(type(model).forward))


def has_known_masks(module: nn.Module) -> bool:
    """Return True if a module is a model whose forward is known here."""
    return hasattr(module, "rotary_emb") and hasattr(module, "layers") and _form(module) in _MODELS


def _masks_of(
    config: Any, model: nn.Module, tokens: Tensor, packing: Packing | None
) -> MaskForm | dict[str, MaskForm] | None:
    """Return the masks of a known forward: one for all layers, or one for each type of layer. None if unknown."""
    where = _MODELS.get(_form(model), "unknown")
    if where == "unknown" or getattr(config, "use_bidirectional_attention", False):
        return None
    batch, length = tokens.shape[:2]

    def mask(window: int | None) -> MaskForm:
        left = -1 if window is None else window - 1
        return MaskForm(batch, length, length, tokens.device, left=left, packing=packing)

    if where is None:
        return mask(None)
    window = getattr(config, "sliding_window", None)
    if where == "sliding_window":
        return mask(window)
    kinds = set(config.layer_types)
    if not kinds <= {"full_attention", "sliding_attention"} or ("sliding_attention" in kinds and not window):
        return None
    return {kind: mask(window if kind == "sliding_attention" else None) for kind in kinds}


def create_masks(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Pass the masks that a model would create, if they are known without reading tensors; else change nothing."""
    if is_dynamo_compiling():  # it does not wait for the device
        return None
    config, tokens = model.config, kwargs.get("input_ids") if not args else args[0]
    if tokens is None:
        tokens = kwargs.get("inputs_embeds")
    given = any(kwargs.get(name) is not None for name in ("attention_mask", "past_key_values"))
    if given or len(args) > 1 or not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return None
    packing = packing_in(kwargs, tokens)
    if kwargs.get("position_ids") is not None and packing is None:
        return None
    options = ((kwargs.get(name), getattr(config, name, False)) for name in ("use_cache", "output_attentions"))
    if any(default if value is None else value for value, default in options):
        return None
    if config._attn_implementation != NAME or not getattr(config, "is_causal", True):
        return None
    masks = _masks_of(config, model, tokens, packing)
    return None if masks is None else (args, {**kwargs, "attention_mask": masks})
