"""Packed queries over a paged cache: the operators behind ``attention_varlen`` with a page table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import backends, checks, reference
from rtkernels.ops.attention.cache import Cache, check_scale
from rtkernels.ops.attention.checks import HALVES, MAX_LENGTH, Heads, check_same, check_shared_heads, strides
from rtkernels.ops.attention.decode_plan import CODES
from rtkernels.ops.attention.paged_plan import KERNELS, PAGE_UNIT, Paged, one_each, steps
from rtkernels.ops.shared.positions import check_lengths
from rtkernels.runtime.layout import DTYPE_TOKEN
from rtkernels.runtime.operator.autograd import refuse_gradients
from rtkernels.runtime.operator.declared import Dense, Meta, Operator
from rtkernels.runtime.operator.plan import Memory, Steps
from rtkernels.runtime.operator.registry import Op

_FLOAT32 = torch.float32


class Given(NamedTuple):
    """Arguments of a call. Checks and plans get metas in place of tensors."""

    q: Any
    k: Any
    v: Any
    cu_seqlens_q: Any
    seqused_k: Any
    page_table: Any
    k_scale: Any
    v_scale: Any
    sinks: Any
    alibi_slopes: Any
    scale: float
    left: int
    right: int
    softcap: float
    max_seqlen_q: int
    max_seqlen_k: int
    backend: str

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        return (*self.q.shape[:-1], self.v.shape[-1])


def _check_caches(q: Meta, k: Meta, v: Meta) -> None:
    if k.dtype not in (q.dtype, *CODES):
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in (q.dtype, *CODES))
        raise ArgumentError(f"k has dtype {str(k.dtype).removeprefix('torch.')}; expected one of {expected}")
    check_same("v", v.dtype, k.dtype, "dtype", of="k")
    check_same("v", tuple(v.shape[:3]), tuple(k.shape[:3]), "shape but for the last dimension", of="k")
    if k.shape[1] < PAGE_UNIT or k.shape[1] % PAGE_UNIT:
        raise ArgumentError(f"k has pages of {k.shape[1]} keys; expected a multiple of {PAGE_UNIT}")
    for name, meta in (("k", k), ("v", v)):
        checks.check_width(name, meta, checks.MAX_WIDTH, 16 // k.dtype.itemsize)
    if k.shape[-1] != q.shape[-1]:
        raise ArgumentError(f"k has heads of {k.shape[-1]} elements; expected {q.shape[-1]}, those of q")
    check_shared_heads(q, k, "k and v")


def _check(given: Given) -> None:
    q, k, v = given.q, given.k, given.v
    if q.dim() != 3:
        raise ArgumentError(f"q has shape {tuple(q.shape)}; expected [tokens, heads, width]")
    _check_caches(q, k, v)
    ends, table = given.cu_seqlens_q, given.page_table
    if ends.dim() != 1 or ends.shape[0] < 1:
        raise ArgumentError(f"cu_seqlens_q has shape {tuple(ends.shape)}; expected one dimension, sequences + 1")
    sequences = ends.shape[0] - 1
    for name, meta in (("cu_seqlens_q", ends), ("seqused_k", given.seqused_k), ("page_table", table)):
        if meta.dtype != torch.int32:
            raise ArgumentError(f"{name} has dtype {str(meta.dtype).removeprefix('torch.')}; expected int32")
    if tuple(given.seqused_k.shape) != (sequences,):
        raise ArgumentError(f"seqused_k has shape {tuple(given.seqused_k.shape)}; expected ({sequences},)")
    if table.dim() != 2 or table.shape[0] != sequences:
        raise ArgumentError(f"page_table has shape {tuple(table.shape)}; expected ({sequences}, pages)")
    if table.shape[1] * k.shape[1] >= MAX_LENGTH:
        raise ArgumentError(
            f"page_table has {table.shape[1]} pages of {k.shape[1]} keys; expected fewer than 2^29 keys"
        )
    backends.check_name(given.backend)
    for name, largest in (("max_seqlen_q", given.max_seqlen_q), ("max_seqlen_k", given.max_seqlen_k)):
        if not 0 <= largest < MAX_LENGTH:
            raise ArgumentError(f"{name} is {largest}; expected the length of the longest sequence")
    for name, meta in (("k_scale", given.k_scale), ("v_scale", given.v_scale)):
        check_scale(name, meta, k.shape[2])
        if meta is not None and k.dtype not in CODES:
            raise ArgumentError(f"{name} is given for a cache of q's dtype; expected None")
    if given.sinks is not None:
        check_same("sinks", tuple(given.sinks.shape), (q.shape[1],), "shape", of="heads of q")
    slopes, heads = given.alibi_slopes, q.shape[1]
    if slopes is not None and tuple(slopes.shape) not in ((heads,), (sequences, heads)):
        got = tuple(slopes.shape)
        raise ArgumentError(f"alibi_slopes has shape {got}; expected {(heads,)} or {(sequences, heads)}")
    checks.check_factor(given.scale)
    for name, side in (("left", given.left), ("right", given.right)):
        if not -1 <= side < MAX_LENGTH:
            raise ArgumentError(f"window has {side} keys to the {name}; expected -1 (all) to 2^29")


def _lse(given: Given) -> Memory:
    total, heads = given.q.shape[:2]
    # The kernels of decoding write [tokens, heads].
    alibi = given.alibi_slopes is not None
    order = (1, heads) if one_each(given.max_seqlen_q, total, given.backend, alibi) else None
    return Memory((heads, total), _FLOAT32, order)


def _outputs(given: Given) -> tuple[Memory, Memory]:
    return Memory(given.out_shape, given.q.dtype), _lse(given)


def _per_head(scale: Meta | None) -> int:
    return int(scale is not None and scale.numel() > 1)


def _steps(given: Given, out: Sequence[int], device: int) -> Steps:
    q, k, v, table = given.q, given.k, given.v, given.page_table
    call = Paged(
        token=DTYPE_TOKEN[q.dtype], codes=CODES.get(k.dtype, 0), sequences=table.shape[0], total=q.shape[0],
        max_q=given.max_seqlen_q, max_k=given.max_seqlen_k, heads_q=q.shape[1], heads_kv=k.shape[2], d_qk=q.shape[2],
        d_v=v.shape[3], pages=k.shape[0], page_size=k.shape[1], table_row=table.shape[1], q=strides(q)[1:3],
        k=strides(k)[:3], v=strides(v)[:3], out=tuple(out), k_scale_head=_per_head(given.k_scale),
        v_scale_head=_per_head(given.v_scale), left=given.left, right=given.right,
        scale=given.scale, softcap=given.softcap, backend=given.backend, alibi=given.alibi_slopes is not None,
        slopes_batch=q.shape[1] if given.alibi_slopes is not None and given.alibi_slopes.dim() == 2 else 0,
    )  # fmt: skip
    return steps(call, device)


def _plan(given: Given, device: int) -> Steps:
    _, heads, width = given.out_shape
    return _steps(given, (heads * width, width), device)


def _sequence(cache: Tensor, pages: Tensor, keys: int, scale: Tensor | None) -> Tensor:
    """Return the keys of one sequence as float32 [1, keys, heads, width]; other pages are not read."""
    size = cache.shape[1]
    rows = cache[pages[: -(-keys // size)].long()].flatten(0, 1)[:keys].float()
    return (rows if scale is None else rows * scale.float().reshape(-1, 1)).unsqueeze(0)


def _alibi(slopes: Tensor | None, sequence: int, queries: int, keys: int) -> Tensor | None:
    """Return what ALiBi adds to the scores of one sequence, [1, heads, queries, keys]."""
    if slopes is None:
        return None
    position = torch.arange(keys - queries, keys, dtype=torch.int64, device=slopes.device).view(-1, 1)
    distance = (position - torch.arange(keys, dtype=torch.int64, device=slopes.device)).abs().float()
    return -(slopes if slopes.dim() == 1 else slopes[sequence]).view(1, -1, 1, 1) * distance


def _reference(
    q, k, v, cu_seqlens_q, seqused_k, page_table, k_scale, v_scale, sinks, alibi_slopes, scale, left, right, softcap,
    max_seqlen_q=0, max_seqlen_k=0, backend="auto",
):  # fmt: skip
    total, heads, _ = q.shape
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    rows_first = one_each(max_seqlen_q, total, backend, alibi_slopes is not None)
    shape = (total, heads) if rows_first else (heads, total)
    lse = torch.full(shape, float("-inf"), dtype=torch.float32, device=q.device)
    lse = lse.t() if rows_first else lse
    ends, largest = cu_seqlens_q.tolist(), page_table.shape[1] * k.shape[1]
    for b, count in enumerate(seqused_k.tolist()):
        keys, rows = min(max(count, 0), largest), slice(ends[b], ends[b + 1])
        ks, vs = (_sequence(t, page_table[b], keys, s) for t, s in ((k, k_scale), (v, v_scale)))
        bias, nothing = _alibi(alibi_slopes, b, ends[b + 1] - ends[b], keys), (None,) * 4
        part, part_lse = reference.forward(
            q[rows].unsqueeze(0).float(), ks, vs, sinks, bias, *nothing, scale, left, right, softcap
        )
        out[rows], lse[:, rows] = part[0].to(q.dtype), part_lse[0]
    return out, lse


_TENSORS = (
    Heads("q", HALVES), Cache("k", None), Cache("v", None), Dense("cu_seqlens_q", None), Dense("seqused_k", None),
    Dense("page_table", None), Dense("k_scale", (_FLOAT32,), optional=True),
    Dense("v_scale", (_FLOAT32,), optional=True), Dense("sinks", (_FLOAT32,), optional=True),
    Dense("alibi_slopes", (_FLOAT32,), optional=True),
)  # fmt: skip
_OPTIONS = "float scale, int left, int right, float softcap, int max_seqlen_q, int max_seqlen_k, str backend"
FORWARD = Operator(
    "attention_paged_fwd", _TENSORS, options=_OPTIONS, results="out lse", outputs=_outputs, plan=_plan,
    reference=_reference, check=_check,
)  # fmt: skip


def _check_out(given: Given, out: Meta) -> None:
    _check(given)
    checks.check_out(out, given.out_shape, given.q.dtype)


def _out_outputs(given: Given) -> tuple[Memory]:
    return (_lse(given),)


def _plan_out(given: Given, out: Meta, device: int) -> Steps:
    return _steps(given, strides(out)[1:3], device)


def _reference_out(given: Given, out: Tensor) -> Tensor:
    result, lse = _reference(*given)
    out.copy_(result)
    return lse


OUT = Operator(
    "attention_paged_fwd_out", (*_TENSORS, checks.Destination("out", HALVES, over="q")), options=_OPTIONS,
    results="lse", outputs=_out_outputs, plan=_plan_out, reference=_reference_out, check=_check_out,
)  # fmt: skip


def run(tensors: Sequence[Tensor | None], options: Sequence[Any], out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return out and lse for the 10 tensors and 7 options of FORWARD."""
    refuse_gradients("attention_varlen(page_table=...)", (*tensors, out))
    check_lengths("seqused_k", tensors[4], tensors[1], tensors[5], "keys of the pages")
    if out is not None:
        return out, OUT.call(*tensors, out, *options)
    return FORWARD.call(*tensors, *options)


OP = Op("paged", public=(), kernels=KERNELS, torch_ops=(FORWARD, OUT), uses=("attention", "decode"))
