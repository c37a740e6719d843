"""Cross entropy: in two passes, in one that writes the gradient at once, over a vocabulary split between processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.loss import cross_entropy_soft as soft
from rtkernels.ops.loss.cross_entropy_operators import (
    BACKWARD,
    BACKWARD_IN_PLACE,
    FORWARD,
    ONE_PASS,
    ONE_PASS_IN_PLACE,
    PARTS,
    SCALE,
)
from rtkernels.ops.loss.cross_entropy_plan import (
    KERNELS,
    MEAN,
    REDUCTION,
    REDUCTIONS,
    SOFTCAP,
    check_options,
    check_vocabulary,
)
from rtkernels.ops.loss.label_report import raise_pending
from rtkernels.runtime.call.public import public
from rtkernels.runtime.operator.autograd import applied, constant, needs_grad, once_differentiable, refuse_leaf
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.operator.sharding import is_sharded
from rtkernels.runtime.torch_private import is_dynamo_compiling


class _TwoPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, ignore_index, smoothing, z_loss, softcap, reduction, accuracy, in_place):
        ctx.set_materialize_grads(False)
        loss, hits, stats, factor = FORWARD.call(
            logits, labels, ignore_index, smoothing, z_loss, softcap, reduction, accuracy
        )
        ctx.save_for_backward(logits, labels, stats, factor)
        ctx.options, ctx.mean, ctx.in_place = (ignore_index, smoothing, z_loss, softcap), reduction == MEAN, in_place
        ctx.mark_non_differentiable(hits, stats)
        return loss, hits, stats

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, _hits, _stats):
        if dloss is None:
            return (None,) * 9
        logits, labels, stats, factor = ctx.saved_tensors
        more = (labels, stats, factor if ctx.mean else None, *ctx.options, 0, logits.shape[-1])
        if ctx.in_place:
            BACKWARD_IN_PLACE(dloss, logits, *more)
            return logits.detach(), *(None,) * 8
        return BACKWARD.call(dloss, logits, *more), *(None,) * 8


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, ignore_index, smoothing, z_loss, softcap, reduction, accuracy, in_place):
        ctx.set_materialize_grads(False)
        options = (ignore_index, smoothing, z_loss, softcap, reduction, accuracy)
        if in_place:
            loss, hits, stats = ONE_PASS_IN_PLACE(logits, labels, *options)
            dlogits = logits.detach()
        else:
            loss, hits, stats, dlogits = ONE_PASS.call(logits, labels, *options)
        ctx.save_for_backward(dlogits)
        ctx.computed_gradient = True
        ctx.mark_non_differentiable(hits, stats)
        return loss, hits, stats

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, _hits, _stats):
        if dloss is None:
            return (None,) * 9
        (dlogits,) = ctx.saved_tensors
        if is_dynamo_compiling():
            scale = dloss if dloss.dim() == 0 else dloss.unsqueeze(-1)
            return (dlogits.float() * scale).to(dlogits.dtype), *(None,) * 8
        SCALE(dlogits, dloss)
        return dlogits, *(None,) * 8


_differentiable, _differentiable_one_pass = applied(_TwoPass), applied(_OnePass)


def _single(logits: Tensor, labels: Tensor, options, reduction: int, accuracy: bool, one_pass: bool, in_place: bool):
    """Return loss, accuracy and log-sum-exp."""
    if is_grad_enabled() and needs_grad(logits):
        if is_dynamo_compiling():
            in_place = False  # a gradient that takes the place of an input cannot be traced
            options = (options[0], *(constant(value) for value in options[1:]))
        function = _differentiable_one_pass if one_pass else _differentiable
        loss, hits, stats = function(logits, labels, *options, reduction, accuracy, in_place)
    else:
        loss, hits, stats, _ = FORWARD.call(logits, labels, *options, reduction, accuracy)
    return loss, hits, stats


def _weighted(logits, labels, weight, options, reduction, one_pass, in_place, refused) -> tuple[Tensor, Tensor]:
    """Return loss and log-sum-exp with class weights, or for labels that are probabilities."""
    probabilities = isinstance(labels, Tensor) and labels.is_floating_point()
    what = "probabilities for labels" if probabilities else "weight"
    ignore_index, smoothing, softcap = options
    check_options(smoothing, 0.0, softcap, reduction)
    if is_sharded(logits) or is_sharded(labels) or is_sharded(weight):
        raise ArgumentError(f"logits, labels or weight is a DTensor; expected plain tensors with {what}")
    fused = probabilities or smoothing != 0
    refused |= {"one_pass": one_pass and fused, "in_place": in_place and fused}
    for name, given in refused.items():
        if given:
            raise ArgumentError(f"{name} is given with {what}{' and label_smoothing' * (not probabilities and fused)}")
    weight = soft.class_weights(weight, logits)
    if probabilities:
        if ignore_index != -100:
            raise ArgumentError(f"ignore_index is {ignore_index} with probabilities for labels; expected the default")
        if labels.requires_grad and is_grad_enabled():
            raise ArgumentError("labels requires a gradient; expected none: the loss is differentiable in logits only")
        losses, lse = soft.soft_losses(logits, labels, None, weight, options)
        return soft.reduced(losses, None, weight, ignore_index, reduction), lse
    if fused:
        losses, lse = soft.soft_losses(logits, None, labels, weight, options)
    else:
        if in_place:
            refuse_leaf("logits", logits)
        every = ignore_index, 0.0, 0.0, softcap
        losses, _, stats = _single(logits, labels, every, REDUCTIONS["none"], False, one_pass, in_place)
        losses = losses * soft.row_weights(labels, weight, labels != ignore_index)
        lse = stats.detach().sum(0).view(labels.shape)
    return soft.reduced(losses, labels, weight, ignore_index, reduction), lse


@public(options={"reduction": REDUCTION, "softcap": SOFTCAP})
def cross_entropy(
    logits: Tensor, labels: Tensor, *, weight: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    return_lse: bool = False, return_accuracy: bool = False, one_pass: bool = False, in_place: bool = False,
    group: Any = None, vocab_start: int | None = None, vocab_size: int | None = None,
    out: Tensor | tuple[Tensor | None, ...] | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Return the cross entropy of logits and labels, in fp32.

    With ``z = softcap * tanh(logits / softcap)`` (or the logits), ``lse = log(sum(exp(z)))``, e = `label_smoothing` and
    t the label, the loss of a row is ``(1 - e) * (lse - z[t]) + e * (lse - mean(z)) + z_loss * lse^2``. Computed in
    fp32; the gradient is rounded once. NaN and infinities propagate as in torch, except in rows with ``ignore_index``,
    which are not read: their loss and gradient are 0. If all rows are ignored, the mean is 0 (torch gives NaN).
    Differentiable once in logits.

    With class weights w and target probabilities p (1 at the label), the loss of a row is the sum over the columns of
    ``w * ((1 - e) * p + e / columns) * (lse - z)``, as in torch. Weights of labels without smoothing cost no memory
    traffic; with smoothing, and for probabilities, another kernel reads logits and target once in each direction.

    A label outside the vocabulary raises an ArgumentError that names label and row: on the CPU immediately; on a GPU,
    without synchronisation, in the next forward or backward call on that device after the kernel has ended, or in
    ``check_labels()``. Until then the row's loss is NaN and its gradient 0.

    Args:
        logits: ``[..., vocabulary]``, bfloat16, float16 or float32, any strides (copied unless rows are unit-stride and
            evenly spaced). Any object with ``__dlpack__`` is accepted; results are then of the same kind. A DTensor may
            be sharded by rows, and over one mesh dimension by columns; results are DTensors.
        labels: ``[...]``, int32 or int64; or probabilities, of the shape of logits, in logits' dtype or float32 and
            without a gradient.
        weight: ``[columns]``, a factor of each column's loss, floating and without a gradient. Not with `z_loss`,
            `return_accuracy` or `group`; with `label_smoothing` also not with `one_pass` or `in_place`. The same holds
            for probabilities.
        ignore_index: Rows with this label are ignored. Must be the default for probabilities.
        label_smoothing: 0 to 1: the fraction of the label's weight that is spread evenly over all columns.
        z_loss: Factor of the squared log-sum-exp.
        softcap: Positive limit of the logits, or None.
        reduction: ``"mean"`` over the rows that are not ignored (with `weight`: divided by the sum of the weights of
            their labels), ``"sum"``, or ``"none"``.
        return_lse: Also return the log-sum-exp of each row (0 if ignored); it has no gradient.
        return_accuracy: Also return the accuracy: 1 for a row whose label is the first largest logit, else 0, reduced
            like the loss. A row with NaN counts as wrong.
        one_pass: Compute the gradient in the forward pass, so that logits are read once instead of twice. The backward
            pass multiplies it by the incoming gradient if that is not 1 (with a second rounding); this is checked on
            the device. Only one backward pass is possible. Has no effect if no gradient is needed.
        in_place: Overwrite the logits, which must not be a leaf, with the gradient: in the backward pass, or with
            `one_pass` in the forward pass. Nothing else may use the logits afterwards; autograd detects that. Ignored
            under torch.compile.
        group: A torch.distributed process group over which the vocabulary is split: every process passes its columns
            and gets the same loss and the gradient of its columns. Costs one all-gather of 20 bytes per row. Not with
            `one_pass`.
        vocab_start: With `group`: the first column of this process. Needed unless the parts are equal and in the order
            of ranks.
        vocab_size: With `vocab_start`: the size of the whole vocabulary.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        The loss, float32: a scalar, or labels' shape for ``reduction="none"``. A tuple if more is requested:
        ``(loss, lse, accuracy)`` without those not requested.
    """
    if weight is not None or (isinstance(labels, Tensor) and labels.is_floating_point()):
        refused = {"z_loss": z_loss != 0, "return_accuracy": return_accuracy, "group": group is not None,
                   "vocab_start": vocab_start is not None, "vocab_size": vocab_size is not None}  # fmt: skip
        loss, lse = _weighted(logits, labels, weight, (ignore_index, label_smoothing, softcap or 0.0),
                              REDUCTIONS[reduction], one_pass, in_place, refused)  # fmt: skip
        return (loss, lse) if return_lse else loss
    if is_sharded(logits):
        from rtkernels.ops.loss.cross_entropy_shards import cross_entropy_of_shards

        if group is not None or vocab_start is not None or vocab_size is not None:
            raise ArgumentError("logits is a DTensor and a group is given; expected one of them")
        given = {
            "ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap,
            "reduction": reduction, "return_lse": return_lse, "return_accuracy": return_accuracy,
        }  # fmt: skip
        return cross_entropy_of_shards(cross_entropy, logits, labels, given)
    how = REDUCTIONS[reduction]
    options = (ignore_index, label_smoothing, z_loss, softcap or 0.0)
    check_options(*options[1:], how)
    if in_place:
        refuse_leaf("logits", logits)
    if group is None:
        check_vocabulary(group, vocab_start, vocab_size)
        loss, accuracy, stats = _single(logits, labels, options, how, return_accuracy, one_pass, in_place)
        lse = stats.detach().sum(0).view(labels.shape) if return_lse else None
    else:
        if one_pass:
            raise ArgumentError("one_pass and group are both given; with a group the gradient needs a second pass")
        from rtkernels.ops.loss.cross_entropy_parallel import ParallelCrossEntropy, vocabulary_range

        first, size = vocabulary_range(logits.shape[-1], group, vocab_start, vocab_size)
        loss, accuracy, lse = ParallelCrossEntropy.apply(logits, labels, options, how, in_place, group, first, size)
    if not return_lse and not return_accuracy:
        return loss
    return loss, *((lse,) if return_lse else ()), *((accuracy,) if return_accuracy else ())


@public(recent=False)
def check_labels(device: torch.device | int | str | None = None) -> None:
    """Wait for the GPU and raise an error if a ``cross_entropy`` call had a label outside the vocabulary.

    Args:
        device: A CUDA device. Default: waits for the current one and checks all of them.

    Returns:
        Nothing.

    Raises:
        ArgumentError: There was such a label; the message names it and its row. Each is reported once.
    """
    number = None
    if device is not None:
        place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        number = -1 if place.type == "cpu" else torch.cuda.current_device() if place.index is None else place.index
    if torch.cuda.is_available() and number != -1:
        torch.cuda.synchronize(number)
    raise_pending(number)


OP = Op(
    "cross_entropy", public=("cross_entropy", "check_labels"), kernels=(*KERNELS, *soft.KERNELS),
    torch_ops=(
        FORWARD, PARTS, BACKWARD, BACKWARD_IN_PLACE, ONE_PASS, ONE_PASS_IN_PLACE, SCALE, soft.FORWARD, soft.BACKWARD,
    ),
)  # fmt: skip
