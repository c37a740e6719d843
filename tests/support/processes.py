"""Tests in several processes on gloo. Starting them takes long, so a test file starts them once for all its checks."""

from __future__ import annotations

import faulthandler
import multiprocessing
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torch.utils._python_dispatch import TorchDispatchMode

WORLD = 2
PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "pytest"]
CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV)
Check = Callable[[int, Any], None]
_attempt = 0


def _started(rank: int, attempt: int, function: Callable[..., None], args: tuple) -> None:
    global _attempt
    _attempt = attempt
    faulthandler.enable()
    torch.set_num_threads(1)
    function(rank, *args)


def spawn(function: Callable[..., None], *args: Any, world: int = WORLD) -> None:
    """Run ``function(rank, *args)`` in processes, forked from one that has imported what most of them need.

    They execute Python and torch, no machine code of this project. One of them once ended with a "double free" (torch
    2.13; hundreds of starts before and after did not, and valgrind finds no defect in the same checks). After a crash,
    the stacks are in the log, and all processes are started again. A second crash is a failure.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    for attempt in range(2):
        given = (attempt, function, args)
        context = torch.multiprocessing.start_processes(_started, given, world, join=False, start_method="forkserver")
        try:
            while not context.join():
                pass
            return
        except (ProcessExitedException, ProcessRaisedException):  # of the crashed process, or of one that missed it
            crashes = [signal.Signals(-p.exitcode).name for p in context.processes if -(p.exitcode or 0) in CRASHES]
            if attempt or not crashes:
                raise
            warnings.warn(f"{function.__name__} ended with {crashes[0]} and is started again", stacklevel=2)


@contextmanager
def joined(rank: int, path: Any, world: int = WORLD, backend: str = "gloo") -> Iterator[None]:
    """Make this process a member of the default group, whose processes find each other by a file under path."""
    store = f"file://{path}/store_of_{world}_{_attempt}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=300))
    try:
        yield
    finally:
        dist.destroy_process_group()


def _checked(rank: int, checks: Sequence[Check], path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    with joined(rank, path):
        mesh = init_device_mesh("cpu", (WORLD,))
        for check in checks:
            try:
                check(rank, mesh)
            except Exception as error:
                raise AssertionError(f"{check.__name__}, rank {rank}") from error


def run_in_processes(checks: Sequence[Check], path: Any) -> None:
    """Run checks, one after the other, in two processes; each gets its rank and a mesh of both."""
    spawn(_checked, tuple(checks), str(path))


def use_the_cpu() -> None:
    """Tell libraries that ask torch for the accelerator of this machine, when they are imported, that it is the CPU."""
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"


class Operators(TorchDispatchMode):
    """Records the names of our operators that are called while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "rtkernels":
            self.names.add(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def whole(t: torch.Tensor) -> torch.Tensor:
    """Return all of a DTensor; a plain tensor is returned unchanged."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t
