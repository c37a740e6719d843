"""The gated delta rule for few long sequences: segments scanned at once (gated_delta_rule_rows.cuh says how)."""

from __future__ import annotations

import torch

from rtkernels.ops.attention import gated_delta_rule_scans as scans
from rtkernels.ops.attention.gated_delta_rule_plan import CHUNK_ROWS, Call
from rtkernels.runtime.invariance import level
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.operator.plan import Memory, Offset, Step

CHAIN = Kernel(
    "attention/gated_delta_rule_chain.cu", "gated_delta_rule_chain", template="DK REVERSE", max_registers=128,
    args="transitions:ptr states:ptr cu:ptr segment:i64 length:i64 heads:i64 d_k:i64 d_v:i64",
    variants=[(d, reverse) for d in (64, 128) for reverse in (False, True)],
)  # fmt: skip
KERNELS = (CHAIN,)
# As in gated_delta_rule_chain.cu.
_COLUMNS, _SLAB, _STAGES = 8, 32, 4

_MAX_SEGMENTS = 64
_MIN_GAIN = 1.25
# In times of a chunk: a segment of the chain, and what a first pass and a chain take beside that.
_OF_SEGMENT, _OF_PASSES = 0.75, 6.0


def split(call: Call, device: int, gradients: bool = False) -> Call:
    """Return the call with the rows of a segment, if that is faster: a choice that batch invariance does not allow."""
    return call if level() else call._replace(segment=segment_rows(call, device, gradients))


def segment_rows(call: Call, device: int, gradients: bool) -> int:
    """Return the rows of a segment, or 0 for whole sequences.

    A model of time, in chunks that an SM scans one after the other: tiles of columns run at once, one on each SM, or
    two, which take 1.5 times as long. Packed sequences count as equally long.
    """
    info = device_info(device)
    tile = 64 if "wgmma" in info.target.features else 32
    chunks = -(-call.length // (CHUNK_ROWS * (call.sequences if call.packed else 1))) if call.sequences else 0
    chains, values, keys = call.sequences * call.heads, -(-call.d_v // tile), -(-call.d_k // tile)

    def rounds(tiles: int) -> float:
        return 1.0 if tiles <= info.sm_count else 1.5 * -(-tiles // (2 * info.sm_count))

    def time(count: int) -> float:
        forward = rounds(chains * ((count - 1) * values + (count - 2) * keys)) + rounds(chains * count * values)
        backward = rounds(chains * (count - 1) * values) + rounds(chains * count * values) if gradients else 0.0
        others = (1 + gradients) * (_OF_SEGMENT * (count - 2) + _OF_PASSES)
        return -(-chunks // count) * (forward + backward) + others

    best = min(range(3, min(chunks, _MAX_SEGMENTS) + 1), key=time, default=0)
    if not best or (1 + gradients) * chunks * rounds(chains * values) < _MIN_GAIN * time(best):
        return 0
    return CHUNK_ROWS * -(-chunks // best)


def scratch(call: Call, gradients: bool = False) -> dict[str, Memory]:
    """Return what segments pass on: states behind them with their transitions, and gradients of states before them."""
    if not call.segment:
        return {}
    states = call.segments * call.heads * call.d_k * call.d_v
    ends = Memory((states + call.segments * call.heads * call.d_k**2,), torch.float32)
    return {"ends": ends} | ({"starts": Memory((states,), torch.float32)} if gradients else {})


def chain(call: Call, states: str, reverse: bool, device: int, transitions: str | Offset) -> Step:
    """Return the launch that computes the states, or their gradients, between segments."""
    pitch = (call.width if reverse else _SLAB) + 4
    shared = _STAGES * (_SLAB if reverse else call.width) * pitch * 4
    grid = (call.d_v // _COLUMNS, call.heads, call.sequences)
    launch = CHAIN.bind((call.width, reverse), device, grid, 2 * call.width, shared)
    return Step(launch, transitions, states, call.cu, call.segment, call.length, call.heads, call.d_k, call.d_v)


def _transitions(call: Call) -> Offset:
    return Offset("ends", 4 * call.segments * call.heads * call.d_k * call.d_v)


def forward(call: Call, q: Meta, k: Meta, v: Meta, names: dict[str, str], device: int) -> list[Step]:
    """Return the launches from chunk to chunk. `names`: what ``scan_arguments`` takes."""
    if not call.segment:
        return [scans.scan(call, q, k, v, names, device)]
    names = names | {"ends": "ends"}
    first = {name: names[name] for name in ("initial", "ends") if name in names}
    return [
        scans.scan(call, q, k, v, first, device),
        chain(call, "ends", False, device, _transitions(call)),
        scans.scan(call, q, k, v, names, device),
    ]


def backward(call: Call, q: Meta, k: Meta, dout: Meta, names: dict[str, str], device: int) -> list[Step]:
    """Return the launches of gradients from chunk to chunk. `names`: what ``reverse_arguments`` takes."""
    if not call.segment:
        return [scans.reverse(call, q, k, dout, names, device)]
    names = names | {"starts": "starts"}
    first = {name: names[name] for name in ("dfinal", "starts") if name in names}
    return [
        scans.reverse(call, q, k, dout, first, device),
        chain(call, "starts", True, device, _transitions(call)),
        scans.reverse(call, q, k, dout, names, device),
    ]
