"""Softmax and its logarithm, with a scale and valid lengths, and their backward."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.reduce.softmax_plan import KERNELS, check, check_bwd, check_scale, plan_bwd, plan_fwd
from rtkernels.runtime.call.public import public
from rtkernels.runtime.operator.arguments import check_integer
from rtkernels.runtime.operator.autograd import (
    applied,
    constant,
    needs_grad,
    once_differentiable,
    refuse_leaf,
    written_by_copy,
)
from rtkernels.runtime.operator.declared import Dense, InPlaceRows, Operator, Rows
from rtkernels.runtime.operator.plan import Memory
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.operator.sharding import shard_rows
from rtkernels.runtime.torch_private import is_dynamo_compiling

# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _softmax(x: Tensor, invalid: Tensor | None, scale: float, log: bool) -> Tensor:
    """Return the softmax of an fp32 or wider tensor; rows without any score as the kernels define them."""
    if invalid is not None:
        x = x.masked_fill(invalid, -torch.inf if scale >= 0 else torch.inf)
    # A scale of 0 must not make NaN of -inf, nor may large scores overflow: scale the differences, as the kernels do.
    z = x if scale >= 0 else -x
    top = z.amax(-1, keepdim=True)
    z = (z - torch.where(top == -torch.inf, 0.0, top)) * max(abs(scale), 1e-45)
    e = z.exp()
    total = e.sum(-1, keepdim=True)
    empty = total == 0
    if log:
        y, filler = z - torch.where(empty, 1.0, total).log(), -torch.inf
    else:
        y, filler = e / torch.where(empty, 1.0, total), 0.0
    return y if invalid is None else y.masked_fill(invalid, filler)


def _invalid(x: Tensor, lengths: Tensor | None) -> Tensor | None:
    if lengths is None:
        return None
    return torch.arange(x.shape[-1], dtype=torch.int64, device=x.device) >= lengths.unsqueeze(-1)


def _reference_fwd(x: Tensor, lengths: Tensor | None, scale: float, log: bool) -> Tensor:
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _softmax(x.float(), _invalid(x, lengths), scale, log).to(x.dtype).contiguous()


def _reference_in_place(x: Tensor, lengths: Tensor | None, scale: float, log: bool) -> None:
    x.copy_(_reference_fwd(x, lengths, scale, log))


def _reference_bwd(dy: Tensor, y: Tensor, lengths: Tensor | None, scale: float, log: bool) -> Tensor:
    g, v, invalid = dy.float(), y.float(), _invalid(y, lengths)
    if invalid is not None:
        g, v = g.masked_fill(invalid, 0.0), v.masked_fill(invalid, 0.0)
    if log:
        dx = scale * (g - v.exp() * g.sum(-1, keepdim=True))
    else:
        dx = scale * v * (g - (g * v).sum(-1, keepdim=True))
    if invalid is not None:
        dx = dx.masked_fill(invalid, 0.0)
    return dx.to(y.dtype).contiguous()


_OPTIONS = {"options": "float scale, bool log", "numbers": "scale", "check_numbers": check_scale}
_LENGTHS = Dense("lengths", None, optional=True)
FORWARD = Operator(
    "softmax_fwd", (Rows("x"), _LENGTHS), **_OPTIONS, results="y", outputs=lambda x: (Memory.like(x),),
    plan=plan_fwd, reference=_reference_fwd, check=check,
)  # fmt: skip
IN_PLACE = Operator(
    "softmax_fwd_in_place", (InPlaceRows("x"), _LENGTHS), **_OPTIONS, results="", plan=partial(plan_fwd, to="x"),
    reference=_reference_in_place, check=check,
)  # fmt: skip
BACKWARD = Operator(
    "softmax_bwd", (Rows("dy", like="y"), Rows("y"), _LENGTHS), **_OPTIONS, results="dx",
    outputs=lambda y: (Memory.like(y),), plan=plan_bwd, reference=_reference_bwd, check=check_bwd,
)  # fmt: skip
shard_rows(FORWARD, ("x", "lengths"))
shard_rows(BACKWARD, ("dy", "y", "lengths"))
_forward = FORWARD.call


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lengths, scale, log, in_place):
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.log = scale, log
        if in_place:
            ctx.mark_dirty(x)
            IN_PLACE.call(x, lengths, scale, log)
        y = x if in_place else _forward(x, lengths, scale, log)
        ctx.save_for_backward(y, lengths)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        dx = None if dy is None else BACKWARD.call(dy, *ctx.saved_tensors, ctx.scale, ctx.log)
        return dx, None, None, None, None


_differentiable = applied(_Softmax)


def _any_softmax(x: Tensor, dim: int, scale: float, lengths: Tensor | None, in_place: bool, log: bool) -> Tensor:
    rank = x.dim()
    if dim != -1 and dim != rank - 1:
        if not -rank <= check_integer("dim", dim) < rank:
            raise ArgumentError(f"dim is {dim}; expected -{rank} to {rank - 1} for x with {rank} dimensions")
        if in_place:
            refuse_leaf("x", x)
        y = _any_softmax(x.movedim(dim, -1), -1, scale, lengths, False, log).movedim(-1, dim)
        return x.copy_(y) if in_place else y
    if is_grad_enabled() and needs_grad(x):
        if in_place:
            refuse_leaf("x", x)
        if is_dynamo_compiling():
            y = _differentiable(x, lengths, constant(scale), log, False)
            return x.copy_(y) if written_by_copy(in_place) else y
        return _differentiable(x, lengths, scale, log, in_place)
    if in_place:
        IN_PLACE(x, lengths, scale, log)
        return x
    return _forward(x, lengths, scale, log)


@public(over="x")
def softmax(
    x: Tensor, dim: int = -1, *, scale: float = 1.0, lengths: Tensor | None = None, in_place: bool = False,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``exp(scale * x) / sum(exp(scale * x))`` over one dimension.

    Computed in fp32 and rounded once; no intermediate overflows. A row of only -inf, or of length 0, gives 0 (torch
    gives NaN) and has gradient 0. A NaN or +inf makes its row NaN. Differentiable once in x.

    Args:
        x: bfloat16, float16 or float32; any strides (copied unless rows are unit-stride and evenly spaced). Any object
            with ``__dlpack__`` is accepted; results are then of the same kind.
        dim: The dimension to sum over. If it is not the last, x is copied with that dimension last, and the result is a
            view in which it has unit stride.
        scale: Factor of the scores, any finite number. With 0, all scores except -inf have the same weight.
        lengths: int32 or int64, the shape of x without `dim`: the number of valid scores of each row, clamped to 0 ..
            row size. Other scores are not read and have probability 0 and gradient 0.
        in_place: Overwrite x and return it. With gradients, x must not be a leaf and nothing else may need its old
            values. Still copies if rows are not evenly spaced, if dim is not the last, and under torch.compile.
        out: Tensor to write the result to, with its shape, dtype and strides. May be x. Not with gradients.

    Returns:
        A tensor of x's shape and dtype; contiguous for the last dim.
    """
    return _any_softmax(x, dim, scale, lengths, in_place, False)


@public(over="x")
def log_softmax(
    x: Tensor, dim: int = -1, *, scale: float = 1.0, lengths: Tensor | None = None, in_place: bool = False,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the logarithm of ``softmax(x)``, ``scale * x - log(sum(exp(scale * x)))``, over one dimension.

    Computed in fp32 and rounded once; no intermediate overflows. Invalid scores, and rows of only -inf or of length 0,
    give -inf (torch gives NaN for such rows). A NaN or +inf makes its row NaN. Differentiable once in x; as in torch,
    the gradient of a score of -inf is `scale` times the incoming one.

    Args:
        x: As for ``softmax``.
        dim: As for ``softmax``.
        scale: As for ``softmax``.
        lengths: As for ``softmax``; other scores give -inf and have gradient 0.
        in_place: As for ``softmax``.
        out: Tensor to write the result to, with its shape, dtype and strides. May be x. Not with gradients.

    Returns:
        A tensor of x's shape and dtype; contiguous for the last dim.
    """
    return _any_softmax(x, dim, scale, lengths, in_place, True)


OP = Op("softmax", public=("softmax", "log_softmax"), kernels=KERNELS, torch_ops=(FORWARD, IN_PLACE, BACKWARD))
