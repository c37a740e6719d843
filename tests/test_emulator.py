"""The host emulator: it computes what the hardware computes, and it finds planted bugs."""

from __future__ import annotations

import os
import pkgutil
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import rtkernels
import rtkernels.ops
from rtkernels import _arch, _nvrtc, _registry, _sources, emulator
from rtkernels._kernel import Kernel
from rtkernels.emulator import EmulatorError, Pointer, _build
from rtkernels.errors import ArgumentError, KernelCompileError, ToolkitError

FOLDER = Path(__file__).parent / "emulator_bugs"
ORDERS = ("forward", "reverse", 0, 1)
FORMATS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}

_reason = emulator.unavailable()
needs_compiler = pytest.mark.skipif(_reason is not None, reason=str(_reason))


@dataclass
class Record:
    """What the emulator reads of a ``Kernel``, for a unit outside ``cuda_src``."""

    unit: str
    name: str
    args: tuple[tuple[str, str], ...]
    op: str = "emulator_test"

    def expression(self, variant: tuple[str, ...]) -> str:
        return f"rtk::{self.name}" + (f"<{', '.join(variant)}>" if variant else "")


def run(
    unit: str, name: str, *, variant: tuple[str, ...] = (), grid: Any = 1, block: Any = 32, shared: int = 0,
    arch: int = 90, **args: Any,
) -> None:  # fmt: skip
    """Run one kernel of the test folder; tensors become pointers."""
    kinds = {torch.Tensor: "ptr", int: "i64", float: "f64", type(None): "ptr"}
    record = Record(str(FOLDER / unit), name, tuple((key, kinds[type(v)]) for key, v in args.items()))
    values = [Pointer.of(v) if isinstance(v, torch.Tensor) else v or 0 for v in args.values()]
    emulator.bind(record, variant, arch, grid, block, shared)(*values)


def bug(name: str, **kwargs: Any) -> EmulatorError:
    """Run a kernel with a planted bug and return the report."""
    with pytest.raises(EmulatorError) as caught:
        run("bugs.cu", name, **kwargs)
    error = caught.value
    assert error.kernel == name and error.expression == f"rtk::{name}" and str(error).startswith(f"{name}: ")
    return error


def _line(code: str, after: str = "") -> str:
    """Return ``bugs.cu:<line>`` of the first line that holds some code, below a name."""
    text = (FOLDER / "bugs.cu").read_text()
    return f"bugs.cu:{text.count(chr(10), 0, text.index(code, text.index(after))) + 1}"


# ---- planted bugs --------------------------------------------------------------------------------------------------


@needs_compiler
def test_missing_syncthreads_changes_bits_with_the_order() -> None:
    x, results = torch.arange(64.0) + 1, []
    for order in ORDERS:
        y = torch.empty(64)
        with rtkernels.emulate(order=order, races=False):
            run("bugs.cu", "missing_syncthreads", block=64, x=x, y=y)
        results.append(y)
    assert not all(torch.equal(result, results[0]) for result in results)


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
def test_missing_syncthreads_is_reported_as_race(order: str | int) -> None:
    with rtkernels.emulate(order=order):
        error = bug("missing_syncthreads", block=64, x=torch.ones(64), y=torch.empty(64))
    assert error.kind == "race" and error.buffer == "shared" and error.size == 4
    assert error.place in (_line("buffer[threadIdx.x] = x[threadIdx.x];"), _line("y[threadIdx.x] = buffer[63 -"))
    assert "no barrier lies between" in str(error)


@needs_compiler
def test_missing_syncwarp_is_reported() -> None:
    error = bug("missing_syncwarp", x=torch.ones(32), y=torch.empty(32))
    assert error.kind in ("race", "uninitialised_shared")


@needs_compiler
def test_uninitialised_shared_read_is_reported() -> None:
    error = bug("uninitialised_shared", block=64, x=torch.ones(64), y=torch.empty(64))
    assert (error.kind, error.buffer, error.size) == ("uninitialised_shared", "shared", 4)
    assert error.thread == (0, 0, 0)
    assert "that the block has not written" in str(error)
    assert error.place == _line("y[threadIdx.x] = buffer[63 -", after="uninitialised_shared")


@needs_compiler
@pytest.mark.parametrize("kernel", ["read_past_end", "write_past_end"])
def test_plain_access_past_the_end_is_reported(kernel: str) -> None:
    whole = torch.ones(256)  # the memory behind the tensors is there, but not theirs
    x, y = whole[:100], whole[128:228]
    error = bug(kernel, grid=2, block=64, x=x, y=y, n=100)
    name = "x" if "read" in kernel else "y"
    assert (error.kind, error.buffer, error.offset, error.size) == ("out_of_bounds", name, 400, 4)
    assert (error.block, error.thread) == ((1, 0, 0), (36, 0, 0))
    assert f"at byte 400 of {name} (float32 [100], 400 bytes): 0 bytes past its end" in str(error)
    assert error.place.startswith("bugs.cu:")


@needs_compiler
@pytest.mark.parametrize("kernel", ["wrapper_read_past_end", "wrapper_write_past_end"])
def test_wrapper_access_past_the_end_is_reported(kernel: str) -> None:
    error = bug(kernel, x=torch.ones(30), y=torch.ones(30), n=30)
    assert (error.kind, error.offset, error.size, error.thread) == ("out_of_bounds", 112, 16, (7, 0, 0))
    assert error.buffer == ("x" if "read" in kernel else "y")
    assert "it runs past the end" in str(error) and error.place.startswith("bugs.cu:")


@needs_compiler
def test_write_between_rows_is_reported() -> None:
    y = torch.zeros(4, 8)[:, :5]
    error = bug("write_between_rows", grid=3, block=6, y=y, cols=5, stride=8)
    assert (error.kind, error.buffer, error.offset) == ("out_of_bounds", "y", 20)
    assert "strides (8, 1)" in str(error) and "between its elements" in str(error)


@needs_compiler
def test_access_through_null_is_reported() -> None:
    error = bug("null_pointer", x=None, y=torch.empty(32))
    assert error.kind == "out_of_bounds" and error.buffer is None and "address 0x0" in str(error)


@needs_compiler
@pytest.mark.parametrize("kernel", ["misaligned_vector", "misaligned_wrapper"])
def test_misaligned_access_is_reported(kernel: str) -> None:
    if kernel == "misaligned_vector" and "clang" in _build.compiler().version:
        pytest.skip("clang copies structs as bytes, so the emulator does not see how they should be aligned")
    error = bug(kernel, block=1, x=torch.ones(16), y=torch.empty(4), offset=1)
    assert (error.kind, error.buffer, error.offset, error.size) == ("misaligned", "x", 4, 16)
    run("bugs.cu", kernel, block=1, x=torch.ones(16), y=torch.empty(4), offset=4)


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", ["barrier_after_return", "two_barriers"])
def test_divergent_barrier_is_reported(kernel: str, order: str | int) -> None:
    with rtkernels.emulate(order=order):
        error = bug(kernel, block=64, y=torch.empty(64))
    assert error.kind == "divergent_barrier" and "__syncthreads" in str(error) and "bugs.cu:" in str(error)
    assert ("has returned" in str(error)) == (kernel == "barrier_after_return")


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        ("shuffle_after_return", "has returned"),
        ("shuffle_in_branches", "waits at __shfl_sync"),
        ("shuffle_outside_mask", "which is not in the mask"),
        ("shuffle_against_barrier", "waits at __syncthreads"),
    ],
)
def test_shuffle_with_absent_lanes_is_reported(kernel: str, text: str, order: str | int) -> None:
    with rtkernels.emulate(order=order):
        error = bug(kernel, y=torch.empty(32))
    assert error.kind == "absent_lanes" and "__shfl" in str(error) and text in str(error)


@needs_compiler
def test_shuffle_in_a_partial_warp_is_reported() -> None:
    error = bug("shuffle_in_branches", block=20, y=torch.empty(32))
    assert error.kind == "absent_lanes" and "the block does not have" in str(error)


@needs_compiler
def test_missing_cp_async_wait_is_reported() -> None:
    error = bug("missing_cp_async_wait", x=torch.ones(128), y=torch.empty(32))
    assert error.kind == "uninitialised_shared"


@needs_compiler
def test_dynamic_shared_memory_is_bounded_by_the_launch() -> None:
    error = bug("dynamic_shared_too_small", shared=64, y=torch.empty(32))
    assert (error.kind, error.buffer, error.offset, error.thread) == ("out_of_bounds", "shared", 64, (16, 0, 0))
    assert bug("dynamic_shared_too_small", shared=232_000, arch=80, y=torch.empty(32)).kind == "launch_limit"
    run("bugs.cu", "dynamic_shared_too_small", shared=128, y=torch.empty(32))


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
    shutil.copytree(_sources.root(), tmp_path / "src")
    shutil.copytree(FOLDER, tmp_path / "src" / "emulated")
    monkeypatch.setattr(_sources, "_root_override", tmp_path / "src")
    return "emulated/features.cu"


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a"])
def test_nvrtc_accepts_the_same_sources(target: str, test_sources: str) -> None:
    types = ["rtk::bf16", "rtk::fp16", "float", "signed char", "rtk::e4m3"]
    names = [f"rtk::mma_tile<{t}>" for t in types] + ["rtk::warp_operations", "rtk::transpose_tile", "rtk::barriers"]
    try:
        _nvrtc.compile_unit(test_sources, names, _arch.parse(target))
        _nvrtc.compile_unit("emulated/bugs.cu", ["rtk::missing_cp_async_wait"], _arch.parse(target))
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


# ---- the library's own kernels ---------------------------------------------------------------------------------------

OPS = sorted(module.name for module in pkgutil.iter_modules(rtkernels.ops.__path__) if module.name[0] != "_")


@pytest.mark.parametrize("op", OPS)
def test_every_instruction_has_a_host_version(op: str) -> None:
    for kernel in _registry.get(op).kernels:
        if kernel.emulated is not True:
            assert kernel.emulated  # the reason why not
            continue
        for name, content in _sources.closure(kernel.unit).items():
            if not (_build.INCLUDE / name).is_file():
                instructions = re.findall(r'\basm\b[\s\w]*\(\s*"([^"]*)"', content.decode())
                assert not any(instructions), name


@needs_compiler
@pytest.mark.parametrize("features", ["sm_80", "sm_90"])
@pytest.mark.parametrize("op", OPS)
def test_op_gives_the_same_bits_in_every_order(op: str, features: str) -> None:
    for torch_op, args in _registry.get(op).samples("cpu"):
        results = []
        for order in ORDERS:
            with rtkernels.emulate(features, order):
                out = torch_op(*args)
            results.append([t.reshape(-1).view(torch.uint8) for t in (out if isinstance(out, tuple | list) else [out])])
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# ---- around it -------------------------------------------------------------------------------------------------------


def test_missing_compiler_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolkitError, match=r"needs a C\+\+17 compiler.*CXX='no-such-compiler' does not run"):
        run("features.cu", "widen", variant=("rtk::bf16",))
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "install one (apt install g++" in str(emulator.unavailable())


@needs_compiler
def test_compile_error_names_the_line(tmp_path: Path) -> None:
    unit = tmp_path / "broken.cu"
    unit.write_text('#include "common/abi.cuh"\nnamespace rtk { __global__ void broken(float* y) { y = nonsense; } }\n')
    record = Record(str(unit), "broken", (("y", "ptr"),))
    with pytest.raises(KernelCompileError, match=r"broken.cu:2.*nonsense"):
        emulator.bind(record, (), 90, 1, 32)(Pointer.of(torch.zeros(1)))


@needs_compiler
def test_objects_are_cached(cache_dir: Path) -> None:
    y = torch.empty(32)
    run("bugs.cu", "dynamic_shared_too_small", shared=128, y=y)
    entries = sorted(p.name.split("-")[0] for p in cache_dir.glob("v1/emulator-*/*"))
    assert entries == ["emulator_runtime", "emulator_test"]
    _build._built.clear()
    os.environ["CXX"], before = "/bin/false", os.environ.get("CXX")
    try:  # a hit needs the compiler's version, nothing else
        with pytest.raises(ToolkitError):
            run("bugs.cu", "dynamic_shared_too_small", shared=128, y=y)
    finally:
        os.environ.pop("CXX") if before is None else os.environ.update(CXX=before)


@needs_compiler
def test_works_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTKERNELS_CACHE", "off")
    _build._built.clear()
    y = torch.empty(32)
    run("bugs.cu", "dynamic_shared_too_small", shared=128, y=y)
    assert (y == 1).all()


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RTKERNELS_EMULATE", raising=False)
    assert emulator.active() is None
    with rtkernels.emulate("sm_80"):
        assert emulator.active() == 80
        with rtkernels.emulate(order=3):
            assert emulator.active() == 90 and emulator.settings().order == 3
        assert emulator.active() == 80
    assert emulator.active() is None
    monkeypatch.setenv("RTKERNELS_EMULATE", "1")
    assert emulator.active() == 90
    monkeypatch.setenv("RTKERNELS_EMULATE", "sm_80")
    assert emulator.active() == 80
    for wrong in ({"order": "sideways"}, {"order": -1}, {"features": "sm_120"}):
        with pytest.raises(ArgumentError):
            rtkernels.emulate(**wrong)


def test_recording_knows_tensors_and_poisons_new_memory() -> None:
    with emulator.recording():
        x = torch.empty(5, 3)
        pointer = x.data_ptr()
        assert torch.empty_like(x, dtype=torch.bfloat16).isnan().all()
        assert (x.new_empty(4, dtype=torch.int32) == -1).all()
        assert torch.zeros(2).sum() == 0
    assert x.isnan().all() and isinstance(pointer, Pointer) and pointer.tensor is x
    assert (pointer + 4).tensor is x and pointer + 4 == x.data_ptr() + 4


@needs_compiler
def test_foreign_pointer_is_refused() -> None:
    record = Record(str(FOLDER / "bugs.cu"), "barrier_after_return", (("y", "ptr"),))
    with pytest.raises(TypeError, match="pointer y comes from no tensor"):
        emulator.bind(record, (), 90, 1, 32)(torch.empty(32).data_ptr())


@needs_compiler
def test_overlapping_tensors_share_their_memory() -> None:
    whole = torch.arange(64.0)
    run("features.cu", "dynamic_shared", block=32, shared=128, x=whole[:32], y=whole[16:48])
    expected = torch.cat([torch.arange(16.0), torch.arange(31.0, -1, -1), torch.arange(48.0, 64)])
    assert torch.equal(whole, expected)
