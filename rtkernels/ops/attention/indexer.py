"""The indexer of DeepSeek sparse attention: scores of keys, and the indices of the best for each token."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.checks import Heads, check_width
from rtkernels.runtime.call.public import public
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, GRID_LIMIT, check_same
from rtkernels.runtime.operator.arguments import Within
from rtkernels.runtime.operator.declared import Aligned, Dense, Meta, Operator
from rtkernels.runtime.operator.plan import IN_TORCH, Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
_KEYS, _WIDTH = 128, 128  # keys of a block and columns, as in indexer_logits.cu
_TOKENS = 32  # of a block, if they share keys
_THREADS = 512  # of a row, as in indexer_select.cu
_SHARED = (_KEYS + 2 * 64) * 2 * _WIDTH
_SCORES = 2**26  # bytes of scores at a time, of which L2 has the larger part

LOGITS = Kernel(
    "attention/indexer_logits.cu", "indexer_logits", template="T", max_registers=128, tier="serve",
    args="q:ptr k:ptr weights:ptr key_scales:ptr starts:ptr ends:ptr table:ptr out:ptr first:i64 tokens:i64 each:i64 "
    "heads:i64 keys:i64 width:i64 q_row:i64 q_head:i64 k_row:i64 page:i64 table_row:i64",
    variants=[("bf16",), ("fp16",), ("e4m3",)],
)  # fmt: skip
SELECT = Kernel(
    "attention/indexer_select.cu", "indexer_select", template="T", max_registers=64, tier="serve",
    args="x:ptr indices:ptr first:i64 columns:i64 count:i64", variants=[("fp32",)],
)  # fmt: skip


def _keys(k: Meta, page_table: Meta | None) -> int:
    """Return how many keys a token may have."""
    return k.shape[0] if page_table is None else k.shape[1] * page_table.shape[1]


def _check(q, k, weights, key_scales, starts, ends, page_table) -> None:
    if q.dtype not in _DTYPES:
        raise ArgumentError(f"q has dtype {q.dtype}; expected bfloat16, float16 or float8_e4m3fn")
    if q.dim() != 3:
        raise ArgumentError(f"q has shape {tuple(q.shape)}; expected [tokens, heads, width]")
    check_width("q", q, _WIDTH)
    dims, order = (2, "[keys, width]") if page_table is None else (3, "[pages, page size, width]")
    if k.dim() != dims:
        raise ArgumentError(f"k has shape {tuple(k.shape)}; expected {order}")
    check_same("k", k.dtype, q.dtype, "dtype", of="q")
    check_same("k", k.shape[-1], q.shape[2], "width", of="q")
    check_same("weights", tuple(weights.shape), tuple(q.shape[:2]), "shape", of="the tokens and heads of q")
    if key_scales is not None:
        check_same("key_scales", tuple(key_scales.shape), tuple(k.shape[:-1]), "shape", of="k without its width")
    for name, meta in (("starts", starts), ("ends", ends)):
        if meta is not None and (meta.dtype != torch.int32 or tuple(meta.shape) != (q.shape[0],)):
            raise ArgumentError(f"{name} is {meta.dtype} {tuple(meta.shape)}; expected int32 [{q.shape[0]}]")
    if page_table is not None and (
        page_table.dtype != torch.int32 or page_table.dim() != 2 or page_table.shape[0] != q.shape[0]
    ):
        found = f"{page_table.dtype} {tuple(page_table.shape)}"
        raise ArgumentError(f"page_table is {found}; expected int32 [{q.shape[0]}, pages]")
    if q.shape[0] > GRID_LIMIT or _keys(k, page_table) > GRID_LIMIT:
        raise ArgumentError(f"k has shape {tuple(k.shape)}; expected fewer than 2^31 keys")


def _stride(meta: Meta, dim: int) -> int:
    return 0 if meta.shape[dim] <= 1 else meta.stride[dim]


def _scores(q, k, given, out: str, first: int, tokens: int, device: int) -> Step:
    """Return the launch for some tokens. `given`: key_scales, starts, ends, page_table."""
    table, keys = given["page_table"], _keys(k, given["page_table"])
    each = _TOKENS if table is None else 1
    each = max(each, -(-tokens // 65535))
    names = ("key_scales", "starts", "ends", "page_table")
    return Step(
        LOGITS.bind((DTYPE_TOKEN[q.dtype],), device, (-(-keys // _KEYS), -(-tokens // each)), 256, _SHARED),
        *("q", "k", "weights", *(name if given[name] is not None else 0 for name in names), out, first, tokens, each),
        *(q.shape[1], keys, q.shape[2], _stride(q, 0), _stride(q, 1), k.shape[-1]),
        *((0, 0) if table is None else (k.shape[1], table.shape[1])),
    )


def _chunks(tokens: int, keys: int, paged: bool) -> list[tuple[int, int]]:
    """Return the first token and the number of tokens of each launch."""
    size = max(_SCORES // (4 * max(keys, 1)), _TOKENS)
    size = min(size, 65535) if paged else size
    return [(first, min(size, tokens - first)) for first in range(0, tokens, size)]


def _plan(q, k, key_scales, starts, ends, page_table, device) -> Steps:
    given = {"key_scales": key_scales, "starts": starts, "ends": ends, "page_table": page_table}
    step = 65535 if page_table is not None else max(q.shape[0], 1)
    if q.shape[0] > step:
        raise ArgumentError(f"q has {q.shape[0]} tokens; expected up to 65535 with a page_table")
    return Steps(_scores(q, k, given, "logits", 0, q.shape[0], device))


def _plan_best(q, k, key_scales, starts, ends, page_table, count, device) -> Steps:
    if not q.shape[1]:
        return IN_TORCH  # scores of no heads
    given = {"key_scales": key_scales, "starts": starts, "ends": ends, "page_table": page_table}
    keys, steps, max_tokens = _keys(k, page_table), [], 0
    for first, tokens in _chunks(q.shape[0] if count else 0, keys, page_table is not None):
        max_tokens = max(max_tokens, tokens)
        if keys:
            steps.append(_scores(q, k, given, "scores", first, tokens, device))
        select = SELECT.bind(("fp32",), device, tokens, _THREADS)
        steps.append(Step(select, "scores", "indices", first, keys, count))
    return Steps(*steps, scratch={"scores": Memory((max_tokens, max(keys, 1)), torch.float32)})


def _reference(q, k, weights, key_scales, starts, ends, page_table):
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    tokens = q.shape[0]
    if page_table is None:
        rows, scales = k.unsqueeze(0), None if key_scales is None else key_scales.unsqueeze(0)
    else:
        pages = page_table.long().clamp(0, max(k.shape[0] - 1, 0))  # those that are not read may be any numbers
        rows = k.view(torch.uint8)[pages].view(k.dtype) if k.dtype.itemsize == 1 else k[pages]
        rows = rows.flatten(1, 2)
        scales = None if key_scales is None else key_scales[pages].flatten(1, 2)
    scores = (q.to(dtype) @ rows.to(dtype).mT).relu()
    logits = (scores * weights.to(dtype).unsqueeze(-1)).sum(1)
    if scales is not None:
        logits = logits * scales.to(dtype)
    places = torch.arange(logits.shape[1], dtype=torch.int64, device=q.device).expand(tokens, -1)
    outside = torch.zeros_like(places, dtype=torch.bool)
    if starts is not None:
        outside = outside | (places < starts.unsqueeze(1))
    if ends is not None:
        outside = outside | (places >= ends.unsqueeze(1))
    return logits.masked_fill(outside, -torch.inf)


def _reference_best(q, k, weights, key_scales, starts, ends, page_table, count):
    logits = _reference(q, k, weights, key_scales, starts, ends, page_table)
    order = logits.sort(dim=1, descending=True, stable=True)
    chosen = order.indices[:, :count].masked_fill(order.values[:, :count] == -torch.inf, logits.shape[1])
    chosen = torch.nn.functional.pad(chosen.sort(1).values, (0, count - chosen.shape[1]), value=logits.shape[1])
    return chosen.masked_fill(chosen == logits.shape[1], -1).int()


_ARGUMENTS = (
    Heads("q", None), Aligned("k", None), Dense("weights", (torch.float32,)),
    Dense("key_scales", (torch.float32,), optional=True), Dense("starts", None, optional=True),
    Dense("ends", None, optional=True), Dense("page_table", None, optional=True),
)  # fmt: skip
FORWARD = Operator(
    "indexer_logits_fwd", _ARGUMENTS, results="logits", plan=_plan, reference=_reference, check=_check,
    outputs=lambda q, k, page_table: (Memory((q.shape[0], _keys(k, page_table)), torch.float32),),
)  # fmt: skip
BEST = Operator(
    "indexer_topk_fwd", _ARGUMENTS, options="int count", results="indices", plan=_plan_best,
    reference=_reference_best, check=_check, plans_empty=True,
    outputs=lambda q, count: (Memory((q.shape[0], count), torch.int32),),
)  # fmt: skip


def _given(q, k, weights, key_scales, starts, ends, page_table) -> tuple[Tensor | None, ...]:
    scales = None if key_scales is None else key_scales.float()
    return q, k, weights.float(), scales, starts, ends, page_table


@public(no_gradients="q k weights key_scales")
def indexer_logits(
    q: Tensor, k: Tensor, weights: Tensor, *, key_scales: Tensor | None = None, starts: Tensor | None = None,
    ends: Tensor | None = None, page_table: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the scores by which DeepSeek sparse attention chooses keys.

    ``logits[t, s] = sum over heads h of weights[t, h] * max(q[t, h] . k[s], 0)``, in fp32. Constant factors of a model,
    such as ``(128 heads)^-0.5``, belong in `weights`. Not differentiable.

    Args:
        q: bfloat16, float16 or float8_e4m3fn [tokens, heads, width], width a multiple of 8 up to 128 (of 16 for
            float8_e4m3fn). Scales of codes belong in `weights`, too.
        k: [keys, width] in q's dtype; with a page_table [pages, page size, width].
        weights: [tokens, heads], any floating-point dtype.
        key_scales: [keys] or [pages, page size], not negative: factors of the keys, as for codes. Default: 1.
        starts: int32 [tokens]: the first key of each token; -inf before it. Default: 0.
        ends: int32 [tokens]: one after the last key of each token; -inf from there on. Default: all keys.
        page_table: int32 [tokens, pages]: the pages that have a token's keys; entries for keys from `ends` on are not
            read.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        float32 [tokens, keys] or [tokens, pages of a token * page size].
    """
    return FORWARD.call(*_given(q, k, weights, key_scales, starts, ends, page_table))


@public(options={"count": Within("int", "count >= 0", "at least 0")}, no_gradients="q k weights key_scales")
def indexer_topk(
    q: Tensor, k: Tensor, weights: Tensor, count: int, *, key_scales: Tensor | None = None,
    starts: Tensor | None = None, ends: Tensor | None = None, page_table: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the keys with the largest ``indexer_logits`` of each token, as ``sparse_mla`` takes them.

    Scores are computed and searched for some tokens at a time, so no tensor holds all of them. Of equal scores the
    first keys are chosen; keys of -inf never are. Not differentiable.

    Args:
        q: As for ``indexer_logits``.
        k: As there.
        weights: As there.
        count: Largest number of keys that are chosen for a token.
        key_scales: As there.
        starts: As there.
        ends: As there; for a causal mask the token's position + 1.
        page_table: As there. Indices are then those of a token's own keys, not rows of pages.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        int32 [tokens, count]: indices in ascending order, -1 after the last.
    """
    return BEST.call(*_given(q, k, weights, key_scales, starts, ends, page_table), count)


OP = Op("indexer", public=("indexer_logits", "indexer_topk"), kernels=(LOGITS, SELECT), torch_ops=(FORWARD, BEST))
