"""NVFP4 and MX formats: quantise, dequantise, and scales as block-scaled tensor cores read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.quant.nvfp4_operators import CODES, DEQUANTIZE, QUANTIZE, scale_shape
from rtkernels.ops.quant.nvfp4_plan import KERNELS
from rtkernels.ops.quant.swizzle import KERNEL, SWIZZLE
from rtkernels.ops.shared import block_formats as formats
from rtkernels.ops.shared.fp8_layout import check_option
from rtkernels.ops.shared.row_quant import memory_for
from rtkernels.runtime.call.public import public
from rtkernels.runtime.invariance import level, refuse
from rtkernels.runtime.launch.memory import new_tensor
from rtkernels.runtime.layout import FLOAT_DTYPES, token
from rtkernels.runtime.operator.arguments import check_integer, check_number
from rtkernels.runtime.operator.autograd import detached
from rtkernels.runtime.operator.registry import Op


@public(own_out=True)
def quantize_nvfp4(
    x: Tensor, *, global_scale: Tensor | float | None = None, swizzled: bool = False, scale_rule: str = "rne",
    elem_rule: str = "rne", channel_scale: Tensor | None = None, out: Tensor | None = None,
    scale_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Quantise to NVFP4: e2m1 codes, two in a byte, one e4m3 scale per 16 codes, and one float32 global scale.

    With ``v = x * channel_scale`` in fp32: ``scale = e4m3(amax / (6 g))`` for each 16 columns, and the codes are
    ``v / (g scale)`` rounded to nearest. A block whose scale is 0 has codes 0. NaN and infinities are ignored for
    scales and become the largest code of their sign. ``scaled_mm`` takes the results directly (recipe "nvfp4").
    Not differentiable: the results never require grad.

    Args:
        x: ``[..., k]``, bfloat16, float16 or float32, k a multiple of 2 (of 16 for products). Any strides (copied
            unless rows are unit-stride and evenly spaced).
        global_scale: g: a number or one float32 element. Default: ``amax(v) / 2688`` (1 if that is 0), which takes a
            separate launch. 1.0 gives the format without a global scale.
        swizzled: Store scales in blocks of 128 x 4 (:func:`nvfp4_swizzle`), padded with zeros.
        scale_rule: Rounding of scales: ``"rne"`` (to nearest), ``"ceil"`` (up, so that no code exceeds 6), or
            ``"mse"``: of nine multiples of amax / 6, from 0.375 to 1.5, the one with the least squared error.
        elem_rule: Rounding of ties: ``"rne"`` (to even codes), ``"away"`` from zero, or towards ``"zero"``.
        channel_scale: ``[k]`` in x's dtype or float32. Default: 1.
        out: Contiguous uint8 tensor ``[..., k/2]`` to write the codes to.
        scale_out: Contiguous float8_e4m3fn tensor to write the scales to.

    Returns:
        ``(codes, scales, g)``: uint8 ``[..., k/2]``, element 2i in the low half of byte i; float8_e4m3fn
        ``[..., ceil(k/16)]``, or one dimension of ``nvfp4_scale_bytes`` if swizzled; float32 ``[]``.
    """
    x, channel_scale = detached(x, channel_scale)
    _check_rows(x, 2)
    static, g, global_out = 0.0, None, None
    if isinstance(global_scale, Tensor):
        g = global_scale.detach()
    else:
        global_out = new_tensor((), torch.float32, x)
        if global_scale is None and level():
            refuse("quantize_nvfp4 without global_scale", "the largest element of all rows decides every row's codes")
        if global_scale is not None:
            static = float(check_number("global_scale", global_scale))
            if not 0 < static < float("inf"):
                raise ArgumentError(f"global_scale is {static}; expected a number above 0")
    inputs: dict[str, Any] = {"x": x, "global_scale": g, "channel_scale": channel_scale}
    codes = memory_for("out", out, (*x.shape[:-1], x.shape[-1] // 2), torch.uint8, x, inputs)
    shape = scale_shape(tuple(x.shape), 16, swizzled)
    scales = memory_for("scale_out", scale_out, shape, torch.float8_e4m3fn, x, {**inputs, "out": codes})
    QUANTIZE(x, g, channel_scale, codes, scales, global_out, "nvfp4", swizzled, scale_rule, elem_rule, static)
    return codes, scales, g.reshape(()) if global_out is None else global_out


@public
def dequantize_nvfp4(
    packed: Tensor, scales: Tensor, global_scale: Tensor | float | None = None, *, swizzled: bool = False,
    dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``codes * scale * global_scale``; exact in bfloat16 and float16 if there is no global scale.

    Args:
        packed: uint8 (or float4_e2m1fn_x2) ``[..., k/2]``.
        scales: float8_e4m3fn or uint8 ``[..., ceil(k/16)]``, or swizzled. Their sign is ignored.
        global_scale: A number or one float32 element. Default: 1.
        swizzled: Whether the scales are swizzled.
        dtype: Dtype of the result: bfloat16, float16 or float32.
        out: Tensor to write the result to: contiguous ``[..., k]``.

    Returns:
        ``[..., k]`` in `dtype`, contiguous.
    """
    return _dequantize(packed, scales, global_scale, "nvfp4", swizzled, dtype)


@public(recent=False)
def nvfp4_scale_bytes(rows: int, cols: int) -> int:
    """Return the size in bytes of the swizzled scales of a matrix.

    Args:
        rows: Rows of the matrix.
        cols: Columns of the matrix, before packing.

    Returns:
        A multiple of 512.
    """
    return formats.swizzled_bytes(check_integer("rows", rows), -(-check_integer("cols", cols) // 16))


@public
def nvfp4_swizzle(scales: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return one-byte scales ``[rows, blocks]`` in blocks of 128 x 4, the layout of block-scaled tensor cores.

    The byte of row r and block b is at
    ``((r // 128) * ceil(blocks / 4) + b // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + b % 4``.

    Args:
        scales: ``[rows, blocks]`` in any one-byte dtype.
        out: Tensor to write the result to: one dimension of ``nvfp4_scale_bytes`` elements, in the dtype of scales.

    Returns:
        One dimension, in the dtype of scales, padded with zeros.
    """
    return SWIZZLE.call(scales)


@public
def nvfp4_unswizzle(scales: Tensor, rows: int, cols: int, *, out: Tensor | None = None) -> Tensor:
    """Undo ``nvfp4_swizzle``.

    Args:
        scales: The result of ``nvfp4_swizzle``, one dimension.
        rows: Rows of the matrix.
        cols: Columns of the matrix, before packing.
        out: Tensor to write the result to: ``[rows, ceil(cols / 16)]``, uint8, contiguous.

    Returns:
        ``[rows, ceil(cols / 16)]``.
    """
    return formats.unswizzle(scales, check_integer("rows", rows), -(-check_integer("cols", cols) // 16))


@public(own_out=True)
def quantize_mxfp8(
    x: Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn, rule: str = "ocp", swizzled: bool = False,
    out: Tensor | None = None, scale_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Quantise to MXFP8: fp8 codes with one power-of-two scale per 32 codes.

    Not differentiable: the results never require grad.

    Args:
        x: ``[..., k]``, bfloat16, float16 or float32 (k a multiple of 32 for products). Any strides, as for
            :func:`quantize_nvfp4`.
        dtype: float8_e4m3fn or float8_e5m2.
        rule: Rule of the scales. ``"ocp"``: the exponent of amax minus that of the largest code; larger values are
            clamped. ``"nv"``: the exponent of ``amax / largest code`` rounded up, so that nothing is clamped.
        swizzled: Store scales in blocks of 128 x 4.
        out: Contiguous tensor ``[..., k]`` in `dtype` to write the codes to.
        scale_out: Contiguous float8_e8m0fnu tensor to write the scales to.

    Returns:
        ``(codes, scales)``: `dtype` ``[..., k]``, float8_e8m0fnu ``[..., ceil(k/32)]``, or one dimension if swizzled.
    """
    check_option("dtype", dtype, CODES["mxfp8"])
    return _quantize_mx(x, "mxfp8", dtype, rule, swizzled, out, scale_out)


@public(own_out=True)
def quantize_mxfp4(
    x: Tensor, *, rule: str = "ocp", swizzled: bool = False, out: Tensor | None = None, scale_out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise to MXFP4: e2m1 codes, two in a byte, with one power-of-two scale per 32 codes.

    Ties are rounded to even codes. Not differentiable: the results never require grad.

    Args:
        x: ``[..., k]``, k a multiple of 2, as for :func:`quantize_mxfp8`.
        rule: As for :func:`quantize_mxfp8`.
        swizzled: As for :func:`quantize_mxfp8`.
        out: Contiguous uint8 tensor ``[..., k/2]`` to write the codes to.
        scale_out: Contiguous float8_e8m0fnu tensor to write the scales to.

    Returns:
        ``(codes, scales)``: uint8 ``[..., k/2]``, float8_e8m0fnu ``[..., ceil(k/32)]``, or one dimension if swizzled.
    """
    return _quantize_mx(x, "mxfp4", torch.uint8, rule, swizzled, out, scale_out)


@public
def dequantize_mxfp8(
    codes: Tensor, scales: Tensor, *, swizzled: bool = False, dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Dequantise MXFP8: return ``codes * scale``.

    Args:
        codes: float8_e4m3fn or float8_e5m2 ``[..., k]``.
        scales: float8_e8m0fnu or uint8 ``[..., ceil(k/32)]``, or swizzled.
        swizzled: Whether the scales are swizzled.
        dtype: Dtype of the result: bfloat16, float16 or float32.
        out: Tensor to write the result to: contiguous ``[..., k]``.

    Returns:
        ``[..., k]`` in `dtype`, contiguous.
    """
    if codes.dtype not in CODES["mxfp8"]:
        raise ArgumentError(f"codes has dtype {codes.dtype}; expected float8_e4m3fn or float8_e5m2")
    return _dequantize(codes, scales, None, "mxfp8", swizzled, dtype)


@public
def dequantize_mxfp4(
    packed: Tensor, scales: Tensor, *, swizzled: bool = False, dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Dequantise MXFP4: return ``codes * scale``.

    Args:
        packed: uint8 ``[..., k/2]``.
        scales: float8_e8m0fnu or uint8 ``[..., ceil(k/32)]``, or swizzled.
        swizzled: Whether the scales are swizzled.
        dtype: Dtype of the result: bfloat16, float16 or float32.
        out: Tensor to write the result to: contiguous ``[..., k]``.

    Returns:
        ``[..., k]`` in `dtype`, contiguous.
    """
    return _dequantize(packed, scales, None, "mxfp4", swizzled, dtype)


def _check_rows(x: Tensor, multiple: int) -> None:
    token("x", x.dtype)
    if not x.dim():
        raise ArgumentError("x has no dimensions; expected at least one, the last is quantised")
    if x.shape[-1] % multiple:
        raise ArgumentError(f"x has {x.shape[-1]} columns; expected a multiple of {multiple}, two codes in a byte")


def _quantize_mx(x, format, dtype, rule, swizzled, out, scale_out):
    (x,) = detached(x)
    _check_rows(x, 2 if format == "mxfp4" else 1)
    shape = (*x.shape[:-1], x.shape[-1] // 2) if format == "mxfp4" else tuple(x.shape)
    codes = memory_for("out", out, shape, dtype, x, {"x": x})
    shape = scale_shape(tuple(x.shape), 32, swizzled)
    scales = memory_for("scale_out", scale_out, shape, torch.float8_e8m0fnu, x, {"x": x, "out": codes})
    QUANTIZE(x, None, None, codes, scales, None, format, swizzled, rule, "rne", 1.0)
    return codes, scales


def _dequantize(codes, scales, global_scale, format, swizzled, dtype) -> Tensor:
    if dtype not in FLOAT_DTYPES:
        raise ArgumentError(f"dtype is {dtype}; expected bfloat16, float16 or float32")
    if codes.itemsize == 1 and codes.dtype not in (torch.uint8, *CODES["mxfp8"]):
        codes = codes.view(torch.uint8)
    if global_scale is not None and not isinstance(global_scale, Tensor):
        global_scale = torch.full(
            (), float(check_number("global_scale", global_scale)), dtype=torch.float32, device=codes.device
        )
    if not codes.dim():
        name = "codes" if format == "mxfp8" else "packed"
        raise ArgumentError(f"{name} has no dimensions; expected at least one")
    codes, scales, global_scale = detached(codes, scales, global_scale)
    shape = (*codes.shape[:-1], codes.shape[-1] * (1 if format == "mxfp8" else 2))
    result = new_tensor(shape, dtype, codes)
    DEQUANTIZE(codes, scales, global_scale, result, format, swizzled)
    return result


OP = Op(
    "nvfp4",
    public=(
        "quantize_nvfp4", "dequantize_nvfp4", "nvfp4_swizzle", "nvfp4_unswizzle", "nvfp4_scale_bytes",
        "quantize_mxfp8", "quantize_mxfp4", "dequantize_mxfp8", "dequantize_mxfp4",
    ),
    kernels=(*KERNELS, KERNEL),
    torch_ops=(QUANTIZE, DEQUANTIZE, SWIZZLE),
)  # fmt: skip
