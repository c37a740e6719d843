"""Operators of rows: softmax, log_softmax, layer, group, batch and weight norms, with gradients (family ``row``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.table import DTYPE, EMPTY, OPTION, NotHandled, Overload, has_cuda_kernel, refused_rows
from rtkernels.ops.reduce import batch_norm, group_norm_plan, row_norm, weight_norm
from rtkernels.ops.reduce.softmax_columns import softmax_columns, softmax_columns_grad
from rtkernels.ops.reduce.softmax_plan import plan_as_torch
from rtkernels.ops.shared.strided import FLOATS
from rtkernels.runtime.operator.declared import Primitive, Rows
from rtkernels.runtime.operator.plan import Memory

_FIRST = NotHandled("not the first dimension")
_SOFTMAX = Primitive(
    "softmax_as_torch", (Rows("x"),), "scale, log", numbers="scale", results="y",
    outputs=lambda x: (Memory(x.shape, x.dtype),), plan=plan_as_torch,
)  # fmt: skip


def _columns(x: Tensor, dim: int) -> Tensor:
    """Return x as (outer, n, inner) around a dimension that is not the last."""
    dim %= x.dim()
    return x.reshape(math.prod(x.shape[:dim]), x.shape[dim], -1)


def _softmax(log: bool) -> Callable[..., Any]:
    def handler(x: Tensor, dim: int, half_to_float: bool) -> Any:
        if half_to_float or (refused := refused_rows(x, dim, FLOATS)) is not None:
            return OPTION if half_to_float else refused
        if dim in (-1, x.dim() - 1):
            return _SOFTMAX(x, 1.0, log)
        return softmax_columns(_columns(x, dim), log).view(x.shape)

    return handler


def _softmax_backward(log: bool) -> Callable[..., Any]:
    def handler(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Any:
        if input_dtype != output.dtype or grad_output.dtype != output.dtype:
            return OPTION
        if (refused := refused_rows(output, dim, FLOATS)) is not None:
            return refused
        if dim in (-1, output.dim() - 1):
            from rtkernels.ops.reduce.softmax import BACKWARD  # not before the first call: `enable` is to be quick

            return BACKWARD.launch(grad_output, output, None, 1.0, log)
        return softmax_columns_grad(_columns(grad_output, dim), _columns(output, dim), log).view(output.shape)

    return handler


def _norm_refused(x: Tensor, shape: Any, *parameters: Tensor | None) -> NotHandled | None:
    shape = tuple(shape)
    if x.dtype not in FLOATS or (
        not x.is_cuda and x.dtype != torch.float32
    ):  # on the CPU statistics have another dtype
        return DTYPE
    if x.numel() == 0:
        return EMPTY
    if not shape or x.shape[x.dim() - len(shape) :] != shape:
        return OPTION
    for parameter in parameters:
        if parameter is not None and (parameter.dtype != x.dtype or tuple(parameter.shape) != shape):
            return OPTION
    return None


def _layer_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    refused = _norm_refused(x, normalized_shape, weight, bias)
    return refused or row_norm.FORWARD(x, weight, bias, len(normalized_shape), True, eps)


def _layer_norm_backward(
    grad_out: Tensor, x: Tensor, normalized_shape: Any, mean: Tensor, rstd: Tensor, weight: Tensor | None,
    bias: Tensor | None, output_mask: Any,
) -> Any:  # fmt: skip
    refused = _norm_refused(x, normalized_shape, weight, bias)
    if refused is not None or grad_out.dtype != x.dtype or mean.dtype != torch.float32:
        return refused or DTYPE
    dx = dw = db = None
    over = len(normalized_shape)
    if output_mask[0]:
        dx = row_norm.BACKWARD(grad_out, x, weight, mean, rstd, over)
    if output_mask[1] or output_mask[2]:
        dw, db = row_norm.PARAMETERS(grad_out, x, mean, rstd, over, output_mask[2])
    return _wanted(output_mask, dx, dw, db)


def _wanted(mask: Any, dx: Tensor | None, dw: Tensor | None, db: Tensor | None) -> tuple[Tensor | None, ...]:
    return dx if mask[0] else None, dw if mask[1] else None, db if mask[2] else None


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None, eps: float | None) -> Any:
    refused = _norm_refused(x, normalized_shape, weight)
    if refused is not None or eps is None:
        return refused or OPTION
    y, _, rstd = row_norm.FORWARD(x, weight, None, len(normalized_shape), False, eps)
    return y, rstd


def _rms_norm_backward(
    grad_out: Tensor, x: Tensor, normalized_shape: Any, rstd: Tensor, weight: Tensor | None, output_mask: Any
) -> Any:
    refused = _norm_refused(x, normalized_shape, weight)
    if refused is not None or grad_out.dtype != x.dtype or rstd.dtype != torch.float32:
        return refused or DTYPE
    if output_mask[1] and weight is None:
        return OPTION  # torch raises
    over = len(normalized_shape)
    dx = row_norm.BACKWARD(grad_out, x, weight, None, rstd, over) if output_mask[0] else None
    return dx, row_norm.PARAMETERS(grad_out, x, None, rstd, over, False)[0] if output_mask[1] else None


def _groups_refused(x: Tensor, n: int, c: int, hxw: int, group: int, *parameters: Tensor | None) -> NotHandled | None:
    if x.dtype not in FLOATS:
        return DTYPE
    if x.numel() == 0:
        return EMPTY
    if x.numel() != n * c * hxw or group < 1 or c % group or c // group * hxw >= 2**31:
        return OPTION
    for parameter in parameters:
        if parameter is not None and (parameter.dtype != x.dtype or parameter.numel() != c):
            return OPTION
    return None


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, C: int, HxW: int, group: int, eps: float
) -> Any:
    if (refused := _groups_refused(x, N, C, HxW, group, weight, bias)) is not None:
        return refused
    if x.dim() > 3 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return OPTION  # torch keeps the format on the CPU
    y, mean, rstd = group_norm_plan.normalize(x.reshape(N, C, HxW), weight, bias, group, eps)
    return y.view(x.shape), mean, rstd


def _group_norm_backward(
    grad_out: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, N: int, C: int, HxW: int,
    group: int, output_mask: Any,
) -> Any:  # fmt: skip
    refused = _groups_refused(x, N, C, HxW, group, weight)
    if refused is not None or any(t.dtype != x.dtype for t in (grad_out, mean, rstd)):
        return refused or DTYPE
    wanted = output_mask[0], output_mask[1] or output_mask[2]
    given = (t.reshape(N, C, HxW) for t in (grad_out, x))
    dx, parameters = group_norm_plan.gradients(*given, weight, None, mean, rstd, group, wanted)
    dw, db = parameters or (None, None)
    return _wanted(output_mask, None if dx is None else dx.view(x.shape), dw, db)


def _channels_apart(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the order that makes x dense, the shape as (batch, channels, spatial) in it, and the order back."""
    last = x.dim()
    orders = tuple(range(last)), (0, *range(2, last), 1)
    if not x.is_contiguous() and x.permute(orders[1]).is_contiguous():
        return orders[1], (x.numel() // x.shape[1], x.shape[1], 1), (0, last - 1, *range(1, last - 1))
    return orders[0], (x.shape[0], x.shape[1], x.numel() // (x.shape[0] * x.shape[1])), orders[0]


def _channels_refused(x: Tensor, *parameters: Tensor | None) -> NotHandled | None:
    if x.dtype not in FLOATS or (not x.is_cuda and x.dtype != torch.float32):
        return DTYPE  # on the CPU statistics of halves have another dtype
    if x.numel() == 0:
        return EMPTY
    if x.dim() < 2 or x.numel() == x.shape[1]:
        return OPTION
    given = [p for p in parameters if p is not None]
    if len({p.dtype for p in given}) > 1 or any(p.dtype not in (x.dtype, torch.float32) for p in given):
        return DTYPE
    return None if all(p.shape == x.shape[1:2] and p.is_contiguous() for p in given) else OPTION


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> Any:  # fmt: skip
    if (refused := _channels_refused(x, weight, bias, running_mean, running_var)) is not None:
        return refused
    if (running_mean is None) != (running_var is None) or (running_mean is None and not training):
        return OPTION
    order, shape, back = _channels_apart(x)
    dense = x.permute(order).contiguous()
    y, mean, rstd = batch_norm.batch_norm(
        dense.view(shape), weight, bias, running_mean, running_var, training, momentum, eps
    )
    return y.view(dense.shape).permute(back), mean, rstd


def _batch_norm_backward(
    grad_out: Tensor, x: Tensor, weight: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    save_mean: Tensor | None, save_invstd: Tensor | None, train: bool, eps: float, output_mask: Any,
) -> Any:  # fmt: skip
    refused = _channels_refused(x, weight, running_mean, running_var)
    if refused is not None or grad_out.dtype != x.dtype:
        return refused or DTYPE
    if train:
        mean, rstd = save_mean, save_invstd
    else:
        mean, rstd = (
            (None, None) if running_var is None else (running_mean.float(), (running_var.float() + eps).rsqrt())
        )
    if mean is None or rstd is None or mean.dtype != torch.float32 or rstd.dtype != torch.float32:
        return OPTION
    order, shape, back = _channels_apart(x)
    dense, dy = x.permute(order).contiguous(), grad_out.permute(order).contiguous()
    wanted = output_mask[0], output_mask[1] or output_mask[2]
    dx, sums = batch_norm.batch_norm_grads(dy.view(shape), dense.view(shape), weight, mean, rstd, train, wanted)
    dw, db = (None, None) if sums is None else sums.to(x.dtype if weight is None else weight.dtype).unbind()
    return _wanted(output_mask, None if dx is None else dx.view(dense.shape).permute(back), dw, db)


def _weights_refused(v: Tensor, g: Tensor, dim: int, *norms: Tensor) -> NotHandled | None:
    if v.dtype not in FLOATS or g.dtype != v.dtype or any(n.dtype != torch.float32 for n in norms):
        return DTYPE
    if v.numel() == 0:
        return EMPTY
    if not v.is_cuda and v.dtype != torch.float32:
        return DTYPE  # on the CPU norms have another dtype
    return None if dim == 0 and v.dim() > 1 and g.numel() == v.shape[0] else _FIRST


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Any:
    if (refused := _weights_refused(v, g, dim)) is not None:
        return refused
    w, norms = weight_norm.weight_norm(v.reshape(v.shape[0], -1), g.reshape(-1))
    return w.view(v.shape), norms.view(g.shape)


def _weight_norm_backward(grad_w: Tensor, saved_v: Tensor, saved_g: Tensor, saved_norms: Tensor, dim: int) -> Any:
    refused = _weights_refused(saved_v, saved_g, dim, saved_norms)
    if refused is not None or grad_w.dtype != saved_v.dtype:
        return refused or DTYPE
    dw, v = (t.reshape(saved_v.shape[0], -1) for t in (grad_w, saved_v))
    dv, dg = weight_norm.weight_norm_grads(dw, v, saved_g.reshape(-1), saved_norms.reshape(-1))
    return dv.view(saved_v.shape), dg.view(saved_g.shape)


def rows() -> Iterator[Overload]:
    """Yield the overloads of this family."""
    for name, log in (("softmax", False), ("log_softmax", True)):
        yield Overload(f"_{name}", "row", _softmax(log), opinfo=(name,), replays=True)
        yield Overload(f"_{name}_backward_data", "row", _softmax_backward(log), opinfo=(name,), replays=True)
    opinfo = ("native_layer_norm", "nn.functional.layer_norm")
    yield Overload("native_layer_norm", "row", _layer_norm, opinfo=opinfo, replays=True)
    yield Overload("native_layer_norm_backward", "row", _layer_norm_backward, opinfo=opinfo, replays=True)
    opinfo = ("nn.functional.group_norm",)
    yield Overload("native_group_norm", "row", _group_norm, opinfo=opinfo, replays=True)
    yield Overload("native_group_norm_backward", "row", _group_norm_backward, opinfo=opinfo, replays=True)
    opinfo = ("nn.functional.batch_norm", "nn.functional.instance_norm")
    yield Overload("native_batch_norm", "row", _batch_norm, opinfo=opinfo)
    yield Overload("native_batch_norm_backward", "row", _batch_norm_backward, opinfo=opinfo)
    yield Overload("_weight_norm_interface", "row", _weight_norm, replays=True)
    yield Overload("_weight_norm_interface_backward", "row", _weight_norm_backward, replays=True)
    if has_cuda_kernel("_fused_rms_norm"):  # else a composite, not reached
        yield Overload("_fused_rms_norm", "row", _rms_norm, replays=True)
        yield Overload("_fused_rms_norm_backward", "row", _rms_norm_backward, replays=True)
