"""Gradients of attention with wgmma and TMA (sm_90a): kernels and launches."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rtkernels.ops.attention.problem import Attention, dense, key_gradients
from rtkernels.ops.attention.sm90_backward_order import backward_order, parts_of_heads
from rtkernels.ops.attention.sm90_forward_plan import extras, heads_in_l2, rows_map
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Memory, Step, Steps

BACKWARD = Kernel(
    "attention/attention_sm90_bwd.cu", "attention_sm90_bwd", template="T G D EXTRAS", max_registers=168,
    needs=("wgmma",),
    args="q_map:tmap k_map:tmap v_map:tmap dout_map:tmap lse:ptr delta:ptr dq_sums:ptr dk:ptr dv:ptr lengths:ptr "
    "kv_limit:ptr cu_q:ptr "
    "cu_k:ptr counter:ptr order:ptr batches:i64 heads:i64 heads_per_kv:i64 lq:i64 lkv:i64 padded_rows:i64 d_qk:i64 "
    "d_v:i64 dk_batch:i64 dk_row:i64 dk_head:i64 dv_batch:i64 dv_row:i64 dv_head:i64 left:i64 right:i64 "
    "heads_together:i64 together:i64 ascending:i64 resident:i64 parts:i64 limit_batch:i64 scale:f64 softcap:f64",
    variants=[
        (t, g, d, extra)
        for t in ("bf16", "fp16")
        for g, d, extra in ((t, 64, 0), (t, 128, 0), (t, 128, 1), ("fp32", 64, 0), ("fp32", 128, 0))
    ],
)  # fmt: skip


class PassTile(NamedTuple):
    """A tile of the backward of heads of more than 128 elements, which computes each gradient in a separate pass.

    Padded widths of q and v; rows that 128 queries or keys meet in a step, and stages of those as wide as v.
    """

    d_qk: int
    d_v: int
    met: int
    stages_v: int

    def shared(self, which: int) -> int:
        """Bytes of shared memory: 128 rows, two stages of what they meet, statistics, barriers, alignment."""
        row_qk, row_v = 2 * self.d_qk, 2 * self.d_v
        own = 128 * (row_qk + (0 if which == 2 else row_v))
        return own + self.met * (2 * row_qk + self.stages_v * row_v) + 2 * self.met * 4 * (0, 2, 1)[which] + 256 + 1024


# Of dq and dk, and of dv, where the first ones that fit are taken.
_PASS_TILES = (PassTile(192, 128, 96, 2), PassTile(192, 192, 80, 2), PassTile(256, 256, 64, 1))
_DV_TILES = (PassTile(192, 128, 128, 2), PassTile(192, 192, 112, 2), PassTile(256, 256, 80, 2))
PASSES = Kernel(
    "attention/attention_sm90_bwd_pass.cu", "attention_sm90_bwd_pass", template="T DQK DV BN STAGES_V PASS EXTRAS",
    max_registers=168, needs=("wgmma",),
    args="own_qk_map:tmap own_v_map:tmap met_qk_map:tmap met_v_map:tmap lse:ptr delta:ptr gradient:ptr lengths:ptr "
    "kv_limit:ptr "
    "cu_q:ptr cu_k:ptr counter:ptr batches:i64 heads:i64 heads_per_kv:i64 lq:i64 lkv:i64 padded_rows:i64 columns:i64 "
    "gradient_batch:i64 gradient_row:i64 gradient_head:i64 left:i64 right:i64 heads_together:i64 parts:i64 "
    "limit_batch:i64 scale:f64 softcap:f64",
    variants=[
        (t, *tile, which, extra)
        for t in ("bf16", "fp16")
        for which, tiles in enumerate((_PASS_TILES, _PASS_TILES, _DV_TILES))
        for tile, extra in (*((tile, 0) for tile in tiles), (tiles[-1], 1))
    ],
)  # fmt: skip
STATS = Kernel(
    "attention/attention_sm90_bwd_rows.cu", "attention_bwd_stats", template="T", max_registers=80, needs=("wgmma",),
    args="out:ptr dout:ptr lse:ptr dlse:ptr cu_q:ptr lse_rows:ptr delta_rows:ptr heads:i64 lq:i64 "
    "padded_rows:i64 d_v:i64 out_batch:i64 out_row:i64 out_head:i64 dout_batch:i64 dout_row:i64 dout_head:i64 "
    "lse_batch:i64 lse_head:i64",
    variants=[("bf16",), ("fp16",)],
)  # fmt: skip
QUERIES = Kernel(
    "attention/attention_sm90_bwd_rows.cu", "attention_bwd_dq", template="T D", max_registers=80, needs=("wgmma",),
    args="dq_sums:ptr cu_q:ptr cu_k:ptr lengths:ptr dq:ptr heads:i64 lq:i64 lkv:i64 padded_rows:i64 d_qk:i64 "
    "dq_batch:i64 dq_row:i64 dq_head:i64 left:i64 right:i64 scale:f64",
    variants=[(t, d) for t in ("bf16", "fp16") for d in (64, 128)],
)  # fmt: skip
PARTS = Kernel(
    "attention/attention_sm90_bwd_rows.cu", "attention_bwd_parts", template="T", max_registers=40, needs=("wgmma",),
    args="from:ptr to:ptr parts:i64 rows:i64 length:i64 width:i64 batch_step:i64 row_step:i64 head_step:i64",
    variants=[("bf16",), ("fp16",)],
)  # fmt: skip
SINKS = Kernel(
    "attention/attention_sm90_bwd_rows.cu", "attention_bwd_sinks", template="T", max_registers=40, needs=("wgmma",),
    args="sinks:ptr lse_rows:ptr delta_rows:ptr cu_q:ptr dsinks:ptr batches:i64 lq:i64 padded_rows:i64",
    variants=[("fp32",)],
)  # fmt: skip
KERNELS = (BACKWARD, PASSES, STATS, QUERIES, PARTS, SINKS)

# As in sm90_bwd.cuh.
_ROW_PAD = 128  # statistics of a sequence begin at a multiple of it
_BACKWARD_KEYS = 128  # of a tile


def _backward_shared(width: int) -> int:
    """Return bytes of shared memory: keys, values, two stages of q, dout, ds and statistics, sums of dq, barriers."""
    row, queries = 128 * width // 64, 128 if width == 64 else 64
    stages = 2 * (2 * queries * row + 128 * queries * 2 + 2 * 4 * queries)
    aligned = 512  # memory begins at a multiple of it
    return 2 * _BACKWARD_KEYS * row + stages + 2 * 4 * queries * width + 208 + 4 * 48 + 16 + aligned


def _padded_rows(problem: Attention) -> int:
    """Return how many rows of statistics a head has (``sm90_bwd.cuh``)."""
    p = problem
    if p.varlen:
        return -(-(p.total_q + _ROW_PAD * p.batch) // _ROW_PAD) * _ROW_PAD
    return p.batch * (-(-p.lq // _ROW_PAD) * _ROW_PAD)


def _statistics(problem: Attention, device: int) -> tuple[Step, dict[str, Memory]]:
    """Return the launch that computes lse and delta in padded order, and their memory."""
    p, padded = problem, _padded_rows(problem)
    dout = p.dout or dense(p.lq, p.heads_q, p.d_v, p.varlen)
    step = Step(
        STATS.bind((p.token,), device, (max(1, -(-p.lq // 64)), p.batch * p.heads_q), 256),
        "out", "dout", "lse", "dlse", "cu_q", "lse_rows", "delta_rows", p.heads_q, p.lq, padded, p.d_v,
        *p.out[:3], *dout[:3], *p.lse_strides(),
    )  # fmt: skip
    # The last tile of queries may reach behind the last row by less than another _ROW_PAD rows, which are masked.
    rows = Memory((p.heads_q * padded + _ROW_PAD,), torch.float32)
    return step, {"lse_rows": rows, "delta_rows": rows}


def _sinks(problem: Attention, device: int) -> list[Step]:
    """Return the launch that computes the gradient of sinks, if needed."""
    p = problem
    if "s" not in p.wants or p.sinks is None:
        return []
    launch = SINKS.bind((p.sinks,), device, p.heads_q, 256)
    return [Step(launch, "sinks", "lse_rows", "delta_rows", "cu_q", "dsinks", p.batch, p.lq, _padded_rows(p))]


def _parts(problem: Attention, letters: str, parts: int, device: int) -> tuple[list[Step], dict[str, Memory]]:
    """Return the launches that add parts of dk and dv, and the memory of the parts, [heads, rows, width]."""
    p, steps, scratch = problem, [], {}
    for letter in letters:
        width, strides = (p.d_qk, p.dk) if letter == "k" else (p.d_v, p.dv)
        to = dense(p.lkv, p.heads_kv, width, p.varlen) if strides is None else strides
        scratch[f"parts_d{letter}"] = Memory((p.heads_kv * parts, p.rows_k, width), torch.float32)
        if letter in p.wants:
            grid = (-(-p.rows_k * (width // 8) // 256), p.heads_kv)
            sizes = (parts, p.rows_k, max(1, p.rows_k if p.varlen else p.lkv), width, *to[:3])
            steps.append(Step(PARTS.bind((p.token,), device, grid, 256), f"parts_d{letter}", f"d{letter}", *sizes))
    return steps, scratch


def _part_strides(problem: Attention, width: int) -> tuple[int, int, int]:
    """Return the elements from one sequence, row and head of parts to the next."""
    p = problem
    return 0 if p.varlen else p.lkv * width, width, p.rows_k * width


def _steps_passes(problem: Attention, device: int) -> Steps:
    """Return the launches for heads of more than 128 elements: a pass for each gradient that is needed."""
    p = problem
    stats, scratch = _statistics(p, device)
    dout = p.dout or dense(p.lq, p.heads_q, p.d_v, p.varlen)
    queries = (("q", p.heads_q, p.d_qk, p.q), ("dout", p.heads_q, p.d_v, dout))
    keys = (("k", p.heads_kv, p.d_qk, p.k), ("v", p.heads_kv, p.d_v, p.v))
    extra = p.softcap != 0 or p.kv_limit is not None
    alike = p.right < 0 and p.left < 0 and not p.varlen
    parts = parts_of_heads(p, device_info(device).sm_count, tile_queries=64)
    steps, adds, counters = [stats], [], {}
    for which, letter in enumerate("qkv"):
        if letter not in p.wants:
            continue
        tiles = _DV_TILES if letter == "v" else _PASS_TILES
        tile = tiles[-1] if extra else next(t for t in tiles if t.d_qk >= p.d_qk and t.d_v >= p.d_v)
        own, met = (queries, keys) if letter == "q" else (keys, queries)
        rows, heads, width = (p.lq if letter == "q" else p.lkv), own[0][1], own[letter == "v"][2]
        gradient, to, split = getattr(p, f"d{letter}") or dense(rows, heads, width, p.varlen), f"d{letter}", 1
        if letter != "q" and parts > 1:
            gradient, to, split = _part_strides(p, width), f"parts_d{letter}", parts
            added, memory = _parts(p, letter, parts, device)
            adds, scratch = [*adds, *added], scratch | memory
        units = heads * split
        met_bytes = 2 * (p.lkv / p.group if letter == "q" else p.lq * p.group / split) * (p.d_qk + p.d_v)
        blocks = min(device_info(device).sm_count, p.batch * units * -(-rows // 128))
        launch = PASSES.bind((p.token, *tile, which, int(extra)), device, blocks, 384, tile.shared(which))
        maps = (
            rows_map(p, name, n, d, box, strides)
            for box, pair in ((128, own), (tile.met, met))
            for name, n, d, strides in pair
        )
        counters[f"counter_{letter}"] = 1
        steps.append(
            Step(
                launch, *maps, "lse_rows", "delta_rows", to, "lengths", "kv_limit", "cu_q", "cu_k",
                f"counter_{letter}", p.batch, p.heads_q, p.group // split, p.lq, p.lkv, _padded_rows(p), width,
                *gradient[:3], p.left, p.right, heads_in_l2(p.batch * units, met_bytes, alike), split, p.kv_limit or 0,
                float(p.scale), float(p.softcap),
            )
        )  # fmt: skip
    return Steps(*steps, *adds, *_sinks(p, device), scratch=scratch, zeros=counters)


def steps_backward(problem: Attention, device: int, in_chunks: bool = True) -> Steps:
    """Return the launches: dq, dk, dv (and dsinks) of a problem that is not ``unsupported``.

    Blocks of a chunk wait for each other; without chunks they wait for blocks that have begun before only.
    """
    p = problem
    if 0 in (p.batch, p.heads_q, p.heads_kv, p.lkv):
        return Steps()
    if max(p.d_qk, p.d_v) > 128:
        return _steps_passes(p, device)
    width = 64 if max(p.d_qk, p.d_v) <= 64 and not extras(p) else 128
    queries = 128 if width == 64 else 64
    sm_count = device_info(device).sm_count
    dq, dk, dv = (
        given or dense(rows, heads, d, p.varlen)
        for given, rows, heads, d in (
            (p.dq, p.lq, p.heads_q, p.d_qk), (p.dk, p.lkv, p.heads_kv, p.d_qk), (p.dv, p.lkv, p.heads_kv, p.d_v),
        )
    )  # fmt: skip
    dout = p.dout or dense(p.lq, p.heads_q, p.d_v, p.varlen)
    padded = _padded_rows(p)
    order = backward_order(p, sm_count, queries, in_chunks)
    blocks = min(sm_count, p.batch * p.heads_kv * order.parts * -(-p.lkv // _BACKWARD_KEYS))
    stats, scratch = _statistics(p, device)
    if order.parts > 1:
        key_grads, (added, more) = ("parts_dk", "parts_dv"), _parts(p, "kv", order.parts, device)
        dk, dv = _part_strides(p, p.d_qk), _part_strides(p, p.d_v)
    else:
        added, (key_grads, more) = [], key_gradients(p)  # the kernel has no register left for a choice
    products = Step(
        BACKWARD.bind(
            (p.token, p.token if order.parts == 1 else "fp32", width, int(extras(p))), device, blocks, 384,
            _backward_shared(width), resident=order.resident,
        ),
        rows_map(p, "q", p.heads_q, p.d_qk, queries, p.q),
        rows_map(p, "k", p.heads_kv, p.d_qk, _BACKWARD_KEYS, p.k),
        rows_map(p, "v", p.heads_kv, p.d_v, _BACKWARD_KEYS, p.v),
        rows_map(p, "dout", p.heads_q, p.d_v, queries, dout),
        "lse_rows", "delta_rows", "dq_sums", *key_grads, "lengths", "kv_limit", "cu_q", "cu_k", "counter", "order",
        p.batch, p.heads_q, p.group // order.parts, p.lq, p.lkv, padded, p.d_qk, p.d_v, *dk[:3], *dv[:3], p.left,
        p.right, order.heads, order.together, int(order.ascending), int(order.resident), order.parts,
        p.kv_limit or 0, float(p.scale), float(p.softcap),
    )  # fmt: skip
    steps = [stats, products, *added]
    if p.lq and "q" in p.wants:
        launch = QUERIES.bind((p.token, width), device, (-(-p.lq // queries), p.batch * p.heads_q), 256)
        sizes = (p.heads_q, p.lq, p.lkv, padded, p.d_qk, *dq[:3], p.left, p.right, float(p.scale))
        steps.append(Step(launch, "dq_sums", "cu_q", "cu_k", "lengths", "dq", *sizes))
    steps += _sinks(p, device)
    scratch |= more | {"dq_sums": Memory((p.heads_q, padded, width), torch.float32)}
    return Steps(
        *steps, scratch=scratch, zeros={"counter": 1, "order": p.heads_q * padded // queries},
        if_not_resident=(lambda: steps_backward(p, device, False)) if order.resident else None,
    )  # fmt: skip
