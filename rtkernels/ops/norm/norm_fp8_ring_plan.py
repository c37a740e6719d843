"""fp8 codes of an RMS norm by rings of tiles, on GPUs with TMA; 1/rms is given, or computed by the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Boxes, Step, Steps

_SIDE = 128  # of a tile
_GROUPS = 2
_THREADS = 640


def _shared(slots: int, staged: int, more: int = 0) -> int:
    """Return bytes of shared memory for `slots` tiles of x and transposed codes of `staged` tiles."""
    numbers = _GROUPS * 8 * 4 * (_SIDE + 16) + 2 * (4 * _SIDE + 16) + 8
    return slots * (2 * _SIDE * _SIDE + 2 * 4 * _SIDE + 40) + staged * 16 * 9 * _SIDE + numbers + more


_MIN_BYTES = 16 << 20  # of x: with less there are too few tiles per SM for persistent blocks
_MAX_TILES_ACROSS = 128  # pairs of tiles in a strip, as many as SingleReadExchange can count
_MAX_ROWS = 1 << 20  # 16 bytes each, for sums of squares of all blocks, stay allocated
_SINGLE_READ_SHARED = _shared(6, 1, 32 + 4 * _SIDE)
_refused: set[int] = set()  # devices whose driver did not launch SINGLE_READ, though there seemed to be room

RING = Kernel(
    "norm/norm_fp8_ring.cu", "norm_fp8_ring", template="T ROWS", max_registers=104, needs=("tma",),
    args="x:tmap q_t:tmap weight:ptr rstd:ptr q:ptr scale:ptr scale_t:ptr rows:i64 cols:i64 scale_row:i64 "
    "scale_group:i64 weight_fp32:i64 pow2:i64 after:i64 offset:f64",
    variants=lambda target: (
        [(t, rows) for t in ("bf16", "fp16") for rows in (False, True)] if target.capability == (9, 0) else []
    ),
)  # fmt: skip

SINGLE_READ = Kernel(
    "norm/norm_fp8_single_read.cu", "norm_fp8_single_read", template="T", max_registers=104, needs=("tma",),
    args="boxes:tmap q_t:tmap x:ptr weight:ptr rstd:ptr q:ptr scale:ptr scale_t:ptr words:ptr rows:i64 cols:i64 "
    "x_stride:i64 scale_row:i64 scale_group:i64 weight_fp32:i64 pow2:i64 eps:f64 offset:f64",
    variants=lambda target: [("bf16",), ("fp16",)] if target.capability == (9, 0) else [],
)  # fmt: skip


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
    def tiles_across(self) -> int:
        """Pairs of tiles in a strip."""
        return -(-self.cols // (_GROUPS * _SIDE))

    def maps(self, x: str) -> tuple[Boxes, Boxes]:
        """Return the tensor maps of x, which has this name, and of its transposed codes."""
        t, _, rows, cols, stride = self
        return (
            Boxes(x, t, (cols, rows // 8, 8), (16 * stride, 2 * stride), (64, _SIDE // 8, 8)),
            Boxes("q_t", "byte", (rows, 8, cols // 8), (rows, 8 * rows), (_SIDE, 9, 16)),
        )


def serves(x: Matrix) -> bool:
    """Return True if the kernel serves x."""
    if x.t == "fp32" or x.rows % 16 or x.stride < x.cols or max(x.rows, x.cols) >= 1 << 31:
        return False
    return x.rows * x.cols * 2 >= _MIN_BYTES and device_info(x.device).target.capability == (9, 0)


def single_read_blocks(x: Matrix) -> int:
    """Return the number of blocks of the kernel that also computes 1/rms; 0 if it does not support x.

    They wait for each other, so all must run at the same time on the SMs that this process may use: MPS and
    green contexts leave fewer than the device has. There are as few as take no more tiles each than with all of these:
    neighbours on a strip are then seldom a tile apart.
    """
    if not 1 < x.tiles_across <= _MAX_TILES_ACROSS or x.rows > _MAX_ROWS or not serves(x) or x.device in _refused:
        return 0
    room = SINGLE_READ.max_resident_blocks((x.t,), x.device, _THREADS, _SINGLE_READ_SHARED)
    room = min(device_info(x.device).sm_count, room)
    if x.tiles_across > room:
        return 0
    pairs = x.strips * x.tiles_across
    return -(-pairs // -(-pairs // room))


def ring_step(
    x: Matrix, scale_strides: tuple[int, int], tensors: tuple[str | int, ...], *, by_rows: bool, weight_fp32: bool,
    pow2: bool, after: bool, offset: float,
) -> Step:  # fmt: skip
    """Return the launch for a matrix whose 1/rms is known.

    Args:
        x: The matrix.
        scale_strides: Of the scales of rows, from row to row and from group to group.
        tensors: Names of x, the weight, 1/rms, codes and scales of rows, scales of columns.
        by_rows: Codes by rows besides the transposed ones.
        weight_fp32: The weight is fp32, x is not.
        pow2: Scales are powers of two.
        after: The kernel launched before this one makes x and its 1/rms.
        offset: Added to the weight.
    """
    across = x.tiles_across if by_rows else -(-x.cols // _SIDE)  # codes by rows: a block takes two tiles together
    blocks = min(device_info(x.device).sm_count, x.strips * across)
    launch = RING.bind((x.t, by_rows), x.device, blocks, _THREADS, _shared(4, _GROUPS), overlap=after)
    numbers = x.rows, x.cols, *scale_strides, int(weight_fp32), int(pow2), int(after), offset
    return Step(launch, *x.maps(tensors[0]), *tensors[1:], *numbers)


def single_read_steps(
    x: Matrix, blocks: int, scale_strides: tuple[int, int], tensors: tuple[str | int, ...], *, weight_fp32: bool,
    pow2: bool, eps: float, offset: float, two_passes: Callable[[], Steps],
) -> Steps:  # fmt: skip
    """Return the launch that also computes 1/rms. `blocks`: from single_read_blocks; others as for ring_step.

    `two_passes` makes what runs instead on a device that refuses it.
    """
    launch = SINGLE_READ.bind((x.t,), x.device, blocks, _THREADS, _SINGLE_READ_SHARED, resident=True)
    numbers = x.rows, x.cols, x.stride, *scale_strides, int(weight_fp32), int(pow2), eps, offset
    step = Step(launch, *x.maps("x"), *tensors, "words", *numbers)

    def refused() -> Steps:
        _refused.add(x.device)
        return two_passes()

    return Steps(step, kept_zeros={"words": x.strips * (4 * _SIDE + 1)}, if_not_resident=refused)
