"""Records and launches of the small kernels under ``cuda_src/probe`` that try shared device code alone."""

from __future__ import annotations

from typing import Any

import torch

from rtkernels import emulator
from rtkernels.runtime.launch.device import emulate_features
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.targets import Target

STAGES = (1, 2, 3, 4)
PIPELINE = Kernel(
    "probe/pipeline.cu", "probe_pipeline", template="STAGES BULK", args="x:ptr y:ptr rows:i64 fault:i64",
    variants=[(stages, bulk) for stages in STAGES for bulk in (False, True)], max_registers=48, needs=("tma",),
)  # fmt: skip
PIPELINE_STATE = Kernel(
    "probe/pipeline.cu", "probe_pipeline_state", template="STAGES", args="y:ptr first:i64 uses:i64",
    variants=[(stages,) for stages in STAGES], max_registers=24, needs=("tma",),
)  # fmt: skip
TILE_M, TILE_N, BAND = 16, 8, 4  # of probe/tiles.cu
STATIC, DRAWN_BY_BLOCKS, DRAWN_BY_WARPS = 0, 1, 2


def _sources(target: Target) -> list[tuple[Any, ...]]:
    sources = (STATIC, DRAWN_BY_BLOCKS, DRAWN_BY_WARPS)
    return [
        (s, grouped) for s in sources if s != DRAWN_BY_WARPS or "tma" in target.features for grouped in (False, True)
    ]


TILES = Kernel(
    "probe/tiles.cu", "probe_tiles", template="SOURCE GROUPED",
    args="cover:ptr owner:ptr log:ptr ends:ptr counter:ptr groups:i64 rows:i64 columns:i64",
    variants=_sources, max_registers=64,
)  # fmt: skip
KERNELS = (PIPELINE, PIPELINE_STATE, TILES)


def launch(
    kernel: Kernel, variant: tuple[Any, ...], device: torch.device, grid: int, block: int, *args: Any, shared: int = 0
) -> None:
    """Run one variant on a GPU, or in the emulator that is active; tensors become pointers."""

    def run() -> None:
        index = device.index or 0 if device.type == "cuda" else -1
        values = [0 if a is None else a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
        kernel.bind(variant, index, grid, block, shared)(*values)

    if device.type == "cuda":
        run()
        return
    features = emulator.active()
    if features is None:
        raise RuntimeError("a probe of device code needs a CUDA device, or rtkernels.emulate()")
    with emulator.lock:
        emulate_features(features)
        with emulator.recording():
            run()
