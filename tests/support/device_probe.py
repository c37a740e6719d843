"""Records and launches of the small kernels under ``cuda_src/probe`` that try shared device code alone."""

from __future__ import annotations

from typing import Any

import torch

from rtkernels import emulator
from rtkernels.runtime.launch.device import emulate_features
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.tensor_map import EmulatedMap, TensorMap, tiled_map
from rtkernels.runtime.operator.plan import ITEM_BYTES
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
DIRECT, COPIED = 0, 1  # of probe/epilogue.cu
EPILOGUE = Kernel(
    "probe/epilogue.cu", "probe_epilogue", template="T Sum COUNT OUTPUT",
    args="sums:ptr a:ptr b:ptr row_scale:ptr column_scale:ptr bias:ptr add:ptr out:ptr stride:i64 aligned:i64 rows:i64 "
    "columns:i64",
    variants=[("bf16", "fp32", 32, DIRECT), ("bf16", "i32", 32, COPIED), ("fp32", "fp32", 32, COPIED),
              ("fp16", "fp32", 16, DIRECT)],
    max_registers=168,
)  # fmt: skip
EPILOGUE_TMA = Kernel(
    "probe/epilogue.cu", "probe_epilogue_tma", template="T COUNT",
    args="out:tmap sums:ptr scale:ptr bias:ptr rows:i64 columns:i64 times:i64 fault:i64",
    variants=[("fp32", 32), ("bf16", 64)], max_registers=168, needs=("tma",),
)  # fmt: skip
MAINLOOP = Kernel(
    "probe/mainloop.cu", "probe_mainloop", template="T STAGES PROMOTES",
    args="a:tmap b:tmap out:tmap scale:ptr bias:ptr rows:i64 columns:i64 depth:i64 promote:i64",
    variants=[("bf16", 4, False), ("fp16", 3, True)], max_registers=168, needs=("wgmma",),
)  # fmt: skip
KERNELS = (PIPELINE, PIPELINE_STATE, TILES, EPILOGUE, EPILOGUE_TMA, MAINLOOP)


def launch(
    kernel: Kernel, variant: tuple[Any, ...], device: torch.device, grid: int, block: int, *args: Any, shared: int = 0
) -> None:
    """Run one variant on a GPU, or in the emulator that is active.

    Tensors become pointers; callables are replaced by their result, so that tensor maps are encoded there.
    """

    def value(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return argument.data_ptr()
        return 0 if argument is None else argument() if callable(argument) else argument

    def run() -> None:
        index = device.index or 0 if device.type == "cuda" else -1
        kernel.bind(variant, index, grid, block, shared)(*map(value, args))

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


def matrix_map(
    address: int, token: str, rows: int, cols: int, pitch: int, box_rows: int, box_cols: int
) -> TensorMap | EmulatedMap:
    """Return the tensor map of a row-major matrix, `pitch` elements from row to row, swizzled by 128 bytes."""
    return tiled_map(address, token, (cols, rows), (pitch * ITEM_BYTES[token],), (box_cols, box_rows))
