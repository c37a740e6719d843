"""How close pointwise operators come to the speed of a copy, and reductions to that of a read, at memory-bound sizes.

Classes as in ``rtkernels.aten.strides``: V (dense), R (rows with gaps between them), T (an operand transposed). A
reduction's share is the time of reading its bytes, at the speed of the largest read below, over its own. L2 is flushed
by reading, because a flush that writes leaves write-backs to the next kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import rtkernels
from bench.measure.timing import CudaDevice, Timer, copy_calls
from rtkernels.aten import table

_DTYPES = (torch.float32, torch.bfloat16)
_MATRICES = ((4096, 4096), (1024, 65536))


class _ReadingDevice(CudaDevice):
    """Flushes L2 by reading."""

    def flush(self) -> None:
        torch.amax(self._buffer.view(torch.float32), 0)


def _pointwise() -> Iterator[tuple[str, Callable[[], Any], int]]:
    """Yield a name, a call and the bytes that it moves."""
    for dtype in _DTYPES:
        for rows, columns in _MATRICES:
            x, y = (torch.randn(rows, columns, dtype=dtype, device="cuda") for _ in range(2))
            padded = torch.randn(rows, columns + 64, dtype=dtype, device="cuda")[:, :columns]
            transposed = torch.randn(columns, rows, dtype=dtype, device="cuda").mT
            what = f"{rows}x{columns} {str(dtype).removeprefix('torch.')}"
            moved = 3 * x.numel() * x.element_size()
            yield f"V {what}", lambda x=x, y=y: torch.ops.aten.add.Tensor(x, y), moved
            yield f"R {what}", lambda x=x, y=padded: torch.ops.aten.add.Tensor(x, y), moved
            yield f"T {what}", lambda x=x, y=transposed: torch.ops.aten.add.Tensor(x, y), moved


def _reductions() -> Iterator[tuple[str, Callable[[], Any], int]]:
    for dtype in _DTYPES:
        for rows, columns in _MATRICES:
            x = torch.randn(rows, columns, dtype=dtype, device="cuda")
            what = f"{rows}x{columns} {str(dtype).removeprefix('torch.')}"
            for name, dim in (("rows", 1), ("columns", 0)):
                yield f"{name} {what}", lambda x=x, d=dim: torch.ops.aten.sum.dim_IntList(x, [d]), x.nbytes


def bounds(timer: Timer) -> dict[str, dict[str, float]]:
    """Return, by class and size, our share of the bound (``share``), torch's (``torch``) and our ``us``."""
    reading = Timer(_ReadingDevice(), iterations=timer.iterations, warm_us=timer.warm_us)
    limits = dict(table.MIN_ELEMENTS)
    table.MIN_ELEMENTS.update(dict.fromkeys(limits, 0))
    found: dict[str, dict[str, float]] = {}
    try:
        bytes_per_us = _read_speed(reading)
        for name, call, moved in _reductions():
            found[name] = _shares(reading, call, moved / bytes_per_us)
        for name, call, moved in _pointwise():
            found[name] = _shares(reading, call, reading.measure(copy_calls(moved, "cuda")).us)
    finally:
        table.MIN_ELEMENTS.update(limits)
    return found


def _read_speed(timer: Timer) -> float:
    """Return the bytes per µs that torch's sum of 4 GiB reads."""
    x = torch.zeros(1 << 30, dtype=torch.float32, device="cuda")
    return x.nbytes / timer.measure([lambda: torch.ops.aten.sum(x)]).us


def _shares(timer: Timer, call: Callable[[], Any], bound_us: float) -> dict[str, float]:
    torchs = timer.measure([call]).us
    with rtkernels.use(["sum", "add"]):
        ours = timer.measure([call]).us
    return {"share": bound_us / ours, "torch": bound_us / torchs, "us": ours}
