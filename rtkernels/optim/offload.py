"""States of ``AdamW`` and ``Lion`` in pinned host memory, which pass through the device in chunks at every step.

A chunk has the states of as many parameters as fit, or a part of those of a large one. Three chunks are in flight, each
in its own memory on the device: one arrives on a stream, one is updated on the current stream, and one goes back on
another stream. Parts begin at whole blocks of codes, so updates have the same bits as without offloading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.multi.dynamic_codes import BLOCKS, codes_of, in_memory
from rtkernels.ops.multi.multi_tables import check_together
from rtkernels.runtime.launch.memory import is_capturing
from rtkernels.runtime.operator.sharding import is_sharded

MIN_ELEMENTS = 1 << 16  # of a parameter; states of smaller ones stay on the device
CHUNK_BYTES = 64 << 20
_SLOTS = 3
_UNIT = 4096  # elements; slices of a parameter begin at multiples of it
_ALIGNMENT = 256
Lists = tuple[list[Tensor], ...]
_streams: dict[torch.device, tuple[Any, Any]] = {}


def is_offloaded(p: Tensor, group: dict[str, Any]) -> bool:
    """Return whether the states of a parameter are in host memory."""
    return group["offload"] and p.numel() >= MIN_ELEMENTS


def check(p: Tensor) -> None:
    """Raise an ArgumentError for a parameter whose states cannot be in host memory."""
    if is_sharded(p):
        raise ArgumentError("offload is True, and a parameter is a DTensor; expected plain tensors, or offload=False")


def on_host(t: Any) -> Any:
    """Return a tensor of a state in pinned host memory, with the same strides; anything else as it is."""
    if not isinstance(t, Tensor) or not t.is_cuda:
        return t
    return torch.empty_like(t, device="cpu", pin_memory=True).copy_(t)


class _Slice(NamedTuple):
    """Elements of a parameter, in the order of memory."""

    index: int  # of the parameter
    begin: int
    end: int
    last: bool


class Offloaded:
    """A step of parameters whose states are in host memory.

    Args:
        lists: As for ``Stepping._launch``; moments, scales and masters are in host memory.
        kind: How moments are kept.
        launch: Calls the operator with lists of slices on the device.
    """

    def __init__(self, lists: Lists, kind: str, launch: Callable[[Lists], None]) -> None:
        self._kind, self._launch = kind, launch
        params = lists[8] or lists[0]
        check_together("grads", lists[1], "weights", params)
        self._device = params[0].device
        if self._device.type == "cuda" and is_capturing():
            raise ArgumentError(
                "offload is True, and a CUDA graph is being captured; expected a step outside of graphs"
            )
        self._has_scales = bool(lists[6])
        # Weights are in host memory if they are masters.
        self._moved = [i for i in (0, 2, 3, 6, 7) if lists[i] and (i > 0 or lists[8])]
        flat = (1, 8) if 0 in self._moved else (0, 1)
        ordered = {*self._moved, *flat}
        self._lists = [[in_memory(t).view(-1) for t in one] if i in ordered else one for i, one in enumerate(lists)]
        self._sizes = [p.numel() for p in params]
        sizes = {i: [t.element_size() * t.numel() / n for t, n in zip(self._lists[i], self._sizes, strict=True)]
                 for i in self._moved}  # fmt: skip
        self._bytes_each = [sum(one[p] for one in sizes.values()) for p in range(len(self._sizes))]

    def run(self, origin: Callable[[Tensor, int], Tensor]) -> None:
        """Take the step; `origin` returns the place among random numbers of the elements from a given one on."""
        chunks = list(self._chunks())
        # The operator advances the count of every slice: that of the last one is the parameter's.
        steps = {s: self._lists[4][s.index] if s.last else self._lists[4][s.index].clone() for c in chunks for s in c}
        plans = [self._lists_of(chunk, steps, origin) for chunk in chunks]
        hosts = [[t for i in self._moved for t in lists[i]] for lists in plans]
        nbytes = max(sum(aligned(t.nbytes) for t in host) for host in hosts)
        mover = (_Streams if self._device.type == "cuda" else _Mover)(self._device, nbytes)
        for number, (lists, host) in enumerate(zip(plans, hosts, strict=True)):
            here = mover.arrive(number % _SLOTS, host)
            rest = iter(here)
            for i in self._moved:
                lists[i] = [next(rest) for _ in lists[i]]
            self._launch(tuple(lists))
            mover.go_back(number % _SLOTS, here, host)
        mover.finish()

    def _lists_of(
        self, chunk: list[_Slice], steps: dict[_Slice, Tensor], origin: Callable[[Tensor, int], Tensor]
    ) -> list[list[Tensor]]:
        lists = [[self._part(i, s) for s in chunk] if self._lists[i] and i not in (4, 5) else [] for i in range(9)]
        lists[4] = [steps[s] for s in chunk]
        lists[5] = [origin(self._lists[5][s.index], s.begin) for s in chunk] if self._lists[5] else []
        return lists

    def _chunks(self) -> Iterator[list[_Slice]]:
        chunk: list[_Slice] = []
        room = CHUNK_BYTES
        for index, (size, each) in enumerate(zip(self._sizes, self._bytes_each, strict=True)):
            begin = 0
            while begin < size:
                fits = int(room / each) // _UNIT * _UNIT
                if fits < min(_UNIT, size - begin) and chunk:
                    yield chunk
                    chunk, room = [], CHUNK_BYTES
                    continue
                end = min(begin + max(fits, _UNIT), size)
                chunk.append(_Slice(index, begin, end, end == size))
                room -= (end - begin) * each
                begin = end
        if chunk:
            yield chunk

    def _part(self, i: int, s: _Slice) -> Tensor:
        t, begin, end = self._lists[i][s.index], s.begin, s.end
        if i in (6, 7):
            block = BLOCKS[self._kind]
            begin, end = begin // block, -(-end // block)
        elif i in (2, 3) and self._kind == "4bit" and self._has_scales:
            begin, end = codes_of(begin, "4bit"), codes_of(end, "4bit")
        return t[begin:end]


class _Mover:
    """Copies of chunks, on a device without streams; `nbytes` are those of the largest chunk."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._slots = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(_SLOTS)]

    def arrive(self, slot: int, host: list[Tensor]) -> list[Tensor]:
        """Return tensors of a chunk on the device."""
        here, at = [], 0
        for there in host:
            here.append(self._slots[slot][at : at + there.nbytes].view(there.dtype))
            here[-1].copy_(there, non_blocking=True)
            at += aligned(there.nbytes)
        return here

    def go_back(self, slot: int, here: list[Tensor], host: list[Tensor]) -> None:
        """Copy them to host memory."""
        for mine, there in zip(here, host, strict=True):
            there.copy_(mine, non_blocking=True)

    def finish(self) -> None:
        """Let the current stream wait for the copies, and with it whatever gets this memory next."""


class _Streams(_Mover):
    """The same on a GPU."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        super().__init__(device, nbytes)
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._in, self._out = _streams[device]
        self._current = torch.cuda.current_stream(device)
        self._back: list[Any] = [None] * _SLOTS  # events after which a slot is free
        self._in.wait_stream(self._current)

    def arrive(self, slot: int, host: list[Tensor]) -> list[Tensor]:
        if self._back[slot] is not None:
            self._in.wait_event(self._back[slot])
        with torch.cuda.stream(self._in):
            here = super().arrive(slot, host)
        self._current.wait_stream(self._in)
        return here

    def go_back(self, slot: int, here: list[Tensor], host: list[Tensor]) -> None:
        self._out.wait_stream(self._current)
        with torch.cuda.stream(self._out):
            super().go_back(slot, here, host)
            self._back[slot] = self._out.record_event()

    def finish(self) -> None:
        self._current.wait_stream(self._out)


def aligned(nbytes: int) -> int:
    """Return how far apart tensors of a chunk are."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
