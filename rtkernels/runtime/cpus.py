"""The number of CPUs that this process may use: its affinity and cgroup quotas, not the CPUs of the machine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def usable() -> int:
    """Return the number of CPUs that this process may use, at least 1."""
    try:
        count = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        count = os.cpu_count() or 1
    return max(1, min([count, *(math.ceil(quota) for quota in _quotas())]))


def _quotas() -> Iterator[float]:
    """Yield the quotas, in CPUs, of the cgroups of this process and of all their parents."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:  # version 2
            yield from _walk(_CGROUPS, group, _quota_v2)
            yield from _walk(_CGROUPS / "unified", group, _quota_v2)
        elif "cpu" in controllers.split(","):
            for mount in dict.fromkeys((controllers, "cpu,cpuacct", "cpu")):
                yield from _walk(_CGROUPS / mount, group, _quota_v1)


def _walk(mount: Path, group: str, read: Callable[[Path], float | None]) -> Iterator[float]:
    """Yield the limits of a cgroup and its parents; in a container, the name may be that on the host."""
    place = mount / group.lstrip("/")
    for directory in (place, *place.parents):
        if not directory.is_relative_to(mount):
            return
        try:
            quota = read(directory)
        except (OSError, ValueError):
            continue
        if quota is not None:
            yield quota


def _quota_v2(directory: Path) -> float | None:
    limit, period = (directory / "cpu.max").read_text().split()
    return None if limit == "max" else int(limit) / int(period)


def _quota_v1(directory: Path) -> float | None:
    limit = int((directory / "cpu.cfs_quota_us").read_text())
    return None if limit <= 0 else limit / int((directory / "cpu.cfs_period_us").read_text())
