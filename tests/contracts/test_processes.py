"""How tests start processes: a crash of one is seen as such once; a failed check and a second crash are failures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.processes import joined, spawn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")


def _crash(rank: int, path: str, times: int) -> None:
    """Join the group, crash in rank 1 as often as asked, then add what every process has."""
    with joined(rank, path):
        total = torch.ones(1)
        dist.all_reduce(total)
        if rank == 1:
            started = Path(path) / "started"
            before = len(started.read_text()) if started.exists() else 0
            started.write_text("." * (before + 1))
            if before < times:
                os.abort()
        dist.all_reduce(total)
        Path(path, str(rank)).write_text(str(total.item()))


def _fail(rank: int, path: str) -> None:
    with Path(path, "started").open("a") as file:
        file.write(".")
    raise ValueError("wrong")


@pytest.mark.one_in(3)
def test_processes_that_crash_are_started_again_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="_crash ended with SIGABRT and is started again"):
        spawn(_crash, str(tmp_path), 1)
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() == "4.0"
    again = tmp_path / "again"
    again.mkdir()
    with pytest.warns(UserWarning), pytest.raises((ProcessExitedException, ProcessRaisedException)):
        spawn(_crash, str(again), 2)
    failing = tmp_path / "failing"
    failing.mkdir()
    with pytest.raises(ProcessRaisedException, match="wrong"):
        spawn(_fail, str(failing), world=1)
    assert (failing / "started").read_text() == "."
