"""An arm in a process of its own, and moments on the device."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def one(run: Callable[[], dict[str, Any]], out: Path) -> int:
    """Write the record of the arm of this process; one whose library is missing is recorded so."""
    try:
        record = run()
    except ImportError as error:
        record = {"absent": str(error)}
    out.write_text(json.dumps(record))
    return 0


def start(module: str, arm: str, argv: list[str]) -> dict[str, Any]:
    """Run an arm by the same command line in a new process; return its record."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        command = [sys.executable, "-m", module, *_without_out(argv), "--one", arm, "--out", str(out)]
        ended = subprocess.run(command, capture_output=True, text=True)
        return json.loads(out.read_text()) if out.exists() else {"failed": ended.stderr[-2000:]}


def _without_out(argv: list[str]) -> list[str]:
    kept, skip = [], False
    for word in argv:
        if not skip and word != "--out":
            kept.append(word)
        skip = word == "--out"
    return kept


def mark(device: str) -> Any:
    """Return a moment: an event on the device, or the time."""
    if device == "cpu":
        return time.perf_counter()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(a: Any, b: Any) -> float:
    """Return the milliseconds between two moments."""
    return (b - a) * 1000 if isinstance(a, float) else a.elapsed_time(b)


def wait(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
