"""The kernels of ``quantize_fp8``, ``dequantize_fp8``, ``quantize_fp8_experts`` and, in part, ``quantize_int8``."""

from __future__ import annotations

from rtkernels.ops.shared.fp8_layout import GROUP as GROUP
from rtkernels.ops.shared.tile_stream import supported
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import WIDTH

_PAIRS = [(t, f) for t in WIDTH for f in ("e4m3", "e5m2")]
_ALIGNED16 = [(t, f, WIDTH[t]) for t, f in _PAIRS]
# With one scale for the tensor or for a row, codes may be int8, too.
_BYTE_PAIRS = [(t, code) for t in WIDTH for code in ("e4m3", "e5m2", "int8")]
_BYTE_ALIGNED16 = [(t, code, WIDTH[t]) for t, code in _BYTE_PAIRS]
GENERIC_TYPES = {"bf16": 0, "fp16": 1, "fp32": 2}  # common/any_type.cuh
GENERIC_THREADS = 256

AMAX = Kernel(
    "quant/quantize_fp8.cu", "fp8_tensor_amax", template="T VEC", max_registers=64,
    args="x:ptr partial:ptr rows:i64 cols:i64 x_stride:i64 threads_per_row:i64 slices_per_row:i64",
    variants=list(WIDTH.items()),
)  # fmt: skip
SMALL = Kernel(
    "quant/quantize_fp8.cu", "quantize_fp8_tensor_small", template="T Code", max_registers=64,
    args="x:ptr q:ptr scale:ptr vectors:i64 pow2:i64", variants=_BYTE_PAIRS,
)  # fmt: skip
TENSOR = Kernel(
    "quant/quantize_fp8.cu", "quantize_fp8_tensor", template="T Code VEC", max_registers=56,
    args="x:ptr scale:ptr partial:ptr q:ptr rows:i64 cols:i64 x_stride:i64 threads_per_row:i64 slices_per_row:i64 "
    "partials:i64 pow2:i64",
    variants=_BYTE_ALIGNED16,
)  # fmt: skip
_ROW_ARGS = "x:ptr q:ptr scale:ptr rows:i64 cols:i64 x_stride:i64 threads_per_row:i64 pow2:i64"
ROW = Kernel(
    "quant/quantize_fp8.cu", "quantize_fp8_row", template="T Code VEC", max_registers=48,
    args=_ROW_ARGS, variants=_BYTE_ALIGNED16,
)  # fmt: skip
ROW_LONG = Kernel(
    "quant/quantize_fp8.cu", "quantize_fp8_row_long", template="T Code VEC", max_registers=48,
    args=_ROW_ARGS, variants=_BYTE_ALIGNED16,
)  # fmt: skip
GROUPED = Kernel(
    "quant/quantize_fp8_tile.cu", "quantize_fp8_group", template="T F8 VEC", max_registers=64,
    args="x:ptr q:ptr scale:ptr rows:i64 cols:i64 x_stride:i64 scale_row:i64 scale_group:i64 column_tiles:i64 pow2:i64",
    variants=_ALIGNED16,
)  # fmt: skip
BLOCK = Kernel(
    "quant/quantize_fp8_tile.cu", "quantize_fp8_block", template="T F8 VEC", max_registers=64,
    args="x:ptr q:ptr scale:ptr rows:i64 cols:i64 x_stride:i64 column_tiles:i64 pow2:i64", variants=_ALIGNED16,
)  # fmt: skip
GROUPED_T = Kernel(
    "quant/quantize_fp8_transposed.cu", "quantize_fp8_group_t", template="T F8", max_registers=80,
    args="x:ptr q_t:ptr scale:ptr rows:i64 cols:i64 x_stride:i64 column_tiles:i64 pow2:i64", variants=_PAIRS,
)  # fmt: skip
GROUP_BOTH = Kernel(
    "quant/quantize_fp8_transposed.cu", "quantize_fp8_group_both", template="T F8", max_registers=112,
    args="x:ptr q:ptr scale:ptr q_t:ptr scale_t:ptr rows:i64 cols:i64 x_stride:i64 scale_row:i64 scale_group:i64 "
    "pow2:i64",
    variants=_PAIRS,
)  # fmt: skip
BLOCK_BOTH = Kernel(
    "quant/quantize_fp8_transposed.cu", "quantize_fp8_block_both", template="T F8", max_registers=72,
    args="x:ptr q:ptr scale:ptr q_t:ptr rows:i64 cols:i64 x_stride:i64 column_tiles:i64 pow2:i64", variants=_PAIRS,
)  # fmt: skip
EXPERTS = Kernel(
    "quant/quantize_fp8_experts.cu", "quantize_fp8_experts", template="T F8 ALIGNED16", max_registers=128,
    args="x:ptr counts:ptr q:ptr scale:ptr q_t:ptr scale_t:ptr rows:i64 cols:i64 x_stride:i64 experts:i64 "
    "count_width:i64 row_blocks:i64 column_tiles:i64 pow2:i64",
    variants=[(*pair, aligned16) for pair in _PAIRS for aligned16 in (False, True)],
)  # fmt: skip
EXPERTS_STREAM = Kernel(
    "quant/quantize_fp8_experts_stream.cu", "quantize_fp8_experts_stream", template="T", max_registers=96,
    needs=("tma",),
    args="x:tmap counts:ptr q:ptr scale:ptr q_t:ptr scale_t:ptr counter:ptr rows:i64 cols:i64 experts:i64 "
    "count_width:i64 row_blocks:i64 pow2:i64",
    variants=lambda target: [("bf16",), ("fp16",)] if supported(target) else [],
)  # fmt: skip
BACK = Kernel(
    "quant/dequantize_fp8.cu", "dequantize_fp8", template="T F8 VEC", max_registers=64,
    args="q:ptr scale:ptr y:ptr rows:i64 cols:i64 q_stride:i64 threads_per_row:i64 slices_per_row:i64 row_shift:i64 "
    "scale_row:i64 scale_column:i64",
    variants=_ALIGNED16,
)  # fmt: skip
BACK_T = Kernel(
    "quant/dequantize_fp8.cu", "dequantize_fp8_group_t", template="T F8", max_registers=80,
    args="q:ptr scale:ptr y:ptr rows:i64 cols:i64 q_stride:i64 column_tiles:i64 whole_codes:i64 whole_output:i64",
    variants=_PAIRS,
)  # fmt: skip
# For x, or codes, that can only be accessed an element at a time.
GENERIC = Kernel(
    "quant/quantize_fp8_generic.cu", "quantize_fp8_generic", template="THREADS", max_registers=64,
    args="x:ptr q:ptr scale:ptr q_t:ptr partial:ptr rows:i64 cols:i64 x_stride:i64 unit_rows:i64 unit_cols:i64 "
    "units:i64 units_across:i64 scale_row:i64 scale_column:i64 threads_per_unit:i64 lanes:i64 partials:i64 given:i64 "
    "amax_only:i64 type:i64 large_range:i64 pow2:i64",
    variants=[(GENERIC_THREADS,)],
)  # fmt: skip
BACK_GENERIC = Kernel(
    "quant/quantize_fp8_generic.cu", "dequantize_fp8_generic", template="THREADS", max_registers=64,
    args="q:ptr scale:ptr y:ptr rows:i64 cols:i64 q_stride:i64 threads_per_row:i64 slices_per_row:i64 row_shift:i64 "
    "scale_row:i64 scale_column:i64 type:i64 large_range:i64",
    variants=[(GENERIC_THREADS,)],
)  # fmt: skip
KERNELS = (
    AMAX, TENSOR, SMALL, ROW, ROW_LONG, GROUPED, BLOCK, GROUPED_T, GROUP_BOTH, BLOCK_BOTH, BACK, BACK_T, GENERIC,
    BACK_GENERIC,
)  # fmt: skip
