"""Where a test can run, as a parameter: plain torch on the CPU, the host emulator with a feature set, a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rtkernels import emulate, emulator
from rtkernels.errors import ArgumentError
from rtkernels.runtime import targets
from rtkernels.runtime.build import nvrtc
from rtkernels.runtime.operator.declared import Meta
from support.compare import poisoned
from support.ways import assert_equal_bits

emulated = pytest.mark.skipif(emulator.unavailable() is not None, reason=str(emulator.unavailable()))
PLACES = {"cpu": (), "sm_80": emulated, "sm_90": emulated, "cuda": pytest.mark.gpu}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Thread orders besides "forward": a missing barrier shows as different bits in one of them.
ORDERS = ("reverse", 7, 1234)
# Register ceilings hold for this NVRTC: another allocates in its own way.
CEILINGS_ARE_FOR = (13, 0)


def at(*names: str) -> pytest.MarkDecorator:
    """Parametrise a test by ``place``: all places, or the named ones.

    Of a test with several cases, each runs on one of sm_80 and sm_90 only, unless pytest gets ``--full``.
    """
    return pytest.mark.parametrize("place", [pytest.param(name, marks=PLACES[name]) for name in names or PLACES])


def compiled_for(name: str) -> targets.Target:
    """Return the target of this name; skip the test if the NVRTC here is too old for it (sm_100: 12.8)."""
    target = targets.parse(name)
    if target.number not in nvrtc.supported_archs():
        pytest.skip(f"NVRTC {'.'.join(map(str, nvrtc.version()))} cannot compile for {name}")
    return target


def allowed_spills() -> int:
    """Return how many bytes a kernel may spill: none with the NVRTC that the kernels were tuned with.

    Kernels at their limit of registers spill some with others (12 bytes with 13.2, 8 with 12.9, on sm_100a). An
    array that lands in local memory by mistake takes more than is allowed here.
    """
    return 0 if nvrtc.version() == CEILINGS_ARE_FOR else 64


def meta_on(device: int, t: torch.Tensor) -> Meta:
    """Return a tensor as the checks of an operator would see it on this device."""
    return Meta(t.dtype, t.shape, t.stride(), device, 0)


def error_tests(bad: dict[str, tuple[Callable[[], Any], str]]) -> tuple[Callable[[str], None], Callable[[str], None]]:
    """Return two tests of calls that must raise an ArgumentError with a message: on the CPU, and in the launchers."""

    @pytest.mark.parametrize("name", bad)
    def on_the_cpu(name: str) -> None:
        call, message = bad[name]
        with pytest.raises(ArgumentError, match=message):
            call()

    @emulated
    @pytest.mark.parametrize("name", bad)
    def in_the_launchers(name: str) -> None:
        call, message = bad[name]
        with emulate(), pytest.raises(ArgumentError, match=message):
            call()

    return on_the_cpu, in_the_launchers


def order_test(run: Callable[[Any], Any], *cases: Any) -> Callable[[Any], None]:
    """Return a test that threads in any order give the same bits; ``run(case)`` gives tensors, some may be None."""

    @emulated
    @pytest.mark.parametrize("case", cases, ids=str)
    def in_every_order(case: Any) -> None:
        with emulate("sm_90"):
            expected = tuple(run(case))
        for order in ORDERS:
            with emulate("sm_90", order), poisoned():
                assert_equal_bits(tuple(run(case)), expected, f"order {order}")

    return in_every_order


def short(dtype: torch.dtype) -> str:
    """Name a dtype in test ids."""
    return str(dtype).removeprefix("torch.")
