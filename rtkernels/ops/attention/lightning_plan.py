"""Lightning attention: kernel records and launches (lightning_scan.cu says what a scan is)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rtkernels.ops.attention.mma_plan import stride_arguments, tile_pitch
from rtkernels.ops.attention.problem import Strides
from rtkernels.runtime.invariance import level
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Boxes, Memory, Step, box_strides

_TOKENS = ("bf16", "fp16")
_WIDTHS = (64, 128)
MAX_WIDTH = _WIDTHS[-1]
# As in lightning_scan.cu.
_ROWS = 64  # of a tile
_COLUMNS = 64  # of a block
_THREADS = 128
_RESIDENT = 2  # blocks per SM
_SM90_THREADS = 512  # lightning_sm90.cu, one block per SM
_SM90_SHARED = 64 * 256 * (3 * 3 + 1) + 2 * 64 * 128 + 16 * (3 + 2) + 1024
SEGMENT_ROWS = 256  # a segment has at least: its state is read and written

SCAN = Kernel(
    "attention/lightning_scan.cu", "lightning_scan", template="T DK", max_registers=255,
    args="left:ptr right:ptr value:ptr decay:ptr initial:ptr final:ptr cu:ptr out:ptr segments:i64 heads:i64 "
    f"length:i64 d_k:i64 d_v:i64 {stride_arguments('left right value out')} state_row:i64 state_column:i64 lead:i64 "
    "reverse:i64 scale:f64 initial_factor:f64 final_factor:f64",
    variants=[(t, d) for t in _TOKENS for d in _WIDTHS],
)  # fmt: skip
SCAN_SM90 = Kernel(
    "attention/lightning_sm90.cu", "lightning_sm90", template="T", max_registers=128, needs=("wgmma",),
    args="left_map:tmap right_map:tmap value_map:tmap out_map:tmap decay:ptr initial:ptr final:ptr out:ptr "
    "segments:i64 heads:i64 "
    "length:i64 d_k:i64 d_v:i64 state_row:i64 state_column:i64 lead:i64 reverse:i64 scale:f64 initial_factor:f64 "
    "final_factor:f64",
    variants=[("bf16",)],
)  # fmt: skip
PREFIX = Kernel(
    "attention/lightning_scan.cu", "lightning_prefix", template="T", max_registers=80,
    args="states:ptr initial:ptr final:ptr decay:ptr cu:ptr segments:i64 heads:i64 length:i64 elements:i64 lead:i64 "
    "initial_factor:f64 final_factor:f64",
    variants=[("fp32",)],
)  # fmt: skip
STEP = Kernel(
    "attention/lightning_scan.cu", "lightning_step", template="T", max_registers=80, tier="serve",
    args="q:ptr k:ptr v:ptr decay:ptr state:ptr out:ptr heads:i64 d_k:i64 d_v:i64 q_batch:i64 q_head:i64 k_batch:i64 "
    "k_head:i64 v_batch:i64 v_head:i64 scale:f64",
    variants=[(t,) for t in _TOKENS],
)  # fmt: skip


class Scan(NamedTuple):
    """One scan. Tensors are names with their strides; `state`: elements from row to row and column to column.

    With several segments `initial` names the states before all of them.
    """

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
    segments: int = 1
    wgmma: bool = False


def by_wgmma(token: str, d_k: int, d_v: int, cu: bool, length: int, device: int) -> bool:
    """Return whether scans of these shapes are those of ``lightning_sm90.cu``; all of a call have the same kernel."""
    wgmma = "wgmma" in device_info(device).target.features and not level()  # it takes no packed sequences
    return wgmma and token == "bf16" and min(d_k, d_v) > _WIDTHS[0] and not cu and 0 < length < 1 << 30


def segment_count(batch: int, heads: int, width: int, rows: int, wgmma: bool, device: int) -> int:
    """Return the number of segments per sequence, from shapes alone, so that the blocks fill a device.

    States of segments take half of the work once more, so a device that is half full is left at that.
    """
    if level():
        return 1
    tiles, resident = (1, 1) if wgmma else (-(-width // _COLUMNS), _RESIDENT)
    blocks = max(tiles * heads * batch, 1)
    return max(min(resident * device_info(device).sm_count // blocks, rows // SEGMENT_ROWS), 1)


def states(call: Scan, name: str, device: int) -> tuple[list[Step], dict[str, Memory]]:
    """Return the launches that compute the states before all segments of a scan and its final state, and memory."""
    alone = call._replace(initial=None, lead=0, final=name, final_factor=1.0, out=("", call.out[1]))
    elements = call.d_k * call.d_v
    prefix = Step(
        PREFIX.bind(("fp32",), device, (-(-elements // 1024), call.heads, call.batch), 256),
        *(name, call.initial or 0, call.final or 0, "decay", "cu_seqlens" if call.cu else 0, call.segments, call.heads),
        *(call.length, elements, call.lead, call.initial_factor, call.final_factor),
    )
    shape = (call.batch * call.segments, call.heads, call.d_k, call.d_v)
    return [scan(alone, device), prefix], {name: Memory(shape, torch.float32)}


def scans(calls: Sequence[Scan], name: str, device: int) -> tuple[list[Step], dict[str, Memory]]:
    """Return the launches of scans, and their memory. All scans start from the same state, so they share the states.

    The final state is that of the last one.
    """
    if not calls or calls[-1].segments == 1:
        return [scan(call, device) for call in calls], {}
    steps, scratch = states(calls[-1], name, device)
    given = {"initial": name, "initial_factor": 1.0, "final": None}
    return [*steps, *(scan(call._replace(**given), device) for call in calls if call.out[0])], scratch


def scan(call: Scan, device: int) -> Step:
    """Return the launch of a scan."""
    if call.wgmma:
        return _scan_sm90(call, device)
    width = next(w for w in _WIDTHS if call.d_k <= w)
    shared = 2 * _ROWS * (2 * tile_pitch(width) + tile_pitch(_COLUMNS)) + width * tile_pitch(_COLUMNS)
    shared += 4 * _THREADS // 32 if call.token == "fp16" else 0  # the largest element of each warp's part of the state
    tensors = (call.left, call.right, call.value, call.out)
    return Step(
        SCAN.bind(
            (call.token, width),
            device,
            (-(-call.d_v // _COLUMNS), call.heads, call.batch * call.segments),
            _THREADS,
            shared,
        ),
        *(call.left[0], call.right[0], call.value[0], "decay", call.initial or 0, call.final or 0),
        *("cu_seqlens" if call.cu else 0, call.out[0] or 0, call.segments, call.heads, call.length),
        *(call.d_k, call.d_v),
        *(number for _, strides in tensors for number in strides[:3]),
        *(*call.state, call.lead, int(call.reverse), call.scale, call.initial_factor, call.final_factor),
    )


def _scan_sm90(call: Scan, device: int) -> Step:
    def boxes(tensor: tuple[str, Strides], width: int) -> Boxes:
        name, strides = tensor
        sizes = (width, call.length, call.heads, call.batch)
        apart = box_strides(sizes, (strides.row, strides.head, strides.batch), 2)
        return Boxes(name, call.token, sizes, apart, (64, _ROWS, 1, 1))

    writes = bool(call.out[0])
    return Step(
        SCAN_SM90.bind((call.token,), device, (call.heads, call.batch * call.segments), _SM90_THREADS, _SM90_SHARED),
        *(boxes(call.left, call.d_k), boxes(call.right, call.d_k), boxes(call.value, call.d_v)),
        *(boxes(call.out if writes else call.value, call.d_v), "decay", call.initial or 0, call.final or 0),
        *(call.out[0] or 0, call.segments, call.heads, call.length, call.d_k, call.d_v, *call.state, call.lead),
        *(int(call.reverse), call.scale, call.initial_factor, call.final_factor),
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
