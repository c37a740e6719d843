"""Bad labels: kernels write what they find into host memory, which costs no synchronisation to look at."""

from __future__ import annotations

from typing import Any

import torch

from rtkernels.errors import ArgumentError


class _Report:
    """Where kernels on one device report a label outside the vocabulary: found (1 labels, 2 ids), label, row."""

    def __init__(self, device: int) -> None:
        self.tensor = torch.zeros(3, dtype=torch.int64, device="cpu", pin_memory=device >= 0)
        self._values = self.tensor.numpy()

    def raise_if_bad(self) -> None:
        values = self._values
        if values[0]:
            label, row = int(values[1]), int(values[2])
            name, place = ("labels", "row") if values[0] == 1 else ("ids", "place")
            values[0] = 0
            raise ArgumentError(
                f"{name} has {label} in {place} {row} of the flattened {name}, which is neither a column of the "
                f"vocabulary nor ignore_index (on a GPU this is about an earlier call)"
            )


_REPORTS: dict[int, _Report] = {}


def report(device: int) -> _Report:
    """Return the report of a device, CUDA ordinal or -1."""
    found = _REPORTS.get(device)
    if found is None:
        found = _REPORTS[device] = _Report(device)
    return found


def raise_pending(device: int | None = None) -> None:
    """Raise an ArgumentError if a finished kernel has reported a bad label, on one device or on any."""
    for number, found in list(_REPORTS.items()):
        if device is None or number == device:
            found.raise_if_bad()


def reported(device: int) -> dict[str, Any]:
    """Return what ``Steps`` has for kernels that report bad labels: the memory, and that it is looked at."""
    found = report(device)
    after = found.raise_if_bad if device < 0 else None  # the emulator has finished by then
    return {"kept": {"report": found.tensor}, "before": found.raise_if_bad, "after": after}
