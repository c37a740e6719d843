"""vLLM's experts on ``moe_index``, ``moe_permute`` and ``grouped_mm``, in 16 bits and in fp8.

``RtkernelsExperts`` is a modular kernel: routing, dispatch between ranks and shared experts stay vLLM's. Rows of an
expert are consecutive and unpadded, their numbers are read on the device only.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)
from vllm.platforms import current_platform

import rtkernels

_ACTS = {MoEActivation.SILU: "silu", MoEActivation.GELU: "gelu_erf", MoEActivation.GELU_TANH: "gelu_tanh"}
_SCHEMES = (
    (None, None), (kFp8Static128BlockSym, kFp8Dynamic128Sym), (kFp8StaticChannelSym, kFp8DynamicTokenSym),
    (kFp8StaticTensorSym, kFp8DynamicTokenSym), (kFp8StaticTensorSym, kFp8StaticTensorSym),
    (kFp8StaticTensorSym, kFp8DynamicTensorSym),
)  # fmt: skip


def usable_for(moe: Any, weights: Any, activations: Any) -> bool:
    """Return True if our experts can do a layer, and the user did not ask for others by ``--moe-backend``."""
    return moe.moe_backend == "auto" and RtkernelsExperts.is_supported_config(
        RtkernelsExperts, moe, weights, activations, RtkernelsExperts.activation_format()
    )[0]  # fmt: skip


def _resized(workspace: Tensor, *shape: int) -> Tensor:
    """Return the beginning of a workspace in another shape."""
    count = 1
    for size in shape:
        count *= size
    return workspace.flatten()[:count].view(shape)


def _of_experts(scale: Tensor, experts: int) -> Tensor:
    """Return scales of weights as grouped_mm takes them: one per expert, per channel, or per block."""
    if scale.numel() == experts:
        return scale.reshape(experts)
    return scale.squeeze(-1) if scale.dim() == 3 and scale.shape[-1] == 1 else scale


class RtkernelsExperts(mk.FusedMoEExpertsModular):
    """Gated experts: permute, product, activation, product, weighted sum; five launches, or six with a quantiser."""

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        if quant_config.gemm1_clamp_limit is not None:
            raise NotImplementedError(
                f"RtkernelsExperts: gemm1_clamp_limit is {quant_config.gemm1_clamp_limit}; expected None"
            )

    @staticmethod
    def activation_format() -> Any:
        """Return that tokens come in rows."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def is_supported_config(
        cls: Any, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> tuple[bool, str | None]:
        """Return whether a layer can be done, else why not."""
        if moe_config.has_bias:
            return False, "kernel does not support biases"
        if moe_config.swiglu_limit is not None:
            return False, "kernel does not support limits of SwiGLU"
        return mk.FusedMoEExperts.is_supported_config(cls, moe_config, weight_key, activation_key, activation_format)

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cuda() and current_platform.has_device_capability(80)

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) in _SCHEMES

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation in _ACTS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not (
            moe_parallel_config.use_fi_nvl_two_sided_kernels or moe_parallel_config.use_fi_nvl_one_sided_kernels
        )

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Return that rows are weighted and summed already."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int,
        expert_tokens_meta: Any, activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:  # fmt: skip
        """Return the sizes of the activations' memory, of the products' memory, and of the result."""
        return (M, topk, N // 2), (M, topk, max(N, K)), (M, K)

    def apply(
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        activation: Any, global_num_experts: int, expert_map: Tensor | None, a1q_scale: Tensor | None,
        a2_scale: Tensor | None, workspace13: Tensor, workspace2: Tensor, expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:  # fmt: skip
        """Write the weighted sum of each token's experts to `output`; experts of other ranks count as nothing."""
        if self._uses_post_gemm2_hook(hidden_states.shape[0]):
            raise NotImplementedError("RtkernelsExperts: post_gemm2_hook is given; expected None")
        experts, width, hidden = w1.shape[0], w1.shape[1], w2.shape[1]
        if expert_map is not None:
            local = expert_map[topk_ids.clamp(min=0)].to(topk_ids.dtype)
            topk_ids = torch.where(topk_ids < 0, topk_ids, local)
        index = rtkernels.moe_index(topk_ids, experts)
        rows, ends = index.slots.shape[0], index.offsets[1:]
        dtype, act = output.dtype, _ACTS[activation]
        products = workspace2 if workspace2.dtype == dtype else workspace2.view(dtype)
        first, second = _resized(products, rows, width), _resized(products, rows, hidden)
        scale = a1q_scale
        if scale is None or scale.numel() == 1:
            permuted = rtkernels.moe_permute(hidden_states, index)
        else:
            permuted, _, scale = rtkernels.moe_permute(hidden_states, index, scale=scale)
        self._multiply(permuted, w1, scale, self.w1_scale, ends, first)
        codes, scale = self._activated(first, act, a2_scale, _resized(workspace13, rows, width // 2))
        self._multiply(codes, w2, scale, self.w2_scale, ends, second)
        probs = None if apply_router_weight_on_input else topk_weights
        rtkernels.moe_unpermute(
            second, index, probs=probs, dense_probs=False if probs is not None else None, out=output
        )

    def _multiply(
        self, x: Tensor, w: Tensor, scale: Tensor | None, weight_scale: Tensor | None, ends: Tensor, out: Tensor
    ) -> None:
        if weight_scale is None:
            rtkernels.grouped_mm(x, w, offs=ends, b_layout="nk", out=out)
            return
        of_weight = _of_experts(weight_scale, w.shape[0])
        if self.block_shape is None:
            scale = scale.reshape(-1) if scale.numel() > 1 else scale.reshape(1).expand(x.shape[0])
            of_weight = of_weight if of_weight.dim() > 1 else of_weight[:, None].expand(-1, w.shape[1])
        recipe = "row" if self.block_shape is None else "block_1x128_128x128"
        rtkernels.grouped_mm(
            x, w, scale, of_weight, offs=ends, b_layout="nk", recipe=recipe, out=out, out_dtype=out.dtype
        )

    def _activated(self, both: Tensor, act: str, scale: Tensor | None, out: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the activations between the products, quantised if the weights are.

        Rows after the last expert's are uninitialised, so no scale may be taken over several rows: a dynamic scale of
        the tensor becomes one per row, which is at least as exact.
        """
        if self.w2_scale is None:
            return rtkernels.glu(both, act=act, out=out), None
        if self.block_shape is not None:
            result = rtkernels.glu_fp8(both, act=act)
            return result.q, result.scale
        inner = rtkernels.glu(both, act=act, out=out)
        return rtkernels.quantize_fp8(inner, scale, granularity="row" if scale is None else "tensor")


class RtkernelsUnquantizedMoEMethod(UnquantizedFusedMoEMethod):
    """vLLM's experts in 16 bits with our kernels, where they can do the layer."""

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        if usable_for(moe, None, None):
            self.unquantized_backend, self.experts_cls = UnquantizedMoeBackend.TRITON, RtkernelsExperts
