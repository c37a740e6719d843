"""The gated delta rule by wgmma where that is faster: scans from chunk to chunk, and gradients inside of chunks."""

from __future__ import annotations

from typing import NamedTuple

from rtkernels.ops.attention import gated_delta_rule_plan as plans
from rtkernels.ops.attention.gated_delta_rule_plan import SIZES, Call
from rtkernels.ops.attention.mma_plan import stride_arguments
from rtkernels.runtime.invariance import level
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.operator.plan import Step

# As in gated_delta_rule_sm90.cuh.
_BOX = 64 * 128  # bytes of 64 rows and columns
_NUMBERS = 4 * 4 * 64
_CONSUMER_WARPS = 8
_HEADS, _CHANNELS, _UNCORRECTED = range(3)
_MAX_STAGES = 3

_VARIANTS = [(t, d, kind) for t in ("bf16", "fp16") for d in (64, 128) for kind in range(3)]
SCAN_SM90 = Kernel(
    "attention/gated_delta_rule_scan_sm90.cu", "gated_delta_rule_scan_sm90", template="T DK KIND WRITES",
    max_registers=168, needs=("wgmma",),
    args="q:ptr k:ptr after:ptr v:ptr solve:ptr inner:ptr rows:ptr skip:ptr initial:ptr final:ptr ends:ptr cu:ptr "
    f"out:ptr states:ptr updates:ptr segment:i64 {SIZES} {stride_arguments('q k v')} stages:i64 scale:f64",
    variants=[(*variant, writes) for variant in _VARIANTS for writes in (False, True)],
)  # fmt: skip
REVERSE_SM90 = Kernel(
    "attention/gated_delta_rule_reverse_sm90.cu", "gated_delta_rule_reverse_sm90", template="T DK KIND",
    max_registers=168, needs=("wgmma",),
    args="q:ptr k:ptr after:ptr dout:ptr solve:ptr inner:ptr rows:ptr skip:ptr dfinal:ptr dinitial:ptr "
    f"starts:ptr cu:ptr dv:ptr dstates:ptr drest:ptr segment:i64 {SIZES} {stride_arguments('q k dout')} stages:i64 "
    "scale:f64",
    variants=_VARIANTS,
)  # fmt: skip
GRADS_SM90 = Kernel(
    "attention/gated_delta_rule_grads_sm90.cu", "gated_delta_rule_grads_sm90", template="T DK", max_registers=168,
    needs=("wgmma",), struct=True, args=plans.GRADS_ARGUMENTS,
    variants=[(t, d) for t in ("bf16", "fp16") for d in (64, 128)],
)  # fmt: skip
KERNELS = (SCAN_SM90, REVERSE_SM90, GRADS_SM90)


def by_wgmma(call: Call, device: int, forward: bool = False) -> bool:
    """Return whether a scan is that with wgmma.

    Its chunks take longer without queries, so those of gradients need tiles of 64 columns that fill more than half of a
    device. It is not for calls with bits that must not depend on the batch.
    """
    info = device_info(device)
    tiles = call.segments * call.heads * -(-call.d_v // 64)
    fast = (forward and call.corrected) or tiles > info.sm_count // 2
    return "wgmma" in info.target.features and not level() and fast


def _parts(call: Call) -> int:
    """Return the boxes of T in a stage."""
    return 0 if not call.corrected else 1 if call.channels else 2


class _Shape(NamedTuple):
    """How a scan is launched."""

    kind: int
    groups: int  # of 64 columns of v in a block
    grid: tuple[int, int, int]
    stages: int
    shared: int

    @classmethod
    def of(
        cls, call: Call, boxes: int, keys: int, kept: int, factors: int, device: int, transitions: bool = False
    ) -> _Shape:  # fmt: skip
        """Return the launch of a scan, its stages with `boxes` of 64 x 64 and `keys` tiles of keys beside the values.

        `kept`: bytes beside the stages for each group; `factors`: numbers of a token that a warp keeps.
        Blocks of one group are for heads that, split so, do not need more than one block per SM.
        """
        info, tiles = device_info(device), -(-call.d_v // 64) + (-(-call.d_k // 64) if transitions else 0)
        groups = 1 if tiles == 1 or call.segments * call.heads * tiles <= info.sm_count else 2
        stage = (keys * call.width // 64 + boxes + groups) * _BOX + _NUMBERS
        others = groups * (kept + factors * _NUMBERS) + 16 * _MAX_STAGES + 4 * _CONSUMER_WARPS + 1024
        stages = min((info.shared_per_block - others) // stage, _MAX_STAGES)
        kind = _CHANNELS if call.channels else _HEADS if call.corrected else _UNCORRECTED
        grid = (-(-tiles // groups), call.heads, call.segments)
        return cls(kind, groups, grid, stages, stages * stage + others)


def scan(call: Call, q: Meta, k: Meta, v: Meta, names: dict[str, str], device: int) -> Step:
    """Return the launch from chunk to chunk. `names`: what scan_arguments takes."""
    writes, transitions = "out" in names, plans.is_first_pass(names)
    if not by_wgmma(call, device, writes or transitions):
        return plans.scan(call, q, k, v, names, device)
    boxes, keys = _parts(call) + int(writes), 1 + int(writes) + int(call.channels)
    kept, factors = 128 * call.width if "states" in names else 0, 3 if _parts(call) == 2 else 4
    shape = _Shape.of(call, boxes, keys, kept, factors, device, transitions)
    variant = (call.token, call.width, shape.kind, writes)
    launch = SCAN_SM90.bind(variant, device, shape.grid, 128 * (shape.groups + 1), shape.shared)
    return Step(launch, *call.keys, "v", *call.matrices, *plans.scan_arguments(call, names, q, k, v, shape.stages))


def reverse(call: Call, q: Meta, k: Meta, dout: Meta, names: dict[str, str], device: int) -> Step:
    """Return the launch of gradients from chunk to chunk. `names`: what reverse_arguments takes."""
    if not by_wgmma(call, device):
        return plans.reverse(call, q, k, dout, names, device)
    shape = _Shape.of(call, 1 + _parts(call), 2 + int(call.channels), 128 * call.width + _BOX, 4, device)
    variant = (call.token, call.width, shape.kind)
    launch = REVERSE_SM90.bind(variant, device, shape.grid, 128 * (shape.groups + 1), shape.shared)
    rest = plans.reverse_arguments(call, names, q, k, dout, shape.stages)
    return Step(launch, *call.keys, "dout", *call.matrices, *rest)


def grads(call: Call, q: Meta, k: Meta, v: Meta, dout: Meta, device: int) -> Step:
    """Return the launch of gradients inside chunks."""
    has_wgmma = "wgmma" in device_info(device).target.features
    if not (has_wgmma and call.corrected) or call.channels:
        return plans.grads(call, q, k, v, dout, device)
    kept, stage = (2 * call.width // 64 + 2) * _BOX, (3 + 2 * call.width // 64) * _BOX + _NUMBERS
    launch = GRADS_SM90.bind(
        (call.token, call.width), device, (call.chunks, call.key_heads), 384,
        kept + _MAX_STAGES * stage + 16 * _MAX_STAGES + 1024,
    )  # fmt: skip
    return Step(launch, *plans.grads_arguments(call, q, k, v, dout, _MAX_STAGES))
