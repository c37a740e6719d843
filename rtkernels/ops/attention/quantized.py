"""Attention of 8-bit codes; ``quantize_heads.py`` computes them from q, k and v."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import quant_plan as plan
from rtkernels.ops.attention import quantized_reference as reference
from rtkernels.ops.attention.attention import FORWARD as WHOLE_FORWARD
from rtkernels.ops.attention.backends import TAIL, packed_tail
from rtkernels.ops.attention.checks import (
    HALVES,
    Heads,
    check_factor,
    result_strides,
    strides,
)
from rtkernels.ops.attention.options import default_scale, window_sides
from rtkernels.ops.attention.quantize_heads import (
    CODES,
    QUANTIZE_QK,
    QUANTIZE_V,
    check_pair,
    dtype_name,
)
from rtkernels.runtime.call.public import public
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.layout import DTYPE_TOKEN, check_same
from rtkernels.runtime.operator.arguments import Among, check_integer
from rtkernels.runtime.operator.declared import Dense, Meta, Operator
from rtkernels.runtime.operator.plan import Memory, Steps
from rtkernels.runtime.operator.registry import Op

_FLOAT32, _E8M0 = torch.float32, torch.float8_e8m0fnu


_MX = 32  # elements of a row that share an e8m0 scale


def _is_mx(scale: Meta) -> bool:
    """Return True for e8m0 scales, which operators get as bytes."""
    return scale.dtype == torch.uint8


def _scale_count(rows: int, block: int) -> int:
    return -(-rows // block)


def _check(
    q: Meta, k: Meta, v: Meta, scale_q: Meta, scale_k: Meta, scale_v: Meta | None, lengths: Meta | None,
    cu_q: Meta | None, cu_k: Meta | None, scale: float, block_q: int, block_k: int,
) -> None:  # fmt: skip
    varlen, dims = cu_q is not None, 4 if cu_q is None else 3
    if (cu_k is None) is varlen:
        raise ArgumentError("cu_seqlens_q and cu_seqlens_k go together; expected both or none")
    for name, meta in (("q", q), ("k", k)):
        if meta.dim() != dims:
            raise ArgumentError(f"{name} has shape {tuple(meta.shape)}; expected {dims} dimensions")
        if meta.dtype not in CODES:
            raise ArgumentError(f"{name} has dtype {dtype_name(meta.dtype)}; expected int8 or float8_e4m3fn")
    check_pair(q, k, plan.WIDEST_QK)
    batch = cu_q.shape[0] - 1 if varlen else q.shape[0]
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if block < 1 or block & (block - 1) or (varlen and block != 1):
            raise ArgumentError(f"{name} is {block}; expected a power of two (1 for packed sequences)")
    mx = _is_mx(scale_q)
    of_codes = q.dtype == torch.float8_e4m3fn and v.dtype == torch.bfloat16 and q.shape[-1] <= plan.MAX_WIDTH
    if mx and not (of_codes and q.shape[-1] % _MX == 0 and max(block_q, block_k) == 1):
        raise ArgumentError(
            "scale_q has one byte per scale; expected float8_e4m3fn q and k with a multiple of 32 columns up to "
            f"{plan.MAX_WIDTH}, block_q and block_k 1, and bfloat16 v"
        )
    for name, meta, of, block in (("scale_q", scale_q, q, block_q), ("scale_k", scale_k, k, block_k)):
        if meta.dtype not in (_FLOAT32, torch.uint8) or _is_mx(meta) != mx:
            raise ArgumentError(f"{name} has dtype {dtype_name(meta.dtype)}; expected float32, or e8m0 for both scales")
        rows, count = of.shape[-3], of.shape[-2]
        shape = (count, rows) if varlen else (batch, count, _scale_count(rows, block))
        shape = (*shape, q.shape[-1] // _MX) if mx else shape
        check_same(name, tuple(meta.shape), shape, "shape", of=f"{name[-1]}, with blocks of {block}")
    _check_values(q, k, v, scale_v, varlen)
    if lengths is not None and (lengths.dtype != torch.int32 or tuple(lengths.shape) != (batch,)):
        raise ArgumentError(
            f"seqused_k is {dtype_name(lengths.dtype)} {tuple(lengths.shape)}; expected int32 ({batch},)"
        )
    for name, meta in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if meta is not None and (meta.dtype != torch.int32 or tuple(meta.shape) != (batch + 1,)):
            raise ArgumentError(
                f"{name} is {dtype_name(meta.dtype)} {tuple(meta.shape)}; expected int32 ({batch + 1},)"
            )
    check_factor(scale)


def _check_values(q: Meta, k: Meta, v: Meta, scale_v: Meta | None, varlen: bool) -> None:
    if v.dtype in HALVES:
        check_same("v", tuple(v.shape[:-1]), tuple(k.shape[:-1]), "shape but for the last dimension", of="k")
        if scale_v is not None:
            raise ArgumentError(f"scale_v is given for values of {dtype_name(v.dtype)}; expected None")
        width = v.shape[-1]
    elif v.dtype in CODES:
        if varlen:
            raise ArgumentError("v has 8-bit codes and sequences are packed; expected values of 16 bits")
        if v.dtype == torch.int8 and q.dtype != torch.int8:
            raise ArgumentError("v has int8 codes and q float8_e4m3fn; expected int8 codes of q and k as well")
        batch, keys, heads, _ = k.shape
        if v.dim() != 4 or tuple(v.shape[:2]) != (batch, heads) or v.shape[3] < keys or v.shape[3] % 16:
            raise ArgumentError(
                f"v has shape {tuple(v.shape)}; expected codes [{batch}, {heads}, width, {keys} or more keys, a "
                f"multiple of 16]"
            )
        width, blocks = v.shape[2], -(-keys // plan.BLOCK)
        shapes = ((batch, heads, blocks, width), (batch, heads, width))
        if scale_v is None or tuple(scale_v.shape) not in shapes:
            got = "None" if scale_v is None else f"of shape {tuple(scale_v.shape)}"
            raise ArgumentError(f"scale_v is {got}; expected float32 of shape {shapes[0]} or {shapes[1]}")
    else:
        raise ArgumentError(f"v has dtype {dtype_name(v.dtype)}; expected bfloat16, float16, int8 or float8_e4m3fn")
    if not 8 <= width <= plan.MAX_WIDTH or width % 8:
        raise ArgumentError(f"v has heads of {width} elements; expected a multiple of 8 to {plan.MAX_WIDTH}")


def _out_dtype(v: Meta, half: bool) -> torch.dtype:
    return v.dtype if v.dtype in HALVES else torch.float16 if half else torch.bfloat16


def _value_width(v: Meta) -> int:
    return v.shape[-1] if v.dtype in HALVES else v.shape[2]


def _outputs(q: Meta, v: Meta, half: bool) -> tuple[Memory, ...]:
    lse = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return Memory((*q.shape[:-1], _value_width(v)), _out_dtype(v, half)), Memory(lse, _FLOAT32)


def _problem(
    q, k, v, scale_q, scale_v, cu_q, scale, left, right, block_q, block_k, max_q, max_k, half
) -> plan.Quantized:
    varlen, heads, heads_kv, d_v = cu_q is not None, q.shape[-2], k.shape[-2], _value_width(v)
    batch = cu_q.shape[0] - 1 if varlen else q.shape[0]
    codes = v.dtype in CODES
    of_v = strides(v)
    if codes:  # [batch, heads, width, keys]
        of_v = (v.stride[0], v.stride[2], v.stride[1])
        blocks = -(-k.shape[1] // plan.BLOCK) if scale_v.dim() == 4 else 1
        sv = (heads_kv * blocks * d_v, blocks * d_v, d_v if scale_v.dim() == 4 else 0)
    n_q, n_k = _scale_count(q.shape[-3], block_q), _scale_count(k.shape[-3], block_k)
    mx = _is_mx(scale_q)
    if mx:
        n_q, n_k = (n * (q.shape[-1] // _MX) for n in (n_q, n_k))
    return plan.Quantized(
        token=DTYPE_TOKEN[_out_dtype(v, half)],
        qk=plan.MXFP8 if mx else plan.INT8 if q.dtype == torch.int8 else plan.E4M3,
        pv=plan.VALUES_16 if not codes else plan.VALUES_INT8 if v.dtype == torch.int8 else plan.VALUES_E4M3,
        batch=batch, heads_q=heads, heads_kv=heads_kv, lq=max_q if varlen else q.shape[1],
        lkv=max_k if varlen else k.shape[1], d_qk=q.shape[-1], d_v=d_v, q=strides(q), k=strides(k), v=tuple(of_v[:3]),
        out=result_strides((*q.shape[:-1], d_v), False),
        lse=(0, q.shape[0]) if varlen else (heads * q.shape[1], q.shape[1]),
        sq=(0 if varlen else heads * n_q, n_q, block_q), sk=(0 if varlen else heads_kv * n_k, n_k, block_k),
        sv=sv if codes else (0, 0, 0), left=left, right=right, scale=scale, varlen=varlen,
        rows_q=q.shape[0] if varlen else batch * q.shape[1], rows_k=k.shape[0] if varlen else batch * k.shape[1],
        keys_of_v=v.shape[3] if codes else 0,
    )  # fmt: skip


def _mx_as_bf16(
    q, k, v, scale_q, scale_k, scale_v, lengths, cu_q, cu_k, scale, left, right, block_q, block_k, max_q, max_k, half
):  # fmt: skip
    """Return the attention of what MXFP8 codes stand for, which is exact in bfloat16."""
    axes = (0, 1) if q.dim() == 3 else (1, 2)
    q, k = (
        (codes.float().unflatten(-1, (-1, _MX)) * reference.decode_e8m0(s).transpose(*axes).unsqueeze(-1)).flatten(-2)
        for codes, s in ((q, scale_q), (k, scale_k))
    )
    tensors = (q.bfloat16(), k.bfloat16(), v, None, None, lengths, None, cu_q, cu_k)
    return WHOLE_FORWARD.call(*tensors, scale, left, right, 0.0, max_q, max_k, False, "auto")


def _plan(q, k, v, scale_q, scale_v, cu_q, scale, left, right, block_q, block_k, max_q, max_k, half, device) -> Steps:
    call = _problem(q, k, v, scale_q, scale_v, cu_q, scale, left, right, block_q, block_k, max_q, max_k, half)
    if call.qk == plan.MXFP8 and not plan.multiplies_mx(device_info(device).target):
        return Steps(instead=_mx_as_bf16)
    steps = plan.QUANTIZED.steps(call, device)
    if not call.varlen:
        return steps
    shape = (*q.shape[:-1], call.d_v)
    tail = packed_tail(call.token, "out", "lse", "cu_q", call.batch, shape, call.out, device)
    return Steps(*steps.steps, tail, scratch=steps.scratch, zeros=steps.zeros)


FORWARD = Operator(
    "attention_quantized_fwd",
    (
        Heads("q", None), Heads("k", None), Heads("v", None), Dense("scale_q", None), Dense("scale_k", None),
        Dense("scale_v", (_FLOAT32,), optional=True),
        Dense("lengths", None, optional=True), Dense("cu_q", None, optional=True), Dense("cu_k", None, optional=True),
    ),
    options="float scale, int left, int right, int block_q, int block_k, int max_q, int max_k, bool half",
    results="out lse",
    outputs=_outputs,
    plan=_plan,
    reference=reference.forward,
    check=_check,
    plans_empty=True,
    not_invariant=(1, "a scale covers a block of tokens"),
)  # fmt: skip
plan.QUANTIZED.describe(attention_quantized_fwd=_problem)


@public(
    options={"out_dtype": Among(HALVES, "torch.bfloat16 or torch.float16")},
    no_gradients="q k v scale_q scale_k scale_v",
)
def attention_quantized(
    q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor, scale_k: Tensor, scale_v: Tensor | None = None, *,
    scale: float | None = None, causal: bool = False, window: int | Sequence[int | None] | None = None,
    block_q: int = 1, block_k: int = 1, seqused_k: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int = 0, max_seqlen_k: int = 0,
    out_dtype: torch.dtype = torch.bfloat16, return_lse: bool = False,
    out: Tensor | tuple[Tensor | None, ...] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return the attention of 8-bit queries and keys, with 16-bit or 8-bit values.

    Scores are ``scale * scale_q * scale_k * (q . k)``; the products are computed from the codes (of MXFP8 on sm_89 and
    sm_120; elsewhere attention of bfloat16, which holds these numbers exactly, is faster or all there is). The softmax
    probabilities are rounded to the 16-bit dtype of v or, if v is given as codes, to 8-bit codes. Masks, grouped heads
    and queries without keys are handled as in ``attention``. float8_e4m3fn needs sm_89 or later. Not differentiable:
    see ``sage_attention``.

    It is for q, k and v that are codes already, which take half of the memory. On an H200 it is not faster than
    ``attention`` in bf16 with heads of up to 128: 0.93 of its speed at 4096 by 8192 keys and heads of 128, 0.71 to 0.82
    with heads of 64. With heads of 192 and values of 128 (MLA) it is 1.14 times as fast.

    Args:
        q: int8 or float8_e4m3fn [batch, queries, heads, width], or [tokens, heads, width] of packed sequences; width a
            multiple of 16 up to 128; on sm_90 up to 192 if v has 16 bits or a scale per column. Strides as for
            ``attention``.
        k: Like q, with keys instead of queries.
        v: bfloat16 or float16, like k with any width; or transposed codes: int8 (q and k must then be int8, too) or
            float8_e4m3fn [batch, heads, width, keys or more, a multiple of 16]. Codes after the last key must be
            finite.
        scale_q: float32 [batch, heads, queries], not negative; with `block_q`, one per so many queries. [heads, tokens]
            for packed sequences. MXFP8: float8_e8m0fnu (or its bytes as uint8) with one more dimension, [batch, heads,
            queries, width / 32]; q and k are float8_e4m3fn and v bfloat16 then.
        scale_k: The same for k.
        scale_v: If v is codes: float32 [batch, heads, keys / 64 (rounded up), width], or [batch, heads, width], which
            is faster on sm_90 with float8_e4m3fn.
        scale: Factor of the scores. Default: ``1 / sqrt(width)``.
        causal: Causal mask aligned to the last query, which attends to all keys.
        window: Number of keys to the left that a query attends to, or ``(left, right)``.
        block_q: Queries that share a scale, a power of two.
        block_k: The same for keys.
        seqused_k: int32 [batch] on the device: the number of valid keys of each sequence.
        cu_seqlens_q: int32 [sequences + 1] on the device, for packed sequences; v must then have 16 bits.
        cu_seqlens_k: The same for k and v.
        max_seqlen_q: An upper bound of the queries in a packed sequence.
        max_seqlen_k: The same for keys.
        out_dtype: Dtype of the result if v is codes: bfloat16 or float16. Otherwise the result has v's dtype.
        return_lse: Also return the log-sum-exp (lse) of the scores.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        [batch, queries, heads, width of v] (packed like q); with return_lse a pair of it and lse, float32 [batch,
        heads, queries] ([heads, tokens]).
    """
    left, right = window_sides(window, causal)
    scale_q, scale_k = (s.view(torch.uint8) if s.dtype == _E8M0 else s for s in (scale_q, scale_k))
    if cu_seqlens_k is cu_seqlens_q and cu_seqlens_k is not None:
        cu_seqlens_k = cu_seqlens_k.view(-1)  # Dynamo takes no tensor twice
    out, lse = FORWARD.call(
        q, k, v, scale_q, scale_k, scale_v, seqused_k, cu_seqlens_q, cu_seqlens_k, default_scale(scale, q),
        left, right, check_integer("block_q", block_q), check_integer("block_k", block_k),
        check_integer("max_seqlen_q", max_seqlen_q), check_integer("max_seqlen_k", max_seqlen_k),
        out_dtype == torch.float16,
    )  # fmt: skip
    return (out, lse) if return_lse else out


OP = Op(
    "quantized",
    public=("attention_quantized", "quantize_qk", "quantize_v"),
    kernels=(plan.FORWARD, plan.FORWARD_SM90, plan.KEY_SUMS, plan.ROWS, plan.VALUES, TAIL),
    torch_ops=(FORWARD, QUANTIZE_QK, QUANTIZE_V),
)
