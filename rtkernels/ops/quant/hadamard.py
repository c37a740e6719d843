"""Block-diagonal Walsh-Hadamard transforms of rows, and fp8 of them."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.layout.transpose import transpose
from rtkernels.ops.quant import quantize_fp8, reference
from rtkernels.ops.quant.quantize_fp8 import QuantizedBoth, dequantize_fp8
from rtkernels.ops.shared.constants import constant
from rtkernels.ops.shared.fp8_layout import E4M3, FP8_DTYPES
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import check_dimensions, token
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, FLOAT_DTYPES, GRID_LIMIT, block_of, group_threads, metadata
from rtkernels.runtime.operator.arguments import Among, Within
from rtkernels.runtime.operator.autograd import applied, differentiable, needs_grad
from rtkernels.runtime.operator.declared import Aligned, Meta, Operator
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

BLOCKS = (32, 64, 128, 256)
_ELEMENTS = 8  # of a thread
_THREADS = 512
_CHUNKS = 4

_TRANSFORM = Kernel(
    "quant/hadamard.cu", "hadamard", template="T Result", max_registers=64,
    args="x:ptr y:ptr vectors:i64 lanes:i64 norm:f64",
    variants=[("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp32", "bf16"), ("fp32", "fp16")],
)  # fmt: skip
_QUANTIZE = Kernel(
    "quant/hadamard.cu", "quantize_fp8_hadamard", template="T", max_registers=80,
    args="x:ptr q:ptr scale:ptr rows:i64 cols:i64 threads_per_row:i64 lanes:i64 pow2:i64 norm:f64",
    variants=[("bf16",), ("fp32",)],
)  # fmt: skip

# ---- plans ----------------------------------------------------------------------------------------------------------


def _check(x: Meta, block: int) -> None:
    token("x", x[0])
    if block not in BLOCKS:
        raise ArgumentError(f"block is {block}; expected one of {', '.join(map(str, BLOCKS))}")
    check_dimensions("x", x[1])
    if x[1][-1] % block:
        raise ArgumentError(f"x has {x[1][-1]} columns; expected a multiple of the block, {block}")


def _check_transform(x: Meta, block: int, dtype: torch.dtype) -> None:
    _check(x, block)
    token("the result", dtype, FLOAT_DTYPES if x.dtype == torch.float32 else (x.dtype, torch.float32))


def _check_quantize(x: Meta, block: int, dtype: torch.dtype) -> None:
    _check(x, block)
    token("the result", dtype, FP8_DTYPES)


def _norm(block: int) -> float:
    return block**-0.5


def _plan(x: Meta, block: int, dtype: torch.dtype, device: int) -> Steps:
    vectors = x.numel() // _ELEMENTS
    kind = torch.float32 if torch.float32 in (x.dtype, dtype) else dtype
    grid = min(-(-vectors // (256 * (2 if kind == torch.float32 else 4))), GRID_LIMIT)
    launch = _TRANSFORM.bind((DTYPE_TOKEN[kind], DTYPE_TOKEN[dtype]), device, grid, 256)
    step = Step(launch, "x", "y", vectors, block // _ELEMENTS, _norm(block))
    return Steps(step, converted=None if x.dtype == kind else {"x": kind})  # exact


def _plan_quantize(x: Meta, block: int, dtype: torch.dtype, pow2_scale: bool, device: int) -> Steps:
    rows, cols, kind = x.rows, x.shape[-1], x.dtype
    if cols > _THREADS * _CHUNKS * _ELEMENTS or dtype != E4M3:
        return Steps(instead=_transformed_and_quantized)
    converted = None
    if kind == torch.float16:
        kind, converted = torch.float32, {"x": torch.float32}  # exact
    lanes = block // _ELEMENTS
    threads = max(group_threads(-(-cols // (_ELEMENTS * _CHUNKS)), _THREADS), lanes)
    size = block_of(threads)
    launch = _QUANTIZE.bind((DTYPE_TOKEN[kind],), device, min(-(-rows // (size // threads)), GRID_LIMIT), size)
    step = Step(launch, "x", "q", "scale", rows, cols, threads, lanes, int(pow2_scale), _norm(block))
    return Steps(step, converted=converted)


def _transformed_and_quantized(x: Tensor, block: int, dtype: torch.dtype, pow2_scale: bool) -> tuple[Tensor, Tensor]:
    """e5m2, and rows that do not fit in registers: the values are stored and then quantised."""
    z = TRANSFORM.launch(x, block, torch.float32)
    return quantize_fp8.QUANTIZE.launch(z, "row", dtype, pow2_scale, "row")


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _transformed(x: Tensor, block: int) -> Tensor:
    """Return the transform in fp32 (or fp64 for fp64), stage by stage: the bits of the kernels."""
    v = x if x.dtype == torch.float64 else x.float()
    half = 1
    while half < block:
        pairs = v.reshape(*x.shape[:-1], -1, 2, half)
        a, b = pairs.unbind(-2)
        v = torch.stack((a + b, a - b), -2)
        half *= 2
    return v.reshape(x.shape) * constant(_norm(block), v.dtype, v.device)


def _reference(x: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    return (_transformed(x, block) if x.numel() else x).to(dtype).contiguous().clone()


def _reference_quantize(x: Tensor, block: int, dtype: torch.dtype, pow2_scale: bool) -> tuple[Tensor, Tensor]:
    z = _transformed(x, block) if x.numel() else x
    return reference.quantize(z, "row", dtype, pow2_scale, "row")


TRANSFORM = Operator(
    "hadamard", (Aligned("x", None),), options="int block, ScalarType dtype", results="y",
    outputs=lambda x, dtype: (Memory(x.shape, dtype),), plan=_plan, reference=_reference,
    check=_check_transform,
)  # fmt: skip
QUANTIZE = Operator(
    "quantize_fp8_hadamard", (Aligned("x", None),), options="int block, ScalarType dtype, bool pow2_scale",
    results="q scale", plan=_plan_quantize, reference=_reference_quantize, check=_check_quantize,
    outputs=lambda x, dtype: (Memory(x.shape, dtype), Memory(x.shape[:-1], torch.float32)),
)  # fmt: skip


# ---- public ---------------------------------------------------------------------------------------------------------


class _Hadamard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, block: int, dtype: torch.dtype) -> Tensor:
        ctx.block, ctx.dtype = block, x.dtype
        return TRANSFORM.call(x, block, dtype)

    @staticmethod
    @differentiable
    def backward(ctx, dy: Tensor):
        return hadamard(dy, ctx.block, dtype=ctx.dtype), None, None


_differentiable = applied(_Hadamard)


@public
def hadamard(x: Tensor, block: int = 128, *, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    """Multiply each block of consecutive elements of a row by the orthonormal Hadamard matrix.

    ``y = x @ blockdiag(H, ..., H)`` with ``H[i, j] = (-1)^popcount(i & j) / sqrt(block)`` (Sylvester's order). H is
    symmetric and its own inverse, so the same call undoes it. Computed as fp32 additions in stages (1, 2, 4, ...
    elements apart), one multiplication by ``1 / sqrt(block)`` and one rounding. A NaN or infinity spreads over its
    block.

    Differentiable any number of times; the gradient is the transform of the incoming gradient.

    Args:
        x: ``[..., n]``, bfloat16, float16 or float32, n a multiple of the block. Any strides (copied unless x is
            contiguous). Any object with ``__dlpack__`` is accepted; results are then of the same kind.
        block: Size of the Hadamard matrix: 32, 64, 128 or 256.
        dtype: Dtype of the result: x's (default) or float32; any of the three if x is float32.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        A contiguous tensor of x's shape.
    """
    if is_grad_enabled() and needs_grad(x):
        return _differentiable(x, block, dtype or x.dtype)
    return TRANSFORM.call(x, block, dtype or x.dtype)


@public(options={"layout": Among(("row", "both"), "one of 'row', 'both'")})
def quantize_fp8_hadamard(
    x: Tensor, block: int = 128, *, transposed: bool = False, dtype: torch.dtype = torch.float8_e4m3fn,
    pow2_scale: bool = False, layout: str = "row",
    out: tuple[Tensor | None, ...] | None = None,
) -> tuple[Tensor, Tensor] | QuantizedBoth:  # fmt: skip
    """Quantise the :func:`hadamard` transform of a tensor to fp8 with one scale per row, or per column and transposed.

    The recipe is that of :func:`quantize_fp8` with granularity "row"; transformed values are fp32 and not rounded
    before quantisation.

    The kernel adds and subtracts in stages and knows no other matrix. A different orthogonal matrix ``h`` of the same
    size takes a product first, ``quantize_fp8((x.float().unflatten(-1, (-1, block)) @ h).flatten(-2),
    granularity="row")``; random signs, one per column, are ``quantize_fp8_hadamard(x * signs)``.

    Not differentiable: the results never require grad.

    Args:
        x: ``[..., n]``, bfloat16, float16 or float32, n a multiple of the block. Any strides (copied unless x is
            contiguous). Any object with ``__dlpack__`` is accepted; results are then of the same kind.
        block: Size of the Hadamard matrix: 32, 64, 128 or 256.
        transposed: Transform along the columns of a matrix ``[m, n]`` instead, ``blockdiag(H) @ x``, with one scale per
            column and codes ``[n, p]``; p is m rounded up to a multiple of the block (zeros are added to x).
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        pow2_scale: Round scales up to a power of two.
        layout: "row", or "both" for a matrix: the results of both values of `transposed`, from one call.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        ``(q, scale)``: codes of x's shape and scales of its rows; transposed: ``[n, p]`` and ``[n]``. With layout
        "both" a :class:`QuantizedBoth` of all four.
    """
    if layout == "both":
        if transposed:
            raise ArgumentError("transposed is True; expected False with layout 'both', which has both sides")
        # The transposed side first: it checks that x is a matrix.
        q_t, scale_t = _quantized(x, block, True, dtype, pow2_scale)
        return QuantizedBoth(*_quantized(x, block, False, dtype, pow2_scale), q_t, scale_t)
    return _quantized(x, block, transposed, dtype, pow2_scale)


def _quantized(x: Tensor, block: int, transposed: bool, dtype: torch.dtype, pow2_scale: bool) -> tuple[Tensor, Tensor]:
    if x.requires_grad:
        x = x.detach()
    if transposed:
        if x.dim() != 2 or block not in BLOCKS:
            _check((*metadata(x)[:1], (block,)), block)
            raise ArgumentError(f"x has shape {tuple(x.shape)}; transposed codes require two dimensions")
        x = transpose(x, pad_to=block)
    return QUANTIZE.call(x, block, dtype, pow2_scale)


@public(options={"rows": Within("int")})
def dequantize_fp8_hadamard(
    q: Tensor, scale: Tensor, block: int = 128, *, transposed: bool = False, rows: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Undo :func:`quantize_fp8_hadamard`: return ``q * scale`` transformed back.

    Computed in fp32 and rounded once. Not differentiable.

    Args:
        q: Codes, as quantize_fp8_hadamard returned them.
        scale: Their scales.
        block: As given to quantize_fp8_hadamard.
        transposed: As given to quantize_fp8_hadamard.
        rows: With `transposed`: the number of rows of x, if it is not a multiple of the block.
        dtype: bfloat16, float16 or float32.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        A contiguous tensor of q's shape; with `transposed` ``[rows, n]``.
    """
    token("the result", dtype, FLOAT_DTYPES)
    y = hadamard(dequantize_fp8(q, scale, granularity="row", dtype=torch.float32), block, dtype=dtype)
    return transpose(y if rows is None else y[:, :rows]) if transposed else y


OP = Op(
    "hadamard", public=("hadamard", "quantize_fp8_hadamard", "dequantize_fp8_hadamard"),
    kernels=(_TRANSFORM, _QUANTIZE), torch_ops=(TRANSFORM, QUANTIZE), uses=("quantize_fp8", "transpose"),
)  # fmt: skip
