"""``glu`` with its options from layout on: layouts, channel factors, quantised results, NVFP4 inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.act.combine import COMBINE
from rtkernels.ops.act.glu_nvfp4 import GLU
from rtkernels.ops.act.glu_plan import ACT_TYPES
from rtkernels.ops.shared.fp8_layout import check_option
from rtkernels.ops.shared.row_quant import Wanted, memory_for, result_shapes, wanted
from rtkernels.runtime.checks import check_dimensions
from rtkernels.runtime.layout import check_same, token
from rtkernels.runtime.operator.arguments import check_number
from rtkernels.runtime.operator.autograd import detached


class GluOut(NamedTuple):
    """Results of ``glu`` with ``quant``; None for results that were not requested.

    Attributes:
        out: The codes.
        scale: The scales of the codes, computed or given.
        kept: The values before quantisation, in x's dtype.
        global_scale: For "nvfp4": the scale of the whole tensor.
    """

    out: Tensor
    scale: Tensor | float | None = None
    kept: Tensor | None = None
    global_scale: Tensor | float | None = None


class _Results(NamedTuple):
    """Memory of results; None for those that are not computed."""

    out: Tensor
    scale: Tensor | None
    global_scale: Tensor | None
    kept: Tensor | None

    def returned(self, want: Wanted, quant: Any) -> Tensor | GluOut:
        """Return what ``glu`` returns."""
        if self.scale is None and self.kept is None:
            return self.out
        given = quant.scale if hasattr(quant, "scale") else None
        if want.kind == "nvfp4":
            return GluOut(self.out, self.scale, self.kept, given if self.global_scale is None else self.global_scale)
        return GluOut(self.out, given if self.scale is None else self.scale, self.kept)


def _results(
    want: Wanted, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor, inputs: dict[str, Tensor | None],
    keep: bool, out: Tensor | None, scale_out: Tensor | None, same: tuple[str, ...] = (),
) -> _Results:  # fmt: skip
    code_shape, scales = result_shapes(want, shape)
    result = memory_for("out", out, code_shape, want.dtype, like, inputs, same)
    result_scale = result_global = None
    if scales is not None:
        result_scale = memory_for("scale_out", scale_out, *scales, like, {**inputs, "out": result})
    elif scale_out is not None:
        raise ArgumentError("scale_out is given; expected None if no scale is computed")
    if want.kind == "nvfp4" and want.dynamic:
        result_global = torch.empty((), dtype=torch.float32, device=like.device)
    kept = torch.empty(shape, dtype=dtype, device=like.device) if keep else None
    return _Results(result, result_scale, result_global, kept)


def glu_of_codes(
    x: Any, up: Any, act: str, *, layout: str, channel_scale: Tensor | None, quant: Any, keep: bool,
    out: Tensor | None, scale_out: Tensor | None,
) -> Tensor | GluOut:  # fmt: skip
    """``glu`` of gate and up in NVFP4: ``(codes, scales)`` or ``(codes, scales, global scale)``.

    Exact until the result. Scales of one dimension are swizzled ones.
    """
    given: list[Any] = []
    for name, pair in (("x", x), ("up", up)):
        good = isinstance(pair, tuple) and len(pair) in (2, 3) and all(isinstance(t, Tensor) for t in pair[:2])
        if not good:
            raise ArgumentError(f"{name} is {type(pair).__name__}; expected (codes, scales[, global scale]) of NVFP4")
        codes, scales, *rest = pair
        check_dimensions(f"{name}[0]", codes.shape)
        number = rest[0] if rest else None
        if number is not None and not isinstance(number, Tensor):
            number = torch.full((), float(check_number(f"{name}[2]", number)), dtype=torch.float32, device=codes.device)
        given += detached(codes if codes.dtype == torch.uint8 else codes.view(torch.uint8), scales, number)
    check_option("layout", layout, ("concat",))
    shape = (*given[0].shape[:-1], 2 * given[0].shape[-1])
    factors = _checked_factors(channel_scale, shape[-1])
    if factors is not None and factors.dtype == torch.float16:
        factors = factors.float()
    if keep and quant is None:
        raise ArgumentError("keep is True; expected False without quant: the result is what would be kept")
    want = wanted(quant, torch.float32)
    inputs = dict(zip(("x[0]", "x[1]", "x[2]", "up[0]", "up[1]", "up[2]"), given, strict=True))
    results = _results(want, shape, torch.float32, given[0], inputs, keep, out, scale_out)
    GLU(
        *given, factors, want.scale, results.out, results.kept, results.scale, results.global_scale, act, want.kind,
        want.swizzled, want.static, want.floor,
    )  # fmt: skip
    return results.returned(want, quant)


def _checked_factors(channel_scale: Tensor | None, cols: int) -> Tensor | None:
    if channel_scale is None:
        return None
    if tuple(channel_scale.shape) != (cols,):
        raise ArgumentError(f"channel_scale has shape {tuple(channel_scale.shape)}; expected ({cols},)")
    return channel_scale.detach()


def check_combined(
    x: Tensor, up: Tensor | None, act: str, layout: str, channel_scale: Tensor | None, quant: Any, keep: bool
) -> None:
    """Raise an ArgumentError for arguments of ``glu_combined`` that do not fit together."""
    check_option("act", act, tuple(ACT_TYPES))
    check_option("layout", layout, ("concat", "interleaved"))
    token("x", x.dtype)
    if not x.dim():
        raise ArgumentError("x has no dimensions; expected at least one, the last for gate (and up)")
    if up is None and x.shape[-1] % 2:
        raise ArgumentError(f"x has an odd last dimension, {x.shape[-1]}; expected gate and up of equal size, or up=")
    if up is not None:
        if layout != "concat":
            raise ArgumentError("up is given; expected None with layout 'interleaved', which has up in x")
        check_same("up", up.dtype, x.dtype, "dtype")
        check_same("up", up.shape, x.shape, "shape")
    if keep and quant is None:
        raise ArgumentError("keep is True; expected False without quant: the result is what would be kept")
    _checked_factors(channel_scale, _shape_of(x, up)[-1])


def _shape_of(x: Tensor, up: Tensor | None) -> tuple[int, ...]:
    return tuple(x.shape) if up is not None else (*x.shape[:-1], x.shape[-1] // 2)


def glu_combined(
    x: Tensor, up: Tensor | None, *, act: str, layout: str, channel_scale: Tensor | None, quant: Any, keep: bool,
    out: Tensor | None, scale_out: Tensor | None,
) -> Tensor | GluOut:  # fmt: skip
    """``glu`` with any of these options, checked by ``check_combined``, without a gradient; see there."""
    want = wanted(quant, x.dtype)
    inputs = dict(zip(("x", "up", "channel_scale"), detached(x, up, channel_scale), strict=True))
    same = ("x", "up") if up is not None else ()
    results = _results(want, _shape_of(x, up), x.dtype, x, inputs, keep, out, scale_out, same)
    factors = None if channel_scale is None else inputs["channel_scale"].reshape(1, -1)
    way = "plain" if up is not None else layout
    COMBINE(
        inputs["x"], None, None, inputs["up"], factors, None, None, want.scale, None, results.out, results.kept,
        results.scale, results.global_scale, act, False, False, way, "", want.kind, want.swizzled, want.static,
        want.floor, 1.0,
    )  # fmt: skip
    return results.returned(want, quant)
