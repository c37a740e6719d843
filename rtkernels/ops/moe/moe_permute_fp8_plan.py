"""The kernels of moe_permute_fp8, and which ones run how for which tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.moe.moe_permute_plan import PROB_KIND, check_permute
from rtkernels.ops.quant.quantize_fp8_plan import empty_scale, tile_threads
from rtkernels.ops.shared import fp8_layout
from rtkernels.ops.shared.fp8_layout import MAX_EXPERTS, Fp8Layout, groups_of, row_blocks_of
from rtkernels.ops.shared.tile_stream import supported
from rtkernels.runtime.checks import token
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, divisor, vector_bytes
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.targets import Target

_BAND_BYTES = 4 << 20  # of x that are read together, again and again, and should stay in L2
_BAND_TILES = 2  # or as many tiles, if that is more
_ROW_THREADS = 256
_ROW_COLUMNS = 2048  # of a token that a warp has at a time
_SCALE_THREADS = 256
_STRETCH_THREADS = 768
_STRETCH_MEMORY = 4 * 128 * 256 + 2 * 128 * 320  # shared, besides a table
_STRETCH_EXPERTS = 1024  # a table for more would not fit


def _blocks_per_sm(target: Target) -> int:
    return 4 if (8, 9) <= target.capability < (12, 0) else 2  # elsewhere the registers for more are just too few


TILES = Kernel(  # other types are permuted first and then quantised
    "moe/permute_fp8.cu", "moe_permute_fp8", template="T F8 BLOCKS", max_registers=128,
    args="x:ptr slots:ptr offsets:ptr probs:ptr experts:ptr q:ptr scale:ptr q_t:ptr scale_t:ptr probs_out:ptr "
    "choices:i64 top_k:i64 divisor:i64 rows:i64 cols:i64 x_stride:i64 expert_count:i64 row_blocks:i64 "
    "column_tiles:i64 band:i64 prob_kind:i64 prob_columns:i64 pow2:i64",
    variants=lambda target: [("bf16", f, _blocks_per_sm(target)) for f in ("e4m3", "e5m2")],
)  # fmt: skip
ROWS = Kernel(
    "moe/permute_fp8_rows.cu", "moe_permute_fp8_rows", template="F8 THREADS", max_registers=96,
    args="x:ptr rows:ptr slots:ptr offsets:ptr q:ptr token_scale:ptr tokens:i64 top_k:i64 row_count:i64 cols:i64 "
    "x_stride:i64 expert_count:i64 parts:i64 pow2:i64",
    variants=[(f, _ROW_THREADS) for f in ("e4m3", "e5m2")],
)  # fmt: skip
SCALES = Kernel(
    "moe/permute_fp8_rows.cu", "moe_permute_fp8_scales", template="THREADS", max_registers=40,
    args="token_scale:ptr slots:ptr offsets:ptr probs:ptr experts:ptr scale:ptr probs_out:ptr choices:i64 top_k:i64 "
    "divisor:i64 row_count:i64 groups:i64 expert_count:i64 prob_kind:i64 prob_columns:i64 empty:f64",
    variants=[(_SCALE_THREADS,)],
)  # fmt: skip
STRETCHES = Kernel(
    "moe/permute_fp8_stretches.cu", "moe_permute_fp8_stretches", template="F8", max_registers=80, needs=("tma",),
    args="x:ptr slots:ptr offsets:ptr probs:ptr experts:ptr q:ptr scale:ptr q_t:ptr scale_t:ptr probs_out:ptr "
    "choices:i64 top_k:i64 divisor:i64 rows:i64 cols:i64 x_stride:i64 expert_count:i64 row_blocks:i64 "
    "column_tiles:i64 prob_kind:i64 prob_columns:i64 pow2:i64",
    variants=lambda target: [("e4m3",), ("e5m2",)] if supported(target) else [],
)  # fmt: skip
KERNELS = (TILES, ROWS, SCALES, STRETCHES)


def check(
    x: Meta, rows: Meta, slots: Meta, offsets: Meta, probs: Meta | None, experts: Meta | None, output: str,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Raise an ArgumentError for arguments that do not fit together."""
    token("x", x[0])
    token("the result", dtype, fp8_layout.FP8_DTYPES)
    fp8_layout.check_option("layout", output, fp8_layout.LAYOUTS)
    check_permute(x, rows, slots, None, probs, experts)
    if offsets[0] != torch.int32 or len(offsets[1]) != 1 or not 2 <= offsets[1][0] <= MAX_EXPERTS + 1:
        raise ArgumentError(
            f"index.offsets has dtype {str(offsets[0]).removeprefix('torch.')} and shape {tuple(offsets[1])}; expected "
            f"int32 and one entry more than there are experts, at most {MAX_EXPERTS}"
        )


def outputs(x, slots, offsets, probs, output, dtype):
    shape = slots.shape[0], x.shape[1]
    codes = Fp8Layout(shape, output, "column", offsets.shape[0] - 1, dtype).outputs()
    return *codes, None if probs is None else Memory(slots.shape, probs.dtype)


def plan(
    in_two: Callable[..., Any], x: Meta, rows: Meta, slots: Meta, offsets: Meta, probs: Meta | None, output: str,
    dtype: torch.dtype, pow2_scale: bool, device: int,
) -> Steps:  # fmt: skip
    """Return the launches, or that `in_two` permutes and then quantises."""
    (tokens, cols), size, stride = x.shape, x.dtype.itemsize, x.row_stride
    # Places in x are 32-bit numbers of 16 bytes.
    far = slots.shape[0] * cols * tokens * rows.shape[1] == 0 or tokens * stride * size >= 2**36
    if x.dtype != torch.bfloat16 or far or vector_bytes(x.misaligned, cols * size, stride * size) != 16:
        return Steps(instead=in_two)
    make = _row_steps if output == "row" and cols % 16 == 0 else _tile_steps
    return make(x, rows, slots, offsets, probs, stride, DTYPE_TOKEN[dtype], int(pow2_scale), device)


_INDEX, _CODES = ("slots", "offsets", "probs", "experts"), ("q", "scale", "q_t", "scale_t", "probs_out")


def _tile_steps(
    x: Meta, rows: Meta, slots: Meta, offsets: Meta, probs: Meta | None, stride: int, f: str, pow2: int, device: int
) -> Steps:
    """Return the launch of one kernel that computes all requested results."""
    (tokens, cols), count, top_k, experts = x.shape, slots.shape[0], rows.shape[1], offsets.shape[0] - 1
    tiles, blocks, info = groups_of(cols), row_blocks_of(count, experts), device_info(device)
    sizes = tokens * top_k, top_k, divisor(top_k), count, cols, stride, experts, blocks, tiles
    if cols % 16 == 0 and experts < _STRETCH_EXPERTS and supported(info.target):
        shared = _STRETCH_MEMORY + 12 * (experts + 1)
        launch = STRETCHES.bind((f,), device, min(blocks * tiles, info.sm_count), _STRETCH_THREADS, shared=shared)
    else:
        resident = _blocks_per_sm(info.target)
        grid = min(blocks * tiles, resident * info.sm_count)
        launch = TILES.bind(("bf16", f, resident), device, grid, tile_threads("bf16"), shared=8 * (experts + 1))
        sizes += (min(tiles, max(_BAND_TILES, _BAND_BYTES // (tokens * 128 * x.dtype.itemsize))),)
    return Steps(Step(launch, "x", *_INDEX, *_CODES, *sizes, *_numbers(probs), pow2))


def _row_steps(
    x: Meta, rows: Meta, slots: Meta, offsets: Meta, probs: Meta | None, stride: int, f: str, pow2: int, device: int
) -> Steps:
    """Return the launches for codes by rows alone: computed once per token, then the scales are distributed."""
    (tokens, cols), count, top_k, experts = x.shape, slots.shape[0], rows.shape[1], offsets.shape[0] - 1
    parts, groups = -(-cols // _ROW_COLUMNS), groups_of(cols)
    tasks = tokens * parts + -(-count // 32)
    launch = ROWS.bind((f, _ROW_THREADS), device, -(-tasks * 32 // _ROW_THREADS), _ROW_THREADS)
    tensors = "x", "rows", "slots", "offsets", "q", "token_scale"
    codes = Step(launch, *tensors, tokens, top_k, count, cols, stride, experts, parts, pow2)
    grid, table = -(-count // _SCALE_THREADS), 8 * (experts + 1)
    launch = SCALES.bind((_SCALE_THREADS,), device, grid, _SCALE_THREADS, shared=table, overlap=True)
    sizes = tokens * top_k, top_k, divisor(top_k), count, groups, experts, *_numbers(probs), empty_scale(bool(pow2))
    scales = Step(launch, "token_scale", *_INDEX, "scale", "probs_out", *sizes)
    return Steps(codes, scales, scratch={"token_scale": Memory((tokens, groups), torch.float32)})


def _numbers(probs: Meta | None) -> tuple[int, int]:
    return (0, 0) if probs is None else (PROB_KIND[probs.dtype], probs.shape[1])
