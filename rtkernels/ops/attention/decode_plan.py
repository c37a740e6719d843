"""Decoding over a cache: kernel records, how many splits, launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import decode_cluster_plan
from rtkernels.ops.attention.mma_plan import tile_pitch
from rtkernels.ops.attention.problem import Attention
from rtkernels.runtime.invariance import level
from rtkernels.runtime.launch.device import DeviceInfo, device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import divisor
from rtkernels.runtime.operator.plan import Memory, Step, Steps

_TOKENS = ("bf16", "fp16")
CODES = {torch.float8_e4m3fn: 1, torch.int8: 2}  # attention/codes.cuh; 0: the type of q
_WIDTHS = (64, 128, 256)
# As in decode.cu.
_ROWS = 16  # of queries of a block
_CHUNK = 16  # keys of a stage
_STAGES = 3
MAX_SPLITS = 128
_MIN_KEYS = 128  # of a split: below, merging costs more than it saves

DECODE = Kernel(
    "attention/decode.cu", "attention_decode", template="T CODES D", max_registers=255, struct=True, tier="serve",
    args="q:ptr k_cache:ptr v_cache:ptr lengths:ptr table:ptr k_scale:ptr v_scale:ptr sinks:ptr out:ptr lse:ptr "
    "parts:ptr part_lse:ptr heads:i64 group:i64 lq:i64 lkv:i64 d_qk:i64 d_v:i64 splits:i64 "
    "page_size:i64 page_divisor:i64 table_row:i64 q_batch:i64 q_row:i64 q_head:i64 k_page:i64 k_row:i64 k_head:i64 "
    "v_page:i64 v_row:i64 v_head:i64 out_batch:i64 out_row:i64 out_head:i64 k_scale_head:i64 v_scale_head:i64 "
    "left:i64 right:i64 scale:f64 softcap:f64",
    variants=[(t, codes, d) for t in _TOKENS for codes in (0, 1, 2) for d in _WIDTHS],
)  # fmt: skip
COMBINE = Kernel(
    "attention/decode_combine.cu", "attention_combine", template="T", max_registers=80, tier="serve",
    args="parts:ptr part_lse:ptr sinks:ptr out:ptr lse:ptr rows:i64 splits:i64 lq:i64 heads:i64 d_v:i64 out_batch:i64 "
    "out_row:i64 out_head:i64",
    variants=[(t,) for t in _TOKENS],
)  # fmt: skip


class Decode(NamedTuple):
    """One call, as plain data. Strides are in elements, of (page or sequence, row, head); page_size: 0 for a contiguous
    cache."""

    token: str
    codes: int
    batch: int
    lq: int
    heads_q: int
    heads_kv: int
    d_qk: int
    d_v: int
    lkv: int  # keys that a sequence can have
    page_size: int
    table_row: int
    q: tuple[int, int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    k_scale_head: int
    v_scale_head: int
    left: int
    right: int
    scale: float
    softcap: float
    out: tuple[int, int, int] | None = None  # None: dense


def split_count(blocks: int, lkv: int, slots: int) -> int:
    """Return the number of splits of the keys. It depends on shapes only, not on lengths on the device.

    Args:
        blocks: Without splits.
        lkv: Keys that a sequence can have.
        slots: Blocks that run at the same time.
    """
    largest = max(min(MAX_SPLITS, lkv // _MIN_KEYS), 1)
    if blocks >= 2 * slots:
        return 1
    efficiency = []
    for splits in range(1, largest + 1):
        waves = blocks * splits / slots
        efficiency.append(waves / -(-blocks * splits // slots))
    best = max(efficiency)
    return next(i + 1 for i, value in enumerate(efficiency) if value >= 0.95 * best)


class Arrangement(NamedTuple):
    """The distribution of a call over blocks: warps and shared memory of a block, and splits of the keys."""

    warps: int
    shared: int
    splits: int


def _shared_bytes(warps: int, width: int, codes: int) -> int:
    ring = warps * _STAGES * 2 * _CHUNK * tile_pitch(width // 2 if codes else width)
    ring += 32 * width if width > (64 if codes else 128) else 0  # fragments of q
    return max(ring, warps * _ROWS * (4 * (width + 8) + 8))


def arrangement(blocks: int, lkv: int, width: int, codes: int, info: DeviceInfo) -> Arrangement:
    """Return the numbers of warps and splits, from shapes alone (docs/decisions/attention.md has the times).

    Args:
        blocks: Without splits.
        lkv: Keys that a sequence can have.
        width: Of heads, as the kernel has them.
        codes: 0 for a cache of q's type.
        info: Of the device.
    """
    if not codes and not level() and width == 128 and (shared := _shared_bytes(8, width, 0)) <= info.shared_per_block:
        # One block per SM while that is enough. No splits once half of the SMs have a block: half read as fast as all.
        if blocks <= info.sm_count:
            return Arrangement(
                8, shared, 1 if blocks >= 0.45 * info.sm_count else split_count(blocks, lkv, info.sm_count)
            )
        return Arrangement(4, shared // 2, 1)
    warps = 4
    while (shared := _shared_bytes(warps, width, codes)) > info.shared_per_block or warps * width * (
        1 if codes else 2
    ) > 1024:
        warps //= 2
    resident = max(min(info.shared_per_block // shared, 4 if codes == 1 else 3 if codes or width == 64 else 2), 1)
    return Arrangement(warps, shared, 1 if level() else split_count(blocks, lkv, info.sm_count * resident))


def part_memory(splits: int, rows: int, width: int) -> dict[str, Memory]:
    """Return the memory for outputs and lse of splits; none without splits."""
    if splits == 1:
        return {}
    return {
        "parts": Memory((splits, rows, width), torch.float32),
        "part_lse": Memory((splits, rows), torch.float32),
    }


def dense_strides(lq: int, heads: int, width: int) -> tuple[int, int, int]:
    """Return the strides of a dense result [batch, lq, heads, width], of sequences, rows and heads."""
    return lq * heads * width, heads * width, width


def combine(
    token: str, sinks: str | int, sizes: tuple[int, int, int, int], splits: int, out: tuple[int, int, int], device: int
) -> Step:
    """Return the launch that merges splits into a result of these sizes [batch, lq, heads, width], and lse."""
    batch, lq, heads, width = sizes
    rows = batch * lq * heads
    return Step(
        COMBINE.bind((token,), device, rows, 128, overlap=True),
        *("parts", "part_lse", sinks, "out", "lse", rows, splits, lq, heads, width, *out),
    )


TENSORS = ("q", "k_cache", "v_cache", "lengths", "page_table", "k_scale", "v_scale", "sinks")


def steps(call: Decode, device: int, tensors: Sequence[str | int] = TENSORS) -> Steps:
    """Return the launches of a call whose tensors have these names."""
    alone = None if level() else decode_cluster_plan.steps(call, device, tensors)
    if alone is not None:
        return alone
    width = next((d for d in _WIDTHS if max(call.d_qk, call.d_v) <= d), None)
    if width is None:
        raise ArgumentError(
            f"q and v have heads of {call.d_qk} and {call.d_v} elements; expected at most {_WIDTHS[-1]}"
        )
    group = call.heads_q // call.heads_kv
    row_tiles = -(-call.lq * group // _ROWS)
    blocks = row_tiles * call.heads_kv * call.batch
    warps, shared, splits = arrangement(blocks, call.lkv, width, call.codes, device_info(device))
    page_size = call.page_size or max(call.lkv, 1)  # a sequence of a contiguous cache is one page
    out = call.out or dense_strides(call.lq, call.heads_q, call.d_v)
    scratch = part_memory(splits, call.batch * call.lq * call.heads_q, call.d_v)
    kernel = Step(
        DECODE.bind(
            (call.token, call.codes, width),
            device,
            (row_tiles * splits, call.heads_kv, call.batch),
            32 * warps,
            shared,
            overlap=True,
        ),
        *(*tensors, "out", "lse"),
        *(("parts", "part_lse") if scratch else (0, 0)),
        *(call.heads_q, group, call.lq, call.lkv, call.d_qk, call.d_v, splits),
        *(page_size, divisor(page_size), call.table_row),
        *(*call.q, *call.k, *call.v, *out, call.k_scale_head, call.v_scale_head),
        *(call.left, call.right, call.scale, call.softcap),
    )
    sizes = (call.batch, call.lq, call.heads_q, call.d_v)
    merge = [combine(call.token, tensors[-1], sizes, splits, out, device)] if scratch else []
    return Steps(kernel, *merge, scratch=scratch)


def unsupported(problem: Attention, info: DeviceInfo) -> str | None:
    """Return why the keys cannot be split over blocks, or why that is not the fastest way; otherwise None.

    The rows of a block are the queries of all heads that share keys, 16 at a time; a tile of the other kernels has 64
    to 192 queries of one head. So up to 16 queries and 64 rows are quicker this way, and up to 64 queries where the
    other kernels would leave half of the SMs idle (docs/decisions/attention.md has the times).
    """
    p = problem
    if p.backward:
        return "no backward pass"
    if p.varlen or p.bias is not None or p.kv_limit is not None or p.softcap < 0.0:
        return "no packed sequences, bias, kv_limit or cut-off"
    if 0 in (p.lq, p.lkv, p.batch):
        return "there are no queries or no keys"
    if max(p.batch, p.heads_kv) > 65535:
        return "more than 65535 sequences or heads"
    if max(p.d_qk, p.d_v) > _WIDTHS[-1] or p.d_qk % 8 or p.d_v % 8:
        return f"heads are wider than {_WIDTHS[-1]} or not a multiple of 8"
    if not all(strides.aligned for strides in (p.q, p.k, p.v)):
        return "q, k or v is not aligned to 16 bytes"
    if p.lq * p.group > 4 * _ROWS:
        return f"{p.lq * p.group} queries share keys; {4 * _ROWS} at the most"
    if p.lq > _ROWS and (2 * p.batch * p.heads_q > info.sm_count or p.lkv < 1024):
        return f"{p.lq} queries; more than {_ROWS} only where heads are few and keys 1024 or more"
    return None


def steps_short(problem: Attention, device: int) -> Steps:
    """Return the launches of an attention that is not ``unsupported``."""
    p = problem
    call = Decode(
        token=p.token, codes=0, batch=p.batch, lq=p.lq, heads_q=p.heads_q, heads_kv=p.heads_kv, d_qk=p.d_qk, d_v=p.d_v,
        lkv=p.lkv, page_size=0, table_row=0, q=p.q[:3], k=p.k[:3], v=p.v[:3], k_scale_head=0, v_scale_head=0,
        left=p.left, right=p.right, scale=p.scale, softcap=p.softcap, out=p.out[:3],
    )  # fmt: skip
    return steps(call, device, ("q", "k", "v", "lengths" if p.lengths else 0, 0, 0, 0, "sinks" if p.sinks else 0))
