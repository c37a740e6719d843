"""Runs a function in a process of its own, which may crash or hang."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any


def fork() -> int:
    """Fork without a warning about threads: the child runs tests, and ends by ``os._exit``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
        return os.fork()


def apart(work: Callable[[], Any], limit: float) -> Any:
    """Return what a function returns in a process of its own, or "crashed" or "hung"."""
    read, write = os.pipe()
    if not (pid := fork()):
        with contextlib.suppress(BaseException):
            os.setpgid(0, 0)
            os.close(read)
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            data = pickle.dumps(work())
            with os.fdopen(write, "wb") as pipe:
                pipe.write(data)
        os._exit(0)
    os.close(write)
    end = time.monotonic() + limit
    parts = []
    with os.fdopen(read, "rb", buffering=0) as pipe:
        while (left := end - time.monotonic()) > 0 and select.select([pipe], [], [], left)[0]:
            if not (part := pipe.read(1 << 20)):
                break
            parts.append(part)
        else:
            parts = ["hung"]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if parts == ["hung"]:
        return "hung"
    try:
        return pickle.loads(b"".join(parts))
    except (EOFError, pickle.UnpicklingError):
        return "crashed"
