"""The parts of vLLM that our plugin uses, with the signatures in its wheel and nothing behind them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn

import rtkernels.integrations
from integrations import fake_vllm_fp8, fake_vllm_mla

M = TypeVar("M")


class IrOp:
    """``vllm.ir.op.IrOp``: keeps what is registered."""

    def __init__(self) -> None:
        self.impls: dict[str, Any] = {}

    def register_impl(
        self, provider: str, *, supported: bool = True, supports_args: Callable[..., bool] | None = None,
        inplace: bool = False,
    ) -> Callable[[Callable[..., Any]], Any]:  # fmt: skip
        def keep(function: Callable[..., Any]) -> Any:
            self.impls[provider] = SimpleNamespace(impl_fn=function, supports_args=supports_args, inplace=inplace)
            return function

        return keep


class CustomOp(nn.Module):
    """``vllm.model_executor.custom_op.CustomOp``: a registered class is created in the place of its base."""

    registered: ClassVar[dict[str, type]] = {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(CustomOp.registered.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, _decorated_op_cls: type | None = None, name: str | None = None) -> type:
        CustomOp.registered[name or cls.__name__] = _decorated_op_cls
        return _decorated_op_cls


class SiluAndMul(CustomOp):
    def __init__(self, *, compile_native: bool = True) -> None:
        super().__init__()


class GeluAndMul(CustomOp):
    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate


class RotaryEmbedding(CustomOp):
    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: float, is_neox_style: bool,
        dtype: torch.dtype, init_cache: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.head_size, self.rotary_dim, self.is_neox_style = head_size, rotary_dim, is_neox_style
        angles = torch.outer(
            torch.arange(max_position_embeddings), base ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
        )
        self.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


class QuantFP8(CustomOp):
    def __init__(
        self, static: bool, group_shape: fake_vllm_fp8.GroupShape, num_token_padding: int | None = None,
        column_major_scales: bool = False, tma_aligned_scales: bool = False, use_ue8m0: bool | None = None,
        compile_native: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.static, self.group_shape, self.num_token_padding = static, group_shape, num_token_padding
        self.column_major_scales, self.tma_aligned_scales = column_major_scales, tma_aligned_scales
        self.use_per_token_if_dynamic = group_shape == fake_vllm_fp8.GroupShape(1, -1)
        self.use_ue8m0, self.is_group_quant = bool(use_ue8m0), group_shape.is_per_group()
        if self.is_group_quant:
            self.group_size = group_shape.col

    def forward_cuda(
        self, x: Tensor, scale: Tensor | None = None, scale_ub: Tensor | None = None, use_triton: bool = False
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("vLLM's own kernels")


class UnquantizedFusedMoEMethod(CustomOp):
    def __init__(self, moe: Any) -> None:
        super().__init__()
        self.moe, self.experts_cls = moe, None
        self.unquantized_backend = fake_vllm_fp8.UnquantizedMoeBackend.FLASHINFER_CUTLASS


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    NEVER = 0


class MultipleOf:
    def __init__(self, base: int) -> None:
        self.base = base


class AttentionBackend:
    pass


class AttentionImpl(Generic[M]):
    pass


class AttentionMetadataBuilder(Generic[M]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = (
            kv_cache_spec, layer_names, vllm_config, device,
        )  # fmt: skip


def _contents(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the names of each module; what is registered goes to `found`."""
    fp8, mla, layers = vars(fake_vllm_fp8), vars(fake_vllm_mla), "vllm.model_executor.layers"

    def register_backend(backend: Any, class_path: str | None = None, is_mamba: bool = False) -> None:
        found["backends"][backend] = class_path

    def register_mla_prefill_backend(backend: Any, class_path: str | None = None) -> None:
        found["prefill_backends"][backend] = class_path

    def register_linear_kernel(kernel_class: type, platform: Any, kernel_type: str = "mp") -> None:
        found["linear_kernels"][kernel_type] = kernel_class, platform

    def register_quantization_config(quantization: str) -> Callable[[type], type]:
        return lambda config: found["quantization"].setdefault(quantization, config)

    def of(source: dict[str, Any], *names: str) -> dict[str, Any]:
        return {name: source[name] for name in names}

    linear, moe = "vllm.model_executor.kernels.linear", f"{layers}.fused_moe"
    return {
        "vllm.ir": {"ops": found["ops"]},
        f"{layers}.activation": {"SiluAndMul": SiluAndMul, "GeluAndMul": GeluAndMul},
        f"{layers}.rotary_embedding": {"RotaryEmbedding": RotaryEmbedding},
        f"{layers}.quantization.input_quant_fp8": {"QuantFP8": QuantFP8},
        "vllm.v1.attention.backends.registry": {"register_backend": register_backend},
        "vllm.v1.attention.backends.mla.prefill.registry": {
            "register_mla_prefill_backend": register_mla_prefill_backend
        },
        "vllm.v1.attention.backends.mla.prefill.base": of(mla, "MLAPrefillBackend"),
        "vllm.v1.attention.backend": {
            c.__name__: c for c in (AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder,
                                    AttentionType, MultipleOf)
        },
        f"{layers}.attention.mla_attention": of(
            mla, "MLACommonBackend", "MLACommonImpl", "MLACommonMetadata", "MLACommonMetadataBuilder", "QueryLenSupport"
        ),
        linear: {**of(fp8, "init_fp8_linear_kernel"), "register_linear_kernel": register_linear_kernel},
        f"{linear}.scaled_mm.BlockScaledMMLinearKernel": of(fp8, "Fp8BlockScaledMMLinearKernel"),
        f"{linear}.scaled_mm.ScaledMMLinearKernel": of(fp8, "FP8ScaledMMLinearKernel"),
        f"{moe}.oracle.fp8": of(fp8, "Fp8MoeBackend"), f"{moe}.oracle.unquantized": of(fp8, "UnquantizedMoeBackend"),
        f"{moe}.modular_kernel": of(fp8, "FusedMoEExperts", "FusedMoEExpertsModular", "FusedMoEActivationFormat"),
        f"{moe}.activation": of(fp8, "MoEActivation"),
        f"{moe}.topk_weight_and_reduce": of(fp8, "TopKWeightAndReduceNoOP"),
        f"{moe}.unquantized_fused_moe_method": {"UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod},
        f"{layers}.quantization": {"register_quantization_config": register_quantization_config},
        f"{layers}.quantization.fp8": of(fp8, "Fp8Config", "Fp8LinearMethod", "Fp8MoEMethod"),
        f"{layers}.quantization.utils.quant_utils": {
            **fake_vllm_fp8.KEYS, **of(fp8, "GroupShape", "create_fp8_quant_key")
        },
        "vllm.model_executor.utils": of(fp8, "replace_parameter"),
        "vllm.platforms": {
            "PlatformEnum": Enum("PlatformEnum", "CUDA CPU"),
            "current_platform": SimpleNamespace(is_cuda=lambda: True, has_device_capability=lambda c: True),
        },
    }  # fmt: skip


def install(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Put the fake modules where the plugin imports them from; return what is registered there."""
    found: dict[str, Any] = {"ops": SimpleNamespace(rms_norm=IrOp(), fused_add_rms_norm=IrOp())}
    found |= {kind: {} for kind in ("backends", "prefill_backends", "linear_kernels", "quantization")}
    CustomOp.registered = found["layers"] = {}
    contents = _contents(found)
    for name in list(contents):
        while "." in name:
            name = name.rpartition(".")[0]
            contents.setdefault(name, {})
    for name in sorted(contents, key=lambda n: n.count(".")):
        module = ModuleType(name)
        module.__dict__.update(contents[name])
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    for adapter in ("vllm", "vllm_attention", "vllm_fp8", "vllm_moe", "vllm_mla"):
        monkeypatch.delitem(sys.modules, f"rtkernels.integrations.{adapter}", raising=False)
        if adapter in vars(rtkernels.integrations):
            monkeypatch.delattr(rtkernels.integrations, adapter)
    return found


def layer_scales(k: float = 1.0, v: float = 1.0, device: str = "cpu") -> Any:
    """Return what an attention layer of vLLM's has of scales."""
    return SimpleNamespace(_k_scale=torch.tensor(k, device=device), _v_scale=torch.tensor(v, device=device))


def common_metadata(
    starts: list[int], lengths: list[int], table: Tensor, slots: Tensor, causal: bool = True, device: str = "cpu"
) -> Any:
    """Return vLLM's ``CommonAttentionMetadata`` of a batch: ends of queries, lengths with them, pages, slots."""
    queries = torch.tensor(starts, dtype=torch.int32, device=device)
    return SimpleNamespace(
        query_start_loc=queries, seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        num_reqs=len(lengths), num_actual_tokens=starts[-1], max_seq_len=max(lengths),
        max_query_len=max(b - a for a, b in pairwise(starts)),
        block_table_tensor=table, slot_mapping=slots, causal=causal,
    )  # fmt: skip
