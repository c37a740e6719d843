"""Typical calls of every public function. mypy reads them, and a test runs them: what is declared is what comes."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

import rtkernels as rtk
from rtkernels.ops.act.glu_fp8 import GluFp8, GluFp8Gradients
from rtkernels.ops.act.glu_smooth_fp8 import GluSmoothFp8, GluSmoothFp8Gradients
from rtkernels.ops.gemm.fp8_linear import Fp8Weight
from rtkernels.ops.moe.moe_permute import MoePermuted
from rtkernels.ops.moe.moe_permute_fp8 import MoePermutedFp8
from rtkernels.ops.moe.moe_permute_smooth import MoePermutedSmooth
from rtkernels.ops.moe.moe_permute_smooth_t import MoePermutedChannel
from rtkernels.ops.multi.multi_tensor import TensorList
from rtkernels.ops.norm.norm_fp8 import NormFp8
from rtkernels.ops.quant.quantize_fp8 import QuantizedBoth
from rtkernels.ops.quant.quantize_fp8_experts import QuantizedExperts
from rtkernels.ops.quant.smooth_quant import SmoothQuantized
from rtkernels.ops.router.rms_norm_router import NormRouter
from rtkernels.ops.router.topk import TopK
from rtkernels.ops.router.topk_router import Routing

T = TypeVar("T")


# ---- what is wanted: by the checker, and when it runs ---------------------------------------------------------------


def tensor(value: Tensor) -> None:
    """A tensor."""
    assert isinstance(value, torch.Tensor), type(value)


def _tuple(value: tuple[Tensor, ...], count: int) -> None:
    assert type(value) is tuple and len(value) == count, value
    for item in value:
        tensor(item)


def pair(value: tuple[Tensor, Tensor]) -> None:
    """Two tensors."""
    _tuple(value, 2)


def triple(value: tuple[Tensor, Tensor, Tensor]) -> None:
    """Three tensors."""
    _tuple(value, 3)


def four(value: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """Four tensors."""
    _tuple(value, 4)


def a(kind: type[T], value: T) -> None:
    """A value of a type."""
    assert type(value) is kind, type(value)


# ---- the calls ------------------------------------------------------------------------------------------------------

F8 = torch.float8_e4m3fn
x, w, v = torch.ones(6, 256), torch.ones(256), torch.ones(6, 256) * 0.5
h, wide = x.bfloat16(), torch.ones(6, 256).bfloat16()
ids, counts = torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([1, 0, 3, 2])
offs, ends = torch.tensor([2, 6], dtype=torch.int32), torch.tensor([0, 2, 6], dtype=torch.int32)
matrix = torch.ones(8, 256)
cos, sin = torch.ones(64, 16), torch.zeros(64, 16)
q = torch.ones(1, 6, 4, 64, dtype=torch.bfloat16)
lengths = torch.ones(1, dtype=torch.int32)
choices = torch.tensor([[0, 1]] * 6)
index = rtk.moe_index(choices, 8, rows=128)


def norms() -> None:
    """The first call of a function is the plainest."""
    tensor(rtk.rms_norm(x, w))
    tensor(rtk.rms_norm(x, w, scale=w, shift=w))
    pair(rtk.rms_norm(x, w, residual=v))
    pair(rtk.rms_norm(x, w, return_rstd=True))
    triple(rtk.rms_norm(x, w, residual=v, return_rstd=True))
    a(rtk.NormOut, rtk.rms_norm(x, w, quant=F8))
    a(rtk.NormOut, rtk.rms_norm(x, w, residual=v, quant="nvfp4"))
    a(rtk.NormOut, rtk.rms_norm(x, w, quant=rtk.Quant(F8, 0.1), keep=True))
    a(rtk.NormOut, rtk.rms_norm(x, w, residual=v, gate=w))
    a(rtk.NormOut, rtk.rms_norm(x, w, residual=v, scale=w))
    a(rtk.NormOut, rtk.rms_norm(x, w, residual=v, shift=w))
    a(rtk.NormOut, rtk.rms_norm(x, w, residual=v, channel_scale=w))
    a(rtk.NormOut, rtk.rms_norm(x, w, residual=v, residual_out=torch.ones(6, 256)))
    a(rtk.NormOut, rtk.rms_norm(x, w, residual=v, bias=w))
    a(rtk.NormOut, rtk.rms_norm(x, w, style=torch.ones(6, 768)))
    either: Tensor | rtk.NormOut = rtk.rms_norm(x, w, quant=rtk.Quant(F8, 0.1))
    tensor(either[0])
    tensor(rtk.layer_norm(x, w, w))
    pair(rtk.layer_norm(x, w, residual=v))
    triple(rtk.layer_norm(x, w, return_statistics=True))
    four(rtk.layer_norm(x, w, residual=v, return_statistics=True))
    a(rtk.NormOut, rtk.layer_norm(x, w, quant=torch.int8))
    a(rtk.NormOut, rtk.layer_norm(x, w, residual=v, x_bias=w))
    a(rtk.NormOut, rtk.layer_norm(x, w, residual=v, gate=w))
    a(rtk.NormOut, rtk.layer_norm(x, w, quant=rtk.Quant(F8, 0.1), keep=True))
    a(rtk.NormOut, rtk.layer_norm(x, w, style=torch.ones(6, 768)))
    a(rtk.NormOut, rtk.layer_norm(x, w, residual=v, scale=w))
    a(rtk.NormOut, rtk.layer_norm(x, w, residual=v, shift=w))
    a(rtk.NormOut, rtk.layer_norm(x, w, residual=v, channel_scale=w))
    a(rtk.NormOut, rtk.layer_norm(x, w, residual=v, residual_out=torch.ones(6, 256)))
    codes: Tensor | rtk.NormOut = rtk.layer_norm(x, w, quant=rtk.Quant(F8, 0.1))
    tensor(codes[0])
    a(NormFp8, rtk.rms_norm_fp8(x, w, layout="both"))
    a(NormFp8, rtk.layer_norm_fp8(x, w, scale_layout="column"))
    tensor(rtk.group_rms_norm_gate(x, v, groups=2, layout="same"))


def activations() -> None:
    """Of the family act, and what is done to elements."""
    tensor(rtk.act(x, "gelu_tanh"))
    tensor(rtk.glu(x))
    tensor(rtk.glu(x, v, act="gelu_erf", weight=torch.ones(6)))
    tensor(rtk.glu(x, layout="interleaved"))
    a(rtk.GluOut, rtk.glu(x, quant=F8))
    a(rtk.GluOut, rtk.glu(x, quant=rtk.Quant(F8, 0.1), keep=True))
    codes: Tensor | rtk.GluOut = rtk.glu(x, quant=rtk.Quant(F8, 0.1))
    tensor(codes[0])
    a(GluFp8, rtk.glu_fp8(x, act="silu"))
    a(GluFp8Gradients, rtk.glu_fp8_backward(x[:, :128], x, keep="dense"))
    a(GluSmoothFp8, rtk.glu_smooth_fp8(x, w[:128]))
    a(GluSmoothFp8Gradients, rtk.glu_smooth_fp8_backward(x[:, :128], x, w))
    tensor(rtk.add_(x.clone(), v))
    tensor(rtk.scale_(x.clone(), 2.0))
    tensor(rtk.add_bias(x, w))
    tensor(rtk.add_residual(x, v, gate=w))
    tensor(rtk.channel_mul(x, w))
    tensor(rtk.euler_step(x, v, 0.1))
    tensor(rtk.cfg_combine(x, v, v, 2.0))


def reductions() -> None:
    """Of the families reduce and loss, and router losses."""
    tensor(rtk.softmax(x))
    tensor(rtk.log_softmax(x, dim=-1))
    tensor(rtk.row_dot(x, v))
    tensor(rtk.cross_entropy(x, ids))
    tensor(rtk.cross_entropy(x, ids, reduction="none"))
    pair(rtk.cross_entropy(x, ids, return_lse=True))
    pair(rtk.cross_entropy(x, ids, return_accuracy=True))
    triple(rtk.cross_entropy(x, ids, return_lse=True, return_accuracy=True))
    tensor(rtk.linear_cross_entropy(x, matrix, ids))
    pair(rtk.linear_cross_entropy(x, matrix, ids, return_lse=True))
    pair(rtk.linear_cross_entropy(x, matrix, ids, return_accuracy=True))
    triple(rtk.linear_cross_entropy(x, matrix, ids, return_lse=True, return_accuracy=True))
    tensor(rtk.linear_logprob(x, matrix, ids))
    pair(rtk.linear_logprob(x, matrix, ids, return_entropy=True))
    pair(rtk.linear_logprob(x, matrix, ids, return_lse=True, save="logits"))
    triple(rtk.linear_logprob(x, matrix, ids, return_entropy=True, return_lse=True))
    tensor(rtk.linear_divergence(x, matrix, x, matrix, beta=0.5))
    tensor(rtk.kl_div(x, v, reduction="batchmean"))
    tensor(rtk.jsd(x, v, from_logits=True))
    rtk.check_labels()
    tensor(rtk.load_balancing_loss(x[:, :8], choices, score="softmax"))
    tensor(rtk.router_z_loss(x, 0.1))


def rotations() -> None:
    """Of the family rope."""
    heads = torch.ones(1, 6, 8, 32)
    tensor(rtk.rope(heads, cos, sin))
    pair(rtk.rope(heads, cos, sin, k=heads * 2.0, layout="bshd"))
    pair(rtk.rope_table(6, 32))
    latent = torch.ones(6, 1, 4, 64)
    triple(rtk.mla_rope(latent, latent, torch.ones(6, 1, 32), cos, sin, layout="sbhd"))
    qkv = torch.ones(6, 1, 256)
    triple(rtk.qk_norm_rope(qkv, w[:32], w[:32], cos, sin, q_heads=4, kv_heads=2, head_order="grouped"))
    triple(rtk.qkv_split(x, 4, 2, rope=(cos[:6], sin[:6]), style="half"))


def quantisations() -> None:
    """Of the family quant."""
    pair(rtk.quantize_fp8(x))
    pair(rtk.quantize_fp8(x, granularity="row"))
    a(QuantizedBoth, rtk.quantize_fp8(x, granularity="group", layout="both"))
    a(QuantizedBoth, rtk.quantize_fp8(x, granularity="block", with_transposed=True))
    tensor(rtk.dequantize_fp8(x.to(F8), torch.ones(1)[0], granularity="tensor"))
    pair(rtk.quantize_int8(x, granularity="tensor"))
    a(QuantizedExperts, rtk.quantize_fp8_experts(x, counts, layout="row"))
    a(SmoothQuantized, rtk.quantize_fp8_smooth(x, w, granularity="row"))
    tensor(rtk.dequantize_fp8_smooth(x.to(F8), torch.ones(6)))
    rtk.quantize_fp8_shard_(torch.zeros(6, 256, dtype=F8), torch.ones(6), torch.ones(1536), 0)
    pair(rtk.quantize_fp8_hadamard(x))
    a(QuantizedBoth, rtk.quantize_fp8_hadamard(x, layout="both"))
    tensor(rtk.dequantize_fp8_hadamard(x.to(F8), torch.ones(6)))
    tensor(rtk.hadamard(x))
    tensor(rtk.column_absmax(x))
    tensor(rtk.smooth_factors(rtk.column_absmax(x)))
    triple(rtk.quantize_nvfp4(x, scale_rule="rne"))
    packed, scales, whole = rtk.quantize_nvfp4(x)
    tensor(rtk.dequantize_nvfp4(packed, scales, whole))
    a(int, rtk.nvfp4_scale_bytes(6, 256))
    tensor(rtk.nvfp4_unswizzle(rtk.nvfp4_swizzle(scales), 6, 256))
    tensor(rtk.nvfp4_swizzle(scales))
    pair(rtk.quantize_mxfp4(x, rule="ocp"))
    pair(rtk.quantize_mxfp8(x, rule="nv"))
    tensor(rtk.dequantize_mxfp4(*rtk.quantize_mxfp4(x)))
    tensor(rtk.dequantize_mxfp8(*rtk.quantize_mxfp8(x)))


def experts() -> None:
    """Of the families moe and router."""
    a(rtk.MoeIndex, rtk.moe_index(choices, 8, rows=128))
    a(int, rtk.moe_rows(6, 2, 8))
    triple(rtk.moe_row_id_map(x[:, :8] > 0, rows=400))
    tensor(rtk.moe_permute(x, index))
    a(MoePermuted, rtk.moe_permute(x, index, probs=torch.ones(6, 2)))
    a(MoePermuted, rtk.moe_permute(x, index, scale=torch.ones(6)))
    tensor(rtk.moe_unpermute(rtk.moe_permute(x, index), index))
    a(MoePermutedFp8, rtk.moe_permute_fp8(x, index, layout="row"))
    a(MoePermutedSmooth, rtk.moe_permute_smooth(x, index, torch.ones(8, 256)))
    a(MoePermutedChannel, rtk.moe_permute_smooth_t(x, index))
    a(NormRouter, rtk.rms_norm_router(h, None, matrix.bfloat16(), precision="high"))
    tensor(rtk.router_gemm(h, matrix.bfloat16(), precision="fast"))
    a(TopK, rtk.topk(x, 3))
    a(Routing, rtk.topk_router(x[:, :8], 2, score="sigmoid"))


def products() -> None:
    """Of the family gemm."""
    tensor(rtk.scaled_mm(h, matrix.bfloat16()))
    tensor(rtk.scaled_mm(h, matrix.bfloat16(), act="silu", recipe="none", backend="auto"))
    pair(rtk.scaled_mm(h, matrix.bfloat16(), quant_out="row"))
    tensor(rtk.gated_mm(h, matrix.bfloat16()))
    pair(rtk.gated_mm(h, matrix.bfloat16(), act="silu", quant_out="row"))
    stack = torch.ones(2, 8, 256).bfloat16()
    tensor(rtk.grouped_mm(h, stack, offs=offs, act=None))
    tensor(rtk.grouped_mm_masked(torch.ones(2, 6, 256).bfloat16(), stack, masked_m=offs))
    tensor(rtk.grouped_wgrad(h[:, :16], h, offs=offs))
    tensor(rtk.fp8_linear(x, torch.ones(64, 256), recipe="block", wgrad="fp8"))
    a(Fp8Weight, rtk.fp8_weight(torch.ones(128, 256), recipe="block"))


def rows() -> None:
    """Of the families index and layout."""
    tensor(rtk.embedding(ids, x))
    tensor(rtk.embedding_grad_(matrix.clone(), ids, x))
    tensor(rtk.id_bounds(ids[:2]))
    tensor(rtk.index_select(x, ids))
    pair(rtk.index_select(x, ids, scale=torch.ones(6)))
    tensor(rtk.scatter_add(x, ids, 8))
    tensor(rtk.sort_chunks(x, torch.tensor([2, 4]), torch.tensor([1, 0])))
    pair(rtk.sort_chunks(x, torch.tensor([2, 4]), torch.tensor([1, 0]), scale=torch.ones(6)))
    tensor(rtk.transpose(x))
    a(list, rtk.transpose([x, v]))
    tensor(rtk.transpose_experts(x, counts))
    tensor(rtk.patchify(torch.ones(1, 8, 8, 3), 4, img_layout="nhwc", order="chw"))
    tensor(rtk.repeat_heads(torch.ones(6, 4, 64), 2))


def attentions() -> None:
    """Of the family attention."""
    tensor(rtk.attention(q, q, q))
    tensor(rtk.attention(q, q, q, causal=True, layout="bhld", backend="auto"))
    pair(rtk.attention(q, q, q, return_lse=True))
    tensor(rtk.attention_varlen(q[0], q[0], q[0], ends, ends, 4, 4))
    pair(rtk.attention_varlen(q[0], q[0], q[0], ends, ends, 4, 4, return_lse=True))
    tensor(rtk.attention_decode(q[:, 0], q, q, lengths))
    pair(rtk.attention_decode(q[:, 0], q, q, lengths, return_lse=True))
    i8, s = q.to(torch.int8), torch.ones(1, 4, 6)
    tensor(rtk.attention_quantized(i8, i8, q, s, s))
    pair(rtk.attention_quantized(i8, i8, q, s, s, return_lse=True))
    tensor(rtk.mla_attention(q, q, q))
    pair(rtk.mla_attention(q, q, q, return_lse=True))
    tensor(rtk.mla_decode(q[:, 0], q[:, :, 0], lengths, value_width=64))
    pair(rtk.mla_decode(q[:, 0], q[:, :, 0], lengths, value_width=64, return_lse=True))
    chosen = torch.zeros(6, 1, dtype=torch.int32)
    tensor(rtk.sparse_mla(q[0], q[0, :, 0], chosen, value_width=64))
    pair(rtk.sparse_mla(q[0], q[0, :, 0], chosen, value_width=64, return_lse=True))
    tensor(rtk.indexer_logits(q[0], q[0, :, 0], torch.ones(6, 4)))
    tensor(rtk.indexer_topk(q[0], q[0, :, 0], torch.ones(6, 4), 2))
    tensor(rtk.sage_attention(q, q, q, qk="int8", pv="16"))
    pair(rtk.sage_attention(q, q, q, granularity="block", return_lse=True))
    tensor(rtk.lightning_attention(q, q, q, torch.ones(4)))
    pair(rtk.lightning_attention(q, q, q, torch.ones(4), return_state=True))
    tensor(rtk.lightning_attention_step(q[:, 0], q[:, 0], q[:, 0], torch.ones(4), torch.zeros(1, 4, 64, 64)))
    g = torch.zeros(1, 6, 4)
    tensor(rtk.gated_delta_rule(q, q, q, g, g))
    pair(rtk.gated_delta_rule(q, q, q, g, g, return_state=True))
    tensor(rtk.gated_delta_rule_step(q[:, 0], q[:, 0], q[:, 0], None, g[:, 0], torch.zeros(1, 4, 64, 64)))
    tensor(rtk.gated_delta_rule(q, q, q, g, g, A_log=torch.ones(4), lower_bound=-5.0, beta_sigmoid=True))
    tensor(rtk.ssd(q, g, torch.ones(4), q, q))
    pair(rtk.ssd(q, g, torch.ones(4), q, q, return_state=True))
    tensor(rtk.ssd_step(q[:, 0], g[:, 0], torch.ones(4), q[:, 0], q[:, 0], torch.zeros(1, 4, 64, 64)))
    tensor(rtk.causal_conv1d(g, torch.ones(4, 4)))
    pair(rtk.causal_conv1d(g, torch.ones(4, 4), return_state=True))
    tensor(rtk.causal_conv1d_step(g[:, 0], torch.ones(4, 4), None, torch.zeros(1, 4, 4), activation=None))
    pair(rtk.merge_attention([q, q], [torch.ones(1, 4, 6)] * 2, layout="blhd"))
    rtk.quantize_qk(q, q, granularity="token")
    pair(rtk.quantize_v(q))
    tensor(rtk.sdpa(q, q, q, is_causal=True))
    rtk.append_kv_cache(q, q, q.clone(), q.clone(), torch.zeros(1, dtype=torch.int32))


def lists() -> None:
    """Of the family multi."""
    tensor(rtk.multi_norm([x, v]))
    pair(rtk.multi_norm([x, v], per_tensor=True))
    tensor(rtk.multi_count_zeros([x, v]))
    pair(rtk.multi_count_zeros([x, v], per_tensor=True))
    tensor(rtk.multi_clip_norm_([x.clone()], 0.5))
    rtk.multi_clip_([x.clone()], 0.5)
    rtk.multi_copy_([x.clone()], [v])
    rtk.multi_scale_([x.clone()], 2.0)
    a(TensorList, rtk.tensor_list([x, v]))


ALL = (norms, activations, reductions, rotations, quantisations, experts, products, rows, attentions, lists)
