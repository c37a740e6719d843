"""fp8 codes and scales of rows sorted by expert, with groups that never cross from one expert to the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.quant import reference
from rtkernels.ops.quant.quantize_fp8_kernels import EXPERTS, EXPERTS_STREAM, WIDTH
from rtkernels.ops.quant.quantize_fp8_plan import Matrix, tile_threads
from rtkernels.ops.shared import fp8_layout
from rtkernels.ops.shared.fp8_layout import MAX_EXPERTS, Fp8Layout, asked, groups_of, row_blocks_of
from rtkernels.ops.shared.tile_stream import TILE_BYTES, stream_steps, supported, tile_map
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import token
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.layout import DTYPE_TOKEN, nothing
from rtkernels.runtime.operator.autograd import detached
from rtkernels.runtime.operator.declared import Dense, Meta, Operator, Rows
from rtkernels.runtime.operator.plan import Step, Steps
from rtkernels.runtime.operator.registry import Op

_STREAM_TYPES = (("bf16", "e4m3"), ("fp16", "e4m3"))
_STREAM_SLOTS = 2
_STREAM_STATIC_SHARED = 18560
# Tiles per SM from which on the kernel that gets them by TMA is faster. Measured on the H200.
_STREAM_TILES = 5

# ---- checks and plans -----------------------------------------------------------------------------------------------


def _check(x: Meta, counts: Meta, output: str, dtype: torch.dtype) -> None:
    fp8_layout.check_option("layout", output, fp8_layout.LAYOUTS)
    token("x", x.dtype)
    token("the result", dtype, fp8_layout.FP8_DTYPES)
    if x.dim() != 2:
        raise ArgumentError(f"x has shape {tuple(x.shape)}; expected two dimensions, rows sorted by expert")
    if x.shape[0] >= 2**31:
        raise ArgumentError(f"x has {x.shape[0]} rows; expected less than 2^31")
    if counts.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"counts has dtype {counts.dtype}; expected int32 or int64".replace("torch.", ""))
    if counts.dim() != 1 or not 1 <= counts.shape[0] <= MAX_EXPERTS:
        shape = tuple(counts.shape)
        raise ArgumentError(f"counts has shape {shape}; expected one dimension, the rows of 1 to {MAX_EXPERTS} experts")


def _outputs(x, counts, output, dtype):
    return Fp8Layout(x.shape, output, "column", counts.shape[0], dtype).outputs()


def _plan(x: Meta, counts: Meta, output: str, dtype: torch.dtype, pow2_scale: bool, device: int) -> Steps:
    t, f, experts = x.token, DTYPE_TOKEN[dtype], counts.shape[0]
    m, info = Matrix(x, WIDTH[t], flat=False), device_info(device)
    blocks, tiles = row_blocks_of(m.rows, experts), groups_of(m.cols)
    options = experts, counts.dtype.itemsize, blocks
    tensors, shared = ("counts", "q", "scale", "q_t", "scale_t"), _STREAM_SLOTS * TILE_BYTES + 8 * (experts + 1)
    streams = output != "row" and (t, f) in _STREAM_TYPES and m.vec > 1 and m.cols <= m.stride and m.cols < 2**30
    streams = streams and shared + _STREAM_STATIC_SHARED <= info.shared_per_block and supported(info.target)
    if streams and groups_of(m.rows) * tiles >= _STREAM_TILES * info.sm_count:
        source, numbers = tile_map("x", t, m.rows, m.cols, m.stride), (m.rows, m.cols, *options, int(pow2_scale))
        return stream_steps(EXPERTS_STREAM, (t,), device, blocks * tiles, shared, [source], tensors, numbers)
    aligned16, threads = m.vec > 1, tile_threads(t)
    grid = min(blocks * tiles, 1024 // threads // (1 if aligned16 else 2) * info.sm_count)
    launch = EXPERTS.bind((t, f, aligned16), device, grid, threads, shared=8 * (experts + 1))
    return Steps(Step(launch, "x", *tensors, m.rows, m.cols, m.stride, *options, tiles, int(pow2_scale)))


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _reference(x: Tensor, counts: Tensor, output: str, dtype: torch.dtype, pow2_scale: bool) -> tuple[Tensor, ...]:
    wanted = _outputs(x, counts, output, dtype)
    results = tuple(nothing(x) if m is None else x.new_zeros(m.shape, dtype=m.dtype) for m in wanted)
    q, scale, q_t, scale_t = results
    first, block, groups, cols = 0, 0, groups_of(x.shape[1]), x.shape[1]
    for count in counts.tolist():
        end = min(first + max(count, 0), x.shape[0])
        part = x[first:end]
        if output != "transposed":
            codes, scales = reference.quantize(part, "group", dtype, pow2_scale, "column")
            q[first:end] = codes
            scale[first * groups : end * groups] = scales.flatten()
        if output != "row":
            codes, scales = reference.quantize(part, "group_t", dtype, pow2_scale, "row")
            q_t[first * cols : end * cols] = codes.flatten()
            scale_t[block : block + len(scales)] = scales
        first, block = end, block + groups_of(end - first)
    return results


QUANTIZE = Operator(
    "quantize_fp8_experts", (Rows("x", None), Dense("counts", None)),
    options="str output, ScalarType dtype, bool pow2_scale", results="q scale q_t scale_t", outputs=_outputs,
    plan=_plan, reference=_reference, check=_check,
)  # fmt: skip


class QuantizedExperts(NamedTuple):
    """Codes and scales of the experts' rows, one expert after the other; None if not requested.

    For x ``[t, n]`` with ``g = ceil(n/128)``, and an expert with rows ``s`` to ``s + c - 1``, before which there are
    ``b`` blocks of 128 rows (the last one of each expert may be shorter):

    Attributes:
        q: ``[t, n]``, rows as in x.
        scale: ``[t * g]``. The expert's part ``[s * g : (s + c) * g]`` is a matrix ``[g, c]``: one scale per 128
            columns of a row, as quantize_fp8 gives it for granularity "group" and layout "column".
        q_t: ``[t * n]``. The expert's part ``[s * n : (s + c) * n]`` is a matrix ``[n, c]``.
        scale_t: ``[blocks, n]``. The expert's part begins at row ``b``: one scale per 128 rows of a column. There are
            ``(t + 127 * min(experts, t)) // 128`` rows, enough for any counts; those past the last block are 0.
    """

    q: Tensor | None
    scale: Tensor | None
    q_t: Tensor | None
    scale_t: Tensor | None


@public
def quantize_fp8_experts(
    x: Tensor, counts: Tensor, *, layout: str = "both", dtype: torch.dtype = torch.float8_e4m3fn,
    pow2_scale: bool = False, output: str | None = None,
    out: tuple[Tensor | None, ...] | None = None,
) -> QuantizedExperts:  # fmt: skip
    """Quantise rows sorted by expert to fp8, in groups of 128 along rows, along columns, or both from one read.

    The rows of each expert are quantised like a separate matrix by :func:`quantize_fp8` (granularities "group" and
    "group_t"), and the results are concatenated: see :class:`QuantizedExperts`. The host never reads `counts`, so the
    call does not synchronise and can be captured in a CUDA graph.

    Not differentiable: the results never require grad.

    Args:
        x: ``[t, n]``, bfloat16, float16 or float32; any strides (copied unless rows are unit-stride). Any object with
            ``__dlpack__`` is accepted; results are then of the same kind.
        counts: Rows of each expert, ``[experts]``, int32 or int64 on x's device; may be 0. Negative counts are taken as
            0, and rows are never read past the end. If their sum is less than t, the remaining rows (padding) are not
            quantised, and their results are uninitialised.
        layout: "row" (q and scale), "transposed" (q_t and scale_t) or "both".
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        pow2_scale: Round scales up to a power of two.
        output: Alias for `layout`.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        A :class:`QuantizedExperts` of contiguous tensors.
    """
    layout = layout if output is None else output
    (x,) = detached(x)
    results = QUANTIZE.call(x, counts, layout, dtype, pow2_scale)
    return QuantizedExperts(*asked(layout, results))


OP = Op(
    "quantize_fp8_experts", public=("quantize_fp8_experts",), kernels=(EXPERTS, EXPERTS_STREAM), torch_ops=(QUANTIZE,)
)
