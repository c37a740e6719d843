"""The peak of the tensor cores: a plain loop of wgmma instructions on every SM, measured in the run it belongs to.

Products and attention of a run are divided by it. It is what the instruction reaches at the clock that the device
holds under this load, so it is lower than the number of a data sheet.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from bench.measure.timing import Timer
from rtkernels.runtime.launch.kernel import Kernel

STEPS = 2048  # about 5 ms, which is long enough for the clock to settle
SAMPLES = 10
THREADS, PRODUCTS = 256, 16  # per block, and instructions per step
# By name: the kernel's template arguments, and k of one instruction.
KINDS: dict[str, tuple[tuple[str, str], int]] = {
    "bf16": (("bf16", "fp32"), 16),
    "fp8": (("e4m3", "fp32"), 32),
    "int8": (("s8", "i32"), 32),
}
KERNEL = Kernel(
    Path(__file__).resolve().parents[1] / "cuda" / "wgmma_peak.cu",
    "wgmma_peak",
    template="T SUM",
    args="out:ptr steps:i64",
    variants=[variant for variant, _ in KINDS.values()],
    max_registers=168,
    needs=("wgmma",),
    emulated="it has no result to compare",
)
KERNEL.op = "bench_wgmma_peak"

_KIND_OF_DTYPE = {"bfloat16": "bf16", "float16": "bf16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "int8": "int8"}


def flops(kind: str, sms: int, steps: int = STEPS) -> int:
    """Return the operations of one launch: two warpgroups per SM, `PRODUCTS` instructions of m64n256 per step."""
    return sms * 2 * steps * PRODUCTS * 2 * 64 * 256 * KINDS[kind][1]


def measure(timer: Timer, device: int = 0) -> dict[str, float]:
    """Return the peak by kind in TFLOP/s; empty on a device without wgmma."""
    import torch

    from rtkernels.runtime.launch.device import device_info

    info = device_info(device)
    if not KERNEL.supports(info.target):
        return {}
    out = torch.empty(info.sm_count * THREADS, device=f"cuda:{device}")
    found = {}
    for kind, (variant, _) in KINDS.items():
        launch = KERNEL.bind(variant, device, info.sm_count, THREADS)
        timing = timer.measure([lambda launch=launch: launch(out.data_ptr(), STEPS)], SAMPLES)
        found[kind] = flops(kind, info.sm_count) / timing.us / 1e6
    return found


def try_measure(timer: Timer) -> dict[str, Any]:
    """Return the peak by kind, or the reason why there is none: rows do not depend on it."""
    try:
        import torch

        return measure(timer) if torch.cuda.is_available() else {}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def share(row: dict[str, Any], peak: dict[str, Any] | None) -> float | None:
    """Return a row's rate over the peak of its operands' type; None without either."""
    kind = _KIND_OF_DTYPE.get(row.get("dtype", ""), "")
    limit = (peak or {}).get(kind)
    if not isinstance(limit, float) or not limit or "tflops" not in row:
        return None
    value = row["tflops"] / limit
    return value if math.isfinite(value) else None
