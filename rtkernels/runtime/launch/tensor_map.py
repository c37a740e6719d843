"""Tensor maps: descriptors of matrices for TMA (sm_90 and newer), 128 bytes that the driver encodes.

A kernel takes one as ``const __grid_constant__ ptx::TensorMap``, and its record as ``name:tmap``. Encoding one takes a
few microseconds on the host and no device memory, so it may happen while a CUDA graph is captured. A map contains an
address, so maps are cached by address and layout; a stale one is harmless.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch

from rtkernels.errors import RtkError

Words = tuple[int, ...]

_BYTES = 128
_ALIGNMENT = 64
_TYPES = {"byte": (0, 1), "fp16": (6, 2), "fp32": (7, 4), "bf16": (9, 2)}  # CUtensorMapDataType, bytes
_SWIZZLE = {False: 0, 64: 2, True: 3}  # no swizzle, 64 bytes, or 128
_PROMOTION = {False: 0, True: 3}  # of L2 reads to 256 bytes
_SECTOR = 32  # bytes of L2
_MAPS = 256  # cached maps
_NO_CONTEXT = (3, 201)  # CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_INVALID_CONTEXT


class TensorMap:
    """The bytes of one map; ``address`` is their address on the host."""

    __slots__ = ("_memory", "address")

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
        start = ctypes.addressof(self._memory)
        self.address = start + -start % _ALIGNMENT


class EmulatedMap:
    """A map for the emulator: a table of words (``emulator/runtime/mbarrier.h``), the first one the tensor."""

    def __init__(self, address: Any, size: int, sizes: Words, strides: Words, box: Words, swizzle: bool | int) -> None:
        from rtkernels.emulator import points_to

        if problem := _refused(int(address), size, sizes, strides, box, swizzle):
            raise RtkError(f"the driver would refuse this tensor map: {problem}")

        def five(words: Words) -> list[int]:
            return [*words, *[0] * (5 - len(words))]

        first = int(address.tensor.data_ptr())
        head = [first, int(address) - first, size, len(sizes), int(swizzle)]
        self.table = torch.tensor(
            [*head, *five(sizes), *five((size, *strides)), *five(box)], dtype=torch.int64, device="cpu"
        )
        points_to(self.table, {0: address.tensor})


def _refused(address: int, size: int, sizes: Words, strides: Words, box: Words, swizzle: bool | int) -> str:
    """Return which rule of cuTensorMapEncodeTiled a map breaks, or ""."""
    rank = len(sizes)
    if not 1 <= rank <= 5 or len(strides) != rank - 1 or len(box) != rank:
        return f"{rank} sizes, {len(strides)} strides and {len(box)} sizes of a box, where 1 to 5 have a stride less"
    if address % 16:
        return f"the address {address:#x} is not a multiple of 16"
    if bad := [n for n in sizes if not 1 <= n <= 2**32]:
        return f"a size of {bad[0]}; 1 to 2**32"
    if bad := [n for n in strides if n % 16 or not 0 <= n < 2**40]:
        return f"a stride of {bad[0]} bytes; multiples of 16 below 2**40"
    if bad := [n for n in box if not 1 <= n <= 256]:
        return f"a box of {bad[0]} elements; 1 to 256"
    widest = 128 if swizzle is True else int(swizzle)
    if box[0] * size % 16 or (swizzle and box[0] * size > widest):
        return f"a box of {box[0] * size} bytes in the first dimension; a multiple of 16, and at most 128 with swizzle"
    return ""


def tiled_map(
    address: int,
    token: str,
    sizes: Words,
    strides: Words,
    box: Words,
    swizzle: bool | int = True,
    promote: bool = True,
) -> TensorMap | EmulatedMap:
    """Return the map of a tensor for TMA copies of boxes.

    Args:
        address: Address of the first element on the device, a multiple of 16.
        token: ``"bf16"``, ``"fp16"``, ``"fp32"`` or ``"byte"``.
        sizes: Elements in each dimension, the contiguous one first; elements outside are read as 0 and not written.
        strides: Strides in bytes of all dimensions but the first; multiples of 16.
        box: Elements of a box in each dimension, at most 256, and at most `swizzle` bytes in the first.
        swizzle: Swizzle by 128 bytes in shared memory, or by 64; False leaves rows contiguous there.
        promote: Let L2 fetch 256 bytes per miss, unless rows begin inside of sectors, which then takes longer (on an
            H200, a product of 4096 x 4096 x 1000 in bf16 takes 75 us instead of 66).

    Raises:
        RtkError: The driver refuses the map.
    """
    if hasattr(address, "tensor"):  # while a launcher runs in the emulator
        return EmulatedMap(address, _TYPES[token][1], sizes, strides, box, swizzle)
    promote = promote and not any(stride % _SECTOR for stride in strides[:1])
    return _encoded_map(address, token, sizes, strides, box, swizzle, promote)


@lru_cache(maxsize=_MAPS)
def _encoded_map(
    address: int, token: str, sizes: Words, strides: Words, box: Words, swizzle: bool | int, promote: bool
) -> TensorMap:
    encoded, rank = TensorMap(), len(sizes)
    arrays = (
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
    )
    args = (encoded.address, _TYPES[token][0], rank, address, *arrays, 0, _SWIZZLE[swizzle], _PROMOTION[promote], 0)
    status = _encode()(*args)
    if status in _NO_CONTEXT:
        from rtkernels.runtime.launch.driver import make_context

        make_context()
        status = _encode()(*args)
    if status:
        raise RtkError(
            f"cuTensorMapEncodeTiled failed with status {status} for {token} {list(sizes[::-1])}, "
            f"{list(strides[::-1])} bytes apart, at {address:#x}, boxes of {list(box[::-1])}"
        )
    return encoded


@cache
def _encode() -> Callable[..., int]:
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, number, word = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32
    function.argtypes = [pointer, number, word, pointer, pointer, pointer, pointer, pointer] + [number] * 4
    function.restype = ctypes.c_int
    return function
