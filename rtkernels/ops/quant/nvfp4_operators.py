"""Operators of the 4-bit and 8-bit block formats: checks, and references in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.quant.nvfp4_plan import FORMATS, plan_dequantize, plan_quantize, scale_block
from rtkernels.ops.shared import block_formats as formats
from rtkernels.ops.shared.block_formats import ELEMENT_RULES, SCALE_RULES
from rtkernels.ops.shared.constants import constant
from rtkernels.ops.shared.fp8_layout import check_option
from rtkernels.ops.shared.row_quant import NVFP4_MAX, finite_amax
from rtkernels.runtime.layout import check_same, row_count, token
from rtkernels.runtime.operator.declared import Argument, Dense, InPlaceAligned, InPlaceExact, Meta, Operator, Rows

MX_RULES = ("ocp", "nv")
CODES = {"mxfp8": (torch.float8_e4m3fn, torch.float8_e5m2), "mxfp4": (torch.uint8,), "nvfp4": (torch.uint8,)}
_SCALES = {"mxfp8": torch.float8_e8m0fnu, "mxfp4": torch.float8_e8m0fnu, "nvfp4": torch.float8_e4m3fn}


def scale_shape(shape: tuple[int, ...], block: int, swizzled: bool) -> tuple[int, ...]:
    """Return the shape of the scales, one per `block` values."""
    blocks = -(-shape[-1] // block)
    return (formats.swizzled_bytes(row_count(shape), blocks),) if swizzled else (*shape[:-1], blocks)


def _check_global(scale: Meta | None) -> None:
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1):
        raise ArgumentError(f"global_scale is {scale.dtype} {tuple(scale.shape)}; expected one float32 element")


def _check_quantize(
    x: Meta, global_scale: Meta | None, channel_scale: Meta | None, out: Meta, scale_out: Meta, format: str,
    swizzled: bool, scale_rule: str, elem_rule: str,
) -> None:  # fmt: skip
    check_option("format", format, tuple(FORMATS))
    if not x.shape:
        raise ArgumentError("x has no dimensions; expected at least one, the last is quantised")
    if format != "mxfp8" and x.shape[-1] % 2:
        raise ArgumentError(f"x has {x.shape[-1]} columns; expected a multiple of 2, two codes in a byte")
    if format == "nvfp4":
        check_option("scale_rule", scale_rule, SCALE_RULES)
    else:
        check_option("rule", scale_rule, MX_RULES)
    check_option("elem_rule", elem_rule, ELEMENT_RULES if format == "nvfp4" else ("rne",))
    shape = tuple(x.shape) if format == "mxfp8" else (*x.shape[:-1], x.shape[-1] // 2)
    if out.dtype not in CODES[format] or tuple(out.shape) != shape:
        raise ArgumentError(f"out is {out.dtype} {tuple(out.shape)}; expected {CODES[format][0]} {shape}")
    shape = scale_shape(tuple(x.shape), scale_block(format), swizzled)
    if scale_out.dtype != _SCALES[format] or tuple(scale_out.shape) != shape:
        raise ArgumentError(
            f"scale_out is {scale_out.dtype} {tuple(scale_out.shape)}; expected {_SCALES[format]} {shape}"
        )
    _check_global(global_scale)
    if channel_scale is not None:
        token("channel_scale", channel_scale.dtype, (x.dtype, torch.float32))
        check_same("channel_scale", tuple(channel_scale.shape), (x.shape[-1],), "shape", of="a row of x")


def _reference_quantize(
    x: Tensor, global_scale: Tensor | None, channel_scale: Tensor | None, out: Tensor, scale_out: Tensor,
    global_out: Tensor | None, format: str, swizzled: bool, scale_rule: str, elem_rule: str, static: float,
) -> None:  # fmt: skip
    y = x.float() if channel_scale is None else x.float() * channel_scale.float()
    if format == "nvfp4":
        if global_out is not None:
            amax = finite_amax(y)
            found = torch.where(amax > 0, formats.divided(amax, NVFP4_MAX), torch.ones_like(amax))
            global_scale = global_out.copy_(torch.full_like(found, static) if static else found)
        g = constant(static, torch.float32, x.device) if global_scale is None else global_scale.reshape(())
        codes, scale = formats.encode_nvfp4(y, g, scale_rule, elem_rule)
    else:
        codes, scale = formats.encode_mx(y, out.dtype, scale_rule)
    out.copy_(codes)
    if swizzled:
        scale = formats.swizzle(scale.reshape(row_count(x.shape), -1) if scale.numel() else scale.new_empty(0, 0))
    scale_out.view(torch.uint8).copy_(scale.view(torch.uint8).reshape(scale_out.shape))


QUANTIZE = Operator(
    "quantize_blocks",
    (
        Rows("x"), Argument("global_scale", None, optional=True), Dense("channel_scale", None, optional=True),
        InPlaceAligned("out", None), InPlaceAligned("scale_out", None), InPlaceExact("global_out", None, optional=True),
    ),
    options="str format, bool swizzled, str scale_rule, str elem_rule, float static",
    results="", plan=plan_quantize, reference=_reference_quantize, check=_check_quantize,
)  # fmt: skip


def _check_dequantize(
    codes: Meta, scales: Meta, global_scale: Meta | None, out: Meta, format: str, swizzled: bool
) -> None:
    check_option("format", format, tuple(FORMATS))
    token("out", out.dtype)
    accepted = (*CODES[format], torch.uint8)
    if codes.dtype not in accepted or not codes.shape:
        name = "codes" if format == "mxfp8" else "packed"
        raise ArgumentError(f"{name} is {codes.dtype} {tuple(codes.shape)}; expected {accepted[0]} [..., bytes]")
    shape = (*codes.shape[:-1], codes.shape[-1] * (1 if format == "mxfp8" else 2))
    check_same("out", tuple(out.shape), shape, "shape", of="codes")
    shape = scale_shape(shape, scale_block(format), swizzled)
    if scales.dtype not in (_SCALES[format], torch.uint8) or tuple(scales.shape) != shape:
        raise ArgumentError(f"scales is {scales.dtype} {tuple(scales.shape)}; expected {_SCALES[format]} {shape}")
    _check_global(global_scale)


def _reference_dequantize(
    codes: Tensor, scales: Tensor, global_scale: Tensor | None, out: Tensor, format: str, swizzled: bool
) -> None:
    if out.numel() == 0:
        return
    block = scale_block(format)
    if swizzled:
        scales = formats.unswizzle(scales, row_count(out.shape), -(-out.shape[-1] // block))
    scales = scales.reshape(*out.shape[:-1], -1)
    steps = formats.decode_e4m3(scales) if format == "nvfp4" else formats.decode_e8m0(scales)
    if global_scale is not None:
        steps = steps * global_scale.reshape(())
    values = codes.float() if format == "mxfp8" else formats.decode_e2m1(codes)
    out.copy_(values * steps.repeat_interleave(block, -1)[..., : out.shape[-1]])


DEQUANTIZE = Operator(
    "dequantize_blocks",
    (
        Rows("codes", None), Dense("scales", None), Argument("global_scale", None, optional=True),
        InPlaceExact("out", None),
    ),
    options="str format, bool swizzled",
    results="", plan=plan_dequantize, reference=_reference_dequantize, check=_check_dequantize,
)  # fmt: skip
