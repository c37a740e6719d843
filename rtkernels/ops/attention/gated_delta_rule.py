"""The gated delta rule (Qwen3-Next and others): forward, gradients, and one token at a time."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import delta_gates, sequence_parts
from rtkernels.ops.attention import gated_delta_rule_parallel as parallel
from rtkernels.ops.attention import gated_delta_rule_plan as plans
from rtkernels.ops.attention import gated_delta_rule_reference as reference
from rtkernels.ops.attention import gated_delta_rule_scans as scans
from rtkernels.ops.attention import gated_delta_rule_segments as segments
from rtkernels.ops.attention.backends import TAIL
from rtkernels.ops.attention.checks import HALVES, Heads, check_factor, check_grid, check_width
from rtkernels.ops.attention.gated_delta_rule_plan import KERNELS, MAX_KEY_WIDTH, MAX_VALUE_WIDTH, Call
from rtkernels.ops.attention.options import default_scale
from rtkernels.runtime.call.public import public
from rtkernels.runtime.layout import check_same
from rtkernels.runtime.operator.arguments import Among
from rtkernels.runtime.operator.autograd import applied, once_differentiable
from rtkernels.runtime.operator.declared import Aligned, Argument, Dense, InPlaceVectors, Meta, Operator
from rtkernels.runtime.operator.kinds import meta_of
from rtkernels.runtime.operator.plan import Memory, Steps
from rtkernels.runtime.operator.registry import Op

_FLOAT32 = torch.float32


def _check_operands(q: Meta, k: Meta, v: Meta, g: Meta | None, beta: Meta, scale: float, dims: int, order: str) -> None:
    for name, meta in (("q", q), ("k", k), ("v", v)):
        if meta.dim() != dims:
            raise ArgumentError(f"{name} has shape {tuple(meta.shape)}; expected {dims} dimensions, {order}")
        check_same(name, meta.dtype, q.dtype, "dtype", of="q")
    check_same("k", tuple(k.shape), tuple(q.shape), "shape", of="q")
    check_same("v", tuple(v.shape[:-2]), tuple(q.shape[:-2]), "shape but for heads and width", of="q")
    check_width("q", q, MAX_KEY_WIDTH)
    check_width("v", v, MAX_VALUE_WIDTH)
    heads, key_heads = v.shape[-2], q.shape[-2]
    if heads < 1 or key_heads < 1 or heads % key_heads:
        raise ArgumentError(f"v has {heads} heads; expected a multiple of the {key_heads} heads of q and k")
    numbers = tuple(v.shape[:-1])
    check_same("beta", tuple(beta.shape), numbers, "shape", of="v without its width")
    if g is not None and g.dim() == v.dim():
        check_same("g", tuple(g.shape), (*numbers, q.shape[-1]), "shape", of="v and the width of q")
    elif g is not None:
        check_same("g", tuple(g.shape), numbers, "shape", of="v without its width")
    check_factor(scale)


def _count(q: Meta, cu: Meta | None) -> int:
    return q.shape[0] if cu is None else cu.shape[0] - 1


def _state_shape(q: Meta, v: Meta, cu: Meta | None) -> tuple[int, ...]:
    return (_count(q, cu), v.shape[-2], q.shape[-1], v.shape[-1])


def _check(q, k, v, g, beta, initial_state, cu_seqlens, scale) -> None:
    cu, state = cu_seqlens, initial_state
    dims, order = (4, "[batch, length, heads, width]") if cu is None else (3, "[tokens, heads, width]")
    _check_operands(q, k, v, g, beta, scale, dims, order)
    if g.dim() == v.dim():
        check_same("v", v.shape[-2], q.shape[-2], "heads", of="q and k, if g has a decay per channel")
    if cu is not None and (cu.dtype != torch.int32 or cu.dim() != 1 or cu.shape[0] < 1):
        raise ArgumentError(f"cu_seqlens is {cu.dtype} {tuple(cu.shape)}; expected int32 [sequences + 1]")
    check_grid("v", v, _count(q, cu))
    if state is not None:
        check_same("initial_state", tuple(state.shape), _state_shape(q, v, cu), "shape", of="batch, heads, q and v")


def _plan(q, k, v, g, initial_state, cu_seqlens, scale, l2norm, wants_state, device) -> Steps:
    call = segments.split(Call.of(q, v, cu_seqlens, scale, l2norm, channels=g.dim() == v.dim()), device)
    steps, scratch = plans.inside_chunks(call, q, k, device)
    names = {"out": "out"}
    if initial_state is not None:
        names["initial"] = "initial_state"
    if wants_state:
        names["final"] = "final_state"
    tails = plans.tails(call, (("out", call.heads, call.d_v),), device)
    scratch |= segments.scratch(call)
    return Steps(*steps, *segments.forward(call, q, k, v, names, device), *tails, scratch=scratch)


def _outputs(q, v, cu_seqlens, wants_state) -> tuple[Memory | None, ...]:
    final = Memory(_state_shape(q, v, cu_seqlens), _FLOAT32) if wants_state else None
    return Memory(tuple(v.shape), q.dtype), final


FORWARD = Operator(
    "gated_delta_rule_fwd",
    (
        Heads("q", HALVES), Heads("k", HALVES), Heads("v", HALVES), Dense("g", (_FLOAT32,)), Dense("beta", (_FLOAT32,)),
        Aligned("initial_state", (_FLOAT32,), optional=True), Dense("cu_seqlens", None, optional=True),
    ),
    options="float scale, bool l2norm, bool wants_state", results="out final_state", outputs=_outputs, plan=_plan,
    reference=reference.forward, check=_check, plans_empty=True,
)  # fmt: skip


def _check_backward(dout, dfinal_state, q, k, v, g, beta, initial_state, cu_seqlens, scale) -> None:
    _check(q, k, v, g, beta, initial_state, cu_seqlens, scale)
    check_same("dout", tuple(dout.shape), tuple(v.shape), "shape", of="v")
    check_same("dout", dout.dtype, q.dtype, "dtype", of="q")
    if dfinal_state is not None:
        check_same("dfinal_state", tuple(dfinal_state.shape), _state_shape(q, v, cu_seqlens), "shape", of="q and v")


def _backward_outputs(q, k, v, g, beta, cu_seqlens, needs_state):
    packed = cu_seqlens is not None  # rows of no sequence give 0
    numbers = [Memory(tuple(t.shape), _FLOAT32, zero=packed) for t in (g, beta)]
    state = Memory(_state_shape(q, v, cu_seqlens), _FLOAT32) if needs_state else None
    return *(Memory(tuple(t.shape), q.dtype) for t in (q, k, v)), *numbers, state


def _plan_backward(
    dout, dfinal_state, q, k, v, g, initial_state, cu_seqlens, scale, l2norm, needs_state, device
) -> Steps:  # fmt: skip
    call = segments.split(Call.of(q, v, cu_seqlens, scale, l2norm, channels=g.dim() == v.dim()), device, True)
    steps, scratch = plans.inside_chunks(call, q, k, device)
    names = {"states": "states", "updates": "updates"}
    if initial_state is not None:
        names["initial"] = "initial_state"
    steps += [
        *segments.forward(call, q, k, v, names, device),
        *segments.backward(call, q, k, dout, plans.reverse_names(dfinal_state, needs_state), device),
        scans.grads(call, q, k, v, dout, device),
    ]
    tails = (("dq", call.key_heads, call.d_k), ("dk", call.key_heads, call.d_k), ("dv", call.heads, call.d_v))
    scratch |= plans.gradient_scratch(call) | segments.scratch(call, gradients=True)
    return Steps(*steps, *plans.tails(call, tails, device), scratch=scratch)


BACKWARD = Operator(
    "gated_delta_rule_bwd",
    (Heads("dout", HALVES), Aligned("dfinal_state", (_FLOAT32,), optional=True), *FORWARD.arguments),
    options="float scale, bool l2norm, bool needs_state", results="dq dk dv dg dbeta dinitial_state",
    outputs=_backward_outputs, plan=_plan_backward, reference=reference.backward, check=_check_backward,
    plans_empty=True,
)  # fmt: skip


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial_state, cu_seqlens, scale, l2norm, wants_state):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, beta, initial_state, cu_seqlens)
        ctx.options, ctx.wants_state = (scale, l2norm), wants_state
        return FORWARD.call(q, k, v, g, beta, initial_state, cu_seqlens, scale, l2norm, wants_state)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dfinal_state):
        if dout is None and dfinal_state is None:
            return (None,) * 10
        q, k, v, *others = ctx.saved_tensors
        if dout is None:
            dout = v.new_zeros(v.shape)
        if not ctx.wants_state:
            dfinal_state = None
        need = ctx.needs_input_grad[:6]
        grads = BACKWARD.call(dout, dfinal_state, q, k, v, *others, *ctx.options, need[5])
        return *(grad if needed else None for grad, needed in zip(grads, need, strict=True)), None, None, None, None


_differentiable = applied(_GatedDeltaRule)


def _for_channels(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return q and k, with a copy for each head of v if there is a decay per channel."""
    count = q.shape[-2] if q.dim() > 1 else 0
    if (
        g is None
        or g.dim() != v.dim()
        or not count
        or k.shape != q.shape
        or v.dim() != q.dim()
        or v.shape[-2] % count
        or v.shape[-2] == count
    ):
        return q, k
    return q.repeat_interleave(v.shape[-2] // count, -2), k.repeat_interleave(v.shape[-2] // count, -2)


def _gate_options(
    q: Tensor, v: Tensor, g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None,
    beta_scale: float,
) -> tuple[float, float]:  # fmt: skip
    heads, width = v.shape[-2] if v.dim() > 1 else 0, q.shape[-1] if q.dim() else 0
    shape = (heads, width) if g is not None and g.dim() == v.dim() else (heads,)
    return delta_gates.check_options(g, A_log, dt_bias, lower_bound, beta_scale, heads, shape)


@public(tensors="k v beta", options={"state_layout": Among(("kv", "vk"), "'kv' or 'vk'")})
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, *, scale: float | None = None,
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None, return_state: bool = False,
    l2norm: bool = False, A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None,
    beta_sigmoid: bool = False, beta_scale: float = 1.0, state_layout: Literal["kv", "vk"] = "kv",
    out: Tensor | tuple[Tensor | None, ...] | None = None, group: Any = None, zigzag: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return linear attention by the gated delta rule.

    For each token and value head, with the state S [width of k, width of v]: ``S = exp(g) S``,
    ``u = beta (v - S^T k)``, ``S = S + k u^T``, ``out = scale * S^T q``. Computed in chunks of 64 tokens, so that the
    time is linear in the length. Few long sequences are split into segments that are computed at once, by counts and
    lengths that the host knows: packed sequences count as equally long. Differentiable in q, k, v, g, beta, A_log,
    dt_bias and initial_state, also through the final state; deterministic. States, gates and sums are in fp32; operands
    of products are rounded to q's dtype. The inverse that a chunk needs keeps twice as many bits with a decay per head,
    but not with one per channel: there, if beta is near 2, keys are equal and decays near 0 over hundreds of tokens,
    errors grow threefold per chunk.

    Args:
        q: bfloat16 or float16 [batch, length, key heads, width], or [tokens, key heads, width] of packed sequences.
            Width: a multiple of 8 up to 128. Any strides with unit stride within a head, as for ``attention``.
        k: Like q.
        v: [batch, length, heads, width] in q's dtype, packed like q; width: a multiple of 8 up to 256. Heads are a
            multiple of those of q and k: head h reads key head ``h // (heads / key heads)``.
        g: [batch, length, heads] (packed like v), log decay, not positive, any floating-point dtype. None: no decay.
            [batch, length, heads, width of k]: a decay for each channel of k, that is, each row of S (Kimi Linear's
            KDA); k and q are copied if v has more heads. Less than -104 counts as -104, of which exp is 0. With A_log
            what the gate's projection returns.
        beta: [batch, length, heads], any floating-point dtype; as a rule 0 to 1. With beta_sigmoid its logits.
        scale: Factor of the result. Default: ``1 / sqrt(width of q)``.
        initial_state: [batch or sequences, heads, width of k, width of v], any floating-point dtype: the state returned
            by the call for the preceding rows. Default: zeros.
        cu_seqlens: int32 [sequences + 1] on the device: sequence b has rows ``cu_seqlens[b]`` to ``[b + 1]``. Rows
            after the last sequence give 0.
        return_state: Also return the state after the last row.
        l2norm: Divide each row of q and k by ``sqrt(sum of its squares + 1e-6)`` first.
        A_log: [heads], any floating-point dtype: log decays are ``-exp(A_log) softplus(g + dt_bias)``.
        dt_bias: With A_log: [heads], or [heads, width of k] (or flat) for a decay per channel. Default: zeros.
        lower_bound: With A_log: log decays are ``lower_bound * sigmoid(exp(A_log) (g + dt_bias))``. Negative.
        beta_sigmoid: beta is ``beta_scale * sigmoid(beta)``.
        beta_scale: Factor of beta; 2 with beta_sigmoid for models with negative eigenvalues (OLMo Hybrid).
        state_layout: "vk" if initial_state and the returned state have their last two dimensions the other way round,
            [..., width of v, width of k], as FlashInfer keeps them. Each costs a transposing copy.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.
        group: A ``torch.distributed`` process group over which each sequence is split into parts. Each member computes
            how the state after its part depends on the state before it, a matrix of the width of k squared per head,
            and starts from the state that follows from all parts before its own. The forward runs the rule three times
            over a part, the backward its gradients twice. All members pass the same options, and all of them or none
            call backward. initial_state counts on rank 0, which has the first part, and may be None elsewhere; all
            members return the state after the last part. The total loss is the sum of the members' losses: gradients of
            initial_state (0 but on rank 0), A_log and dt_bias are to be summed over the group. Not with cu_seqlens.
        zigzag: Needed with group, because another order of parts would give other results without an error. False: rank
            r of n has part r of n; lengths may differ. True: it has parts r and ``2 n - 1 - r`` of ``2 n``, one after
            the other, both of half its length, as for ``nn.parallel.ring_attention``.

    Returns:
        A tensor of v's shape and dtype; with return_state a pair of it and the final state, float32.
    """
    if group is not None and cu_seqlens is not None:
        raise ArgumentError("group and cu_seqlens are given; expected one of them: packed sequences cannot be split")
    parts = sequence_parts.count(q, group, zigzag)
    state, swapped = None if initial_state is None else initial_state.float(), state_layout == "vk"
    if swapped and state is not None:
        widths = v.shape[-1:] + q.shape[-1:]
        if state.shape[-2:] != widths:
            wanted = f"[batch, heads, {widths[0]}, {widths[1]}] for state_layout='vk'"
            raise ArgumentError(f"initial_state has shape {tuple(state.shape)}; expected {wanted}")
        state = state.transpose(-1, -2)
    factor, sigmoid = default_scale(scale, q), bool(beta_sigmoid)
    if g is None:
        g = None if A_log is not None else torch.zeros(v.shape[:-1], dtype=_FLOAT32, device=v.device)
    options = _gate_options(q, v, g, A_log, dt_bias, lower_bound, beta_scale)
    q, k = _for_channels(q, k, v, g)
    if parts or A_log is not None or sigmoid or options[1] != 1.0:  # before the first launch
        _check(*map(meta_of, (q, k, v, g, beta, state, cu_seqlens)), factor)
    g, beta = delta_gates.gates(g, beta, A_log, dt_bias, options[0], sigmoid, options[1])
    if parts:
        rule = parallel.Rule(FORWARD, BACKWARD, factor, bool(l2norm), group, parts, bool(return_state))
        result, final = parallel.of_group(q, k, v, g, beta, state, rule)
    else:
        values = (q, k, v, g, beta, state, cu_seqlens, factor, bool(l2norm), bool(return_state))
        differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in values[:6])
        result, final = _differentiable(*values) if differentiated else FORWARD.call(*values)
    if swapped and return_state:
        final = final.transpose(-1, -2).contiguous()
    return (result, final) if return_state else result


# ---- one token ------------------------------------------------------------------------------------------------------


_STATES = (_FLOAT32, torch.bfloat16)


def _check_step(q, k, v, g, beta, state, A_log, dt_bias, slots, scale) -> None:
    _check_operands(q, k, v, g, beta, scale, 3, "[batch, heads, width]")
    check_grid("v", v, q.shape[0])
    shape = (*v.shape[:-1], q.shape[-1], v.shape[-1])
    if slots is not None:
        if slots.dtype != torch.int32 or tuple(slots.shape) != tuple(q.shape[:1]):
            raise ArgumentError(
                f"slots is {slots.dtype} {tuple(slots.shape)}; expected int32 {tuple(q.shape[:1])}, one per sequence"
            )
        shape = (*state.shape[:1], *shape[1:])
    check_same("state", tuple(state.shape), shape, "shape", of="q and v" if slots is None else "heads of q and v")


ONE = Operator(
    "gated_delta_rule_step_",
    (
        Heads("q", HALVES), Heads("k", HALVES), Heads("v", HALVES), Argument("g", optional=True), Argument("beta"),
        InPlaceVectors("state", _STATES), Dense("A_log", optional=True), Dense("dt_bias", optional=True),
        Dense("slots", None, optional=True),
    ),
    options="float scale, bool l2norm, float lower_bound, bool sigmoid, float factor", numbers="lower_bound factor",
    results="out", outputs=lambda q, v: (Memory(tuple(v.shape), q.dtype),),
    plan=lambda q, k, v, g, beta, state, A_log, dt_bias, slots, scale, l2norm, sigmoid, device: Steps(
        plans.step(q, k, v, state, (g, beta, A_log, dt_bias), slots, scale, (l2norm, sigmoid), device)
    ),
    reference=reference.step, check=_check_step,
)  # fmt: skip


@public(tensors="v beta", no_gradients="q k v g beta state A_log dt_bias")
def gated_delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, state: Tensor, *, scale: float | None = None,
    l2norm: bool = False, A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None,
    beta_sigmoid: bool = False, beta_scale: float = 1.0, slots: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``gated_delta_rule`` for one more token per sequence, and update the states. One launch, gates included.

    Args:
        q: bfloat16 or float16 [batch, key heads, width].
        k: Like q.
        v: [batch, heads, width] in q's dtype.
        g: [batch, heads] or [batch, heads, width of k], log decay, any floating-point dtype and strides. None: no
            decay. With A_log what the gate's projection returns.
        beta: [batch, heads], any floating-point dtype and strides. With beta_sigmoid its logits.
        state: float32 or bfloat16 [batch, heads, width of k, width of v], contiguous; overwritten by the state after
            the token, computed in fp32 and rounded once. Copied if its address is not a multiple of 16 bytes.
        scale: Factor of the result. Default: ``1 / sqrt(width of q)``.
        l2norm: Divide q and k by their norms first, as in ``gated_delta_rule``.
        A_log: As in ``gated_delta_rule``, like the next four.
        dt_bias: [heads] or [heads, width of k].
        lower_bound: Negative.
        beta_sigmoid: beta is ``beta_scale * sigmoid(beta)``.
        beta_scale: Factor of beta.
        slots: int32 [batch] on the device, all different: sequence b has state ``state[slots[b]]``, and state may have
            any first size. Negative, or not below that size: no sequence; the result is 0 and no state changes.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        [batch, heads, width of v]. Not differentiable.
    """
    bound, factor = _gate_options(q, v, g, A_log, dt_bias, lower_bound, beta_scale)
    given = {"g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
    g, beta, A_log, dt_bias = (delta_gates.loadable(name, t) for name, t in given.items())
    scales = (default_scale(scale, q), bool(l2norm), bound, bool(beta_sigmoid), factor)
    return ONE.call(q, k, v, g, beta, state, A_log, dt_bias, slots, *scales)


OP = Op(
    "gated_delta_rule", public=("gated_delta_rule", "gated_delta_rule_step"),
    kernels=(*KERNELS, *scans.KERNELS, *segments.KERNELS, TAIL), torch_ops=(FORWARD, BACKWARD, ONE, parallel.CHAIN),
    uses=("delta_gates",),
)  # fmt: skip
