"""Attention of new tokens over a cache of keys and values, paged or contiguous, of 16-bit or 8-bit elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import paged, reference
from rtkernels.ops.attention.backends import ATTENTION
from rtkernels.ops.attention.cache import Cache, check_cache, check_scale
from rtkernels.ops.attention.checks import (
    HALVES,
    Heads,
    check_factor,
    check_shared_heads,
    strides,
)
from rtkernels.ops.attention.decode_cluster_plan import CLUSTER
from rtkernels.ops.attention.decode_plan import CODES, COMBINE, DECODE, Decode, steps
from rtkernels.ops.attention.options import default_scale, window_sides
from rtkernels.ops.attention.problem import Attention, Strides, dense
from rtkernels.ops.shared.positions import check_lengths
from rtkernels.runtime.call.public import public
from rtkernels.runtime.invariance import level, refuse
from rtkernels.runtime.layout import DTYPE_TOKEN, check_same
from rtkernels.runtime.operator.arguments import check_number
from rtkernels.runtime.operator.declared import Dense, Meta, Operator
from rtkernels.runtime.operator.plan import Boxes, Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op


def _check(q, k_cache, v_cache, lengths, page_table, k_scale, v_scale, sinks, scale, softcap) -> None:
    if q.dim() != 4:
        raise ArgumentError(f"q has shape {tuple(q.shape)}; expected [batch, length, heads, width]")
    check_cache(q, k_cache, v_cache, lengths, page_table)
    heads, heads_kv = q.shape[2], k_cache.shape[2]
    check_shared_heads(q, k_cache, "k_cache")
    for name, meta in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_scale(name, meta, heads_kv)
        if meta is not None and k_cache.dtype not in CODES:
            raise ArgumentError(f"{name} is given for a cache of q's dtype; expected None")
    if sinks is not None:
        check_same("sinks", tuple(sinks.shape), (heads,), "shape", of="heads of q")
    check_factor(scale)
    if not 0.0 <= softcap < float("inf"):
        raise ArgumentError(f"softcap is {softcap}; expected 0 (none) or a positive number")


def _outputs(q: Meta, v_cache: Meta) -> tuple[Memory, ...]:
    out = Memory((*q.shape[:-1], v_cache.shape[-1]), q.dtype)
    return out, Memory((q.shape[0], q.shape[2], q.shape[1]), torch.float32)


def _per_head(scale: Meta | None) -> int:
    return int(scale is not None and scale.numel() > 1)


def _plan(q, k_cache, v_cache, page_table, k_scale, v_scale, sinks, scale, left, right, softcap, device) -> Steps:
    paged = page_table is not None
    call = Decode(
        token=DTYPE_TOKEN[q.dtype], codes=CODES.get(k_cache.dtype, 0), batch=q.shape[0], lq=q.shape[1],
        heads_q=q.shape[2], heads_kv=k_cache.shape[2], d_qk=q.shape[3], d_v=v_cache.shape[3],
        lkv=page_table.shape[1] * k_cache.shape[1] if paged else k_cache.shape[1],
        page_size=k_cache.shape[1] if paged else 0, table_row=page_table.shape[1] if paged else 0,
        q=strides(q)[:3], k=strides(k_cache)[:3], v=strides(v_cache)[:3], k_scale_head=_per_head(k_scale),
        v_scale_head=_per_head(v_scale), left=left, right=right, scale=scale, softcap=softcap,
    )  # fmt: skip
    if not level() or call.codes:
        return steps(call, device)
    if paged:
        refuse("attention_decode_fwd with pages", "attention_decode calls the kernels of attention_varlen for them")
    return _like_prefill(call, strides(q), strides(k_cache), strides(v_cache), sinks is not None, device)


def _like_prefill(call: Decode, q: Strides, k: Strides, v: Strides, sinks: bool, device: int) -> Steps:
    """Return the launches of ``attention``, so that a token has the bits that it has in a prompt."""
    problem = Attention(
        call.batch, call.heads_q, call.heads_kv, call.lq, call.lkv, call.d_qk, call.d_v, call.token, q, k, v,
        dense(call.lq, call.heads_q, call.d_v, False), call.scale, call.left, call.right, call.softcap,
        sinks="fp32" if sinks else None, lengths=True,
    )  # fmt: skip
    if call.lq == 1 and call.left < 0 and not sinks:  # query heads that share keys become queries that see all of them
        group, width = problem.group, call.d_v
        problem = problem._replace(
            heads_q=call.heads_kv, lq=group, right=-1, q=q._replace(row=q.head, head=group * q.head),
            out=Strides(call.heads_q * width, width, group * width),
        )  # fmt: skip
    found = ATTENTION.steps(problem, device)
    names = {"k": "k_cache", "v": "v_cache", "bias": 0, "kv_limit": 0, "cu_q": 0, "cu_k": 0}

    def renamed(argument: Any) -> Any:
        if isinstance(argument, Boxes):
            return argument._replace(name=names.get(argument.name, argument.name))
        return names.get(argument, argument) if isinstance(argument, str) else argument

    launches = [Step(step.launch, *map(renamed, step.arguments)) for step in found.steps]
    return Steps(*launches, scratch=found.scratch, zeros=found.zeros)


def gathered(
    cache: Tensor, lengths: Tensor, page_table: Tensor | None, scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return a cache as [batch, keys, heads, width] with its scales applied; keys after the last one are 0."""
    values = cache.to(dtype)
    if scale is not None:
        values = values * scale.to(dtype).reshape(-1, 1)
    if page_table is not None:
        size, pages = cache.shape[1], page_table.shape[1]
        used = torch.arange(pages, dtype=torch.int64, device=cache.device) * size < lengths.view(-1, 1)
        values = (
            values[torch.where(used, page_table, 0).long()].flatten(1, 2)
            if cache.shape[0]
            else values.new_zeros(len(lengths), pages * size, *cache.shape[2:])
        )
    keys = torch.arange(values.shape[1], dtype=torch.int64, device=cache.device)
    return values.masked_fill((keys >= lengths.view(-1, 1)).view(*values.shape[:2], 1, 1), 0.0)


def _reference(q, k_cache, v_cache, lengths, page_table, k_scale, v_scale, sinks, scale, left, right, softcap):
    k = gathered(k_cache, lengths, page_table, k_scale, torch.float32)
    v = gathered(v_cache, lengths, page_table, v_scale, torch.float32)
    out, lse = reference.forward(q.float(), k, v, sinks, None, lengths, None, None, None, scale, left, right, softcap)
    return out.to(q.dtype), lse


FORWARD = Operator(
    "attention_decode_fwd",
    (
        Heads("q", HALVES), Cache("k_cache", None), Cache("v_cache", None), Dense("lengths", None),
        Dense("page_table", None, optional=True), Dense("k_scale", (torch.float32,), optional=True),
        Dense("v_scale", (torch.float32,), optional=True), Dense("sinks", (torch.float32,), optional=True),
    ),
    options="float scale, int left, int right, float softcap",
    results="out lse",
    outputs=_outputs,
    plan=_plan,
    reference=_reference,
    check=_check,
)  # fmt: skip


def _over_pages(q, k_cache, v_cache, lengths, page_table, k_scale, v_scale, sinks, *options) -> tuple[Tensor, Tensor]:
    """Return out and lse by the kernels of ``attention_varlen``: a token has the bits that it has in a prompt."""
    batch, lq, heads, _ = q.shape
    ends = torch.arange(0, batch * lq + 1, max(lq, 1), dtype=torch.int32, device=q.device)
    tensors = (q.flatten(0, 1), k_cache, v_cache, ends, lengths, page_table, k_scale, v_scale, sinks, None)
    out, lse = paged.run(tensors, (*options, lq, page_table.shape[1] * k_cache.shape[1], "auto"), None)
    return out.unflatten(0, (batch, lq)), lse.view(heads, batch, lq).transpose(0, 1).contiguous()


@public(no_gradients="q k_cache v_cache sinks")
def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, seqlens: Tensor, *, page_table: Tensor | None = None,
    scale: float | None = None, causal: bool = True, window: int | tuple[int | None, int | None] | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | tuple[Tensor | None, ...] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return the attention of new queries over a cache whose lengths and pages are read on the device only.

    The launch does not depend on the values of `seqlens` and `page_table`, so one captured graph works for all lengths.
    Keys are split over blocks by shapes alone, and partial results are merged in a fixed order. Not differentiable.

    Args:
        q: bfloat16 or float16 [batch, heads, width] for one new token per sequence, or [batch, tokens, heads, width].
            Query heads that share a key head read the cache once.
        k_cache: [pages, page size, heads, width] with a page_table, else [batch, length, heads, width]; q's dtype,
            float8_e4m3fn or int8. Unit stride within a head; other strides are multiples of 16 bytes. Width up to 256.
        v_cache: Like k_cache; its heads may have a different width.
        seqlens: int32 [batch]: number of keys of each sequence, including new tokens. ``RTKERNELS_DEBUG=1`` checks them
            against the cache, and waits for the device.
        page_table: int32 [batch, pages]: the pages of each sequence in the cache. Entries after the last page that
            `seqlens` needs are not read.
        scale: Factor of the scores. Default: ``1 / sqrt(width)``.
        causal: Causal mask aligned to the last token, which attends to all keys.
        window: Number of keys to the left that a query attends to, or ``(left, right)``.
        softcap: Limit of the scores as in ``attention``; 0 for none.
        sinks: [heads of q], an extra score per head without a value.
        k_scale: For an 8-bit cache: float32 () or [heads], the scale of the codes of keys.
        v_scale: The same for values.
        return_lse: Also return the log-sum-exp (lse) of the scores.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        q's shape with the width of v_cache; with return_lse a pair of it and lse, float32 [batch, heads, tokens]
        ([batch, heads] if q has no tokens).
    """
    single = q.dim() == 3
    check_lengths("seqlens", seqlens, k_cache, page_table, "keys of the cache")
    given = (
        q.unsqueeze(1) if single else q, k_cache, v_cache, seqlens, page_table, k_scale, v_scale,
        None if sinks is None else sinks.float(), default_scale(scale, q), *window_sides(window, causal),
        float(check_number("softcap", softcap)),
    )  # fmt: skip
    invariant = level() and page_table is not None and k_cache.dtype == q.dtype
    out, lse = _over_pages(*given) if invariant else FORWARD.call(*given)
    if single:
        out, lse = out.squeeze(1), lse.squeeze(2)
    return (out, lse) if return_lse else out


OP = Op(
    "decode",
    public=("attention_decode",),
    kernels=(DECODE, COMBINE, CLUSTER),
    torch_ops=(FORWARD,),
    uses=("attention", "paged"),
)
