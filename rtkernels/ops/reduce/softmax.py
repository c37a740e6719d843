"""Softmax and its logarithm, with a scale and valid lengths, and their backward."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels import interop
from rtkernels.errors import ArgumentError
from rtkernels.ops.reduce.softmax_plan import BWD_PLANS, FWD_PLANS, KERNELS, LARGEST_SCALE, check, check_scale
from rtkernels.runtime.layout import address, check_same, metadata, row_count, row_stride, rowed
from rtkernels.runtime.operator.arguments import an_integer
from rtkernels.runtime.operator.autograd import constant, needs_grad, once_differentiable, refuse_leaf
from rtkernels.runtime.operator.operator import MutatingOp, TorchOp
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.torch_private import is_dynamo_compiling

# ---- launchers ------------------------------------------------------------------------------------------------------


def _launch_fwd(x: Tensor, lengths: Tensor | None, scale: float, log: bool) -> Tensor:
    x_address, lengths_address = x.data_ptr(), address(lengths)
    x_key = (x.dtype, x.shape, x.stride(), x.get_device())
    plan = FWD_PLANS[x_key, metadata(lengths), x_address & 15, log, False]
    if not abs(scale) <= LARGEST_SCALE:
        check_scale(scale)
    if plan is None:
        return _launch_fwd(rowed(x), _dense(lengths), scale, log)
    launch, before, after, allocate, layout = plan
    y = allocate(*layout)
    if launch is not None:
        launch(x_address, y.data_ptr(), lengths_address, *before, scale, *after)
    return y


def _launch_in_place(x: Tensor, lengths: Tensor | None, scale: float, log: bool) -> None:
    check_scale(scale)
    lengths = _dense(lengths)
    x_address = x.data_ptr()
    plan = FWD_PLANS[metadata(x), metadata(lengths), x_address & 15, log, True]
    if plan is None:
        x.copy_(_launch_fwd(x, lengths, scale, log))
        return
    launch, before, after, _, _ = plan
    if launch is not None:
        launch(x_address, x_address, address(lengths), *before, scale, *after)
    _count_version(x)


def _launch_bwd(dy: Tensor, y: Tensor, lengths: Tensor | None, scale: float, log: bool) -> Tensor:
    _check_bwd(dy, y, lengths, scale)
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if y.numel() == 0:
        return dx
    dy, y, lengths = rowed(dy), rowed(y), _dense(lengths)
    addresses = dy.data_ptr(), y.data_ptr()
    plan = BWD_PLANS[metadata(dy), metadata(y), metadata(lengths), (addresses[0] | addresses[1]) & 15, log]
    launch, before, after = plan
    launch(*addresses, dx.data_ptr(), address(lengths), *before, scale, *after)
    return dx


def _dense(lengths: Tensor | None) -> Tensor | None:
    return None if lengths is None else lengths.contiguous()


def _count_version(x: Tensor) -> None:
    """Tell autograd that x was overwritten: a backward that saved it must raise, not use the new values."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def _check_bwd(dy: Tensor, y: Tensor, lengths: Tensor | None, scale: float) -> None:
    check(metadata(y), metadata(lengths), "y")
    check_scale(scale)
    check_same("dy", dy.dtype, y.dtype, "dtype", of="y")
    check_same("dy", dy.shape, y.shape, "shape", of="y")
    check_same("dy", dy.get_device(), y.get_device(), "device index", of="y")


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
    return torch.arange(x.shape[-1], device=x.device) >= lengths.unsqueeze(-1)


def _reference_fwd(x: Tensor, lengths: Tensor | None, scale: float, log: bool) -> Tensor:
    check(metadata(x), metadata(lengths))
    check_scale(scale)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _softmax(x.float(), _invalid(x, lengths), scale, log).to(x.dtype).contiguous()


def _reference_in_place(x: Tensor, lengths: Tensor | None, scale: float, log: bool) -> None:
    x_stride = row_stride(x.shape, x.stride()) if x.dim() else None
    if x_stride is not None and row_count(x.shape) > 1 and abs(x_stride) < x.shape[-1]:
        raise ArgumentError("x has overlapping rows; in_place needs memory of its own for every element")
    x.copy_(_reference_fwd(x, lengths, scale, log))


def _reference_bwd(dy: Tensor, y: Tensor, lengths: Tensor | None, scale: float, log: bool) -> Tensor:
    _check_bwd(dy, y, lengths, scale)
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


def _fake_fwd(x, lengths, scale, log):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_in_place(x, lengths, scale, log):
    return None


def _fake_bwd(dy, y, lengths, scale, log):
    return torch.empty_like(y, memory_format=torch.contiguous_format)


FORWARD = TorchOp(
    "softmax_fwd(Tensor x, Tensor? lengths, float scale, bool log) -> Tensor",
    launch=_launch_fwd,
    reference=_reference_fwd,
    fake=_fake_fwd,
)
IN_PLACE = MutatingOp(
    "softmax_fwd_in_place(Tensor(a!) x, Tensor? lengths, float scale, bool log) -> ()",
    launch=_launch_in_place,
    reference=_reference_in_place,
    fake=_fake_in_place,
)
BACKWARD = TorchOp(
    "softmax_bwd(Tensor dy, Tensor y, Tensor? lengths, float scale, bool log) -> Tensor",
    launch=_launch_bwd,
    reference=_reference_bwd,
    fake=_fake_bwd,
)


_forward = FORWARD.call


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lengths, scale, log, in_place):
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.log = scale, log
        if in_place:
            ctx.mark_dirty(x)
            IN_PLACE(x, lengths, scale, log)
            y = x
        else:
            y = FORWARD(x, lengths, scale, log)
        ctx.save_for_backward(y, lengths)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return None, None, None, None, None
        y, lengths = ctx.saved_tensors
        return BACKWARD(dy, y, lengths, ctx.scale, ctx.log), None, None, None, None


def _any_softmax(x: Tensor, dim: int, scale: float, lengths: Tensor | None, in_place: bool, log: bool) -> Tensor:
    rank = x.dim()
    if dim != -1 and dim != rank - 1:
        if not -rank <= an_integer("dim", dim) < rank:
            raise ArgumentError(f"dim is {dim}; expected -{rank} to {rank - 1} for x with {rank} dimensions")
        if in_place:
            refuse_leaf("x", x)
        y = _any_softmax(x.movedim(dim, -1), -1, scale, lengths, False, log).movedim(-1, dim)
        return x.copy_(y) if in_place else y
    if is_grad_enabled() and needs_grad(x):
        if in_place:
            refuse_leaf("x", x)
        if is_dynamo_compiling():
            y = _Softmax.apply(x, lengths, constant(scale), log, False)
            return x.copy_(y) if in_place else y  # mark_dirty cannot be traced
        return _Softmax.apply(x, lengths, scale, log, in_place)
    if in_place:
        IN_PLACE(x, lengths, scale, log)
        return x
    return _forward(x, lengths, scale, log)


def softmax(
    x: Tensor, dim: int = -1, *, scale: float = 1.0, lengths: Tensor | None = None, in_place: bool = False
) -> Tensor:
    """Return ``exp(scale * x) / sum(exp(scale * x))`` over one dimension.

    Computed in fp32 and rounded once; no intermediate overflows. A row that has nothing but -inf, or length 0, gives 0
    (torch gives NaN), and so has gradient 0. A NaN or +inf makes its row NaN. Differentiable once in x.

    Args:
        x: bfloat16, float16 or float32; any strides (a copy is made unless rows are unit-stride and evenly spaced). May
            be any object with ``__dlpack__``; the result is then of its kind.
        dim: The dimension the sum is over. Other than the last one is moved there first, by a copy; the result is then
            a view with that dimension the fastest in memory.
        scale: Any finite number. With 0 all scores but -inf count the same.
        lengths: int32 or int64, the shape of x without `dim`: how many scores of each row count (values are clamped to
            0 and the row's size). The others are not read, get probability 0 and gradient 0.
        in_place: Overwrite x and return it. With gradients, x must not be a leaf and nothing else may need its old
            values. Makes a copy anyway where rows are not evenly spaced, for another dim, and under torch.compile.

    Returns:
        Dense (for the last dim), of x's shape and dtype.
    """
    if not isinstance(x, Tensor):
        return interop.call(softmax, x, dim, scale=scale, lengths=lengths, in_place=in_place)
    return _any_softmax(x, dim, scale, lengths, in_place, False)


def log_softmax(
    x: Tensor, dim: int = -1, *, scale: float = 1.0, lengths: Tensor | None = None, in_place: bool = False
) -> Tensor:
    """Return the logarithm of ``softmax(x)``, ``scale * x - log(sum(exp(scale * x)))``, over one dimension.

    Computed in fp32 and rounded once; no intermediate overflows. Scores that do not count, and rows that have nothing
    but -inf or length 0, give -inf (torch gives NaN for such rows). A NaN or +inf makes its row NaN. Differentiable
    once in x; as in torch, the gradient of a score of -inf is `scale` times the incoming one.

    Args:
        x: As for ``softmax``.
        dim: As for ``softmax``.
        scale: As for ``softmax``.
        lengths: As for ``softmax``; scores that do not count get -inf and gradient 0.
        in_place: As for ``softmax``.

    Returns:
        Dense (for the last dim), of x's shape and dtype.
    """
    if not isinstance(x, Tensor):
        return interop.call(log_softmax, x, dim, scale=scale, lengths=lengths, in_place=in_place)
    return _any_softmax(x, dim, scale, lengths, in_place, True)


OP = Op(
    "softmax",
    public=("softmax", "log_softmax"),
    kernels=KERNELS,
    torch_ops=(FORWARD, IN_PLACE, BACKWARD),
)
