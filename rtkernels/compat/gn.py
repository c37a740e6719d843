"""The matrix products and attentions of gn_kernels, by the same names.

Products: a ``[m, k]`` is contiguous; b is ``[k, n]``, and its transpose is contiguous.

A byte holds the 4-bit codes of two neighbours along k, the first in the low half. Scales of 4-bit floats are in blocks
of 128 x 4. Unlike in gn_kernels, sizes need not be multiples of tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.attention import attention, attention_varlen
from rtkernels.ops.attention.quantized import attention_quantized
from rtkernels.ops.gemm.scaled_mm import scaled_mm

_ACCUMULATORS = {None: "auto", torch.float32: "fp32", torch.float16: "fp16", torch.int32: "int32"}


def int4_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return the exact int32 product ``[m, n]`` of int4 a ``[m, k/2]`` and b ``[k/2, n]``, stored as int8."""
    return scaled_mm(a, b, packed="int4", b_layout="kn")


def row_scaled_int4_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Return :func:`int4_mm` times float32 scales ``[m, 1]`` and ``[1, n]``, in bfloat16."""
    return scaled_mm(a, b, scale_a, scale_b, recipe="row", packed="int4", b_layout="kn")


def fp8_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return the bfloat16 product ``[m, n]`` of fp8 operands."""
    return scaled_mm(a, b, b_layout="kn", out_dtype=torch.bfloat16)


def row_scaled_fp8_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Return :func:`fp8_mm` times float32 scales ``[m, 1]`` and ``[1, n]``."""
    return scaled_mm(a, b, scale_a, scale_b, recipe="row", b_layout="kn", out_dtype=torch.bfloat16)


def mxfp4_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the bfloat16 product ``[m, n]`` of e2m1 operands (two in a byte) with one e8m0 scale per 32 values."""
    scales = scale_a.reshape(-1), scale_b.reshape(-1)
    return scaled_mm(a, b, *scales, recipe="mx32", packed="e2m1", bias=bias, b_layout="kn")


def nvfp4_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, output_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return the bfloat16 product of e2m1 operands with an e4m3 scale per 16 values and one float32 output scale."""
    scales = scale_a.reshape(-1), scale_b.reshape(-1)
    return scaled_mm(
        a, b, *scales, recipe="nvfp4", packed="e2m1", global_scale=output_scale, bias=bias, b_layout="kn"
    )  # fmt: skip


def mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    acc_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the product of 16-bit or 32-bit floats (any strides), fp8 or int8, with optional row and column scales.

    Args:
        a: ``[m, k]``.
        b: ``[k, n]``.
        scale_a: float32 ``[m, 1]``, or None.
        scale_b: float32 ``[1, n]``, or None.
        bias: ``[n]``, added in fp32.
        acc_dtype: Dtype of the accumulation: float32, float16 or int32.
        out_dtype: Dtype of the result. Default: the operands' dtype for 16-bit and 32-bit floats, bfloat16 for fp8 and
            with scales, int32 for int8.

    Raises:
        ArgumentError: `acc_dtype` is not one of these.
    """
    if acc_dtype not in _ACCUMULATORS:
        raise ArgumentError(f"acc_dtype is {acc_dtype}; expected float32, float16 or int32")
    backend = "torch" if a.dtype == torch.float32 and a.is_cuda else "auto"
    return scaled_mm(
        a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype, acc=_ACCUMULATORS[acc_dtype], b_layout="kn",
        backend=backend,
    )  # fmt: skip


def block2d_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return the product of int8 or fp8 operands with one scale per tile: ``[m/q, k/q]`` and ``[k/q, n/q]``."""
    return scaled_mm(a, b, scale_a, scale_b, recipe="tile", b_layout="kn", out_dtype=out_dtype)


def attn_int8_qk(q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor, scale_k: Tensor) -> Tensor:
    """Attention of int8 q and k with 16-bit v, all ``[b, l, h, d]``; float32 scales ``[b, h, l]``."""
    return attention_quantized(q, k, v, scale_q, scale_k)


def attn_int8(q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor, scale_k: Tensor, scale_v: Tensor) -> Tensor:
    """Attention of int8 q, k ``[b, h, l, d]`` and v ``[b, h, d, keys]``; v has one scale per column and 64 keys."""
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return attention_quantized(q, k, v, scale_q, scale_k, scale_v).transpose(1, 2)


def attn_mxfp8_qk(q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor, scale_k: Tensor) -> Tensor:
    """Attention of MXFP8 q and k ``[b, h, l, d]`` with a power-of-two scale (e8m0, by rows) per 32 columns."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return attention_quantized(q, k, v, scale_q, scale_k).transpose(1, 2)


def attn(
    q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor | None = None, scale_k: Tensor | None = None, causal: bool = False,
    qk_fp16_acc: bool = False, pv_fp16_acc: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of ``[b, l, h, d]``: 16-bit q and k, or int8 or fp8 with float32 scales ``[b, h, l]``.

    Sums in fp16 are for float16 without scales, on GPUs that gain from them: ``attention(acc=)``.
    """
    acc = {(False, False): "fp32", (True, False): "fp16_qk", (False, True): "fp16_pv"}
    if scale_q is None or scale_k is None:
        return attention(q, k, v, causal=causal, acc=acc.get((qk_fp16_acc, pv_fp16_acc), "fp16"))
    return attention_quantized(q, k, v, scale_q, scale_k, causal=causal)


def varlen_attn(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, max_q_len: int, max_kv_len: int,
    causal: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of packed sequences ``[tokens, h, d]``; offsets int32 ``[sequences + 1]``."""
    return attention_varlen(q, k, v, q_offsets, kv_offsets, max_q_len, max_kv_len, causal=causal)
