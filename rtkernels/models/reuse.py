"""Save memory and additions in patched layers, which know that nothing else uses a tensor.

The gate and up projection is the largest activation of a decoder layer, and at the layer's peak its gradient exists at
the same time. If the layer's own forward computed it and nothing else can hold it, the gradient overwrites it, unless
the graph is retained for another backward pass. The output of the activation is freed before its gradient is computed.
The input of a layer goes both to its first norm and to the residual sum: if the norm passes it on, the kernel of the
norm's gradient adds both gradients, and autograd does not have to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.models.merged import is_plain
from rtkernels.models.recognize import autocasts
from rtkernels.ops.act import glu as activation
from rtkernels.ops.gemm.weight_gradient import add_product_
from rtkernels.ops.norm import rms_norm
from rtkernels.runtime.layout import may_overlap
from rtkernels.runtime.operator.autograd import applied, may_overwrite, once_differentiable, top_saved_tensors_hooks
from rtkernels.runtime.operator.main_grad import start_of
from rtkernels.runtime.torch_private import TENSOR_TYPES, is_dynamo_compiling, is_legacy_batched

try:
    from torch._C._autograd import _get_current_graph_task_keep_graph as _keeps_graph
except ImportError:  # pragma: no cover - a torch without this private name

    def _keeps_graph() -> bool:
        return True


def is_kept() -> bool:
    """Return True in a backward pass that retains its graph, and under the compiler."""
    return is_dynamo_compiling() or _keeps_graph()


def free(*tensors: Tensor) -> None:
    """Release the memory of saved tensors during a backward pass, unless the graph is retained.

    For tensors that a Function computed and saved itself: nothing else holds them, and this pass ends their use.
    """
    if not is_kept():
        for t in tensors:
            if (storage := t.untyped_storage()).resizable():  # emulated kernels write to memory of their own
                storage.resize_(0)


def kept_by_hooks() -> bool:
    """Return True if tensors that are saved now go to hooks of somebody who may read them again later.

    Those of checkpointing do not: they compute the tensors again for one backward pass.
    """
    hooks = None if is_dynamo_compiling() else top_saved_tensors_hooks(False)
    return hooks is not None and not str(getattr(hooks[0], "__module__", "")).startswith("torch.")


def is_private(*tensors: Tensor | None) -> bool:
    """Return True if the results of a layer's own projections may be overwritten by their gradients."""
    if is_dynamo_compiling():
        return False
    given = {str(i): t for i, t in enumerate(tensors) if t is not None}
    if not all(type(t) in TENSOR_TYPES for t in given.values()):
        return False
    try:
        return may_overwrite("inputs", given)
    except ArgumentError:  # a projection may return a leaf or a view with gaps
        return False


def glu_gradient(
    dy: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor | None, act: str, need_weight: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of gate, up and weight. They overwrite gate and up unless the graph is retained."""
    if is_legacy_batched(dy) or is_kept() or any(may_overlap(dy, t) for t in (gate, up) if t is not None):
        dx, dup, dweight = activation.BACKWARD(dy, gate, up, weight, act, need_weight)
    else:
        dx, dup = gate.detach(), None if up is None else up.detach()
        dweight = activation.BACKWARD_OVER(dy, dx, dup, weight, act, need_weight)
    return dx, None if up is None else dup, dweight if need_weight else None


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, weight, act):
        ctx.act = act
        ctx.save_for_backward(gate, up, weight)
        return activation.FORWARD(gate, up, weight, act)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return *glu_gradient(dy, *ctx.saved_tensors, ctx.act, ctx.needs_input_grad[2]), None


_own_glu = applied(_Glu)


def glu(
    gate: Tensor, up: Tensor | None = None, *, act: str, weight: Tensor | None = None, limit: float | None = None
) -> Tensor:
    """Return ``rtkernels.glu`` of tensors that the caller computed and that nothing else uses."""
    if is_private(gate, up):
        return _own_glu(gate, up, weight, activation.act_with_limit(act, limit))
    return rtkernels.glu(gate, up, act=act, weight=weight, limit=limit)


class _Projection(torch.autograd.Function):
    """``x @ weight^T`` of an x that only this step uses: x is freed between the gradients of the weight and of x."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.start = start_of(weight, "a linear layer")
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        flat, shape, dw = dy.reshape(-1, dy.shape[-1]), x.shape, None
        if ctx.start is not None:
            add_product_(ctx.start.total, flat, x.reshape(-1, shape[-1]))
            dw = ctx.start.added()
        elif ctx.needs_input_grad[1]:
            dw = flat.t() @ x.reshape(-1, shape[-1])
        if not is_legacy_batched(dy):
            free(x)
        return (flat @ weight).view(shape) if ctx.needs_input_grad[0] else None, dw


_projection = applied(_Projection)


def project(linear: nn.Module, x: Tensor) -> Tensor:
    """Return ``linear(x)`` of an x that the caller computed and that nothing else uses."""
    if is_dynamo_compiling() or not torch.is_grad_enabled() or not is_plain(linear) or linear.bias is not None:
        return linear(x)
    if kept_by_hooks():
        return linear(x)
    if type(x) not in TENSOR_TYPES or x.dtype != linear.weight.dtype or not x.requires_grad or autocasts(x):
        return linear(x)
    return _projection(x, linear.weight)


_stand_ins: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def stand_in(x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return NaN of a shape (default: that of x) in the memory of one element: a graph node without values."""
    shape = x.shape if shape is None else shape
    if is_dynamo_compiling():  # a compiled graph cannot cache tensors here
        return x.new_full((), torch.nan).expand(shape)
    try:
        return _stand_ins[x.dtype, x.device].expand(shape)
    except KeyError:
        pass
    with torch.inference_mode(False):
        one = torch.full((), torch.nan, dtype=x.dtype, device=x.device)
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):  # captured memory belongs to the graph
        _stand_ins[x.dtype, x.device] = one
    return one.expand(shape)


def may_hand_on(x: Tensor, weight: Tensor | None) -> bool:
    """Return True if :class:`NormAndInput` can replace a norm of x: x needs a gradient and nothing is cast."""
    plain = type(x) in TENSOR_TYPES and (weight is None or (type(weight) in TENSOR_TYPES and weight.dtype == x.dtype))
    return plain and not is_dynamo_compiling() and torch.is_grad_enabled() and x.requires_grad


class NormAndInput(torch.autograd.Function):
    """Return ``rms_norm(x, weight)`` and x; without `values`, the norm is a tensor without memory."""

    @staticmethod
    def forward(ctx, x, weight, eps, offset, values):
        ctx.set_materialize_grads(False)
        ctx.options, ctx.start = (eps, offset), start_of(weight, "rms_norm")
        ctx.save_for_backward(x, weight)
        y = rms_norm.FORWARD.call(x, weight, eps, offset) if values else stand_in(x)
        return y, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dx):
        if dy is None:
            return dx, None, None, None, None
        x, weight = ctx.saved_tensors
        given = dy, x, weight, dx, *ctx.options, ctx.needs_input_grad[1]
        dx, dweight = rms_norm.gradients(ctx.start, *given)
        return dx, dweight, None, None, None


norm_and_input = applied(NormAndInput)
