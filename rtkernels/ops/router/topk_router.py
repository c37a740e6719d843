"""The router of a mixture of experts: from logits to each token's experts and their probabilities, and its backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.router import topk_router_plan as plans
from rtkernels.ops.router.topk_router_plan import KERNELS, RENORMALIZE, SCORE_FIRST, SOFTMAX
from rtkernels.runtime.call.public import public
from rtkernels.runtime.layout import as_rows
from rtkernels.runtime.operator.arguments import Within
from rtkernels.runtime.operator.autograd import applied, constant, needs_grad, once_differentiable
from rtkernels.runtime.operator.declared import Dense, DenseFloat, Operator, Rows
from rtkernels.runtime.operator.plan import Memory
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.torch_private import is_dynamo_compiling


class Routing(NamedTuple):
    """What ``topk_router`` returns; all tensors dense.

    Attributes:
        probs: ``[..., k]`` float32, the probability of each chosen expert.
        indices: ``[..., k]`` int32, the chosen experts, the one with the largest key first.
        counts: ``[experts]`` int32, how many tokens chose each expert.
        dense_probs: ``[..., experts]`` float32, the probabilities in their columns, 0 elsewhere; None unless asked for.
        routing_map: ``[..., experts]`` bool, which experts are chosen; None unless asked for.
    """

    probs: Tensor
    indices: Tensor
    counts: Tensor
    dense_probs: Tensor | None
    routing_map: Tensor | None


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _reference_fwd(logits, bias, k, mode, num_groups, top_groups, group_k, scale, eps, dense, routing_map):
    x = logits.float()
    indices = plans.choose(x, bias, k, mode, num_groups, top_groups, group_k)
    probs = plans.probabilities(x, indices, mode, scale, eps)
    chosen = torch.zeros_like(x, dtype=torch.bool).scatter_(-1, indices, True)
    counts = as_rows(chosen).sum(0).to(torch.int32)
    dense_probs = torch.zeros_like(x).scatter_(-1, indices, probs).contiguous() if dense else x.new_empty(0)
    chosen = chosen.contiguous() if routing_map else x.new_empty(0)
    return probs.contiguous(), indices.to(torch.int32).contiguous(), counts, dense_probs, chosen


def _reference_bwd(logits, indices, g_compact, g_dense, mode, scale, eps):
    chosen = indices.long()
    g = torch.zeros(indices.shape, dtype=torch.float32, device=indices.device)
    if g_compact is not None:
        g = g + g_compact
    if g_dense is not None:
        g = g + g_dense.gather(-1, chosen)
    return plans.gradient(logits.float(), chosen, g, mode, scale, eps).to(logits.dtype).contiguous()


def _outputs(logits, k, dense, routing_map):
    compact, every = (*logits.shape[:-1], k), logits.shape
    return (
        Memory(compact, torch.float32),
        Memory(compact, torch.int32),
        Memory(every[-1:], torch.int32, fresh=True),
        Memory(every, torch.float32) if dense else None,
        Memory(every, torch.bool) if routing_map else None,
    )


_OPTIONS = "int k, int mode, int num_groups, int top_groups, int group_k, float scale, float eps, bool dense"
FORWARD = Operator(
    "topk_router_fwd", (Rows("logits", None), DenseFloat("bias", None, optional=True)),
    options=f"{_OPTIONS}, bool routing_map", results="probs indices counts dense_probs chosen", outputs=_outputs,
    plan=plans.plan_fwd, reference=_reference_fwd, check=plans.check,
)  # fmt: skip
BACKWARD = Operator(
    "topk_router_bwd",
    (Rows("logits", None), Dense("indices", None), Dense("g_compact", None, optional=True),
     Rows("g_dense", None, optional=True)),
    options="int mode, float scale, float eps", results="dx",
    outputs=lambda logits: (Memory.like(logits),), plan=plans.plan_bwd, reference=_reference_bwd,
    check=plans.check_bwd,
)  # fmt: skip


class _Router(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, bias, k, mode, num_groups, top_groups, group_k, scale, eps, dense, routing_map):
        ctx.set_materialize_grads(False)
        results = FORWARD.call(
            logits, bias, k, mode, num_groups, top_groups, group_k, scale, eps, dense, routing_map
        )  # fmt: skip
        _, indices, counts, _, chosen_map = results
        ctx.mark_non_differentiable(indices, counts, chosen_map)
        ctx.save_for_backward(logits, indices)
        ctx.dense, ctx.options = dense, (mode, scale, eps)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, g_compact, _indices, _counts, g_dense, _map):
        dx, g_dense = None, g_dense if ctx.dense else None  # compiled graphs hand over zeros for what is not there
        if g_compact is not None or g_dense is not None:
            logits, indices = ctx.saved_tensors
            dx = BACKWARD.call(logits, indices, g_compact, g_dense, *ctx.options)
        return dx, *(None,) * 10


_differentiable = applied(_Router)


def _mode(score: str, score_first: bool, renormalize: bool) -> int:
    if score not in ("softmax", "sigmoid"):
        raise ArgumentError(f"score is {score!r}; expected 'softmax' or 'sigmoid'")
    return SOFTMAX * (score == "softmax") + SCORE_FIRST * bool(score_first) + RENORMALIZE * bool(renormalize)


@public(options=dict.fromkeys(("k", "num_groups", "top_groups", "group_k"), Within("int")))
def topk_router(
    logits: Tensor, k: int, *, score: str = "softmax", score_first: bool = True, bias: Tensor | None = None,
    num_groups: int = 1, top_groups: int | None = None, group_k: int | None = None, renormalize: bool = False,
    scale: float = 1.0, eps: float = 1e-20, dense_probs: bool = False, routing_map: bool = False,
    out: tuple[Tensor | None, ...] | None = None,
) -> Routing:  # fmt: skip
    """Select k experts for every token (every row of logits), and return their probabilities.

    Experts are selected by a key: the score if `score_first`, else the logit, plus `bias`. Without bias and groups,
    this is the order of the logits. Ties always go to the lowest expert or group; NaN is largest. The probability of a
    selected expert is its score without bias: its sigmoid, or its softmax over all experts (`score_first`) or over the
    selected ones. It is then divided by the sum over the selected experts (`renormalize`) and multiplied by `scale`.
    Computed in fp32. Differentiable once in the logits, from `probs`, `dense_probs` or both; bias has no gradient.

    Args:
        logits: ``[..., experts]``, 1 to 4096 experts; bfloat16, float16 or float32, any strides (copied unless rows are
            unit-stride and evenly spaced). Any object with ``__dlpack__`` is accepted; results are then of the same
            kind.
        k: Number of experts per token, 1 to 64.
        score: ``"softmax"`` or ``"sigmoid"``.
        score_first: Select by scores, with a softmax over all experts; otherwise select by logits, with a softmax over
            the selected experts.
        bias: ``[experts]``, added to the key for the selection only (the correction of loss-free balancing). Default:
            0.
        num_groups: Number of groups of consecutive experts; any divisor of the number of experts.
        top_groups: Experts are selected only from this many best groups. Default: all groups.
        group_k: The rank of a group is the sum of its this many largest keys. Default: ``k // top_groups``, at least 1.
        renormalize: Divide by the sum of the selected scores plus `eps` (a softmax over the selected experts already
            has sum 1).
        scale: Factor of the probabilities.
        eps: Added to the sum for `renormalize`.
        dense_probs: Also return the probabilities as ``[..., experts]``.
        routing_map: Also return the selection as bool ``[..., experts]``.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        Routing: ``probs`` and ``indices`` (``[..., k]``, float32 and int32), ``counts`` (``[experts]`` int32), and the
        dense results or None.
    """
    mode = _mode(score, score_first, renormalize)
    if num_groups == 1 and top_groups is None and group_k is None:
        top_groups = group_k = 1
    else:
        top_groups = num_groups if top_groups is None else top_groups
        group_k = max(k // max(top_groups, 1), 1) if group_k is None else group_k
        if top_groups == num_groups >= 1 and logits.dim() and logits.shape[-1] % num_groups == 0:
            num_groups = top_groups = group_k = 1  # all of them: as if there were none
    args = logits, bias, k, mode, num_groups, top_groups, group_k, scale, eps, dense_probs, routing_map
    run = FORWARD.call
    if is_grad_enabled() and needs_grad(logits):
        run = _differentiable
        if is_dynamo_compiling():
            args = *args[:7], constant(scale), constant(eps), *args[9:]
    probs, indices, counts, dense, chosen = run(*args)
    return Routing(probs, indices, counts, dense if dense_probs else None, chosen if routing_map else None)


OP = Op("topk_router", public=("topk_router",), kernels=KERNELS, torch_ops=(FORWARD, BACKWARD))
