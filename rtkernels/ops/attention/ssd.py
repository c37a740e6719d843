"""Mamba-2's state space model (SSD), linear attention with a decay per token: forward, gradients, one token."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import gated_delta_rule_plan as plans
from rtkernels.ops.attention import gated_delta_rule_scans as scans
from rtkernels.ops.attention import ssd_reference as reference
from rtkernels.ops.attention.checks import HALVES, Heads, check_grid, check_width, strides
from rtkernels.ops.attention.gated_delta_rule_plan import MAX_KEY_WIDTH, MAX_VALUE_WIDTH, Call
from rtkernels.ops.attention.mma_plan import stride_arguments, tile_pitch
from rtkernels.ops.reduce.row_dot import row_dot
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import check_tensor
from rtkernels.runtime.invariance import refuse_weight_gradient
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, check_same
from rtkernels.runtime.operator.arguments import check_number
from rtkernels.runtime.operator.autograd import applied, once_differentiable
from rtkernels.runtime.operator.declared import Aligned, Dense, InPlaceVectors, Meta, Operator
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_FLOAT32 = torch.float32
_MAX_STATE = 2 * MAX_KEY_WIDTH  # in two parts, whose results are added
_COLUMNS = (32, 64)  # of x that a block of a scan has
_MAX_STAGES = 3
_SCAN = Kernel(
    "attention/ssd_scan.cu", "ssd_scan", template="T DK VT", max_registers=255,
    args="q:ptr k:ptr v:ptr inner:ptr rows:ptr skip:ptr initial:ptr final:ptr cu:ptr out:ptr states:ptr updates:ptr "
    f"length:i64 heads:i64 key_heads:i64 d_k:i64 d_v:i64 {stride_arguments('q k v')} stages:i64",
    variants=[(t, d, v) for t in ("bf16", "fp16") for d in (64, 128) for v in _COLUMNS],
)  # fmt: skip
_STEP = Kernel(
    "attention/ssd_step.cu", "ssd_step", template="T", max_registers=72, tier="serve",
    args="x:ptr dt:ptr rate:ptr b:ptr c:ptr skip:ptr bias:ptr state:ptr out:ptr heads:i64 groups:i64 d_k:i64 d_v:i64 "
    "x_batch:i64 x_head:i64 b_batch:i64 b_head:i64 c_batch:i64 c_head:i64 softplus:i64 low:f64 high:f64",
    variants=[("bf16",), ("fp16",)],
)  # fmt: skip


# ---- operators: C and B are q and k, x is v, dt is beta ------------------------------------------------------------


def _check_operands(q: Meta, k: Meta, v: Meta, dims: int, order: str, width: int) -> None:
    for name, meta in (("x", v), ("B", k), ("C", q)):
        if meta.dim() != dims:
            raise ArgumentError(f"{name} has shape {tuple(meta.shape)}; expected {dims} dimensions, {order}")
        check_same(name, meta.dtype, v.dtype, "dtype", of="x")
    check_same("C", tuple(q.shape), tuple(k.shape), "shape", of="B")
    check_same("B", tuple(k.shape[:-2]), tuple(v.shape[:-2]), "shape but for groups and width", of="x")
    check_width("B", k, width)
    check_width("x", v, MAX_VALUE_WIDTH)
    heads, groups = v.shape[-2], k.shape[-2]
    if heads < 1 or groups < 1 or heads % groups:
        raise ArgumentError(f"x has {heads} heads; expected a multiple of the {groups} groups of B and C")


def _count(q: Meta, cu: Meta | None) -> int:
    return q.shape[0] if cu is None else cu.shape[0] - 1


def _state_shape(q: Meta, v: Meta, cu: Meta | None) -> tuple[int, ...]:
    return (_count(q, cu), v.shape[-2], q.shape[-1], v.shape[-1])


def _check_packed(cu: Meta | Tensor | None) -> None:
    if cu is not None and (cu.dtype != torch.int32 or cu.dim() != 1 or cu.shape[0] < 1):
        raise ArgumentError(f"cu_seqlens is {cu.dtype} {tuple(cu.shape)}; expected int32 [sequences + 1]")


def _check(q, k, v, g, beta, skip, initial_state, cu_seqlens) -> None:
    cu, state = cu_seqlens, initial_state
    dims, order = (4, "[batch, length, heads, width]") if cu is None else (3, "[tokens, heads, width]")
    _check_operands(q, k, v, dims, order, MAX_KEY_WIDTH)
    for meta in (g, beta):
        check_same("dt", tuple(meta.shape), tuple(v.shape[:-1]), "shape", of="x without its width")
    _check_packed(cu)
    if skip is not None:
        check_same("D", tuple(skip.shape), (v.shape[-2],), "shape", of="heads of x")
    check_grid("x", v, _count(q, cu))
    if state is not None:
        check_same("initial_state", tuple(state.shape), _state_shape(q, v, cu), "shape", of="batch, heads, B and x")


def _call(q: Meta, v: Meta, skip: Meta | None, cu: Meta | None) -> Call:
    return Call.of(q, v, cu, 1.0, False, corrected=False, skip=skip is not None)


def _shape(call: Call, device: int) -> tuple[int, int, int]:
    """Return columns of v that a block of the scan has, stages, and shared memory.

    Blocks of 32 columns are for heads that, split so, do not need more than one block per SM.
    """
    info = device_info(device)
    split = call.sequences * call.heads * -(-call.d_v // _COLUMNS[0]) <= info.sm_count or call.d_v <= _COLUMNS[0]
    columns = _COLUMNS[0] if split else _COLUMNS[1]
    keys, values, matrix = (64 * tile_pitch(width) for width in (call.width, columns, 64))
    stage, others = 2 * keys + values + matrix + 4 * 4 * 64, call.width * tile_pitch(columns) + 2 * values
    stages = min((info.shared_per_block - others) // stage, _MAX_STAGES)
    return columns, stages, stages * stage + others


def _scan(call: Call, q: Meta, k: Meta, v: Meta, names: dict[str, str], device: int) -> Step:
    """Return the launch from chunk to chunk. `names`: of initial, final, and out or states and updates."""
    if scans.by_wgmma(call, device, "out" in names):
        return scans.scan(call, q, k, v, names, device)
    columns, stages, shared = _shape(call, device)
    grid = (-(-call.d_v // columns), call.heads, call.sequences)
    launch = _SCAN.bind((call.token, call.width, columns), device, grid, 256, shared)
    given = (
        [names.get(name, 0) for name in ("initial", "final")],
        [names.get(n, 0) for n in ("out", "states", "updates")],
    )
    apart = (number for meta in (q, k, v) for number in strides(meta)[:3])
    sizes = (call.length, call.heads, call.key_heads, call.d_k, call.d_v, *apart, stages)
    return Step(launch, "q", "k", "v", *call.matrices[1:], *given[0], call.cu, *given[1], *sizes)


def _plan(q, k, v, skip, initial_state, cu_seqlens, wants_state, device) -> Steps:
    call = _call(q, v, skip, cu_seqlens)
    steps, scratch = plans.inside_chunks(call, q, k, device)
    names = {"out": "out"}
    if initial_state is not None:
        names["initial"] = "initial_state"
    if wants_state:
        names["final"] = "final_state"
    tails = plans.tails(call, (("out", call.heads, call.d_v),), device)
    return Steps(*steps, _scan(call, q, k, v, names, device), *tails, scratch=scratch)


def _outputs(q, v, cu_seqlens, wants_state) -> tuple[Memory | None, ...]:
    final = Memory(_state_shape(q, v, cu_seqlens), _FLOAT32) if wants_state else None
    return Memory(tuple(v.shape), q.dtype), final


FORWARD = Operator(
    "ssd_fwd",
    (
        Heads("q", HALVES), Heads("k", HALVES), Heads("v", HALVES), Dense("g", (_FLOAT32,)), Dense("beta", (_FLOAT32,)),
        Dense("skip", (_FLOAT32,), optional=True), Aligned("initial_state", (_FLOAT32,), optional=True),
        Dense("cu_seqlens", None, optional=True),
    ),
    options="bool wants_state", results="out final_state", outputs=_outputs, plan=_plan, reference=reference.forward,
    check=_check, plans_empty=True,
)  # fmt: skip


def _check_backward(dout, dfinal_state, q, k, v, g, beta, skip, initial_state, cu_seqlens) -> None:
    _check(q, k, v, g, beta, skip, initial_state, cu_seqlens)
    check_same("dout", tuple(dout.shape), tuple(v.shape), "shape", of="x")
    check_same("dout", dout.dtype, q.dtype, "dtype", of="x")
    if dfinal_state is not None:
        check_same("dfinal_state", tuple(dfinal_state.shape), _state_shape(q, v, cu_seqlens), "shape", of="B and x")


def _backward_outputs(q, k, v, g, beta, cu_seqlens, needs_state):
    packed = cu_seqlens is not None  # rows of no sequence give 0
    numbers = [Memory(tuple(t.shape), _FLOAT32, zero=packed) for t in (g, beta)]
    state = Memory(_state_shape(q, v, cu_seqlens), _FLOAT32) if needs_state else None
    return *(Memory(tuple(t.shape), q.dtype) for t in (q, k, v)), *numbers, state


def _plan_backward(dout, dfinal_state, q, k, v, skip, initial_state, cu_seqlens, needs_state, device) -> Steps:
    call = _call(q, v, skip, cu_seqlens)
    steps, scratch = plans.inside_chunks(call, q, k, device)
    names = {"states": "states", "updates": "updates"}
    if initial_state is not None:
        names["initial"] = "initial_state"
    steps += [
        _scan(call, q, k, v, names, device),
        scans.reverse(call, q, k, dout, plans.reverse_names(dfinal_state, needs_state), device),
        plans.grads(call, q, k, v, dout, device),
    ]
    tails = (("dq", call.key_heads, call.d_k), ("dk", call.key_heads, call.d_k), ("dv", call.heads, call.d_v))
    return Steps(*steps, *plans.tails(call, tails, device), scratch=scratch | plans.gradient_scratch(call))


BACKWARD = Operator(
    "ssd_bwd",
    (Heads("dout", HALVES), Aligned("dfinal_state", (_FLOAT32,), optional=True), *FORWARD.arguments),
    options="bool needs_state", results="dq dk dv dg dbeta dinitial_state", outputs=_backward_outputs,
    plan=_plan_backward, reference=reference.backward, check=_check_backward, plans_empty=True,
)  # fmt: skip


def _without_unused(x: Tensor, cu: Tensor | None) -> Tensor:
    """Return [.., heads] with 0 in rows behind the last packed sequence, whose result is 0 whatever they contain."""
    if cu is None or x.dim() != 2:
        return x
    unused = torch.arange(x.shape[0], dtype=torch.int64, device=x.device) >= cu[-1]
    return x.masked_fill(unused.unsqueeze(-1), 0.0)


class _Ssd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, skip, initial_state, cu_seqlens, wants_state):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, beta, skip, initial_state, cu_seqlens)
        ctx.wants_state = wants_state
        return FORWARD.call(q, k, v, g, beta, skip, initial_state, cu_seqlens, wants_state)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dfinal_state):
        if dout is None and dfinal_state is None:
            return (None,) * 9
        q, k, v, g, beta, skip, state, cu = ctx.saved_tensors
        if dout is None:
            dout = v.new_zeros(v.shape)
        need = ctx.needs_input_grad[:7]
        dq, dk, dv, dg, dbeta, dstate = BACKWARD.call(
            dout, dfinal_state if ctx.wants_state else None, q, k, v, g, beta, skip, state, cu, need[6]
        )
        dskip = None
        if need[5]:
            dskip = _without_unused(row_dot(v, dout), cu).flatten(0, -2).sum(0)
        grads = (dq, dk, dv, dg, dbeta, dskip, dstate)
        return *(grad if needed else None for grad, needed in zip(grads, need, strict=True)), None, None


_differentiable = applied(_Ssd)


# ---- public functions -----------------------------------------------------------------------------------------------


def _limits(limit: tuple[float, float] | None) -> tuple[float, float]:
    if limit is None:
        return 0.0, float("inf")
    if not isinstance(limit, (tuple, list)) or len(limit) != 2:
        raise ArgumentError(f"dt_limit is {limit!r}; expected the least and the largest time step")
    low, high = (float(check_number("dt_limit", number)) for number in limit)
    if not 0.0 <= low <= high:
        raise ArgumentError(f"dt_limit is {limit!r}; expected two numbers from 0 on in ascending order")
    return low, high


def _check_factor(name: str, t: Tensor | None, heads: int) -> None:
    if t is not None:
        check_tensor(name, t)
        check_same(name, tuple(t.shape), (heads,), "shape", of="heads of x")


@public(tensors="x dt A B C")
def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor | None = None, dt_bias: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] | None = None, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, return_state: bool = False,
    out: Tensor | tuple[Tensor | None, ...] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return the state space model of Mamba-2 ("SSD"): linear attention with a decay per token.

    For each token and head, with the state S [width of x, width of B]: ``S = exp(A dt) S + dt x B^T``,
    ``out = S C + D x``. Computed in chunks of 64 tokens, so that the time is linear in the length. Differentiable in
    x, dt, A, B, C, D, dt_bias and initial_state, also through the final state; deterministic. States and sums are in
    fp32; operands of products are rounded to x's dtype.

    Args:
        x: bfloat16 or float16 [batch, length, heads, width], or [tokens, heads, width] of packed sequences. Width: a
            multiple of 8 up to 256. Any strides with unit stride within a head, as for ``attention``.
        dt: [batch, length, heads] (packed like x), the time steps, any floating-point dtype.
        A: [heads], negative: the state of a head decays by ``exp(A dt)``.
        B: [batch, length, groups, width] in x's dtype, packed like x; width: a multiple of 8 up to 256. Heads are a
            multiple of groups: head h reads group ``h // (heads / groups)``.
        C: Like B.
        D: [heads], factor of x that is added to the result.
        dt_bias: [heads], added to dt first.
        dt_softplus: Time steps are ``softplus(dt + dt_bias)``.
        dt_limit: The least and the largest time step; others count as the nearest of them.
        initial_state: [batch or sequences, heads, width of x, width of B], any floating-point dtype: the state returned
            by the call for the preceding rows. Default: zeros.
        cu_seqlens: int32 [sequences + 1] on the device: sequence b has rows ``cu_seqlens[b]`` to ``[b + 1]``. Rows
            after the last sequence give 0.
        return_state: Also return the state after the last row.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        A tensor of x's shape and dtype; with return_state a pair of it and the final state, float32.
    """
    if x.dim() < 3 or B.dim() != x.dim():
        raise ArgumentError(f"B has shape {tuple(B.shape)}; expected the dimensions of x, {tuple(x.shape)}")
    low, high = _limits(dt_limit)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (A, D, dt_bias)):
        refuse_weight_gradient("ssd's gradient of A, D or dt_bias")
    for name, t in (("A", A), ("D", D), ("dt_bias", dt_bias)):
        _check_factor(name, t, x.shape[-2])
    check_same("dt", tuple(dt.shape), tuple(x.shape[:-1]), "shape", of="x without its width")
    steps = dt.float()
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (dt, A, dt_bias)):
        _check_packed(cu_seqlens)
        steps = _without_unused(steps, cu_seqlens)  # sums over rows would multiply a NaN there by 0
    time = reference.time_step(steps, dt_bias, bool(dt_softplus), low, high)
    decay, skip = A.float() * time, None if D is None else D.float()
    state = None if initial_state is None else initial_state.float().transpose(-1, -2)
    results, finals = [], []
    width = B.shape[-1]
    for first in range(0, max(width, 1), MAX_KEY_WIDTH):  # products of parts of the state add up
        part = slice(first, first + MAX_KEY_WIDTH) if width > MAX_KEY_WIDTH else slice(None)
        if width > _MAX_STATE:
            part = slice(None)  # which is refused
        own = None if state is None else state[..., part, :]
        values = (C[..., part], B[..., part], x, decay, time, skip, own, cu_seqlens, bool(return_state))
        differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in values[:7])
        result, final = _differentiable(*values) if differentiated else FORWARD.call(*values)
        results.append(result)
        finals.append(final)
        skip = None
    result = results[0] if len(results) == 1 else results[0] + results[1]
    if not return_state:
        return result
    final = finals[0] if len(finals) == 1 else torch.cat(finals, -2)
    return result, final.transpose(-1, -2).contiguous()


# ---- one token ------------------------------------------------------------------------------------------------------


def _check_step(x, dt, rate, b, c, skip, bias, state) -> None:
    _check_operands(c, b, x, 3, "[batch, heads, width]", _MAX_STATE)
    check_same("dt", tuple(dt.shape), tuple(x.shape[:-1]), "shape", of="x without its width")
    for name, meta in (("A", rate), ("D", skip), ("dt_bias", bias)):
        if meta is not None:
            check_same(name, tuple(meta.shape), (x.shape[1],), "shape", of="heads of x")
    check_grid("x", x, x.shape[0])
    check_same("state", tuple(state.shape), (*x.shape, b.shape[-1]), "shape", of="x and B")


def _plan_step(x, b, c, skip, bias, softplus, device) -> Steps:
    batch, heads, width = x.shape
    launch = _STEP.bind((DTYPE_TOKEN[x.dtype],), device, (-(-width // 32), heads, batch), 256)
    given = ("skip" if skip is not None else 0, "bias" if bias is not None else 0)
    apart = (number for meta in (x, b, c) for number in strides(meta)[1:3])
    sizes = (heads, b.shape[1], b.shape[-1], width, *apart, int(softplus))
    return Steps(Step(launch, "x", "dt", "rate", "b", "c", *given, "state", "out", *sizes, "low", "high"))


ONE = Operator(
    "ssd_step_",
    (
        Heads("x", HALVES), Dense("dt", (_FLOAT32,)), Dense("rate", (_FLOAT32,)), Heads("b", HALVES),
        Heads("c", HALVES), Dense("skip", (_FLOAT32,), optional=True), Dense("bias", (_FLOAT32,), optional=True),
        InPlaceVectors("state", (_FLOAT32,)),
    ),
    options="bool softplus, float low, float high", numbers="low high", results="out",
    outputs=lambda x: (Memory(tuple(x.shape), x.dtype),), plan=_plan_step, reference=reference.step, check=_check_step,
)  # fmt: skip


@public(tensors="x dt A B C D dt_bias", no_gradients="x dt A B C D dt_bias state")
def ssd_step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, *, D: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``ssd`` for one more token per sequence, and update the states.

    Args:
        x: bfloat16 or float16 [batch, heads, width].
        dt: [batch, heads], any floating-point dtype.
        A: [heads], negative.
        B: [batch, groups, width] in x's dtype; width: a multiple of 8 up to 256.
        C: Like B.
        state: float32 [batch, heads, width of x, width of B], contiguous; overwritten by the state after the token.
            Copied if its address is not a multiple of 16 bytes.
        D: [heads], factor of x that is added to the result.
        dt_bias: [heads], added to dt first.
        dt_softplus: Time steps are ``softplus(dt + dt_bias)``.
        dt_limit: The least and the largest time step.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        [batch, heads, width of x]. Not differentiable.
    """
    factors = (None if t is None else t.float() for t in (D, dt_bias))
    return ONE.call(x, dt.float(), A.float(), B, C, *factors, state, bool(dt_softplus), *_limits(dt_limit))


OP = Op(
    "ssd", public=("ssd", "ssd_step"), kernels=(_SCAN, _STEP), torch_ops=(FORWARD, BACKWARD, ONE),
    uses=("gated_delta_rule", "row_dot"),
)  # fmt: skip
