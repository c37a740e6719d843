"""Permuted rows as fp8 with one scale per row, each expert's columns scaled first ("smooth" quantisation)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.moe import moe_permute_smooth_t as transposed
from rtkernels.ops.moe.moe_index_layout import MoeIndex
from rtkernels.ops.moe.moe_permute import as_index
from rtkernels.ops.moe.moe_permute_plan import check_permute
from rtkernels.ops.moe.moe_permute_smooth_t import moe_permute_smooth_t, permuted_values
from rtkernels.ops.moe.reference import gathered, kept
from rtkernels.ops.quant import reference
from rtkernels.ops.quant.quantize_fp8 import QUANTIZE
from rtkernels.ops.shared.fp8_layout import E4M3, FP8_DTYPES
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import check_same, token
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, divisor, group_threads, nothing, row_blocks, vector_bytes
from rtkernels.runtime.operator.autograd import detached
from rtkernels.runtime.operator.declared import Aligned, Dense, Meta, Operator, Rows, dense_as, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

__all__ = ["moe_permute_smooth", "moe_permute_smooth_t"]

_THREADS = 512
_CHUNKS = 4
_WIDER = {torch.float16: torch.float32, torch.float8_e5m2: torch.bfloat16}  # exact

KERNEL = Kernel(
    "moe/permute_smooth.cu", "moe_permute_smooth", template="T", max_registers=80,
    args="x:ptr slots:ptr experts:ptr scale:ptr factor:ptr others:ptr q:ptr scale_out:ptr dots:ptr rows:i64 cols:i64 "
    "x_stride:i64 choices:i64 divisor:i64 expert_count:i64 scales:i64 scale_cols:i64 threads_per_row:i64 pow2:i64",
    variants=[("bf16",), ("fp32",), ("e4m3",)],
)  # fmt: skip

# ---- plan -----------------------------------------------------------------------------------------------------------


def _check(
    x: Meta, rows: Meta, slots: Meta, experts: Meta, smooth: Meta, scale: Meta | None, tokens: Meta | None,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    token("the result", dtype, FP8_DTYPES)
    check_permute(x, rows, slots, scale, None, None)
    check_same("index.experts", (experts[0], tuple(experts[1])), (rows[0], tuple(rows[1])), "type", of="index.rows")
    token("smooth", smooth.dtype, (torch.float32,))
    if smooth.dim() != 2 or smooth.shape[1] != x.shape[1] or smooth.shape[0] == 0:
        raise ArgumentError(f"smooth has shape {tuple(smooth.shape)}; expected {('experts', x.shape[1])}")
    check_same("smooth", smooth.device, x.device, "device index")
    if scale is not None and len(scale[1]) == 2 and (scale[1][1] == 0 or x[1][1] % scale[1][1]):
        raise ArgumentError(f"scale has shape {tuple(scale[1])}; expected a divisor of the {x[1][1]} columns of x")
    if tokens is not None:
        token("tokens", tokens[0])
        check_same("tokens", tuple(tokens[1]), (slots[1][0], x[1][1]), "shape", of="index.slots and x")
        check_same("tokens", tokens[3], x[3], "device index")


def _plan(
    x: Meta, rows: Meta, slots: Meta, experts: Meta, smooth: Meta, scale: Meta | None, tokens: Meta | None,
    dtype: torch.dtype, pow2_scale: bool, device: int,
) -> Steps:  # fmt: skip
    kind, converted = _WIDER.get(x.dtype, x.dtype), {}
    if tokens is not None and tokens.dtype != kind:
        kind, tokens, converted = torch.float32, dense_as(tokens, torch.float32), {"tokens": torch.float32}
    if kind != x.dtype:
        x, converted["x"] = dense_as(x, kind), kind
    (token_count, cols), size, count, top_k = x.shape, kind.itemsize, slots.shape[0], rows.shape[1]
    n, stride = 4 if size == 4 else 8, x.row_stride
    scales = 0 if scale is None else (scale.shape[1] if scale.dim() == 2 else 1)
    scale_cols = cols // scales if scales else cols
    fits = count * cols * token_count * top_k > 0 and cols <= _THREADS * _CHUNKS * n and dtype == E4M3
    aligned = vector_bytes(misaligned(x, tokens), stride * size, limit=n * size) == n * size
    if not fits or not aligned or cols % n or scale_cols % n:
        return Steps(instead=_by_several)
    threads = group_threads(-(-cols // (n * _CHUNKS)), _THREADS)
    launch = KERNEL.bind((DTYPE_TOKEN[kind],), device, *row_blocks(count, threads))
    sizes = count, cols, stride, token_count * top_k, divisor(top_k), smooth.shape[0], scales, scale_cols, threads
    tensors = "x", "slots", "experts", "scale", "smooth", "tokens", "q", "scale_out", "dots"
    return Steps(Step(launch, *tensors, *sizes, int(pow2_scale)), converted=converted)


def _by_several(*args):
    return _in_torch(*args, lambda z, dtype, pow2: QUANTIZE.launch(z, "row", dtype, pow2, "row"))


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


def _reference(x, rows, slots, experts, smooth, scale, tokens, dtype, pow2_scale):
    def quantize(z: Tensor, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor]:
        return reference.quantize(z, "row", dtype, pow2, "row")

    return _in_torch(x, rows, slots, experts, smooth, scale, tokens, dtype, pow2_scale, quantize)


def _outputs(x, slots, tokens, dtype):
    count, numbers = slots.shape[0], Memory(slots.shape, torch.float32)
    return Memory((count, x.shape[1]), dtype), numbers, None if tokens is None else numbers


_INDEX = Dense("rows", None), Dense("slots", None), Dense("experts", None)
SMOOTH = Operator(
    "moe_permute_smooth_fwd",
    (Rows("x", None), *_INDEX, Aligned("smooth", None), Dense("scale", None, optional=True),
     Dense("tokens", None, optional=True)),
    options="ScalarType dtype, bool pow2_scale", results="q scale_out dots", outputs=_outputs, plan=_plan,
    reference=_reference, check=_check, plans_empty=True,
)  # fmt: skip


class MoePermutedSmooth(NamedTuple):
    """Codes ``[R, H]``, scales ``[R]`` and, with ``tokens``, dot products ``[R]`` of permuted rows."""

    q: Tensor
    scale: Tensor
    dot: Tensor | None


@public
def moe_permute_smooth(
    x: Tensor, index: MoeIndex, smooth: Tensor, *, divide: bool = False, scale: Tensor | None = None,
    tokens: Tensor | None = None, dtype: torch.dtype = torch.float8_e4m3fn, pow2_scale: bool = False,
    out: tuple[Tensor | None, ...] | None = None,
) -> MoePermutedSmooth:  # fmt: skip
    """Copy the rows of tokens to their experts, times the expert's factors, as fp8 codes with one scale per row.

    ``z[r] = x[t] * scale[t] * smooth[e]`` for the row r of token t and expert e, in fp32 with each product rounded;
    then quantised as by :func:`quantize_fp8` with granularity "row". Rows that no choice fills are quantised zeros:
    codes 0, scale 1e-30 (2^-99 with pow2_scale). The index is read on the device only. Not differentiable.

    e4m3 codes of rows that are a multiple of 16 bytes and fit in the registers of a block take one launch; other cases
    use several of torch's kernels.

    Args:
        x: ``[T, H]``; bfloat16, float16, float32, float8_e4m3fn or float8_e5m2. Any strides (copied unless rows are
            unit-stride). Any object with ``__dlpack__`` is accepted; other arguments must be, and results are, of the
            same kind.
        index: From ``moe_index``, for these T tokens.
        smooth: Factors of the columns of each expert, float32 ``[experts, H]``.
        divide: Multiply by ``1 / smooth`` (rounded to float32) instead.
        scale: Scales of x, float32 ``[T]``, or ``[T, s]`` with one for each ``H / s`` columns.
        tokens: ``[R, H]``, bfloat16, float16 or float32, to compute the dot products of its rows with
            ``x[t] * scale[t]``. If x is the gradient of the result of :func:`moe_unpermute`, these are the gradients of
            its probs.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        pow2_scale: Round scales up to a power of two.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        A named tuple ``(q, scale, dot)``: codes ``[R, H]``, float32 scales ``[R]``, and float32 dot products ``[R]``
        (0 in rows that no choice fills) or None.
    """
    index = as_index(index)
    x, smooth, scale, tokens = detached(x, smooth, scale, tokens)
    factor = smooth.reciprocal() if divide else smooth
    q, scales, dot = SMOOTH.call(x, index.rows, index.slots, index.experts, factor, scale, tokens, dtype, pow2_scale)
    return MoePermutedSmooth(q, scales, None if tokens is None else dot)


OP = Op(
    "moe_permute_smooth", public=("moe_permute_smooth", "moe_permute_smooth_t"), kernels=(KERNEL, *transposed.KERNELS),
    torch_ops=(SMOOTH, transposed.CHANNEL), uses=("quantize_fp8",),
)  # fmt: skip
