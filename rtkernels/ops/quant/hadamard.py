"""Block-diagonal Walsh-Hadamard transforms of rows, and fp8 of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from rtkernels import interop
from rtkernels.errors import ArgumentError
from rtkernels.ops.layout.transpose import transpose
from rtkernels.ops.quant import reference
from rtkernels.ops.quant.quantize_fp8 import dequantize_fp8
from rtkernels.ops.quant.quantize_fp8_plan import FP8_DTYPES, quantized_rows
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import FLOAT_DTYPES, GRID_LIMIT, block_of, group_threads, metadata, row_count, token
from rtkernels.runtime.operator.arguments import an_integer
from rtkernels.runtime.operator.autograd import needs_grad
from rtkernels.runtime.operator.operator import TorchOp
from rtkernels.runtime.operator.registry import Op

BLOCKS = (32, 64, 128, 256)
_ELEMENTS = 8  # of a thread
_THREADS, _CHUNKS = 512, 4

_TRANSFORM = Kernel(
    "quant/hadamard.cu",
    "hadamard",
    template="T",
    args="x:ptr y:ptr vectors:i64 lanes:i64 norm:f64",
    variants=[("bf16",), ("fp16",), ("fp32",)],
    max_registers=64,
)
_QUANTIZE = Kernel(
    "quant/hadamard.cu",
    "quantize_fp8_hadamard",
    template="T",
    args="x:ptr q:ptr scale:ptr rows:i64 cols:i64 threads_per_row:i64 lanes:i64 pow2:i64 norm:f64",
    variants=[("bf16",), ("fp32",)],
    max_registers=80,
)

# ---- launchers ------------------------------------------------------------------------------------------------------


def _check(x: tuple[Any, ...], block: int) -> str:
    t = token("x", x[0])
    if block not in BLOCKS:
        raise ArgumentError(f"block is {block}; expected one of {', '.join(map(str, BLOCKS))}")
    if not x[1]:
        raise ArgumentError("x has no dimensions; expected at least one")
    if x[1][-1] % block:
        raise ArgumentError(f"x has {x[1][-1]} columns; expected a multiple of the block, {block}")
    return t


def _check_transform(x: tuple[Any, ...], block: int, dtype: torch.dtype) -> str:
    t = _check(x, block)
    token("the result", dtype, tuple(dict.fromkeys((x[0], torch.float32))))
    return t


def _norm(block: int) -> float:
    return block**-0.5


def _plan(x, block: int, dtype: torch.dtype):
    t = _check_transform(x, block, dtype)
    if 0 in x[1]:
        return None, ()
    vectors = row_count(x[1]) * x[1][-1] // _ELEMENTS
    grid = min(-(-vectors // (256 * (2 if t == "fp32" else 4))), GRID_LIMIT)
    return _TRANSFORM.bind((t,), x[3], grid, 256), (vectors, block // _ELEMENTS, _norm(block))


def _plan_quantize(x, block: int, dtype: torch.dtype, pow2: bool):
    """Return launch and numbers, or (None, ()): e5m2, rows that do not fit in registers, no rows."""
    t = _check(x, block)
    token("the result", dtype, FP8_DTYPES)
    rows, cols = row_count(x[1]), x[1][-1]
    if 0 in x[1] or cols > _THREADS * _CHUNKS * _ELEMENTS or dtype != torch.float8_e4m3fn:
        return None, ()
    lanes = block // _ELEMENTS
    threads = max(group_threads(-(-cols // (_ELEMENTS * _CHUNKS)), _THREADS), lanes)
    size = block_of(threads)
    grid = min(-(-rows // (size // threads)), GRID_LIMIT)
    args = (rows, cols, threads, lanes, pow2, _norm(block))
    return _QUANTIZE.bind((t,), x[3], grid, size), args


_PLANS = Plans(_plan)
_QUANTIZE_PLANS = Plans(_plan_quantize)


def _aligned(x: Tensor) -> Tensor:
    """Return x, copied unless it is dense and 16-byte aligned."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() & 15 else x


def _launch(x: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    if x.dtype != dtype:
        _check_transform(metadata(x), block, dtype)
        x = x.to(dtype)  # exact
    x = _aligned(x)
    launch, args = _PLANS[metadata(x), block, dtype]
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if launch is not None:
        launch(x.data_ptr(), y.data_ptr(), *args)
    return y


def _launch_quantize(x: Tensor, block: int, dtype: torch.dtype, pow2_scale: bool) -> tuple[Tensor, Tensor]:
    x = _aligned(x.float() if x.dtype == torch.float16 else x)  # exact
    launch, args = _QUANTIZE_PLANS[metadata(x), block, dtype, pow2_scale]
    if launch is None:
        z = _launch(x, block, torch.float32)
        return quantized_rows(z, dtype, pow2_scale)
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    launch(x.data_ptr(), q.data_ptr(), scale.data_ptr(), *args)
    return q, scale


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
    return v.reshape(x.shape) * torch.tensor(_norm(block), dtype=v.dtype, device=v.device)


def _reference(x: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    _check_transform(metadata(x), block, dtype)
    return (_transformed(x, block) if x.numel() else x).to(dtype).contiguous().clone()


def _reference_quantize(x: Tensor, block: int, dtype: torch.dtype, pow2_scale: bool) -> tuple[Tensor, Tensor]:
    _check(metadata(x), block)
    z = _transformed(x, block) if x.numel() else x
    return reference.quantize(z, "row", dtype, pow2_scale, "row")


def _fake(x, block, dtype):
    return x.new_empty(x.shape, dtype=dtype)


def _fake_quantize(x, block, dtype, pow2_scale):
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)


TRANSFORM = TorchOp(
    "hadamard(Tensor x, int block, ScalarType dtype) -> Tensor", launch=_launch, reference=_reference, fake=_fake
)
QUANTIZE = TorchOp(
    "quantize_fp8_hadamard(Tensor x, int block, ScalarType dtype, bool pow2_scale) -> (Tensor, Tensor)",
    launch=_launch_quantize,
    reference=_reference_quantize,
    fake=_fake_quantize,
)


# ---- public ---------------------------------------------------------------------------------------------------------


class _Hadamard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, block: int, dtype: torch.dtype) -> Tensor:
        ctx.block, ctx.dtype = block, x.dtype
        return TRANSFORM(x, block, dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return hadamard(dy, ctx.block).to(ctx.dtype), None, None


def hadamard(x: Tensor, block: int = 128, *, dtype: torch.dtype | None = None) -> Tensor:
    """Multiply each block of neighbouring elements of a row by the orthonormal Hadamard matrix.

    ``y = x @ blockdiag(H, ..., H)`` with ``H[i, j] = (-1)^popcount(i & j) / sqrt(block)`` (Sylvester's order). H is
    symmetric and its own inverse: the same call undoes it. fp32 additions, stage by stage (1, 2, 4, ... elements
    apart), then one multiplication by ``1 / sqrt(block)`` and one rounding. A NaN or infinity spreads over its block.

    Differentiable (any number of times); the gradient is the transform of the gradient.

    Args:
        x: ``[..., n]``, bfloat16, float16 or float32, n a multiple of the block. Any strides (a copy is made unless x
            is dense). May be any object with ``__dlpack__``; the result is then of its kind.
        block: 32, 64, 128 or 256.
        dtype: Of the result: x's (None) or float32.

    Returns:
        Dense, of x's shape.
    """
    if not isinstance(x, Tensor):
        return interop.call(hadamard, x, block, dtype=dtype)
    if is_grad_enabled() and needs_grad(x):
        return _Hadamard.apply(x, block, dtype or x.dtype)
    return TRANSFORM(x, block, dtype or x.dtype)


def quantize_fp8_hadamard(
    x: Tensor,
    block: int = 128,
    *,
    transposed: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
    pow2_scale: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantise the :func:`hadamard` transform of a tensor to fp8 with one scale per row, or per column and transposed.

    The recipe is that of :func:`quantize_fp8`, granularity "row"; transformed values are fp32 and not rounded before.

    Not differentiable: the results never require grad.

    Args:
        x: ``[..., n]``, bfloat16, float16 or float32, n a multiple of the block. Any strides (a copy is made unless x
            is dense). May be any object with ``__dlpack__``; the results are then of its kind.
        block: 32, 64, 128 or 256.
        transposed: Transform along the columns of a matrix ``[m, n]`` instead, ``blockdiag(H) @ x``, with one scale per
            column and codes ``[n, p]``; p is m rounded up to a multiple of the block (zeros are added to x).
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        pow2_scale: Round scales up to a power of two.

    Returns:
        ``(q, scale)``: codes of x's shape and scales of its rows; transposed: ``[n, p]`` and ``[n]``.
    """
    if not isinstance(x, Tensor):
        return interop.call(quantize_fp8_hadamard, x, block, transposed=transposed, dtype=dtype, pow2_scale=pow2_scale)
    if x.requires_grad:
        x = x.detach()
    if transposed:
        if x.dim() != 2 or block not in BLOCKS:
            _check((*metadata(x)[:1], (block,)), block)
            raise ArgumentError(f"x has shape {tuple(x.shape)}; transposed expects two dimensions")
        x = transpose(x, pad_to=block)
    return QUANTIZE(x, block, dtype, pow2_scale)


def dequantize_fp8_hadamard(
    q: Tensor,
    scale: Tensor,
    block: int = 128,
    *,
    transposed: bool = False,
    rows: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return the values that :func:`quantize_fp8_hadamard` stored: ``q * scale`` transformed back.

    fp32 arithmetic, rounded once. Not differentiable.

    Args:
        q: Codes, as quantize_fp8_hadamard returned them.
        scale: Their scales.
        block: As given to quantize_fp8_hadamard.
        transposed: As given to quantize_fp8_hadamard.
        rows: For transposed: how many rows x had, if that is no multiple of the block.
        dtype: bfloat16, float16 or float32.

    Returns:
        Dense, of q's shape; transposed: ``[rows, n]``.
    """
    token("the result", dtype, FLOAT_DTYPES)
    if rows is not None:
        an_integer("rows", rows)
    y = hadamard(dequantize_fp8(q, scale, granularity="row", dtype=torch.float32), block).to(dtype)
    return transpose(y if rows is None else y[:, :rows]) if transposed else y


OP = Op(
    "hadamard",
    public=("hadamard", "quantize_fp8_hadamard", "dequantize_fp8_hadamard"),
    kernels=(_TRANSFORM, _QUANTIZE),
    torch_ops=(TRANSFORM, QUANTIZE),
)
