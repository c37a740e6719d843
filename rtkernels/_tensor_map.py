"""Tensor maps: what the bulk tensor copy engine (sm_90 and newer) must know of a matrix, 128 bytes made by the driver.

A kernel takes one as ``const __grid_constant__ ptx::TensorMap`` and its record as ``name:tmap``. Making one costs a few
microseconds on the host and touches no device memory, so it may happen while a CUDA graph is captured. A map holds an
address, so the ones in use are found again by address and layout; a stale one is harmless.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache

from rtkernels.errors import RtkError

_BYTES, _ALIGNMENT = 128, 64
_TYPES = {"fp16": (6, 2), "fp32": (7, 4), "bf16": (9, 2)}  # CUtensorMapDataType, bytes
_SWIZZLE_NONE, _SWIZZLE_128B = 0, 3
_PROMOTE_256B = 3  # of L2 reads
_MAPS = 256  # remembered
_NO_CONTEXT = (3, 201)  # CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_INVALID_CONTEXT


class TensorMap:
    """The bytes of one map; ``address`` is where they are on the host."""

    __slots__ = ("_memory", "address")

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
        start = ctypes.addressof(self._memory)
        self.address = start + -start % _ALIGNMENT


@lru_cache(maxsize=_MAPS)
def matrix_map(
    address: int, token: str, rows: int, cols: int, pitch: int, box_rows: int, box_cols: int, swizzle: bool = True
) -> TensorMap:
    """Return the map of a row-major matrix that is copied in boxes.

    Args:
        address: Of the first element on the device, a multiple of 16.
        token: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        rows: Rows of the matrix; what lies outside of it is read as 0.
        cols: Columns of the matrix.
        pitch: Elements from row to row; a multiple of 16 bytes.
        box_rows: Rows of a box, at most 256.
        box_cols: Columns of a box, at most 256; at most 128 bytes with `swizzle`.
        swizzle: By 128 bytes, in shared memory; else rows follow each other there.

    Raises:
        RtkError: The driver refuses.
    """
    kind, size = _TYPES[token]
    made = TensorMap()
    dims = (ctypes.c_uint64 * 2)(cols, rows)
    strides = (ctypes.c_uint64 * 1)(pitch * size)
    box = (ctypes.c_uint32 * 2)(box_cols, box_rows)
    steps = (ctypes.c_uint32 * 2)(1, 1)
    swizzling = _SWIZZLE_128B if swizzle else _SWIZZLE_NONE
    args = (made.address, kind, 2, address, dims, strides, box, steps, 0, swizzling, _PROMOTE_256B, 0)
    status = _encode()(*args)
    if status in _NO_CONTEXT:
        from rtkernels._kernel import make_context

        make_context()
        status = _encode()(*args)
    if status:
        raise RtkError(
            f"cuTensorMapEncodeTiled failed with status {status} for {token} [{rows}, {cols}], rows {pitch} apart, at "
            f"{address:#x}, boxes of [{box_rows}, {box_cols}]"
        )
    return made


@cache
def _encode() -> Callable[..., int]:
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, number, word = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32
    function.argtypes = [pointer, number, word, pointer, pointer, pointer, pointer, pointer] + [number] * 4
    function.restype = ctypes.c_int
    return function
