"""``glu`` with the options of inference: layouts, factors of channels, quantised results, NVFP4 inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.act.combine import COMBINE
from rtkernels.ops.act.glu_plan import ACT_TYPES
from rtkernels.ops.quant.nvfp4 import dequantize_nvfp4
from rtkernels.ops.shared.fp8_layout import check_option
from rtkernels.ops.shared.row_quant import memory_for, result_shapes, wanted
from rtkernels.runtime.layout import check_same, token
from rtkernels.runtime.operator.autograd import detached
from rtkernels.runtime.operator.recorded import refuse_outputs


class GluOut(NamedTuple):
    """Results of ``glu`` with ``quant``; None for what was not asked for.

    Attributes:
        out: The codes.
        scale: Their scales: those made, or what was given.
        kept: What the codes stand for, in x's dtype.
        global_scale: Of "nvfp4": the scale of the whole tensor.
    """

    out: Tensor
    scale: Tensor | float | None = None
    kept: Tensor | None = None
    global_scale: Tensor | float | None = None


def glu_of_codes(x: Any, up: Any, act: str, **options: Any) -> Tensor | GluOut:
    """``glu`` of gate and up in NVFP4: ``(codes, scales)`` or ``(codes, scales, global scale)``.

    Exact until the result. Scales of one dimension are swizzled ones.
    """
    values = []
    for name, given in (("x", x), ("up", up)):
        pair = isinstance(given, tuple) and len(given) in (2, 3) and all(isinstance(t, Tensor) for t in given[:2])
        if not pair:
            raise ArgumentError(f"{name} is {type(given).__name__}; expected (codes, scales[, global scale]) of NVFP4")
        codes, scales, *rest = given
        swizzled = scales.dim() == 1 and codes.dim() > 1
        values.append(dequantize_nvfp4(codes, scales, *rest, swizzled=swizzled, dtype=torch.float32))
    return glu_combined(*values, act=act, **options)


def glu_combined(
    x: Tensor, up: Tensor | None, *, act: str, layout: str, channel_scale: Tensor | None, quant: Any, keep: bool,
    out: Tensor | None, scale_out: Tensor | None,
) -> Tensor | GluOut:  # fmt: skip
    """``glu`` with any of these options; see there."""
    check_option("act", act, tuple(ACT_TYPES))
    check_option("layout", layout, ("concat", "interleaved"))
    token("x", x.dtype)
    if not x.dim():
        raise ArgumentError("x has no dimensions; expected at least one, the last holds gate (and up)")
    if up is None and x.shape[-1] % 2:
        raise ArgumentError(f"x has an odd last dimension, {x.shape[-1]}; expected gate and up of equal size, or up=")
    if up is not None:
        if layout != "concat":
            raise ArgumentError("up is given; expected None with layout 'interleaved', whose up is in x")
        check_same("up", up.dtype, x.dtype, "dtype")
        check_same("up", up.shape, x.shape, "shape")
    if keep and quant is None:
        raise ArgumentError("keep is True; expected False without quant: the result is what would be kept")
    shape = tuple(x.shape) if up is not None else (*x.shape[:-1], x.shape[-1] // 2)
    if channel_scale is not None and tuple(channel_scale.shape) != (shape[-1],):
        raise ArgumentError(f"channel_scale has shape {tuple(channel_scale.shape)}; expected ({shape[-1]},)")
    inputs = {"x": x, "up": up, "channel_scale": channel_scale}
    if is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs.values()):
        return _with_gradient(x, up, act, layout, channel_scale, quant, out, scale_out)
    want = wanted(quant, x.dtype)
    inputs = dict(zip(inputs, detached(*inputs.values()), strict=True))
    code_shape, scales = result_shapes(want, shape)
    made = memory_for("out", out, code_shape, want.dtype, x, inputs, ("x", "up") if up is not None else ())
    made_scale = made_global = None
    if scales is not None:
        made_scale = memory_for("scale_out", scale_out, *scales, x, {**inputs, "out": made})
    elif scale_out is not None:
        raise ArgumentError("scale_out is given; expected None where no scale is made")
    if want.kind == "nvfp4" and want.dynamic:
        made_global = torch.empty((), dtype=torch.float32, device=x.device)
    kept = torch.empty(shape, dtype=x.dtype, device=x.device) if keep else None
    factors = None if channel_scale is None else inputs["channel_scale"].reshape(1, -1)
    way = "plain" if up is not None else layout
    COMBINE(
        inputs["x"], None, None, inputs["up"], factors, None, None, want.scale, None, made, kept, made_scale,
        made_global, act, False, False, way, "", want.kind, want.swizzled, want.static, want.floor, 1.0,
    )  # fmt: skip
    if made_scale is None and not keep:
        return made
    given = quant.scale if hasattr(quant, "scale") else None
    if want.kind == "nvfp4":
        return GluOut(made, made_scale, kept, given if made_global is None else made_global)
    return GluOut(made, given if made_scale is None else made_scale, kept)


def _with_gradient(x, up, act, layout, channel_scale, quant, out, scale_out) -> Tensor:
    from rtkernels.ops.act.glu import glu

    if quant is not None:
        raise ArgumentError(
            "quant is given but a tensor needs gradients; expected torch.no_grad() around the call, detached tensors, "
            "or no quant"
        )
    refuse_outputs(out=out, scale_out=scale_out)
    if layout == "interleaved":
        x, up = x[..., 0::2], x[..., 1::2]
    y = glu(x, up, act=act)
    return y if channel_scale is None else y * channel_scale.to(y.dtype)
