"""Permuted rows as fp8 with one scale per row, each expert's columns scaled first ("smooth" quantisation)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.moe import moe_permute_smooth_t as transposed
from rtkernels.ops.moe.moe_index_layout import MoeIndex
from rtkernels.ops.moe.moe_permute import as_index, with_arrays
from rtkernels.ops.moe.moe_permute_plan import Metadata, check_permute, dense
from rtkernels.ops.moe.moe_permute_smooth_t import moe_permute_smooth_t, permuted_values
from rtkernels.ops.moe.reference import gathered, kept
from rtkernels.ops.quant import reference
from rtkernels.ops.quant.quantize_fp8_plan import FP8_DTYPES, quantized_rows
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_memory
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import (
    FLOAT_DTYPES,
    GRID_LIMIT,
    address,
    block_of,
    check_same,
    divisor,
    group_threads,
    metadata,
    nothing,
    row_stride,
    rowed,
    token,
    vector_bytes,
)
from rtkernels.runtime.operator.autograd import detached
from rtkernels.runtime.operator.operator import TorchOp
from rtkernels.runtime.operator.registry import Op

__all__ = ["moe_permute_smooth", "moe_permute_smooth_t"]

_THREADS, _CHUNKS = 512, 4
_WIDER = {torch.float16: torch.float32, torch.float8_e5m2: torch.bfloat16}  # exact

KERNEL = Kernel(
    "moe/permute_smooth.cu",
    "moe_permute_smooth",
    template="T",
    args="x:ptr slots:ptr experts:ptr scale:ptr factor:ptr others:ptr q:ptr scale_out:ptr dots:ptr rows:i64 cols:i64 "
    "x_stride:i64 choices:i64 divisor:i64 expert_count:i64 scales:i64 scale_cols:i64 threads_per_row:i64 pow2:i64",
    variants=[("bf16",), ("fp32",), ("e4m3",)],
    max_registers=80,
)

# ---- launcher -------------------------------------------------------------------------------------------------------


def _check(
    x: Metadata, rows: Metadata, slots: Metadata, experts: Metadata, factor: Metadata, scale: Metadata | None,
    tokens: Metadata | None, dtype: torch.dtype,
) -> None:  # fmt: skip
    token("the result", dtype, FP8_DTYPES)
    check_permute(x, rows, slots, scale, None, None)
    check_same("index.experts", (experts[0], tuple(experts[1])), (rows[0], tuple(rows[1])), "type", of="index.rows")
    token("smooth", factor[0], (torch.float32,))
    if len(factor[1]) != 2 or factor[1][1] != x[1][1] or factor[1][0] == 0:
        raise ArgumentError(f"smooth has shape {tuple(factor[1])}; expected {('experts', x[1][1])}")
    check_same("smooth", factor[3], x[3], "device index")
    if scale is not None and len(scale[1]) == 2 and (scale[1][1] == 0 or x[1][1] % scale[1][1]):
        raise ArgumentError(f"scale has shape {tuple(scale[1])}; expected a divisor of the {x[1][1]} columns of x")
    if tokens is not None:
        token("tokens", tokens[0])
        check_same("tokens", tuple(tokens[1]), (slots[1][0], x[1][1]), "shape", of="index.slots and x")
        check_same("tokens", tokens[3], x[3], "device index")


def _plan(x, rows, slots, experts, factor, scale, tokens, dtype: torch.dtype, pow2: bool, align: int):
    """Return ``(launch, integers, layouts)``; None for what there is no kernel for."""
    _check(x, rows, slots, experts, factor, scale, tokens, dtype)
    (token_count, cols), device, size = x[1], x[3], x[0].itemsize
    count, top_k = slots[1][0], rows[1][1]
    n = 4 if size == 4 else 8
    step = row_stride(x[1], x[2])
    scales = 0 if scale is None else (scale[1][1] if len(scale[1]) == 2 else 1)
    scale_cols = cols // scales if scales else cols
    if step is None or not dense(rows, slots, experts, factor, scale, tokens) or dtype != torch.float8_e4m3fn:
        return None
    if count * cols * token_count * top_k == 0 or cols > _THREADS * _CHUNKS * n:
        return None
    if cols % n or scale_cols % n or vector_bytes(align, step * size, most=n * size) != n * size:
        return None
    if tokens is not None and tokens[0] != x[0]:
        return None
    threads = group_threads(-(-cols // (n * _CHUNKS)), _THREADS)
    block = block_of(threads)
    launch = KERNEL.bind((token("x", x[0], (*FLOAT_DTYPES, *FP8_DTYPES)),), device, _grid(count, block, threads), block)
    memory = (
        dense_memory(device, (count, cols), dtype),
        dense_memory(device, (count,), torch.float32),
        None if tokens is None else dense_memory(device, (count,), torch.float32),
    )
    sizes = (count, cols, step, token_count * top_k, divisor(top_k), factor[1][0])
    return launch, (*sizes, scales, scale_cols, threads, pow2), memory


def _grid(rows: int, block: int, threads: int) -> int:
    return min(-(-rows // (block // threads)), GRID_LIMIT)


_PLANS = Plans(_plan)


def _launch(
    x: Tensor,
    rows: Tensor,
    slots: Tensor,
    experts: Tensor,
    factor: Tensor,
    scale: Tensor | None,
    tokens: Tensor | None,
    dtype: torch.dtype,
    pow2_scale: bool,
) -> tuple[Tensor, ...]:
    _check(*map(metadata, (x, rows, slots, experts, factor, scale, tokens)), dtype)
    x = x.to(_WIDER.get(x.dtype, x.dtype))
    if tokens is not None and tokens.dtype != x.dtype:
        x, tokens = x.float(), tokens.float()
    x = rowed(x)
    given = [None if t is None else t.contiguous() for t in (slots, experts, scale, factor, tokens)]
    if factor.data_ptr() & 15:
        given[3] = factor.clone()
    align = (x.data_ptr() | address(given[4])) & 15
    metas = [metadata(t) for t in given]
    key = (metadata(x), metadata(rows), metas[0], metas[1], metas[3], metas[2], metas[4], dtype, pow2_scale, align)
    plan = _PLANS[key]
    if plan is None:
        return _in_torch(x, rows, slots, experts, factor, scale, tokens, dtype, pow2_scale, _quantized)
    launch, numbers, memory = plan
    outputs = [None if m is None else m[0](*m[1]) for m in memory]
    launch(x.data_ptr(), *map(address, given), *map(address, outputs), *numbers)
    return tuple([nothing(x) if t is None else t for t in outputs])


def _quantized(z: Tensor, dtype: torch.dtype, pow2_scale: bool) -> tuple[Tensor, Tensor]:
    return quantized_rows(z, dtype, pow2_scale)


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _in_torch(x, rows, slots, experts, factor, scale, tokens, dtype, pow2_scale, quantize):
    plain, source = permuted_values(x, rows.shape[1], slots)
    if scale is not None:
        times = gathered(scale, source)
        plain = plain * (
            times[:, None] if times.dim() == 1 else times.repeat_interleave(x.shape[1] // times.shape[1], 1)
        )
    own = gathered(experts.reshape(-1), torch.where(slots >= 0, slots, -1))
    used = kept(slots, experts.numel()) & kept(own, factor.shape[0])
    plain = torch.where(used[:, None], plain, 0)
    z = torch.where(used[:, None], plain * factor[own.clamp(0, factor.shape[0] - 1).long()], 0)
    q, scale_out = quantize(z, dtype, pow2_scale)
    return q, scale_out, nothing(x) if tokens is None else (plain * tokens.float()).sum(-1) * used


def _reference(x, rows, slots, experts, factor, scale, tokens, dtype, pow2_scale):
    _check(*map(metadata, (x, rows, slots, experts, factor, scale, tokens)), dtype)

    def quantize(z: Tensor, dtype: torch.dtype, pow2_scale: bool) -> tuple[Tensor, Tensor]:
        return reference.quantize(z, "row", dtype, pow2_scale, "row")

    return _in_torch(x, rows, slots, experts, factor, scale, tokens, dtype, pow2_scale, quantize)


def _fake(x, rows, slots, experts, factor, scale, tokens, dtype, pow2_scale):
    count = slots.shape[0]
    dots = nothing(x) if tokens is None else x.new_empty(count, dtype=torch.float32)
    return x.new_empty((count, x.shape[1]), dtype=dtype), x.new_empty(count, dtype=torch.float32), dots


SMOOTH = TorchOp(
    "moe_permute_smooth_fwd(Tensor x, Tensor rows, Tensor slots, Tensor experts, Tensor smooth, Tensor? scale, "
    "Tensor? tokens, ScalarType dtype, bool pow2_scale) -> (Tensor, Tensor, Tensor)",
    launch=_launch,
    reference=_reference,
    fake=_fake,
)


# ---- public ---------------------------------------------------------------------------------------------------------


class MoePermutedSmooth(NamedTuple):
    """Codes ``[R, H]``, scales ``[R]`` and, with ``tokens``, dot products ``[R]`` of permuted rows."""

    q: Tensor
    scale: Tensor
    dot: Tensor | None


def moe_permute_smooth(
    x: Tensor,
    index: MoeIndex,
    smooth: Tensor,
    *,
    divide: bool = False,
    scale: Tensor | None = None,
    tokens: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    pow2_scale: bool = False,
) -> MoePermutedSmooth:
    """Copy the rows of tokens to their experts, times the expert's factors, as fp8 codes with one scale per row.

    ``z[r] = x[t] * scale[t] * smooth[e]`` for the row r that token t has with expert e, in fp32 and each product
    rounded; then as :func:`quantize_fp8` with granularity "row". Rows that no choice fills are quantised zeros: codes
    0, scale 1e-30 (2^-99 with pow2_scale). Everything is read from the index on the device. Not differentiable.

    e4m3 codes of rows of whole 16 bytes that fit the registers of a block take one launch; everything else is put
    together from several of torch's own kernels.

    Args:
        x: ``[T, H]``; bfloat16, float16, float32, float8_e4m3fn or float8_e5m2. Any strides (a copy is made unless rows
            are unit-stride). May be any object with ``__dlpack__``; everything else is then of its kind.
        index: From ``moe_index``, for these T tokens.
        smooth: Factors of the columns of each expert, float32 ``[experts, H]``.
        divide: Multiply by ``1 / smooth`` (rounded to float32) instead.
        scale: Scales of x, float32 ``[T]``, or ``[T, s]`` with one for each ``H / s`` columns.
        tokens: ``[R, H]``, bfloat16, float16 or float32, to give the dot products of its rows with ``x[t] * scale[t]``:
            the gradient of the weights of :func:`moe_unpermute`, if x is that of its result.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        pow2_scale: Round scales up to a power of two.

    Returns:
        A named tuple ``(q, scale, dot)``: codes ``[R, H]``, float32 scales ``[R]``, and float32 dot products ``[R]``
        (0 in rows that no choice fills) or None.
    """
    if not isinstance(x, Tensor):
        options: dict[str, Any] = {"divide": divide, "scale": scale, "tokens": tokens, "dtype": dtype}
        return with_arrays(moe_permute_smooth, x, index, smooth, **options, pow2_scale=pow2_scale)
    index = as_index(index)
    x, smooth, scale, tokens = detached(x, smooth, scale, tokens)
    factor = smooth.reciprocal() if divide else smooth
    q, scales, dot = SMOOTH(x, index.rows, index.slots, index.experts, factor, scale, tokens, dtype, pow2_scale)
    return MoePermutedSmooth(q, scales, None if tokens is None else dot)


OP = Op(
    "moe_permute_smooth",
    public=("moe_permute_smooth", "moe_permute_smooth_t"),
    kernels=(KERNEL, *transposed.KERNELS),
    torch_ops=(SMOOTH, transposed.CHANNEL),
)
