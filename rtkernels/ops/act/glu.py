"""Gated linear units, ``act(gate) * up``, with an optional weight per row, and their backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.act.glu_plan import (
    KERNELS,
    act_with_limit,
    check_bwd,
    check_fwd,
    plan_bwd,
    plan_fwd,
    result_shape,
    split_act,
)
from rtkernels.ops.act.glu_reference import gradients, halves, partner_and_slope, value_and_slope
from rtkernels.ops.shared.row_quant import Quant
from rtkernels.runtime.call.public import public
from rtkernels.runtime.layout import may_overlap, nothing
from rtkernels.runtime.operator import autograd
from rtkernels.runtime.operator.autograd import applied, needs_grad, once_differentiable, refuse_outputs
from rtkernels.runtime.operator.declared import Dense, InPlace, Operator, Rows
from rtkernels.runtime.operator.plan import Memory
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.operator.sharding import Way, shard


def _check_over(dy: Tensor, x: Tensor, up: Tensor | None, weight: Tensor | None, *options: Any) -> tuple[Any, ...]:
    for name, t in (("x", x), ("up", up)):
        if t is not None and not t.is_contiguous():
            raise ArgumentError(f"{name} has strides {t.stride()}; expected a dense tensor to write the gradient over")
    return dy, x, up, weight, *options


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _reference_fwd(x: Tensor, up: Tensor | None, weight: Tensor | None, act: str) -> Tensor:
    gate, up = halves(x, up)
    name, limit = split_act(act)
    y = value_and_slope(name, gate, limit)[0] * partner_and_slope(name, up, limit)[0]
    if weight is not None:
        y = y * weight.float().unsqueeze(-1)
    return y.to(x.dtype).contiguous()


def _reference_bwd(dy: Tensor, x: Tensor, up: Tensor | None, weight: Tensor | None, act: str, weight_grad: bool):
    name, limit = split_act(act)
    dx, dweight = gradients(dy, x, up, weight, name, weight_grad, limit)
    dx = dx.to(x.dtype)
    if up is None:
        return dx, nothing(x), dweight
    return *(half.contiguous() for half in dx.chunk(2, -1)), dweight


def _reference_bwd_over(
    dy: Tensor, x: Tensor, up: Tensor | None, weight: Tensor | None, act: str, weight_grad: bool
) -> Tensor:
    dgate, dup, dweight = _reference_bwd(dy, x, up, weight, act, weight_grad)
    x.copy_(dgate)
    if up is not None:
        up.copy_(dup)
    return dweight


_X, _UP = Rows("x", None), Rows("up", None, optional=True)
_DY, _WEIGHT = Rows("dy", None), Dense("weight", None, optional=True)
FORWARD = Operator(
    "glu_fwd", (_X, _UP, _WEIGHT), options="str act", results="y", plan=plan_fwd, reference=_reference_fwd,
    outputs=lambda x, up: (Memory(result_shape(x, up), x.dtype),), check=check_fwd,
)  # fmt: skip
BACKWARD = Operator(
    "glu_bwd", (_DY, _X, _UP, _WEIGHT), options="str act, bool weight_grad", results="dx dup dweight",
    outputs=lambda x, up, weight, weight_grad: (
        Memory.like(x), None if up is None else Memory.like(x), Memory.like(weight) if weight_grad else None,
    ),
    plan=plan_bwd, reference=_reference_bwd, check=check_bwd,
)  # fmt: skip
# Writes the gradients of x and up over them; the result is that of the weight, or empty.
BACKWARD_OVER = Operator(
    "glu_bwd_over", (_DY, InPlace("x", None), InPlace("up", None, optional=True), _WEIGHT),
    options="str act, bool weight_grad", results="dweight", plan=partial(plan_bwd, results=("x", "up")),
    outputs=lambda weight, weight_grad: (Memory.like(weight) if weight_grad else None,),
    reference=_reference_bwd_over, check=check_bwd, prepare=_check_over,
)  # fmt: skip


def _shards(args: dict[str, Any]) -> Iterator[Way]:
    """Rows are independent of each other; so are columns if gate and up are two tensors."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    last = len(args["x"].shape) - 1
    for dim in range(last + (args["up"] is not None)):
        place = Shard(dim)
        of_weight = place if dim < last else Replicate()
        given = {"dy": place, "x": place, "up": place, "weight": of_weight}
        if "dy" not in args:
            yield [place], given
            continue
        of_dweight = Replicate() if not args["weight_grad"] else place if dim < last else Partial()
        yield [place, Replicate() if args["up"] is None else place, of_dweight], given


shard(FORWARD, _shards)
shard(BACKWARD, _shards)
_forward, _backward = FORWARD.call, BACKWARD.call


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, up, weight, act, overwrites):
        ctx.set_materialize_grads(False)
        ctx.act, ctx.overwrites = act, overwrites
        ctx.save_for_backward(x, up, weight)
        return _forward(x, up, weight, act)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 5
        if ctx.overwrites:
            autograd.check_overwrite(ctx, "glu", (dy,))
        x, up, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if ctx.overwrites and not may_overlap(dy, x) and (up is None or not may_overlap(dy, up)):
            dx, dup = autograd.detached(x, up)
            dweight = BACKWARD_OVER(dy, dx, dup, weight, ctx.act, wanted[2])
        else:
            dx, dup, dweight = _backward(dy, x, up, weight, ctx.act, wanted[2])
        grads = (dx, dup, dweight)
        return *(grad if needed else None for grad, needed in zip(grads, wanted, strict=False)), None, None


_differentiable = applied(_Glu)


@public(own_out=True)
def glu(
    x: Tensor | tuple[Tensor, ...], up: Tensor | tuple[Tensor, ...] | None = None, *, act: str = "silu",
    limit: float | None = None, weight: Tensor | None = None, reuse: str | None = None,
    layout: str = "concat", channel_scale: Tensor | None = None, quant: Quant | torch.dtype | str | None = None,
    keep: bool = False, out: Tensor | None = None, scale_out: Tensor | None = None,
) -> Any:  # fmt: skip
    """Return ``act(gate) * up * weight``, the gated activation of an MLP.

    Computed in fp32 and rounded once. Differentiable once in x, up and weight.

    Args:
        x: ``[..., 2 * d]``, gate in the first half of the last dimension and up in the second; with `up`, ``[..., d]``,
            the gate. bfloat16, float16 or float32; any strides (copied unless rows are unit-stride and evenly spaced).
            Any object with ``__dlpack__`` is accepted; results are then of the same kind.
        up: ``[..., d]``, same shape and dtype as x; its strides may differ.
        act: ``"silu"`` (SwiGLU), ``"gelu_tanh"``, ``"gelu_erf"`` (GeGLU), ``"relu"``, ``"relu2"`` (relu squared),
            ``"sigmoid"``, ``"none"``, ``"quick_gelu"`` (``x * sigmoid(1.702 * x)``), or ``"swiglu_oai"`` of GPT-OSS
            models: ``g * sigmoid(1.702 * g) * (u + 1)``, where g is the gate clamped to at most 7 and u is up clamped
            to -7 .. 7. (Their weights produce gate and up in alternating columns; here they are halves or separate
            tensors.)
        limit: Clamp the gate to at most this number and up to -limit .. limit, as DeepSeek-V4's MLPs do with act
            "silu" and limit 10; instead of 7 with act "swiglu_oai". The slope is 1 at a limit and 0 beyond.
        weight: ``x.shape[:-1]``, one factor per row, in x's dtype or float32. Default: 1.
        reuse: ``"inputs"`` lets the backward pass overwrite x and up with their gradients instead of allocating memory.
            For tensors that nothing else needs by then, such as the result of a projection. See below.
        layout: ``"concat"``, or ``"interleaved"`` if gate and up are alternating columns of x (without `up`). This and
            all following options cannot be combined with limit, weight or reuse.
        channel_scale: ``[d]``, of x's dtype or float32, multiplies the result. In a call that needs gradients, the
            result is rounded before it and after it.
        quant: Quantise the result (:class:`rtkernels.Quant`); a dtype or "nvfp4" means ``Quant(dtype)``. Not with
            gradients.
        keep: With quant: also return the values before quantisation, in x's dtype.
        out: Contiguous tensor to write the result to; may be x or up if both are given. Not with gradients.
        scale_out: Tensor to write the computed scales to. Not with gradients.

    Returns:
        ``[..., d]``, contiguous, in x's dtype. With quant the codes, or a :class:`rtkernels.GluOut` if scales are
        computed or `keep` is set.

    Without limit, weight and reuse, x and up may both be NVFP4: ``(codes, scales)`` or ``(codes, scales, global
    scale)``, as ``quantize_nvfp4`` returns them.

    With reuse, x and up must be contiguous results of operations: leaves that require grad, and views of them, are
    refused. If another operation saved one of them and is differentiated later, torch raises its error for in-place
    modifications. A second backward pass (``retain_graph=True``) and ``create_graph=True`` raise an error, too. Reuse
    has no effect under ``torch.compile``, inside ``torch.utils.checkpoint`` or other saved-tensor hooks, and if x or up
    needs no gradient. ``docs/how_to/save_memory.md`` has all rules.
    """
    if (
        keep or channel_scale is not None or quant is not None or out is not None or scale_out is not None
        or layout != "concat" or isinstance(x, tuple)
    ):  # fmt: skip
        if limit is not None:
            raise ArgumentError(
                f"limit is {limit!r}; expected None with layout, channel_scale, quant, keep, out or scale_out"
            )
        return _with_options(x, up, act, weight, reuse, layout, channel_scale, quant, keep, out, scale_out)
    act = act_with_limit(act, limit)
    overwrites = reuse is not None and autograd.may_overwrite(reuse, {"x": x, "up": up}, (weight,))
    if is_grad_enabled() and needs_grad(x, up, weight):
        return _differentiable(x, up, weight, act, overwrites)
    return _forward(x, up, weight, act)


def _with_options(x, up, act, weight, reuse, layout, channel_scale, quant, keep, out, scale_out) -> Any:
    from rtkernels.ops.act.glu_combined import check_combined, glu_combined, glu_of_codes

    options = {
        "layout": layout, "channel_scale": channel_scale, "quant": quant, "keep": keep, "out": out,
        "scale_out": scale_out,
    }  # fmt: skip
    if weight is not None or reuse is not None:
        raise ArgumentError("weight and reuse exclude layout, channel_scale, quant, keep, out and scale_out")
    if isinstance(x, tuple):
        return glu_of_codes(x, up, act, **options)
    check_combined(x, up, act, layout, channel_scale, quant, keep)
    if is_grad_enabled() and needs_grad(x, up, channel_scale):
        return _options_with_gradient(x, up, act, layout, channel_scale, quant, out, scale_out)
    return glu_combined(x, up, act=act, **options)


def _options_with_gradient(x, up, act, layout, channel_scale, quant, out, scale_out) -> Tensor:
    """Return ``glu`` with differentiable options, composed of other differentiable functions."""
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


OP = Op(
    "glu", public=("glu",), kernels=KERNELS, torch_ops=(FORWARD, BACKWARD, BACKWARD_OVER), uses=("combine", "nvfp4"),
)  # fmt: skip
