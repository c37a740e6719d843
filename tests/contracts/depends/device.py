"""The CUDA device of these tests: the stand-in, with streams, captures and a count of the plans that are made."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from contracts.depends import launches


class State:
    """What the device says of itself, and what it saw."""

    stream = 0
    capturing = False
    streams: set[int] = set()  # noqa: RUF012 - there is one device
    plans = 0


def install() -> None:
    """Make this process have a CUDA device whose kernels are emulated. Before any op is imported."""
    from support import stand_in

    stand_in.install("emulate")
    from rtkernels.runtime.launch import driver, memory, plans, tables

    def stream(ordinal: int) -> int:
        return State.stream

    def capturing() -> bool:
        return State.capturing

    torch._C._cuda_getCurrentRawStream = memory.current_stream = stream
    torch._C._cuda_isCurrentStreamCapturing = memory.is_capturing = tables.is_capturing = capturing
    torch.cuda.is_current_stream_capturing = capturing
    stands_in, plain, extended = driver._driver(), driver._driver().launchKernel, driver._launch_kernel_ex()

    def launch(*given: Any) -> int:
        State.streams.add(given[8])
        return plain(*given)

    def launch_extended(config: Any, *given: Any) -> int:
        State.streams.add(driver._CONFIG.unpack(ctypes.string_at(config.value, driver._CONFIG.size))[7])
        return extended(config, *given)

    stands_in.launchKernel = launch
    driver._launch_kernel_ex = lambda: launch_extended
    missing = plans.Plans.__missing__

    def counted(self: Any, key: Any) -> Any:
        State.plans += 1
        return missing(self, key)

    plans.Plans.__missing__ = counted
    _reach_reports()
    launches.install()


def _reach_reports() -> None:
    """Let kernels write to the report of bad labels, which is host memory, as if it were the device's."""
    from rtkernels.ops.loss import label_report

    found, memory = label_report.report(0), torch.zeros(3, dtype=torch.int64, device="cuda")
    found.tensor = memory
    found._values = numpy.ctypeslib.as_array((ctypes.c_int64 * 3).from_address(memory.data_ptr()))


@contextlib.contextmanager
def on_stream(number: int) -> Iterator[None]:
    """Make another stream the current one."""
    before, State.stream = State.stream, number
    try:
        yield
    finally:
        State.stream = before


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """Say that a graph is captured; launches are made all the same."""
    State.capturing = True
    try:
        yield
    finally:
        State.capturing = False
