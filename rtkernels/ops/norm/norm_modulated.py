"""``rms_norm`` and ``layer_norm`` of inference, with residual, gate, modulation and quantisation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.norm.norm_modulated_gradient import differentiable
from rtkernels.ops.norm.norm_modulated_operators import FORWARD
from rtkernels.ops.norm.norm_modulated_plan import KERNELS
from rtkernels.ops.shared.row_operands import by_rows
from rtkernels.ops.shared.row_quant import memory_for, result_shapes, wanted
from rtkernels.runtime.launch.memory import new_tensor
from rtkernels.runtime.layout import token
from rtkernels.runtime.operator.arguments import check_number
from rtkernels.runtime.operator.autograd import detached
from rtkernels.runtime.operator.registry import Op


class NormOut(NamedTuple):
    """Results of a normalisation; None for results that were not requested.

    Attributes:
        out: The normalised rows, or their codes.
        residual: ``residual + gate * (x + bias)``, rounded.
        gate: The third part of `style`, a view of it.
        kept: The values before quantisation, in x's dtype.
        scale: The scales of the codes, computed or given.
        global_scale: For "nvfp4": the scale of the whole tensor.
    """

    out: Tensor
    residual: Tensor | None = None
    gate: Tensor | None = None
    kept: Tensor | None = None
    scale: Tensor | float | None = None
    global_scale: Tensor | float | None = None


def split_style(style: Tensor, x: Tensor, scale: Tensor | None, shift: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale, shift and gate, the thirds of a style's rows."""
    if scale is not None or shift is not None:
        raise ArgumentError("style is given together with scale or shift; expected one or the other")
    if not isinstance(style, Tensor):
        raise ArgumentError(f"style is a {type(style).__name__}; expected a torch.Tensor or None")
    cols = x.shape[-1]
    if not style.dim() or style.shape[-1] != 3 * cols:
        raise ArgumentError(
            f"style has shape {tuple(style.shape)}; expected {3 * cols} columns, three times those of x: scale, shift "
            f"and gate"
        )
    return style.split(cols, -1)


def normalize(
    x: Tensor, weight: Tensor | None, norm_bias: Tensor | None, *, eps: float, offset: float, centred: bool,
    residual: Tensor | None, gate: Tensor | None, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None,
    style: Tensor | None, channel_scale: Tensor | None, quant: Any, keep: bool,
    residual_out: Tensor | None, scale_out: Tensor | None,
) -> Tensor | NormOut:  # fmt: skip
    """Normalise with any of the options from gate on; see ``rms_norm``."""
    next_gate = None
    token("x", x.dtype)
    if not x.dim():
        raise ArgumentError("x has no dimensions; expected at least one, the last is normalised")
    if style is not None:
        scale, shift, next_gate = split_style(style, x, scale, shift)
    if keep and quant is None:
        raise ArgumentError("keep is True; expected False without quant: the result is what would be kept")
    if residual is None and residual_out is not None and gate is None and bias is None:
        raise ArgumentError("residual_out is given; expected None without residual, gate or bias: it would be x")
    shape = tuple(x.shape)
    eps, offset = float(check_number("eps", eps)), float(check_number("offset", offset))
    gate, scale, shift = (by_rows(n, t, shape) for n, t in (("gate", gate), ("scale", scale), ("shift", shift)))
    operands = {
        "x": x, "residual": residual, "gate": gate, "bias": bias, "weight": weight, "norm_bias": norm_bias,
        "scale": scale, "shift": shift, "channel_scale": channel_scale,
    }  # fmt: skip
    for name, t in operands.items():
        if t is not None and not isinstance(t, Tensor):
            raise ArgumentError(f"{name} is a {type(t).__name__}; expected a torch.Tensor or None")
    outputs = {"residual_out": residual_out, "scale_out": scale_out}
    if is_grad_enabled() and any(t is not None and t.requires_grad for t in operands.values()):
        refuse_recorded(quant, outputs)
        y, h = differentiable([*operands.values()], eps, offset, centred)
        asked = residual is not None or gate is not None or bias is not None
        return NormOut(y, h if asked else None, next_gate) if asked or style is not None else y
    want = wanted(quant, x.dtype)
    operands = dict(zip(operands, detached(*operands.values()), strict=True))
    code_shape, scales = result_shapes(want, shape)
    result = new_tensor(tuple(code_shape), want.dtype, x)
    written = {"out": result}
    changed = residual is not None or gate is not None or bias is not None
    h_out = quant_scale = global_out = None
    if changed:
        h_out = memory_for("residual_out", residual_out, shape, x.dtype, x, {**operands, **written}, ("x", "residual"))
        written["residual_out"] = h_out
    if scales is not None:
        quant_scale = memory_for("scale_out", scale_out, *scales, x, {**operands, **written})
    elif scale_out is not None:
        raise ArgumentError("scale_out is given; expected None if no scale is computed")
    if want.kind == "nvfp4" and want.dynamic:
        global_out = torch.empty((), dtype=torch.float32, device=x.device)
    kept = torch.empty(shape, dtype=x.dtype, device=x.device) if keep else None
    FORWARD(
        *operands.values(), want.scale, result, h_out, kept, quant_scale, global_out, eps, offset, centred,
        want.kind, want.swizzled, want.static, want.floor,
    )  # fmt: skip
    given = None if quant is None or not hasattr(quant, "scale") else quant.scale
    if quant_scale is None and not changed and style is None and not keep:
        return result
    if want.kind == "nvfp4":
        return NormOut(result, h_out, next_gate, kept, quant_scale, given if global_out is None else global_out)
    return NormOut(result, h_out, next_gate, kept, given if quant_scale is None else quant_scale)


def refuse_recorded(quant: Any, outputs: dict[str, Tensor | None]) -> None:
    """Raise an ArgumentError for options that leave nothing to differentiate."""
    if quant is not None:
        raise ArgumentError(
            "quant is given but a tensor needs gradients; expected torch.no_grad() around the call, detached tensors, "
            "or no quant"
        )
    for name, t in outputs.items():
        if t is not None:
            raise ArgumentError(
                f"{name} is given but a tensor needs gradients; expected torch.no_grad() around the call, detached "
                f"tensors, or no {name}"
            )


OP = Op("norm_modulated", public=(), kernels=KERNELS, torch_ops=(FORWARD,))
