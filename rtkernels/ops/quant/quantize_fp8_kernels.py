"""The kernels of ``quantize_fp8``, ``dequantize_fp8`` and ``quantize_fp8_experts``."""

from __future__ import annotations

from rtkernels.ops.shared.tile_stream import supported
from rtkernels.runtime.launch.kernel import Kernel

GROUP = 128
WIDTH = {"bf16": 8, "fp16": 8, "fp32": 4}  # elements in 16 bytes
_PAIRS = [(t, f) for t in WIDTH for f in ("e4m3", "e5m2")]
_WIDE_AND_NARROW = [(t, f, v) for t, f in _PAIRS for v in (1, WIDTH[t])]
_TILES = [(*pair, wide) for pair in _PAIRS for wide in (False, True)]

AMAX = Kernel(
    "quant/quantize_fp8.cu",
    "fp8_tensor_amax",
    template="T VEC",
    args="x:ptr partial:ptr rows:i64 cols:i64 x_stride:i64 threads_per_row:i64 runs_per_row:i64",
    variants=[(t, v) for t in WIDTH for v in (1, WIDTH[t])],
    max_registers=64,
)
SMALL = Kernel(
    "quant/quantize_fp8.cu",
    "quantize_fp8_tensor_small",
    template="T F8",
    args="x:ptr q:ptr scale:ptr vectors:i64 pow2:i64",
    variants=_PAIRS,
    max_registers=64,
)
TENSOR = Kernel(
    "quant/quantize_fp8.cu",
    "quantize_fp8_tensor",
    template="T F8 VEC",
    args="x:ptr scale:ptr partial:ptr q:ptr rows:i64 cols:i64 x_stride:i64 threads_per_row:i64 runs_per_row:i64 "
    "partials:i64 pow2:i64",
    variants=_WIDE_AND_NARROW,
    max_registers=56,
)
_ROW_ARGS = "x:ptr q:ptr scale:ptr rows:i64 cols:i64 x_stride:i64 threads_per_row:i64 pow2:i64"
ROW = Kernel(
    "quant/quantize_fp8.cu",
    "quantize_fp8_row",
    template="T F8 VEC",
    args=_ROW_ARGS,
    variants=[(t, f, WIDTH[t]) for t, f in _PAIRS],
    max_registers=48,
)
ROW_LONG = Kernel(
    "quant/quantize_fp8.cu",
    "quantize_fp8_row_long",
    template="T F8 VEC",
    args=_ROW_ARGS,
    variants=_WIDE_AND_NARROW,
    max_registers=48,
)
GROUPED = Kernel(
    "quant/quantize_fp8_tile.cu",
    "quantize_fp8_group",
    template="T F8 VEC ACROSS",
    args="x:ptr q:ptr scale:ptr rows:i64 cols:i64 x_stride:i64 scale_row:i64 scale_group:i64 column_tiles:i64 pow2:i64",
    variants=[(t, f, v, a) for t, f, v in _WIDE_AND_NARROW for a in ((1,) if v == 1 else (1, 32 // v))],
    max_registers=64,
)
BLOCK = Kernel(
    "quant/quantize_fp8_tile.cu",
    "quantize_fp8_block",
    template="T F8 VEC",
    args="x:ptr q:ptr scale:ptr rows:i64 cols:i64 x_stride:i64 column_tiles:i64 pow2:i64",
    variants=_WIDE_AND_NARROW,
    max_registers=64,
)
GROUPED_T = Kernel(
    "quant/quantize_fp8_transposed.cu",
    "quantize_fp8_group_t",
    template="T F8 WIDE",
    args="x:ptr q_t:ptr scale:ptr rows:i64 cols:i64 x_stride:i64 column_tiles:i64 pow2:i64",
    variants=_TILES,
    max_registers=80,
)
GROUP_BOTH = Kernel(
    "quant/quantize_fp8_transposed.cu",
    "quantize_fp8_group_both",
    template="T F8 WIDE",
    args="x:ptr q:ptr scale:ptr q_t:ptr scale_t:ptr rows:i64 cols:i64 x_stride:i64 scale_row:i64 scale_group:i64 "
    "pow2:i64",
    variants=_TILES,
    max_registers=112,
)
BLOCK_BOTH = Kernel(
    "quant/quantize_fp8_transposed.cu",
    "quantize_fp8_block_both",
    template="T F8 WIDE",
    args="x:ptr q:ptr scale:ptr q_t:ptr rows:i64 cols:i64 x_stride:i64 column_tiles:i64 pow2:i64",
    variants=_TILES,
    max_registers=72,
)
EXPERTS = Kernel(
    "quant/quantize_fp8_experts.cu",
    "quantize_fp8_experts",
    template="T F8 WIDE",
    args="x:ptr counts:ptr q:ptr scale:ptr q_t:ptr scale_t:ptr rows:i64 cols:i64 x_stride:i64 experts:i64 "
    "count_width:i64 row_blocks:i64 column_tiles:i64 pow2:i64",
    variants=_TILES,
    max_registers=128,
)
EXPERTS_STREAM = Kernel(
    "quant/quantize_fp8_experts_stream.cu",
    "quantize_fp8_experts_stream",
    template="T",
    args="x:tmap counts:ptr q:ptr scale:ptr q_t:ptr scale_t:ptr counter:ptr rows:i64 cols:i64 experts:i64 "
    "count_width:i64 row_blocks:i64 pow2:i64",
    variants=lambda target: [("bf16",), ("fp16",)] if supported(target) else [],
    needs=("tma",),
    max_registers=96,
)
BACK = Kernel(
    "quant/dequantize_fp8.cu",
    "dequantize_fp8",
    template="T F8 VEC DENSE",
    args="q:ptr scale:ptr y:ptr rows:i64 cols:i64 q_stride:i64 threads_per_row:i64 runs_per_row:i64 row_shift:i64 "
    "scale_row:i64 scale_column:i64",
    variants=[(*v, dense) for v in _WIDE_AND_NARROW for dense in (False, True) if v[-1] > 1 or not dense],
    max_registers=64,
)
BACK_T = Kernel(
    "quant/dequantize_fp8.cu",
    "dequantize_fp8_group_t",
    template="T F8",
    args="q:ptr scale:ptr y:ptr rows:i64 cols:i64 q_stride:i64 column_tiles:i64 whole_codes:i64 whole_output:i64",
    variants=_PAIRS,
    max_registers=80,
)
KERNELS = (AMAX, TENSOR, SMALL, ROW, ROW_LONG, GROUPED, BLOCK, GROUPED_T, GROUP_BOTH, BLOCK_BOTH, BACK, BACK_T)
