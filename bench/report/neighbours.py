"""Efficiency along rows and along columns, and where it drops next to a power of two.

A kernel should be no slower next to a power of two than at it: every size is compared with the powers of two below and
above it that were measured, and a drop by more than ``LIMIT`` is reported. Powers of two are compared with each other
too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from bench.measure.neighbours import ELEMENTS

LIMIT = 0.15
_FEWEST = 3  # points of a line


class Line(NamedTuple):
    """Points of one op that differ in one size: ``{size: efficiency}``, ascending; `fixed` says what they share."""

    op: str
    along: str
    fixed: str
    points: dict[int, float]


class Step(NamedTuple):
    """An efficiency that is lower than at a neighbouring power of two, by the share `fall`."""

    line: Line
    size: int
    neighbour: int
    fall: float

    def __str__(self) -> str:
        points = self.line.points
        return (
            f"{self.line.op}, {self.size} {self.line.along} ({self.line.fixed}): {points[self.size]:.3f}, "
            f"{self.fall:.0%} below {points[self.neighbour]:.3f} at {self.neighbour}"
        )


def lines(rows: list[dict[str, Any]]) -> list[Line]:
    """Return the lines in the measured rows of a sweep: along columns, then along rows, op by op."""
    measured: dict[str, dict[tuple[int, int], float]] = {}
    for row in rows:
        if "failed" not in row:
            height, width = map(int, row["shape"].split("x"))
            measured.setdefault(row["row"], {})[height, width] = row["efficiency"]
    return [line for op, points in measured.items() for line in _lines_of(op, points)]


def _lines_of(op: str, points: dict[tuple[int, int], float]) -> Iterator[Line]:
    found: dict[tuple[str, str], dict[int, float]] = {}
    for (height, width), efficiency in points.items():
        found.setdefault(("columns", f"{height} rows"), {})[width] = efficiency
        found.setdefault(("rows", f"{width} columns"), {})[height] = efficiency
        if height == ELEMENTS // width:
            found.setdefault(("columns", f"{ELEMENTS} elements"), {})[width] = efficiency
    for (along, fixed), line in sorted(found.items()):
        if len(line) >= _FEWEST:
            yield Line(op, along, fixed, dict(sorted(line.items())))


def steps(found: list[Line], limit: float = LIMIT) -> list[Step]:
    """Return every efficiency that is lower by more than `limit` than at a neighbouring power of two."""
    return [
        Step(line, size, neighbour, fall)
        for line in found
        for size in line.points
        for neighbour in _neighbours(size, line.points)
        if (fall := 1.0 - line.points[size] / line.points[neighbour]) > limit
    ]


def _neighbours(size: int, measured: dict[int, float]) -> list[int]:
    """Return the nearest powers of two that were measured, below and above a size."""
    powers = [other for other in measured if other & (other - 1) == 0]
    below, above = [p for p in powers if p < size], [p for p in powers if p > size]
    return [*below[-1:], *above[:1]]


def text(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of efficiencies and the steps in them, to be printed."""
    found = lines(rows)
    printed = [f"Efficiency (copy / time); * is more than {LIMIT:.0%} below a neighbouring power of two", ""]
    large = steps(found)
    marked = {(step.line.op, step.line.along, step.line.fixed, step.size) for step in large}
    for line in found:
        cells = [f"{size} {e:.2f}{'*' * ((*line[:3], size) in marked)}" for size, e in line.points.items()]
        printed.append(f"- {line.op}, {line.along} at {line.fixed}: " + ", ".join(cells))
    named = [f"- {step}" for step in large] or ["- none"]
    return [*printed, "", f"Steps of more than {LIMIT:.0%}:", "", *named]
