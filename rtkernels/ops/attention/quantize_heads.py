"""Codes of q, k and v for attention of 8-bit codes."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import quant_plan as plan
from rtkernels.ops.attention import quantized_reference as reference
from rtkernels.ops.attention.checks import HALVES, Heads, check_grid, check_shared_heads, check_width, strides
from rtkernels.ops.attention.options import default_scale
from rtkernels.runtime.call.public import public
from rtkernels.runtime.layout import DTYPE_TOKEN, check_same
from rtkernels.runtime.operator.arguments import Among
from rtkernels.runtime.operator.declared import Meta, Operator
from rtkernels.runtime.operator.plan import Memory, Step, Steps

_FLOAT32, CODES = torch.float32, (torch.int8, torch.float8_e4m3fn)
GRANULARITY = Among(("token", "block"), "one of token, block")


def dtype_name(dtype: torch.dtype) -> str:
    """Return its name without the module."""
    return str(dtype).removeprefix("torch.")


def _check_code_dtype(dtype: torch.dtype) -> None:
    if dtype not in CODES:
        raise ArgumentError(f"dtype is {dtype}; expected one of {', '.join(dtype_name(d) for d in CODES)}")


def check_pair(q: Meta, k: Meta, widest: int = plan.MAX_WIDTH) -> None:
    """Raise an ArgumentError unless q and k belong together."""
    check_same("k", k.dtype, q.dtype, "dtype", of="q")
    check_same("k", k.shape[-1], q.shape[-1], "width", of="q")
    if q.dim() == 4:
        check_same("k", k.shape[0], q.shape[0], "batch", of="q")
    check_width("q", q, widest, 16)
    check_shared_heads(q, k)


def _check_qk(q: Meta, k: Meta) -> None:
    for name, meta in (("q", q), ("k", k)):
        if meta.dim() != 4:
            raise ArgumentError(f"{name} has shape {tuple(meta.shape)}; expected [batch, length, heads, width]")
    check_pair(q, k)
    check_grid("q", q, q.shape[0])
    if q.shape[2] + k.shape[2] > 65535:
        raise ArgumentError(f"q and k have {q.shape[2]} and {k.shape[2]} heads; expected up to 65535 together")


def _scales_of(x: Meta, blocks: bool) -> Memory:
    batch, rows, heads, _ = x.shape
    return Memory((batch, heads, -(-rows // plan.BLOCK) if blocks else rows), _FLOAT32)


def _qk_outputs(q: Meta, k: Meta, e4m3: bool, blocks: bool) -> tuple[Memory, ...]:
    dtype = CODES[e4m3]
    taken = Memory((q.shape[0], q.shape[2], q.shape[1]), _FLOAT32)
    of_q, of_k = ((Memory(tuple(x.shape), dtype), _scales_of(x, blocks)) for x in (q, k))
    return *of_q, *of_k, taken


def _qk_plan(q: Meta, k: Meta, e4m3: bool, blocks: bool, smooth: bool, scale: float, device: int) -> Steps:
    token, steps, scratch = DTYPE_TOKEN[q.dtype], [], {}
    (batch, lq, heads_q, width), lkv, heads_kv = q.shape, k.shape[1], k.shape[2]
    parts, rows = -(-lkv // plan.ROWS_OF_SUMS), max(lq, lkv)
    if batch * rows * heads_q == 0:
        return Steps()
    smooth = smooth and lkv > 0
    if smooth:
        scratch["sums"] = Memory((batch, heads_kv, parts, plan.MAX_WIDTH), _FLOAT32)
        launch = plan.KEY_SUMS.bind((token,), device, (parts, heads_kv, batch), 128)
        steps.append(Step(launch, "k", "sums", lkv, width, *strides(k)[:3]))
    launch = plan.ROWS.bind((token,), device, (-(-rows // plan.BLOCK), heads_q + heads_kv, batch), 128)
    numbers = (lq, lkv, heads_q, width, *strides(q)[:3], *strides(k)[:3], parts, int(blocks), int(e4m3), scale)
    tensors = "q", "k", "sums" if smooth else 0, "q_codes", "q_scales", "k_codes", "k_scales", "taken"
    steps.append(Step(launch, *tensors, *numbers))
    return Steps(*steps, scratch=scratch)


QUANTIZE_QK = Operator(
    "attention_quantize_qk", (Heads("q", HALVES), Heads("k", HALVES)),
    options="bool e4m3, bool blocks, bool smooth, float scale", results="q_codes q_scales k_codes k_scales taken",
    outputs=_qk_outputs, plan=_qk_plan, reference=reference.quantize_qk, check=_check_qk, plans_empty=True,
    not_invariant=(1, "a scale covers tokens around a token's own"),
)  # fmt: skip


def _check_v(v: Meta) -> None:
    if v.dim() != 4:
        raise ArgumentError(f"v has shape {tuple(v.shape)}; expected [batch, length, heads, width]")
    check_width("v", v, plan.MAX_WIDTH)
    check_grid("v", v, v.shape[0])


def _v_outputs(v: Meta, e4m3: bool) -> tuple[Memory, ...]:
    batch, rows, heads, width = v.shape
    padded, blocks = -(-rows // 16) * 16, -(-rows // plan.BLOCK)
    return Memory((batch, heads, width, padded), CODES[e4m3]), Memory((batch, heads, blocks, width), _FLOAT32)


def _v_plan(v: Meta, e4m3: bool, device: int) -> Steps:
    batch, rows, heads, width = v.shape
    if not batch * rows * heads:
        return Steps()
    launch = plan.VALUES.bind((DTYPE_TOKEN[v.dtype],), device, (-(-rows // plan.BLOCK), heads, batch), 128)
    return Steps(Step(launch, "v", "codes", "scales", rows, width, -(-rows // 16) * 16, *strides(v)[:3], int(e4m3)))


QUANTIZE_V = Operator(
    "attention_quantize_v", (Heads("v", HALVES),), options="bool e4m3", results="codes scales", outputs=_v_outputs,
    plan=_v_plan, reference=reference.quantize_v, check=_check_v, plans_empty=True,
    not_invariant=(1, "a scale covers all tokens"),
)  # fmt: skip


@public(options={"granularity": GRANULARITY}, no_gradients="q k")
def quantize_qk(
    q: Tensor, k: Tensor, *, dtype: torch.dtype = torch.int8, granularity: str = "token", smooth_k: bool = True,
    scale: float | None = None,
    out: tuple[Tensor | None, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q and k as 8-bit codes with scales, as ``attention_quantized`` takes them. Not differentiable.

    Args:
        q: bfloat16 or float16 [batch, queries, heads, width]; width a multiple of 16 up to 128. Strides as for
            ``attention``.
        k: Like q, with keys instead of queries; the number of its heads divides that of q.
        dtype: int8 (scale = amax / 127) or float8_e4m3fn (scale = amax / 448).
        granularity: "token" for one scale per row of a head, "block" for one per 64 rows.
        smooth_k: Subtract the mean of all keys from each key. This shifts all scores of a query by the same amount, so
            the softmax does not change, and it removes outliers that all keys share.
        scale: Factor of the scores in the attention call. Default: ``1 / sqrt(width)``. Only the last result depends on
            it.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        Codes of q, its scales (float32 [batch, heads, queries or blocks]), codes of k, its scales, and the score shift
        of smooth_k, float32 [batch, heads, queries]: add it to the lse of the codes to get the lse of q and k.
    """
    _check_code_dtype(dtype)
    options = (dtype == CODES[1], granularity == "block", bool(smooth_k), default_scale(scale, q))
    return QUANTIZE_QK.call(q, k, *options)


@public(no_gradients="v")
def quantize_v(
    v: Tensor, *, dtype: torch.dtype = torch.int8, out: tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """Return v as 8-bit codes, transposed, with scales, as ``attention_quantized`` takes them. Not differentiable.

    Args:
        v: bfloat16 or float16 [batch, keys, heads, width]; width a multiple of 8 up to 128.
        dtype: int8 or float8_e4m3fn.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        Codes [batch, heads, width, keys rounded up to a multiple of 16], zeros after the last key, and one scale per
        column and 64 keys, float32 [batch, heads, keys / 64 (rounded up), width].
    """
    _check_code_dtype(dtype)
    return QUANTIZE_V.call(v, dtype == CODES[1])
