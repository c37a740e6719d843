"""Experts of a decoding step in two launches, which read the chosen experts' weights once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm import reference
from rtkernels.ops.gemm.checks import TOKENS, check_act
from rtkernels.runtime.invariance import level
from rtkernels.runtime.launch.device import device_info, shared_limit
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import check_same
from rtkernels.runtime.operator.declared import Aligned, Dense, Operator
from rtkernels.runtime.operator.plan import IN_TORCH, Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_HALVES = (torch.bfloat16, torch.float16)
# As in gemm_step_experts.cu.
MAX_PAIRS, MAX_ROWS = 64, 8
_WARPS = 8
_DEPTH = 32  # of k, in a step of 64 bytes
_MAX_STEPS, _MAX_RING, _IN_FLIGHT = 8, 8, 24  # steps of a slot, slots of a ring, steps of a ring
_SUMS = 32768  # bytes of sums of a pass, at the most
_STATIC = 6144  # shared memory that is not dynamic, and what the driver takes
_ACTS = {"relu": 1, "silu": 2, "gelu_tanh": 3, "gelu": 4}
_BY_TMA, _ROUNDED = 1, 2

_KERNEL = Kernel(
    "gemm/gemm_step_experts.cu", "gemm_step_experts", template="Math DOWN", max_registers=160, tier="serve",
    args="x:ptr weight:ptr given:ptr probs:ptr residual:ptr norm_weight:ptr out:ptr m_:i64 n:i64 k_:i64 top_k_:i64 "
    "experts_:i64 x_pitch:i64 expert_stride:i64 weight_pitch:i64 residual_pitch:i64 chunk_:i64 ring_:i64 "
    "pass_items_:i64 flags:i64 act:i64 eps:f64 offset:f64",
    variants=[(math, down) for math in ("bf16", "fp16") for down in (False, True)],
)  # fmt: skip


class _Cut(NamedTuple):
    """How a launch is cut: steps of a unit, slots of a ring, items of a pass, shared memory."""

    chunk: int
    ring: int
    items: int
    shared: int


def _cut(m: int, kept: int, k: int, items: int, limit: int, normed: bool) -> _Cut | None:
    """Return the shape of a launch with `kept` rows of activations and up to `items` items of a block."""
    steps = -(-k // _DEPTH)
    chunk = min(_MAX_STEPS, -(-steps // _WARPS))
    together = max(min(_SUMS // (_WARPS * 32 * m), items), 1)
    rest = kept * (-(-steps * 64 // 128) * 128 + 64) + steps * 64 * normed + _WARPS * 32 * m * together
    ring = min(_IN_FLIGHT // chunk, _MAX_RING, (limit - _STATIC - rest) // (_WARPS * (512 * chunk + 64)))
    return _Cut(chunk, ring, together, rest + ring * _WARPS * (512 * chunk + 64)) if ring > 0 else None


def _check(x, gate_up, down, experts, probs, norm_weight, act) -> None:
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if len(weight.shape) != 3:
            raise ArgumentError(f"{name} has shape {tuple(weight.shape)}; expected a matrix of each expert")
        check_same(name, weight.dtype, x.dtype, "dtype", of="x")
    count, both, width = gate_up.shape
    if not x.dim() or x.shape[-1] != width or both % 2:
        raise ArgumentError(f"gate_up has shape {tuple(gate_up.shape)}; expected [experts, 2 inner, {x.shape[-1:]}]")
    check_same("down", tuple(down.shape), (count, width, both // 2), "shape", of="gate_up")
    rows = x.rows
    if len(experts.shape) != 2 or experts.shape[0] != rows or experts.dtype != torch.int32:
        raise ArgumentError(f"experts is {experts.dtype} {tuple(experts.shape)}; expected int32 [{rows}, top_k]")
    check_same("probs", tuple(probs.shape), tuple(experts.shape), "shape", of="experts")
    check_same("probs", probs.dtype, torch.float32, "dtype", of="probabilities")
    if norm_weight is not None:
        check_same("norm_weight", norm_weight.dtype, x.dtype, "dtype", of="x")
        check_same("norm_weight", tuple(norm_weight.shape), (width,), "shape", of="the last dimension of x")
    check_act(act)
    if act is None:
        raise ArgumentError("act is None; expected an activation")


def unsupported(x: Any, gate_up: Any, top_k: int, device: int) -> str | None:
    """Return why the kernels cannot compute the experts of a step, None if they can; `x`, `gate_up`: metas."""
    rows, (_, both, width) = x.rows, gate_up.shape
    if level():
        return "sums of experts are ordered by those of all rows, which batch invariance forbids"
    if not 0 < rows <= MAX_ROWS or not 0 < rows * top_k <= MAX_PAIRS:
        return f"{rows} rows and {top_k} experts of each; {MAX_ROWS} rows and {MAX_PAIRS} pairs at the most"
    if width % 8 or both % 16 or not both or not width:
        return "rows are no multiples of 16 bytes"
    return None if _cuts(rows, top_k, width, both // 2, device, True) else "too little shared memory"


def _cuts(rows: int, top_k: int, width: int, inner: int, device: int, normed: bool) -> tuple[_Cut, _Cut] | None:
    info = device_info(device)
    limit, pairs, sms = shared_limit(info.target), rows * top_k, info.sm_count
    first = _cut(rows, rows, width, -(-pairs * -(-inner // 4) // sms), limit, normed)
    octets = -(-width // 8)
    second = _cut(rows, pairs + 1, inner, -(-octets // sms), limit, False)
    return (first, second) if first and second else None


def _plan(x, gate_up, down, experts, residual, norm_weight, act, rounded, device) -> Steps:
    if unsupported(x, gate_up, experts.shape[1], device) is not None or gate_up.shape[0] == 0:
        return IN_TORCH
    info = device_info(device)
    rows, (count, both, width), top_k = x.rows, gate_up.shape, experts.shape[1]
    inner = both // 2
    first, second = _cuts(rows, top_k, width, inner, device, norm_weight is not None)
    token = TOKENS[x.dtype]

    def launch(down_: bool, cut: _Cut, items: int) -> Any:
        return _KERNEL.bind(
            (token, down_), device, min(info.sm_count, items), 32 * _WARPS, cut.shared, overlap=True
        )  # fmt: skip

    def flags(k: int) -> int:
        return _BY_TMA * ("tma" in info.target.features and k * 2 % 64 == 0) + _ROUNDED * rounded

    pairs, octets = rows * top_k, -(-inner // 4)
    return Steps(
        Step(
            launch(False, first, pairs * octets), "x", "gate_up", "experts", 0, 0,
            "norm_weight" if norm_weight is not None else 0, "inner", rows, inner, width, top_k, count, 2 * width,
            2 * both * width, 2 * width, 0, first.chunk, first.ring, first.items, flags(width), _ACTS[act],
            "eps", "offset",
        ),
        Step(
            launch(True, second, -(-width // 8)), "inner", "down", "experts", "probs",
            "residual" if residual is not None else 0, 0, "out", rows, width, inner, top_k, count, 2 * inner,
            2 * width * inner, 2 * inner, width, second.chunk, second.ring, second.items, flags(inner), 0, 0.0, 0.0,
        ),
        scratch={"inner": Memory((pairs, inner), x.dtype)},
    )  # fmt: skip


def _reference(x, gate_up, down, experts, probs, residual, norm_weight, act, rounded, eps, offset) -> Tensor:
    rows = x.flatten(0, -2)
    if norm_weight is not None:
        in_fp32 = rows.float()
        factor = torch.rsqrt(in_fp32.square().mean(-1, keepdim=True) + eps) * (offset + norm_weight.float())
        rows = (in_fp32 * factor).to(x.dtype)
    probs = probs.to(x.dtype).float() if rounded else probs
    valid = (experts >= 0) & (experts < gate_up.shape[0])
    out = torch.zeros(rows.shape, dtype=torch.float32, device=x.device)
    for e in range(gate_up.shape[0]):
        chosen = valid & (experts == e)
        gate, up = (rows.float() @ gate_up[e].float().t()).chunk(2, -1)
        inner = (reference.activated(gate, act) * up).to(x.dtype).float()
        weight = probs.masked_fill(~chosen, 0.0).sum(-1, keepdim=True)
        out = torch.where(chosen.any(-1, keepdim=True), out + weight * (inner @ down[e].float().t()), out)
    out = out.view(x.shape)
    return (out if residual is None else out + residual.float()).to(x.dtype).contiguous()


FORWARD = Operator(
    "step_experts",
    (
        Aligned("x", _HALVES), Aligned("gate_up", None), Aligned("down", None), Dense("experts", None),
        Dense("probs", None), Aligned("residual", like="x", optional=True),
        Aligned("norm_weight", _HALVES, optional=True),
    ),
    options="str act, bool rounded, float eps, float offset", numbers="eps offset", results="out",
    outputs=lambda x: (Memory(x.shape, x.dtype),), plan=_plan, reference=_reference, check=_check,
    not_invariant=(1, "sums of experts are ordered by those of all rows"),
)  # fmt: skip

OP = Op("step_experts", public=(), kernels=(_KERNEL,), torch_ops=(FORWARD,))
