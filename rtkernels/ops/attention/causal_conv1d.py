"""Short causal convolutions over time, before linear attention: forward, gradients, and one token at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.causal_conv1d_plan import KERNELS, WIDTHS, plan, plan_backward, plan_step
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import check_same, token
from rtkernels.runtime.layout import FLOAT_DTYPES, nothing
from rtkernels.runtime.operator.autograd import applied, once_differentiable
from rtkernels.runtime.operator.declared import Dense, InPlaceExact, Meta, Operator, UnitStride
from rtkernels.runtime.operator.plan import Memory
from rtkernels.runtime.operator.registry import Op

# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _sums(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _sequences(x: Tensor, cu: Tensor | None) -> Iterator[tuple[int, int | slice]]:
    """Yield each sequence's number, and what selects its rows."""
    if cu is None:
        yield from ((b, b) for b in range(x.shape[0]))
    else:
        ends = cu.tolist()
        yield from ((b, slice(ends[b], max(ends[b + 1], ends[b]))) for b in range(len(ends) - 1))


def _padded(x: Tensor, state: Tensor | None, rows: int) -> Tensor:
    """Return [rows + length, channels]: a sequence behind the last `rows` rows of its state, or behind zeros."""
    if state is None:
        before = x.new_zeros(rows, x.shape[-1])
    else:
        before = torch.cat((x.new_zeros(rows, x.shape[-1]), state.to(x.dtype).t()))[-rows:]
    return torch.cat((before, x))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return z of one sequence, and its inputs behind those of its state; fp32 or wider."""
    dtype, taps, length = _sums(x), weight.shape[1], x.shape[0]
    rows = _padded(x.to(dtype), state, taps - 1)
    z = sum(rows[j : j + length] * weight[:, j].to(dtype) for j in range(taps))
    return (z if bias is None else z + bias.to(dtype)), rows


def _reference(x, weight, bias, initial_state, cu_seqlens, silu, columns, wants_state):
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    y = x.new_zeros(x.shape)
    final = x.new_zeros(count, x.shape[-1], columns) if wants_state else nothing(x)
    for b, rows in _sequences(x, cu_seqlens):
        state = None if initial_state is None else initial_state[b]
        z, _ = _linear(x[rows], weight, bias, state)
        y[rows] = (torch.nn.functional.silu(z) if silu else z).to(x.dtype)
        if wants_state:
            final[b] = _padded(x[rows], state, columns)[x[rows].shape[0] :].t()
    return y, final


def _reference_bwd(
    dy, dfinal_state, x, weight, bias, initial_state, cu_seqlens, silu, columns, need_x, need_weight, need_bias,
    need_initial_state,
):  # fmt: skip
    dtype, taps = _sums(x), weight.shape[1]
    dx = x.new_zeros(x.shape)
    dweight, dbias = weight.new_zeros(weight.shape, dtype=dtype), weight.new_zeros(weight.shape[0], dtype=dtype)
    dinitial = nothing(x) if initial_state is None else torch.zeros_like(initial_state)
    for b, rows in _sequences(x, cu_seqlens):
        length = x[rows].shape[0]
        z, inputs = _linear(x[rows], weight, bias, None if initial_state is None else initial_state[b])
        dz = dy[rows].to(dtype)
        if silu:
            s = torch.sigmoid(z)
            dz = dz * s * (1 + z * (1 - s))
        before = max(columns, taps - 1)  # rows of states and padding
        grad = dz.new_zeros(before + length, x.shape[-1])
        for j in range(taps):
            grad[before - taps + 1 + j : before - taps + 1 + j + length] += dz * weight[:, j].to(dtype)
            dweight[:, j] += (dz * inputs[j : j + length]).sum(0)
        dbias += dz.sum(0)
        if dfinal_state is not None:
            grad[before + length - columns :] += dfinal_state[b].to(dtype).t()
        dx[rows] = grad[before:].to(x.dtype)
        if initial_state is not None:
            dinitial[b] = grad[before - columns : before].t().to(x.dtype)
    return (
        dx if need_x else nothing(x),
        dweight.to(weight.dtype) if need_weight else nothing(x),
        dbias.to(bias.dtype) if need_bias else nothing(x),
        dinitial if need_initial_state else nothing(x),
    )


def _reference_step(x, weight, bias, state, silu):
    window = torch.cat((state, x.unsqueeze(-1)), -1)
    z = (window[..., -weight.shape[1] :].to(_sums(x)) * weight.to(_sums(x))).sum(-1)
    z = z if bias is None else z + bias.to(z.dtype)
    state.copy_(window[..., 1:])
    return (torch.nn.functional.silu(z) if silu else z).to(x.dtype)


# ---- operators ------------------------------------------------------------------------------------------------------


class _Channels(UnitStride):
    """Neighbouring channels; a copy of an empty tensor would keep its strides."""

    def fits(self, meta: Meta) -> bool:
        return 0 in meta.shape or super().fits(meta)


def _check_filter(x: Meta, weight: Meta, bias: Meta | None) -> None:
    channels = x.shape[-1]
    token("weight", weight.dtype, (x.dtype, torch.float32))
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] not in WIDTHS:
        raise ArgumentError(
            f"weight has shape {tuple(weight.shape)}; expected ({channels}, taps) for x of shape {tuple(x.shape)}, "
            f"with {WIDTHS[0]} to {WIDTHS[-1]} taps"
        )
    if bias is not None:
        token("bias", bias.dtype, (x.dtype, torch.float32))
        check_same("bias", tuple(bias.shape), (channels,), "shape", of="channels of x")


def _check_state(name: str, state: Meta | None, x: Meta, count: int, columns: tuple[int, ...]) -> None:
    if state is None:
        return
    check_same(name, state.dtype, x.dtype, "dtype", of="x")
    expected = [(count, x.shape[-1], c) for c in columns]
    if tuple(state.shape) not in expected:
        raise ArgumentError(f"{name} has shape {tuple(state.shape)}; expected {' or '.join(map(str, expected))}")


def _check(x, weight, bias, initial_state, cu_seqlens, columns) -> None:
    cu, dims = cu_seqlens, 3 if cu_seqlens is None else 2
    if x.dim() != dims:
        order = "[batch, length, channels]" if cu is None else "[tokens, channels] of packed sequences"
        raise ArgumentError(f"x has shape {tuple(x.shape)}; expected {dims} dimensions, {order}")
    if cu is not None and (cu.dtype != torch.int32 or cu.dim() != 1 or cu.shape[0] < 1):
        raise ArgumentError(f"cu_seqlens is {cu.dtype} {tuple(cu.shape)}; expected int32 [sequences + 1]")
    _check_filter(x, weight, bias)
    count = x.shape[0] if cu is None else cu.shape[0] - 1
    if count > 65535 or x.shape[-1] > 65535 * 32:
        raise ArgumentError(f"x has shape {tuple(x.shape)}; expected up to 65535 sequences and 2097120 channels")
    _check_state("initial_state", initial_state, x, count, (columns,))


def _outputs(x, initial_state, cu_seqlens, columns, wants_state):
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final = Memory((count, x.shape[-1], columns), x.dtype) if wants_state else None
    return Memory(tuple(x.shape), x.dtype), final


_INPUTS = (
    _Channels("x"), Dense("weight", None), Dense("bias", None, optional=True),
    Dense("initial_state", None, optional=True), Dense("cu_seqlens", None, optional=True),
)  # fmt: skip
FORWARD = Operator(
    "causal_conv1d_fwd", _INPUTS, options="bool silu, int columns, bool wants_state", results="y final_state",
    outputs=_outputs, plan=plan, reference=_reference, check=_check, plans_empty=True,
)  # fmt: skip


def _check_backward(dy, dfinal_state, x, weight, bias, initial_state, cu_seqlens, columns, need_bias) -> None:
    _check(x, weight, bias, initial_state, cu_seqlens, columns)
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    _check_state("dfinal_state", dfinal_state, x, count, (columns,))
    if need_bias and bias is None:
        raise ArgumentError("need_bias is True but there is no bias")


def _backward_outputs(x, weight, bias, initial_state, need_x, need_weight, need_bias, need_initial_state):
    empty = 0 in x.shape  # without rows the sums are 0
    return (
        Memory(tuple(x.shape), x.dtype) if need_x else None,
        Memory(tuple(weight.shape), weight.dtype, zero=empty) if need_weight else None,
        Memory(tuple(bias.shape), bias.dtype, zero=empty) if need_bias else None,
        Memory.like(initial_state) if need_initial_state and initial_state is not None else None,
    )


BACKWARD = Operator(
    "causal_conv1d_bwd", (_Channels("dy", like="x"), Dense("dfinal_state", None, optional=True), *_INPUTS),
    options="bool silu, int columns, bool need_x, bool need_weight, bool need_bias, bool need_initial_state",
    results="dx dweight dbias dinitial_state", outputs=_backward_outputs, plan=plan_backward,
    reference=_reference_bwd, check=_check_backward, plans_empty=True,
)  # fmt: skip


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, initial_state, cu_seqlens, silu, columns, wants_state):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, initial_state, cu_seqlens)
        ctx.options = silu, columns
        return FORWARD.call(x, weight, bias, initial_state, cu_seqlens, silu, columns, wants_state)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dfinal_state):
        if dy is None and dfinal_state is None:
            return (None,) * 8
        x, *others = ctx.saved_tensors
        if dy is None:
            dy = x.new_zeros(x.shape)
        if dfinal_state is not None and not dfinal_state.numel():
            dfinal_state = None
        need = ctx.needs_input_grad[:4]
        grads = BACKWARD.call(dy, dfinal_state, x, *others, *ctx.options, *need)
        return *(grad if needed else None for grad, needed in zip(grads, need, strict=True)), None, None, None, None


_differentiable = applied(_CausalConv1d)


def _is_silu(activation: str | None) -> bool:
    if activation not in ("silu", None):
        raise ArgumentError(f"activation is {activation!r}; expected 'silu' or None")
    return activation is not None


@public(tensors="weight")
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = "silu",
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None, return_state: bool = False,
    out: Tensor | tuple[Tensor | None, ...] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Convolve each channel with its own short causal filter over time, and apply silu.

    ``z[t] = bias + sum over j of weight[:, j] * x[t - taps + 1 + j]`` within a sequence, ``y = silu(z)``. Computed in
    fp32 and rounded once. Differentiable in x, weight, bias and initial_state, also through the final state;
    deterministic.

    Args:
        x: bfloat16, float16 or float32 [batch, length, channels], or [tokens, channels] of packed sequences. Any
            strides; copied unless channels are unit-stride, as in ``y.transpose(1, 2)`` of a model's [batch, channels,
            length] view of a projection.
        weight: [channels, taps], 2 to 8 taps, the last one of the row itself, in x's dtype or float32.
        bias: [channels], in x's dtype or float32.
        activation: ``"silu"``, or None for z itself.
        initial_state: [batch or sequences, channels, taps] (or taps - 1), in x's dtype: the inputs before the first
            row, the latest one last. Default: zeros.
        cu_seqlens: int32 [sequences + 1] on the device: sequence b has rows ``cu_seqlens[b]`` to ``[b + 1]``. Rows
            after the last sequence give 0.
        return_state: Also return the last inputs of each sequence.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        ``y``, contiguous, in x's shape and dtype; with return_state a pair of it and the state [batch or sequences,
        channels, taps], or with as many columns as initial_state.
    """
    silu = _is_silu(activation)
    columns = initial_state.shape[-1] if isinstance(initial_state, Tensor) and initial_state.dim() == 3 else 0
    if weight.dim() == 2 and columns not in (weight.shape[1], weight.shape[1] - 1):
        columns = weight.shape[1]  # a state of another shape is refused
    values = (x, weight, bias, initial_state, cu_seqlens, silu, columns, bool(return_state))
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in values[:4])
    y, final = _differentiable(*values) if differentiated else FORWARD.call(*values)
    return (y, final) if return_state else y


# ---- one token ------------------------------------------------------------------------------------------------------


def _check_step(x: Meta, weight: Meta, bias: Meta | None, state: Meta) -> None:
    if x.dim() != 2:
        raise ArgumentError(f"x has shape {tuple(x.shape)}; expected 2 dimensions, [batch, channels]")
    _check_filter(x, weight, bias)
    _check_state("state", state, x, x.shape[0], (weight.shape[1], weight.shape[1] - 1))


ONE = Operator(
    "causal_conv1d_step_",
    (
        _Channels("x"), Dense("weight", None), Dense("bias", None, optional=True), InPlaceExact("state", FLOAT_DTYPES),
    ),
    options="bool silu", results="y", outputs=lambda x: (Memory(tuple(x.shape), x.dtype),), plan=plan_step,
    reference=_reference_step, check=_check_step,
)  # fmt: skip


@public(tensors="weight", no_gradients="x weight bias state")
def causal_conv1d_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, activation: str | None = "silu",
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``causal_conv1d`` for one more token per sequence, and shift it into the states.

    Args:
        x: bfloat16, float16 or float32 [batch, channels].
        weight: [channels, taps], 2 to 8 taps, in x's dtype or float32.
        bias: [channels], in x's dtype or float32, or None.
        state: [batch, channels, taps] (or taps - 1) in x's dtype, contiguous: the latest inputs, the last one last;
            overwritten.
        activation: ``"silu"``, or None.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        [batch, channels]. Not differentiable.
    """
    return ONE.call(x, weight, bias, state, _is_silu(activation))


OP = Op(
    "causal_conv1d", public=("causal_conv1d", "causal_conv1d_step"), kernels=KERNELS,
    torch_ops=(FORWARD, BACKWARD, ONE), uses=("column_sum",),
)  # fmt: skip
