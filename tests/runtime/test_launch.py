"""The way from a record to a launch: streams, graphs, threads, forks, missing parts."""

from __future__ import annotations

import ctypes
import os
import random
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.compare import assert_same_bits
from support.interpreter import run_python
from support.ways import assert_equal_bits, captured

import rtkernels
from rtkernels.errors import NotWarmError, ResidencyError, ToolkitError
from rtkernels.ops.norm import rms_norm
from rtkernels.ops.norm import rms_norm_plan as plans
from rtkernels.ops.shared import column_sum
from rtkernels.runtime import targets
from rtkernels.runtime.build import cache as build_cache
from rtkernels.runtime.build import nvrtc
from rtkernels.runtime.launch import driver
from rtkernels.runtime.launch import kernel as kernel_module
from rtkernels.runtime.launch import plans as plans_module
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.tensor_map import TensorMap
from rtkernels.runtime.operator import operator as operator_module
from rtkernels.runtime.operator import plan as plan_module

ROOT = Path(__file__).parents[2]


def _inputs(rows: int = 64, cols: int = 256) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(rows * cols)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    return normal(rows, cols), normal(cols), normal(rows, cols)


# ---- without a GPU --------------------------------------------------------------------------------------------------


def test_a_grid_of_no_blocks_is_no_launch() -> None:
    """The driver refuses one: plans leave it out, for every kernel."""
    for device in (-1, 0):
        launches = [column_sum._KERNEL.bind(("fp32",), device, grid, 32) for grid in (0, (3, 0), (1, 1, 0))]
        steps = plan_module.Steps(*(plan_module.Step(launch, "x") for launch in launches))
        assert steps.steps == ()
        launches[0](0, 0)


def test_fallback_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*args):
        raise ToolkitError("CuPy is missing")

    op, args = rms_norm.FORWARD, (torch.randn(2, 8), None, 1e-6, 0.0)
    monkeypatch.setattr(op, "launch", broken)
    with pytest.raises(ToolkitError, match="CuPy is missing"):
        op._run_cuda(*args)
    monkeypatch.setenv("RTKERNELS_FALLBACK", "torch")
    for _ in range(2):
        torch.testing.assert_close(op._run_cuda(*args), op.reference(*args))
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == ["rms_norm_fwd runs as plain torch (RTKERNELS_FALLBACK=torch): CuPy is missing"]
    operator_module._fell_back.clear()


def test_missing_cupy_says_which_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ToolkitError, match="pip install cupy-cuda13x nvidia-cuda-nvrtc"):
        nvrtc.import_cupy()


def test_fork_gets_fresh_locks() -> None:
    kernel = plans._FWD
    with kernel._lock:  # as if another thread were loading it
        pid = os.fork()
        if pid == 0:
            os._exit(0 if kernel._lock.acquire(blocking=False) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.one_in(3)
def test_a_fresh_process_on_cpu_loads_no_cupy() -> None:
    code = (
        "import sys, torch, rtkernels\n"
        "rtkernels.rms_norm(torch.randn(4, 8), torch.randn(8))\n"
        "assert 'cupy' not in sys.modules and not torch.cuda.is_initialized()"
    )
    done = run_python("-c", code, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


# ---- on the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_graph_capture_and_replay_with_backward() -> None:
    x, weight, dy = _inputs(300, 1024)

    def run() -> tuple[torch.Tensor, ...]:
        return rms_norm.FORWARD(x, weight, 1e-6, 0.0), *rms_norm.BACKWARD(dy, x, weight, None, 1e-6, 0.0, True)

    replay = captured(run)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        assert_equal_bits(replay(), run())


@pytest.mark.gpu
def test_autograd_in_a_graph() -> None:
    x, weight, dy = _inputs(128, 512)
    leaves = [t.requires_grad_() for t in (x, weight)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            torch.autograd.grad(rtkernels.rms_norm(*leaves), leaves, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(rtkernels.rms_norm(*leaves), leaves, dy)
    graph.replay()
    for got, wanted in zip(captured, torch.autograd.grad(rtkernels.rms_norm(*leaves), leaves, dy), strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.gpu
def test_a_miss_during_capture_names_the_remedy() -> None:
    x = torch.randn(3, 24, device="cuda", dtype=torch.float16)
    plans_module.Plans.forget_all()
    saved, plans._FWD._functions = plans._FWD._functions, {}
    try:
        with pytest.raises(NotWarmError, match="call the op once with tensors of the same shapes"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                rtkernels.rms_norm(x)
    finally:
        plans._FWD._functions = saved
    torch.cuda.synchronize()
    assert rtkernels.rms_norm(x).shape == x.shape


@pytest.mark.gpu
def test_two_streams() -> None:
    sets = [_inputs(2048, 2048 + 1024 * i) for i in range(2)]

    def run(x, weight, dy):
        return rms_norm.FORWARD(x, weight, 1e-6, 0.0), *rms_norm.BACKWARD(dy, x, weight, None, 1e-6, 0.0, True)

    wanted = [run(*tensors) for tensors in sets]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in sets]
    results = [[], []]
    for _ in range(10):
        for tensors, stream, into in zip(sets, streams, results, strict=True):
            with torch.cuda.stream(stream):
                into.append(run(*tensors))
    torch.cuda.synchronize()
    for expected, got in zip(wanted, results, strict=True):
        for outputs in got:
            for a, b in zip(outputs, expected, strict=True):
                assert_same_bits(a, b)


@pytest.mark.gpu
def test_threads_without_a_context_of_their_own() -> None:
    x, weight, dy = _inputs(64, 512)
    wanted = rms_norm.BACKWARD(dy, x, weight, None, 1e-6, 0.0, True)
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                for a, b in zip(rms_norm.BACKWARD(dy, x, weight, None, 1e-6, 0.0, True), wanted, strict=True):
                    assert_same_bits(a, b)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.gpu
def test_driver_launch_in_a_thread_that_made_no_cuda_call() -> None:
    """torch's allocator serves cached memory without a CUDA call, so the launch may be the thread's first."""
    x, weight, _ = _inputs(8, 256)
    partial = torch.randn(4, 64, device="cuda")
    out, y = torch.empty(64, device="cuda"), torch.empty_like(x)
    sum_launch = column_sum._KERNEL.bind(("fp32",), 0, 2, 256, 1024, overlap=True)
    norm_launch = plans._FWD.bind(("bf16", "bf16", 8, 1, False), 0, 2, 128)
    failures: list[BaseException] = []

    def work(launch, args) -> None:
        try:
            launch(*args)
        except BaseException as error:
            failures.append(error)

    norm_args = (x.data_ptr(), 0, weight.data_ptr(), y.data_ptr(), 0, 8, 256, 256, 0, 32, 1e-6, 0.0)
    for launch, args in ((sum_launch, (partial.data_ptr(), out.data_ptr(), 4, 64, 0)), (norm_launch, norm_args)):
        thread = threading.Thread(target=work, args=(launch, args))
        thread.start()
        thread.join()
    torch.cuda.synchronize()
    assert not failures
    torch.testing.assert_close(out, partial.sum(0))
    assert_same_bits(y, rtkernels.rms_norm(x, weight))


@pytest.mark.gpu
def test_every_visible_device() -> None:
    wanted = None
    for device in range(torch.cuda.device_count()):
        x = torch.ones(4, 256, device=f"cuda:{device}", dtype=torch.bfloat16)
        y = rtkernels.rms_norm(x)
        assert y.get_device() == device
        wanted = y.cpu() if wanted is None else wanted
        assert_same_bits(y.cpu(), wanted)


@pytest.mark.gpu
def test_memory_only_when_the_cache_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTKERNELS_CACHE", "off")
    build_cache.forget()
    plans_module.Plans.forget_all()
    saved, plans._FWD_LONG._functions = plans._FWD_LONG._functions, {}
    try:
        x = torch.randn(3, 33, device="cuda")
        torch.testing.assert_close(rtkernels.rms_norm(x), rms_norm.FORWARD.reference(x, None, 1e-6, 0.0))
    finally:
        plans._FWD_LONG._functions = saved
        plans_module.Plans.forget_all()
        build_cache.forget()


@pytest.mark.gpu
def test_more_blocks_than_can_be_resident_are_refused() -> None:
    partial, out = torch.randn(4, 64, device="cuda"), torch.empty(64, device="cuda")
    arguments = (partial.data_ptr(), out.data_ptr(), 4, 64, 0)
    most = column_sum._KERNEL.max_resident_blocks(("fp32",), 0, 256, 1024)
    assert most >= torch.cuda.get_device_properties(0).multi_processor_count
    launch = column_sum._KERNEL.bind(("fp32",), 0, most + 1, 256, 1024, resident=True)
    for _ in range(2):
        with pytest.raises(ResidencyError, match=f"{most + 1} blocks of 256 threads must run at the same time"):
            launch(*arguments)
    column_sum._KERNEL.bind(("fp32",), 0, 2, 256, 1024, resident=True)(*arguments)
    torch.testing.assert_close(out, partial.sum(0))


def test_kernels_of_one_call_are_compiled_together(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rtkernels.ops.quant.quantize_fp8_kernels import AMAX, TENSOR
    from rtkernels.runtime import targets
    from rtkernels.runtime.build import cache as build_cache
    from rtkernels.runtime.launch import device as device_module
    from rtkernels.runtime.launch import kernel as kernel_module

    target = targets.parse("sm_90a")
    monkeypatch.setenv("RTKERNELS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build_cache._state, "memory", {})
    h200 = device_module.DeviceInfo("H200", target, 132, 232448)
    monkeypatch.setattr(kernel_module, "device_info", lambda device: h200)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    wanted = (AMAX, ("bf16", 8)), (TENSOR, ("bf16", "e4m3", 8))
    for kernel, _ in wanted:  # which other tests may have loaded on a GPU
        monkeypatch.setattr(kernel, "_functions", {})
    before = build_cache.stats.compiles
    for _ in range(2):  # the second time everything is there
        kernel_module.build_together(0, *wanted)
        assert build_cache.stats.compiles == before + 2


class _Driver:
    """In the place of CUDA's: notes configuration and arguments of every launch, read where a GPU would read them."""

    CUDADriverError = RuntimeError

    def __init__(self, kinds: str, maps: int, *, struct: bool) -> None:
        self.kinds, self.maps, self.struct, self.stream, self.seen = kinds, maps, struct, 0, []

    def _read(self, table: int) -> list[float]:
        words = ctypes.cast(table, ctypes.POINTER(ctypes.c_uint64))
        count = len(self.kinds)
        places = [words[self.maps + i] for i in range(1 if self.struct else count)]
        places = [places[0] + 8 * i for i in range(count)] if self.struct else places
        values = [struct.unpack("=" + k, ctypes.string_at(p, 8))[0] for k, p in zip(self.kinds, places, strict=True)]
        return [*(words[i] for i in range(self.maps)), *values]

    def launchKernel(self, function, x, y, z, block, _y, _z, shared, stream, table, _extra) -> None:
        self.seen.append(((x, y, z, block, shared, stream), self._read(table)))

    def launch_kernel_ex(self, config: int, function: int, table: int, extra: int) -> int:
        x, y, z, block, _, _, shared, stream, _, _ = driver._CONFIG.unpack(
            ctypes.string_at(config, driver._CONFIG.size)
        )
        self.seen.append(((x, y, z, block, shared, stream), self._read(table)))
        return 0


@pytest.fixture
def on_a_driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], _Driver]:
    def start(kinds: str, maps: int = 0, *, struct: bool = False) -> _Driver:
        fake = _Driver(kinds, maps, struct=struct)
        monkeypatch.setattr(driver, "_driver", lambda: fake)
        monkeypatch.setattr(driver, "_launch_kernel_ex", lambda: fake.launch_kernel_ex)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: fake.stream, raising=False)
        return fake

    return start


@pytest.mark.parametrize("overlap", (False, True))
@pytest.mark.parametrize("maps", (0, 2))
@pytest.mark.parametrize("struct", (False, True))
def test_the_driver_gets_fixed_and_other_arguments_in_their_places(
    on_a_driver, overlap: bool, maps: int, struct: bool
) -> None:
    g = random.Random(maps)
    for count in (1, 3, 12, 40):
        for share in (0.0, 0.3, 0.8, 1.0):
            kinds = "".join(g.choice("Qqd") for _ in range(count))
            fake = on_a_driver(kinds, maps, struct=struct)
            fixed = {i: g.randrange(1000) for i in range(count) if g.random() < share}
            arguments = driver.Arguments(maps, kinds, fixed, struct=struct)
            launch = driver.launcher(7, arguments, 0, (5, 2, 1), 64, 128, overlap=overlap, cluster=1)
            tensor_maps = [TensorMap() for _ in range(maps)]
            for nth in range(3):  # the second launch has the slot of the first, the third another stream
                fake.stream = 11 * (nth == 2)
                given = {i: g.randrange(1 << 40) for i in range(count) if i not in fixed}
                launch(*tensor_maps, *given.values())
                wanted = [(fixed | given)[i] for i in range(count)]
                assert fake.seen[-1] == (
                    (5, 2, 1, 64, 128, fake.stream),
                    [*(m.address for m in tensor_maps), *wanted],
                )


def test_a_plan_packs_what_it_knows_one_time(on_a_driver, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(
        "x.cu", "x", template="T", max_registers=1, variants=[],
        args="x:ptr up:ptr out:ptr rows:i64 eps:f64 weight:ptr more:ptr scale:f64 last:i64",
    )  # fmt: skip
    fake = on_a_driver("QQQqdQQdq")
    monkeypatch.setattr(Kernel, "_load", lambda self, variant, device: 7)
    monkeypatch.setattr(kernel_module, "device_info", lambda device: SimpleNamespace(target=targets.parse("sm_90a")))
    monkeypatch.setattr(plan_module, "allocator", lambda device: lambda shape, strides, dtype: torch.empty(shape))
    for overlap in (False, True):
        launch = kernel.bind(("bf16",), 0, 3, 32, overlap=overlap)
        step = plan_module.Step(launch, "x", "up", "out", 6, 0.5, "weight", plan_module.Offset("x", 16), "scale", 9)
        outputs = {"out": plan_module.Memory((2,), torch.float32)}
        names = ["x", "up", "weight"]
        plan = plan_module.StepPlan("x", names, ["scale"], outputs, "single", plan_module.Steps(step), 0, ["up"])
        for x in (1 << 35, 1 << 36):
            out = plan.run(x, 0, 77, 2.5)
            assert fake.seen[-1][1] == [x, 0, out.data_ptr(), 6, 0.5, 77, x + 16, 2.5, 9]
