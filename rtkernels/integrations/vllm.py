"""vLLM: a plugin of the group ``vllm.general_plugins`` that registers our kernels by name; users choose.

* Norms: ``rms_norm`` and ``fused_add_rms_norm`` of the provider "rtkernels", for ``--kernel-config.ir_op_priority``.
* Attention: ``--attention-backend RTKERNELS`` (:mod:`rtkernels.integrations.vllm_attention`).
* Latent attention: ``--attention-backend RTKERNELS_MLA``, and ``RTKERNELS`` as ``mla_prefill_backend``
  (:mod:`rtkernels.integrations.vllm_mla`).
* fp8 linear layers and experts: ``--quantization rtkernels_fp8`` (:mod:`rtkernels.integrations.vllm_fp8`).
* ``SiluAndMul``, ``GeluAndMul``, ``RotaryEmbedding``, ``QuantFP8`` and experts in 16 bits
  (:mod:`rtkernels.integrations.vllm_moe`) replace vLLM's for all models of the process, so only if the environment
  variable RTKERNELS_VLLM is 1.

Nothing happens unless vLLM loads the plugin, and no kernel is compiled before its first call.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

import rtkernels

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _plain(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Return True for what our norm computes: statistics of whole rows, a weight of the input's dtype or none."""
    return variance_size is None and x.dtype in _DTYPES and (weight is None or weight.dtype == x.dtype)


def _plain_sum(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _plain(x, weight, epsilon, variance_size) and x_residual.dtype == x.dtype


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """vLLM's ``rms_norm`` by ours: one rounding, at the end."""
    return rtkernels.rms_norm(x, weight, eps=epsilon)


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """vLLM's ``fused_add_rms_norm`` in place: x becomes the norm, x_residual the sum."""
    rtkernels.rms_norm(x, weight, eps=epsilon, residual=x_residual, out=x, residual_out=x_residual)
    return x, x_residual


def _register_norms() -> None:
    from vllm import ir

    supported = torch.cuda.is_available()
    ir.ops.rms_norm.register_impl("rtkernels", supported=supported, supports_args=_plain)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(
        "rtkernels", supported=supported, supports_args=_plain_sum, inplace=True
    )(fused_add_rms_norm)  # fmt: skip


def _register_quantizer() -> None:
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

    class RtkernelsQuantFP8(QuantFP8):
        """Activations to e4m3: a scale for the tensor (given or computed), for each token or for groups of columns.

        Scales of DeepGEMM's layouts, given scales of rows or blocks, bounds of scales and padded tokens stay vLLM's.
        """

        def forward_cuda(
            self, x: Tensor, scale: Tensor | None = None, scale_ub: Tensor | None = None, use_triton: bool = False
        ) -> tuple[Tensor, Tensor]:
            if self.num_token_padding is None and scale_ub is None and x.dtype in _DTYPES:
                if self.static and scale is not None and scale.numel() == 1 and self.group_shape.is_per_tensor():
                    return rtkernels.quantize_fp8(x, scale)[0], scale
                if not self.static and scale is None:
                    found = self._quantized(x)
                    if found is not None:
                        return found
            return super().forward_cuda(x, scale, scale_ub, use_triton)

        def _quantized(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
            """Return codes and computed scales in vLLM's shapes; None for a layout that stays vLLM's."""
            if not self.is_group_quant:
                rows = self.use_per_token_if_dynamic
                codes, scale = rtkernels.quantize_fp8(x, granularity="row" if rows else "tensor")
                return codes, scale.unsqueeze(-1)
            size, column = self.group_size, self.column_major_scales
            if self.use_ue8m0 or x.shape[-1] % size or (
                column and (size != 128 or x.dim() != 2 or (self.tma_aligned_scales and x.shape[0] % 4))
            ):  # fmt: skip
                return None
            codes, scale = rtkernels.quantize_fp8(
                x, granularity="group", group_size=size, scale_layout="column" if column else "row"
            )
            return codes, scale.t() if column else scale

    QuantFP8.register_oot(RtkernelsQuantFP8, name="QuantFP8")


def _register_layers() -> None:
    from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    class RtkernelsSiluAndMul(SiluAndMul):
        def forward_cuda(self, x: Tensor) -> Tensor:
            return rtkernels.glu(x)

    class RtkernelsGeluAndMul(GeluAndMul):
        def forward_cuda(self, x: Tensor) -> Tensor:
            return rtkernels.glu(x, act="gelu_tanh" if self.approximate == "tanh" else "gelu_erf")

    class RtkernelsRotaryEmbedding(RotaryEmbedding):
        def forward_cuda(
            self, positions: Tensor, query: Tensor, key: Tensor | None = None
        ) -> tuple[Tensor, Tensor | None]:
            cos, sin = self.cos_sin_cache.chunk(2, -1)
            heads = [t if t is None else t.view(1, positions.numel(), -1, self.head_size) for t in (query, key)]
            rtkernels.rope(
                heads[0], cos, sin, k=heads[1], positions=positions.view(1, -1), rotary=self.rotary_dim,
                interleaved=not self.is_neox_style, in_place=True,
            )  # fmt: skip
            return query, key

    SiluAndMul.register_oot(RtkernelsSiluAndMul, name="SiluAndMul")
    GeluAndMul.register_oot(RtkernelsGeluAndMul, name="GeluAndMul")
    RotaryEmbedding.register_oot(RtkernelsRotaryEmbedding, name="RotaryEmbedding")
    _register_quantizer()

    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    from rtkernels.integrations.vllm_moe import RtkernelsUnquantizedMoEMethod

    UnquantizedFusedMoEMethod.register_oot(RtkernelsUnquantizedMoEMethod, name="UnquantizedFusedMoEMethod")


def _register_attention() -> None:
    from vllm.v1.attention.backends.mla.prefill.registry import register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import register_backend

    register_backend("RTKERNELS", "rtkernels.integrations.vllm_attention.RtkernelsBackend")
    register_backend("RTKERNELS_MLA", "rtkernels.integrations.vllm_mla.RtkernelsMLABackend")
    register_mla_prefill_backend("RTKERNELS", "rtkernels.integrations.vllm_mla.RtkernelsMLAPrefillBackend")


def _register_fp8() -> None:
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.platforms import PlatformEnum

    from rtkernels.integrations import vllm_fp8

    register_linear_kernel(vllm_fp8.RtkernelsFp8LinearKernel, PlatformEnum.CUDA, "fp8")
    register_linear_kernel(vllm_fp8.RtkernelsFp8BlockLinearKernel, PlatformEnum.CUDA, "fp8_block")
    register_quantization_config(vllm_fp8.NAME)(vllm_fp8.RtkernelsFp8Config)


def register() -> None:
    """Register everything; vLLM calls it once in each of its processes."""
    _register_norms()
    _register_attention()
    _register_fp8()
    if os.environ.get("RTKERNELS_VLLM", "0") == "1":
        _register_layers()
