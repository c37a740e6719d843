"""vLLM's fp8 layers on ``scaled_mm`` and ``grouped_mm``: linear kernels, and ``--quantization rtkernels_fp8``.

The kernels are in vLLM's lists behind its own ones. The quantisation method takes the checkpoints of vLLM's "fp8"
(``quant_method: fp8``, one scale per tensor or per block of 128 x 128) and chooses ours first, for experts as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    create_fp8_quant_key,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
)
from vllm.model_executor.utils import replace_parameter

import rtkernels
from rtkernels.integrations.vllm_moe import RtkernelsExperts, usable_for

NAME = "rtkernels_fp8"
_RESULTS = (torch.bfloat16, torch.float16, torch.float32)


def _supported(compute_capability: int | None) -> tuple[bool, str | None]:
    if compute_capability is None:
        compute_capability = 10 * torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    return (True, None) if compute_capability >= 80 else (False, "needs a GPU of compute capability 8.0 or more")


def _results(config: Any) -> tuple[bool, str | None]:
    dtype = config.out_dtype
    return (True, None) if dtype in (None, *_RESULTS) else (False, f"has no result of dtype {dtype}")


def _product(x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: Any) -> Tensor:
    """Return the product with a weight ``[n, k]`` of one scale, or one per output channel."""
    scale, weight_scale = (t.reshape(() if t.numel() == 1 else -1) for t in (scale, weight_scale))
    return rtkernels.scaled_mm(x, weight, scale, weight_scale, bias=bias, out_dtype=dtype, b_layout="nk")


class RtkernelsFp8LinearKernel(FP8ScaledMMLinearKernel):
    """Weights with one scale, or one for each output channel; activations with one scale, or one for each token."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Return True from compute capability 8.0 on."""
        return _supported(compute_capability)

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Return True for scales of tensors, tokens and channels."""
        activation, weight = c.activation_quant_key.scale, c.weight_quant_key.scale.group_shape
        shape = activation.group_shape
        if not (shape.is_per_tensor() or (shape.is_per_token() and not activation.static)):
            return False, f"takes activations with one scale, or dynamic ones per token, not {shape}"
        if not (weight.is_per_tensor() or weight.is_per_channel() or weight.is_per_token()):
            return False, f"takes weights with one scale, or one per channel, not {weight}"
        return _results(c)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the layer's result: one launch quantises x, one multiplies."""
        weight, weight_scale, scale, upper = self._get_layer_params(layer)
        rows = x.reshape(-1, x.shape[-1])
        if upper is not None:
            codes, scale = self.quant_fp8(rows, scale, upper)
        elif self.config.activation_quant_key.scale.static:
            codes, scale = rtkernels.quantize_fp8(rows, scale)
        else:
            per_token = self.config.activation_quant_key.scale.group_shape.is_per_token()
            codes, scale = rtkernels.quantize_fp8(rows, granularity="row" if per_token else "tensor")
        dtype = self.config.out_dtype or x.dtype
        return _product(codes, scale, weight.t(), weight_scale, bias, dtype).view(*x.shape[:-1], weight.shape[1])

    def apply_scaled_mm(
        self, *, A: Tensor, B: Tensor, out_dtype: torch.dtype, As: Tensor, Bs: Tensor, bias: Tensor | None,
        output_shape: list[int],
    ) -> Tensor:  # fmt: skip
        """Return the product of quantised activations with B, ``[k, n]``."""
        return _product(A, As, B.t(), Bs, bias, out_dtype).view(output_shape)


class RtkernelsFp8BlockLinearKernel(Fp8BlockScaledMMLinearKernel):
    """Weights with a scale per block of 128 x 128, activations with one for each 128 elements of a token."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Return True from compute capability 8.0 on."""
        return _supported(compute_capability)

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Return True for blocks of 128."""
        activation, weight = config.activation_quant_key.scale, config.weight_quant_key.scale
        if activation.static or tuple(activation.group_shape) != (1, 128):
            return False, f"takes dynamic activations in groups of (1, 128), not {activation}"
        if tuple(weight.group_shape) != (128, 128):
            return False, f"takes weights in blocks of (128, 128), not {weight.group_shape}"
        return _results(config)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Let vLLM do its part; scales of other dtypes (e8m0) become float32."""
        super().process_weights_after_loading(layer)
        params = self._get_layer_params(layer)
        if params.block_scale.dtype != torch.float32:
            replace_parameter(layer, params.block_scale_attr, params.block_scale.data.float())

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the layer's result: one launch quantises x, one multiplies."""
        params, rows = self._get_layer_params(layer), x.reshape(-1, x.shape[-1])
        codes, scale = rtkernels.quantize_fp8(rows, granularity="group", scale_layout="column")
        y = rtkernels.scaled_mm(
            codes, params.weight, scale.t(), params.block_scale, recipe="block_1x128_128x128", bias=bias,
            out_dtype=self.config.out_dtype or x.dtype, b_layout="nk",
        )  # fmt: skip
        return y.view(*x.shape[:-1], params.weight.shape[0])

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        """Return the product of quantised activations with B, ``[n, k]``."""
        return rtkernels.scaled_mm(
            A, B, As, Bs, recipe="block_1x128_128x128", out_dtype=self.config.out_dtype, b_layout="nk"
        )


class RtkernelsFp8LinearMethod(Fp8LinearMethod):
    """vLLM's fp8 linear layers with our kernels, where they can do the layer."""

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Create vLLM's parameters, and choose our kernel."""
        super().create_weights(layer, *args, **kwargs)
        self.fp8_linear = init_fp8_linear_kernel(
            activation_quant_key=self.activation_quant_key, weight_quant_key=self.weight_quant_key,
            weight_shape=layer.weight.shape, input_dtype=self.input_dtype, out_dtype=self.out_dtype,
            force_kernel=RtkernelsFp8BlockLinearKernel if self.block_quant else RtkernelsFp8LinearKernel,
            module_name=type(self).__name__,
        )  # fmt: skip
        if isinstance(self.fp8_linear, (RtkernelsFp8LinearKernel, RtkernelsFp8BlockLinearKernel)):
            self.use_marlin = False


class RtkernelsFp8MoEMethod(Fp8MoEMethod):
    """vLLM's fp8 experts with our kernels, where they can do the layer."""

    def __init__(self, quant_config: Any, layer: Any) -> None:
        super().__init__(quant_config, layer)
        weights, activations = kFp8StaticTensorSym, kFp8StaticTensorSym
        if self.block_quant:
            weights = create_fp8_quant_key(static=True, group_shape=GroupShape(*self.moe_block_shape))
            activations = kFp8Dynamic128Sym
        elif quant_config.activation_scheme != "static":
            activations = kFp8DynamicTokenSym if self.per_act_token_quant else kFp8DynamicTensorSym
        if usable_for(self.moe, weights, activations):
            # Triton's experts take weights as they are in the checkpoint, and so do ours.
            self.fp8_backend, self.experts_cls = Fp8MoeBackend.TRITON, RtkernelsExperts


class RtkernelsFp8Config(Fp8Config):
    """``--quantization rtkernels_fp8``: vLLM's "fp8" with our kernels."""

    @classmethod
    def get_name(cls) -> str:
        """Return the name for ``--quantization``."""
        return NAME

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take checkpoints of "fp8" if the user asks for it."""
        return NAME if user_quant == NAME and hf_quant_cfg.get("quant_method") == "fp8" else None

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return vLLM's method for a layer, or ours in its place."""
        method = super().get_quant_method(layer, prefix)
        if type(method) is Fp8LinearMethod:
            ours = RtkernelsFp8LinearMethod(self)
            ours.marlin_input_dtype = method.marlin_input_dtype
            return ours
        return RtkernelsFp8MoEMethod(self, layer) if type(method) is Fp8MoEMethod else method
