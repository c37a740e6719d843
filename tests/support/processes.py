"""Tests in two processes on gloo. Starting them is expensive, so a test file starts them once for all its checks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

WORLD = 2
PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "pytest"]
Check = Callable[[int, Any], None]


def _joined(rank: int, checks: Sequence[Check], path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    store = f"file://{path}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=120))
    try:
        mesh = init_device_mesh("cpu", (WORLD,))
        for check in checks:
            try:
                check(rank, mesh)
            except Exception as error:
                raise AssertionError(f"{check.__name__}, rank {rank}") from error
    finally:
        dist.destroy_process_group()


def spawn(function: Callable[..., None], *args: Any, world: int = WORLD) -> None:
    """Run ``function(rank, *args)`` in processes, forked from one that has imported what most of them need."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    torch.multiprocessing.start_processes(function, args=args, nprocs=world, start_method="forkserver")


def run_in_processes(checks: Sequence[Check], path: Any) -> None:
    """Run checks, one after the other, in two processes; each gets its rank and a mesh of both."""
    spawn(_joined, tuple(checks), str(path))


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
