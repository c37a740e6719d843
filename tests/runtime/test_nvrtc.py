"""NVRTC: flags, headers, compile errors, resource report. All without a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.interpreter import run_python
from support.places import compiled_for

import rtkernels
from rtkernels.errors import ArgumentError, KernelCompileError, ToolkitError
from rtkernels.runtime import env, targets
from rtkernels.runtime.build import nvrtc as nvrtc_module
from rtkernels.runtime.build import sources as sources_module
from rtkernels.runtime.build import store as store_module
from rtkernels.runtime.build.nvrtc import Resources

UNIT = """#include "common/scale.cuh"
namespace rtk {
template <typename T> __global__ void scale(T* x, long long n) {
    __shared__ T buffer[32];
    buffer[threadIdx.x % 32] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = buffer[(threadIdx.x + 1) % 32] * kScale;
}
}
"""
# `inline`: NVRTC puts the current directory and the pid into the names of internal symbols.
HEADER = "#pragma once\nnamespace rtk { inline constexpr int kScale = 2; }\n"
HALF = """#include <cuda_fp16.h>
namespace rtk { __global__ void half_up(__half* x) { x[0] = __hadd(x[0], x[0]); } }
"""
FLOAT = "rtk::scale<float>"
SM80, SM90A = targets.parse("sm_80"), targets.parse("sm_90a")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    root = tmp_path / "cuda_src"
    monkeypatch.setattr(sources_module, "_root_override", root)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    nvrtc_module._write_log.cache_clear()

    def write(name, text):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("norm/scale.cu", UNIT)
    write("common/scale.cuh", HEADER)
    write("norm/half.cu", HALF)
    return write


@pytest.fixture
def nvrtc(tree):
    pytest.importorskip("cupy")
    return tree


@pytest.fixture
def unbound():
    """Run with an NVRTC binding that is looked up again, before and after."""
    nvrtc_module._binding.cache_clear()
    yield
    nvrtc_module._binding.cache_clear()


@pytest.mark.parametrize("name", targets.CI_TARGETS)
def test_nvrtc_compiles_every_ci_target(nvrtc, name):
    expressions = [FLOAT, "rtk::scale<double>"]
    compiled = nvrtc_module.compile_unit("norm/scale.cu", expressions, compiled_for(name))
    assert compiled.image.startswith(b"\x7fELF")
    assert compiled.names == {FLOAT: "_ZN3rtk5scaleIfEEvPT_x", "rtk::scale<double>": "_ZN3rtk5scaleIdEEvPT_x"}
    assert list(compiled.resources) == expressions
    used = compiled.resources[FLOAT]
    assert used.registers > 0
    assert used.spill_stores == used.spill_loads == used.stack == 0
    # From sm_100 on ptxas counts 1 KB that the system keeps.
    assert used.shared % 1024 == 128
    assert compiled.ptx is None


def test_nvrtc_ptx_target_gives_ptx(nvrtc):
    compiled = nvrtc_module.compile_unit("norm/scale.cu", [FLOAT], targets.parse("compute_90"))
    assert b".target sm_90" in compiled.image
    assert compiled.names[FLOAT].encode() in compiled.image
    assert compiled.resources == {}


def test_nvrtc_ptx_text(nvrtc):
    text = nvrtc_module.ptx("norm/scale.cu", [FLOAT], SM80)
    assert ".target sm_80" in text
    assert "\0" not in text


def test_nvrtc_compiles_the_sources_it_is_given(nvrtc):
    sources = {**sources_module.closure("norm/scale.cu"), "common/scale.cuh": HEADER.replace("2", "3").encode()}
    given = nvrtc_module.compile_unit("norm/scale.cu", [FLOAT], SM80, sources=sources)
    assert given.image != nvrtc_module.compile_unit("norm/scale.cu", [FLOAT], SM80).image


def test_nvrtc_image_does_not_depend_on_the_current_directory(nvrtc, tmp_path, monkeypatch):
    before = nvrtc_module.compile_unit("norm/scale.cu", [FLOAT], SM80).image
    for planted in (tmp_path / "common", tmp_path / "norm" / "common"):
        planted.mkdir(parents=True)
        (planted / "scale.cuh").write_text("#error planted")
    monkeypatch.chdir(tmp_path)
    assert nvrtc_module.compile_unit("norm/scale.cu", [FLOAT], SM80).image == before


def test_nvrtc_flags_by_architecture(tree):
    assert nvrtc_module.flags_for(SM90A) == ["-arch=sm_90a", "--std=c++17", "-default-device"]
    assert nvrtc_module.flags_for(targets.parse("compute_90"))[0] == "-arch=compute_90"
    assert nvrtc_module.flags_for(SM80, ["--use_fast_math"])[-1] == "--use_fast_math"
    assert not any("fast" in flag or "ftz" in flag for flag in nvrtc_module.flags_for(SM80))


def test_nvrtc_lineinfo_is_a_flag_only_when_asked(tree, monkeypatch):
    assert "-lineinfo" not in nvrtc_module.flags_for(SM80)
    monkeypatch.setenv("RTKERNELS_LINEINFO", "1")
    assert "-lineinfo" in nvrtc_module.flags_for(SM80)


@pytest.mark.parametrize("flag", ["--pch", "--pch-dir=x", "-I/usr", "--include-path=x", "-arch=sm_80"])
def test_nvrtc_message_forbidden_flag(tree, flag):
    with pytest.raises(ArgumentError, match=f"compiler option '{flag}' is not allowed"):
        nvrtc_module.flags_for(SM80, [flag])


def test_nvrtc_message_compile_error(nvrtc):
    nvrtc("common/scale.cuh", "#pragma once\nint unused_warning() { int x; return 0; }\nint y = zork;\n")
    with pytest.raises(KernelCompileError) as caught:
        nvrtc_module.compile_unit("norm/scale.cu", [FLOAT], SM90A, op="scale")
    error, lines = caught.value, str(caught.value).splitlines()
    assert lines[0].startswith("scale: norm/scale.cu does not compile for sm_90a (NVRTC ")
    assert lines[1] == f"  kernel: {FLOAT}"
    assert lines[2] == '    common/scale.cuh(3): error: identifier "zork" is undefined'
    assert len(lines[2:5]) == 3
    assert lines[5] == f"  full log: {error.log_path}"
    assert "python -m rtkernels doctor" in lines[6]
    assert Path(error.log_path).read_text().strip() == error.log
    assert "kScale" in error.log


def test_nvrtc_repeated_compile_error_writes_one_log(nvrtc):
    nvrtc("common/scale.cuh", "#error no\n")
    paths = set()
    for _ in range(2):
        with pytest.raises(KernelCompileError) as caught:
            nvrtc_module.compile_unit("norm/scale.cu", [FLOAT], SM90A)
        paths.add(caught.value.log_path)
    assert len(paths) == 1


def test_nvrtc_message_compile_error_without_a_place_for_the_log(nvrtc, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "write", full)
    nvrtc("common/scale.cuh", "#error no\n")
    with pytest.raises(KernelCompileError, match=r"not be written \(.*No space left on device") as caught:
        nvrtc_module.compile_unit("norm/scale.cu", [FLOAT], SM90A)
    assert caught.value.log_path is None
    assert "#error" in caught.value.log


def test_nvrtc_message_unknown_kernel_name(nvrtc):
    with pytest.raises(KernelCompileError, match='has no member "nope"'):
        nvrtc_module.compile_unit("norm/scale.cu", ["rtk::nope<float>"], SM80)


def test_nvrtc_message_from_ptxas(nvrtc):
    nvrtc("norm/w.cu", '__global__ void w() { asm volatile("wgmma.fence.sync.aligned;"); }')
    with pytest.raises(KernelCompileError, match=r"'wgmma\.fence' not supported on \.target 'sm_90'"):
        nvrtc_module.compile_unit("norm/w.cu", ["w"], targets.parse("sm_90"))
    nvrtc_module.compile_unit("norm/w.cu", ["w"], SM90A)


def test_nvrtc_message_unknown_target(nvrtc, monkeypatch):
    monkeypatch.setattr(nvrtc_module, "supported_archs", lambda: [80, 90])
    with pytest.raises(ToolkitError, match=r"cannot compile for sm_120a: it knows sm_80, sm_90\. Choose"):
        nvrtc_module.compile_unit("norm/scale.cu", [FLOAT], targets.parse("sm_120a"))


def test_nvrtc_toolkit_header_compiles_with_fitting_headers(nvrtc):
    try:
        nvrtc_module.include_directory(["cuda_fp16.h"])
    except ToolkitError as error:
        pytest.skip(f"no fitting CUDA headers here: {error}")
    compiled = nvrtc_module.compile_unit("norm/half.cu", ["rtk::half_up"], SM80)
    assert compiled.image.startswith(b"\x7fELF")


def _headers(directory, cudart):
    directory.mkdir()
    (directory / "cuda_fp16.h").touch()
    (directory / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {cudart}\n")
    return directory


def test_nvrtc_message_header_version_mismatch(nvrtc, tmp_path, monkeypatch):
    wrong = _headers(tmp_path / "include", 11080)
    monkeypatch.setenv("RTKERNELS_CUDA_INCLUDE", str(wrong))
    major, minor = nvrtc_module.version()
    with pytest.raises(ToolkitError) as caught:
        nvrtc_module.compile_unit("norm/half.cu", ["rtk::half_up"], SM80)
    message = str(caught.value)
    assert message.startswith(f"NVRTC is {major}.{minor} (")
    assert f"but the CUDA headers are 11.8 ({wrong})" in message
    assert f"=={major}.{minor}.*` or set RTKERNELS_CUDA_INCLUDE" in message


def test_nvrtc_message_headers_missing(nvrtc, tmp_path, monkeypatch):
    monkeypatch.setenv("RTKERNELS_CUDA_INCLUDE", str(tmp_path))
    with pytest.raises(ToolkitError, match=r"headers cuda_fp16\.h were not found in .*; install `nvidia-cuda"):
        nvrtc_module.compile_unit("norm/half.cu", ["rtk::half_up"], SM80)


@pytest.mark.parametrize(
    ("version", "package"),
    [((12, 9), "nvidia-cuda-runtime-cu12==12.9"), ((13, 0), "nvidia-cuda-runtime==13.0")],
)
def test_nvrtc_header_remedy_names_the_right_package(tree, tmp_path, monkeypatch, version, package):
    monkeypatch.setattr(nvrtc_module, "version", lambda: version)
    monkeypatch.setenv("RTKERNELS_CUDA_INCLUDE", str(tmp_path))
    with pytest.raises(ToolkitError, match=package):
        nvrtc_module.include_directory(["cuda_fp16.h"])


def test_nvrtc_headers_of_the_right_version_win_over_nearer_ones(tree, tmp_path, monkeypatch):
    near, far = _headers(tmp_path / "near", 13000), _headers(tmp_path / "far", 12090)
    monkeypatch.setattr(nvrtc_module, "version", lambda: (12, 9))
    monkeypatch.setattr(nvrtc_module, "_header_candidates", lambda: [tmp_path / "none", near, far])
    assert nvrtc_module.include_directory(["cuda_fp16.h"]) == far


def test_nvrtc_units_without_toolkit_headers_need_none(nvrtc, tmp_path, monkeypatch):
    monkeypatch.setenv("RTKERNELS_CUDA_INCLUDE", str(tmp_path / "nowhere"))
    nvrtc_module.compile_unit("norm/scale.cu", [FLOAT], SM80)


def test_nvrtc_message_cupy_missing(monkeypatch, unbound):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ToolkitError, match=r"CuPy cannot be imported .*pip install cupy-cuda13x nvidia-cuda-nvrtc`"):
        nvrtc_module.version()


def test_nvrtc_message_nvrtc_missing(monkeypatch, unbound):
    pytest.importorskip("cupy")
    import cupy_backends.cuda.libs as libs

    class Broken:
        @staticmethod
        def getVersion():
            raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(libs, "nvrtc", Broken, raising=False)
    with pytest.raises(ToolkitError, match=r"NVRTC cannot be loaded \(RuntimeError: libnv.*nvidia-cuda-nvrtc"):
        nvrtc_module.version()


def test_nvrtc_cupy_imports_where_its_cache_cannot_be_made(tmp_path):
    pytest.importorskip("cupy")
    home = tmp_path / "home"
    home.write_text("a file, so nothing can be created below it")
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(Path(rtkernels.__file__).parent.parent)}
    environment.pop("CUPY_CACHE_DIR", None)
    code = (
        "import os; from rtkernels.runtime.build import nvrtc; nvrtc.import_cupy();"
        "path = os.environ['CUPY_CACHE_DIR'];"
        "assert os.path.isdir(path); print(path)"
    )
    done = run_python("-c", code, env=environment)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).exists()


def test_nvrtc_resources_are_parsed_per_kernel():
    log = """
ptxas info    : 4 bytes gmem
ptxas info    : Compiling entry function '_Z1av' for 'sm_80'
ptxas info    : Function properties for _Z1av
ptxas         .     472 bytes stack frame, 816 bytes spill stores, 812 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 472 bytes cumulative stack size, 512 bytes smem, 364 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Compile time = 115.174 ms
ptxas info    : Function properties for helper
ptxas         .     8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function '_Z1bv' for 'sm_80'
ptxas info    : Function properties for _Z1bv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, 360 bytes cmem[0]
"""  # noqa: E501
    assert nvrtc_module.parse_resources(log) == {
        "_Z1av": Resources(32, spill_stores=816, spill_loads=812, stack=472, shared=512, constant=372),
        "helper": Resources(stack=8),
        "_Z1bv": Resources(8, constant=360),
    }
    assert nvrtc_module.parse_resources("") == {}
