"""RMS normalisation of groups of channels with a gate (the end of a linear attention), and its backward."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.ops.norm.group_rms_norm_gate_plan import KERNELS, check, check_bwd, plan_bwd, plan_fwd
from rtkernels.runtime.call.public import public
from rtkernels.runtime.layout import nothing
from rtkernels.runtime.operator.autograd import applied, needs_grad, once_differentiable
from rtkernels.runtime.operator.declared import Argument, Dense, Operator
from rtkernels.runtime.operator.plan import Memory
from rtkernels.runtime.operator.registry import Op

# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _grouped(t: Tensor, groups: int, cols: int, lead: int, swap: bool) -> Tensor:
    """Return a tensor as fp32 (or wider) [tokens..., groups, cols], its first two dimensions swapped on request."""
    grouped = t.to(torch.promote_types(t.dtype, torch.float32)).reshape(*t.shape[:lead], groups, cols)
    return grouped.transpose(0, 1) if swap else grouped


def _grouped_inputs(x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, layout: str, *more: Tensor):
    """Return x, gate, weight and tensors like gate as [tokens..., groups, cols], all in the layout of x."""
    lead, channels = gate.dim() - 1, gate.shape[-1]
    cols, swap = channels // groups, layout == "sequence_first"
    w = torch.ones((), dtype=torch.float32, device=x.device)
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


def _gated(t: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """Return the gate and its derivative."""
    s, rest = torch.sigmoid(t), torch.sigmoid(-t)
    return (t * s, s * (1 + t * rest)) if act == "silu" else (s, s * rest)


def _torch_fwd(
    x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float = 1e-6, layout: str = "same",
    act: str = "sigmoid", gate_first: bool = False,
) -> Tensor:  # fmt: skip
    v, t, w = _grouped_inputs(x, gate, weight, groups, layout)
    s, _ = _gated(t, act)
    h = v * s if gate_first else v
    normed = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * w
    return _as_gate(normed if gate_first else normed * s, gate, layout)


def _torch_bwd(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float = 1e-6, layout: str = "same",
    act: str = "sigmoid", gate_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    v, t, w, d = _grouped_inputs(x, gate, weight, groups, layout, dy)
    s, slope = _gated(t, act)
    h, a = (v * s, d * w) if gate_first else (v, d * w * s)
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    dh = rstd * a - h * rstd**3 * (a * h).mean(-1, keepdim=True)
    dx, dgate = (dh * s, dh * v * slope) if gate_first else (dh, v * rstd * d * w * slope)
    dweight = nothing(x)
    if weight is not None:
        dweight = (d * s * v * rstd).reshape(-1, weight.shape[0]).sum(0).to(weight.dtype)
    return dx.reshape(x.shape).to(x.dtype).contiguous(), _as_gate(dgate, gate, layout), dweight


def _reference_fwd(x, gate, weight, groups, eps, layout, act, gate_first) -> Tensor:
    if not gate.numel():
        return gate.new_empty(gate.shape)
    return _torch_fwd(x, gate, weight, groups, eps, layout, act, gate_first)


def _reference_bwd(dy, x, gate, weight, groups, eps, layout, act, gate_first, weight_grad):
    if gate.numel() == 0:
        dweight = weight.new_zeros(weight.shape) if weight_grad else nothing(x)
        return x.new_empty(x.shape), gate.new_empty(gate.shape), dweight
    dx, dgate, dweight = _torch_bwd(dy, x, gate, weight, groups, eps, layout, act, gate_first)
    return dx, dgate, dweight if weight_grad else nothing(x)


_INPUTS = Argument("x", None), Argument("gate", None), Dense("weight", None, optional=True)
FORWARD = Operator(
    "group_rms_norm_gate_fwd", _INPUTS, options="int groups, float eps, str layout, str act, bool gate_first",
    results="y",
    outputs=lambda gate: (Memory.like(gate),), plan=plan_fwd, reference=_reference_fwd, check=check,
)  # fmt: skip
BACKWARD = Operator(
    "group_rms_norm_gate_bwd", (Argument("dy", None), *_INPUTS),
    options="int groups, float eps, str layout, str act, bool gate_first, bool weight_grad", results="dx dgate dweight",
    outputs=lambda x, gate, weight, weight_grad: (
        Memory.like(x), Memory.like(gate), Memory.like(weight) if weight_grad else None,
    ),
    plan=plan_bwd, reference=_reference_bwd, check=check_bwd,
)  # fmt: skip
_forward = FORWARD.call


class _GroupRmsNormGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, *options):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, gate, weight)
        ctx.options = options
        return _forward(x, gate, weight, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 8
        need_x, need_gate, need_weight = ctx.needs_input_grad[:3]
        dx, dgate, dweight = BACKWARD.call(dy, *ctx.saved_tensors, *ctx.options, need_weight)
        grads = dx if need_x else None, dgate if need_gate else None, dweight if need_weight else None
        return *grads, None, None, None, None, None


_differentiable = applied(_GroupRmsNormGate)


@public(defaults={"eps": 1e-6})
def group_rms_norm_gate(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, *, groups: int, eps: float | None = None,
    layout: str = "same", act: str = "sigmoid", gate_first: bool = False,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Normalise each group of channels by its root mean square and gate the result.

    ``y = x / sqrt(mean over the group of x^2 + eps) * weight * sigmoid(gate)``; with gate_first
    x is multiplied by the activated gate before it is normalised. Computed in fp32 and rounded once.
    Differentiable once in x, gate and weight.

    Args:
        x: ``[..., channels]``, or ``[..., heads, head_dim]`` with the same number of channels in total; bfloat16,
            float16 or float32. Any strides, including those of a transposed ``[batch, heads, sequence, head_dim]`` if
            there are as many groups as heads (copied unless channels are unit-stride and tokens are evenly spaced along
            at most two dimensions). Any object with ``__dlpack__`` is accepted; results are then of the same kind.
        gate: One value per channel, in x's dtype: ``[..., channels]`` with the leading dimensions of x in the order
            given by `layout`; its strides may differ.
        weight: ``[channels]``, or ``[channels / groups]`` shared by the groups, in x's dtype or float32. Default: 1.
        groups: Number of groups of consecutive channels; any divisor of the number of channels.
        eps: Added to the mean square. Default: 1e-6.
        layout: ``"same"``, or ``"sequence_first"``: x is ``[batch, sequence, ...]``, gate and the result are
            ``[sequence, batch, channels]``.
        act: Activation of the gate, ``"sigmoid"``, or ``"silu"`` for ``gate * sigmoid(gate)``.
        gate_first: Gate before the normalisation, as Mamba-2 does, instead of after it.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        ``y``, contiguous, in gate's shape and x's dtype.
    """
    if is_grad_enabled() and needs_grad(x, gate, weight):
        return _differentiable(x, gate, weight, groups, eps, layout, act, gate_first)
    return _forward(x, gate, weight, groups, eps, layout, act, gate_first)


OP = Op(
    "group_rms_norm_gate", public=("group_rms_norm_gate",), kernels=KERNELS, torch_ops=(FORWARD, BACKWARD),
    uses=("column_sum",),
)  # fmt: skip
