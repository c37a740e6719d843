"""Heads of trainers that do not store all logits: TRL's, Liger's and verl's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.peers.base import Call, Compared, Table

_BETA = 0.5  # of the rows of linear_divergence


def _call(function: Callable[..., tuple[Any, ...]], hidden: Any, weight: Any, ids: Any, g: Any = None) -> Call:
    """Forward, and with `g`, which is the gradient of both results, forward and backward."""
    if g is None:
        return lambda: function(hidden, weight, ids)
    import torch

    def both() -> tuple[Any, ...]:
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        logprob, entropy = function(*leaves, ids)
        grads = torch.autograd.grad((logprob, entropy), leaves, (g.to(logprob.dtype), g.to(entropy.dtype)))
        return logprob.detach(), entropy.detach(), *grads

    return both


def _trl(**given: Any) -> Call:
    """Its fused head, with the tiles of its trainers."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    def function(hidden: Any, weight: Any, ids: Any) -> tuple[Any, ...]:
        options = (1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("entropy",))
        return ChunkedLogProbFunction.apply(hidden, weight, None, ids, *options)[:2]

    return _call(function, **given)


def _trl_frozen(hidden: Any, weight: Any, ids: Any, g: Any) -> Call:
    import torch
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    def both() -> tuple[Any, ...]:
        leaf = hidden.detach().requires_grad_()
        options = (1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ())
        logprob = ChunkedLogProbFunction.apply(leaf, weight, None, ids, *options)[0]
        return logprob.detach(), *torch.autograd.grad(logprob, leaf, g.to(logprob.dtype))

    return both


def _liger(**given: Any) -> Call:
    """CuTe on Hopper if the CUTLASS DSL is installed, else chunks of 512 rows in torch. The entropy is bf16."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    def function(hidden: Any, weight: Any, ids: Any) -> tuple[Any, ...]:
        loss, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, ids, 1.0, -100, 1, True)
        return -loss, entropy

    return _call(function, **given)


def _liger_chunked(hidden: Any, weight: Any, ids: Any, g: Any = None) -> Call:
    """The chunks of its GRPO loss: log-probabilities without the entropy."""
    import torch
    from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction

    apply = _ChunkedSelectiveLogProbFunction.apply
    if g is None:
        return lambda: apply(hidden, weight, ids, None, 1.0, 4096)

    def both() -> tuple[Any, ...]:
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        logprob = apply(*leaves, ids, None, 1.0, 4096)
        return logprob.detach(), *torch.autograd.grad(logprob, leaves, g.to(logprob.dtype))

    return both


def _liger_frozen(hidden: Any, weight: Any, ids: Any, g: Any) -> Call:
    """The same chunks, with the gradient of hidden states alone."""
    import torch
    from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction

    def both() -> tuple[Any, ...]:
        leaf = hidden.detach().requires_grad_()
        logprob = _ChunkedSelectiveLogProbFunction.apply(leaf, weight, ids, None, 1.0, 4096)
        return logprob.detach(), *torch.autograd.grad(logprob, leaf, g.to(logprob.dtype))

    return both


def _verl(**given: Any) -> Call:
    """Its Triton kernel; what it calls log-probabilities are those, not losses."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return _call(lambda hidden, weight, ids: linear_cross_entropy(hidden, weight, ids, 1.0, "none"), **given)


def _trl_divergence(student: Any, head: Any, teacher: Any, teacher_head: Any) -> Call:
    import torch
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def both() -> tuple[Any, ...]:
        leaves = student.detach().requires_grad_(), head.detach().requires_grad_()
        loss = ChunkedDivergenceFunction.apply(*leaves, None, teacher, teacher_head, None, _BETA)[0]
        return loss.detach(), *torch.autograd.grad(loss.sum(), leaves)

    return both


def _liger_divergence(student: Any, head: Any, teacher: Any, teacher_head: Any) -> Call:
    """Its chunked loss with torch.compile. It returns the mean over rows; those of random rows are close to it."""
    import torch
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss_of = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=_BETA)
    labels = torch.zeros(len(student), dtype=torch.int64, device=student.device)

    def both() -> tuple[Any, ...]:
        leaves = student.detach().requires_grad_(), head.detach().requires_grad_()
        loss = loss_of(*leaves, teacher, teacher_head, labels)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    return Compared(both, lambda found: found[0].expand(len(student)))


_HEADS = {"trl": _trl, "liger": _liger, "liger_chunked": _liger_chunked, "verl": _verl}
ADAPTERS: Table = {
    "linear_logprob": _HEADS,
    "linear_logprob_grad": _HEADS,
    "linear_logprob_frozen": {"trl": _trl_frozen, "liger_chunked": _liger_frozen},
    "linear_divergence": {"trl": _trl_divergence, "liger": _liger_divergence},
}
