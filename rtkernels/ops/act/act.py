"""Activation functions of one tensor, or of a sum."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.ops.act.combine import combine
from rtkernels.ops.shared.row_operands import rows_of, summed
from rtkernels.runtime.call.public import public
from rtkernels.runtime.launch.memory import new_tensor
from rtkernels.runtime.layout import token
from rtkernels.runtime.operator.arguments import Among
from rtkernels.runtime.operator.autograd import applied, detached, needs_grad, once_differentiable
from rtkernels.runtime.operator.registry import Op

KINDS = ("gelu_tanh", "gelu_erf", "silu", "relu", "relu2", "sigmoid")


def _forward(x: Tensor, add: Tensor | None, kind: str) -> Tensor:
    x, add = detached(x, add)
    rows, cyclic = rows_of("add", add, x.shape)
    out = new_tensor(tuple(x.shape), x.dtype, x)
    flat = x if x.dim() else x.reshape(1)
    combine(flat, out if x.dim() else out.view(1), add0=rows, act=kind, cyclic="add0" if cyclic else "")
    return out


class _Act(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, add, kind):
        ctx.save_for_backward(x, add)
        ctx.kind = kind
        return _forward(x, add, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, add = ctx.saved_tensors
        x = x.reshape(-1) if x.dim() == 0 else x
        rows, cyclic = rows_of("add", add, x.shape)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        cycles = "add0" if cyclic else ""
        combine(x, dx, add0=rows, mul0=dy.reshape(x.shape), act=ctx.kind, slope=True, cyclic=cycles)
        dx = dx.reshape(dy.shape)
        return dx, None if add is None or not ctx.needs_input_grad[1] else summed(dx, add), None


_differentiable = applied(_Act)


@public(over="x add", options={"kind": Among(KINDS, f"one of {', '.join(map(repr, KINDS))}")})
def act(x: Tensor, kind: str, *, add: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return ``kind(x + add)``.

    Computed in fp32 and rounded once; the sum is not rounded before the activation. Differentiable once in x and add.

    Args:
        x: Any shape; bfloat16, float16 or float32. Any strides (copied unless rows are unit-stride and evenly spaced).
            Any object with ``__dlpack__`` is accepted; results are then of the same kind.
        kind: ``"gelu_tanh"``, ``"gelu_erf"``, ``"silu"``, ``"relu"``, ``"relu2"`` (relu squared) or ``"sigmoid"``.
        add: Added to x first: a tensor that broadcasts to x's shape and has all its columns, such as ``[n]``; x's dtype
            or float32. None adds nothing.
        out: Tensor to write the result to: of x's shape and dtype. May be x or add. Not with gradients.

    Returns:
        A contiguous tensor of x's shape and dtype.
    """
    token("x", x.dtype)
    if is_grad_enabled() and needs_grad(x, add):
        return _differentiable(x, add, kind)
    return _forward(x, add, kind)


OP = Op("act", public=("act",), kernels=(), torch_ops=(), uses=("combine",))
