"""Codes of an RMS norm by rings of tiles, on GPUs with a bulk copy engine; 1/rms is known, or made by the kernel."""

from __future__ import annotations

from typing import NamedTuple

from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import kept_zeros
from rtkernels.runtime.launch.tensor_map import tiled_map

_SIDE = 128  # of a tile
_GROUPS = 2
_THREADS = 640


def _shared(slots: int, staged: int, more: int = 0) -> int:
    """Return bytes of shared memory for `slots` tiles of x and transposed codes of `staged` tiles."""
    numbers = _GROUPS * 8 * 4 * (_SIDE + 16) + 2 * (4 * _SIDE + 16) + 8
    return slots * (2 * _SIDE * _SIDE + 2 * 4 * _SIDE + 40) + staged * 16 * 9 * _SIDE + numbers + more


# Of x: what it was measured for. A smaller one is a few tiles per multiprocessor, not worth blocks that stay.
_LEAST_BYTES = 16 << 20
_MOST_WIDE = 128  # pairs of tiles in a strip, as many as OnceExchange can count
_MOST_ROWS = 1 << 20  # 16 bytes each, for sums of squares of all blocks, stay allocated
_ONCE_SHARED = _shared(6, 1, 32 + 4 * _SIDE)
_refused: set[int] = set()  # devices

RING = Kernel(
    "norm/norm_fp8_ring.cu",
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

ONCE = Kernel(
    "norm/norm_fp8_single_read.cu",
    "norm_fp8_once",
    template="T",
    args="boxes:tmap q_t:tmap x:ptr weight:ptr rstd:ptr q:ptr scale:ptr scale_t:ptr words:ptr rows:i64 cols:i64 "
    "x_stride:i64 scale_row:i64 scale_group:i64 weight_wide:i64 pow2:i64 eps:f64 offset:f64",
    variants=lambda target: [("bf16",), ("fp16",)] if target.capability == (9, 0) else [],
    max_registers=104,
    needs=("tma",),
)


class Matrix(NamedTuple):
    """What the kernels read: x, whose rows are of whole 16 bytes.

    Attributes:
        t: Its type.
        device: CUDA ordinal, or -1 for the emulator.
        rows: Their number.
        cols: Elements of a row.
        stride: Elements from row to row.
    """

    t: str
    device: int
    rows: int
    cols: int
    stride: int

    @property
    def strips(self) -> int:
        """Lines of tiles."""
        return -(-self.rows // _SIDE)

    @property
    def wide(self) -> int:
        """Pairs of tiles in a strip."""
        return -(-self.cols // (_GROUPS * _SIDE))

    def maps(self, x: int, q_t: int) -> tuple:
        """Return the tensor maps of x and of its transposed codes at these addresses."""
        t, _, rows, cols, stride = self
        return (
            tiled_map(x, t, (cols, rows // 8, 8), (16 * stride, 2 * stride), (64, _SIDE // 8, 8)),
            tiled_map(q_t, "byte", (rows, 8, cols // 8), (rows, 8 * rows), (_SIDE, 9, 16)),
        )


def serves(x: Matrix) -> bool:
    """Return True if the kernel serves x."""
    if x.t == "fp32" or x.rows % 16 or x.stride < x.cols or max(x.rows, x.cols) >= 1 << 31:
        return False
    return x.rows * x.cols * 2 >= _LEAST_BYTES and device_info(x.device).target.capability == (9, 0)


def blocks_once(x: Matrix) -> int:
    """Return how many blocks of the kernel that makes 1/rms as well serve x; 0 if it does not.

    They wait for each other, so all must run at the same time on the multiprocessors that this process may use: MPS and
    green contexts leave fewer than the device has. There are as few as take no more tiles each than with all of these:
    neighbours on a strip are then seldom a tile apart.
    """
    if x.wide == 1 or x.wide > _MOST_WIDE or x.rows > _MOST_ROWS or not serves(x) or x.device in _refused:
        return 0
    room = min(device_info(x.device).sm_count, ONCE.most_resident((x.t,), x.device, _THREADS, _ONCE_SHARED))
    if x.wide > room:
        return 0
    pairs = x.strips * x.wide
    return -(-pairs // -(-pairs // room))


def refuse_once(device: int) -> None:
    """Remember that the driver did not launch that kernel on a device, though there seemed to be room."""
    _refused.add(device)


class RingLaunch:
    """The launch for one shape; called with addresses (0 for what is absent) and the offset."""

    def __init__(
        self,
        x: Matrix,
        scale_strides: tuple[int, int],
        *,
        by_rows: bool,
        weight_wide: bool,
        pow2: bool,
        after: bool,
    ) -> None:
        """Bind the kernel.

        Args:
            x: What it will be called with.
            scale_strides: Of the scales of rows, from row to row and from group to group.
            by_rows: Codes by rows besides the transposed ones.
            weight_wide: The weight is fp32, x is not.
            pow2: Scales are powers of two.
            after: The kernel launched before this one makes x and its 1/rms.
        """
        self._x = x
        across = x.wide if by_rows else -(-x.cols // _SIDE)  # codes by rows: a block takes two tiles together
        blocks = min(device_info(x.device).sm_count, x.strips * across)
        self._launch = RING.bind((x.t, by_rows), x.device, blocks, _THREADS, _shared(4, _GROUPS), overlap=after)
        self._args = (x.rows, x.cols, *scale_strides, weight_wide, pow2, after)

    def __call__(
        self, x: int, weight: int, rstd: int, q: int, scale: int, q_t: int, scale_t: int, offset: float
    ) -> None:
        maps = self._x.maps(x, q_t)
        self._launch(*maps, weight, rstd, q, scale, scale_t, *self._args, offset)


class OnceLaunch:
    """The launch for one shape that makes 1/rms as well; called with addresses, epsilon and the offset."""

    def __init__(
        self, x: Matrix, blocks: int, scale_strides: tuple[int, int], *, weight_wide: bool, pow2: bool
    ) -> None:
        """Bind the kernel; `blocks`: of blocks_once. Other arguments as for RingLaunch."""
        self._x, self._words = x, x.strips * (4 * _SIDE + 1)  # of 4 bytes
        self._launch = ONCE.bind((x.t,), x.device, blocks, _THREADS, _ONCE_SHARED, resident=True)
        self._args = (x.rows, x.cols, x.stride, *scale_strides, weight_wide, pow2)

    def __call__(
        self, x: int, weight: int, rstd: int, q: int, scale: int, q_t: int, scale_t: int, eps: float, offset: float
    ) -> None:
        maps = self._x.maps(x, q_t)
        words = kept_zeros(self._x.device, self._words)
        self._launch(*maps, x, weight, rstd, q, scale, scale_t, words.data_ptr(), *self._args, eps, offset)
