"""The gated delta rule of sequences whose parts are on several processes.

The state after a part is an affine function of the state S before it, A S + b, as it is of segments
(gated_delta_rule_rows.cuh). Each process computes b, by the rule from a state of zeros, and A, by the rule from the
identity with values of zeros. Both are gathered, each process computes the states before its parts, and runs the rule
from these. Gradients of states go back by A^T in the same way: what a part adds to the gradient of the state before it
does not depend on states, so all processes compute it at once, and once more with the gradient behind their parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import gated_delta_rule_segments as segments
from rtkernels.ops.attention.gated_delta_rule_plan import MAX_KEY_WIDTH, MAX_VALUE_WIDTH, Call
from rtkernels.ops.attention.sequence_parts import as_batch, gathered, joined
from rtkernels.runtime.layout import check_same
from rtkernels.runtime.operator.autograd import applied, once_differentiable
from rtkernels.runtime.operator.declared import Aligned, InPlaceVectors, Meta, Operator
from rtkernels.runtime.operator.plan import Steps

_FLOAT32 = torch.float32


# ---- states between parts -------------------------------------------------------------------------------------------


def _check(transitions: Meta, states: Meta) -> None:
    if states.dim() != 5 or states.shape[-2] > MAX_KEY_WIDTH or states.shape[-1] > MAX_VALUE_WIDTH:
        raise ArgumentError(
            f"states has shape {tuple(states.shape)}; expected [sequences, parts, heads, width of k, width of v]"
        )
    if max(states.shape[0], states.shape[2]) > 65535:
        raise ArgumentError(f"states has shape {tuple(states.shape)}; expected up to 65535 sequences and heads")
    for name, width in (("width of k", states.shape[-2]), ("width of v", states.shape[-1])):
        if width % 8:
            raise ArgumentError(f"states has shape {tuple(states.shape)}; expected a multiple of 8 as the {name}")
    wanted = (*states.shape[:-1], states.shape[-2])
    check_same("transitions", tuple(transitions.shape), wanted, "shape", of="states with width of k twice")


def _plan(states: Meta, reverse: bool, device: int) -> Steps:
    sequences, parts, heads, d_k, d_v = states.shape
    if parts < 3:
        return Steps()
    call = Call("", _FLOAT32, sequences, parts, heads, heads, d_k, d_v, False, 1.0, False, segment=1)
    return Steps(segments.chain(call, "states", reverse, device, "transitions"))


def _reference(transitions: Tensor, states: Tensor, reverse: bool) -> None:
    step, numbers = (1, range(states.shape[1] - 2, 0, -1)) if reverse else (-1, range(1, states.shape[1] - 1))
    for i in numbers:
        by, state = transitions[:, i].mT if reverse else transitions[:, i], states[:, i + step]
        some = (state != 0).any(-2, keepdim=True)
        states[:, i] += torch.where(some, by @ state, 0.0)


CHAIN = Operator(
    "gated_delta_rule_chain_", (Aligned("transitions", (_FLOAT32,)), InPlaceVectors("states", (_FLOAT32,))),
    options="bool reverse", results="", plan=_plan, reference=_reference, check=_check,
)  # fmt: skip


def _by_parts(x: Tensor, rule: Rule) -> Tensor:
    """Return [parts * batch, ..] as [parts, batch, ..]."""
    return x.unflatten(0, (rule.parts, x.shape[0] // rule.parts))


def _between(
    transitions: Tensor, states: Tensor, last: Tensor | None, reverse: bool, rule: Rule
) -> tuple[Tensor, list[int]]:
    """Return the states after all parts, [batch, parts, ..], and the numbers of this member's parts.

    With `reverse`, states are gradients of those before parts, and `last` is the gradient of the one after the last
    part (None: 0), which is added behind them. CHAIN leaves out the first and the last of what it gets, so there is an
    additional one at the end, and with `reverse` at the beginning.
    """
    width = transitions.shape[-1]
    parts, mine = gathered(_by_parts(torch.cat((transitions, states), -1), rule), rule.group)
    outer = torch.zeros_like(parts[0])
    end = outer if last is None else torch.nn.functional.pad(last, (width, 0))
    whole = torch.stack([outer, *parts, end] if reverse else [*parts, end], 1)
    chained = whole[..., width:].contiguous()
    CHAIN.call(whole[..., :width].contiguous(), chained, reverse)
    return chained[:, 1:] if reverse else chained[:, :-1], mine


# ---- the rule -------------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """The operators of one process, their options, and what it has of sequences."""

    forward: Operator
    backward: Operator
    scale: float
    l2norm: bool
    group: Any
    parts: int  # of each sequence that a member has: batch entries, all first ones before all second ones
    wants_state: bool


class _OfGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial_state, rule):
        out, final, *kept = _forward(q, k, v, g, beta, initial_state, rule)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, beta, *kept)
        ctx.rule = rule
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dfinal):
        rule, (q, k, v, g, beta, before, transitions) = ctx.rule, ctx.saved_tensors
        if dout is None:
            dout = v.new_zeros(v.shape)
        inputs, options = (q, k, v, g, beta), (None, rule.scale, rule.l2norm)
        added = rule.backward.call(dout, None, *inputs, None, *options, True)[5]
        last = None
        if rule.wants_state:  # each member has the last state, so the gradients of all of them add up
            own = torch.zeros_like(_by_parts(added, rule)[0]) if dfinal is None else dfinal
            last = torch.stack(gathered(own.unsqueeze(0), rule.group)[0]).sum(0)
        gradients, mine = _between(transitions, added, last, True, rule)
        behind = torch.stack([gradients[:, i + 1] for i in mine]).flatten(0, 1)
        need = ctx.needs_input_grad[:6]
        *grads, dstate = rule.backward.call(dout, behind, *inputs, before, *options, need[5])
        if need[5]:
            dstate = _by_parts(dstate, rule)[0]
            dstate = dstate if mine[0] == 0 else torch.zeros_like(dstate)
        return *(grad if needed else None for grad, needed in zip((*grads, dstate), need, strict=True)), None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, rule: Rule
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, the state after the last part, the states before this member's parts, and their transitions."""
    sequences, heads, width = q.shape[0], v.shape[-2], q.shape[-1]
    options = (None, rule.scale, rule.l2norm)
    before = torch.zeros(sequences, heads, width, v.shape[-1], dtype=_FLOAT32, device=q.device)
    if initial_state is not None and torch.distributed.get_rank(rule.group) == 0:
        _by_parts(before, rule)[0] = initial_state
    own = rule.forward.call(q, k, v, g, beta, before, *options, True)[1]
    identity = torch.eye(width, dtype=_FLOAT32, device=q.device).expand(sequences, heads, width, width).contiguous()
    zeros = v.new_zeros(width).expand(*v.shape[:-1], width)
    transitions = rule.forward.call(q, k, zeros, g, beta, identity, *options, True)[1]
    after, mine = _between(transitions, own, None, False, rule)
    before = torch.stack([after[:, i - 1] if i else _by_parts(before, rule)[0] for i in mine]).flatten(0, 1)
    out, _ = rule.forward.call(q, k, v, g, beta, before, *options, False)
    return out, after[:, -1].contiguous(), before, transitions


_differentiable = applied(_OfGroup)


def of_group(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Return the result for this member's parts of each sequence, and the state after the last part of all members.

    The arguments are those of the public function, with gates computed. ``initial_state`` counts on the member that has
    the first part.
    """
    values = (*(as_batch(t, rule.parts) for t in (q, k, v, g, beta)), initial_state, rule)
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in values[:6])
    out, final = _differentiable(*values) if differentiated else _forward(*values)[:2]
    return joined(out, rule.parts), final
