"""Every public name and the module that has it: ``rtkernels.<name>`` imports that module when it is first used.

``__init__.pyi``, which type checkers and editors read, is written from this table by ``write_stub``.
"""

from __future__ import annotations

from pathlib import Path

OPS = {
    "group_rms_norm_gate": "ops.norm.group_rms_norm_gate",
    "layer_norm": "ops.norm.layer_norm",
    "layer_norm_fp8": "ops.norm.norm_fp8",
    "rms_norm": "ops.norm.rms_norm",
    "rms_norm_fp8": "ops.norm.norm_fp8",
    "act": "ops.act.act",
    "glu": "ops.act.glu",
    "glu_fp8": "ops.act.glu_fp8",
    "glu_fp8_backward": "ops.act.glu_fp8",
    "glu_smooth_fp8": "ops.act.glu_smooth_fp8",
    "glu_smooth_fp8_backward": "ops.act.glu_smooth_fp8",
    "log_softmax": "ops.reduce.softmax",
    "row_dot": "ops.reduce.row_dot",
    "softmax": "ops.reduce.softmax",
    "mla_rope": "ops.rope.mla_rope",
    "qk_norm_rope": "ops.rope.qk_norm_rope",
    "qkv_split": "ops.attention.qkv_split",
    "rope": "ops.rope.rope",
    "rope_table": "ops.rope.rope_table",
    "check_labels": "ops.loss.cross_entropy",
    "cross_entropy": "ops.loss.cross_entropy",
    "jsd": "ops.loss.divergence",
    "kl_div": "ops.loss.divergence",
    "linear_cross_entropy": "ops.loss.linear_cross_entropy",
    "column_absmax": "ops.quant.column_absmax",
    "dequantize_fp8": "ops.quant.quantize_fp8",
    "dequantize_mxfp4": "ops.quant.nvfp4",
    "dequantize_mxfp8": "ops.quant.nvfp4",
    "dequantize_nvfp4": "ops.quant.nvfp4",
    "nvfp4_scale_bytes": "ops.quant.nvfp4",
    "nvfp4_swizzle": "ops.quant.nvfp4",
    "nvfp4_unswizzle": "ops.quant.nvfp4",
    "quantize_mxfp4": "ops.quant.nvfp4",
    "quantize_mxfp8": "ops.quant.nvfp4",
    "quantize_nvfp4": "ops.quant.nvfp4",
    "dequantize_fp8_hadamard": "ops.quant.hadamard",
    "dequantize_fp8_smooth": "ops.quant.smooth_quant",
    "hadamard": "ops.quant.hadamard",
    "quantize_fp8": "ops.quant.quantize_fp8",
    "quantize_fp8_experts": "ops.quant.quantize_fp8_experts",
    "quantize_fp8_hadamard": "ops.quant.hadamard",
    "quantize_fp8_shard_": "ops.quant.smooth_shard",
    "quantize_fp8_smooth": "ops.quant.smooth_quant",
    "smooth_factors": "ops.quant.smooth_quant",
    "moe_index": "ops.moe.moe_index",
    "moe_permute": "ops.moe.moe_permute",
    "moe_permute_fp8": "ops.moe.moe_permute_fp8",
    "moe_permute_smooth": "ops.moe.moe_permute_smooth",
    "moe_permute_smooth_t": "ops.moe.moe_permute_smooth_t",
    "moe_row_id_map": "ops.moe.moe_index",
    "moe_rows": "ops.moe.moe_index",
    "moe_unpermute": "ops.moe.moe_permute",
    "fp8_linear": "ops.gemm.fp8_linear",
    "fp8_weight": "ops.gemm.fp8_linear",
    "load_balancing_loss": "ops.router.router_loss",
    "rms_norm_router": "ops.router.rms_norm_router",
    "router_gemm": "ops.router.router_gemm",
    "router_z_loss": "ops.router.router_loss",
    "topk": "ops.router.topk",
    "topk_router": "ops.router.topk_router",
    "gated_mm": "ops.gemm.gated_mm",
    "grouped_mm": "ops.gemm.grouped_mm",
    "grouped_mm_masked": "ops.gemm.grouped_mm",
    "grouped_wgrad": "ops.gemm.grouped_mm",
    "scaled_mm": "ops.gemm.scaled_mm",
    "embedding": "ops.index.embedding",
    "embedding_grad_": "ops.index.embedding",
    "id_bounds": "ops.index.id_bounds",
    "index_select": "ops.index.row_moves",
    "scatter_add": "ops.index.row_moves",
    "sort_chunks": "ops.index.row_moves",
    "patchify": "ops.layout.patchify",
    "repeat_heads": "ops.layout.patchify",
    "transpose": "ops.layout.transpose",
    "transpose_experts": "ops.layout.transpose",
    "append_kv_cache": "ops.attention.append_kv_cache",
    "attention": "ops.attention.attention",
    "attention_decode": "ops.attention.decode",
    "attention_varlen": "ops.attention.attention",
    "lightning_attention": "ops.attention.lightning",
    "lightning_attention_step": "ops.attention.lightning",
    "merge_attention": "ops.attention.merge",
    "mla_attention": "ops.attention.mla",
    "mla_decode": "ops.attention.mla_decode",
    "sdpa": "ops.attention.sdpa",
    "add_": "ops.pointwise.inplace",
    "add_bias": "ops.pointwise.add_residual",
    "add_residual": "ops.pointwise.add_residual",
    "cfg_combine": "ops.pointwise.euler_step",
    "channel_mul": "ops.pointwise.add_residual",
    "euler_step": "ops.pointwise.euler_step",
    "scale_": "ops.pointwise.inplace",
    "multi_clip_": "ops.multi.multi_clip",
    "multi_clip_norm_": "ops.multi.multi_tensor",
    "multi_copy_": "ops.multi.multi_tensor",
    "multi_count_zeros": "ops.multi.multi_tensor",
    "multi_norm": "ops.multi.multi_tensor",
    "multi_scale_": "ops.multi.multi_tensor",
    "tensor_list": "ops.multi.multi_tensor",
}
MODULES = ("aten", "cache", "compat", "errors", "interop", "models", "nn", "optim")
OTHERS = {
    "warm": "runtime.warm",
    "emulate": "emulator",
    "disable": "aten",
    "enable": "aten",
    "report": "aten",
    "use": "aten",
    "pointwise": "aten.custom",
    "explain": "ops.gemm.explain",
    "capabilities": "runtime.launch.capabilities",
    "Workspace": "runtime.launch.capabilities",
    "GluOut": "ops.act.glu_combined",
    "NormOut": "ops.norm.norm_modulated",
    "Quant": "ops.shared.row_quant",
    "MoeIndex": "ops.moe.moe_index_layout",
    "RtkError": "errors",
    "ArgumentError": "errors",
    "SourceError": "errors",
    "KernelCompileError": "errors",
    "ToolkitError": "errors",
    "UnsupportedDeviceError": "errors",
    "NotWarmError": "errors",
}
NAMES = {**OPS, **OTHERS}


def stub() -> str:
    """Return the text of ``__init__.pyi``."""
    lines = ["# Written by rtkernels/_public.py (write_stub) from the table there.", ""]
    lines += [f"from rtkernels import {name} as {name}" for name in sorted(MODULES)]
    imports = sorted((module, name) for name, module in NAMES.items())
    lines += [f"from rtkernels.{module} import {name} as {name}" for module, name in imports]
    return "\n".join([*lines, "", "__version__: str", ""])


def write_stub() -> None:
    """Write ``__init__.pyi`` anew."""
    Path(__file__).with_name("__init__.pyi").write_text(stub())
