"""Launches of ``quantize_fp8`` for tensors that can only be read an element at a time (one kernel for all of them)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rtkernels.ops.quant.quantize_fp8_kernels import GENERIC, GENERIC_THREADS, GENERIC_TYPES, GROUP
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.layout import GRID_LIMIT, group_threads
from rtkernels.runtime.operator.plan import Memory, Step, Steps

if TYPE_CHECKING:
    from rtkernels.ops.quant.quantize_fp8_plan import Matrix

_TENSOR_UNIT = 8 * GENERIC_THREADS  # columns a block takes at a time where all share one scale
_BLOCKS_PER_SM = 8


def _step(
    m: Matrix, t: str, f: str, pow2: int, tensors: tuple[str | int, ...], unit: tuple[int, int],
    strides: tuple[int, int] = (0, 0), threads: int = GENERIC_THREADS, blocks: int = GRID_LIMIT, *,
    partials: int = 0, given: bool = False, amax_only: bool = False,
) -> tuple[Step, int]:  # fmt: skip
    """Return a launch and how many blocks it has.

    Args:
        m: The tensor.
        t: Token of its dtype.
        f: Token of the codes.
        pow2: Scales are powers of two.
        tensors: x, q, scale, q_t and partial, 0 for what is not there.
        unit: Rows and columns that share a scale.
        strides: How far apart scales of units below and next to one another are.
        threads: Of a unit.
        blocks: At most so many.
        partials: See the kernel, as for the rest.
        given: See the kernel.
        amax_only: See the kernel.
    """
    across = -(-m.cols // unit[1])
    lanes = threads if unit[1] >= threads else GROUP if unit[1] == GROUP else unit[1]
    units = across * -(-m.rows // unit[0])
    grid = min(-(-units // (GENERIC_THREADS // threads)), blocks)
    numbers = (
        m.rows, m.cols, m.stride, *unit, units, across, *strides, threads, lanes, partials, given, amax_only,
        GENERIC_TYPES[t], f == "e5m2", pow2,
    )  # fmt: skip
    return Step(GENERIC.bind((GENERIC_THREADS,), m.device, grid, GENERIC_THREADS), *tensors, *numbers), grid


def generic_tensor(m: Matrix, t: str, f: str, pow2: int) -> Steps:
    """Return what quantises with one scale for the tensor: a pass for the largest magnitude, and one for the codes."""
    blocks, unit = _BLOCKS_PER_SM * device_info(m.device).sm_count, (1, _TENSOR_UNIT)
    amax, count = _step(m, t, f, pow2, ("x", 0, "partial", 0, 0), unit, blocks=blocks, amax_only=True)
    codes, _ = _step(m, t, f, pow2, ("x", "q", "scale", 0, "partial"), unit, blocks=blocks, partials=count)
    return Steps(amax, codes, scratch={"partial": Memory((count,), torch.float32)})


def generic_static(m: Matrix, t: str, f: str) -> Step:
    """Return the launch for a scale that is known."""
    blocks = _BLOCKS_PER_SM * device_info(m.device).sm_count
    return _step(m, t, f, 0, ("x", "q", "scale", 0, 0), (1, _TENSOR_UNIT), blocks=blocks, given=True)[0]


def generic_steps(
    m: Matrix, t: str, f: str, pow2: int, granularity: str, layout: str, both: bool = False
) -> list[Step]:
    """Return the launches for q and scale and, with `both`, for q_t and scale_t, which "block" does not have."""
    groups = -(-m.cols // GROUP)
    options: dict[str, tuple[Any, ...]] = {  # unit, strides of scales, threads of a unit
        # Up to a warp for a row, or the whole block: other numbers of warps leave some over.
        "row": ((1, m.cols), (1, 0), group_threads(-(-m.cols // 8), 32) if m.cols <= 8 * 32 else GENERIC_THREADS),
        "group": ((1, GROUP), (1, m.rows) if layout == "column" else (groups, 1), 32),
        "group_t": ((GROUP, 1), (m.cols, 1), 1),
        "block": ((GROUP, GROUP), (groups, 1), GENERIC_THREADS),
    }
    transposed_codes = "q_t" if both and granularity == "block" else 0
    tensors = ("x", 0, "scale", "q", 0) if granularity == "group_t" else ("x", "q", "scale", transposed_codes, 0)
    steps = [_step(m, t, f, pow2, tensors, *options[granularity])[0]]
    if both and granularity == "group":
        steps.append(_step(m, t, f, pow2, ("x", 0, "scale_t", "q_t", 0), *options["group_t"])[0])
    return steps
