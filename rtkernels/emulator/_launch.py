"""Running a built kernel on CPU tensors: arguments, tracked memory, reports."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy
import torch

from rtkernels.emulator import _build, lock
from rtkernels.emulator._dependent import history
from rtkernels.emulator._recording import TARGETS, Pointer
from rtkernels.errors import ArgumentError, RtkError

_KINDS = {
    1: "out_of_bounds",
    2: "misaligned",
    3: "uninitialised_shared",
    4: "race",
    5: "divergent_barrier",
    6: "absent_lanes",
    7: "launch_limit",
    8: "trap",
    9: "missing_fence",
    10: "before_wait",
}
_SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
launched: set[tuple[str, str]] = set()  # (unit, kernel) of every launch in this process


class EmulatorError(RtkError, RuntimeError):
    """A kernel did something in the host emulator that is undefined or fatal on a GPU.

    Attributes:
        kind: ``out_of_bounds``, ``misaligned``, ``uninitialised_shared``, ``race``, ``divergent_barrier``,
            ``absent_lanes``, ``launch_limit``, ``trap``, ``missing_fence`` or ``before_wait``.
        kernel: Name of the kernel.
        expression: C++ name of its variant.
        block: Index of the block.
        thread: Index of the thread in it.
        buffer: Name of the argument the access belongs to, ``"shared"``, or None.
        offset: Byte offset of the access from the buffer's first byte, or None.
        size: Bytes of the access, or None.
        place: ``file:line`` of the access, "" if unknown.
    """

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.kind: str = fields["kind"]
        self.kernel: str = fields["kernel"]
        self.expression: str = fields["expression"]
        self.block: tuple[int, int, int] = fields["block"]
        self.thread: tuple[int, int, int] = fields["thread"]
        self.buffer: str | None = fields.get("buffer")
        self.offset: int | None = fields.get("offset")
        self.size: int | None = fields.get("size")
        self.place: str = fields.get("place", "")


# ---- tracked memory -------------------------------------------------------------------------------------------------


class _Segment(ctypes.Structure):
    _fields_ = (
        ("host", ctypes.c_uint64),
        ("mask", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("copy", ctypes.c_uint64),
        ("written", ctypes.c_uint64),
    )


class _Relocation(ctypes.Structure):
    _fields_ = (
        ("segment", ctypes.c_uint64),
        ("at", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("target_at", ctypes.c_uint64),
    )


class _Error(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("write", ctypes.c_int),
        ("size", ctypes.c_uint64),
        ("segment", ctypes.c_int),
        ("offset", ctypes.c_longlong),
        ("pc", ctypes.c_uint64),
        ("detail", ctypes.c_char * 1024),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("shared_limit", ctypes.c_uint64),
        ("order", ctypes.c_uint64),
        ("races", ctypes.c_uint32),
        ("arg_count", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("resident", ctypes.c_uint32),
        ("max_threads", ctypes.c_uint32),
        ("waited", ctypes.c_uint32),
        ("waited_first", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("args", ctypes.c_void_p),
        ("arg_segment", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("segment_count", ctypes.c_uint64),
        ("relocations", ctypes.c_void_p),
        ("relocation_count", ctypes.c_uint64),
        ("error", _Error),
    )


class _Buffer:
    """The bytes of one tensor argument."""

    def __init__(self, index: int | tuple[int, int], name: str, tensor: torch.Tensor) -> None:
        self.index, self.name, self.tensor = index, name, tensor
        self.start = tensor.data_ptr()
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        self.bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0

    @property
    def end(self) -> int:
        return self.start + self.bytes

    def mark(self, valid: numpy.ndarray, segment_start: int) -> None:
        """Set the bytes of this tensor's elements in the mask of its segment."""
        mine = valid[self.start - segment_start : self.end - segment_start]
        if self.tensor.is_contiguous():
            mine[:] = 1
            return
        size = self.tensor.element_size()
        shape = (*self.tensor.shape, size)
        strides = (*(step * size for step in self.tensor.stride()), 1)
        numpy.lib.stride_tricks.as_strided(mine, shape, strides)[...] = 1

    def __str__(self) -> str:
        kind = str(self.tensor.dtype).removeprefix("torch.")
        strided = "" if self.tensor.is_contiguous() else f", strides {tuple(self.tensor.stride())}"
        return f"{self.name} ({kind} {list(self.tensor.shape)}{strided}, {self.bytes} bytes)"


class _Memory:
    """All tensors of one launch: overlapping ones merged into segments, one byte mask each."""

    def __init__(self, buffers: list[_Buffer]) -> None:
        groups: list[list[_Buffer]] = []
        end = 0
        for buffer in sorted((b for b in buffers if b.bytes), key=lambda b: b.start):
            if groups and buffer.start < end:
                groups[-1].append(buffer)
            else:
                groups.append([buffer])
                end = 0
            end = max(end, buffer.end)
        self.groups = groups
        self._table_start = {b.index: b.start for b in buffers if hasattr(b.tensor, TARGETS)}
        self.segments = (_Segment * max(len(groups), 1))()
        self.masks: list[numpy.ndarray] = []
        self.position: dict[int | tuple[int, int], tuple[int, int]] = {}
        for i, group in enumerate(groups):
            start, stop = group[0].start, max(b.end for b in group)
            mask = numpy.zeros(stop - start, numpy.uint8)
            for buffer in group:
                buffer.mark(mask, start)
                self.position[buffer.index] = (i, start)
            self.masks.append(mask)
            self.segments[i] = _Segment(start, mask.ctypes.data, stop - start, 0, 0)

    def relocations(self) -> tuple[Any, int]:
        """Return which words of the copies become addresses of copies: those of buffers reached through a table."""
        found = []
        for buffer in (b for group in self.groups for b in group if isinstance(b.index, tuple)):
            table, table_start = self.position[buffer.index[0]]
            table_at = self._table_start[buffer.index[0]] - table_start + 8 * buffer.index[1]
            target, start = self.position[buffer.index]
            found.append(_Relocation(table, table_at, target, buffer.start - start))
        return (_Relocation * max(len(found), 1))(*found), len(found)

    def nearest(self, segment: int, offset: int) -> tuple[_Buffer, int]:
        """Return the tensor an offset into a segment is in or closest to, and the offset from its first byte."""
        group = self.groups[segment]
        address = group[0].start + offset
        inside = [b for b in group if b.start <= address < b.end]
        best = inside[0] if inside else min(group, key=lambda b: min(abs(address - b.start), abs(address - b.end)))
        return best, address - best.start


# ---- launch ---------------------------------------------------------------------------------------------------------


@cache
def _runtime(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)  # first, so that kernels find it by its soname


@cache
def _library(path: str) -> Callable[[Any], int]:
    _runtime(str(_build.runtime()[0]))
    run = ctypes.CDLL(path).rtk_emu_run
    run.argtypes = [ctypes.POINTER(_Launch)]
    run.restype = ctypes.c_int
    return run


class Bound:
    """A kernel variant with grid, block and dynamic shared memory fixed: call it with the kernel's arguments."""

    def __init__(
        self,
        kernel: Any,
        variant: tuple[Any, ...],
        arch: int,
        grid: tuple[int, ...],
        block: Any,
        shared: int,
        cluster: int = 1,
        resident: bool = False,
        overlap: bool = False,
    ) -> None:
        self.kernel = kernel
        self.arch = arch
        self.expression: str = kernel.expression(variant)
        self.grid = _three(grid)
        self.block = _three(block)
        self.shared = shared
        self.cluster = cluster
        if any(not 0 <= n < 2**32 for n in (*self.grid, *self.block, cluster)) or not 0 <= shared < 2**63:
            raise ArgumentError(
                f"{kernel.name}: grid {self.grid}, block {self.block}, clusters of {cluster}, {shared} bytes of shared "
                "memory; none of them is below 0 or above 32 bits"
            )
        self.resident = resident
        self.overlap = overlap and arch >= 90

    def __call__(self, *args: int | float) -> None:
        from rtkernels.emulator import settings

        chosen = settings()
        kernel = self.kernel
        op = getattr(kernel, "op", kernel.name)
        defines = tuple(flag for flag in getattr(kernel, "flags", ()) if flag.startswith("-D"))
        library = _build.kernel(op, kernel.unit, self.expression, self.arch, defines, debug=chosen.debug)
        values, where, memory = self._arguments(args)
        relocations, relocation_count = memory.relocations()
        before = history()
        before.begin_launch(memory, self.overlap)
        launch = _Launch(
            grid=self.grid, block=self.block, shared_bytes=self.shared, shared_limit=_SHARED_LIMIT[self.arch],
            order=chosen.order_code, races=chosen.races, arg_count=len(args), cluster=self.cluster,
            resident=self.resident,
            args=ctypes.addressof(values), arg_segment=ctypes.addressof(where),
            segments=ctypes.addressof(memory.segments), segment_count=len(memory.groups),
            relocations=ctypes.addressof(relocations), relocation_count=relocation_count,
        )  # fmt: skip
        launched.add((kernel.unit, kernel.name))
        with lock:
            failed = _library(str(library))(ctypes.byref(launch))
        before.end_launch(memory, self.overlap, bool(launch.waited), bool(launch.waited_first))
        if failed:
            raise self._report(launch.error, memory, library)

    def _arguments(self, args: tuple[int | float, ...]) -> tuple[Any, Any, _Memory]:
        if len(args) != len(self.kernel.args):
            raise TypeError(f"{self.kernel.name} takes {len(self.kernel.args)} arguments, got {len(args)}")
        buffers = []
        for i, ((name, kind), value) in enumerate(zip(self.kernel.args, args, strict=True)):
            if kind == "tmap":
                value = Pointer.of(value.table)
            if kind not in ("ptr", "tmap") or not value:
                continue
            if not isinstance(value, Pointer):
                raise TypeError(f"{self.kernel.name}: pointer {name} comes from no tensor's data_ptr()")
            buffers.append(_Buffer(i, name, value.tensor))
            for word, target in getattr(value.tensor, TARGETS, {}).items():
                buffers.append(_Buffer((i, word), f"{name}[{word}]", target))
        memory = _Memory(buffers)
        values = (ctypes.c_uint64 * max(len(args), 1))()
        where = (ctypes.c_int * max(len(args), 1))(*[-1] * len(args))
        for i, ((name, kind), value) in enumerate(zip(self.kernel.args, args, strict=True)):
            if kind == "f64":
                values[i] = struct.unpack("=Q", struct.pack("=d", value))[0]
            elif i in memory.position:
                where[i], start = memory.position[i]
                value = value.table.data_ptr() if kind == "tmap" else value
                values[i] = (int(value) - start) & (2**64 - 1)
            else:
                values[i] = struct.unpack("=Q", _packed(self.kernel.name, name, kind, int(value)))[0]
        return values, where, memory

    def _report(self, error: _Error, memory: _Memory, library: Any) -> EmulatorError:
        kind = _KINDS[error.kind]
        place = _build.locate(library, error.pc)
        fields: dict[str, Any] = {
            "kind": kind, "kernel": self.kernel.name, "expression": self.expression, "place": place,
            "block": tuple(error.block), "thread": tuple(error.thread),
        }  # fmt: skip
        detail = error.detail.decode(errors="replace")
        if kind in ("divergent_barrier", "absent_lanes", "launch_limit", "trap"):
            what = f"{kind.replace('_', ' ')}: {detail}"
        else:
            fields["size"] = error.size
            what = self._describe_access(error, memory, fields, detail)
        text = f"{self.kernel.name}: {what}\n  in {self.expression}"
        if kind != "launch_limit":
            text += f", block {fields['block']}, thread {fields['thread']}"
        return EmulatorError(text + (f"\n  at {place}" if place else ""), **fields)

    def _describe_access(self, error: _Error, memory: _Memory, fields: dict[str, Any], detail: str) -> str:
        access = f"{'write' if error.write else 'read'} of {error.size} bytes"
        offset = error.offset
        if fields["kind"] == "misaligned" and detail:
            return f"misaligned {access}: {detail}"
        if error.segment >= 0:
            buffer, offset = memory.nearest(error.segment, error.offset)
            where = f"at byte {offset} of {buffer}"
            if fields["kind"] == "misaligned":
                where += f", address {(buffer.start + offset) % 256} modulo 256"
            elif offset < 0:
                where += f": {-offset} bytes before it"
            elif offset >= buffer.bytes:
                where += f": {offset - buffer.bytes} bytes past its end"
            elif offset + error.size > buffer.bytes:
                where += ": it runs past the end"
            elif fields["kind"] == "out_of_bounds":
                where += ": between its elements"
            fields["buffer"] = buffer.name
        elif fields["kind"] == "out_of_bounds" and error.segment == -1:
            why = f": {detail}" if detail else ", far from every tensor"
            return f"out of bounds {access} at address {hex(offset)}{why}"
        else:
            fields["buffer"] = "shared"
            where = f"at byte {offset} of {'dynamic ' if error.segment == -2 else ''}shared memory"
        fields["offset"] = offset
        kind = fields["kind"]
        if kind == "uninitialised_shared":
            return f"{access} {where} that the block has not written"
        if kind in ("race", "missing_fence", "before_wait"):
            return f"{kind.replace('_', ' ')}: {access} {where}; {detail}"
        return f"{kind.replace('_', ' ')} {access} {where}{'; ' + detail if detail else ''}"


def _packed(kernel: str, name: str, kind: str, value: int) -> bytes:
    """Return the eight bytes of an integer, as a launch on a GPU packs them."""
    try:
        return struct.pack("=q" if kind == "i64" else "=Q", value)
    except struct.error:
        raise ArgumentError(f"{kernel}: argument {name} is {value}, which is no integer of 64 bits") from None


def _three(dims: int | tuple[int, ...]) -> tuple[int, int, int]:
    given = (dims,) if isinstance(dims, int) else tuple(dims)
    if not 1 <= len(given) <= 3:
        raise ArgumentError(f"a grid or a block has 1 to 3 dimensions, not {len(given)}")
    return (given + (1, 1, 1))[:3]  # type: ignore[return-value]
