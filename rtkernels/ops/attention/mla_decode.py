"""Decoding with multi-head latent attention in the absorbed form: a latent is key and value of all heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import reference
from rtkernels.ops.attention.checks import HALVES, Heads, check_cache_rows, check_factor, check_width
from rtkernels.ops.attention.decode import gathered
from rtkernels.ops.attention.decode_plan import (
    COMBINE,
    MAX_SPLITS,
    combine,
    dense_strides,
    part_memory,
    split_count,
)
from rtkernels.ops.attention.options import default_scale
from rtkernels.ops.shared.positions import check_lengths
from rtkernels.runtime.call.public import public
from rtkernels.runtime.invariance import level, refuse
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, check_same, divisor
from rtkernels.runtime.operator.arguments import check_integer
from rtkernels.runtime.operator.declared import Dense, Meta, Operator
from rtkernels.runtime.operator.plan import Boxes, Memory, Step, Steps, box_strides
from rtkernels.runtime.operator.registry import Op

# As in mla_decode.cu.
_ROWS = 32  # of queries of a block
_KEYS = 32  # of a tile
_THREADS = 256
_WIDTH = 576  # of a latent with its rotated part
_VALUE = 512  # of these, what is a value, too
_SHARED = 2 * _KEYS * 2 * _WIDTH + 2 * 4 * _KEYS // 8 * 32 * 16

KERNEL = Kernel(
    "attention/mla_decode.cu", "mla_decode", template="T", max_registers=255, tier="serve",
    args="q:ptr cache:ptr lengths:ptr table:ptr out:ptr lse:ptr parts:ptr part_lse:ptr heads:i64 lq:i64 lkv:i64 "
    "d_qk:i64 d_v:i64 splits:i64 page_size:i64 page_divisor:i64 table_row:i64 q_batch:i64 q_row:i64 q_head:i64 "
    "cache_page:i64 cache_row:i64 right:i64 scale:f64",
    variants=[("bf16",), ("fp16",)],
)  # fmt: skip

KERNEL_SM90 = Kernel(
    "attention/mla_decode_sm90.cu", "mla_decode_sm90", template="T", max_registers=168, needs=("wgmma",), tier="serve",
    args="cache_map:tmap q:ptr lengths:ptr table:ptr out:ptr lse:ptr parts:ptr part_lse:ptr heads:i64 lq:i64 lkv:i64 "
    "d_qk:i64 d_v:i64 splits:i64 page_size:i64 box_rows:i64 table_row:i64 q_batch:i64 q_row:i64 q_head:i64 right:i64 "
    "scale:f64",
    variants=[("bf16",), ("fp16",)],
)  # fmt: skip
SM90_ROWS = 64  # of queries of a block, as in mla_decode_sm90.cu
_SM90_KEYS = 64  # of a tile, as there
SM90_SHARED = 3 * 64 * 128 * 9 + 128 * (4 * 16 + 8) + 3 * 32 + 2 * 8 + 1024


def _box_rows(cache: Meta, page_table: Meta | None) -> int:
    """Return the rows of a tile per TMA load; 0 if pages do not consist of whole boxes."""
    if page_table is None:
        return _SM90_KEYS
    rows = math.gcd(cache.shape[1], _SM90_KEYS)
    return rows if rows >= 8 else 0


def split_count_sm90(row_tiles: int, rows: int, lkv: int, sm_count: int) -> int:
    """Return how many splits take the shortest time, from shapes alone, in rounds of two tiles of a block.

    A block takes about a round more than its keys do, and each split of 128 rows 0.06 rounds for its parts.
    """
    rounds = -(-lkv // (2 * _SM90_KEYS))

    def time(splits: int) -> float:
        waves, merging = -(-row_tiles * splits // sm_count), 0.06 * splits * rows / 128 if splits > 1 else 0.0
        return waves * (-(-rounds // splits) + 1) + merging

    return min(range(1, max(min(rounds, MAX_SPLITS), 1) + 1), key=time)


def _check(q: Meta, kv_cache: Meta, lengths: Meta, page_table: Meta | None, value_width: int, scale: float) -> None:
    cache = kv_cache
    if q.dim() != 4:
        raise ArgumentError(f"q has shape {tuple(q.shape)}; expected [batch, tokens, heads, width]")
    if cache.dim() != 3:
        raise ArgumentError(f"kv_cache has shape {tuple(cache.shape)}; expected [pages or batch, rows, width]")
    check_same("kv_cache", cache.dtype, q.dtype, "dtype", of="q")
    check_same("kv_cache", cache.shape[-1], q.shape[-1], "width", of="q")
    check_width("q", q, _WIDTH)
    if not 8 <= value_width <= min(_VALUE, q.shape[-1]) or value_width % 8:
        raise ArgumentError(f"value_width is {value_width}; expected a multiple of 8 to {min(_VALUE, q.shape[-1])}")
    check_cache_rows(q, cache, lengths, page_table, "kv_cache")
    check_factor(scale)
    if q.shape[0] > 65535 or q.shape[1] * q.shape[2] >= 2**31:
        raise ArgumentError(f"q has shape {tuple(q.shape)}; expected up to 65535 sequences and 2^31 rows")


def _outputs(q: Meta, value_width: int):
    out = Memory((*q.shape[:-1], value_width), q.dtype)
    return out, Memory((q.shape[0], q.shape[2], q.shape[1]), torch.float32)


def _step(meta: Meta, dim: int) -> int:
    return 0 if meta.shape[dim] <= 1 else meta.stride[dim]


def _plan(
    q: Meta, kv_cache: Meta, page_table: Meta | None, value_width: int, causal: bool, scale: float, device: int
) -> Steps:
    cache = kv_cache
    (batch, lq, heads, width), token, info = q.shape, DTYPE_TOKEN[q.dtype], device_info(device)
    pages = 1 if page_table is None else page_table.shape[1]
    lkv, page_size = pages * cache.shape[1], max(cache.shape[1], 1)
    box_rows = _box_rows(cache, page_table) if "wgmma" in info.target.features and lkv else 0
    row_tiles, rows = -(-lq * heads // (SM90_ROWS if box_rows else _ROWS)), batch * lq * heads
    # Registers are for one block an SM.
    if level():
        splits = 1
        if not box_rows and "wgmma" in info.target.features and lkv:
            refuse("mla_decode", "pages are no multiples of 8 rows, and a cache in one piece is added in another order")
    elif box_rows:
        splits = split_count_sm90(row_tiles * batch, rows, lkv, info.sm_count)
    else:
        splits = split_count(row_tiles * batch, lkv, info.sm_count)
    scratch = part_memory(splits, rows, value_width)
    parts = ("parts", "part_lse") if scratch else (0, 0)
    table_row, right = 0 if page_table is None else page_table.shape[1], 0 if causal else -1
    of_q = tuple(_step(q, i) for i in range(3))
    if box_rows:
        sizes = (width, cache.shape[1], cache.shape[0])
        boxes = Boxes(
            "kv_cache", token, sizes, box_strides(sizes, (cache.stride[1], cache.stride[0]), 2), (64, box_rows, 1)
        )
        kernel = Step(
            KERNEL_SM90.bind((token,), device, (row_tiles, splits, batch), 384, SM90_SHARED),
            *(boxes, "q", "lengths", "page_table", "out", "lse", *parts, heads, lq, lkv, width, value_width, splits),
            *(page_size, box_rows, table_row, *of_q, right, scale),
        )
    else:
        kernel = Step(
            KERNEL.bind((token,), device, (row_tiles, splits, batch), _THREADS, _SHARED),
            *("q", "kv_cache", "lengths", "page_table", "out", "lse"),
            *(*parts, heads, lq, lkv, width, value_width, splits, page_size, divisor(page_size), table_row, *of_q),
            *(_step(cache, 0), _step(cache, 1), right, scale),
        )
    sizes, out = (batch, lq, heads, value_width), dense_strides(lq, heads, value_width)
    merge = [combine(token, 0, sizes, splits, out, device)] if scratch else []
    return Steps(kernel, *merge, scratch=scratch)


def _reference(q, kv_cache, lengths, page_table, value_width, causal, scale):
    k = gathered(kv_cache.unsqueeze(2), lengths, page_table, None, torch.float32)
    v, right = k[..., :value_width], 0 if causal else -1
    out, lse = reference.forward(q.float(), k, v, None, None, lengths, None, None, None, scale, -1, right, 0.0)
    return out.to(q.dtype), lse


FORWARD = Operator(
    "mla_decode_fwd",
    (
        Heads("q", HALVES), Heads("kv_cache", HALVES), Dense("lengths", None),
        Dense("page_table", None, optional=True),
    ),
    options="int value_width, bool causal, float scale",
    results="out lse",
    outputs=_outputs,
    plan=_plan,
    reference=_reference,
    check=_check,
)  # fmt: skip


@public(no_gradients="q kv_cache")
def mla_decode(
    q: Tensor, kv_cache: Tensor, seqlens: Tensor, *, page_table: Tensor | None = None, value_width: int = 512,
    scale: float | None = None, causal: bool = True, return_lse: bool = False,
    out: Tensor | tuple[Tensor | None, ...] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return the attention of new tokens over a cache of latents, which are the keys and values of all heads.

    The absorbed form of multi-head latent attention: q is already multiplied by the expansion matrix of keys, and the
    caller multiplies the result by that of values. As in ``attention_decode``, lengths and pages are read on the
    device, one captured graph works for all of them, and splits depend on shapes only and are merged in a fixed order.
    Not differentiable.

    Args:
        q: bfloat16 or float16 [batch, heads, width] for one token per sequence, or [batch, tokens, heads, width]; width
            up to 576, a multiple of 8 (in DeepSeek's models 512 for the latent and 64 for the rotated part).
        kv_cache: [pages, page size, width] with a page_table, else [batch, length, width], in q's dtype; a dimension of
            one head before the last is accepted.
        seqlens: int32 [batch]: number of keys of each sequence, including new tokens. ``RTKERNELS_DEBUG=1`` checks them
            against the cache, and waits for the device.
        page_table: int32 [batch, pages]; entries after the last page that `seqlens` needs are not read.
        value_width: The first so many elements of a latent are the value; up to 512.
        scale: Factor of the scores. Default: ``1 / sqrt(width)``. Models usually need the scale of the expanded heads
            instead, ``1 / sqrt(192)`` for DeepSeek.
        causal: Causal mask aligned to the last token, which attends to all keys.
        return_lse: Also return the log-sum-exp (lse) of the scores.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        [batch, tokens, heads, value_width] ([batch, heads, value_width] if q has no tokens); with return_lse a pair of
        it and lse, float32 [batch, heads, tokens] ([batch, heads]).
    """
    single = q.dim() == 3
    if kv_cache.dim() == 4 and kv_cache.shape[2] == 1:
        kv_cache = kv_cache.squeeze(2)
    check_lengths("seqlens", seqlens, kv_cache, page_table, "keys of the cache")
    given = (
        q.unsqueeze(1) if single else q, kv_cache, seqlens, page_table, check_integer("value_width", value_width),
        bool(causal), default_scale(scale, q),
    )  # fmt: skip
    out, lse = FORWARD.call(*given)
    if single:
        out, lse = out.squeeze(1), lse.squeeze(2)
    return (out, lse) if return_lse else out


OP = Op("mla_decode", public=("mla_decode",), kernels=(KERNEL, KERNEL_SM90, COMBINE), torch_ops=(FORWARD,))
