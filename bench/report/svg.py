"""Small charts as SVG text, written by hand: equal data gives equal bytes with any version of anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

INK, GRID, OURS, LIMIT = "#222", "#ddd", "#0b5fff", "#444"


class Dots(NamedTuple):
    """Points of one colour, in the units of the axes; joined by a thin line if `joined`."""

    colour: str
    points: Sequence[tuple[float, float]]
    radius: float = 2.2
    joined: bool = False


class Panel(NamedTuple):
    """One pair of axes: x is logarithmic, y starts at 0; `limits` are dashed lines."""

    title: str
    x_title: str
    y_title: str
    dots: Sequence[Dots]
    limits: Sequence[Sequence[tuple[float, float]]]


def picture(width: int, height: int, parts: Sequence[str], title: str) -> str:
    """Return a picture with a white ground, so that it can be read on a dark page as well."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui,sans-serif" font-size="10" fill="{INK}" role="img">'
    )
    ground = f'<rect width="{width}" height="{height}" rx="4" fill="#fff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *parts, "</svg>", ""])


def text(x: float, y: float, content: str, anchor: str = "start", extra: str = "") -> str:
    """Return a line of text."""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{extra}>{escape(content)}</text>'


def legend(entries: Sequence[tuple[str, str]], x: float, y: float) -> list[str]:
    """Return coloured dots with names, side by side; a colour of ``LIMIT`` is drawn as a dashed line."""
    parts = []
    for name, colour in entries:
        if colour == LIMIT:
            parts.append(_line([(x - 4, y - 3), (x + 10, y - 3)], LIMIT, 1.2, dashed=True))
        else:
            parts.append(f'<circle cx="{x + 3:.0f}" cy="{y - 3:.0f}" r="3.5" fill="{colour}"/>')
        parts.append(text(x + 13, y, name))
        x += 28 + 5.6 * len(name)
    return parts


def _line(points: Sequence[tuple[float, float]], colour: str, width: float, dashed: bool = False) -> str:
    path = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'


def _nice(top: float) -> tuple[float, float]:
    """Return a round number from `top` up, and a step that divides it."""
    step = 10 ** math.floor(math.log10(top))
    for factor in (0.2, 0.5, 1.0, 2.0):
        if top <= 5 * factor * step:
            return math.ceil(top / (factor * step)) * factor * step, factor * step
    return 10 * step, 2 * step


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 or value == 0 else f"{value:g}"


def panel(content: Panel, left: float, top: float, width: float, height: float) -> list[str]:
    """Return a panel at a place, axes and titles included."""
    x0, x1, y0, y1 = left + 40, left + width - 20, top + height - 28, top + 20
    points = [point for dots in content.dots for point in dots.points] + [p for line in content.limits for p in line]
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last += first == last
    y_top, step = _nice(max(y for _, y in points))

    def at(point: tuple[float, float]) -> tuple[float, float]:
        share = (math.log10(point[0]) - first) / (last - first)
        return x0 + share * (x1 - x0), y0 - point[1] / y_top * (y0 - y1)

    parts = [text(left + width / 2, top + 11, content.title, "middle", ' font-weight="600"')]
    for i in range(round(y_top / step) + 1):
        y = y0 - i * step / y_top * (y0 - y1)
        parts += [_line([(x0, y), (x1, y)], GRID, 0.6), text(x0 - 4, y + 3, _number(i * step), "end")]
    decades = range(first, last + 1, max(1, math.ceil((last - first) / 4)))
    for exponent in decades:
        x = at((10.0**exponent, 0))[0]
        parts += [_line([(x, y0), (x, y1)], GRID, 0.6), text(x, y0 + 11, _number(10.0**exponent), "middle")]
    parts += [text((x0 + x1) / 2, y0 + 22, content.x_title, "middle"), text(left + 4, top + 11, content.y_title)]
    parts += [_line([at(point) for point in line], LIMIT, 1.2, dashed=True) for line in content.limits]
    for dots in content.dots:
        places = [at(point) for point in dots.points]
        if dots.joined and len(places) > 1:
            parts.append(_line(places, dots.colour, 0.8))
        circles = "".join(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="{dots.radius}"/>' for x, y in places)
        parts.append(f'<g fill="{dots.colour}">{circles}</g>')
    return parts


def bars(rows: Sequence[tuple[str, float, str, str]], left: float, top: float, width: float, title: str) -> list[str]:
    """Return horizontal bars: name, length relative to the longest, text at the end, colour; 17 high each."""
    parts, longest = [text(left, top + 10, title, extra=' font-weight="600"')], max(row[1] for row in rows)
    names, ends = 150, 78
    for i, (name, value, label, colour) in enumerate(rows):
        y, length = top + 18 + 17 * i, value / longest * (width - names - ends)
        parts += [
            text(left + names - 5, y + 10, name, "end"),
            f'<rect x="{left + names:.0f}" y="{y:.0f}" width="{length:.0f}" height="13" rx="2" fill="{colour}"/>',
            text(left + names + length + 5, y + 10, label),
        ]
    return parts
