"""The layers that ``python -m bench.layers`` measures: how each is built, in every way we know."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rtkernels

Sizes = dict[str, int]


class Kind(NamedTuple):
    """A layer: sizes, small sizes, ways, and its constructor: ``build(sizes, device, dtype, way)``."""

    sizes: Sizes
    tiny: Sizes
    ways: tuple[str, ...]
    build: Callable[..., Layer]


class Layer(NamedTuple):
    """A layer that can be run: a module with its parameters, and a function of tokens ``[batch, length, hidden]``."""

    module: nn.Module
    call: Callable[[Tensor], Tensor]


_FUSED = {"fused_layers": True, "attention": True}
_SAVING = {"fp8": rtkernels.models.Fp8Recipe(parts=4), **_FUSED}
PATCHES = {
    "ours": {}, "ours_fused": _FUSED, "fp8": {"fp8": True}, "fp8_fused": {"fp8": True, **_FUSED}, "fp8_saving": _SAVING,
    "fp8_fixed": {"fp8": True, **_FUSED},
}  # fmt: skip


def _model(kind: str, device: str, dtype: torch.dtype, **sizes: Any) -> nn.Module:
    """Return a causal language model of one layer with random weights, the same at every call."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, num_hidden_layers=1, vocab_size=128, use_cache=False, **sizes)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    for p in model.parameters():  # as after some training: norms that are not ones, products of variance one
        with torch.no_grad():
            p.normal_(std=p.shape[-1] ** -0.5) if p.dim() > 1 else p.uniform_(0.5, 1.5)
    angles = model.model.rotary_emb
    model.to(torch.bfloat16).to(device, dtype).train()
    model.model.rotary_emb = type(angles)(config=config).to(device)
    return model


def _changed(model: nn.Module, way: str, router: bool = False) -> None:
    """Patch a model for a way; with `router`, also replace the router of fused ways."""
    if way in PATCHES:
        options = PATCHES[way]
        rtkernels.models.patch(model, loss=False, router=router and "fused_layers" in options, **options)
    elif way == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)


# ---- the three layers -----------------------------------------------------------------------------------------------


def dense(sizes: Sizes, device: str, dtype: torch.dtype, way: str) -> Layer:
    """Return a decoder layer of Qwen3."""
    model = _model(
        "qwen3", device, dtype, hidden_size=sizes["hidden"], intermediate_size=sizes["ffn"], head_dim=sizes["head_dim"],
        num_attention_heads=sizes["heads"], num_key_value_heads=sizes["kv_heads"],
    )  # fmt: skip
    _changed(model, way)
    layer = model.model.layers[0]
    positions = torch.arange(sizes["length"], device=device)[None]
    tables = model.model.rotary_emb(torch.empty(0, device=device, dtype=dtype), positions)
    run = torch.compile(layer) if way == "compile" else layer
    if way == "eager":
        return Layer(layer, lambda x: _eager_dense(layer, x, tables))
    return Layer(layer, lambda x: run(x, position_embeddings=tables, attention_mask=None))


def _eager_dense(layer: nn.Module, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Return the decoder layer in plain torch."""
    cos, sin = (t[:, :, None] for t in tables)

    def norm(t: Tensor, weight: Tensor) -> Tensor:
        values = t.float()
        return (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-6)).to(t.dtype) * weight

    def heads(linear: nn.Linear, gain: Tensor | None) -> Tensor:
        t = linear(y).unflatten(-1, (-1, cos.shape[-1]))
        if gain is None:
            return t.transpose(1, 2)
        t = norm(t, gain)
        first, second = t.chunk(2, -1)
        return (t * cos + torch.cat((-second, first), -1) * sin).transpose(1, 2)

    attention, mlp = layer.self_attn, layer.mlp
    y = norm(x, layer.input_layernorm.weight)
    q, k = heads(attention.q_proj, attention.q_norm.weight), heads(attention.k_proj, attention.k_norm.weight)
    mixed = F.scaled_dot_product_attention(q, k, heads(attention.v_proj, None), is_causal=True, enable_gqa=True)
    x = x + attention.o_proj(mixed.transpose(1, 2).flatten(2))
    y = norm(x, layer.post_attention_layernorm.weight)
    return x + mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))


class _SameChoice(nn.Module):
    """The fp32 router of a reference, with the experts that a 16-bit router chooses."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.weight, self.__dict__["chooser"] = gate.weight, copy.deepcopy(gate).bfloat16()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, _, chosen = self.chooser(x.bfloat16())
        logits = F.linear(x.reshape(-1, x.shape[-1]), self.weight)
        scores = torch.softmax(logits, -1).gather(-1, chosen)
        return logits, scores / scores.sum(-1, keepdim=True), chosen


def moe(sizes: Sizes, device: str, dtype: torch.dtype, way: str) -> Layer:
    """Return the experts of a layer of Qwen3-MoE, with their router."""
    model = _model(
        "qwen3_moe", device, dtype, hidden_size=sizes["hidden"], moe_intermediate_size=sizes["ffn"], head_dim=64,
        num_experts=sizes["experts"], num_experts_per_tok=sizes["top_k"], norm_topk_prob=True, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    if way == "eager":
        model.set_experts_implementation("eager")
    _changed(model, way, router=True)
    layer = model.model.layers[0].mlp
    if way == "reference":
        layer.gate = _SameChoice(layer.gate)
    return Layer(layer, torch.compile(layer) if way == "compile" else layer)


def head(sizes: Sizes, device: str, dtype: torch.dtype, way: str) -> Layer:
    """Return a head with the loss of random labels."""
    torch.manual_seed(0)
    linear = nn.Linear(sizes["hidden"], sizes["vocabulary"], bias=False, device=device)
    labels = torch.randint(0, sizes["vocabulary"], (sizes["batch"] * sizes["length"],)).to(device)
    linear.to(torch.bfloat16).to(device, dtype)

    def plain(x: Tensor) -> Tensor:
        return F.cross_entropy(linear(x).flatten(0, 1).float(), labels)

    def transformers(x: Tensor) -> Tensor:
        from transformers.loss.loss_utils import ForCausalLMLoss

        shifted = labels.view(x.shape[:2])
        return ForCausalLMLoss(linear(x), None, sizes["vocabulary"], shift_labels=shifted)

    def liger(x: Tensor) -> Tensor:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        return LigerFusedLinearCrossEntropyLoss()(linear.weight, x.flatten(0, 1), labels)

    def ours(x: Tensor) -> Tensor:
        return rtkernels.linear_cross_entropy(x.flatten(0, 1), linear.weight, labels)

    ways = {"transformers": transformers, "liger": liger, "ours": ours}
    return Layer(linear, torch.compile(plain) if way == "compile" else ways.get(way, plain))


KINDS = {
    "dense": Kind(
        {"batch": 2, "length": 4096, "hidden": 4096, "ffn": 12288, "heads": 32, "kv_heads": 8, "head_dim": 128},
        {"batch": 2, "length": 24, "hidden": 128, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 32},
        (
            "eager", "transformers", "liger", "compile", "ours", "ours_fused", "fp8", "fp8_fused", "fp8_saving",
            "fp8_fixed",
        ),
        dense,
    ),
    "head": Kind(
        {"batch": 2, "length": 4096, "hidden": 4096, "vocabulary": 151936},
        {"batch": 2, "length": 24, "hidden": 64, "vocabulary": 300},
        ("eager", "transformers", "liger", "compile", "ours"),
        head,
    ),
    "moe": Kind(
        {"batch": 2, "length": 4096, "hidden": 2048, "ffn": 768, "experts": 128, "top_k": 8},
        {"batch": 2, "length": 24, "hidden": 128, "ffn": 64, "experts": 8, "top_k": 2},
        ("eager", "transformers", "liger", "compile", "ours", "ours_fused", "fp8", "fp8_fused", "fp8_fixed"),
        moe,
    ),
}  # fmt: skip
