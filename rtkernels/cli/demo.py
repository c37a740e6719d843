"""``rtkernels demo``: run the fused ops forward and backward, compare and time them against torch."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import rtkernels
from rtkernels.cli.show import table
from rtkernels.errors import ToolkitError
from rtkernels.runtime import warm as warming
from rtkernels.runtime.build import nvrtc, places

_CROSS_TARGETS = ("sm_80", "sm_90a")
_OPS = ("rms_norm", "glu", "quantize_fp8")  # used by the cases below
_FP8_MAX = 448.0
_GROUP = 128


@dataclass(frozen=True)
class Case:
    """One line of the demo: the same work in rtkernels and in plain torch; each returns everything to compare."""

    name: str
    ours: Callable[[], tuple[torch.Tensor, ...]]
    torch: Callable[[], tuple[torch.Tensor, ...]]
    tolerance: float


def run() -> int:
    """Run the demo on the first GPU, or on the CPU if there is none; return the exit code."""
    started = time.perf_counter()
    ok = _on_gpu() if torch.cuda.is_available() else _on_cpu()
    verdict = "all results agree with torch" if ok else "SOMETHING DIFFERS: see above, and `rtkernels doctor`"
    print(f"\n{verdict}; {time.perf_counter() - started:.1f} s")
    return 0 if ok else 1


# ---- the work ----------------------------------------------------------------------------------------------


def _rms_norm_torch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    exact = x.float()
    return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)


def _glu_torch(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def _quantize_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.float().unflatten(-1, (-1, _GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / _FP8_MAX
    return (groups / scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).flatten(-2), scale.squeeze(-1)


def _dequantize_torch(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (q.float().unflatten(-1, (-1, _GROUP)) * scale.unsqueeze(-1)).flatten(-2).to(torch.bfloat16)


def _with_grad(
    function: Callable[..., torch.Tensor], grad: torch.Tensor, *inputs: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, ...]]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]

    def call() -> tuple[torch.Tensor, ...]:
        out = function(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, grad))

    return call


def _cases(device: str, rows: int, cols: int) -> list[Case]:
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=torch.float32).to(torch.bfloat16)

    x, weight, merged = draw(rows, cols), 1 + draw(cols) / 8, draw(rows, 2 * cols)
    grad = draw(rows, cols)
    q, scale = _quantize_torch(x)

    def ours_norm(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return rtkernels.rms_norm(a, w, eps=1e-6)

    def ours_glu(a: torch.Tensor) -> torch.Tensor:
        return rtkernels.glu(a, act="silu")

    def ours_quantize() -> tuple[torch.Tensor, ...]:
        return rtkernels.quantize_fp8(x, granularity="group")

    def ours_dequantize() -> tuple[torch.Tensor, ...]:
        return (rtkernels.dequantize_fp8(q, scale, granularity="group"),)

    bf16 = 2.0**-8  # half a step of bf16, relative; both sides round their result once
    return [
        Case("rms_norm", lambda: (ours_norm(x, weight),), lambda: (_rms_norm_torch(x, weight),), 2 * bf16),
        Case("rms_norm + backward", _with_grad(ours_norm, grad, x, weight),
             _with_grad(_rms_norm_torch, grad, x, weight), 2 * bf16),
        Case("glu silu", lambda: (ours_glu(merged),), lambda: (_glu_torch(merged),), 2 * bf16),
        Case("glu silu + backward", _with_grad(ours_glu, grad, merged),
             _with_grad(_glu_torch, grad, merged), 2 * bf16),
        # Scales may differ in the last bit, which moves values on a rounding boundary by one e4m3 step.
        Case("quantize_fp8 1x128", ours_quantize, lambda: _quantize_torch(x), 2.0**-6),
        Case("dequantize_fp8 1x128", ours_dequantize, lambda: (_dequantize_torch(q, scale),), bf16),
    ]  # fmt: skip


def _error(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> float:
    """Return the largest relative Frobenius distance between results; infinite if shapes or dtypes differ."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        exact = b.double()
        distance = ((a.double() - exact).norm() / exact.norm()).item()
        worst = max(worst, distance) if distance == distance else float("inf")
    return worst


# ---- with a GPU --------------------------------------------------------------------------------------------


def _on_gpu() -> bool:
    rows, cols = 8192, 4096
    properties = torch.cuda.get_device_properties(0)
    capability = f"{properties.major}.{properties.minor}"
    print(f"GPU: {properties.name}, capability {capability}, torch {torch.__version__}")
    print(f"inputs: {rows} x {cols} bf16; medians of 50 calls, L2 flushed between them\n")
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    lines, ok = [], True
    for case in _cases("cuda", rows, cols):
        started = time.perf_counter()
        result = case.ours()
        torch.cuda.synchronize()
        first = 1e3 * (time.perf_counter() - started)
        error = _error(result, case.torch())
        ok &= error <= case.tolerance
        mine, theirs = _median_us(case.ours, flush), _median_us(case.torch, flush)
        numbers = [f"{mine:.1f}", f"{theirs:.1f}", f"{theirs / mine:.2f}x", f"{first:.0f}"]
        lines.append([case.name, *numbers, _verdict(error, case)])
    header = ["op", "rtkernels us", "torch us", "speed-up", "first call ms", "relative difference"]
    print(table(header, lines))
    print("\nfirst call: with compilation, or from the cache if this machine has seen the op before")
    return ok


def _median_us(call: Callable[[], object], flush: torch.Tensor, repeats: int = 50) -> float:
    for _ in range(3):
        call()
    pairs = []
    for _ in range(repeats):
        for _ in range(4):  # more than needed to flush L2: keeps the GPU busy while the host queues the call
            flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return 1e3 * statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def _verdict(error: float, case: Case) -> str:
    return f"{error:.1e} {'ok' if error <= case.tolerance else f'ABOVE {case.tolerance:.1e}'}"


# ---- without -----------------------------------------------------------------------------------------------


def _on_cpu() -> bool:
    rows, cols = 256, 1024
    print(f"no GPU on this machine ({platform.machine()}, torch {torch.__version__}): the ops run on CPU tensors, in")
    print("plain torch, and their kernels are compiled for other machines, but not run\n")
    lines, ok = [], True
    for case in _cases("cpu", rows, cols):
        error = _error(case.ours(), case.torch())
        ok &= error <= case.tolerance
        lines.append([case.name, f"{rows} x {cols} bf16", _verdict(error, case)])
    print(table(["op", "input", "relative difference to torch"], lines))
    try:
        nvrtc.version()
    except ToolkitError as missing:
        # Not a failure: CPU tensors need neither CuPy nor NVRTC.
        print(f"\nno kernel was compiled. {missing}")
        return ok
    return _cross_compile() and ok


def _cross_compile() -> bool:
    ok = True
    print("\ncross-compilation, one bf16 variant of each of their kernels (`rtkernels warm` builds all of all ops):")
    with places.scratch("demo") as folder:
        for name in _CROSS_TARGETS:
            jobs = warming.plan(warming.select(_OPS), warming.targets([name]))
            report = warming.build(list({job.kernel: job for job in jobs if "bf16" in job.variant}.values()), folder)
            for failure in report.failures:
                print(f"  failed: {failure}")
            size = sum(path.stat().st_size for path in report.path.rglob("kernel.cubin"))
            print(f"  {name}: {report.compiled} kernels compiled, {report.seconds:.1f} s, {size / 1e3:.0f} kB so far")
            ok &= not report.failures
    return ok
