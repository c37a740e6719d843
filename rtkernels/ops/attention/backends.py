"""The backends of attention, and clearing the rows after the last packed sequence, which none of them does.

Few queries over many keys go to the kernels of decoding, which split the keys (``decode_plan.unsupported``).
"""

from __future__ import annotations

from collections.abc import Sequence

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import decode_plan, mma_plan, sm90_backward_order, sm90_plan
from rtkernels.ops.attention.problem import Attention, Strides
from rtkernels.ops.shared.backend import Backend, Backends
from rtkernels.runtime.invariance import level
from rtkernels.runtime.launch.device import DeviceInfo, device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Step, Steps

_SHORT = 64  # queries and keys of sequences that leave most of a tile of 128 to 192 queries empty


def _order(problem: Attention) -> tuple[str, ...]:
    """Return the backends from the fastest to the slowest, of which the first one that can is taken."""
    p = problem
    if level():
        return ("sm90", "mma")
    width, short = max(p.d_qk, p.d_v), max(p.lq, p.lkv) <= _SHORT
    if short and p.backward and width <= 64:
        return ("mma", "sm90")
    if short and not p.backward and width <= 176 and sm90_plan.bundle(p) == 1:
        return ("decode", "mma", "sm90") if width <= 128 else ("mma", "decode", "sm90")
    return ("decode", "sm90", "mma")


# Values of `acc`, which are backends that callers ask for by it: bits of the products whose sums are fp16.
FP16_SUMS = {"fp16_qk": 1, "fp16_pv": 2, "fp16": 3}
ATTENTION: Backends[Attention] = Backends(
    "attention",
    (
        Backend("decode", decode_plan.unsupported, decode_plan.steps_short, by_name=False),
        Backend.of("sm90", sm90_plan),
        Backend.of("mma", mma_plan),
        *(
            Backend(name, mma_plan.fp16_unsupported, mma_plan.steps_fp16(sums), option="acc")
            for name, sums in FP16_SUMS.items()
        ),
    ),
    order=lambda problem, info: _order(problem),
    functions=("attention", "attention_varlen", "mla_attention", "sdpa"),
    error=ArgumentError,
)
check_name = ATTENTION.check
TAIL = Kernel(
    "attention/packed_tail.cu", "attention_packed_tail", template="T", max_registers=48,
    args="x:ptr lse:ptr ends:ptr sequences:i64 total:i64 heads:i64 width:i64 row:i64 head:i64",
    variants=[("bf16",), ("fp16",)],
)  # fmt: skip
KERNELS = (TAIL, *ATTENTION.kernels)


def splits_heads(problem: Attention, name: str, info: DeviceInfo) -> bool:
    """Return whether the backward pass of a problem splits the query heads that share keys by itself."""
    chosen = ATTENTION.choose(problem._replace(backward=True), info, name).backend
    return chosen is not None and chosen.name == "sm90" and sm90_backward_order.splits_heads(problem)


def _tail(problem: Attention, name: str, strides: Strides, keys: bool, lse: bool, device: int) -> Step:
    """Return the launch that clears rows of a packed result after the last sequence."""
    total, heads = (problem.total_k, problem.heads_kv) if keys else (problem.total_q, problem.heads_q)
    width = problem.d_v if name in ("out", "dv") else problem.d_qk
    shape, ends = (total, heads, width), "cu_k" if keys else "cu_q"
    return packed_tail(problem.token, name, "lse" if lse else 0, ends, problem.batch, shape, strides, device)


def packed_tail(
    token: str, name: str, lse: str | int, ends: str, batch: int, shape: Sequence[int], strides: Strides, device: int
) -> Step:
    """Return the launch that clears rows of `name` [tokens, heads, width] (and lse) after the last sequence."""
    launch = TAIL.bind((token,), device, device_info(device).sm_count, 256)
    return Step(launch, name, lse, ends, batch, *shape, strides.row, strides.head)


def _with_tails(steps: Steps, tails: list[Step]) -> Steps:
    other = steps.if_not_resident
    return Steps(
        *steps.steps, *tails, scratch=steps.scratch, zeros=steps.zeros,
        if_not_resident=None if other is None else lambda: _with_tails(other(), tails),
    )  # fmt: skip


def forward(problem: Attention, name: str, device: int) -> Steps:
    """Return the launches of a forward pass."""
    steps = ATTENTION.steps(problem, device, name)
    if not problem.varlen:
        return steps
    return _with_tails(steps, [_tail(problem, "out", problem.out, False, True, device)])


def backward(problem: Attention, name: str, device: int) -> Steps:
    """Return the launches of a backward pass."""
    steps = ATTENTION.steps(problem._replace(backward=True), device, name)
    if not problem.varlen:
        return steps
    results = (("q", "dq", problem.dq, False), ("k", "dk", problem.dk, True), ("v", "dv", problem.dv, True))
    tails = [
        _tail(problem, name, s, keys, False, device) for letter, name, s, keys in results if letter in problem.wants
    ]
    return _with_tails(steps, tails)
