"""Transposed codes of an RMS norm whose 1/rms is known: the launch on GPUs with a bulk copy engine."""

from __future__ import annotations

from rtkernels._kernel import Kernel, device_info
from rtkernels._tensor_map import matrix_map, tiled_map

_SIDE = 128  # of a tile
_SLOTS, _GROUPS = 4, 2
_THREADS = 640
_SHARED = _SLOTS * (2 * _SIDE * _SIDE + 2 * 4 * _SIDE + 32) + _GROUPS * (16 * 9 * _SIDE + 8 * 4 * (_SIDE + 16))
# Of x: what it was measured for. A smaller one is a few tiles per multiprocessor, not worth blocks that stay.
_LEAST_BYTES = 24 << 20

RING = Kernel(
    "norm/norm_quant_ring.cu",
    "norm_fp8_ring",
    template="T",
    args="x:tmap q_t:tmap weight:ptr rstd:ptr scale_t:ptr rows:i64 cols:i64 weight_wide:i64 pow2:i64 offset:f64",
    variants=lambda target: [("bf16",), ("fp16",)] if target.capability == (9, 0) else [],
    max_registers=104,
    needs=("tma",),
)


def serves(t: str, device: int, rows: int, cols: int, x_stride: int) -> bool:
    """Return True if the kernel serves x of this type and shape, whose rows are of whole 16 bytes."""
    if t == "fp32" or rows % 16 or x_stride < cols or max(rows, cols) >= 1 << 31:
        return False
    return rows * cols * 2 >= _LEAST_BYTES and device_info(device).target.capability == (9, 0)


class RingLaunch:
    """The launch for one shape; called with addresses and the offset."""

    def __init__(self, t: str, device: int, rows: int, cols: int, x_stride: int, weight_wide: bool, pow2: bool) -> None:
        tiles = -(-rows // _SIDE) * -(-cols // _SIDE)
        self._shape = (t, rows, cols, x_stride)
        self._launch = RING.bind((t,), device, min(device_info(device).sm_count, tiles), _THREADS, _SHARED)
        self._args = (rows, cols, weight_wide, pow2)

    def __call__(self, x: int, q_t: int, weight: int, rstd: int, scale_t: int, offset: float) -> None:
        t, rows, cols, x_stride = self._shape
        maps = (
            matrix_map(x, t, rows, cols, x_stride, _SIDE, 64),
            tiled_map(q_t, "byte", (rows, 8, cols // 8), (rows, 8 * rows), (_SIDE, 9, 16)),
        )
        self._launch(*maps, weight, rstd, scale_t, *self._args, offset)
