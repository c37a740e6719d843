"""The kernels of moe_permute_fp8, and which ones run how for which tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.moe.moe_permute_plan import PROB_KIND, Metadata, check_permute, dense
from rtkernels.ops.quant import quantize_fp8_experts as quantizer
from rtkernels.ops.quant.quantize_fp8_plan import FP8_DTYPES, groups_of, tile_threads
from rtkernels.ops.shared.tile_stream import supported
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_memory
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import address, divisor, nothing, row_stride, token, vector_bytes
from rtkernels.runtime.targets import Target

OUTPUTS = quantizer.OUTPUTS
_BAND_BYTES, _BAND_TILES = 4 << 20, 2  # of x that are read together, again and again, and should stay in L2; at least
_ROW_THREADS, _ROW_COLUMNS = 256, 2048  # of a block; of a token that a warp holds at a time
_SCALE_THREADS = 256
_RUN_THREADS, _RUN_MEMORY = 768, 4 * 128 * 256 + 2 * 128 * 320  # of a block; of shared memory, besides its table
_RUN_EXPERTS = 1024  # a table for more would not fit


def _blocks_per_sm(target: Target) -> int:
    return 4 if (8, 9) <= target.capability < (12, 0) else 2  # elsewhere the registers for more are just too few


TILES = Kernel(
    "moe/permute_fp8.cu",
    "moe_permute_fp8",
    template="T F8 BLOCKS",
    args="x:ptr slots:ptr offsets:ptr probs:ptr experts:ptr q:ptr scale:ptr q_t:ptr scale_t:ptr probs_out:ptr "
    "choices:i64 top_k:i64 divisor:i64 rows:i64 cols:i64 x_stride:i64 expert_count:i64 row_blocks:i64 "
    "column_tiles:i64 band:i64 prob_kind:i64 prob_columns:i64 pow2:i64",
    # Other types are permuted first and then quantised.
    variants=lambda target: [("bf16", f, _blocks_per_sm(target)) for f in ("e4m3", "e5m2")],
    max_registers=128,
)
ROWS = Kernel(
    "moe/permute_fp8_rows.cu",
    "moe_permute_fp8_rows",
    template="F8 THREADS",
    args="x:ptr rows:ptr slots:ptr offsets:ptr q:ptr token_scale:ptr tokens:i64 top_k:i64 row_count:i64 cols:i64 "
    "x_stride:i64 expert_count:i64 parts:i64 pow2:i64",
    variants=[(f, _ROW_THREADS) for f in ("e4m3", "e5m2")],
    max_registers=96,
)
SCALES = Kernel(
    "moe/permute_fp8_rows.cu",
    "moe_permute_fp8_scales",
    template="THREADS",
    args="token_scale:ptr slots:ptr offsets:ptr probs:ptr experts:ptr scale:ptr probs_out:ptr choices:i64 top_k:i64 "
    "divisor:i64 row_count:i64 groups:i64 expert_count:i64 prob_kind:i64 prob_columns:i64 empty:f64",
    variants=[(_SCALE_THREADS,)],
    max_registers=40,
)
RUNS = Kernel(
    "moe/permute_fp8_runs.cu",
    "moe_permute_fp8_runs",
    template="F8",
    args="x:ptr slots:ptr offsets:ptr probs:ptr experts:ptr q:ptr scale:ptr q_t:ptr scale_t:ptr probs_out:ptr "
    "choices:i64 top_k:i64 divisor:i64 rows:i64 cols:i64 x_stride:i64 expert_count:i64 row_blocks:i64 "
    "column_tiles:i64 prob_kind:i64 prob_columns:i64 pow2:i64",
    variants=lambda target: [("e4m3",), ("e5m2",)] if supported(target) else [],
    max_registers=80,
    needs=("tma",),
)
KERNELS = (TILES, ROWS, SCALES, RUNS)


def check(
    x: Metadata, rows: Metadata, slots: Metadata, offsets: Metadata, probs: Metadata | None, experts: Metadata | None,
    output: str, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Raise an ArgumentError for arguments that do not fit together."""
    token("x", x[0])
    token("the result", dtype, FP8_DTYPES)
    if output not in OUTPUTS:
        raise ArgumentError(f"layout is {output!r}; expected one of {', '.join(map(repr, OUTPUTS))}")
    check_permute(x, rows, slots, None, probs, experts)
    if offsets[0] != torch.int32 or len(offsets[1]) != 1 or not 2 <= offsets[1][0] <= quantizer.MAX_EXPERTS + 1:
        raise ArgumentError(
            f"index.offsets has dtype {str(offsets[0]).removeprefix('torch.')} and shape {tuple(offsets[1])}; expected "
            f"int32 and one entry more than there are experts, at most {quantizer.MAX_EXPERTS}"
        )


class _Tiles:
    """One kernel for everything that is asked for: TILES, or RUNS."""

    def __init__(
        self, x, rows, slots, offsets, probs, step: int, output: str, dtype: torch.dtype, pow2: bool, runs: bool
    ) -> None:
        (tokens, cols), device, f = x[1], x[3], token("the result", dtype, FP8_DTYPES)
        count, top_k, experts = slots[1][0], rows[1][1], offsets[1][0] - 1
        tiles, blocks = groups_of(cols), quantizer.row_blocks(count, experts)
        sizes = (tokens * top_k, top_k, divisor(top_k), count, cols, step, experts, blocks, tiles)
        info = device_info(device)
        if runs:
            grid, memory = min(blocks * tiles, info.sm_count), _RUN_MEMORY + 12 * (experts + 1)
            self._launch = RUNS.bind((f,), device, grid, _RUN_THREADS, shared=memory)
        else:
            resident = _blocks_per_sm(info.target)
            grid, memory = min(blocks * tiles, resident * info.sm_count), 8 * (experts + 1)
            self._launch = TILES.bind(("bf16", f, resident), device, grid, tile_threads("bf16"), shared=memory)
            sizes += (min(tiles, max(_BAND_TILES, _BAND_BYTES // (tokens * 128 * x[0].itemsize))),)
        self._sizes = (*sizes, *_numbers(probs), pow2)
        self._memory = _memory(device, count, cols, experts, probs, output, dtype)

    def run(self, x: Tensor, rows: Tensor, *given: Tensor | None) -> tuple[Tensor, ...]:
        """Launch; `given` are slots, offsets, probs and experts."""
        outputs = [None if m is None else m[0](*m[1]) for m in self._memory]
        self._launch(x.data_ptr(), *map(address, given), *map(address, outputs), *self._sizes)
        return tuple([nothing(x) if t is None else t for t in outputs])


class _Rows:
    """Codes by rows alone: made once per token; then the scales go where they belong."""

    def __init__(self, x, rows, slots, offsets, probs, step: int, dtype: torch.dtype, pow2: bool) -> None:
        (tokens, cols), device, f = x[1], x[3], token("the result", dtype, FP8_DTYPES)
        count, top_k, experts = slots[1][0], rows[1][1], offsets[1][0] - 1
        parts, groups = -(-cols // _ROW_COLUMNS), groups_of(cols)
        tasks = tokens * parts + -(-count // 32)
        self._rows = ROWS.bind((f, _ROW_THREADS), device, -(-tasks * 32 // _ROW_THREADS), _ROW_THREADS)
        self._row_sizes = (tokens, top_k, count, cols, step, experts, parts, pow2)
        grid, table = -(-count // _SCALE_THREADS), 8 * (experts + 1)
        self._scales = SCALES.bind((_SCALE_THREADS,), device, grid, _SCALE_THREADS, shared=table, overlap=True)
        empty = 2.0**-99 if pow2 else 1e-30
        sizes = (tokens * top_k, top_k, divisor(top_k), count, groups, experts)
        self._scale_sizes = (*sizes, *_numbers(probs), empty)
        self._memory = _memory(device, count, cols, experts, probs, "row", dtype)
        self._token_scales = dense_memory(device, (tokens, groups), torch.float32)

    def run(self, x: Tensor, rows: Tensor, *given: Tensor | None) -> tuple[Tensor, ...]:
        """Launch; `given` are slots, offsets, probs and experts."""
        outputs = [None if m is None else m[0](*m[1]) for m in self._memory]
        index, (q, scale, _, _, probs_out) = [*map(address, given)], map(address, outputs)
        by_token = self._token_scales[0](*self._token_scales[1])
        self._rows(x.data_ptr(), rows.data_ptr(), *index[:2], q, by_token.data_ptr(), *self._row_sizes)
        self._scales(by_token.data_ptr(), *index, scale, probs_out, *self._scale_sizes)
        return tuple([nothing(x) if t is None else t for t in outputs])


def _numbers(probs: Metadata | None) -> tuple[int, int]:
    return (0, 0) if probs is None else (PROB_KIND[probs[0]], probs[1][1])


def _memory(device: int, count: int, cols: int, experts: int, probs: Metadata | None, output: str, dtype: torch.dtype):
    shapes = quantizer._shapes(count, cols, experts, output)
    kinds = zip(shapes, (dtype, torch.float32) * 2, strict=True)
    codes = [shape and dense_memory(device, shape, kind) for shape, kind in kinds]
    return [*codes, None if probs is None else dense_memory(device, (count,), probs[0])]


def _plan(
    x, rows, slots, offsets, probs, experts, output: str, dtype: torch.dtype, pow2: bool, align: int
) -> _Tiles | _Rows | None:
    """Return how to run on such tensors; None if they are to be permuted first, or copied."""
    check(x, rows, slots, offsets, probs, experts, output, dtype)
    (tokens, cols), size, step = x[1], x[0].itemsize, row_stride(x[1], x[2])
    if step is None or not dense(rows, slots, offsets, probs, experts) or x[0] != torch.bfloat16:
        return None
    # Places in x are 32-bit numbers of 16 bytes.
    if slots[1][0] * cols * tokens * rows[1][1] == 0 or tokens * step * size >= 2**36:
        return None
    if vector_bytes(align, cols * size, step * size) != 16:
        return None
    if output == "row" and cols % 16 == 0:
        return _Rows(x, rows, slots, offsets, probs, step, dtype, pow2)
    runs = cols % 16 == 0 and offsets[1][0] <= _RUN_EXPERTS and supported(device_info(x[3]).target)
    return _Tiles(x, rows, slots, offsets, probs, step, output, dtype, pow2, runs)


PLANS = Plans(_plan)
