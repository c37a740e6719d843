"""Codes of an RMS norm whose 1/rms is known, transposed or both: the launch on GPUs with a bulk copy engine."""

from __future__ import annotations

from rtkernels._kernel import Kernel, device_info
from rtkernels._tensor_map import matrix_map, tiled_map

_SIDE = 128  # of a tile
_SLOTS, _GROUPS = 4, 2
_THREADS = 640
_SHARED = _SLOTS * (2 * _SIDE * _SIDE + 2 * 4 * _SIDE + 32) + _GROUPS * (16 * 9 * _SIDE + 8 * 4 * (_SIDE + 16))
_SHARED += 2 * (4 * _SIDE + 16)
# Of x: what it was measured for. A smaller one is a few tiles per multiprocessor, not worth blocks that stay.
_LEAST_BYTES = 24 << 20

RING = Kernel(
    "norm/norm_quant_ring.cu",
    "norm_fp8_ring",
    template="T ROWS",
    args="x:tmap q_t:tmap weight:ptr rstd:ptr q:ptr scale:ptr scale_t:ptr rows:i64 cols:i64 scale_row:i64 "
    "scale_group:i64 weight_wide:i64 pow2:i64 after:i64 offset:f64",
    variants=lambda target: (
        [(t, rows) for t in ("bf16", "fp16") for rows in (False, True)] if target.capability == (9, 0) else []
    ),
    max_registers=104,
    needs=("tma",),
)


def serves(t: str, device: int, rows: int, cols: int, x_stride: int) -> bool:
    """Return True if the kernel serves x of this type and shape, whose rows are of whole 16 bytes."""
    if t == "fp32" or rows % 16 or x_stride < cols or max(rows, cols) >= 1 << 31:
        return False
    return rows * cols * 2 >= _LEAST_BYTES and device_info(device).target.capability == (9, 0)


class RingLaunch:
    """The launch for one shape; called with addresses (0 for what is absent) and the offset."""

    def __init__(
        self,
        t: str,
        device: int,
        rows: int,
        cols: int,
        x_stride: int,
        scale_strides: tuple[int, int],
        *,
        by_rows: bool,
        weight_wide: bool,
        pow2: bool,
        after: bool,
    ) -> None:
        """Bind the kernel.

        Args:
            t: Type of x.
            device: CUDA ordinal, or -1 for the emulator.
            rows: Rows of x.
            cols: Columns of x.
            x_stride: Elements from row to row of x.
            scale_strides: Of the scales of rows, from row to row and from group to group.
            by_rows: Codes by rows besides the transposed ones.
            weight_wide: The weight is fp32, x is not.
            pow2: Scales are powers of two.
            after: The kernel launched before this one makes x and its 1/rms.
        """
        beside = _GROUPS if by_rows else 1  # tiles that a block takes together
        blocks = min(device_info(device).sm_count, -(-rows // _SIDE) * -(-cols // (beside * _SIDE)))
        self._shape = (t, rows, cols, x_stride)
        self._launch = RING.bind((t, by_rows), device, blocks, _THREADS, _SHARED, overlap=after)
        self._args = (rows, cols, *scale_strides, weight_wide, pow2, after)

    def __call__(
        self, x: int, weight: int, rstd: int, q: int, scale: int, q_t: int, scale_t: int, offset: float
    ) -> None:
        t, rows, cols, x_stride = self._shape
        maps = (
            matrix_map(x, t, rows, cols, x_stride, _SIDE, 64),
            tiled_map(q_t, "byte", (rows, 8, cols // 8), (rows, 8 * rows), (_SIDE, 9, 16)),
        )
        self._launch(*maps, weight, rstd, q, scale, scale_t, *self._args, offset)
