"""Losses for distillation: Kullback-Leibler divergence and generalised Jensen-Shannon divergence."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.loss import divergence_plan as plan
from rtkernels.ops.loss.cross_entropy_operators import SCALE
from rtkernels.ops.loss.divergence_operators import BACKWARD, BOTH, EACH, FORWARD
from rtkernels.ops.loss.divergence_plan import BY_ELEMENTS, BY_FIRST, BY_NOTHING, LOGARITHM, MIXED, PROBABILITY, REVERSE
from rtkernels.ops.reduce.softmax import log_softmax
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import check_dimensions, token
from rtkernels.runtime.operator.arguments import Within, check_integer, check_number
from rtkernels.runtime.operator.autograd import applied, constant, needs_grad, once_differentiable
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.torch_private import is_dynamo_compiling

_REDUCTIONS = ("none", "mean", "batchmean", "sum")
_DIVIDED_BY = {"mean": BY_ELEMENTS, "batchmean": plan.BY_ROWS}


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, target, labels, ignore, mode, beta, factor, over):
        ctx.set_materialize_grads(False)
        ctx.settings = ignore, mode, beta
        if factor is None:
            loss, total = EACH.call(x, target, labels, ignore, mode, beta), None
        else:
            total = FORWARD.call(x, target, labels, ignore, mode, beta, factor, over)
            loss = total[0].clone()
        ctx.save_for_backward(x, target, labels, total)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grads = [None, None]
        if grad is not None:
            x, target, labels, total = ctx.saved_tensors
            for i in (0, 1):
                if ctx.needs_input_grad[i]:
                    grads[i] = BACKWARD.call(grad, x, target, labels, total, *ctx.settings, i == 1)
        return *grads, None, None, None, None, None, None


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, target, labels, ignore, mode, beta, factor, over):
        ctx.set_materialize_grads(False)
        total, dx = BOTH.call(x, target, labels, ignore, mode, beta, factor, over)
        ctx.save_for_backward(dx)
        ctx.computed_gradient = True
        return total[0].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if grad is None:
            return (None,) * 8
        (dx,) = ctx.saved_tensors
        if is_dynamo_compiling():
            dx = (dx.float() * grad).to(dx.dtype)
        else:
            SCALE(dx, grad)
        return dx, *(None,) * 7


_differentiable, _differentiable_one_pass = applied(_Divergence), applied(_OnePass)


def _divergence(x, target, labels, ignore, mode, beta, reduction, per_row: bool, temperature, one_pass) -> Tensor:
    """Reduce and differentiate. per_row: "batchmean" is the mean over rows, not over the first dimension."""
    check_integer("ignore_index", ignore)
    if reduction not in _REDUCTIONS:
        raise ArgumentError(f"reduction is {reduction!r}; expected one of {', '.join(_REDUCTIONS)}")
    scale = temperature * temperature
    factor, over = None if reduction == "none" else scale, _DIVIDED_BY.get(reduction, BY_NOTHING)
    if reduction == "batchmean" and labels is None and not per_row:
        over = BY_ELEMENTS if x.dim() == 1 else BY_FIRST  # as torch: the first dimension, even if it is the classes
    if is_grad_enabled() and needs_grad(x, target):
        if mode == PROBABILITY and target.requires_grad:
            raise ArgumentError("target requires grad; expected none, or log_target=True")
        if is_dynamo_compiling():
            beta, factor = constant(beta), None if factor is None else constant(factor)
        one_pass = one_pass and factor is not None and not target.requires_grad
        function = _differentiable_one_pass if one_pass else _differentiable
        loss = function(x, target, labels, ignore, mode, beta, factor, over)
    elif factor is None:
        loss = EACH.call(x, target, labels, ignore, mode, beta)
    else:
        loss = FORWARD.call(x, target, labels, ignore, mode, beta, factor, over)[0]
    return loss * scale if factor is None and scale != 1.0 else loss


def _log_probabilities(input: Tensor, target: Tensor, temperature: float) -> list[Tensor]:
    for name, logits in (("input", input), ("target", target)):
        if not isinstance(logits, Tensor):
            raise ArgumentError(f"{name} is a {type(logits).__name__}; expected a torch.Tensor")
        token(name, logits.dtype)
        check_dimensions(name, logits.shape)
    return [log_softmax(logits, scale=1.0 / temperature) for logits in (input, target)]


def _check_temperature(temperature: float, from_logits: bool) -> None:
    if not 0.0 < check_number("temperature", temperature) < float("inf"):
        raise ArgumentError(f"temperature is {temperature}; expected a positive number")
    if temperature != 1.0 and not from_logits:
        raise ArgumentError(
            f"temperature is {temperature} for log-probabilities; expected 1, or from_logits=True with logits"
        )


@public
def kl_div(
    input: Tensor, target: Tensor, *, log_target: bool = False, reduction: str = "batchmean",
    labels: Tensor | None = None, ignore_index: int = -100, from_logits: bool = False, temperature: float = 1.0,
    one_pass: bool = False,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the divergence ``sum(P * (log P - log Q))`` of predictions Q from a target P, like torch's ``kl_div``.

    Computed in fp32. Classes with P = 0 contribute 0, even if log Q is -inf (torch gives NaN). Differentiable once in
    input, and in target with `log_target` or `from_logits`; a target given as probabilities must not require grad.

    Args:
        input: log Q, ``[..., classes]``; bfloat16, float16 or float32, any strides (copied unless rows are unit-stride
            and evenly spaced). Any object with ``__dlpack__`` is accepted; results are then of the same kind.
        target: P, or log P with `log_target`; in input's shape and dtype.
        log_target: Whether the target is given as logarithms.
        reduction: "batchmean" (the sum divided by the size of the first dimension), "mean" (by the number of elements),
            "sum", or "none" (every term, in input's dtype). Mean and batchmean of empty inputs are 0.
        labels: int32 or int64, input's shape without the last dimension: rows whose label is `ignore_index` contribute
            0 and have no gradient. "batchmean" then divides by the number of other rows, "mean" by the number of their
            elements.
        ignore_index: See `labels`.
        from_logits: Both arguments are logits. ``log_softmax(logits / temperature)`` of each is computed first and
            rounded to their dtype, and the loss is multiplied by ``temperature ** 2``, which keeps the magnitude of the
            gradients.
        temperature: Positive; other than 1 only with `from_logits`.
        one_pass: Compute the gradient of input in the forward pass, so that both tensors are read once. The backward
            pass multiplies it by the incoming gradient if that is not 1 (with a second rounding); this is checked on
            the device. Only one backward pass is possible. Has no effect for "none", if target requires grad, or if no
            gradient is needed.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        A float32 scalar, or with "none" a contiguous tensor in input's shape and dtype.
    """
    _check_temperature(temperature, from_logits)
    if from_logits:
        input, target = _log_probabilities(input, target, temperature)
    mode = LOGARITHM if log_target or from_logits else PROBABILITY
    return _divergence(input, target, labels, ignore_index, mode, 0.0, reduction, False, temperature, one_pass)


@public(options={"beta": Within("float", "0.0 <= beta <= 1.0", "0 to 1")})
def jsd(
    input: Tensor, target: Tensor, *, beta: float = 0.5, reduction: str = "batchmean", labels: Tensor | None = None,
    ignore_index: int = -100, from_logits: bool = False, temperature: float = 1.0, one_pass: bool = False,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the generalised Jensen-Shannon divergence of predictions Q and a target P.

    ``beta * KL(P || M) + (1 - beta) * KL(Q || M)`` with ``M = beta * P + (1 - beta) * Q``; by convention KL(P || Q) for
    beta = 0 and KL(Q || P) for beta = 1. Computed in fp32; classes with probability 0 contribute 0. Differentiable once
    in both.

    Args:
        input: log Q, ``[..., classes]``; as for ``kl_div``.
        target: log P, of input's shape and dtype.
        beta: Weight of P in the mixture M, 0 to 1.
        reduction: "batchmean" (the sum divided by the number of rows), "mean" (by the number of elements), "sum", or
            "none" (every term, in input's dtype). Mean and batchmean of empty inputs are 0.
        labels: int32 or int64, input's shape without the last dimension: rows whose label is `ignore_index` contribute
            0, have no gradient, and are not counted as rows.
        ignore_index: See `labels`.
        from_logits: Both arguments are logits, as for ``kl_div``.
        temperature: Positive; other than 1 only with `from_logits`.
        one_pass: As for ``kl_div``.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        A float32 scalar, or with "none" a contiguous tensor of input's shape and dtype.
    """
    _check_temperature(temperature, from_logits)
    if from_logits:
        input, target = _log_probabilities(input, target, temperature)
    mode = LOGARITHM if beta == 0.0 else REVERSE if beta == 1.0 else MIXED
    return _divergence(input, target, labels, ignore_index, mode, beta, reduction, True, temperature, one_pass)


OP = Op(
    "divergence", public=("kl_div", "jsd"), kernels=plan.KERNELS, torch_ops=(FORWARD, BOTH, EACH, BACKWARD),
    uses=("softmax", "cross_entropy"),
)  # fmt: skip
