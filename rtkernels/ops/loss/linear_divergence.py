"""Divergence between the distributions of a student and a teacher, from hidden states: no logits are stored."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.loss.linear_divergence_operators import BACKWARD, FORWARD, KERNELS
from rtkernels.runtime.call.public import public
from rtkernels.runtime.operator.arguments import check_integer, check_number
from rtkernels.runtime.operator.autograd import constant, detached, needs_grad, once_differentiable
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.torch_private import is_dynamo_compiling


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias, labels, options
    ):
        ctx.set_materialize_grads(False)
        ctx.needs, ctx.options = ctx.needs_input_grad[:3], options
        heads = (student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias, teacher_bias, labels)
        loss, stats = FORWARD(*heads, *options)
        ctx.save_for_backward(*heads, stats)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        if dloss is None:
            return (None,) * 8
        grads = BACKWARD(dloss, *ctx.saved_tensors, *ctx.options, *ctx.needs)
        return *(grad if need else None for grad, need in zip(grads, ctx.needs, strict=True)), *(None,) * 5


@public
def linear_divergence(
    student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, *,
    beta: float = 0.0, temperature: float = 1.0, student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None, labels: Tensor | None = None, ignore_index: int = -100,
    chunk_bytes: int | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the divergence of a student's next-token distribution Q from a teacher's P, for distillation.

    Q and P are ``softmax((hidden @ weight.T + bias) / temperature)`` of each. As in ``jsd``, the divergence is
    ``beta * KL(P || M) + (1 - beta) * KL(Q || M)`` with ``M = beta * P + (1 - beta) * Q``, KL(P || Q) for beta = 0 and
    KL(Q || P) for beta = 1. Logits are fp32 and computed in slabs of the vocabulary: again for gradients, and twice in
    the forward pass if beta is neither 0 nor 1 and there are several slabs. Gradients of weight and bias are rounded
    once. Differentiable once in the student's tensors; the teacher gets no gradient.

    Args:
        student_hidden: ``[..., student size]``, bfloat16, float16 or float32.
        student_weight: ``[vocabulary, student size]``, in the same dtype.
        teacher_hidden: ``[..., teacher size]``, with the same rows; its dtype may be another.
        teacher_weight: ``[vocabulary, teacher size]``, in the dtype of teacher_hidden.
        beta: Weight of P in the mixture M, 0 to 1.
        temperature: Positive. The result is not multiplied by its square.
        student_bias: ``[vocabulary]``, or None.
        teacher_bias: ``[vocabulary]``, or None.
        labels: ``[...]``, int32 or int64: rows whose label is `ignore_index` give 0 and have no gradient.
        ignore_index: See `labels`.
        chunk_bytes: Memory for the student's logits of a slab; the teacher's take as much. Default: about 256 MiB.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        float32 of the shape of student_hidden without its last dimension.
    """
    if chunk_bytes is None:
        chunk_bytes = 0  # the operator has a rule
    elif check_integer("chunk_bytes", chunk_bytes) < 1:
        raise ArgumentError(f"chunk_bytes is {chunk_bytes}; expected at least 1, or None")
    beta, temperature = check_number("beta", beta), check_number("temperature", temperature)
    if is_dynamo_compiling():
        beta, temperature = constant(beta), constant(temperature)
        # Heads may share a weight, which Dynamo refuses for two arguments of a function.
        given = (None if t is None else t.detach() for t in (teacher_hidden, teacher_weight, teacher_bias))
        teacher_hidden, teacher_weight, teacher_bias = given
    options = (check_integer("ignore_index", ignore_index), beta, temperature, chunk_bytes)
    teacher = tuple(detached(teacher_hidden, teacher_weight, teacher_bias))
    if is_grad_enabled() and needs_grad(student_hidden, student_weight, student_bias):
        return _LinearDivergence.apply(student_hidden, student_weight, student_bias, *teacher, labels, options)
    heads = (student_hidden, student_weight, *teacher[:2], student_bias, teacher[2])
    return FORWARD(*heads, labels, *options)[0]


OP = Op(
    "linear_divergence", public=("linear_divergence",), kernels=KERNELS, torch_ops=(FORWARD, BACKWARD),
    uses=("linear_logprob",),
)  # fmt: skip
