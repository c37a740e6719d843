"""A small call of every public function, for host rows: what it may cost beside torch's ``x * 2``, and the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ROWS, COLS, EXPERTS = 64, 1024, 8

# How many times the host time of ``x * 2`` a call without gradients may take.
TORCH = 1.0
SINGLE_LAUNCH = 1.5
SEVERAL = 2.5

# Functions without a launch of their own, or whose launch is another function's here.
WITHOUT_ROW = frozenset(("check_labels", "explain", "moe_rows", "nvfp4_scale_bytes", "tensor_list"))

Case = Callable[[], Any]


def calls(rtk: Any, device: str) -> dict[str, tuple[float, Callable[[], Case]]]:
    """Every public function, and some options of a few: name -> (limit, function that makes tensors and gives a call).

    The call is made without another one around it, as that of ``x * 2`` is.
    """
    import torch

    from bench import rows

    def rand(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    def ones(*shape: int) -> Any:
        return torch.ones(*shape, device=device)

    def numbers(*values: int, dtype: Any = torch.int32) -> Any:
        return torch.tensor(values, device=device, dtype=dtype)

    def f8(*shape: int) -> Any:
        return rand(*shape).to(torch.float8_e4m3fn)

    x, w, b, y, z = rand(ROWS, COLS), rand(COLS), rand(COLS), rand(ROWS, COLS), rand(ROWS, COLS)
    gated = rand(ROWS, 2 * COLS)
    one, row_scales, smooth, smooth_gated = ones(()), ones(ROWS), ones(COLS), ones(2 * COLS)
    permuted_scales, smooth_experts, main_grad = ones(2 * ROWS), ones(EXPERTS, COLS), ones(ROWS, COLS)
    counts, ids = numbers(*[ROWS // EXPERTS] * EXPERTS), torch.arange(ROWS, device=device)
    labels, logits = ids % 16, rand(ROWS, EXPERTS)
    choices = (torch.arange(2 * ROWS, device=device) % EXPERTS).view(ROWS, 2)
    q, k, v = rand(1, ROWS, 8, 64), rand(1, ROWS, 2, 64), rand(1, ROWS, 2, 64)
    packed_heads, new_q, new_kv = (q[0], k[0], v[0]), q[:, :1], (k[:, :1], v[:, :1])
    cache = rand(1, 256, 2, 64), rand(1, 256, 2, 64)
    lengths, starts, offsets = numbers(ROWS), numbers(0, ROWS), counts.cumsum(0).to(torch.int32)
    tensors, others = [ones(256) for _ in range(8)], [ones(256) for _ in range(8)]
    expert_rows = x.view(EXPERTS, -1, COLS)
    codes, order = f8(ROWS, COLS), torch.arange(EXPERTS, device=device)
    square, experts, router = rand(COLS, COLS), rand(EXPERTS, COLS, COLS), rand(EXPERTS, COLS)
    scales = torch.zeros(ROWS, COLS // 16, device=device, dtype=torch.uint8)

    def index() -> Any:
        return rtk.moe_index(choices, EXPERTS)

    def mxfp(quantize: Any, dequantize: Any) -> Case:
        packed, scales = quantize(x)[:2]
        return lambda: dequantize(packed, scales)

    def with_index(call: Callable[[Any], Case]) -> Callable[[], Case]:
        return lambda: call(index())

    def unpermuted(found: Any) -> Case:
        permuted = rand(2 * ROWS, COLS)
        return lambda: rtk.moe_unpermute(permuted, found)

    def sorted_scales() -> Case:
        swizzled = rtk.nvfp4_swizzle(scales)
        return lambda: rtk.nvfp4_unswizzle(swizzled, ROWS, COLS)

    def quantized_attention() -> Case:
        q8, q_scale, k8, k_scale, *_ = rtk.quantize_qk(*heads8[:2])
        return lambda: rtk.attention_quantized(q8, k8, heads8[2], q_scale, k_scale)

    cos, sin = rtk.rope_table(ROWS, 64, device=device)
    pos = rand(ROWS, 1, 64)
    packed_qkv = rand(ROWS, 1, 12 * 64)
    mla_q, mla_kv = rand(ROWS, 1, 8, 192), rand(ROWS, 1, 8, 256)
    latent, latent_cache = rand(1, 8, 576), rand(1, 256, 576)
    decay, state = ones(8), torch.zeros(1, 8, 64, 64, device=device)
    heads8 = rand(1, ROWS, 8, 64), rand(1, ROWS, 8, 64), rand(1, ROWS, 8, 64)
    step = rand(1, 8, 64), rand(1, 8, 64), rand(1, 8, 64)
    halves, lses = [q, rand(1, ROWS, 8, 64)], [ones(1, 8, ROWS), ones(1, 8, ROWS)]
    bits = torch.ones(ROWS, EXPERTS, device=device, dtype=torch.bool)
    image, time = rand(1, 64, 64, 3), ones(())

    single: dict[str, Callable[[], Case]] = {
        "rms_norm residual": lambda: lambda: rtk.rms_norm(x, w, residual=y),
        "layer_norm residual": lambda: lambda: rtk.layer_norm(x, w, b, residual=y),
        "rms_norm_fp8": lambda: lambda: rtk.rms_norm_fp8(x, w),
        "layer_norm_fp8": lambda: lambda: rtk.layer_norm_fp8(x, w),
        "group_rms_norm_gate": lambda: lambda: rtk.group_rms_norm_gate(x, y, w, groups=8),
        "act": lambda: lambda: rtk.act(x, "silu"),
        "glu_fp8": lambda: lambda: rtk.glu_fp8(gated),
        "glu_smooth_fp8": lambda: lambda: rtk.glu_smooth_fp8(gated, smooth),
        "log_softmax": lambda: lambda: rtk.log_softmax(x),
        "row_dot": lambda: lambda: rtk.row_dot(x, y),
        "rope": lambda: lambda: rtk.rope(q, cos, sin),
        "qk_norm_rope": lambda: lambda: rtk.qk_norm_rope(packed_qkv, None, None, cos, sin, q_heads=8, kv_heads=2),
        "qkv_split": lambda: lambda: rtk.qkv_split(packed_qkv, 8, 2),
        "column_absmax": lambda: lambda: rtk.column_absmax(x),
        "quantize_fp8 row": lambda: lambda: rtk.quantize_fp8(x, granularity="row"),
        "quantize_fp8 group": lambda: lambda: rtk.quantize_fp8(x, granularity="group"),
        "quantize_fp8_experts": lambda: lambda: rtk.quantize_fp8_experts(x, counts),
        "quantize_fp8_hadamard": lambda: lambda: rtk.quantize_fp8_hadamard(x),
        "quantize_fp8_smooth": lambda: lambda: rtk.quantize_fp8_smooth(x, smooth),
        "hadamard": lambda: lambda: rtk.hadamard(x),
        "quantize_nvfp4": lambda: lambda: rtk.quantize_nvfp4(x, global_scale=1.0),
        "quantize_mxfp4": lambda: lambda: rtk.quantize_mxfp4(x),
        "quantize_mxfp8": lambda: lambda: rtk.quantize_mxfp8(x),
        "dequantize_mxfp4": lambda: mxfp(rtk.quantize_mxfp4, rtk.dequantize_mxfp4),
        "dequantize_mxfp8": lambda: mxfp(rtk.quantize_mxfp8, rtk.dequantize_mxfp8),
        "dequantize_nvfp4": lambda: mxfp(rtk.quantize_nvfp4, rtk.dequantize_nvfp4),
        "moe_permute": with_index(lambda found: lambda: rtk.moe_permute(x, found)),
        "moe_permute_smooth": with_index(lambda found: lambda: rtk.moe_permute_smooth(x, found, smooth_experts)),
        "moe_unpermute": with_index(unpermuted),
        "topk": lambda: lambda: rtk.topk(logits, 2),
        "topk_router": lambda: lambda: rtk.topk_router(logits, 2),
        "router_z_loss": lambda: lambda: rtk.router_z_loss(logits),
        "embedding": lambda: lambda: rtk.embedding(ids, x),
        "index_select": lambda: lambda: rtk.index_select(x, ids),
        "patchify": lambda: lambda: rtk.patchify(image, 2),
        "repeat_heads": lambda: lambda: rtk.repeat_heads(k, 4),
        "transpose": lambda: lambda: rtk.transpose(x),
        "transpose_experts": lambda: lambda: rtk.transpose_experts(x, counts),
        "add_": lambda: lambda: rtk.add_(x, y),
        "scale_": lambda: lambda: rtk.scale_(x, 1.0),
        "add_bias": lambda: lambda: rtk.add_bias(x, w),
        "add_residual": lambda: lambda: rtk.add_residual(x, y),
        "cfg_combine": lambda: lambda: rtk.cfg_combine(x, y, z, 1.0),
        "channel_mul": lambda: lambda: rtk.channel_mul(x, w),
        "euler_step": lambda: lambda: rtk.euler_step(x, y, time),
        "multi_scale_": lambda: lambda: rtk.multi_scale_(tensors, 1.0),
        "multi_copy_": lambda: lambda: rtk.multi_copy_(tensors, others),
        "attention": lambda: lambda: rtk.attention(q, k, v, causal=True),
        "attention_quantized": quantized_attention,
        "lightning_attention_step": lambda: lambda: rtk.lightning_attention_step(*step, decay, state),
        "quantize_v": lambda: lambda: rtk.quantize_v(v),
        "scaled_mm": lambda: lambda: rtk.scaled_mm(x, square),
        "decode_linear": lambda: lambda: rtk.decode_linear(x[:1], square, norm_weight=w),
        "gated_mm": lambda: lambda: rtk.gated_mm(x, square),
        "grouped_mm": lambda: lambda: rtk.grouped_mm(x, experts, offs=offsets),
        "grouped_mm_masked": lambda: lambda: rtk.grouped_mm_masked(
            expert_rows, experts, masked_m=counts
        ),
        "grouped_wgrad": lambda: lambda: rtk.grouped_wgrad(x, y, offs=offsets),
    }  # fmt: skip
    several: dict[str, Callable[[], Case]] = {
        "dequantize_fp8_hadamard": lambda: lambda: rtk.dequantize_fp8_hadamard(codes, row_scales),
        "dequantize_fp8_smooth": lambda: lambda: rtk.dequantize_fp8_smooth(codes, row_scales, smooth),
        "smooth_factors": lambda: lambda: rtk.smooth_factors(smooth),
        "quantize_fp8_shard_": lambda: lambda: rtk.quantize_fp8_shard_(codes, row_scales, smooth_gated, 0),
        "nvfp4_swizzle": lambda: lambda: rtk.nvfp4_swizzle(scales),
        "nvfp4_unswizzle": sorted_scales,
        "id_bounds": lambda: lambda: rtk.id_bounds(ids),
        "glu_fp8_backward": lambda: lambda: rtk.glu_fp8_backward(x, gated),
        "moe_permute_fp8": with_index(lambda found: lambda: rtk.moe_permute_fp8(x, found, layout="row")),
        "sdpa": lambda: lambda: rtk.sdpa(*heads8),
        "attention_varlen": lambda: lambda: rtk.attention_varlen(*packed_heads, starts, starts, ROWS, ROWS),
        "quantize_qk": lambda: lambda: rtk.quantize_qk(q, k),
        "merge_attention": lambda: lambda: rtk.merge_attention(halves, lses),
        "multi_clip_": lambda: lambda: rtk.multi_clip_(tensors, 1.0),
        "append_kv_cache": lambda: lambda: rtk.append_kv_cache(*new_kv, *cache, lengths),
        "glu_smooth_fp8_backward": lambda: lambda: rtk.glu_smooth_fp8_backward(x, gated, smooth_gated),
        "quantize_fp8 channel": lambda: lambda: rtk.quantize_fp8(x, granularity="channel"),
        "rope_table": lambda: lambda: rtk.rope_table(ROWS, 64, device=device),
        "mla_rope": lambda: lambda: rtk.mla_rope(mla_q, mla_kv, pos, cos, sin),
        "cross_entropy": lambda: lambda: rtk.cross_entropy(x, labels),
        "linear_cross_entropy": lambda: lambda: rtk.linear_cross_entropy(x, square, labels),
        "kl_div": lambda: lambda: rtk.kl_div(x, y, log_target=True),
        "jsd": lambda: lambda: rtk.jsd(x, y),
        "moe_index": lambda: index,
        "moe_row_id_map": lambda: lambda: rtk.moe_row_id_map(bits),
        "moe_permute_smooth_t": with_index(lambda found: lambda: rtk.moe_permute_smooth_t(x, found, permuted_scales)),
        "router_gemm": lambda: lambda: rtk.router_gemm(x, router),
        "rms_norm_router": lambda: lambda: rtk.rms_norm_router(x, w, router),
        "load_balancing_loss": lambda: lambda: rtk.load_balancing_loss(logits, choices),
        "embedding_grad_": lambda: lambda: rtk.embedding_grad_(main_grad, ids, x),
        "scatter_add": lambda: lambda: rtk.scatter_add(x, ids, ROWS),
        "sort_chunks": lambda: lambda: rtk.sort_chunks(x, counts, order),
        "multi_norm": lambda: lambda: rtk.multi_norm(tensors),
        "multi_clip_norm_": lambda: lambda: rtk.multi_clip_norm_(tensors, 1e9),
        "multi_count_zeros": lambda: lambda: rtk.multi_count_zeros(tensors),
        "fp8_linear": lambda: lambda: rtk.fp8_linear(x, square),
        "fp8_weight": lambda: lambda: rtk.fp8_weight(square),
        "attention_decode": lambda: lambda: rtk.attention_decode(new_q, *cache, lengths),
        "mla_attention": lambda: lambda: rtk.mla_attention(*heads8),
        "mla_decode": lambda: lambda: rtk.mla_decode(latent, latent_cache, lengths),
        "lightning_attention": lambda: lambda: rtk.lightning_attention(*heads8, decay),
        "sage_attention": lambda: lambda: rtk.sage_attention(*heads8),
    }  # fmt: skip
    return {
        "rms_norm": (TORCH, lambda: lambda: rtk.rms_norm(x, w, eps=1e-6)),
        "layer_norm": (TORCH, lambda: lambda: rtk.layer_norm(x, w, b)),
        "glu": (TORCH, lambda: lambda: rtk.glu(gated)),
        "softmax": (TORCH, lambda: lambda: rtk.softmax(x)),
        "quantize_fp8": (TORCH, lambda: lambda: rtk.quantize_fp8(x)),
        "quantize_fp8 static": (TORCH, lambda: lambda: rtk.quantize_fp8(x, one)),
        "dequantize_fp8": (TORCH, lambda: lambda: rtk.dequantize_fp8(codes, one)),
        **{name: (SINGLE_LAUNCH, made) for name, made in single.items()},
        **{name: (SEVERAL, made) for name, made in several.items()},
        **{name: (SINGLE_LAUNCH, lambda call=call: call) for name, call in rows.host_calls(device).items()},
    }


def limits() -> dict[str, float]:
    """Return what each host row without gradients may take beside ``x * 2``, by the row's name."""
    import rtkernels as rtk

    return {f"{name} no_grad": limit for name, (limit, _) in calls(rtk, "cpu").items()}
