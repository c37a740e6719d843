"""How an operator that works on rows quantises its result: ``Quant``, the memory it needs, and the same in plain torch.

The device code is ``common/row_output.cuh``. Scales multiply codes, and quantised values are those of fp32, before any
rounding to the dtype of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.shared.block_formats import divided, encode_nvfp4, swizzle, swizzled_bytes
from rtkernels.ops.shared.constants import constant
from rtkernels.runtime.checks import spell
from rtkernels.runtime.launch.memory import new_tensor
from rtkernels.runtime.layout import as_rows, check_same, overlaps_itself, row_count
from rtkernels.runtime.operator.aliasing import refuse_shared
from rtkernels.runtime.operator.arguments import check_number

BLOCK, NVFP4_BLOCK = 128, 16
NVFP4_MAX = 6.0 * 448.0
CODE_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
KINDS = ("none", "tensor", "row", "block128", "nvfp4")


class Quant(NamedTuple):
    """How a function quantises its result.

    Attributes:
        dtype: torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, or ``"nvfp4"``.
        scale: The scale: a number, or one float32 element on the device, which the host never reads. Default: computed
            from the largest finite magnitude of the result, and returned. For "nvfp4" it is the global scale, in
            addition to those of blocks; 1.0 for none.
        granularity: Which values share a scale: ``"tensor"``, ``"row"`` or ``"block128"`` (128 columns of a row).
            "nvfp4" always has blocks of 16.
        swizzled: For "nvfp4": store scales in blocks of 128 x 4 (:func:`rtkernels.nvfp4_swizzle`).
        floor: Lower limit of the scales of "tensor" and "row"; 0 for none.
    """

    dtype: torch.dtype | str = torch.float8_e4m3fn
    scale: Tensor | float | None = None
    granularity: str = "tensor"
    swizzled: bool = False
    floor: float = 1e-12


class Wanted(NamedTuple):
    """A ``Quant`` as operators take it."""

    kind: str  # of KINDS
    dtype: torch.dtype  # of the codes
    scale: Tensor | None
    static: float  # the scale as a number, or 0
    swizzled: bool
    floor: float

    @property
    def dynamic(self) -> bool:
        """True if one scale for the whole tensor comes from the data."""
        return self.kind in ("tensor", "nvfp4") and self.scale is None and self.static == 0


def wanted(quant: Any, dtype: torch.dtype) -> Wanted:
    """Return a `quant` option (None: results of `dtype`) as operators take it, or raise an ArgumentError."""
    if quant is None:
        return Wanted("none", dtype, None, 0.0, False, 0.0)
    if isinstance(quant, torch.dtype | str):
        quant = Quant(quant)
    if not isinstance(quant, Quant):
        raise ArgumentError(f"quant is a {type(quant).__name__}; expected rtkernels.Quant, a dtype, 'nvfp4' or None")
    kind, codes = quant.granularity, quant.dtype
    if codes == "nvfp4":
        if kind not in ("tensor", "block16"):
            raise ArgumentError(f"quant.granularity is {kind!r}; expected 'block16' for 'nvfp4'")
        kind, codes = "nvfp4", torch.uint8
    elif codes not in CODE_MAX:
        raise ArgumentError(f"quant.dtype is {codes!r}; expected one of {', '.join(map(str, CODE_MAX))} or 'nvfp4'")
    elif kind not in ("tensor", "row", "block128"):
        raise ArgumentError(f"quant.granularity is {kind!r}; expected 'tensor', 'row' or 'block128'")
    if quant.swizzled and kind != "nvfp4":
        raise ArgumentError("quant.swizzled is True; expected False unless quant.dtype is 'nvfp4'")
    floor, scale, static = float(check_number("quant.floor", quant.floor)), quant.scale, 0.0
    if not 0 <= floor < inf:
        raise ArgumentError(f"quant.floor is {quant.floor}; expected a number that is not negative")
    if scale is not None and kind in ("row", "block128"):
        raise ArgumentError(f"quant.scale is given; expected None for granularity {kind!r}, which computes scales")
    if isinstance(scale, Tensor):
        scale = scale.detach()
        if scale.dtype != torch.float32 or scale.numel() != 1:
            raise ArgumentError(f"quant.scale is {scale.dtype} {tuple(scale.shape)}; expected one float32 element")
        scale = scale.reshape(1)
    elif scale is not None:
        static = float(check_number("quant.scale", scale))
        if not 0 <= static < inf or max(static, floor) == 0:
            raise ArgumentError(f"quant.scale is {static}; expected a number above 0")
        static, scale = max(static, floor), None
    return Wanted(kind, codes, scale, static, bool(quant.swizzled), floor)


def result_shapes(
    want: Wanted, shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], torch.dtype] | None]:
    """Return the shape of the codes, and shape and dtype of the scales (None for none)."""
    *outer, cols = shape
    if want.kind == "nvfp4":
        if cols % 2:
            raise ArgumentError(f"the result has {cols} columns; expected a multiple of 2 for 'nvfp4', two in a byte")
        blocks = -(-cols // NVFP4_BLOCK)
        scales = (swizzled_bytes(row_count(shape), blocks),) if want.swizzled else (*outer, blocks)
        return (*outer, cols // 2), (scales, torch.float8_e4m3fn)
    if want.kind == "row":
        return tuple(shape), (tuple(outer), torch.float32)
    if want.kind == "block128":
        return tuple(shape), ((*outer, -(-cols // BLOCK)), torch.float32)
    return tuple(shape), ((), torch.float32) if want.kind == "tensor" and want.dynamic else None


def check_results(
    shape: Sequence[int], quant: str, swizzled: bool, given_scale: bool, out: Any, scale_out: Any, global_out: Any,
    kept: Any = None,
) -> None:  # fmt: skip
    """Raise an ArgumentError unless memory that an operator is given for its results has their shapes.

    Args:
        shape: Of the result before it is quantised.
        quant: One of ``KINDS``.
        swizzled: As for ``Quant``.
        given_scale: The scale of the whole tensor is an argument, not a result.
        out: Metas of the memory, as the operator has them, or None.
        scale_out: See `out`.
        global_out: See `out`.
        kept: See `out`; the result before it is quantised.
    """
    want = Wanted(quant, out.dtype, None, float(given_scale), swizzled, 0.0)
    codes, scales = result_shapes(want, shape)
    check_same("out", tuple(out.shape), tuple(codes), "shape", of="the result")
    if kept is not None:
        check_same("kept", tuple(kept.shape), tuple(shape), "shape", of="the result")
    if scales is not None:
        if scale_out is None:
            raise ArgumentError(f"scale_out is None; expected {scales[1]} {scales[0]} for quant {quant!r}")
        check_same("scale_out", tuple(scale_out.shape), tuple(scales[0]), "shape", of="the scales")
        check_same("scale_out", scale_out.dtype, scales[1], "dtype", of="the scales")
    if quant == "nvfp4" and not given_scale:
        if global_out is None or global_out.dtype != torch.float32 or global_out.numel() != 1:
            raise ArgumentError("global_out is no float32 element; expected one for quant 'nvfp4' without a scale")


def memory_for(
    name: str, given: Tensor | None, shape: Sequence[int], dtype: torch.dtype, like: Tensor,
    inputs: dict[str, Tensor | None], same: Sequence[str] = (),
) -> Tensor:  # fmt: skip
    """Return memory for a result: the caller's after checking it, or new memory.

    Args:
        name: Of the argument.
        given: What the caller gave, or None.
        shape: That the result has.
        dtype: That the result has.
        like: A tensor on the device.
        inputs: Tensors that it must not overlap, by name.
        same: Names of inputs that it may be, exactly.
    """
    if given is None:
        return new_tensor(tuple(shape), dtype, like)
    if not isinstance(given, Tensor):
        raise ArgumentError(f"{name} is a {type(given).__name__}; expected a torch.Tensor or None")
    if given.dtype != dtype:
        raise ArgumentError(f"{name} has dtype {spell(given.dtype)}; expected {spell(dtype)}")
    if tuple(given.shape) != tuple(shape):
        raise ArgumentError(f"{name} has shape {tuple(given.shape)}; expected {tuple(shape)}")
    if given.device != like.device:
        raise ArgumentError(f"{name} is on {given.device}; expected {like.device}")
    if given.numel() == 0:
        return given
    if overlaps_itself(given.shape, given.stride()):
        raise ArgumentError(f"{name} has strides {given.stride()}; expected memory of its own for every element")
    if not given.is_contiguous():
        raise ArgumentError(f"{name} has strides {given.stride()}; expected a contiguous tensor")
    refuse_shared(name, given, inputs.items(), same)
    return given


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def finite_amax(y: Tensor, dim: int | None = None) -> Tensor:
    """Return the largest finite magnitude of all elements, or along a dimension; 0 where there is none."""
    magnitude = torch.where(y.isfinite(), y, 0.0).abs()
    if dim is not None:
        return magnitude.amax(dim) if y.shape[dim] else magnitude.sum(dim)
    return magnitude.amax() if y.numel() else magnitude.sum()


def codes_of(y: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``y * inverse`` as codes: saturated, NaN kept (0 for int8)."""
    scaled = y * inverse
    if dtype == torch.int8:
        return scaled.nan_to_num(0.0, 127.0, -127.0).round().clamp(-127, 127).to(torch.int8)
    return scaled.clamp(-CODE_MAX[dtype], CODE_MAX[dtype]).to(dtype)


def quantize_reference(
    y: Tensor, want_kind: str, out: Tensor, scale: Tensor | None, scale_out: Tensor | None, global_out: Tensor | None,
    swizzled: bool, static: float, floor: float,
) -> None:  # fmt: skip
    """Write the float32 rows `y` as codes of `out`'s dtype, and the scales."""
    if want_kind == "none":
        out.copy_(y)
        return
    if want_kind == "nvfp4":
        if scale is None and static == 0:
            amax = finite_amax(y)
            g = torch.where(amax > 0, divided(amax, NVFP4_MAX), torch.ones_like(amax))
            global_out.copy_(g)
        else:
            g = constant(static, torch.float32, y.device) if scale is None else scale.reshape(())
        packed, bytes_ = encode_nvfp4(y, g, "rne", "rne")
        out.copy_(packed)
        if swizzled:
            bytes_ = swizzle(as_rows(bytes_))
        scale_out.view(torch.uint8).copy_(bytes_.view(torch.uint8).reshape(scale_out.shape))
        return
    limit = CODE_MAX[out.dtype]
    if want_kind == "tensor":
        if scale is None and static == 0:
            s = divided(finite_amax(y), limit).clamp_min(floor)
            scale_out.copy_(s)
        else:
            s = constant(static, torch.float32, y.device) if scale is None else scale.reshape(()).clamp_min(floor)
        out.copy_(codes_of(y, 1.0 / s, out.dtype))
        return
    if want_kind == "row":
        s = divided(finite_amax(y, -1), limit).clamp_min(floor)
        scale_out.copy_(s)
        out.copy_(codes_of(y, (1.0 / s).unsqueeze(-1), out.dtype))
        return
    cols = y.shape[-1]
    padded = torch.nn.functional.pad(y, (0, -cols % BLOCK)).unflatten(-1, (-1, BLOCK))
    s = divided(finite_amax(padded, -1), limit).clamp_min(floor)
    scale_out.copy_(s)
    out.copy_(codes_of(padded, (1.0 / s).unsqueeze(-1), out.dtype).flatten(-2)[..., :cols])
