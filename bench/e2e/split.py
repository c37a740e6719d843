"""How the device time of a step is split: products, attention, our other kernels, everything else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

# The first pattern found in a kernel's name determines its kind.
_KINDS = (
    ("attention", re.compile(r"rtk::attention|flash|fmha|sdpa|attn", re.I)),
    ("gemm", re.compile(r"rtk::(gemm|grouped|skinny|mma_gemm)|nvjet|gemm|cutlass|xmma|splitk|cublas", re.I)),
    ("ours", re.compile(r"rtk::")),
)


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    return next((kind for kind, pattern in _KINDS if pattern.search(kernel)), "other")


def split(kernels: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """Return launches, and milliseconds by kind, of kernels with their microseconds."""
    found: dict[str, float] = dict.fromkeys(("gemm", "attention", "ours", "other"), 0.0)
    count = 0
    for name, us in kernels:
        found[kind_of(name)] += us / 1000
        count += 1
    return {"launches": count, "ms": {kind: round(ms, 2) for kind, ms in found.items()}}


def of_step(step: Callable[[], Any]) -> dict[str, Any]:
    """Return the split of one extra call, because the profiler slows the host down."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    events = (event for event in profiled.events() if str(event.device_type).endswith("CUDA"))
    return split((event.name, event.device_time) for event in events)
