"""Attention and its gradients: dense batches and packed sequences, every mask by one rule (see problem.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import backends, checks, paged, reference
from rtkernels.ops.attention.alibi import alibi_bias, alibi_offset, check_slopes, packed_bias, packed_offset
from rtkernels.ops.attention.checks import (
    HALVES,
    LAYOUT,
    Forward,
    Heads,
    check_dims,
    heads_first_strides,
    problem_of,
    result_strides,
    strides,
)
from rtkernels.ops.attention.options import check_backend, check_softcap, default_scale, fp16_sums, window_sides
from rtkernels.ops.attention.problem import Attention
from rtkernels.ops.attention.spread_heads import backward_of_copies, copies_of_heads
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import check_tensor
from rtkernels.runtime.invariance import level
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.operator.arguments import check_integer
from rtkernels.runtime.operator.autograd import applied, once_differentiable, refuse_gradients
from rtkernels.runtime.operator.declared import Dense, Meta, Operator
from rtkernels.runtime.operator.plan import Memory, Steps
from rtkernels.runtime.operator.registry import Op

_OPTIONS = "float scale, int left, int right, float softcap, int max_q, int max_k, bool heads_first, str backend"
_INPUTS = checks.forward_arguments()
_FLOAT32 = torch.float32

# ---- operators ------------------------------------------------------------------------------------------------------


def _check(given: Forward) -> None:
    checks.check(given)
    backends.check_name(given.backend)


def _memory(shape: tuple[int, ...], dtype: torch.dtype, heads_first: bool) -> Memory:
    strides_of = heads_first_strides(shape) if heads_first and len(shape) == 4 else None
    return Memory(tuple(shape), dtype, strides_of)


def _forward_outputs(given: Forward) -> tuple[Memory, ...]:
    return _memory(given.out_shape, given.q.dtype, given.heads_first), Memory(given.lse_shape, _FLOAT32)


def _plan_forward(given: Forward, device: int) -> Steps:
    return backends.forward(problem_of(given), given.backend, device)


FORWARD = Operator(
    "attention_fwd", _INPUTS, options=_OPTIONS, results="out lse", outputs=_forward_outputs, plan=_plan_forward,
    reference=reference.forward, check=_check,
)  # fmt: skip


def _check_out(given: Forward, out: Meta) -> None:
    _check(given)
    checks.check_out(out, given.out_shape, given.q.dtype)


def _plan_out(given: Forward, out: Meta, device: int) -> Steps:
    return backends.forward(problem_of(given, out=strides(out)), given.backend, device)


def _reference_out(given: Forward, out: Tensor) -> Tensor:
    result, lse = reference.forward(*given)
    out.copy_(result)
    return lse


def _out_outputs(given: Forward) -> tuple[Memory]:
    return (Memory(given.lse_shape, _FLOAT32),)


OUT = Operator(
    "attention_fwd_out", (*_INPUTS, checks.Destination("out", HALVES, over="q")), options=_OPTIONS, results="lse",
    outputs=_out_outputs, plan=_plan_out, reference=_reference_out,
    check=_check_out,
)  # fmt: skip


def _problem(given: Forward) -> Attention:
    return problem_of(given)


def _problem_out(given: Forward, out: Meta) -> Attention:
    return problem_of(given, out=strides(out))


backends.ATTENTION.describe(attention_fwd=_problem, attention_fwd_out=_problem_out)


def _check_backward(dout: Meta, dlse: Meta | None, out: Meta, lse: Meta, given: Forward) -> None:
    _check(given)
    for name, meta in (("dout", dout), ("out", out)):
        checks.check_same(name, meta.dtype, given.q.dtype, "dtype", of="q")
        checks.check_same(name, tuple(meta.shape), given.out_shape, "shape", of="q and v")
    for name, meta in (("dlse", dlse), ("lse", lse)):
        if meta is not None:
            checks.check_same(name, tuple(meta.shape), given.lse_shape, "shape", of="q")


class Needs(NamedTuple):
    """The gradients that a backward pass computes."""

    need_q: bool
    need_k: bool
    need_v: bool
    need_sinks: bool
    need_bias: bool


def _backward_outputs(given: Forward, needs: Needs) -> tuple[Memory | None, ...]:
    q, k, v, sinks, bias = given[:5]
    shapes = ((needs.need_q, q.shape), (needs.need_k, k.shape), (needs.need_v, v.shape))
    results = [_memory(tuple(shape), q.dtype, given.heads_first) if needed else None for needed, shape in shapes]
    results.append(Memory((q.shape[-2],), _FLOAT32) if needs.need_sinks and sinks is not None else None)
    return *results, Memory(tuple(bias.shape), bias.dtype) if needs.need_bias and bias is not None else None


def _plan_backward(dout: Meta, dlse: Meta | None, out: Meta, given: Forward, needs: Needs, device: int) -> Steps:
    wants = "".join(letter for letter, needed in zip("qkvsb", needs, strict=True) if needed)
    dq, dk, dv = (result_strides(t.shape, given.heads_first) for t in (given.q, given.k, given.v))
    problem = problem_of(
        given, out=strides(out), dout=strides(dout), dlse=dlse is not None, wants=wants, dq=dq, dk=dk, dv=dv
    )
    info = device_info(device)
    whole = level() or backends.splits_heads(problem, given.backend, info)
    copies = 1 if whole else copies_of_heads(problem, info.sm_count)
    if copies > 1:
        return Steps(instead=partial(backward_of_copies, BACKWARD.launch, copies))
    return backends.backward(problem, given.backend, device)


BACKWARD = Operator(
    "attention_bwd",
    (
        Heads("dout", HALVES), Dense("dlse", (_FLOAT32,), optional=True), *_INPUTS[:3], Heads("out", HALVES),
        Dense("lse", (_FLOAT32,)), *_INPUTS[3:],
    ),
    options=f"{_OPTIONS}, bool need_q, bool need_k, bool need_v, bool need_sinks, bool need_bias",
    results="dq dk dv dsinks dbias",
    outputs=_backward_outputs,
    plan=_plan_backward,
    reference=reference.backward,
    check=_check_backward,
)  # fmt: skip


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *given):  # 9 tensors and 8 options, as for FORWARD
        out, lse = FORWARD.call(*given)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given[:3], out, lse, *given[3:9])
        ctx.options = given[9:]
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 17
        q, k, v, out, *others = ctx.saved_tensors
        if dout is None:
            dout = out.new_zeros(out.shape)
        needs = ctx.needs_input_grad[:5]
        grads = BACKWARD.call(dout, dlse, q, k, v, out, *others, *ctx.options, *needs)
        return *[grad if needed else None for grad, needed in zip(grads, needs, strict=True)], *(None,) * 12


_attention = applied(_Attention)

# ---- public ---------------------------------------------------------------------------------------------------------


def run(tensors: Sequence[Tensor | None], options: Sequence[Any], out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return out and lse for the 9 tensors and 8 options of FORWARD, with gradients if needed."""
    if out is not None:
        refuse_gradients("attention(out=...)", (*tensors, out))
        return out, OUT.call(*tensors, out, *options)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors[:5]):
        return _attention(*tensors, *options)
    return FORWARD.call(*tensors, *options)


@public(own_out=True, tensors="sinks bias", options={"layout": LAYOUT})
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
    bias: Tensor | None = None, alibi_slopes: Tensor | None = None, kv_limit: Tensor | Sequence[int] | None = None,
    seqused_k: Tensor | None = None, return_lse: bool = False, out: Tensor | None = None, layout: str = "blhd",
    acc: str = "fp32", backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``softmax(scale * q @ k^T) @ v`` for every head, without storing the matrix of scores.

    Differentiable in q, k, v, sinks and bias, also through lse; the backward pass is deterministic. Sums are in fp32. A
    query that attends to no key gives 0, and ``-inf`` as its lse.

    Args:
        q: bfloat16 or float16 [batch, queries, heads, width]. Width: a multiple of 8 up to 256. Any strides with unit
            stride within a head: slices of a packed qkv or of a cache are used in place (copied if strides or addresses
            are not multiples of 16 bytes).
        k: Like q, with keys instead of queries. The number of its heads divides that of q: query head h uses head
            ``h // (heads of q // heads of k)``.
        v: Like k; its heads may have a different width.
        scale: Factor of the scores, positive. Default: ``1 / sqrt(width)``.
        causal: Query i attends to keys up to ``i + keys - queries``, so the last query attends to all keys.
        window: Number of keys before its own position that a query attends to; its own position is the last key it
            attends to under `causal`. A pair ``(left, right)`` limits both sides; None or -1 does not limit a side.
        softcap: If not 0, scores are replaced by ``softcap * tanh(scores / softcap)``.
        sinks: [heads of q], any floating-point dtype: an extra score per head that takes part in the softmax but has no
            value. lse includes it.
        bias: Added to scores after softcap: any shape that broadcasts to [batch, heads of q, queries, keys], in q's
            dtype or float32; ``-inf`` masks. Its gradient is summed over the broadcast dimensions in a fixed order. If
            queries or keys are broadcast, the sum needs a temporary [queries, keys] matrix per sequence and head that
            do not share the bias.
        alibi_slopes: [heads of q] or [batch, heads of q], floating and without a gradient: ``slope * (key - position of
            the query)`` is added to scores after softcap. Only where no query attends to later keys (`causal`, or a
            window that ends at its own position), and not with `bias` or `sinks`. It needs memory for heads times keys
            float32 numbers; a score is exact to 2^-24 of slope times keys.
        kv_limit: int32 [queries] or [batch, queries], or a list: query i attends only to keys below its limit.
        seqused_k: int32 [batch] on the device: the number of valid keys of each sequence. Later keys may be
            uninitialised; causal and window are relative to the valid keys. A captured graph can be replayed with other
            values.
        return_lse: Also return the log-sum-exp (lse) of the scores.
        out: Tensor to write the result to, of its shape and dtype; may be q. Not with gradients.
        layout: "blhd" as above, or "bhld" [batch, heads, length, width] for q, k, v and out.
        acc: Accumulation of float16 products: "fp32", "fp16_qk" (scores), "fp16_pv" (values of a tile of keys, added in
            fp32) or "fp16" (both). fp16 is twice as fast on consumer GPUs (sm_86, sm_89, sm_120) and refused on
            others, which gain nothing. Scores above 65504 overflow. Not differentiable.
        backend: "auto"; "sm90" or "mma" for one of these. ``rtkernels.explain`` tells what "auto" takes.

    Returns:
        [batch, queries, heads, width of v] in `layout`, contiguous, in q's dtype. With return_lse a pair of it and the
        log-sum-exp of the scores, float32 [batch, heads, queries].
    """
    check_dims(4, f", {layout}", q=q, k=k, v=v)
    heads_first = layout == "bhld"
    if heads_first:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = None if out is None else out.transpose(1, 2)
    if kv_limit is not None and not isinstance(kv_limit, Tensor):
        kv_limit = torch.tensor(list(kv_limit), dtype=torch.int32, device=q.device)
    check_backend(backend)
    if acc != "fp32":
        backend = fp16_sums(acc, backend, q, [q, k, v, sinks, bias])
    left, right = window_sides(window, causal)
    if alibi_slopes is not None:
        bias = alibi_bias(alibi_slopes, q, k, bias, sinks, right)
    tensors = (q, k, v, None if sinks is None else sinks.float(), _spread(bias, q, k), seqused_k, kv_limit, None, None)
    options = (
        default_scale(scale, q), left, right, check_softcap(softcap), 0, 0, heads_first, backend,
    )  # fmt: skip
    result, lse = run(tensors, options, out)
    result = result.transpose(1, 2) if heads_first else result
    if return_lse and alibi_slopes is not None:
        lse = lse + alibi_offset(alibi_slopes, q, k, seqused_k)
    return (result, lse) if return_lse else result


def _spread(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return a bias as [batch or 1, heads or 1, queries, keys]."""
    if bias is None:
        return None
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    try:
        bias.expand(shape)
        bias = bias.view((1,) * (4 - bias.dim()) + tuple(bias.shape))
        return bias.expand(-1, -1, *shape[2:])
    except RuntimeError:
        raise ArgumentError(f"bias has shape {tuple(bias.shape)}; expected one that broadcasts to {shape}") from None


@public(own_out=True, tensors="k v cu_seqlens_q page_table sinks")
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, max_seqlen_q: int,
    max_seqlen_k: int, *, scale: float | None = None, causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, seqused_k: Tensor | None = None, page_table: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, return_lse: bool = False, out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return the attention of packed sequences; each sequence attends only to itself.

    Works like ``attention`` for every sequence; options are explained there. Rows after the last sequence (padding) are
    0 in the result and in the gradients.

    With a page_table, keys and values are in a paged cache, as servers have it for prefill, chunked prefill and mixed
    batches: new tokens are in the cache already (``append_kv_cache``), and the last query of a sequence is aligned with
    its last key. Lengths and pages are read on the device only, so one captured graph works for all of them. Not
    differentiable then.

    Args:
        q: bfloat16 or float16 [tokens, heads, width]; strides as for ``attention``.
        k: [tokens of keys, heads, width]. With a page_table: [pages, page size, heads, width] in q's dtype,
            float8_e4m3fn or int8; page size a multiple of 16; strides as for ``attention_decode``.
        v: Like k; its width may differ.
        cu_seqlens_q: int32 [sequences + 1] on the device: sequence b has rows ``cu_seqlens_q[b]`` to ``[b + 1]`` of q.
        cu_seqlens_k: The same for k and v. None with a page_table.
        max_seqlen_q: The largest number of queries in a sequence (or more). With a page_table, 1 selects the kernels of
            ``attention_decode``, which split the keys over blocks, unless `backend` names others.
        max_seqlen_k: The largest number of keys in a sequence (or more).
        scale: Factor of the scores.
        causal: Causal mask aligned to the last query of each sequence, which attends to all its keys.
        window: Number of keys to the left that a query attends to, or ``(left, right)``.
        softcap: Limit of the scores as in ``attention``; 0 for none.
        sinks: [heads of q], an extra score per head without a value.
        alibi_slopes: [heads of q] or [sequences, heads of q], floating-point: adds ``-slope * |position of the query -
            key|`` to scores, after softcap. With a page_table for any mask, by the "mma" backend. Without one only if
            no query attends to later keys, and not with `sinks`; it needs memory for heads times tokens of keys.
        seqused_k: int32 [sequences]: the number of valid keys of each sequence. Needed with a page_table.
            ``RTKERNELS_DEBUG=1`` then checks it against the pages, and waits for the device.
        page_table: int32 [sequences, pages]: the pages of each sequence in k and v. Entries after the last page that
            `seqused_k` needs are not read.
        k_scale: For an 8-bit cache: float32 () or [heads], the scale of the codes of keys.
        v_scale: The same for values.
        return_lse: Also return the log-sum-exp (lse) of the scores.
        out: Tensor to write the result to; without a page_table it may be q. Not with gradients.
        backend: "auto", or the name of a backend.

    Returns:
        [tokens, heads, width of v]; with return_lse a pair of it and lse, float32 [heads, tokens].
    """
    if page_table is None:
        check_tensor("cu_seqlens_k", cu_seqlens_k)
    check_backend(backend)
    left, right = window_sides(window, causal)
    sinks = None if sinks is None else sinks.float()
    lengths = check_integer("max_seqlen_q", max_seqlen_q), check_integer("max_seqlen_k", max_seqlen_k)
    if page_table is not None:
        _check_paged(cu_seqlens_k, seqused_k)
        slopes = alibi_slopes
        if slopes is not None:
            check_slopes(slopes, q, page_table.shape[0], q.shape[1])
            slopes = slopes.detach().float()
        cache = (q, k, v, cu_seqlens_q, seqused_k, page_table, k_scale, v_scale, sinks, slopes)
        options = (default_scale(scale, q), left, right, check_softcap(softcap), *lengths, backend)
        result, lse = paged.run(cache, options, out)
        return (result, lse) if return_lse else result
    for name, t in (("k_scale", k_scale), ("v_scale", v_scale)):
        if t is not None:
            raise ArgumentError(f"{name} is given without a page_table; expected None, or attention_quantized")
    if cu_seqlens_k is cu_seqlens_q and isinstance(cu_seqlens_k, Tensor):
        cu_seqlens_k = cu_seqlens_k.view(-1)  # Dynamo takes no tensor twice
    bias = None
    if alibi_slopes is not None:
        bias = packed_bias(alibi_slopes, q, k, cu_seqlens_q.shape[0] - 1, lengths[0], sinks, right)
    tensors = (q, k, v, sinks, bias, seqused_k, None, cu_seqlens_q, cu_seqlens_k)
    options = (default_scale(scale, q), left, right, check_softcap(softcap), *lengths, False, backend)
    result, lse = run(tensors, options, out)
    if return_lse and alibi_slopes is not None:
        lse = lse + packed_offset(alibi_slopes, q, cu_seqlens_q, cu_seqlens_k, seqused_k)
    return (result, lse) if return_lse else result


def _check_paged(cu_seqlens_k: Tensor | None, seqused_k: Tensor | None) -> None:
    """Raise an ArgumentError for arguments that do not go with a page table."""
    if cu_seqlens_k is not None:
        raise ArgumentError("cu_seqlens_k is given with a page_table; expected None, and lengths in seqused_k")
    if seqused_k is None:
        raise ArgumentError("seqused_k is None; expected the number of keys of each sequence with a page_table")
    check_tensor("seqused_k", seqused_k)


OP = Op(
    "attention", public=("attention", "attention_varlen"), kernels=backends.KERNELS, torch_ops=(FORWARD, OUT, BACKWARD),
    uses=("decode", "paged"),
)  # fmt: skip
