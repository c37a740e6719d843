"""Attention that quantises its 16-bit inputs, and is differentiable as if it had not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.ops.attention import attention as base
from rtkernels.ops.attention import quantize_heads, quantized
from rtkernels.ops.attention.checks import LAYOUT
from rtkernels.ops.attention.options import default_scale, window_sides
from rtkernels.runtime.call.public import public
from rtkernels.runtime.operator.arguments import Among
from rtkernels.runtime.operator.autograd import once_differentiable
from rtkernels.runtime.operator.registry import Op

_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int, qk: str, pv: str, granularity: str,
    smooth: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    blocks = granularity == "block"
    codes = quantize_heads.QUANTIZE_QK.call(q, k, qk == "fp8", blocks, smooth, scale)
    q_codes, q_scales, k_codes, k_scales, taken = codes
    values, v_scales = (v, None) if pv == "16" else quantize_heads.QUANTIZE_V.call(v, pv == "fp8")
    block = quantized.plan.BLOCK if blocks else 1
    out, lse = quantized.FORWARD.call(
        q_codes, k_codes, values, q_scales, k_scales, v_scales, None, None, None, scale, left, right, block, block,
        0, 0, v.dtype == torch.float16,
    )  # fmt: skip
    return out, lse + taken


class _Sage(torch.autograd.Function):
    """Attention with quantised operands; its gradients are those of unquantised attention, computed from q, k and v."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v)
        ctx.options = options
        return _forward(q, k, v, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        q, k, v = ctx.saved_tensors
        scale, left, right = ctx.options[:3]
        options = (scale, left, right, 0.0, 0, 0, False, "auto")
        nothing = (None,) * 6
        out, lse = base.FORWARD.call(q, k, v, *nothing, *options)
        needs = (*ctx.needs_input_grad[:3], False, False)
        dq, dk, dv, *_ = base.BACKWARD.call(dout, dlse, q, k, v, out, lse, *nothing, *options, *needs)
        grads = [grad if needed else None for grad, needed in zip((dq, dk, dv), needs, strict=False)]
        return *grads, *(None,) * len(ctx.options)


_OPTIONS = {
    "qk": Among(_DTYPES, "one of int8, fp8"), "pv": Among(("16", *_DTYPES), "one of 16, int8, fp8"),
    "layout": LAYOUT, "granularity": quantize_heads.GRANULARITY,
}  # fmt: skip


@public(options=_OPTIONS)
def sage_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None, qk: str = "int8", pv: str = "16",
    granularity: str = "token", smooth_k: bool = True, return_lse: bool = False, layout: str = "blhd",
    out: Tensor | tuple[Tensor | None, ...] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return attention computed with 8-bit q and k, and optionally 8-bit v.

    ``quantize_qk``, ``quantize_v`` and ``attention_quantized`` in one call. Differentiable: the gradients are those of
    ``attention`` for the original q, k and v, whose forward pass is recomputed in the backward pass.

    It is for models and code that expect the numbers of 8-bit attention. On an H200 ``attention`` in bf16 is faster
    with heads of up to 128: the 8-bit kernel alone has 0.71 to 0.93 of its speed, and q and k are quantised first. With
    heads of 192 and values of 128 that kernel is 1.14 times as fast.

    Args:
        q: bfloat16 or float16 [batch, queries, heads, width]; width a multiple of 16 up to 128.
        k: Like q, with keys instead of queries; the number of its heads divides that of q.
        v: Like k; its heads may have a different width, a multiple of 8 up to 128.
        scale: Factor of the scores. Default: ``1 / sqrt(width)``.
        causal: Causal mask aligned to the last query, which attends to all keys.
        window: Number of keys to the left that a query attends to, or ``(left, right)``.
        qk: Format of q and k: "int8" or "fp8" (float8_e4m3fn, sm_89 or newer).
        pv: Format of the softmax probabilities and v: "16" for 16 bits, "int8" (with qk "int8") or "fp8".
        granularity: One scale of q and k per "token", or per "block" of 64 tokens.
        smooth_k: Subtract the mean of all keys from each key first; this changes only the rounding of the result.
        return_lse: Also return the log-sum-exp (lse) of the scores.
        layout: "blhd" as above, or "bhld" [batch, heads, length, width].
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        [batch, queries, heads, width of v] in `layout`; with return_lse a pair of it and lse, float32 [batch, heads,
        queries].
    """
    if layout == "bhld":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    left, right = window_sides(window, causal)
    options = (default_scale(scale, q), left, right, qk, pv, granularity, bool(smooth_k))
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    out, lse = _Sage.apply(q, k, v, *options) if wanted else _forward(q, k, v, *options)
    out = out.transpose(1, 2) if layout == "bhld" else out
    return (out, lse) if return_lse else out


OP = Op("sage", public=("sage_attention",), kernels=(), torch_ops=(), uses=("attention", "decode", "quantized"))
