"""The host emulator finds planted bugs, runs the library's kernels, and fits in with the cache and the settings."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.samples import samples_of
from support.emulator_harness import FOLDER, ORDERS, Record, needs_compiler, run
from support.ops import op_named

import rtkernels
import rtkernels.ops
from rtkernels import emulator
from rtkernels.emulator import EmulatorError, Pointer, _build
from rtkernels.errors import ArgumentError, KernelCompileError, ToolkitError
from rtkernels.runtime.build import sources
from rtkernels.runtime.operator import registry


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


def test_places_of_an_entry_that_another_checkout_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "/other/rtkernels/emulator/include/ptx/mma.cuh:12\n/other/cuda_src/norm/../norm/rms_norm.cu:5 (inlined)\n"
    lines += "/other/tests/emulator/bugs.cu:7\n??:0\n"
    answer = subprocess.CompletedProcess([], 0, stdout=lines)
    monkeypatch.setattr(_build.shutil, "which", lambda name: name)
    monkeypatch.setattr(_build.subprocess, "run", lambda *args, **more: answer)
    assert _build.locate(Path("kernel.so"), 16) == "norm/rms_norm.cu:5, from bugs.cu:7"


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


# ---- the library's own kernels ---------------------------------------------------------------------------------------

OPS = [op.name for op in registry.ops()]


@pytest.mark.parametrize("op", OPS)
def test_every_instruction_has_a_host_version(op: str) -> None:
    for kernel in op_named(op).kernels:
        if kernel.emulated is not True:
            assert kernel.emulated  # the reason why not
            continue
        for name, content in sources.closure(kernel.unit).items():
            if not (_build.INCLUDE / name).is_file():
                instructions = re.findall(r'\basm\b[\s\w]*\(\s*"([^"]*)"', content.decode())
                assert not any(instructions), name


def _cloned(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_cloned(item) for item in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, tuple | list):
        return [t for item in value for t in _tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


@pytest.mark.one_in(12)
@needs_compiler
@pytest.mark.parametrize("place", ["sm_80", "sm_90"])
@pytest.mark.parametrize("op", [pytest.param(op, marks=pytest.mark.slow) if op == "attention" else op for op in OPS])
def test_op_gives_the_same_bits_in_every_order(op: str, place: str) -> None:
    for torch_op, args in samples_of(op, "cpu"):
        results = []
        for order in ORDERS:
            given = _cloned(args)  # some operators write in place
            with rtkernels.emulate(place, order):
                out = torch_op(*given)
            results.append([t.reshape(-1).view(torch.uint8) for t in _tensors((out, given))])
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
@pytest.mark.one_in(1000)
def test_objects_are_cached(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.empty(32)
    run("bugs.cu", "dynamic_shared_too_small", shared=128, y=y)
    entries = sorted(p.name.split("-")[0] for p in cache_dir.glob("v*/emulator-*/*"))
    assert entries == ["emulator_runtime", "emulator_test"]

    def fail(*args: Any) -> None:
        raise AssertionError("compiled again")

    _build._built.clear()
    monkeypatch.setattr(_build, "_compile", fail)
    run("bugs.cu", "dynamic_shared_too_small", shared=128, y=y)
    with pytest.raises(AssertionError, match="compiled again"):
        run("bugs.cu", "dynamic_shared_too_small", shared=128, arch=80, y=y)


@needs_compiler
@pytest.mark.one_in(3)
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
    for wrong in ({"order": "sideways"}, {"order": -1}, {"features": "sm_130"}):
        with pytest.raises(ArgumentError):
            rtkernels.emulate(**wrong)


def test_recording_knows_tensors_and_poisons_new_memory() -> None:
    with emulator.recording():
        x = torch.empty(5, 3)
        pointer = x.data_ptr()
        assert torch.empty_like(x, dtype=torch.bfloat16).isnan().all()
        for small in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float64):
            assert torch.empty(7, dtype=small).double().isnan().all()
        for whole in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):  # no index, no "unused"
            fresh = x.new_empty(5, dtype=whole).long()
            assert not ((fresh == -1) | (fresh == 0)).any() and (whole.itemsize < 4 or (fresh > 2**30).all())
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
