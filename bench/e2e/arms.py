"""The models, and the ways to train them: transformers as it is, torch.compile, Liger, and ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

ARMS = ("hf", "liger", "compile", "ours", "ours_fused", "ours_compile", "fp8")
_FUSED = {"fused_layers": True, "attention": True}
_PATCHES = {"ours_fused": _FUSED, "fp8": {"fp8": True, **_FUSED}}
_DENSE = {
    "num_hidden_layers": 24, "hidden_size": 1536, "intermediate_size": 4608, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
_MOE = {
    "num_hidden_layers": 16, "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "tie_word_embeddings": True, "output_router_logits": False,
}  # fmt: skip
_TINY = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
MODELS = {"dense": ("qwen3", _DENSE), "moe": ("qwen3_moe", _MOE)}
_LLAMA_LIKE = {
    "num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA_LIKE = {
    **_LLAMA_LIKE, "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "num_hidden_layers": 6, "sliding_window": 1024,
}  # fmt: skip
_MISTRAL_LIKE = {
    **_LLAMA_LIKE, "hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128, "sliding_window": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
_OLMO_LIKE = {
    **_LLAMA_LIKE, "hidden_size": 4096, "intermediate_size": 11008, "num_key_value_heads": 32, "head_dim": 128,
}  # fmt: skip
_GPT_OSS_LIKE = {
    "num_hidden_layers": 4, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 128,
    "tie_word_embeddings": False, "output_router_logits": False,
}  # fmt: skip
_DEEPSEEK_LIKE = {
    "num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16,
    "num_key_value_heads": 16, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1024, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
_TINY |= {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 4, "num_local_experts": 4, "sliding_window": 8,
}  # fmt: skip
_EAGER = {"gpt_oss_like": "eager"}  # sinks: transformers has no other that every torch can run
# Models of ``bench e2e train`` beside those above: a few layers in the shape of six families.
FAMILIES = {
    "llama_like": ("llama", _LLAMA_LIKE), "gemma3_like": ("gemma3_text", _GEMMA_LIKE),
    "mistral_like": ("mistral", _MISTRAL_LIKE), "olmo2_like": ("olmo2", _OLMO_LIKE),
    "gpt_oss_like": ("gpt_oss", _GPT_OSS_LIKE), "deepseek_v3_like": ("deepseek_v3", _DEEPSEEK_LIKE),
}  # fmt: skip
_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
_QWEN3_06B = {
    "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, **_HEADS, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN3_8B = {
    "num_hidden_layers": 8, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA = {
    "num_hidden_layers": 6, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True, "vocab_size": 128256,
}  # fmt: skip
_GEMMA3 = {
    "num_hidden_layers": 26, "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "tie_word_embeddings": True,
}  # fmt: skip
# Models of ``bench e2e infer --rows``: those above, Qwen3 of 0.6 B, 8 layers of Qwen3 8 B, a Llama, Gemma 3 1 B.
DECODED = {
    "qwen3_06b": ("qwen3", _QWEN3_06B), "qwen3_09b": ("qwen3", _DENSE), "qwen3_8b_8": ("qwen3", _QWEN3_8B),
    "llama": ("llama", _LLAMA), "gemma3": ("gemma3_text", _GEMMA3), "qwen3_moe": ("qwen3_moe", _MOE),
}  # fmt: skip


def build(
    model: str, vocabulary: int, length: int, *, tiny: bool, device: str, dtype: torch.dtype, layers: int | None = None
) -> nn.Module:  # fmt: skip
    """Return a model with random weights, the same at every call; with `layers` layers, or the number above."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = (MODELS | FAMILIES | DECODED)[model]
    sizes = {**sizes, **({k: v for k, v in _TINY.items() if k in sizes} if tiny else {})}
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if layers is not None:
        sizes["num_hidden_layers"] = layers
    sizes = {"vocab_size": vocabulary, **sizes} if not tiny else {**sizes, "vocab_size": vocabulary}
    config = AutoConfig.for_model(kind, **sizes, max_position_embeddings=length, use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        built = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=_EAGER.get(model, "sdpa"))
    return built.train()


def prepare(arm: str, model: nn.Module, backend: str = "inductor") -> tuple[nn.Module, str]:
    """Return a model as an arm trains it, and a note about what was done to it; `backend` is that of torch.compile.

    Raises:
        ImportError: The arm's library is not installed.
    """
    if arm == "hf":
        return model, ""
    if arm == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
        return model, "instance patched by Liger"
    if arm == "compile":
        return torch.compile(model, backend=backend), f"torch.compile, default mode, {backend}"
    import rtkernels

    report = rtkernels.models.patch(model, **_PATCHES.get(arm, {}))
    return (torch.compile(model, backend=backend) if arm == "ours_compile" else model), str(report)


class MasterAdamW:
    """torch's fused AdamW on fp32 copies of 16-bit parameters, with clipping: used by the arms that are not ours."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, max_norm: float) -> None:
        self.parameters = list(parameters)
        self.masters = [p.detach().float().requires_grad_() for p in self.parameters]
        fused = self.masters[0].is_cuda
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
        self.max_norm = max_norm

    def step(self) -> None:
        """Update from the gradients of the parameters, and clear them."""
        for master, p in zip(self.masters, self.parameters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
            p.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, self.max_norm, foreach=True)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
        for master in self.masters:
            master.grad = None


class OurAdamW:
    """The same with our optimizer, which keeps its own master weights."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, max_norm: float) -> None:
        import rtkernels

        self.parameters, self.max_norm = list(parameters), max_norm
        self.clip = rtkernels.optim.clip_grad_norm_
        self.optimizer = rtkernels.optim.AdamW(self.parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)

    def step(self) -> None:
        """Update from the gradients of the parameters, and clear them."""
        self.clip(self.parameters, self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def optimizer(arm: str, model: nn.Module, lr: float, max_norm: float = 1.0) -> MasterAdamW | OurAdamW:
    """Return an arm's optimizer."""
    optimizer_class = OurAdamW if arm in ("ours", "ours_fused", "ours_compile", "fp8") else MasterAdamW
    return optimizer_class([p for p in model.parameters() if p.requires_grad], lr, max_norm)


def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the loss of a batch of ids as a function."""

    def loss(ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    return loss


def quiet() -> Any:
    """Turn off warnings of libraries that are measured."""
    warnings.simplefilter("ignore")
