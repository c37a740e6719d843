"""Losses of a router: z-loss and load balancing over a batch or over sequences, and their backward."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.router.router_loss_plan import BACKWARD, COUNTS, FORWARD, KERNELS, PLAIN, SIGMOID, SOFTMAX, Z
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import check_same
from rtkernels.runtime.operator.arguments import Among, Matching, Within, check_number
from rtkernels.runtime.operator.autograd import applied, constant, needs_grad, once_differentiable
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.torch_private import is_dynamo_compiling

_SCORES = {"softmax": SOFTMAX, "sigmoid": SIGMOID, None: PLAIN}


class _RouterLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, counts, kind, sequence_dim, k, coefficient):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, counts)
        ctx.options = kind, sequence_dim, k, coefficient
        return FORWARD.call(x, counts, kind, sequence_dim, k, coefficient)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        dx = None if g is None else BACKWARD.call(g, *ctx.saved_tensors, *ctx.options)
        return dx, None, None, None, None, None


_differentiable = applied(_RouterLoss)


def _loss(x: Tensor, counts: Tensor | None, kind: int, sequence_dim: int, k: int, coefficient: float) -> Tensor:
    check_number("coefficient", coefficient)
    if is_grad_enabled() and needs_grad(x):
        if is_dynamo_compiling():
            coefficient = constant(coefficient)
        return _differentiable(x, counts, kind, sequence_dim, k, coefficient)
    return FORWARD.call(x, counts, kind, sequence_dim, k, coefficient)


@public
def router_z_loss(logits: Tensor, coefficient: float = 1.0, *, out: Tensor | None = None) -> Tensor:
    """Return ``coefficient * mean over tokens of logsumexp(logits)^2``, which keeps router logits small.

    Computed in fp32 with sums in a fixed order. Differentiable once.

    Args:
        logits: ``[..., experts]``, 1 to 4096 experts; bfloat16, float16 or float32, any strides (copied unless rows are
            unit-stride and evenly spaced). Any object with ``__dlpack__`` is accepted; results are then of the same
            kind.
        coefficient: Factor of the loss.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        A float32 scalar; 0 if there are no tokens.
    """
    return _loss(logits, None, Z, -1, 1, coefficient)


_OPTIONS = {
    "logits": Matching((), "logits.dim()"), "score": Among(_SCORES, "'softmax', 'sigmoid' or None"), "k": Within("int"),
    "sequence_dim": Within("int"),
}  # fmt: skip


@public(options=_OPTIONS)
def load_balancing_loss(
    logits: Tensor, indices: Tensor | None = None, *, counts: Tensor | None = None, k: int | None = None,
    score: str | None = "softmax", coefficient: float = 1.0, sequence_dim: int | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the auxiliary loss that spreads tokens over experts: ``coefficient * experts * sum over e of f_e P_e``.

    f_e is the fraction of all choices that went to expert e, P_e the mean score of e over the tokens (Switch
    Transformer, Megatron's ``aux_loss``). With `sequence_dim`, f and P are computed per sequence, and the result is the
    mean over the sequences (DeepSeek's sequence-wise loss, Megatron's ``seq_aux_loss``). A token whose logits are all
    -inf has scores 0 and gradient 0, as in ``rtkernels.softmax`` (unless `score` is None). Computed in fp32 with sums
    in a fixed order. Differentiable once in the logits; the counts are constants.

    Args:
        logits: ``[..., experts]``, 1 to 4096 experts; bfloat16, float16 or float32, any strides (copied unless rows are
            unit-stride and evenly spaced). Any object with ``__dlpack__`` is accepted; results are then of the same
            kind.
        indices: ``[..., k]`` int32 or int64, the selected experts of each token; values outside 0 .. experts - 1
            (dropped choices) are not counted. Not needed if `counts` is given.
        counts: int32, the number of tokens that selected each expert: ``[experts]``, or ``[sequences, experts]`` with
            `sequence_dim`.
        k: Number of choices per token. Default: the last size of `indices`; required without them.
        score: ``"softmax"``, ``"sigmoid"`` (sigmoids divided by their sum over all experts, as in DeepSeek-V3), or None
            if `logits` are scores already.
        coefficient: Factor of the loss.
        sequence_dim: Dimension of the tokens of a sequence, for logits ``[a, b, experts]``: 1 for batch first, 0 for
            sequence first. Default: the loss is over the whole batch.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        A float32 scalar; 0 if there are no tokens.
    """
    if sequence_dim is None:
        sequence_dim = -1
    elif logits.dim() != 3 or sequence_dim not in (0, 1):
        raise ArgumentError(
            f"sequence_dim is {sequence_dim} for logits of shape {tuple(logits.shape)}; expected 0 or 1, and three "
            f"dimensions"
        )
    if k is None:
        if indices is None:
            raise ArgumentError("k is None; expected a number where no indices are given")
        k = indices.shape[-1] if indices.dim() else 1
    if k < 1:
        raise ArgumentError(f"k is {k}; expected at least 1")
    if counts is None:
        if indices is None:
            raise ArgumentError("indices and counts are None; expected one of them")
        check_same("indices", indices.shape[:-1], logits.shape[:-1], "leading shape", of="logits")
        counts = COUNTS.call(indices, logits.shape[-1], sequence_dim)
    return _loss(logits, counts, _SCORES[score], sequence_dim, k, coefficient)


OP = Op(
    "router_loss", public=("router_z_loss", "load_balancing_loss"), kernels=KERNELS,
    torch_ops=(FORWARD, BACKWARD, COUNTS),
)  # fmt: skip
