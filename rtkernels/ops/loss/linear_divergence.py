"""Divergence between the distributions of a student and a teacher, from hidden states: no logits are stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.loss import linear_divergence_parallel as parallel
from rtkernels.ops.loss.cross_entropy_parallel import vocabulary_range
from rtkernels.ops.loss.cross_entropy_plan import check_vocabulary
from rtkernels.ops.loss.linear_divergence_operators import BACKWARD, BACKWARD_KEPT, FORWARD, OF_HIDDEN, OF_LOGITS
from rtkernels.ops.loss.linear_divergence_rows import KERNELS
from rtkernels.ops.loss.linear_divergence_topk import linear_topk_divergence
from rtkernels.ops.loss.linear_logprob_parallel import complete
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import check_tensor
from rtkernels.runtime.invariance import level, refuse_weight_gradient
from rtkernels.runtime.operator.arguments import Among, Within
from rtkernels.runtime.operator.autograd import constant, detached, needs_grad, once_differentiable
from rtkernels.runtime.operator.main_grad import start_of
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.torch_private import is_dynamo_compiling

_KEPT_WEIGHTS = 2  # times its memory: gradients of logits that are kept by default


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias, labels,
        options, group, keeps,
    ):  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.needs, ctx.options, ctx.group, ctx.keeps = ctx.needs_input_grad[:3], options, group, keeps
        if any(start_of(t, "a head") is not None for t in (student_weight, student_bias)):
            refuse_weight_gradient("linear_divergence's gradient of a weight with a main_grad")
        heads = (student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias, teacher_bias, labels)
        if group is None:
            loss, stats, kept = FORWARD(*heads, *options, keeps)
        else:
            loss, stats = parallel.forward(heads, options, group)
        if keeps:
            # The bias for second derivatives alone: tensors that lead back to the inputs make them raise.
            ctx.save_for_backward(student_hidden, student_weight, student_bias, labels, kept)
        else:
            ctx.save_for_backward(*heads, stats)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        if dloss is None:
            return (None,) * 10
        if ctx.keeps:
            hidden, weight, _, labels, kept = ctx.saved_tensors
            grads = BACKWARD_KEPT(dloss, kept, hidden, weight, labels, ctx.options[0], ctx.keeps, *ctx.needs)
        else:
            grads = BACKWARD(dloss, *ctx.saved_tensors, *ctx.options, *ctx.needs, ctx.group is not None)
        dhidden, dweight, dbias = (grad if need else None for grad, need in zip(grads, ctx.needs, strict=True))
        if ctx.group is not None and dhidden is not None:
            dhidden = complete(dhidden, ctx.saved_tensors[0].dtype, ctx.group)
        return dhidden, dweight, dbias, *(None,) * 7


_OPTIONS = {
    "save": Among((None, "stats", "gradients"), "'stats', 'gradients' or None"), "beta": Within("float"),
    "temperature": Within("float"), "ignore_index": Within("int"),
    "chunk_bytes": Within("int", "chunk_bytes >= 1", "at least 1, or None"),
}  # fmt: skip


@public(options=_OPTIONS, defaults={"chunk_bytes": 0})  # the operator has a rule for 0
def linear_divergence(
    student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor | None = None,
    teacher_weight: Tensor | None = None, *, beta: float = 0.0, temperature: float = 1.0,
    student_bias: Tensor | None = None, teacher_bias: Tensor | None = None, teacher_ids: Tensor | None = None,
    teacher_logprobs: Tensor | None = None, tail: bool = True, labels: Tensor | None = None, ignore_index: int = -100,
    save: str | None = None, chunk_bytes: int | None = None, group: Any = None, vocab_start: int | None = None,
    vocab_size: int | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the divergence of a student's next-token distribution Q from a teacher's P, for distillation.

    Q and P are ``softmax((hidden @ weight.T + bias) / temperature)`` of each. As in ``jsd``, the divergence is
    ``beta * KL(P || M) + (1 - beta) * KL(Q || M)`` with ``M = beta * P + (1 - beta) * Q``, KL(P || Q) for beta = 0 and
    KL(Q || P) for beta = 1. Logits are fp32, computed for chunks of rows and not stored. Gradients of weight and bias
    are rounded once. Differentiable once in the student's tensors; the teacher gets no gradient.

    A teacher that is a server names its K likeliest tokens: `teacher_ids` and `teacher_logprobs` take the place of its
    hidden states and weight. Both distributions then have K classes and one for all other tokens. The student's
    log-probabilities of the K tokens are those of ``linear_logprob``; the divergence of the classes is computed by
    torch.

    Args:
        student_hidden: ``[..., student size]``, bfloat16, float16 or float32.
        student_weight: ``[vocabulary, student size]``, in the same dtype.
        teacher_hidden: ``[..., teacher size]``, with the same rows; its dtype may be another. None with `teacher_ids`.
        teacher_weight: ``[vocabulary, teacher size]``, in the dtype of teacher_hidden. None with `teacher_ids`.
        beta: Weight of P in the mixture M, 0 to 1.
        temperature: Positive. The result is not multiplied by its square.
        student_bias: ``[vocabulary]``, or None.
        teacher_bias: ``[vocabulary]``, or None.
        teacher_ids: ``[..., K]``, int32 or int64, different ones in a row: the tokens that the teacher names.
        teacher_logprobs: ``[..., K]``, floating point: the teacher's log-probabilities of these tokens, at the same
            temperature. Entries of -inf do not count, whatever their id is; a row without others gives 0.
        tail: With `teacher_ids`: add a class for all other tokens. Otherwise the K probabilities of both are divided by
            their sums.
        labels: ``[...]``, int32 or int64: rows whose label is `ignore_index` give 0 and have no gradient
            (but NaN in student_hidden there is NaN in the gradient of student_weight).
        ignore_index: See `labels`.
        save: What the forward pass keeps for the backward pass. ``"gradients"``: the gradients of the student's logits
            in the dtype of its hidden states or, for a frozen head (neither weight nor bias requires a gradient), those
            of its hidden states in float32; no logits are computed again. ``"stats"``: five numbers per row; the logits
            of both heads are computed again. None (default): ``"stats"`` with float16 (its range is too small for
            gradients), with a `group` or `teacher_ids`, and at a level of ``batch_invariant``; otherwise
            ``"gradients"`` for a frozen head and wherever it takes at most twice the memory of the student's weight.
            With ``"gradients"``, unequal incoming gradients of rows are multiplied into the hidden states, rounded to
            their dtype, before the weight's gradient is computed.
        chunk_bytes: Memory for the student's logits of a chunk; the teacher's take as much. Default: about 256 MiB.
        group: A torch.distributed process group over which the vocabulary is split: every process passes its rows of
            the weights and biases, the same ones of both, and all hidden states. Each gets the same result, the
            complete gradient of hidden states, and the gradients of its own rows. Costs one all-gather of 20 bytes per
            row of hidden (two of 20 and 8 if beta is neither 0 nor 1), and one all-reduce of its gradient. Logits are
            computed twice in the forward pass if beta is neither 0 nor 1.
        vocab_start: With `group`: the first row of this process. Needed for `teacher_ids` unless the parts are equal
            and in the order of ranks.
        vocab_size: With `vocab_start`: the size of the whole vocabulary.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        float32 of the shape of student_hidden without its last dimension.
    """
    check_vocabulary(group, vocab_start, vocab_size)
    if save == "gradients" and (group is not None or teacher_ids is not None):
        raise ArgumentError("save is 'gradients' with a group or teacher_ids; expected 'stats' or None")
    _check_teacher(teacher_hidden, teacher_weight, teacher_bias, teacher_ids, teacher_logprobs)
    if teacher_ids is not None:
        place = {"group": group, "vocab_start": vocab_start, "vocab_size": vocab_size}
        more = {"chunk_bytes": chunk_bytes or None, "bias": student_bias, **(place if group is not None else {})}
        return linear_topk_divergence(
            student_hidden, student_weight, teacher_ids, teacher_logprobs, labels, ignore_index, beta, temperature,
            tail, more,
        )  # fmt: skip
    if group is not None:
        vocabulary_range(student_weight.shape[0], group, vocab_start, vocab_size)
    if is_dynamo_compiling():
        beta, temperature = constant(beta), constant(temperature)
        # Heads may share a weight, which Dynamo refuses for two arguments of a function.
        given = (None if t is None else t.detach() for t in (teacher_hidden, teacher_weight, teacher_bias))
        teacher_hidden, teacher_weight, teacher_bias = given
    options = (ignore_index, beta, temperature, chunk_bytes)
    teacher = tuple(detached(teacher_hidden, teacher_weight, teacher_bias))
    if is_grad_enabled() and needs_grad(student_hidden, student_weight, student_bias):
        keeps = 0 if group is not None else _kept(save, student_hidden, student_weight, student_bias)
        return _LinearDivergence.apply(
            student_hidden, student_weight, student_bias, *teacher, labels, options, group, keeps
        )
    heads = (student_hidden, student_weight, *teacher[:2], student_bias, teacher[2], labels)
    return (FORWARD(*heads, *options, 0) if group is None else parallel.forward(heads, options, group))[0]


def _kept(save: str | None, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> int:
    """Return which gradients the forward pass keeps."""
    if save == "gradients" and hidden.dtype == torch.float16:
        raise ArgumentError("save is 'gradients' and student_hidden has dtype float16; expected bfloat16 or float32")
    if save == "stats" or (save is None and (level() or hidden.dtype == torch.float16)):
        return 0
    if not needs_grad(weight, bias):
        return OF_HIDDEN
    rows = hidden.numel() // max(hidden.shape[-1], 1)
    return OF_LOGITS if save == "gradients" or rows <= _KEPT_WEIGHTS * weight.shape[-1] else 0


def _check_teacher(
    hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None, ids: Tensor | None, logprobs: Tensor | None
) -> None:
    """Raise an ArgumentError unless the teacher has a head, or names its tokens."""
    named = {"teacher_ids": ids, "teacher_logprobs": logprobs}
    of_head = {"teacher_hidden": hidden, "teacher_weight": weight}
    if ids is None and logprobs is None:
        for name, given in of_head.items():
            if given is None:
                raise ArgumentError(f"{name} is None; expected a tensor, or teacher_ids and teacher_logprobs")
        return
    for name, given in named.items():
        if given is None:
            raise ArgumentError(f"{name} is None; expected teacher_ids and teacher_logprobs, or neither")
        check_tensor(name, given)
    for name, given in (of_head | {"teacher_bias": bias}).items():
        if given is not None:
            raise ArgumentError(f"{name} is given with teacher_ids; expected one kind of teacher")


OP = Op(
    "linear_divergence", public=("linear_divergence",), kernels=KERNELS,
    torch_ops=(FORWARD, BACKWARD, BACKWARD_KEPT, parallel.PARTS, parallel.SUMS), uses=("linear_logprob",),
)  # fmt: skip
