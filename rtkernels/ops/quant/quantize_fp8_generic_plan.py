"""Launches of ``quantize_fp8`` for tensors that can only be read an element at a time (one kernel for all of them)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rtkernels.ops.quant.quantize_fp8_kernels import GENERIC, GENERIC_THREADS, GENERIC_TYPES, GROUP
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.layout import GRID_LIMIT, group_threads

if TYPE_CHECKING:
    from rtkernels.ops.quant.quantize_fp8_plan import Matrix

_TENSOR_UNIT = 8 * GENERIC_THREADS  # columns a block takes at a time where all share one scale
_BLOCKS_PER_SM = 8


def _bind(
    m: Matrix,
    t: str,
    f: str,
    pow2: bool,
    unit: tuple[int, int],
    strides: tuple[int, int] = (0, 0),
    threads: int = GENERIC_THREADS,
    blocks: int = GRID_LIMIT,
    *,
    partials: int = 0,
    given: bool = False,
    amax_only: bool = False,
) -> tuple[Callable[..., None], int]:
    """Return a launch that takes x, q, scale, q_t and partial, 0 for what is not there, and how many blocks it has.

    Args:
        m: The tensor.
        t: Token of its dtype.
        f: Token of the codes.
        pow2: Scales are powers of two.
        unit: Rows and columns that share a scale.
        strides: How far apart scales of units below and beside one another are.
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
    ending = (
        m.rows, m.cols, m.stride, *unit, units, across, *strides, threads, lanes, partials, given, amax_only,
        GENERIC_TYPES[t], f == "e5m2", pow2,
    )  # fmt: skip
    return GENERIC.bind((GENERIC_THREADS,), m.device, grid, GENERIC_THREADS, ending=ending), grid


def tensor_launches(m: Matrix, t: str, f: str, pow2: bool) -> tuple[Callable[..., None], Callable[..., None], int]:
    """Return launches for (x, partial) and (x, scale, partial, q), and how many partial maxima there are."""
    blocks = _BLOCKS_PER_SM * device_info(m.device).sm_count
    unit = 1, _TENSOR_UNIT
    amax, count = _bind(m, t, f, pow2, unit, blocks=blocks, amax_only=True)
    codes, _ = _bind(m, t, f, pow2, unit, blocks=blocks, partials=count)
    return (
        lambda x, partial: amax(x, 0, partial, 0, 0),
        lambda x, scale, partial, q: codes(x, q, scale, 0, partial),
        count,
    )


def static_launch(m: Matrix, t: str, f: str) -> Callable[..., None]:
    """Return a launch for (x, scale, 0, q) with a scale that is known."""
    codes, _ = _bind(
        m, t, f, False, (1, _TENSOR_UNIT), blocks=_BLOCKS_PER_SM * device_info(m.device).sm_count, given=True
    )
    return lambda x, scale, _, q: codes(x, q, scale, 0, 0)


def _scaled(m: Matrix, t: str, f: str, pow2: bool, granularity: str, layout: str) -> Callable[..., None]:
    """Return a launch for (x, q, scale, q_t, 0)."""
    groups = -(-m.cols // GROUP)
    options: dict[str, tuple[Any, ...]] = {  # unit, strides of scales, threads of a unit
        # Up to a warp for a row, or the whole block: other numbers of warps leave some over.
        "row": ((1, m.cols), (1, 0), group_threads(-(-m.cols // 8), 32) if m.cols <= 8 * 32 else GENERIC_THREADS),
        "group": ((1, GROUP), (1, m.rows) if layout == "column" else (groups, 1), 32),
        "group_t": ((GROUP, 1), (m.cols, 1), 1),
        "block": ((GROUP, GROUP), (groups, 1), GENERIC_THREADS),
    }
    return _bind(m, t, f, pow2, *options[granularity])[0]


def codes_launch(m: Matrix, t: str, f: str, pow2: bool, granularity: str, layout: str) -> Callable[..., None]:
    """Return a launch for (x, q, scale)."""
    launch = _scaled(m, t, f, pow2, granularity, layout)
    if granularity == "group_t":
        return lambda x, q, scale: launch(x, 0, scale, q, 0)
    return lambda x, q, scale: launch(x, q, scale, 0, 0)


def both_launch(m: Matrix, t: str, f: str, pow2: bool, granularity: str, layout: str) -> Callable[..., None]:
    """Return a launch for (x, q, scale, q_t, scale_t), or without scale_t for "block"."""
    launch = _scaled(m, t, f, pow2, granularity, layout)
    if granularity == "block":
        return lambda x, q, scale, q_t: launch(x, q, scale, q_t, 0)
    transposed = _scaled(m, t, f, pow2, "group_t", "row")

    def both(x: int, q: int, scale: int, q_t: int, scale_t: int) -> None:
        launch(x, q, scale, 0, 0)
        transposed(x, 0, scale_t, q_t, 0)

    return both
