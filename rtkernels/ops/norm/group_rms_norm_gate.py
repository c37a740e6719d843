"""RMS normalisation of groups of channels times a sigmoid gate (the end of a linear attention), and its backward."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels import interop
from rtkernels.ops.norm.group_rms_norm_gate_plan import BWD_PLANS, FWD_PLANS, KERNELS, Tensors, check, check_bwd
from rtkernels.ops.shared.column_sum import column_sum
from rtkernels.runtime.layout import address, metadata, nothing
from rtkernels.runtime.operator.autograd import needs_grad, once_differentiable
from rtkernels.runtime.operator.operator import TorchOp
from rtkernels.runtime.operator.registry import Op

_DENSE = torch.contiguous_format

# ---- launchers ------------------------------------------------------------------------------------------------------


def _launch_fwd(x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float, layout: str) -> Tensor:
    x_address, gate_address, weight_address = x.data_ptr(), gate.data_ptr(), address(weight)
    align = (x_address | gate_address | weight_address) & 15
    plan = FWD_PLANS[metadata(x), metadata(gate), metadata(weight), groups, layout, align]
    if plan.__class__ is Tensors:
        return _launch_fwd(*plan.copied(x, gate, weight), groups, eps, layout)
    launch, numbers, allocate, y_layout = plan
    y = allocate(*y_layout)
    if launch is not None:
        launch(x_address, gate_address, weight_address, y.data_ptr(), *numbers, eps)
    return y


def _launch_bwd(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float, layout: str, weight_grad: bool
):
    inputs = (dy.data_ptr(), x.data_ptr(), gate.data_ptr())
    weight_address = address(weight)
    align = (inputs[0] | inputs[1] | inputs[2] | weight_address) & 15
    metas = metadata(dy), metadata(x), metadata(gate), metadata(weight)
    plan = BWD_PLANS[(*metas, groups, layout, align, weight_grad)]
    tensors = plan.tensors
    if tensors is not None and not tensors.fits:
        dy = dy.contiguous() if tensors.dy is None else dy
        return _launch_bwd(dy, *tensors.copied(x, gate, weight), groups, eps, layout, weight_grad)
    dx, dgate = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(gate, memory_format=_DENSE)
    if tensors is None:
        return dx, dgate, torch.zeros_like(weight, memory_format=_DENSE) if weight_grad else nothing(x)
    pointers = (*inputs, weight_address, dx.data_ptr(), dgate.data_ptr())
    if not weight_grad:
        plan.launch(*pointers, 0, *plan.numbers, eps)
        return dx, dgate, nothing(x)
    partial = torch.empty(plan.partial, dtype=torch.float32, device=x.device)
    if plan.weight_launch is None:
        plan.launch(*pointers, partial.data_ptr(), *plan.numbers, eps)
    else:
        rstd = torch.empty(tensors.tokens * groups, dtype=torch.float32, device=x.device)
        plan.launch(*pointers, rstd.data_ptr(), *plan.numbers, eps)
        plan.weight_launch(*inputs, rstd.data_ptr(), partial.data_ptr(), *plan.weight_numbers)
    return dx, dgate, column_sum(partial.view(-1, plan.width), weight.dtype, beside=plan.early)


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _grouped(t: Tensor, groups: int, cols: int, lead: int, swap: bool) -> Tensor:
    """Return a tensor as fp32 (or wider) [tokens..., groups, cols], its first two dimensions swapped if asked for."""
    wide = t.to(torch.promote_types(t.dtype, torch.float32))
    wide = wide.reshape(*t.shape[:lead], groups, cols)
    return wide.transpose(0, 1) if swap else wide


def _wide_inputs(x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, layout: str, *more: Tensor):
    """Return x, gate, weight and tensors like gate as [tokens..., groups, cols], all in the layout of x."""
    lead, channels = gate.dim() - 1, gate.shape[-1]
    cols, swap = channels // groups, layout == "sequence_first"
    w = torch.ones((), device=x.device)
    if weight is not None:
        w = weight.to(torch.promote_types(weight.dtype, torch.float32)).view(-1, cols)
    return (
        _grouped(x, groups, cols, lead, False),
        _grouped(gate, groups, cols, lead, swap),
        w,
        *(_grouped(t, groups, cols, lead, swap) for t in more),
    )


def _as_gate(t: Tensor, gate: Tensor, layout: str) -> Tensor:
    return (t.transpose(0, 1) if layout == "sequence_first" else t).reshape(gate.shape).to(gate.dtype).contiguous()


def _torch_fwd(
    x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float = 1e-6, layout: str = "same"
) -> Tensor:
    v, t, w = _wide_inputs(x, gate, weight, groups, layout)
    normed = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    return _as_gate(normed * w * torch.sigmoid(t), gate, layout)


def _torch_bwd(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float = 1e-6, layout: str = "same"
) -> tuple[Tensor, Tensor, Tensor]:
    v, t, w, d = _wide_inputs(x, gate, weight, groups, layout, dy)
    s = torch.sigmoid(t)
    rstd = torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    a, n = d * w * s, v * rstd
    dx = rstd * a - v * rstd**3 * (a * v).mean(-1, keepdim=True)
    dgate = n * a * torch.sigmoid(-t)
    dweight = nothing(x)
    if weight is not None:
        dweight = (d * s * n).reshape(-1, weight.shape[0]).sum(0).to(weight.dtype)
    return dx.reshape(x.shape).to(x.dtype).contiguous(), _as_gate(dgate, gate, layout), dweight


def _reference_fwd(x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float, layout: str) -> Tensor:
    check(metadata(x), metadata(gate), metadata(weight), groups, layout)
    return _torch_fwd(x, gate, weight, groups, eps, layout) if gate.numel() else gate.new_empty(gate.shape)


def _reference_bwd(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float, layout: str, weight_grad: bool
):
    check_bwd(metadata(dy), metadata(x), metadata(gate), metadata(weight), groups, layout, weight_grad)
    if gate.numel() == 0:
        dweight = weight.new_zeros(weight.shape) if weight_grad else nothing(x)
        return x.new_empty(x.shape), gate.new_empty(gate.shape), dweight
    dx, dgate, dweight = _torch_bwd(dy, x, gate, weight, groups, eps, layout)
    return dx, dgate, dweight if weight_grad else nothing(x)


def _fake_fwd(x, gate, weight, groups, eps, layout):
    return gate.new_empty(gate.shape)


def _fake_bwd(dy, x, gate, weight, groups, eps, layout, weight_grad):
    dweight = weight.new_empty(weight.shape) if weight_grad else nothing(x)
    return x.new_empty(x.shape), gate.new_empty(gate.shape), dweight


FORWARD = TorchOp(
    "group_rms_norm_gate_fwd(Tensor x, Tensor gate, Tensor? weight, int groups, float eps, str layout) -> Tensor",
    launch=_launch_fwd,
    reference=_reference_fwd,
    fake=_fake_fwd,
)
BACKWARD = TorchOp(
    "group_rms_norm_gate_bwd(Tensor dy, Tensor x, Tensor gate, Tensor? weight, int groups, float eps, str layout, "
    "bool weight_grad) -> (Tensor, Tensor, Tensor)",
    launch=_launch_bwd,
    reference=_reference_bwd,
    fake=_fake_bwd,
)


class _GroupRmsNormGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, groups, eps, layout):
        ctx.set_materialize_grads(False)
        ctx.options = groups, eps, layout
        ctx.save_for_backward(x, gate, weight)
        return FORWARD(x, gate, weight, groups, eps, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        wanted = ctx.needs_input_grad[:3]
        if dy is None:
            return (None,) * 6
        grads = BACKWARD(dy, *ctx.saved_tensors, *ctx.options, wanted[2])
        return *(grad if want else None for grad, want in zip(grads, wanted, strict=True)), None, None, None


def group_rms_norm_gate(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    *,
    groups: int,
    eps: float | None = None,
    layout: str = "same",
) -> Tensor:
    """Normalise each group of channels by its root mean square and gate the result.

    ``y = x / sqrt(mean over the group of x^2 + eps) * weight * sigmoid(gate)``. Computed in fp32 and rounded once.
    Differentiable once in x, gate and weight.

    Args:
        x: ``[..., channels]``, or ``[..., heads, head_dim]`` with as many channels in all; bfloat16, float16 or
            float32. Any strides, also those of a transposed ``[batch, heads, sequence, head_dim]`` if there are as
            many groups as heads (a copy is made unless channels are unit-stride and tokens evenly spaced in two
            levels). May be any object with ``__dlpack__``; the result is then of its kind.
        gate: One number for each channel, of x's dtype: ``[..., channels]`` with the leading dimensions of x in
            the order that `layout` says; its strides may differ.
        weight: ``[channels]``, or ``[channels / groups]`` shared by the groups, of x's dtype or float32; None for ones.
        groups: How many groups of neighbouring channels there are; any divisor of channels.
        eps: Added to the mean square; None for 1e-6.
        layout: ``"same"``, or ``"sequence_first"``: x is ``[batch, sequence, ...]``, gate and the result are
            ``[sequence, batch, channels]``.

    Returns:
        ``y``, dense, of gate's shape and x's dtype.
    """
    if eps is None:  # as a default value it would become symbolic under torch.compile(dynamic=True)
        eps = 1e-6
    if not isinstance(x, Tensor):
        return interop.call(group_rms_norm_gate, x, gate, weight, groups=groups, eps=eps, layout=layout)
    if is_grad_enabled() and needs_grad(x, gate, weight):
        return _GroupRmsNormGate.apply(x, gate, weight, groups, eps, layout)
    return FORWARD(x, gate, weight, groups, eps, layout)


OP = Op(
    "group_rms_norm_gate",
    public=("group_rms_norm_gate",),
    kernels=KERNELS,
    torch_ops=(FORWARD, BACKWARD),
)
