"""What a model keeps between calls of ``generate()``: programs, their graphs, and the memory that they use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch

from rtkernels.models.generation.cache import FixedCache
from rtkernels.models.generation.step import Program

MAX_PROGRAMS = 8


class State:
    """The programs of a model, most recently used last. Copies and pickles of the model begin without any."""

    def __init__(self, report: Any = None) -> None:
        self.report = report
        self.programs: OrderedDict[Hashable, Program] = OrderedDict()
        self.checked: set[Hashable] = set()  # forms of calls whose first step gave transformers' logits
        self.refused: dict[Hashable, str] = {}  # those that did not
        self.stamp: Hashable = None
        self.pool: Any = None
        self.ring: Any = None
        self.done: Any = None  # recorded behind the last step of the last call
        self.loops = 0  # decoding loops that ran, ours or transformers'
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:
        return State, (self.report,)

    def refuse(self, reason: str) -> None:
        """Record that a call ran transformers' own loop, and why."""
        if self.report is not None:
            self.report.not_captured[reason] += 1

    def clear(self) -> None:
        """Drop all programs after waiting for steps in flight."""
        if self.done is not None:
            self.done.synchronize()
        self.programs.clear()
        self.checked.clear()
        self.refused.clear()
        self.pool = None

    def update(self, stamp: Hashable) -> None:
        """Drop programs that were built for other weights, modules or settings."""
        if stamp != self.stamp:
            self.clear()
            self.stamp = stamp

    def keep(self, cache: Any) -> None:
        """Drop the programs that do not use a cache, to free memory."""
        if self.done is not None:
            self.done.synchronize()
        for key, program in list(self.programs.items()):
            if program.cache is not cache:
                del self.programs[key]
        self.pool = None
        torch.cuda.empty_cache()

    def add(self, key: Hashable, program: Program) -> None:
        self.programs[key] = program
        while len(self.programs) > MAX_PROGRAMS:
            if self.done is not None:
                self.done.synchronize()
            self.programs.popitem(last=False)

    def cache_of(self, batch: int, capacity: int) -> FixedCache | None:
        """Return the cache of a batch size and capacity if a program has one."""
        found = (p.cache for p in self.programs.values() if (p.cache.batch, p.cache.capacity) == (batch, capacity))
        return next(found, None)

    def graph_pool(self) -> Any:
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        return self.pool
