"""The router of a mixture of experts: from logits to each token's experts and their probabilities, and its backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from rtkernels import interop
from rtkernels._arguments import an_integer
from rtkernels._guard import constant, is_dynamo_compiling, needs_grad, once_differentiable
from rtkernels._layout import FLOAT_DTYPES, address, metadata, row_count, row_stride, rowed
from rtkernels._registry import Op, TorchOp
from rtkernels._zeros import fresh_zeros
from rtkernels.errors import ArgumentError
from rtkernels.ops import _topk_router_plans as plans
from rtkernels.ops._topk_router_plans import BWD_PLANS, FWD_PLANS, KERNELS, RENORMALIZE, SCORE_FIRST, SOFTMAX
from rtkernels.testing.rows import Row


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


# ---- launchers ------------------------------------------------------------------------------------------------------


def _launch_fwd(logits, bias, k, mode, num_groups, top_groups, group_k, scale, eps, dense, routing_map):
    bias = _dense_bias(bias)
    x_address, bias_address = logits.data_ptr(), address(bias)
    plan = FWD_PLANS[
        metadata(logits), metadata(bias), (x_address & 15, bias_address & 15), k, mode, num_groups, top_groups,
        group_k, dense, routing_map,
    ]  # fmt: skip
    if plan is None:
        logits = logits.contiguous()
        return _launch_fwd(logits, bias, k, mode, num_groups, top_groups, group_k, scale, eps, dense, routing_map)
    launch, numbers, allocate, layouts = plan
    probs, indices, dense_probs, chosen_map = (allocate(*layout) for layout in layouts)
    counts = fresh_zeros(logits.get_device(), logits.shape[-1])
    if launch is not None:
        launch(
            x_address, bias_address, probs.data_ptr(), indices.data_ptr(), dense_probs.data_ptr() if dense else 0,
            chosen_map.data_ptr() if routing_map else 0, counts.data_ptr(), *numbers, scale, eps,
        )  # fmt: skip
    return probs, indices, counts, dense_probs, chosen_map


def _dense_bias(bias: Tensor | None) -> Tensor | None:
    if bias is None or (bias.dtype == torch.float32 and bias.is_contiguous()):
        return bias
    return bias.float().contiguous() if bias.dtype in FLOAT_DTYPES else bias


def _launch_bwd(logits, indices, g_compact, g_dense, mode, scale, eps):
    plans.check_bwd(logits, indices, g_compact, g_dense)
    dx = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if not row_count(logits.shape):
        return dx
    logits, indices = rowed(logits), indices.contiguous()
    g_compact = None if g_compact is None else g_compact.contiguous()
    g_dense = rowed(g_dense)
    g_stride = 0 if g_dense is None else row_stride(g_dense.shape, g_dense.stride())
    x_address, out = logits.data_ptr(), dx.data_ptr()
    launch, sizes, rest = BWD_PLANS[metadata(logits), x_address & 15, out & 15, indices.shape[-1]]
    pointers = x_address, indices.data_ptr(), address(g_compact), address(g_dense), out
    launch(*pointers, *sizes, g_stride, *rest, mode, scale, eps)
    return dx


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _reference_fwd(logits, bias, k, mode, num_groups, top_groups, group_k, scale, eps, dense, routing_map):
    plans.check(metadata(logits), metadata(bias), k, num_groups, top_groups, group_k)
    x = logits.float()
    indices = plans.choose(x, bias, k, mode, num_groups, top_groups, group_k)
    probs = plans.probabilities(x, indices, mode, scale, eps)
    chosen = torch.zeros_like(x, dtype=torch.bool).scatter_(-1, indices, True)
    counts = chosen.reshape(-1, x.shape[-1]).sum(0).to(torch.int32)
    none = x.new_empty(0)
    dense_probs = torch.zeros_like(x).scatter_(-1, indices, probs).contiguous() if dense else none
    chosen = chosen.contiguous() if routing_map else none.bool()
    return probs.contiguous(), indices.to(torch.int32).contiguous(), counts, dense_probs, chosen


def _reference_bwd(logits, indices, g_compact, g_dense, mode, scale, eps):
    plans.check_bwd(logits, indices, g_compact, g_dense)
    chosen = indices.long()
    g = torch.zeros(indices.shape, device=indices.device)
    if g_compact is not None:
        g = g + g_compact
    if g_dense is not None:
        g = g + g_dense.gather(-1, chosen)
    return plans.gradient(logits.float(), chosen, g, mode, scale, eps).to(logits.dtype).contiguous()


def _fake_fwd(logits, bias, k, mode, num_groups, top_groups, group_k, scale, eps, dense, routing_map):
    compact, every = (*logits.shape[:-1], k), logits.shape
    return (
        logits.new_empty(compact, dtype=torch.float32),
        logits.new_empty(compact, dtype=torch.int32),
        logits.new_empty(every[-1:], dtype=torch.int32),
        logits.new_empty(every if dense else (0,), dtype=torch.float32),
        logits.new_empty(every if routing_map else (0,), dtype=torch.bool),
    )


def _fake_bwd(logits, indices, g_compact, g_dense, mode, scale, eps):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


FORWARD = TorchOp(
    "topk_router_fwd(Tensor logits, Tensor? bias, int k, int mode, int num_groups, int top_groups, int group_k, "
    "float scale, float eps, bool dense, bool routing_map) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    launch=_launch_fwd,
    reference=_reference_fwd,
    fake=_fake_fwd,
)
BACKWARD = TorchOp(
    "topk_router_bwd(Tensor logits, Tensor indices, Tensor? g_compact, Tensor? g_dense, int mode, float scale, "
    "float eps) -> Tensor",
    launch=_launch_bwd,
    reference=_reference_bwd,
    fake=_fake_bwd,
)


# ---- public ---------------------------------------------------------------------------------------------------------


class _Router(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, bias, k, mode, num_groups, top_groups, group_k, scale, eps, dense, routing_map):
        ctx.set_materialize_grads(False)
        results = FORWARD(
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
            dx = BACKWARD(logits, indices, g_compact, g_dense, *ctx.options)
        return dx, *(None,) * 10


def _mode(score: str, score_first: bool, renormalize: bool) -> int:
    if score not in ("softmax", "sigmoid"):
        raise ArgumentError(f"score is {score!r}; expected 'softmax' or 'sigmoid'")
    return SOFTMAX * (score == "softmax") + SCORE_FIRST * bool(score_first) + RENORMALIZE * bool(renormalize)


def topk_router(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    score_first: bool = True,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int | None = None,
    group_k: int | None = None,
    renormalize: bool = False,
    scale: float = 1.0,
    eps: float = 1e-20,
    dense_probs: bool = False,
    routing_map: bool = False,
) -> Routing:
    """Choose k experts for every token (every row of logits), and give their probabilities.

    Experts are chosen by a key: the score if `score_first`, else the logit, plus `bias`. Without bias and groups that
    is the order of the logits themselves. Ties go to the lowest expert, always, of groups too; NaN counts as largest.
    The probability of a chosen expert is its score (without bias): its sigmoid, or its part of a softmax over all
    experts (`score_first`) or over the chosen ones; then divided by the sum of the chosen (`renormalize`), then times
    `scale`. All arithmetic is fp32. Differentiable once in the logits, from `probs`, `dense_probs` or both; bias gets
    no gradient.

    Args:
        logits: ``[..., experts]``, 1 to 4096 experts; bfloat16, float16 or float32, any strides (a copy is made unless
            rows are unit-stride and evenly spaced). May be any object with ``__dlpack__``; results are of its kind.
        k: 1 to 64 experts per token.
        score: ``"softmax"`` or ``"sigmoid"``.
        score_first: Choose by scores, and take a softmax over all experts; else choose by logits, and take it over the
            chosen ones.
        bias: ``[experts]``, added to the key for the choice only (the correction of loss-free balancing).
        num_groups: Experts form this many groups of neighbours; any divisor of their number.
        top_groups: Only experts of the best so many groups may be chosen; all groups if None.
        group_k: A group is as good as the sum of its so many largest keys; ``k // top_groups``, at least 1, if None.
        renormalize: Divide by the sum of the chosen scores plus `eps` (a softmax over the chosen has sum 1 already).
        scale: Factor of the probabilities.
        eps: Added to the sum.
        dense_probs: Give the probabilities as ``[..., experts]``, too.
        routing_map: Give the choice as bool ``[..., experts]``, too.

    Returns:
        Routing: ``probs`` and ``indices`` (``[..., k]``, float32 and int32), ``counts`` (``[experts]`` int32), and the
        dense results or None.
    """
    if not isinstance(logits, Tensor):
        none = [not dense_probs, not routing_map]
        results = interop.call(
            topk_router, logits, k, score=score, score_first=score_first, bias=bias, num_groups=num_groups,
            top_groups=top_groups, group_k=group_k, renormalize=renormalize, scale=scale, eps=eps,
            dense_probs=dense_probs, routing_map=routing_map,
        )  # fmt: skip
        return Routing(*results[:3], *(None if skip else item for skip, item in zip(none, results[3:], strict=True)))
    mode = _mode(score, score_first, renormalize)
    an_integer("k", k)
    an_integer("num_groups", num_groups)
    top_groups = num_groups if top_groups is None else an_integer("top_groups", top_groups)
    group_k = max(k // max(top_groups, 1), 1) if group_k is None else an_integer("group_k", group_k)
    if top_groups == num_groups >= 1 and logits.dim() and logits.shape[-1] % num_groups == 0:
        num_groups = top_groups = group_k = 1  # all of them: as if there were none
    args = logits, bias, k, mode, num_groups, top_groups, group_k, scale, eps, dense_probs, routing_map
    if is_grad_enabled() and needs_grad(logits):
        if is_dynamo_compiling():
            args = *args[:7], constant(scale), constant(eps), *args[9:]
        results = _Router.apply(*args)
    else:
        results = FORWARD(*args)
    probs, indices, counts, dense, chosen = results
    return Routing(probs, indices, counts, dense if dense_probs else None, chosen if routing_map else None)


# ---- registry -------------------------------------------------------------------------------------------------------


def _samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 5, 48, generator=g, device=device)
    indices = torch.topk(x, 4).indices.int()
    yield FORWARD, (x, x[0, 0].contiguous(), 4, SCORE_FIRST | RENORMALIZE, 6, 2, 2, 2.5, 1e-20, True, True)
    yield FORWARD, (x.bfloat16(), None, 7, SOFTMAX, 1, 1, 1, 1.0, 1e-20, False, False)
    yield BACKWARD, (x, indices, x[..., :4].contiguous(), x, SCORE_FIRST | RENORMALIZE, 2.5, 1e-20)
    yield BACKWARD, (x.half(), indices, x[..., :4].contiguous(), None, SOFTMAX | SCORE_FIRST, 1.0, 1e-20)


def _torch_groups(logits, k, bias, num_groups, top_groups, scale):
    """Group-limited sigmoid routing as models write it: dense probabilities, map, counts."""
    s = torch.sigmoid(logits)
    key = s + bias
    grouped = key.unflatten(-1, (num_groups, -1))
    best = grouped.topk(k // top_groups, -1).values.sum(-1).topk(top_groups, -1).indices
    mask = torch.zeros_like(grouped[..., 0]).scatter(-1, best, 1.0).bool()
    key = grouped.masked_fill(~mask.unsqueeze(-1), -torch.inf).flatten(-2)
    chosen = key.topk(k, -1).indices
    routing_map = torch.zeros_like(s).scatter(-1, chosen, 1.0).bool()
    s = s * routing_map
    return s / (s.sum(-1, keepdim=True) + 1e-20) * scale, routing_map, routing_map.sum(0)


def _torch_groups_bwd(dy, logits, indices, routing_map, scale):
    s = torch.sigmoid(logits)
    m = routing_map.to(s.dtype)
    z = (s * m).sum(-1, keepdim=True) + 1e-20
    return scale * m * s * (1 - s) / z * (dy - (s * dy * m).sum(-1, keepdim=True) / z)


def _torch_softmax(logits, k):
    values, indices = torch.softmax(logits, -1).topk(k, -1)
    counts = torch.zeros(logits.shape[-1], dtype=torch.int32, device=logits.device)
    ones = torch.ones_like(indices, dtype=torch.int32).flatten()
    return values / values.sum(-1, keepdim=True), indices, counts.scatter_add(0, indices.flatten(), ones)


def _rows() -> Iterator[Row]:
    tokens = 8192
    mode = SCORE_FIRST | RENORMALIZE

    def normal(device: str, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    for experts, k, groups, kept in ((256, 8, 32, 4), (256, 8, 8, 4)):
        n = tokens * experts

        def make(device, g, *, experts=experts, k=k, groups=groups, kept=kept) -> dict[str, Any]:
            bias = normal(device, g, experts)
            return {
                "logits": normal(device, g, tokens, experts), "k": k, "bias": bias, "num_groups": groups,
                "top_groups": kept, "scale": 2.5,
            }  # fmt: skip

        def ours(logits, k, bias, num_groups, top_groups, scale):
            results = FORWARD(
                logits, bias, k, mode, num_groups, top_groups, k // top_groups, scale, 1e-20, True, True
            )  # fmt: skip
            return results[3], results[4], results[2]

        yield Row(
            name="group_topk_fwd",
            shape=f"{tokens}x{experts}k{k}g{groups}of{kept}",
            make=make,
            ours=ours,
            torch=_torch_groups,
            bytes=n * 9,
        )
        if groups != 32:
            continue

        def make_bwd(device, g, *, make=make) -> dict[str, Any]:
            inputs = make(device, g)
            routing = topk_router(
                inputs["logits"], inputs["k"], score="sigmoid", bias=inputs["bias"], num_groups=inputs["num_groups"],
                top_groups=inputs["top_groups"], routing_map=True,
            )  # fmt: skip
            dy = normal(device, g, *inputs["logits"].shape)
            found = {"indices": routing.indices, "routing_map": routing.routing_map}
            return {"dy": dy, "logits": inputs["logits"], **found, "scale": inputs["scale"]}

        yield Row(
            name="group_topk_bwd",
            shape=f"{tokens}x{experts}k{k}g{groups}of{kept}",
            make=make_bwd,
            ours=lambda dy, logits, indices, routing_map, scale: BACKWARD(
                logits, indices, None, dy, mode, scale, 1e-20
            ),
            torch=_torch_groups_bwd,
            bytes=n * 13,
        )
    for experts, k in ((256, 8), (128, 8), (64, 6), (8, 2)):

        def make_softmax(device, g, *, experts=experts, k=k) -> dict[str, Any]:
            return {"logits": normal(device, g, tokens, experts), "k": k}

        yield Row(
            name="softmax_router_fwd",
            shape=f"{tokens}x{experts}k{k}",
            make=make_softmax,
            ours=lambda logits, k: FORWARD(logits, None, k, mode | SOFTMAX, 1, 1, 1, 1.0, 1e-20, False, False)[:3],
            torch=_torch_softmax,
            bytes=tokens * (4 * experts + 8 * k) + 4 * experts,
        )


OP = Op(
    "topk_router",
    public=("topk_router",),
    kernels=KERNELS,
    torch_ops=(FORWARD, BACKWARD),
    samples=_samples,
    rows=_rows,
)
