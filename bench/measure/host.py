"""Host rows: µs of host time per call, and what the first use of an op costs in a fresh process.

``python -m bench.measure.host OP`` is the child process that ``first_use`` starts; it prints one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.measure.host_calls import COLS, ROWS, calls
from bench.meta import ROOT

CHUNK = 100  # calls in a row: the launches of all of them fit into the launch queue
ROUNDS = 25

Case = Callable[[], Any]


def _differentiable_calls(rtk: Any, device: str) -> dict[str, tuple[Callable[..., Case], list[Any]]]:
    """Calls that are measured with gradients too, ours and torch's own of the same kind."""
    import torch
    import torch.nn.functional as F

    def rand(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    x, w, b = rand(ROWS, COLS), rand(COLS), rand(COLS)
    return {
        "torch F.rms_norm": (lambda x, w: lambda: F.rms_norm(x, (COLS,), w, 1e-6), [x, w]),
        "rms_norm": (lambda x, w: lambda: rtk.rms_norm(x, w, eps=1e-6), [x, w]),
        "torch F.layer_norm": (lambda x, w, b: lambda: F.layer_norm(x, (COLS,), w, b), [x, w, b]),
        "layer_norm": (lambda x, w, b: lambda: rtk.layer_norm(x, w, b), [x, w, b]),
        "torch softmax": (lambda x: lambda: torch.softmax(x, -1), [x]),
        "softmax": (lambda x: lambda: rtk.softmax(x), [x]),
        "glu": (lambda x: lambda: rtk.glu(x), [rand(ROWS, 2 * COLS)]),
        "torch.mm": (lambda a, b: lambda: torch.mm(a, b), [x, rand(COLS, COLS)]),
        "scaled_mm": (lambda a, b: lambda: rtk.scaled_mm(a, b), [x, rand(COLS, COLS)]),
    }


def _gradient_modes(call: Callable[..., Case], args: list[Any]) -> dict[str, Case]:
    """The modes of a differentiable call: in inference mode, with grad, forward and backward."""
    import torch

    leaves = [a.clone().requires_grad_() for a in args]
    gradient, forward = torch.randn_like(call(*args)()), call(*leaves)

    def forward_backward() -> Any:
        return torch.autograd.grad(forward(), leaves, gradient)

    return {"inference": call(*args), "grad": forward, "grad_backward": forward_backward}


def cases(device: str = "cuda") -> dict[str, Case | str]:
    """Every host case by name, all public functions among them; a string instead of a call says why there is none."""
    import torch

    import rtkernels as rtk

    x = torch.randn(ROWS, COLS, device=device, dtype=torch.bfloat16)
    found: dict[str, Case | str] = {"torch x*2": lambda: x * 2}
    for name, (call, args) in _differentiable_calls(rtk, device).items():
        if name.startswith("torch"):
            found[name] = call(*args)
        for mode, case in _gradient_modes(call, args).items():
            found[f"{name} {mode}"] = case
    for name, (_, result) in calls(rtk, device).items():
        try:
            case = result()
            case()
            found[f"{name} no_grad"] = case
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def per_call(
    found: dict[str, Case | str],
    sync: Callable[[], None],
    rounds: int = ROUNDS,
    chunk: int = CHUNK,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Median host µs per call, cases interleaved round by round so that drift hits all alike.

    Each chunk starts on an idle device and is shorter than its launch queue, so no call waits for the device.
    """
    import torch

    taken: dict[str, list[float]] = {name: [] for name, case in found.items() if callable(case)}
    for nth in range(rounds + 1):
        for name, samples in taken.items():
            case = found[name]
            sync()
            with torch.inference_mode(name.endswith(" inference")):
                start = clock()
                for _ in range(chunk):
                    case()
                spent = clock() - start
            if nth:  # the first round warms up
                samples.append(spent / chunk * 1e6)
        sync()
    result: dict[str, Any] = {name: sorted(s)[len(s) // 2] for name, s in taken.items()}
    result |= {name: {"error": case} for name, case in found.items() if not callable(case)}
    return result


def _child(op: str, cache: str, **env: str) -> dict[str, Any]:
    settings = ("RTKERNELS_CACHE", "RTKERNELS_NO_COMPILE", "RTKERNELS_EMULATE")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(settings)}
    done = subprocess.run(
        [sys.executable, "-m", "bench.measure.host", op],
        cwd=ROOT,
        env={**clean, "RTKERNELS_CACHE_DIR": cache, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"exit status {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def first_use(ops: tuple[str, ...] = ("rms_norm", "glu", "quantize_fp8"), repeat: int = 3) -> dict[str, Any]:
    """Cold (empty cache) and warm (full cache) first call of each op, best of ``repeat`` fresh processes."""
    result: dict[str, Any] = {}
    for op in ops:
        colds, warms = [], []
        for _ in range(repeat):
            with tempfile.TemporaryDirectory(prefix="rtkernels-bench-") as folder:
                cache = str(Path(folder) / "cache")
                colds.append(_child(op, cache))
                warms.append(_child(op, cache))
        result[op] = {"cold": _best(colds), "warm": _best(warms)}
    return result


def _best(found: list[dict[str, Any]]) -> dict[str, Any]:
    good = [f for f in found if "error" not in f]
    return min(good, key=lambda f: f["first_call_ms"]) if good else found[0]


def import_ms(repeat: int = 5) -> float | dict[str, str]:
    """Milliseconds that ``import rtkernels`` adds to ``import torch``, best of ``repeat`` processes."""
    code = "import torch; from time import perf_counter as t; a = t(); import rtkernels; print(1e3 * (t() - a))"
    try:
        outputs = [
            subprocess.run(
                [sys.executable, "-c", code],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            ).stdout
            for _ in range(repeat)
        ]
    except subprocess.SubprocessError as error:
        return {"error": str(error)}
    return min(float(text) for text in outputs)


def lists(repeat: int = 20) -> dict[str, dict[str, float]]:
    """Wall µs of the norm of a list of tensors, device and host together, ours and torch's, both synchronised."""
    import torch

    import rtkernels as rtk

    found: dict[str, dict[str, float]] = {}
    for count, size in ((512, 1 << 20), (5000, 4096)):
        tensors = [torch.randn(size, device="cuda") for _ in range(count)]
        calls: dict[str, Case] = {
            "multi_norm": lambda tensors=tensors: rtk.multi_norm(tensors),
            "torch": lambda tensors=tensors: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors))),
        }
        found[f"{count} x {size}"] = {name: _wall(call, torch.cuda.synchronize, repeat) for name, call in calls.items()}
        del tensors, calls
    return found


def _wall(call: Case, sync: Callable[[], None], repeat: int) -> float:
    samples = []
    for _ in range(repeat + 3):
        sync()
        start = time.perf_counter()
        call()
        sync()
        samples.append((time.perf_counter() - start) * 1e6)
    return sorted(samples[3:])[repeat // 2]


def measure(quick: bool = False, log: Callable[[str], None] = print) -> dict[str, Any]:
    """All host rows of this machine's GPU; quick ones without fresh processes."""
    import torch

    log("host: µs per call")
    found = {"us_per_call": per_call(cases(), torch.cuda.synchronize, rounds=10 if quick else ROUNDS)}
    if quick:
        return found
    log("host: lists and first use")
    return {**found, "lists_us": lists(), "first_use": first_use(), "import_ms": import_ms()}


def child(op: str) -> dict[str, Any]:
    """In a fresh process: time the imports, then the first and the second call of ``op``."""
    marks = {}
    last = time.perf_counter()

    def mark(name: str) -> None:
        nonlocal last
        marks[name] = (time.perf_counter() - last) * 1e3
        last = time.perf_counter()

    import torch

    mark("import_torch_ms")
    import rtkernels

    mark("import_rtkernels_ms")
    getattr(rtkernels, op)
    mark("import_op_ms")
    import cupy

    cupy.cuda.runtime.getDeviceCount()
    mark("import_cupy_ms")
    # The context and torch's allocator belong to torch, whatever op comes first.
    a = torch.randn(ROWS, COLS, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(COLS, device="cuda", dtype=torch.bfloat16)
    (a * 2).sum().item()
    call = {
        "rms_norm": lambda: rtkernels.rms_norm(a, b, eps=1e-6),
        "glu": lambda: rtkernels.glu(a),
        "quantize_fp8": lambda: rtkernels.quantize_fp8(a),
    }[op]
    modules = set(sys.modules)
    mark("setup_ms")
    call()
    torch.cuda.synchronize()
    mark("first_call_ms")
    call()
    torch.cuda.synchronize()
    mark("second_call_ms")
    new = sorted(name for name in set(sys.modules) - modules if name.count(".") == 0)
    return {**marks, "imported_by_first_call": new}


if __name__ == "__main__":
    print(json.dumps(child(sys.argv[1])))
