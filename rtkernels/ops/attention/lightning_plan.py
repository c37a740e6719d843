"""Lightning attention: kernel records and launches (lightning_scan.cu says what a scan is)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rtkernels.ops.attention.mma_plan import tile_pitch
from rtkernels.ops.attention.problem import Strides
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Step

_TOKENS, _WIDTHS = ("bf16", "fp16"), (64, 128)
MAX_WIDTH = _WIDTHS[-1]
_ROWS, _COLUMNS, _THREADS = 64, 64, 128  # lightning_scan.cu

SCAN = Kernel(
    "attention/lightning_scan.cu",
    "lightning_scan",
    template="T DK",
    args="left:ptr right:ptr value:ptr decay:ptr initial:ptr final:ptr cu:ptr out:ptr heads:i64 length:i64 d_k:i64 "
    "d_v:i64 left_batch:i64 left_row:i64 left_head:i64 right_batch:i64 right_row:i64 right_head:i64 value_batch:i64 "
    "value_row:i64 value_head:i64 out_batch:i64 out_row:i64 out_head:i64 state_row:i64 state_column:i64 lead:i64 "
    "reverse:i64 scale:f64 initial_factor:f64 final_factor:f64",
    variants=[(t, d) for t in _TOKENS for d in _WIDTHS],
    max_registers=255,
)
STEP = Kernel(
    "attention/lightning_scan.cu",
    "lightning_step",
    template="T",
    args="q:ptr k:ptr v:ptr decay:ptr state:ptr out:ptr heads:i64 d_k:i64 d_v:i64 q_batch:i64 q_head:i64 k_batch:i64 "
    "k_head:i64 v_batch:i64 v_head:i64 scale:f64",
    variants=[(t,) for t in _TOKENS],
    max_registers=80,
    tier="serve",
)


class Scan(NamedTuple):
    """One scan. Tensors are names with their strides; `state`: elements from row to row and column to column."""

    token: str
    batch: int
    heads: int
    length: int
    d_k: int
    d_v: int
    cu: bool
    left: tuple[str, Strides]
    right: tuple[str, Strides]
    value: tuple[str, Strides]
    out: tuple[str, Strides]
    scale: float
    state: tuple[int, int]
    initial: str | None = None
    final: str | None = None
    initial_factor: float = 1.0
    final_factor: float = 1.0
    lead: int = 0
    reverse: bool = False


def scan(call: Scan, device: int) -> Step:
    """Return the launch of a scan."""
    width = next(w for w in _WIDTHS if call.d_k <= w)
    shared = 2 * _ROWS * (2 * tile_pitch(width) + tile_pitch(_COLUMNS)) + width * tile_pitch(_COLUMNS)
    tensors = (call.left, call.right, call.value, call.out)
    return Step(
        SCAN.bind((call.token, width), device, (-(-call.d_v // _COLUMNS), call.heads, call.batch), _THREADS, shared),
        *(call.left[0], call.right[0], call.value[0], "decay", call.initial or 0, call.final or 0),
        *("cu_seqlens" if call.cu else 0, call.out[0], call.heads, call.length, call.d_k, call.d_v),
        *(number for _, strides in tensors for number in strides[:3]),
        *(*call.state, call.lead, int(call.reverse), call.scale, call.initial_factor, call.final_factor),
    )


def step(token: str, shape: Sequence[int], d_v: int, strides: Sequence[Strides], scale: float, device: int) -> Step:
    """Return the launch of one token; `shape`: of q. Strides of [batch, heads, width] are (0, batch, head)."""
    batch, heads, d_k = shape
    return Step(
        STEP.bind((token,), device, (-(-d_v // 128), heads, batch), 256),
        *("q", "k", "v", "decay", "state", "out", heads, d_k, d_v),
        *(number for s in strides for number in s[1:3]),
        scale,
    )
