"""What ``rtkernels.enable()`` did: calls per overload that our kernels took, and those that went to torch, with
reasons.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, TextIO


class Count:
    """Calls of one overload. Threads that count at the same time may lose a call: nobody waits for a lock."""

    __slots__ = ("family", "ours", "torch")

    def __init__(self, family: str) -> None:
        self.family = family
        self.ours = 0
        self.torch: Counter[str] = Counter()


COUNTS: dict[str, Count] = {}


def count_of(name: str, family: str) -> Count:
    """Return the counter of an overload; it stays the same object until the process ends."""
    return COUNTS.setdefault(name, Count(family))


def reset() -> None:
    """Set all counters to zero."""
    for count in COUNTS.values():
        count.ours = 0
        count.torch.clear()


def report(*, as_rows: bool = False, file: TextIO | None = None) -> list[dict[str, Any]] | None:
    """Print, for each aten overload that was called, how many calls our kernel took, how many torch's, and why.

    Args:
        as_rows: Return the table instead, for a notebook: ``pandas.DataFrame(rtkernels.report(as_rows=True))``.
        file: Where to print; None: standard output.

    Returns:
        With `as_rows`, a list of ``{"overload", "family", "ours", "torch", "why"}``, most calls first; `why` maps
        reasons to numbers of calls. Else None.
    """
    rows = [
        {
            "overload": name,
            "family": count.family,
            "ours": count.ours,
            "torch": sum(count.torch.values()),
            "why": dict(sorted(count.torch.items(), key=lambda item: -item[1])),
        }
        for name, count in COUNTS.items()
        if count.ours or count.torch
    ]
    rows.sort(key=lambda row: (-row["ours"] - row["torch"], row["overload"]))
    if as_rows:
        return rows
    print(_text(rows), file=file or sys.stdout)
    return None


def _text(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "no call of an overload that rtkernels can take, since it was enabled"
    lines = [("overload", "family", "ours", "torch", "why torch")]
    for row in rows:
        why = ", ".join(f"{reason} ({n})" for reason, n in row["why"].items())
        lines.append((row["overload"], row["family"], str(row["ours"]), str(row["torch"]), why))
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    form = f"{{:<{widths[0]}}}  {{:<{widths[1]}}}  {{:>{widths[2]}}}  {{:>{widths[3]}}}  {{}}"
    return "\n".join(form.format(*line).rstrip() for line in lines)
