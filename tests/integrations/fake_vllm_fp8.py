"""vLLM's fp8 layers and experts, as far as our plugin uses them: signatures of its wheel, and as little as can be."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import rtkernels


class GroupShape(NamedTuple):
    row: int
    col: int

    def is_per_tensor(self) -> bool:
        return self == (-1, -1)

    def is_per_token(self) -> bool:
        return self == (1, -1)

    def is_per_channel(self) -> bool:
        return self == (-1, 1)

    def is_per_group(self) -> bool:
        return self.row == 1 and self.col >= 1


@dataclass(frozen=True)
class ScaleDesc:
    dtype: torch.dtype
    static: bool
    group_shape: GroupShape


@dataclass(frozen=True)
class QuantKey:
    dtype: torch.dtype
    scale: ScaleDesc
    scale2: ScaleDesc | None = None
    symmetric: bool = True


def create_fp8_quant_key(static: bool, group_shape: GroupShape) -> QuantKey:
    return QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.float32, static, group_shape))


KEYS = {
    "kFp8StaticTensorSym": create_fp8_quant_key(True, GroupShape(-1, -1)),
    "kFp8DynamicTensorSym": create_fp8_quant_key(False, GroupShape(-1, -1)),
    "kFp8StaticChannelSym": create_fp8_quant_key(True, GroupShape(-1, 1)),
    "kFp8DynamicTokenSym": create_fp8_quant_key(False, GroupShape(1, -1)),
    "kFp8Static128BlockSym": create_fp8_quant_key(True, GroupShape(128, 128)),
    "kFp8Dynamic128Sym": create_fp8_quant_key(False, GroupShape(1, 128)),
}


@dataclass
class FP8ScaledMMLinearLayerConfig:
    weight_quant_key: QuantKey
    activation_quant_key: QuantKey
    weight_shape: tuple[int, int]
    input_dtype: torch.dtype
    out_dtype: torch.dtype | None


class FP8ScaledMMLinearKernel:
    def __init__(self, c: FP8ScaledMMLinearLayerConfig, layer_param_names: list[str]) -> None:
        self.config, self.layer_param_names = c, layer_param_names

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass

    def quant_fp8(self, x: Tensor, scale: Tensor | None, upper: Tensor | None) -> tuple[Tensor, Tensor]:
        scale = (x.float().abs().amax(-1, keepdim=True).clamp(max=upper) / 448).clamp(min=1e-12)
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    def _get_layer_params(self, layer: nn.Module) -> tuple[Any, ...]:
        w, w_s, x_s, x_s_ub = self.layer_param_names
        return getattr(layer, w), getattr(layer, w_s), getattr(layer, x_s, None), getattr(layer, x_s_ub, None)


class Fp8BlockScaledMMLinearKernel:
    def __init__(self, config: FP8ScaledMMLinearLayerConfig) -> None:
        self.config = config

    def _get_layer_params(self, layer: nn.Module, **kwargs: Any) -> Any:
        attr = "weight_scale_inv" if hasattr(layer, "weight_scale_inv") else "weight_scale"
        return SimpleNamespace(weight=layer.weight, block_scale=getattr(layer, attr), block_scale_attr=attr)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass


def init_fp8_linear_kernel(
    activation_quant_key: QuantKey, weight_quant_key: QuantKey, input_dtype: torch.dtype, out_dtype: torch.dtype,
    weight_shape: tuple[int, int], force_kernel: Any = None, module_name: str | None = None,
) -> Any:  # fmt: skip
    config = FP8ScaledMMLinearLayerConfig(weight_quant_key, activation_quant_key, weight_shape, input_dtype, out_dtype)
    if force_kernel is None or not force_kernel.can_implement(config)[0]:
        return None
    if activation_quant_key.scale.group_shape.is_per_group():
        return force_kernel(config)
    return force_kernel(config, ["weight", "weight_scale", "input_scale", "input_scale_ub"])


def replace_parameter(layer: nn.Module, name: str, value: Tensor) -> None:
    setattr(layer, name, nn.Parameter(value, requires_grad=False))


class LinearBase(nn.Module):
    pass


class RoutedExperts(nn.Module):
    pass


class Fp8Config:
    def __init__(
        self, is_checkpoint_fp8_serialized: bool = False, activation_scheme: str = "dynamic",
        ignored_layers: list[str] | None = None, weight_block_size: list[int] | None = None,
    ) -> None:  # fmt: skip
        self.activation_scheme, self.weight_block_size = activation_scheme, weight_block_size
        self.ignored_layers = ignored_layers or []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if prefix in self.ignored_layers:
            return None
        if isinstance(layer, LinearBase):
            return Fp8LinearMethod(self)
        return Fp8MoEMethod(self, layer) if isinstance(layer, RoutedExperts) else None


class Fp8LinearMethod:
    def __init__(self, quant_config: Fp8Config) -> None:
        self.quant_config, self.marlin_input_dtype, self.use_marlin = quant_config, None, True
        self.out_dtype = self.input_dtype = torch.bfloat16
        self.weight_block_size = quant_config.weight_block_size
        self.block_quant = self.weight_block_size is not None
        static = quant_config.activation_scheme == "static"
        self.weight_quant_key = KEYS["kFp8Static128BlockSym" if self.block_quant else "kFp8StaticTensorSym"]
        token = KEYS["kFp8StaticTensorSym" if static else "kFp8DynamicTokenSym"]
        self.activation_quant_key = KEYS["kFp8Dynamic128Sym"] if self.block_quant else token

    def create_weights(
        self, layer: nn.Module, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        weight = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=torch.float8_e4m3fn)
        replace_parameter(layer, "weight", weight)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.fp8_linear.apply_weights(layer, x, bias)


class MoEActivation(Enum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SWIGLUOAI = "swigluoai"


class FusedMoEActivationFormat(Enum):
    Standard = "standard"
    BatchedExperts = "batched_experts"


class Fp8MoeBackend(Enum):
    TRITON = "TRITON"
    MARLIN = "MARLIN"


class UnquantizedMoeBackend(Enum):
    TRITON = "TRITON"
    FLASHINFER_CUTLASS = "FlashInfer CUTLASS"


class TopKWeightAndReduceNoOP:
    pass


@dataclass
class MoEConfig:
    """What our experts read of ``FusedMoEConfig``."""

    activation: MoEActivation = MoEActivation.SILU
    is_act_and_mul: bool = True
    has_bias: bool = False
    swiglu_limit: float | None = None
    moe_backend: str = "auto"
    moe_parallel_config: Any = field(
        default_factory=lambda: SimpleNamespace(use_fi_nvl_two_sided_kernels=False, use_fi_nvl_one_sided_kernels=False)
    )


@dataclass
class QuantConfig:
    """What our experts read of ``FusedMoEQuantConfig``."""

    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    block_shape: list[int] | None = None
    gemm1_clamp_limit: float | None = None


class FusedMoEExperts:
    def __init__(self, moe_config: MoEConfig, quant_config: QuantConfig) -> None:
        self.moe_config, self.quant_config = moe_config, quant_config

    def _uses_post_gemm2_hook(self, num_tokens: int) -> bool:
        return False

    @property
    def w1_scale(self) -> Tensor | None:
        return self.quant_config.w1_scale

    @property
    def w2_scale(self) -> Tensor | None:
        return self.quant_config.w2_scale

    @property
    def block_shape(self) -> list[int] | None:
        return self.quant_config.block_shape

    @staticmethod
    def is_supported_config(
        cls: Any, moe_config: MoEConfig, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> tuple[bool, str | None]:
        asked = (
            cls._supports_current_device(), moe_config.is_act_and_mul or cls._supports_no_act_and_mul(),
            cls._supports_activation(moe_config.activation), cls._supports_quant_scheme(weight_key, activation_key),
            cls._supports_parallel_config(moe_config.moe_parallel_config),
            activation_format == cls.activation_format(),
        )  # fmt: skip
        return all(asked), None if all(asked) else f"kernel does not support it: {asked}"


class FusedMoEExpertsModular(FusedMoEExperts):
    pass


class Fp8MoEMethod:
    def __init__(self, quant_config: Fp8Config, layer: Any) -> None:
        self.moe, self.quant_config = layer.moe_config, quant_config
        self.moe_block_shape = quant_config.weight_block_size
        self.block_quant, self.per_act_token_quant = self.moe_block_shape is not None, False
        self.fp8_backend, self.experts_cls = Fp8MoeBackend.MARLIN, None


def run_experts(
    experts: Any, x: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor,
    expert_map: Tensor | None = None, a2_scale: Tensor | None = None, on_input: bool = False, kind: str = "",
) -> Tensor:  # fmt: skip
    """Do what vLLM's modular kernel does around experts on one rank: quantise, allocate workspaces, call ``apply``."""
    scale = None
    dtype, activation = x.dtype, experts.moe_config.activation
    if on_input:
        x = x * topk_weights.to(x.dtype)
    if kind:
        x, scale = rtkernels.quantize_fp8(x, granularity=kind)
    shapes = experts.workspace_shapes(
        len(x), w1.shape[1], w2.shape[1], topk_ids.shape[1], len(w1), len(w1), None, activation
    )
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    both = torch.full((max(sizes[0], sizes[2]),), torch.nan, dtype=dtype, device=x.device)
    workspace2 = torch.full(shapes[1], torch.nan, dtype=dtype, device=x.device)
    output = both[: sizes[2]].view(shapes[2])  # vLLM lets the result share memory with the first workspace
    count = len(w1) if expert_map is None else len(expert_map)
    experts.apply(
        output, x, w1, w2, topk_weights, topk_ids, activation, count, expert_map, scale, a2_scale, both, workspace2,
        None, on_input,
    )  # fmt: skip
    return output
