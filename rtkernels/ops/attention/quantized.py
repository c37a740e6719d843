"""Attention of 8-bit codes, and the functions that make such codes of q, k and v."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels import interop
from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import quant_plan as plan
from rtkernels.ops.attention import quantized_reference as reference
from rtkernels.ops.attention.attention import default_scale, window_sides
from rtkernels.ops.attention.backends import TAIL, packed_tail
from rtkernels.ops.attention.checks import (
    HALVES,
    Heads,
    check_factor,
    check_grid,
    check_shared_heads,
    check_width,
    made,
    strides,
)
from rtkernels.runtime.layout import DTYPE_TOKEN, check_same
from rtkernels.runtime.operator.arguments import an_integer
from rtkernels.runtime.operator.autograd import refuse_gradients
from rtkernels.runtime.operator.declared import Dense, Meta, Operator
from rtkernels.runtime.operator.into import into
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.operator.replayed import replayed

_FLOAT32, CODES = torch.float32, (torch.int8, torch.float8_e4m3fn)
GRANULARITIES = ("token", "block")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- codes ----------------------------------------------------------------------------------------------------------


def _check_code_dtype(dtype: torch.dtype) -> None:
    if dtype not in CODES:
        raise ArgumentError(f"dtype is {dtype}; expected one of {', '.join(_name(d) for d in CODES)}")


def _check_pair(q: Meta, k: Meta) -> None:
    check_same("k", k.dtype, q.dtype, "dtype", of="q")
    check_same("k", k.shape[-1], q.shape[-1], "width", of="q")
    if q.dim() == 4:
        check_same("k", k.shape[0], q.shape[0], "batch", of="q")
    check_width("q", q, plan.MAX_WIDTH, 16)
    check_shared_heads(q, k)


def _check_qk(q: Meta, k: Meta, e4m3: bool, blocks: bool, smooth: bool, scale: float) -> None:
    for name, meta in (("q", q), ("k", k)):
        if meta.dim() != 4:
            raise ArgumentError(f"{name} has shape {tuple(meta.shape)}; expected [batch, length, heads, width]")
    _check_pair(q, k)
    check_grid("q", q, q.shape[0])


def _scales_of(x: Meta, blocks: bool) -> Memory:
    batch, rows, heads, _ = x.shape
    return Memory((batch, heads, -(-rows // plan.BLOCK) if blocks else rows), _FLOAT32)


def _qk_outputs(q: Meta, k: Meta, e4m3: bool, blocks: bool, smooth: bool, scale: float) -> tuple[Memory, ...]:
    dtype = CODES[e4m3]
    taken = Memory((q.shape[0], q.shape[2], q.shape[1]), _FLOAT32)
    of_q, of_k = ((Memory(tuple(x.shape), dtype), _scales_of(x, blocks)) for x in (q, k))
    return *of_q, *of_k, taken


def _qk_plan(q: Meta, k: Meta, e4m3: bool, blocks: bool, smooth: bool, scale: float, device: int) -> Steps:
    token, steps, scratch = DTYPE_TOKEN[q.dtype], [], {}
    (batch, _, heads_q, width), lkv, heads_kv = q.shape, k.shape[1], k.shape[2]
    parts, group = -(-lkv // plan.ROWS_OF_SUMS), heads_q // heads_kv
    smooth = smooth and lkv > 0
    if smooth and batch:
        scratch["sums"] = Memory((batch, heads_kv, parts, plan.MAX_WIDTH), _FLOAT32)
        launch = plan.KEY_SUMS.bind((token,), device, (parts, heads_kv, batch), 128)
        steps.append(Step(launch, "k", "sums", lkv, width, *strides(k)[:3]))
    for name, meta, taken, share in (("q", q, "taken", group), ("k", k, 0, 1)):
        rows, heads = meta.shape[1], meta.shape[2]
        if batch * rows == 0:
            continue
        launch = plan.ROWS.bind((token,), device, (-(-rows // plan.BLOCK), heads, batch), 128)
        numbers = (rows, width, *strides(meta)[:3], parts, share, lkv, int(blocks), int(e4m3), scale)
        made_by = (f"{name}_codes", f"{name}_scales", taken)
        steps.append(Step(launch, name, "sums" if smooth else 0, *made_by, *numbers))
    return Steps(*steps, scratch=scratch)


QUANTIZE_QK = Operator(
    "attention_quantize_qk",
    (Heads("q", HALVES), Heads("k", HALVES)),
    options="bool e4m3, bool blocks, bool smooth, float scale",
    results="q_codes q_scales k_codes k_scales taken",
    outputs=_qk_outputs,
    plan=_qk_plan,
    reference=reference.quantize_qk,
    check=_check_qk,
    plans_empty=True,
)


def _check_v(v: Meta, e4m3: bool) -> None:
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
    "attention_quantize_v",
    (Heads("v", HALVES),),
    options="bool e4m3",
    results="codes scales",
    outputs=_v_outputs,
    plan=_v_plan,
    reference=reference.quantize_v,
    check=_check_v,
    plans_empty=True,
)


@replayed
def quantize_qk(
    q: Tensor, k: Tensor, *, dtype: torch.dtype = torch.int8, granularity: str = "token", smooth_k: bool = True,
    scale: float | None = None,
    out: tuple[Tensor | None, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q and k as 8-bit codes with scales, as ``attention_quantized`` takes them. Not differentiable.

    Args:
        q: bfloat16 or float16 [batch, queries, heads, width]; width a multiple of 16 up to 128. Strides as for
            ``attention``.
        k: The same with keys in place of queries; its heads divide those of q.
        dtype: int8 (a scale is amax / 127) or float8_e4m3fn (amax / 448).
        granularity: "token" for a scale of each row of a head, "block" for one of each 64 rows.
        smooth_k: Take the mean over all keys from each key, whose products with a query are the same for all keys: what
            a softmax does not see. Outliers that all keys share are gone then.
        scale: Factor of the products that the attention will have; ``1 / sqrt(width)`` if None. Only the last result
            depends on it.
        out: Take the results, in their order, instead of new memory (None: made anew): shape, dtype and strides are
            those of the results. Not with gradients.

    Returns:
        Codes of q, its scales (float32 [batch, heads, queries or blocks]), codes of k, its scales, and what smooth_k
        takes from scores, float32 [batch, heads, queries]: lse of the codes plus this is that of q and k.
    """
    if not isinstance(q, Tensor):
        return interop.call_with(quantize_qk, locals())
    if out is not None:
        return into(quantize_qk, locals())
    _check_code_dtype(dtype)
    if granularity not in GRANULARITIES:
        raise ArgumentError(f"granularity is {granularity!r}; expected one of {', '.join(GRANULARITIES)}")
    refuse_gradients("quantize_qk", [q, k])
    options = (dtype == CODES[1], granularity == "block", bool(smooth_k), default_scale(scale, q.shape[-1]))
    return QUANTIZE_QK.call(q, k, *options)


def quantize_v(
    v: Tensor, *, dtype: torch.dtype = torch.int8, out: tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """Return v as 8-bit codes, transposed, with scales, as ``attention_quantized`` takes them. Not differentiable.

    Args:
        v: bfloat16 or float16 [batch, keys, heads, width]; width a multiple of 8 up to 128.
        dtype: int8 or float8_e4m3fn.
        out: Take the results, in their order, instead of new memory (None: made anew): shape, dtype and strides are
            those of the results. Not with gradients.

    Returns:
        Codes [batch, heads, width, keys rounded up to a multiple of 16], zeros behind the last key, and a scale of each
        column and 64 keys, float32 [batch, heads, keys / 64 (rounded up), width].
    """
    if not isinstance(v, Tensor):
        return interop.call_with(quantize_v, locals())
    if out is not None:
        return into(quantize_v, locals())
    _check_code_dtype(dtype)
    refuse_gradients("quantize_v", [v])
    return QUANTIZE_V.call(v, dtype == CODES[1])


# ---- attention ------------------------------------------------------------------------------------------------------


def _scale_count(rows: int, block: int) -> int:
    return -(-rows // block)


def _check(
    q: Meta, k: Meta, v: Meta, scale_q: Meta, scale_k: Meta, scale_v: Meta | None, lengths: Meta | None,
    cu_q: Meta | None, cu_k: Meta | None, scale: float, left: int, right: int, block_q: int, block_k: int, max_q: int,
    max_k: int, half: bool,
) -> None:  # fmt: skip
    varlen, dims = cu_q is not None, 4 if cu_q is None else 3
    if (cu_k is None) is varlen:
        raise ArgumentError("cu_seqlens_q and cu_seqlens_k go together; expected both or none")
    for name, meta in (("q", q), ("k", k)):
        if meta.dim() != dims:
            raise ArgumentError(f"{name} has shape {tuple(meta.shape)}; expected {dims} dimensions")
        if meta.dtype not in CODES:
            raise ArgumentError(f"{name} has dtype {_name(meta.dtype)}; expected int8 or float8_e4m3fn")
    _check_pair(q, k)
    batch = cu_q.shape[0] - 1 if varlen else q.shape[0]
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if block < 1 or block & (block - 1) or (varlen and block != 1):
            raise ArgumentError(f"{name} is {block}; expected a power of two (1 for packed sequences)")
    for name, meta, of, block in (("scale_q", scale_q, q, block_q), ("scale_k", scale_k, k, block_k)):
        rows, count = of.shape[-3], of.shape[-2]
        shape = (count, rows) if varlen else (batch, count, _scale_count(rows, block))
        check_same(name, tuple(meta.shape), shape, "shape", of=f"{name[-1]}, with blocks of {block}")
    _check_values(q, k, v, scale_v, varlen)
    if lengths is not None and (lengths.dtype != torch.int32 or tuple(lengths.shape) != (batch,)):
        raise ArgumentError(f"seqused_k is {_name(lengths.dtype)} {tuple(lengths.shape)}; expected int32 ({batch},)")
    for name, meta in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if meta is not None and (meta.dtype != torch.int32 or tuple(meta.shape) != (batch + 1,)):
            raise ArgumentError(f"{name} is {_name(meta.dtype)} {tuple(meta.shape)}; expected int32 ({batch + 1},)")
    check_factor(scale)


def _check_values(q: Meta, k: Meta, v: Meta, scale_v: Meta | None, varlen: bool) -> None:
    if v.dtype in HALVES:
        check_same("v", tuple(v.shape[:-1]), tuple(k.shape[:-1]), "shape but for the last dimension", of="k")
        if scale_v is not None:
            raise ArgumentError(f"scale_v is given for values of {_name(v.dtype)}; expected None")
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
        raise ArgumentError(f"v has dtype {_name(v.dtype)}; expected bfloat16, float16, int8 or float8_e4m3fn")
    if not 8 <= width <= plan.MAX_WIDTH or width % 8:
        raise ArgumentError(f"v has heads of {width} elements; expected a multiple of 8 to {plan.MAX_WIDTH}")


def _out_dtype(v: Meta, half: bool) -> torch.dtype:
    return v.dtype if v.dtype in HALVES else torch.float16 if half else torch.bfloat16


def _value_width(v: Meta) -> int:
    return v.shape[-1] if v.dtype in HALVES else v.shape[2]


def _outputs(q: Meta, k: Meta, v: Meta, *values: Any) -> tuple[Memory, ...]:
    lse = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return Memory((*q.shape[:-1], _value_width(v)), _out_dtype(v, values[-1])), Memory(lse, _FLOAT32)


def _plan(
    q, k, v, scale_q, scale_k, scale_v, lengths, cu_q, cu_k, scale, left, right, block_q, block_k, max_q, max_k, half,
    device,
) -> Steps:  # fmt: skip
    varlen, heads, heads_kv, d_v = cu_q is not None, q.shape[-2], k.shape[-2], _value_width(v)
    batch = cu_q.shape[0] - 1 if varlen else q.shape[0]
    codes = v.dtype in CODES
    of_v = strides(v)
    if codes:  # [batch, heads, width, keys]
        of_v = (v.stride[0], v.stride[2], v.stride[1])
        blocks = -(-k.shape[1] // plan.BLOCK) if scale_v.dim() == 4 else 1
        sv = (heads_kv * blocks * d_v, blocks * d_v, d_v if scale_v.dim() == 4 else 0)
    out_shape = (*q.shape[:-1], d_v)
    n_q, n_k = _scale_count(q.shape[-3], block_q), _scale_count(k.shape[-3], block_k)
    token = DTYPE_TOKEN[_out_dtype(v, half)]
    call = plan.Quantized(
        token=token, qk=plan.INT8 if q.dtype == torch.int8 else plan.E4M3,
        pv=plan.VALUES_16 if not codes else plan.VALUES_INT8 if v.dtype == torch.int8 else plan.VALUES_E4M3,
        batch=batch, heads_q=heads, heads_kv=heads_kv, lq=max_q if varlen else q.shape[1],
        lkv=max_k if varlen else k.shape[1], d_qk=q.shape[-1], d_v=d_v, q=strides(q), k=strides(k), v=tuple(of_v[:3]),
        out=made(out_shape, False), lse=(0, q.shape[0]) if varlen else (heads * q.shape[1], q.shape[1]),
        sq=(0 if varlen else heads * n_q, n_q, block_q), sk=(0 if varlen else heads_kv * n_k, n_k, block_k),
        sv=sv if codes else (0, 0, 0), left=left, right=right, scale=scale, varlen=varlen,
        rows_q=q.shape[0] if varlen else batch * q.shape[1], rows_k=k.shape[0] if varlen else batch * k.shape[1],
        keys_of_v=v.shape[3] if codes else 0,
    )  # fmt: skip
    steps = plan.forward(call, device)
    if not varlen:
        return steps
    tail = packed_tail(token, "out", "lse", "cu_q", batch, out_shape, made(out_shape, False), device)
    return Steps(*steps.steps, tail, scratch=steps.scratch, zeros=steps.zeros)


FORWARD = Operator(
    "attention_quantized_fwd",
    (
        Heads("q", None), Heads("k", None), Heads("v", None), Dense("scale_q", (_FLOAT32,)),
        Dense("scale_k", (_FLOAT32,)), Dense("scale_v", (_FLOAT32,), optional=True),
        Dense("lengths", None, optional=True), Dense("cu_q", None, optional=True), Dense("cu_k", None, optional=True),
    ),
    options="float scale, int left, int right, int block_q, int block_k, int max_q, int max_k, bool half",
    results="out lse",
    outputs=_outputs,
    plan=_plan,
    reference=reference.forward,
    check=_check,
    plans_empty=True,
)  # fmt: skip


@replayed
def attention_quantized(
    q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor, scale_k: Tensor, scale_v: Tensor | None = None, *,
    scale: float | None = None, causal: bool = False, window: int | Sequence[int | None] | None = None,
    block_q: int = 1, block_k: int = 1, seqused_k: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int = 0, max_seqlen_k: int = 0,
    out_dtype: torch.dtype = torch.bfloat16, return_lse: bool = False,
    out: Tensor | tuple[Tensor | None, ...] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return the attention of 8-bit queries and keys, with values of 16 or 8 bits.

    Scores are ``scale * scale_q * scale_k * (q . k)``; products are made of the codes. Powers of scores are rounded to
    the 16-bit type of v, or, where v has codes, to 8-bit codes themselves. Masks, grouped heads and queries that see
    nothing are as in ``attention``. float8_e4m3fn needs sm_89 or later. Not differentiable: see ``sage_attention``.

    Args:
        q: int8 or float8_e4m3fn [batch, queries, heads, width], or [tokens, heads, width] of packed sequences; width a
            multiple of 16 up to 128. Strides as for ``attention``.
        k: The same with keys.
        v: bfloat16 or float16, as k with a width of its own; or codes, transposed: int8 (q and k are then int8, too) or
            float8_e4m3fn [batch, heads, width, keys or more, a multiple of 16]. Codes behind the last key are finite.
        scale_q: float32 [batch, heads, queries], not negative; with a `block_q`, one for each so many queries. Packed:
            [heads, tokens].
        scale_k: The same for k.
        scale_v: Of codes: float32 [batch, heads, keys / 64 (rounded up), width], or [batch, heads, width].
        scale: Factor of the products; ``1 / sqrt(width)`` if None.
        causal: The last query sees all keys, the one before one less.
        window: Keys that a query sees to its left, or ``(left, right)``.
        block_q: Queries that share a scale, a power of two.
        block_k: The same for keys.
        seqused_k: int32 [batch] on the device: how many keys of each sequence count.
        cu_seqlens_q: int32 [sequences + 1] on the device where sequences are packed; v has 16 bits then.
        cu_seqlens_k: The same for k and v.
        max_seqlen_q: The largest number of queries in a packed sequence, or more.
        max_seqlen_k: The same for keys.
        out_dtype: bfloat16 or float16 for values with codes; otherwise the result has v's dtype.
        return_lse: Return lse as well.
        out: Take the results, in their order, instead of new memory (None: made anew): shape, dtype and strides are
            those of the results. Not with gradients.

    Returns:
        [batch, queries, heads, width of v] (packed as q is); with return_lse a pair of it and lse, float32 [batch,
        heads, queries] ([heads, tokens]).
    """
    if not isinstance(q, Tensor):
        return interop.call_with(attention_quantized, locals())
    if out is not None:
        return into(attention_quantized, locals())
    if out_dtype not in HALVES:
        raise ArgumentError(f"out_dtype is {out_dtype}; expected torch.bfloat16 or torch.float16")
    refuse_gradients("attention_quantized", [t for t in (q, k, v, scale_q, scale_k, scale_v) if t is not None])
    left, right = window_sides(window, causal)
    if cu_seqlens_k is cu_seqlens_q and cu_seqlens_k is not None:
        cu_seqlens_k = cu_seqlens_k.view(-1)  # Dynamo takes no tensor twice
    out, lse = FORWARD.call(
        q, k, v, scale_q, scale_k, scale_v, seqused_k, cu_seqlens_q, cu_seqlens_k, default_scale(scale, q.shape[-1]),
        left, right, an_integer("block_q", block_q), an_integer("block_k", block_k),
        an_integer("max_seqlen_q", max_seqlen_q), an_integer("max_seqlen_k", max_seqlen_k),
        out_dtype == torch.float16,
    )  # fmt: skip
    return (out, lse) if return_lse else out


OP = Op(
    "quantized",
    public=("attention_quantized", "quantize_qk", "quantize_v"),
    kernels=(plan.FORWARD, plan.FORWARD_SM90, plan.KEY_SUMS, plan.ROWS, plan.VALUES, TAIL),
    torch_ops=(FORWARD, QUANTIZE_QK, QUANTIZE_V),
)
