"""Attention with wgmma and TMA (sm_90a): which problems it serves. The launches are in two other files."""

from __future__ import annotations

from rtkernels.ops.attention import sm90_backward_plan, sm90_forward_plan
from rtkernels.ops.attention.problem import Attention, Strides
from rtkernels.ops.attention.sm90_backward_plan import steps_backward
from rtkernels.ops.attention.sm90_forward_plan import BIAS_TILES, bundle_of, forward_tile, steps_forward
from rtkernels.runtime.operator.plan import Steps
from rtkernels.runtime.targets import Target

_MAX_ROWS = 1 << 29  # row numbers and their sums are 32-bit integers
KERNELS = (sm90_forward_plan.FORWARD, *sm90_backward_plan.KERNELS)


def unsupported(problem: Attention, target: Target) -> str | None:
    """Return why these kernels cannot serve a problem, or None."""
    p = problem
    if "wgmma" not in target.features:
        return f"{target} has no wgmma"
    if p.token not in ("bf16", "fp16"):
        return f"q is {p.token}"
    if p.d_qk > 256 or p.d_v > 256 or p.d_qk % 8 or p.d_v % 8:
        return f"heads of {p.d_qk} and {p.d_v} elements; multiples of 8 up to 256 are expected"
    if p.bias is not None and max(p.d_qk, p.d_v) > BIAS_TILES[-1].d_qk:
        return "there is a bias, and heads have more than 128 elements"
    if p.lkv == 0:
        return "there are no keys"
    if max(p.lq, p.lkv, p.rows_q, p.rows_k) >= _MAX_ROWS or p.batch * p.heads_q * -(-p.lq // 64) >= 1 << 31:
        return "too many rows"
    if p.backward and (reason := _unsupported_backward(p)):
        return reason
    names = ("q", "k", "v", "out", "dout", "dq", "dk", "dv") if p.backward else ("q", "k", "v", "out")
    for name in names:
        strides: Strides | None = getattr(p, name)
        if strides is None:
            continue
        if not strides.aligned:
            return f"{name} is not aligned to 16 bytes"
        if name in ("q", "k", "v", "dout") and any(s < 0 or 2 * s >= 1 << 40 for s in strides[:3]):
            return f"{name} has strides {strides[:3]}"
    return None


def _unsupported_backward(problem: Attention) -> str | None:
    p = problem
    if p.lq == 0 or p.rows_q == 0:
        return "there are no queries, in the backward"
    if p.bias is not None:
        return "there is a bias, in the backward"
    if p.batch * p.heads_q >= 1 << 16:
        return "too many heads, in the backward"
    return None


def steps(problem: Attention, device: int) -> Steps:
    """Return the launches of a problem that is not ``unsupported``."""
    return steps_backward(problem, device) if problem.backward else steps_forward(problem, device)


def bundle(problem: Attention) -> int:
    """Return how many heads share a tile of queries in the forward pass."""
    return bundle_of(problem, forward_tile(problem)[0])


def summary(problem: Attention, target: Target) -> str:
    """Return the tile of a forward pass, for ``explain``."""
    tile, _ = forward_tile(problem)
    return "" if problem.backward else f"{64 * tile.groups} queries x {tile.keys} keys"
