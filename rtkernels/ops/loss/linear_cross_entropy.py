"""The last linear layer and its cross entropy together, without logits and gradients that exist side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.ops.loss.cross_entropy_plan import (
    NONE,
    REDUCTION,
    REDUCTIONS,
    SOFTCAP,
    as_autocast,
    check_options,
    check_vocabulary,
    refuse_group,
)
from rtkernels.ops.loss.linear_cross_entropy_operators import (
    BACKWARD,
    FORWARD,
    add_gradients,
    check_inputs,
    scaled,
)
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import token
from rtkernels.runtime.operator.arguments import Within
from rtkernels.runtime.operator.autograd import constant, needs_grad, once_differentiable
from rtkernels.runtime.operator.kinds import meta_of
from rtkernels.runtime.operator.main_grad import start_of
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.torch_private import is_dynamo_compiling


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, bias, ignore_index, smoothing, z_loss, softcap, reduction, accuracy, lse,
                chunk_rows, in_fp32):  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3])
        ctx.starts, ctx.reduction = (start_of(weight, "a head"), start_of(bias, "a head")), reduction
        # The gradient of weight needs that of every row's loss, or the sum so far.
        ctx.later = reduction == NONE or any(ctx.starts)
        now = (False,) * 3 if ctx.later else ctx.needs
        options = (ignore_index, smoothing, z_loss, softcap)
        loss, hits, sums, *grads = FORWARD(
            hidden, weight, labels, bias, *options, reduction, accuracy, lse, chunk_rows, in_fp32, *now
        )
        ctx.more = (*options, chunk_rows, in_fp32)
        ctx.save_for_backward(*((hidden, weight, labels, bias) if ctx.later else grads))
        ctx.computed_gradient = not ctx.later
        ctx.mark_non_differentiable(hits, sums)
        return loss, hits, sums

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, _hits, _lse):
        if dloss is None:
            return (None,) * 13
        if any(ctx.starts):
            *options, chunk_rows, _ = ctx.more
            given = (*ctx.saved_tensors, tuple(options), chunk_rows, ctx.needs)
            dhidden, dweight, dbias = add_gradients(ctx.starts, ctx.reduction, dloss, *given)
            return dhidden, dweight, None, dbias, *(None,) * 9
        if ctx.later:
            grads = BACKWARD(dloss, *ctx.saved_tensors, *ctx.more, *ctx.needs)
        elif is_dynamo_compiling():
            grads = [(grad.float() * dloss).to(grad.dtype) for grad in ctx.saved_tensors]
        else:
            grads = scaled(ctx.saved_tensors, ctx.needs, dloss)
        dhidden, dweight, dbias = (grad if need else None for grad, need in zip(grads, ctx.needs, strict=True))
        return dhidden, dweight, None, dbias, *(None,) * 9


_OPTIONS = {
    "reduction": REDUCTION, "softcap": SOFTCAP,
    "chunk_rows": Within("int", "chunk_rows >= 1", "at least 1, or None"),
}  # fmt: skip


def _of_shards(
    *, hidden: Any, weight: Any, labels: Any, bias: Any, group: Any, vocab_start: Any, vocab_size: Any, **options: Any
) -> Any:
    from rtkernels.ops.loss.cross_entropy_shards import linear_cross_entropy_of_shards

    check_vocabulary(group, vocab_start, vocab_size)
    refuse_group(group)
    return linear_cross_entropy_of_shards(linear_cross_entropy, hidden, weight, labels, bias, options)


# The operator has a rule for chunk_rows=0, so that compiled code does not depend on the number of rows.
@public(options=_OPTIONS, defaults={"chunk_rows": 0}, sharded=("hidden weight", _of_shards))
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    return_lse: bool = False, return_accuracy: bool = False, chunk_rows: int | None = None,
    fp32_weight_grad: bool = False, group: Any = None, vocab_start: int | None = None, vocab_size: int | None = None,
    out: Tensor | tuple[Tensor | None, ...] | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Return ``cross_entropy(hidden @ weight.T + bias, labels)`` without storing all logits.

    Uses torch's GEMMs and the kernels of ``cross_entropy``, which overwrite logits with their gradient. All sums are in
    fp32, and gradients are rounded once, except that of a 16-bit weight with many rows. Its memory and rounding:

    - up to ``1.5 * hidden size`` rows, logits are computed in slabs of the vocabulary, and the weight's gradient reuses
      the memory of finished slabs: 1.6 times the weight's memory in total, one rounding;
    - up to ``8 * hidden size`` rows, at most four chunks of rows, each rounding the sum: 1.5 to 3 times the weight's
      memory. Its rounding error is up to 1.6 times that of one rounding; once logits have a spread of 4 and more, their
      own rounding dominates, and the gradient's error is 1.02 to 1.06 times as large;
    - with more rows, chunks are accumulated in an fp32 gradient of the weight: three times the weight's memory;
    - with `chunk_rows`, the weight's memory and one chunk of logits; the sum is rounded after every chunk;
    - with `fp32_weight_grad`, always one rounding.

    With ``"mean"`` and ``"sum"`` the forward pass computes the gradients, and the backward pass multiplies them by the
    incoming gradient if that is not 1, which is checked on the device; only one backward pass is possible. With
    ``"none"`` the backward pass computes the logits again. Logits and their gradient are rounded to hidden's dtype.
    Differentiable once in hidden, weight and bias.

    Args:
        hidden: ``[..., hidden size]``, bfloat16, float16 or float32.
        weight: ``[vocabulary, hidden size]``, in the same dtype (under autocast both are cast). For DTensors, hidden
            may be sharded by rows, and weight and bias by the vocabulary; results are DTensors.
        labels: ``[...]``, int32 or int64; a label outside the vocabulary is reported as in ``cross_entropy``.
        bias: ``[vocabulary]``, or None.
        ignore_index: As in ``cross_entropy``; but products read all of hidden, so NaN in an ignored row is NaN in the
            gradient of weight, as with a linear layer of torch.
        label_smoothing: As in ``cross_entropy``.
        z_loss: As in ``cross_entropy``.
        softcap: As in ``cross_entropy``.
        reduction: As in ``cross_entropy``; the mean is 0 if all rows are ignored.
        return_lse: As in ``cross_entropy``.
        return_accuracy: As in ``cross_entropy``.
        chunk_rows: Number of rows of logits at a time, for the least memory. Default: the rule above. A larger number
            is faster, needs more memory and rounds the gradient of a 16-bit weight less often.
        fp32_weight_grad: Round the gradient of a 16-bit weight once. Up to ``2 * hidden size`` rows by slabs, of which
            up to 30 % are computed twice (about 7 % more time); with more rows, and with `chunk_rows`, by an fp32 sum
            (three times the weight's memory). With `group`, it always is.
        group: A torch.distributed process group over which the vocabulary is split: every process passes its rows of
            weight and bias, and all hidden states and labels. Each gets the same loss, the complete gradient of hidden
            states, and the gradients of its own rows. Costs one all-gather of 20 bytes per row of hidden and one
            all-reduce of its gradient.
        vocab_start: With `group`: the first row of this process. Needed unless the parts are equal and in the order of
            ranks.
        vocab_size: With `vocab_start`: the size of the whole vocabulary.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        As in ``cross_entropy``.
    """
    check_vocabulary(group, vocab_start, vocab_size)
    hidden, weight, bias = as_autocast(hidden, weight, bias)
    options = (ignore_index, label_smoothing, z_loss, softcap or 0.0)
    if is_dynamo_compiling():
        options = (ignore_index, *(constant(value) for value in options[1:]))
    if group is not None:
        from rtkernels.ops.loss.cross_entropy_parallel import vocabulary_range
        from rtkernels.ops.loss.linear_cross_entropy_parallel import ParallelLinearCrossEntropy

        token("hidden", hidden.dtype)
        check_inputs(*map(meta_of, (hidden, weight, labels, bias)), chunk_rows)
        check_options(*options[1:], REDUCTIONS[reduction])
        span = vocabulary_range(weight.shape[0], group, vocab_start, vocab_size)
        loss, accuracy, lse = ParallelLinearCrossEntropy.apply(
            hidden, weight, labels, bias, options, REDUCTIONS[reduction], chunk_rows, group, *span
        )
    else:
        rest = (REDUCTIONS[reduction], return_accuracy, return_lse, chunk_rows, fp32_weight_grad)
        if is_grad_enabled() and needs_grad(hidden, weight, bias):
            loss, accuracy, lse = _LinearCrossEntropy.apply(hidden, weight, labels, bias, *options, *rest)
        else:
            loss, accuracy, lse, *_ = FORWARD(hidden, weight, labels, bias, *options, *rest, False, False, False)
    if not return_lse and not return_accuracy:
        return loss
    return loss, *((lse,) if return_lse else ()), *((accuracy,) if return_accuracy else ())


OP = Op(
    "linear_cross_entropy", public=("linear_cross_entropy",), kernels=(), torch_ops=(FORWARD, BACKWARD),
    uses=("cross_entropy",),
)  # fmt: skip
