"""The host emulator computes what the hardware computes: execution model, tensor cores, number formats."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.emulator_harness import FOLDER, FORMATS, ORDERS, needs_compiler, run

import rtkernels
from rtkernels.emulator import EmulatorError
from rtkernels.errors import ToolkitError
from rtkernels.runtime import targets
from rtkernels.runtime.build import nvrtc, sources
from rtkernels.runtime.launch.kernel import Kernel

# ---- execution model -----------------------------------------------------------------------------------------------


def _rows(n: int, width: int, fill: Any) -> torch.Tensor:
    return torch.tensor([[fill(row, i) for i in range(width)] for row in range(n)], dtype=torch.int32)


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
def test_warp_operations(order: str | int) -> None:
    def signed(value: int) -> int:
        return (value + 2**31) % 2**32 - 2**31

    expected = [
        lambda i: 15,
        lambda i: (i // 8 * 8 + (i + 1) % 8) * 3,
        lambda i: i - 3 if i >= 3 else i,
        lambda i: i + 3 if i % 16 < 13 else i,
        lambda i: i ^ 9,
        lambda i: 3 * (i ^ 1),
        lambda i: signed(sum(1 << j for j in range(0, 32, 3))),
        lambda i: 1,
        lambda i: 0,
        lambda i: signed(sum(1 << j for j in range(32) if j % 5 == i % 5)),
        lambda i: -1,
        lambda i: 1,
        lambda i: 496,
        lambda i: -31,
        lambda i: 31,
        lambda i: -1,
        lambda i: i ^ 1 if i < 16 else 16,
        lambda i: -1,
    ]
    out = torch.zeros(len(expected), 32, dtype=torch.int32)
    with rtkernels.emulate(order=order):
        run("features.cu", "warp_operations", out=out)
    assert torch.equal(out, _rows(len(expected), 32, lambda row, i: expected[row](i)))


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
def test_barriers(order: str | int) -> None:
    out = torch.zeros(5, 128, dtype=torch.int32)
    with rtkernels.emulate(order=order):
        run("features.cu", "barriers", block=128, out=out)
    expected = [lambda i: 43, lambda i: 1, lambda i: 0, lambda i: (30, 70)[i // 64], lambda i: 40 - i // 32 * 10]
    assert torch.equal(out, _rows(5, 128, lambda row, i: expected[row](i)))


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
def test_atomics(order: str | int) -> None:
    counters, total, last = torch.zeros(8, dtype=torch.int32), torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    with rtkernels.emulate(order=order):
        run("features.cu", "atomics", grid=5, block=96, counters=counters, total=total, last=last)
    assert counters.tolist() == [480, 95, -4, 255, 77, 0, 0, 0]
    assert total.item() == 240.0 and last.item() == 1


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
def test_dynamic_shared_memory_and_three_dimensions(order: str | int) -> None:
    x, y = torch.randn(12, 60), torch.empty(12, 60)
    with rtkernels.emulate(order=order):
        run("features.cu", "dynamic_shared", grid=(3, 2, 2), block=(5, 4, 3), shared=240, x=x, y=y)
    assert torch.equal(y, x.flip(1))


@needs_compiler
def test_bit_intrinsics() -> None:
    out = torch.zeros(9, 32, dtype=torch.int32)
    run("features.cu", "bit_intrinsics", out=out)
    signed = lambda v: (v + 2**31) % 2**32 - 2**31  # noqa: E731
    expected = [
        lambda t: (0xF0F0 + t).bit_count(),
        lambda t: 31 - t,
        lambda t: t + 1,
        lambda t: signed(1 << (31 - t)),
        lambda t: 0x77553311,
        lambda t: t // 2,
        lambda t: round(t + 0.5),
        lambda t: 0x3E800000,
        lambda t: 32,
    ]
    assert torch.equal(out, _rows(9, 32, lambda row, t: expected[row](t)))


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
def test_cp_async_pipeline(order: str | int) -> None:
    x, y = torch.randn(5, 128), torch.empty(5, 128)
    with rtkernels.emulate(order=order):
        run("features.cu", "pipelined_copy", x=x, y=y, rows=5)
    assert torch.equal(y, 2 * x.flip(1))


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
def test_bulk_copies_through_a_ring(order: str | int) -> None:
    x, y = torch.randn(5, 128), torch.empty(5, 128)
    with rtkernels.emulate(order=order):
        run("bulk.cu", "ring_of_rows", block=64, x=x, y=y, rows=5, fault=0)
    assert torch.equal(y, 2 * x)


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
def test_faults_of_a_ring_are_reported(order: str | int) -> None:
    kinds = {
        1: ("race", "uninitialised_shared"),  # no wait for the copies
        2: ("race", "divergent_barrier"),  # a stage is filled again while it is read, or not full yet
        3: ("divergent_barrier",),  # stages are not given back: all wait
        4: ("race", "divergent_barrier"),  # given back twice
    }
    for fault, expected in kinds.items():
        with rtkernels.emulate(order=order), pytest.raises(EmulatorError) as caught:
            run("bulk.cu", "ring_of_rows", block=64, x=torch.ones(5, 128), y=torch.empty(5, 128), rows=5, fault=fault)
        assert caught.value.kind in expected, (fault, str(caught.value))


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
def test_clusters(order: str | int) -> None:
    x, y = torch.randn(6), torch.empty(6)
    with rtkernels.emulate("sm_90", order=order):
        run("cluster.cu", "sum_of_cluster", grid=6, block=64, cluster=3, x=x, y=y, blocks=3, fault=0)
    for first in (0, 3):
        wanted = x[first] + x[first + 1] + x[first + 2]
        assert all(y[i] == wanted for i in range(first, first + 3))


@needs_compiler
@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (1, "race", "may not have started"),
        (2, "race", "no cluster barrier lies between"),
        (3, "race", "another thread of the cluster"),
        (4, "out_of_bounds", "the cluster does not have"),
        (5, "out_of_bounds", "out of bounds write"),
        (6, "divergent_barrier", "__syncthreads"),
    ],
)
def test_faults_of_clusters(fault: int, kind: str, text: str) -> None:
    for order in ORDERS:
        with rtkernels.emulate("sm_90", order=order), pytest.raises(EmulatorError, match=text) as caught:
            x, y = torch.ones(3), torch.empty(3)
            run("cluster.cu", "sum_of_cluster", grid=3, block=64, cluster=3, x=x, y=y, blocks=3, fault=fault)
        assert caught.value.kind == kind


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_that_wait_for_each_other(order: str | int) -> None:
    words = torch.zeros(6, 2, dtype=torch.int64)
    with rtkernels.emulate("sm_90", order=order):
        with pytest.raises(EmulatorError, match="waits at ld_words"):  # nobody gives the first one
            run("words.cu", "hand_on", grid=5, block=32, cluster=5, words=words)
        words[0] = torch.tensor([1, 7])
        run("words.cu", "hand_on", grid=5, block=32, cluster=5, words=words)
    assert words[-1].tolist() == [1, 7 + 0 + 1 + 2 + 3 + 4]


@needs_compiler
def test_clusters_that_do_not_divide_the_grid() -> None:
    with pytest.raises(EmulatorError, match="clusters of 4 blocks"):
        run("cluster.cu", "sum_of_cluster", grid=6, cluster=4, x=torch.ones(6), y=torch.empty(6), blocks=4, fault=0)


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
def test_arriving_at_a_barrier_without_waiting(order: str | int) -> None:
    y = torch.empty(32)
    with rtkernels.emulate(order=order):
        run("arrive.cu", "told_by_a_barrier", block=64, y=y, fault=0)
        assert torch.equal(y, 2.0 * torch.arange(31, -1, -1))
        with pytest.raises(EmulatorError) as caught:
            run("arrive.cu", "told_by_a_barrier", block=64, y=y, fault=1)
    assert caught.value.kind == "race"


@needs_compiler
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32", "e4m3", "s8"])
def test_mma_equals_matmul(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    dtype = {"fp32": torch.float32, "s8": torch.int8, **FORMATS}[kind]
    k = 32 // dtype.itemsize
    if kind == "s8":
        a, b = (torch.randint(-128, 128, (n, k), generator=generator, dtype=dtype) for n in (16, 8))
    else:
        a, b = (torch.randn(n, k, generator=generator).to(dtype) for n in (16, 8))
    d = torch.full((16, 8), float("nan"))
    c_type = {"fp32": "float", "s8": "signed char"}.get(kind, f"rtk::{kind}")
    run("features.cu", "mma_tile", variant=(c_type,), a=a, b=b, d=d)
    if kind == "fp32":  # tf32 ignores the low 13 bits
        a, b = ((t.view(torch.int32) & ~0x1FFF).view(torch.float32) for t in (a, b))
    torch.testing.assert_close(d, (a.double() @ b.double().T).float(), rtol=1e-6, atol=1e-6)


@needs_compiler
def test_ldmatrix_transposed() -> None:
    x = torch.arange(64, dtype=torch.int16).view(8, 8)
    y = torch.empty_like(x)
    run("features.cu", "transpose_tile", x=x, y=y)
    assert torch.equal(y, x.T)


# ---- numbers -------------------------------------------------------------------------------------------------------


def _sweep() -> torch.Tensor:
    """About two million fp32 values: evenly spaced bit patterns, and every 16-bit rounding boundary with its
    neighbours."""
    even = torch.arange(-(2**31), 2**31, 4099, dtype=torch.int64).to(torch.int32).view(torch.float32)
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    edges = []
    for dtype in (torch.bfloat16, torch.float16):
        values = codes.view(dtype).float()
        values = values[values.isfinite()].sort().values.double()
        middle = ((values[1:] + values[:-1]) / 2).float()  # exact in fp32, but for the smallest bf16 ones
        edges += [values.float(), middle, middle.nextafter(torch.tensor(-1e38)), middle.nextafter(torch.tensor(1e38))]
    return torch.cat([even, *edges])


def _narrowed(x: torch.Tensor, name: str, arch: int) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=FORMATS[name])
    run("features.cu", "narrow", variant=(f"rtk::{name}",), arch=arch, x=x, y=y, n=x.numel())
    return y.view(torch.int16 if name in ("bf16", "fp16") else torch.uint8).int()


@needs_compiler
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_rounding_to_16_bits(name: str) -> None:
    x = _sweep()
    got, nan = _narrowed(x, name, 90), x.isnan()
    assert torch.equal(got[~nan], x.to(FORMATS[name]).view(torch.int16).int()[~nan])
    assert (got[nan] == 0x7FFF).all()  # the instruction's only NaN; torch keeps sign and payload


@needs_compiler
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_rounding_to_8_bits(name: str, arch: int) -> None:
    x, dtype = _sweep(), FORMATS[name]
    got, nan = _narrowed(x, name, arch), x.isnan()
    largest = torch.finfo(dtype).max
    # torch overflows to NaN or infinity, the saturating instruction to the largest finite value.
    expected = x.clamp(-largest, largest).to(dtype).view(torch.uint8).int()
    assert torch.equal(got[~nan], expected[~nan])
    assert (got[nan] == 0x7F).all()


@needs_compiler
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", list(FORMATS))
def test_widening_every_code(name: str, arch: int) -> None:
    dtype = FORMATS[name]
    codes = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32)
    x = codes.to(torch.int16 if dtype.itemsize == 2 else torch.uint8).view(dtype)
    y = torch.empty(x.shape)
    run("features.cu", "widen", variant=(f"rtk::{name}",), arch=arch, x=x, y=y, n=x.numel())
    nan = x.float().isnan()
    assert torch.equal(y.isnan(), nan)
    assert torch.equal(y[~nan].view(torch.int32), x.float()[~nan].view(torch.int32))


# ---- the same kernels by NVRTC and on a GPU --------------------------------------------------------------------------


@pytest.fixture
def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device sources with the kernels of this test in folder ``emulated``."""
    shutil.copytree(sources.root(), tmp_path / "src")
    shutil.copytree(FOLDER, tmp_path / "src" / "emulated")
    monkeypatch.setattr(sources, "_root_override", tmp_path / "src")
    return "emulated/features.cu"


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a"])
def test_nvrtc_accepts_the_same_sources(target: str, test_sources: str) -> None:
    types = ["rtk::bf16", "rtk::fp16", "float", "signed char", "rtk::e4m3"]
    names = [f"rtk::mma_tile<{t}>" for t in types] + ["rtk::warp_operations", "rtk::transpose_tile", "rtk::barriers"]
    try:
        nvrtc.compile_unit(test_sources, names, targets.parse(target))
        nvrtc.compile_unit("emulated/bugs.cu", ["rtk::missing_cp_async_wait"], targets.parse(target))
    except ToolkitError as error:
        pytest.skip(str(error))


def _on_device(unit: str, name: str, variant: str, args: str, *values: Any, block: int = 1024) -> None:
    kernel = Kernel(unit, name, template="T", args=args, variants=[(variant,)], max_registers=255)
    kernel.bind((variant,), 0, 1, block)(*(v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values))


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("name", list(FORMATS))
def test_rounding_equals_the_device(name: str, test_sources: str) -> None:
    x = _sweep()
    y = torch.empty(x.shape, dtype=FORMATS[name], device="cuda")
    _on_device(test_sources, "narrow", name, "x:ptr y:ptr n:i64", x.cuda(), y, x.numel())
    bits = y.cpu().view(torch.int16 if name in ("bf16", "fp16") else torch.uint8).int()
    assert torch.equal(bits, _narrowed(x, name, 90))


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("name", list(FORMATS))
def test_widening_equals_the_device(name: str, test_sources: str) -> None:
    dtype = FORMATS[name]
    codes = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32)
    x = codes.to(torch.int16 if dtype.itemsize == 2 else torch.uint8).view(dtype)
    y, host = torch.empty(x.shape, device="cuda"), torch.empty(x.shape)
    _on_device(test_sources, "widen", name, "x:ptr y:ptr n:i64", x.cuda(), y, x.numel())
    run("features.cu", "widen", variant=(f"rtk::{name}",), x=x, y=host, n=x.numel())
    assert torch.equal(y.cpu().view(torch.int32), host.view(torch.int32))


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32", "e4m3"])
def test_mma_is_close_to_the_device(name: str, test_sources: str) -> None:
    dtype = {"fp32": torch.float32, **FORMATS}[name]
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(n, 32 // dtype.itemsize, generator=generator).to(dtype) for n in (16, 8))
    d, host = torch.empty(16, 8, device="cuda"), torch.empty(16, 8)
    _on_device(test_sources, "mma_tile", name, "a:ptr b:ptr d:ptr", a.cuda(), b.cuda(), d, block=32)
    run("features.cu", "mma_tile", variant=("float" if name == "fp32" else f"rtk::{name}",), a=a, b=b, d=host)
    torch.testing.assert_close(d.cpu(), host, rtol=1e-3 if name == "e4m3" else 1e-5, atol=1e-3)
