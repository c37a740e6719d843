"""The host emulator knows what orders memory: barriers, fences, waits for earlier kernels and for TMA."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
from support.emulator_harness import ORDERS, needs_compiler, run

import rtkernels
from rtkernels.emulator import EmulatorError, _build

pytestmark = needs_compiler


def reported(name: str, kind: str, text: str = "no barrier lies between", **kwargs: Any) -> None:
    """Run a kernel with a planted bug in several orders; each time there must be this report."""
    for order in ORDERS:
        with rtkernels.emulate(order=order), pytest.raises(EmulatorError, match=text) as caught:
            run("ordering.cu", name, **kwargs)
        assert caught.value.kind == kind, str(caught.value)


# ---- shared memory ---------------------------------------------------------------------------------------------------


def test_a_write_waits_for_every_reader() -> None:
    arguments = {"block": 96, "x": torch.ones(1), "y": torch.empty(64)}
    run("ordering.cu", "write_after_two_readers", **arguments, fault=0)
    for fault in (1, 2):
        reported("write_after_two_readers", "race", **arguments, fault=fault)


def test_bytes_of_one_word_do_not_conflict() -> None:
    y = torch.empty(4, dtype=torch.uint8)
    for order in ORDERS:
        with rtkernels.emulate(order=order):
            run("ordering.cu", "bytes_of_one_word", block=128, x=torch.arange(8, dtype=torch.uint8), y=y)
        assert y.tolist() == [i + 3 * (4 + i) for i in range(4)]


def test_only_syncwarp_orders_memory_within_a_warp() -> None:
    y = torch.empty(32)
    run("ordering.cu", "warp_operation_instead_of_syncwarp", y=y, fault=0)
    assert y.tolist() == [i ^ 1 for i in range(32)]
    for fault in range(1, 6):
        reported("warp_operation_instead_of_syncwarp", "race", y=y, fault=fault)


def test_an_atomic_before_its_place_is_set() -> None:
    y = torch.empty(1, dtype=torch.int32)
    run("ordering.cu", "count_before_zero", block=64, y=y, fault=0)
    assert y.item() == 64
    for order in ORDERS:
        with rtkernels.emulate(order=order), pytest.raises(EmulatorError) as caught:
            run("ordering.cu", "count_before_zero", block=64, y=y, fault=1)
        assert caught.value.kind in ("race", "uninitialised_shared")


# ---- TMA and wgmma ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_stores_of_the_copy_engine(order: str | int) -> None:
    x = torch.randn(3, 128)
    for fault in (0, 5):
        y = torch.full((3, 128), float("nan"))
        with rtkernels.emulate(order=order):
            run("ordering.cu", "store_rows", x=x, y=y, rows=3, fault=fault)
        assert torch.equal(y, 2 * x)


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (1, "missing_fence", "without a fence_async_shared that lets TMA see it"),
        (2, "race", "still reads it"),  # a row is written while the store of the one before reads it
        (3, "race", "returns while its store"),
        (4, "race", "still reads it"),  # a wait is for groups, and there is none
    ],
)
def test_faults_of_stores(fault: int, kind: str, text: str) -> None:
    reported("store_rows", kind, text, x=torch.ones(3, 128), y=torch.empty(3, 128), rows=3, fault=fault)


def test_stores_read_late() -> None:
    """Where races are not reported, what was written over a row is stored."""
    x, y = torch.randn(3, 128), torch.empty(3, 128)
    with rtkernels.emulate(races=False):
        run("ordering.cu", "store_rows", x=x, y=y, rows=3, fault=2)
    assert torch.equal(y, 2 * x[2].expand(3, 128))


def test_wgmma_needs_a_fence_after_writes() -> None:
    y = torch.empty(128)
    run("ordering.cu", "product_of_ones", block=128, y=y, fault=0)
    assert (y == 16).all()
    reported("product_of_ones", "missing_fence", "wgmma", block=128, y=y, fault=1)


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [(5, ("missing_fence",)), (6, ("race", "uninitialised_shared")), (7, ("missing_fence",)), (8, ())],
)
def test_fences_of_a_ring(fault: int, kinds: tuple[str, ...]) -> None:
    x, y = torch.randn(5, 128), torch.empty(5, 128)
    for order in ORDERS:
        found = None
        with rtkernels.emulate(order=order):
            try:
                run("bulk.cu", "ring_of_rows", block=64, x=x, y=y, rows=5, fault=fault)
            except EmulatorError as error:
                found = error.kind
        assert found in kinds if kinds else torch.equal(y, 2 * x), (order, found)


# ---- blocks ----------------------------------------------------------------------------------------------------------


def _ticket(fault: int) -> dict[str, Any]:
    counter = torch.zeros(1, dtype=torch.int32)
    x = torch.arange(5 * 32.0).view(5, 32)
    return {"grid": 5, "x": x, "parts": torch.empty(5, 32), "counter": counter, "y": torch.empty(32), "fault": fault}


@pytest.mark.parametrize("order", ORDERS)
def test_the_last_block_reads_what_others_fenced(order: str | int) -> None:
    for fault in (0, 3):
        arguments = _ticket(fault)
        with rtkernels.emulate(order=order):
            run("ordering.cu", "sum_by_the_last", **arguments)
        assert torch.equal(arguments["y"], arguments["x"].sum(0))
    for fault, text in ((1, "between that and its atomic"), (2, "between this block's atomic and the read")):
        with rtkernels.emulate(order=order), pytest.raises(EmulatorError, match=text) as caught:
            run("ordering.cu", "sum_by_the_last", **_ticket(fault))
        assert caught.value.kind == "missing_fence" and caught.value.buffer == "parts"


# ---- dependent launches ----------------------------------------------------------------------------------------------


def _dependent(fault: int, waits: int | None = None, arch: int = 90) -> torch.Tensor:
    """z = 2 x + 1 by two kernels, or three, of which the second only may wait."""
    x, y, z, own = torch.arange(64.0), torch.empty(64), torch.empty(64), torch.empty(64)
    run("ordering.cu", "produce", block=64, arch=arch, x=x, y=y)
    if waits is not None:
        run("ordering.cu", "between", block=64, arch=arch, overlap=True, own=own, waits=waits)
    run("ordering.cu", "consume", block=64, arch=arch, overlap=True, x=x, y=y, z=z, fault=fault)
    return z


@pytest.mark.parametrize("order", ORDERS)
def test_dependent_launches(order: str | int) -> None:
    expected = 2 * torch.arange(64.0) + 1
    with rtkernels.emulate(order=order):
        assert torch.equal(_dependent(0), expected)
        assert torch.equal(_dependent(4), expected)
        assert torch.equal(_dependent(1, arch=80), expected)  # nothing starts before its predecessor has ended
        for fault, text in ((1, "read .* may still write it"), (2, "write .* may still read it"), (3, "write")):
            with pytest.raises(EmulatorError, match=text) as caught:
                _dependent(fault)
            assert caught.value.kind == "before_wait"


def test_kernels_before_the_previous_one() -> None:
    expected = 2 * torch.arange(64.0) + 1
    assert torch.equal(_dependent(1, waits=2), expected)  # the second one started the third when the first had ended
    assert torch.equal(_dependent(0, waits=1), expected)
    with pytest.raises(EmulatorError, match="the previous kernel may still write it"):
        _dependent(1, waits=1)
    with pytest.raises(EmulatorError, match="a kernel before the previous one may still write it"):
        _dependent(0, waits=0)  # the second one's end says nothing about the first


# ---- limits and numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "block", "text"),
    [
        (1, 65, "__launch_bounds__ of the kernel allow 64"),
        (1, (1, 1, 65), "at most 64 in z"),
        (1, (2, 1024, 1), "1 to 1024 threads"),
        ((1, 65536), 32, "65535 in y and z"),
        ((1, 1, 65536), 32, "65535 in y and z"),
        (2**31, 32, "2147483647 blocks in x"),
    ],
)
def test_launch_limits(grid: Any, block: Any, text: str) -> None:
    y = torch.zeros(1)
    with pytest.raises(EmulatorError, match=text) as caught:
        run("ordering.cu", "bounded", variant=("float", "64"), grid=grid, block=block, y=y)
    assert caught.value.kind == "launch_limit" and y.item() == 0
    run("ordering.cu", "bounded", variant=("float", "64"), grid=(1, 3), block=64, y=y)
    assert y.item() == 1


def test_bounds_depend_on_template_arguments() -> None:
    y = torch.zeros(1, dtype=torch.float64)
    run("ordering.cu", "bounded", variant=("double", "64"), block=128, y=y)
    with pytest.raises(EmulatorError, match="allow 128"):
        run("ordering.cu", "bounded", variant=("double", "64"), block=160, y=y)


def test_products_and_sums_are_fused_as_by_nvrtc() -> None:
    if "-ffp-contract=off" in _build.compiler().flags:
        pytest.skip("this machine has no fused multiply-add")
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(4, 32, generator=generator), torch.empty(6, 32)
    run("ordering.cu", "contractions", grid=6, x=x, y=y)
    a, b, c, d = x.double()
    product = (a * b).float().double()  # rounded
    expected = [a * b + c, a * b - (c * d).float(), product + c, product - (c * d).float(), product + c, product - c]
    for got, wanted in zip(y, expected, strict=True):
        assert torch.equal(got, wanted.float())
    assert not torch.equal(y[0], y[2]) and not torch.equal(y[1], y[3])


# ---- threads and processes -------------------------------------------------------------------------------------------


def test_threads_emulate_their_own_target() -> None:
    """Each thread gets the kernels of its target: conversions to fp8 differ in code, rows of sm_90 in kernel."""
    from rtkernels.runtime.launch import device as device_module

    seen: dict[str, set[int]] = {"sm_80": set(), "sm_90": set()}
    original = rtkernels.emulator.bind

    def emulates(target: str) -> None:
        x, weight = torch.randn(3, 64), torch.ones(64)
        with rtkernels.emulate(target):
            for _ in range(20):
                rtkernels.rms_norm(x, weight)

    def watched(kernel: Any, variant: Any, arch: int, *args: Any, **kwargs: Any) -> Any:
        seen[f"sm_{rtkernels.emulator.active()}"].add(arch)
        time.sleep(0.001)
        assert device_module.device_info(-1).target.capability == divmod(rtkernels.emulator.active(), 10)
        return original(kernel, variant, arch, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rtkernels.emulator, "bind", watched)
        threads = [threading.Thread(target=emulates, args=(target,)) for target in seen for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {"sm_80": {80}, "sm_90": {90}}


def test_fork_while_another_thread_emulates() -> None:
    x, weight = torch.randn(64, 512), torch.ones(512)
    stop = threading.Event()

    def emulates() -> None:
        with rtkernels.emulate():
            while not stop.is_set():
                rtkernels.rms_norm(x, weight)

    with rtkernels.emulate():
        expected = rtkernels.rms_norm(x[:2], weight)
    thread = threading.Thread(target=emulates)
    thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                with rtkernels.emulate():
                    os._exit(0 if torch.equal(rtkernels.rms_norm(x[:2], weight), expected) else 1)
            until = time.monotonic() + 60
            while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
                time.sleep(0.01)
            if ended[0] == 0:
                os.kill(child, 9)
                os.waitpid(child, 0)
                pytest.fail("the child hangs")
            assert ended[1] == 0
    finally:
        stop.set()
        thread.join()
