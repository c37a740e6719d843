"""Linear attention with a decay per head ("lightning"): forward, gradients, and one token at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import lightning_fp32, sequence_parts
from rtkernels.ops.attention import lightning_reference as reference
from rtkernels.ops.attention.backends import TAIL, packed_tail
from rtkernels.ops.attention.checks import HALVES, Heads, check_factor, check_grid, check_width, result_strides, strides
from rtkernels.ops.attention.lightning_parallel import state_before
from rtkernels.ops.attention.lightning_plan import (
    MAX_WIDTH,
    PREFIX,
    SCAN,
    SCAN_SM90,
    STEP,
    Scan,
    by_wgmma,
    scans,
    segment_count,
    step,
)
from rtkernels.ops.attention.options import default_scale
from rtkernels.ops.attention.problem import Strides
from rtkernels.runtime.call.public import public
from rtkernels.runtime.layout import DTYPE_TOKEN, check_same
from rtkernels.runtime.operator.autograd import applied, once_differentiable
from rtkernels.runtime.operator.declared import Aligned, Dense, InPlaceVectors, Meta, Operator
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_FLOAT32 = torch.float32


def _batch(q: Meta, cu: Meta | None) -> int:
    return q.shape[0] if cu is None else cu.shape[0] - 1


def _state_shape(q: Meta, v: Meta, cu: Meta | None) -> tuple[int, ...]:
    return (_batch(q, cu), q.shape[-2], q.shape[-1], v.shape[-1])


def _check_operands(q: Meta, k: Meta, v: Meta, decay: Meta, scale: float, dims: int, order: str, batch: int) -> None:
    for name, meta in (("q", q), ("k", k), ("v", v)):
        if meta.dim() != dims:
            raise ArgumentError(f"{name} has shape {tuple(meta.shape)}; expected {dims} dimensions, {order}")
        check_same(name, meta.dtype, q.dtype, "dtype", of="q")
    check_same("k", tuple(k.shape), tuple(q.shape), "shape", of="q")
    check_same("v", tuple(v.shape[:-1]), tuple(q.shape[:-1]), "shape but for the last dimension", of="q")
    for name, meta in (("q", q), ("v", v)):
        check_width(name, meta, MAX_WIDTH)
    check_same("decay", tuple(decay.shape), (q.shape[-2],), "shape", of="heads of q")
    check_factor(scale)
    check_grid("q", q, batch)


def _check(
    q: Meta, k: Meta, v: Meta, decay: Meta, initial_state: Meta | None, cu_seqlens: Meta | None, scale: float
) -> None:
    cu, state = cu_seqlens, initial_state
    dims, order = (4, "[batch, length, heads, width]") if cu is None else (3, "[tokens, heads, width]")
    _check_operands(q, k, v, decay, scale, dims, order, q.shape[0] if cu is None else cu.numel() - 1)
    if cu is not None and (cu.dtype != torch.int32 or cu.dim() != 1 or cu.shape[0] < 1):
        raise ArgumentError(f"cu_seqlens is {cu.dtype} {tuple(cu.shape)}; expected int32 [sequences + 1]")
    if state is not None:
        check_same("initial_state", tuple(state.shape), _state_shape(q, v, cu), "shape", of="batch, heads, q and v")


def _outputs(q, v, cu_seqlens, wants_state) -> tuple[Memory | None, ...]:
    final = Memory(_state_shape(q, v, cu_seqlens), _FLOAT32) if wants_state else None
    return Memory((*q.shape[:-1], v.shape[-1]), q.dtype), final


def _tail(q: Meta, cu: Meta | None, names: tuple[tuple[str, int], ...], device: int) -> list[Step]:
    """Return the launches that clear rows behind the last packed sequence, of results with these widths."""
    if cu is None:
        return []
    token, shapes = DTYPE_TOKEN[q.dtype], [(name, (*q.shape[:2], width)) for name, width in names]
    return [
        packed_tail(token, name, 0, "cu_seqlens", cu.shape[0] - 1, shape, result_strides(shape, False), device)
        for name, shape in shapes
    ]


def _arranged(q: Meta, v: Meta, cu: Meta | None, device: int) -> dict[str, Any]:
    """Return the fields of a Scan that say which kernel there is, and how many segments."""
    batch, widths = _batch(q, cu), (q.shape[-1], v.shape[-1])
    rows = q.shape[1] if cu is None else q.shape[0] // max(batch, 1)
    wgmma = by_wgmma(DTYPE_TOKEN[q.dtype], *widths, cu is not None, rows, device)
    return {"wgmma": wgmma, "segments": segment_count(batch, q.shape[-2], max(widths), rows, wgmma, device)}


def _scan(q: Meta, cu: Meta | None, tensors: dict[str, tuple[str, Strides, int]], **others: Any) -> Scan:
    names = ("left", "right", "value", "out")
    return Scan(
        token=DTYPE_TOKEN[q.dtype], batch=_batch(q, cu), heads=q.shape[-2], length=q.shape[1] if cu is None else 0,
        d_k=tensors["left"][2], d_v=tensors["value"][2], cu=cu is not None,
        **{name: tensors[name][:2] for name in names}, **others,
    )  # fmt: skip


def _plan(q, k, v, initial_state, cu_seqlens, scale, wants_state, device) -> Steps:
    d_k, d_v = q.shape[-1], v.shape[-1]
    tensors = {
        "left": ("q", strides(q), d_k), "right": ("k", strides(k), d_k), "value": ("v", strides(v), d_v),
        "out": ("out", result_strides((*q.shape[:-1], d_v), False), d_v),
    }  # fmt: skip
    call = _scan(
        q, cu_seqlens, tensors, scale=scale, state=(d_v, 1), final="final_state" if wants_state else None,
        initial=None if initial_state is None else "initial_state", **_arranged(q, v, cu_seqlens, device),
    )  # fmt: skip
    steps, scratch = scans([call], "states", device)
    return Steps(*steps, *_tail(q, cu_seqlens, (("out", d_v),), device), scratch=scratch)


FORWARD = Operator(
    "lightning_attention_fwd",
    (
        Heads("q", HALVES), Heads("k", HALVES), Heads("v", HALVES), Dense("decay", (_FLOAT32,)),
        Aligned("initial_state", (_FLOAT32,), optional=True), Dense("cu_seqlens", None, optional=True),
    ),
    options="float scale, bool wants_state",
    results="out final_state",
    outputs=_outputs,
    plan=_plan,
    reference=reference.forward,
    check=_check,
    plans_empty=True,
)  # fmt: skip


def _check_backward(dout, dfinal_state, q, k, v, decay, initial_state, cu_seqlens, scale, wants_state) -> None:
    _check(q, k, v, decay, initial_state, cu_seqlens, scale)
    check_same("dout", tuple(dout.shape), (*q.shape[:-1], v.shape[-1]), "shape", of="q and v")
    check_same("dout", dout.dtype, q.dtype, "dtype", of="q")
    if wants_state and dfinal_state is not None:
        check_same("dfinal_state", tuple(dfinal_state.shape), _state_shape(q, v, cu_seqlens), "shape", of="q and v")


def _backward_outputs(q, k, v, initial_state, cu_seqlens, need_q, need_k, need_v, need_initial_state):
    results = [
        Memory(tuple(t.shape), q.dtype) if needed else None for needed, t in ((need_q, q), (need_k, k), (need_v, v))
    ]
    needs_state = need_initial_state and initial_state is not None
    return *results, Memory(_state_shape(q, v, cu_seqlens), _FLOAT32) if needs_state else None


def _plan_backward(
    dout, dfinal_state, q, k, v, initial_state, cu_seqlens, scale, wants_state, need_q, need_k, need_v,
    need_initial_state, device,
) -> Steps:  # fmt: skip
    d_k, d_v = q.shape[-1], v.shape[-1]
    of_q, of_k = ("q", strides(q), d_k), ("k", strides(k), d_k)
    of_v, of_dout = ("v", strides(v), d_v), ("dout", strides(dout), d_v)
    outer = None if dfinal_state is None or not wants_state else "dfinal_state"
    needs_state = need_initial_state and initial_state is not None
    arranged = _arranged(q, v, cu_seqlens, device)
    steps, scratch = [], {}
    if need_q:
        tensors = {"left": of_dout, "right": of_v, "value": of_k, "out": ("dq", result_strides(q.shape, False), d_k)}
        initial = None if initial_state is None else "initial_state"
        call = _scan(q, cu_seqlens, tensors, scale=scale, state=(1, d_v), initial=initial, **arranged)
        steps, scratch = scans([call], "states", device)
    # The state behind the last row comes in unscaled, and is met by the last row as it is.
    reversed_scan = {
        "scale": scale, "initial": outer, "initial_factor": 1.0 / scale, "lead": 1, "reverse": True,
        **arranged,
    }  # fmt: skip
    calls = []
    if need_k:
        tensors = {"left": of_v, "right": of_dout, "value": of_q, "out": ("dk", result_strides(k.shape, False), d_k)}
        calls.append(_scan(q, cu_seqlens, tensors, state=(1, d_v), **reversed_scan))
    if need_v or needs_state:
        name = "dv" if need_v else "" if arranged["segments"] > 1 else "unwanted_dv"
        tensors = {"left": of_k, "right": of_q, "value": of_dout, "out": (name, result_strides(v.shape, False), d_v)}
        final = {"final": "dinitial_state", "final_factor": scale} if needs_state else {}
        calls.append(_scan(q, cu_seqlens, tensors, state=(d_v, 1), **reversed_scan, **final))
        if name == "unwanted_dv":
            scratch["unwanted_dv"] = Memory(tuple(v.shape), q.dtype)
    more, memory = scans(calls, "reversed_states", device)
    steps, scratch = [*steps, *more], {**scratch, **memory}
    needed = (("dq", d_k, need_q), ("dk", d_k, need_k), ("dv", d_v, need_v))
    tails = _tail(q, cu_seqlens, tuple((name, width) for name, width, wanted in needed if wanted), device)
    return Steps(*steps, *tails, scratch=scratch)


BACKWARD = Operator(
    "lightning_attention_bwd",
    (Heads("dout", HALVES), Aligned("dfinal_state", (_FLOAT32,), optional=True), *FORWARD.arguments),
    options="float scale, bool wants_state, bool need_q, bool need_k, bool need_v, bool need_initial_state",
    results="dq dk dv dinitial_state", outputs=_backward_outputs, plan=_plan_backward, reference=reference.backward,
    check=_check_backward, plans_empty=True,
)  # fmt: skip


class _Lightning(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, decay, initial_state, cu_seqlens, scale, wants_state):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, decay, initial_state, cu_seqlens)
        ctx.scale, ctx.wants_state = scale, wants_state
        return FORWARD.call(q, k, v, decay, initial_state, cu_seqlens, scale, wants_state)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dfinal_state):
        if dout is None and dfinal_state is None:
            return (None,) * 8
        q, k, v, *others = ctx.saved_tensors
        if dout is None:
            dout = v.new_zeros(v.shape)  # v has the shape and dtype of the result
        need_q, need_k, need_v, _, need_state, *_ = ctx.needs_input_grad
        dq, dk, dv, dstate = BACKWARD.call(
            dout, dfinal_state, q, k, v, *others, ctx.scale, ctx.wants_state, need_q, need_k, need_v, need_state
        )
        grads = dq if need_q else None, dk if need_k else None, dv if need_v else None
        return *grads, None, dstate if need_state else None, None, None, None


_lightning = applied(_Lightning)


@public(tensors="k v decay")
def lightning_attention(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, *, scale: float | None = None, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, return_state: bool = False,
    out: Tensor | tuple[Tensor | None, ...] | None = None, group: Any = None, zigzag: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return causal linear attention with an exponential decay per head.

    ``out[t] = scale * sum over s <= t of exp(-decay * (t - s)) (q[t] . k[s]) v[s]``, computed in chunks, so that the
    time is linear in the length. Differentiable in q, k, v and initial_state, also through the final state;
    deterministic. Sums are in fp32.

    Args:
        q: bfloat16 or float16 [batch, length, heads, width], or [tokens, heads, width] of packed sequences. Width: a
            multiple of 8 up to 128. Any strides with unit stride within a head, as for ``attention``. Or float32
            [batch, length, heads, width], any width and strides: products are torch's then, in fp32 unless
            ``torch.backends.cuda.matmul`` allows TF32.
        k: Like q.
        v: Like q; its width may differ.
        decay: [heads], not negative, any floating-point dtype: the weight of a key falls by ``exp(-decay)`` per
            position.
        scale: Factor of the result. Default: ``1 / sqrt(width of q)``.
        initial_state: [batch or sequences, heads, width of k, width of v], any floating-point dtype: the state returned
            by the call for the preceding rows. Default: zeros.
        cu_seqlens: int32 [sequences + 1] on the device: sequence b has rows ``cu_seqlens[b]`` to ``[b + 1]``. Rows
            after the last sequence give 0.
        return_state: Also return the state after the last row.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.
        group: A ``torch.distributed`` process group over which each sequence is split into parts of equal length.
            Each member computes the state of its part, the states are gathered, and each member starts from the
            combined state of the parts before its own. This takes two passes over k and v. Not with initial_state or
            cu_seqlens.
        zigzag: Needed with group, because another order of parts would give other results without an error. False: rank
            r of n has part r of n. True: it has parts r and ``2 n - 1 - r`` of ``2 n`` equal parts of each sequence,
            one after the other, as for ``nn.parallel.ring_attention``; the state is that after the second of them.

    Returns:
        [batch, length, heads, width of v] (packed like q) in q's dtype; with return_state a pair of it and
        ``sum over s of exp(-decay * (length - 1 - s)) k[s] v[s]^T + exp(-decay * length) initial_state``, float32.
    """
    _refuse_decay_gradients(decay)
    if group is not None and (initial_state is not None or cu_seqlens is not None):
        raise ArgumentError("group is given; expected neither initial_state nor cu_seqlens")
    parts = sequence_parts.count(q, group, zigzag)
    if parts:
        return _of_group(q, k, v, decay, scale, return_state, group, parts)
    state = None if initial_state is None else initial_state.float()
    if isinstance(q, Tensor) and q.dtype == _FLOAT32:
        lightning_fp32.check(q, k, v, decay, state, cu_seqlens)
        scale = default_scale(scale, q)
        check_factor(scale)
        result = lightning_fp32.lightning(q, k, v, decay.float(), state, scale)
        return result if return_state else result[0]
    values = (q, k, v, decay.float(), state, cu_seqlens, default_scale(scale, q), bool(return_state))
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*values[:3], state))
    out, final = _lightning(*values) if differentiated else FORWARD.call(*values)
    return (out, final) if return_state else out


def _of_group(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, scale: float | None, return_state: bool, group: Any, parts: int
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the attention of this member's part of each sequence, or of its two: these are batch entries then."""
    q, k, v = (sequence_parts.as_batch(t, parts) for t in (q, k, v))
    _, own = lightning_attention(q, k, v, decay, scale=scale, return_state=True)
    before = state_before(own.unflatten(0, (parts, -1)), decay.float(), q.shape[1], group).flatten(0, 1)
    y, state = lightning_attention(q, k, v, decay, scale=scale, initial_state=before, return_state=True)
    y = sequence_parts.joined(y, parts)
    return (y, state.unflatten(0, (parts, -1))[-1]) if return_state else y


def _refuse_decay_gradients(decay: Tensor) -> None:
    if decay.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("decay requires grad; expected one without: there is no gradient of it")


# ---- one token ------------------------------------------------------------------------------------------------------


def _check_step(q: Meta, k: Meta, v: Meta, decay: Meta, state: Meta, scale: float) -> None:
    _check_operands(q, k, v, decay, scale, 3, "[batch, heads, width]", q.shape[0])
    check_same("state", tuple(state.shape), (*q.shape, v.shape[-1]), "shape", of="q and v")


def _plan_step(q: Meta, k: Meta, v: Meta, scale: float, device: int) -> Steps:
    return Steps(step(DTYPE_TOKEN[q.dtype], q.shape, v.shape[-1], [strides(t) for t in (q, k, v)], scale, device))


ONE = Operator(
    "lightning_attention_step_",
    (
        Heads("q", HALVES), Heads("k", HALVES), Heads("v", HALVES), Dense("decay", (_FLOAT32,)),
        InPlaceVectors("state", (_FLOAT32,)),
    ),
    options="float scale",
    results="out",
    outputs=lambda q, v: (Memory(tuple(v.shape), q.dtype),),
    plan=_plan_step,
    reference=reference.step,
    check=_check_step,
)  # fmt: skip


@public(tensors="decay", no_gradients="q k v decay state")
def lightning_attention_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor, *, scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``lightning_attention`` for one more token per sequence, and update the states.

    Args:
        q: bfloat16 or float16 [batch, heads, width].
        k: Like q.
        v: Like q; its width may differ.
        decay: [heads], any floating-point dtype.
        state: float32 [batch, heads, width of k, width of v], contiguous; overwritten by the state after the token.
            Copied if its address is not a multiple of 16 bytes.
        scale: Factor of the result. Default: ``1 / sqrt(width of q)``.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        [batch, heads, width of v]. Not differentiable.
    """
    return ONE.call(q, k, v, decay.float(), state, default_scale(scale, q))


OP = Op(
    "lightning", public=("lightning_attention", "lightning_attention_step"),
    kernels=(SCAN, SCAN_SM90, PREFIX, STEP, TAIL), torch_ops=(FORWARD, BACKWARD, ONE),
)  # fmt: skip
