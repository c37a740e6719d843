"""Summary of a sweep: per family the distribution of ``best peer / ours``, and the worst draws."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from bench.report.tables import table

P5, MINIMUM = 0.90, 0.70  # goals: the 5th percentile and the minimum of every family
WORST = 10


def quantile(values: list[float], q: float) -> float:
    """Return a quantile, interpolated between neighbours."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def best_peer(draw: dict[str, Any]) -> tuple[str, float] | None:
    """Return the fastest measured peer of a draw and its time."""
    times = [(us, name) for name, us in draw.get("peers", {}).items() if isinstance(us, (int, float))]
    return (min(times)[1], min(times)[0]) if times else None


def ratio(draw: dict[str, Any]) -> float | None:
    """Return the best peer's time over ours; None where one of them is missing."""
    best = best_peer(draw)
    return None if best is None or "us" not in draw else best[1] / draw["us"]


def of_family(draws: list[dict[str, Any]]) -> dict[str, Any]:
    """Return count, geometric mean, median, 5th percentile and minimum of the ratios, and the worst draws."""
    compared = sorted((r, i) for i, d in enumerate(draws) if (r := ratio(d)) is not None)
    values = [value for value, _ in compared]
    found: dict[str, Any] = {
        "count": len(values),
        "failed": sum("failed" in draw for draw in draws),
        "without_peer": sum("failed" not in draw and ratio(draw) is None for draw in draws),
        "wrong": sum(isinstance(e := draw.get("error"), float) and e > 0.05 for draw in draws),
    }
    if values:
        found |= {
            "geometric_mean": math.exp(sum(map(math.log, values)) / len(values)),
            "median": quantile(values, 0.5),
            "p5": quantile(values, 0.05),
            "minimum": values[0],
            "best_peers": dict(Counter(best_peer(draws[i])[0] for _, i in compared).most_common()),
            "worst": [_line(draws[i], value) for value, i in compared[:WORST]],
        }
    return found


def _line(draw: dict[str, Any], value: float) -> dict[str, Any]:
    name, us = best_peer(draw)
    keys = ("index", "row", "shape", "us", *(key for key in ("of_peak",) if key in draw))
    return {"ratio": value, **{key: draw[key] for key in keys}, "peer": name, "peer_us": us}


def summary(draws: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the statistics of every family among these draws."""
    families: dict[str, list[dict[str, Any]]] = {}
    for draw in draws:
        families.setdefault(draw["family"], []).append(draw)
    return {family: of_family(found) for family, found in families.items()}


def absent_peers(draws: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return why peers were not measured: by peer, reasons and how often they were given."""
    reasons: dict[str, Counter[str]] = {}
    for draw in draws:
        for name, value in draw.get("peers", {}).items():
            if isinstance(value, dict):
                reasons.setdefault(name, Counter())[": ".join(next(iter(value.items())))] += 1
    return {name: dict(found.most_common(8)) for name, found in sorted(reasons.items())}


def markdown(result: dict[str, Any]) -> str:
    """Return a sweep's result as text."""
    env = result["environment"]
    lines = [
        f"Sweep of seed {result['seed']}: {env['gpu']}, driver {env['driver']}, torch {env['torch']}, {env['date']}, "
        f"commit {(env['commit'] or 'unknown')[:12]}, source {env['source']}."
        + ("" if result["complete"] else " **Not all draws were measured.**"),
        "",
    ]
    found = summary(result["draws"])
    head = ["family", "draws", "geometric mean", "median", "5th percentile", "minimum", "goal", "failed", "wrong"]
    body = []
    for family, numbers in found.items():
        keys = ("geometric_mean", "median", "p5", "minimum")
        cells = [f"{numbers[key]:.2f}" if key in numbers else "-" for key in keys]
        met = "-"
        if "p5" in numbers:
            met = "met" if numbers["p5"] >= P5 and numbers["minimum"] >= MINIMUM else "missed"
        body.append([family, str(numbers["count"]), *cells, met, str(numbers["failed"]), str(numbers["wrong"])])
    lines += table(head, body)
    for family, numbers in found.items():
        lines += ["", f"{family}, worst of best peer / ours:"]
        lines += [
            f"- {w['ratio']:.2f}: {w['row']} {w['shape']}: {w['us']:.1f} µs, {w['peer']} {w['peer_us']:.1f} "
            + (f"({w['of_peak']:.2f} of the tensor cores' peak, " if "of_peak" in w else "(")
            + f"draw {w['index']})"
            for w in numbers.get("worst", ())
        ]
    failed = [draw for draw in result["draws"] if "failed" in draw]
    lines += ["", "Failed draws:"] * bool(failed)
    lines += [f"- {d['family']} {d['index']}: {d.get('row')} {d.get('shape')}: {d['failed']}" for d in failed[:40]]
    lines += ["", "Peers that were not measured:"]
    for name, reasons in absent_peers(result["draws"]).items():
        lines += [f"- {name}, {count} draws: {reason}" for reason, count in reasons.items()]
    return "\n".join(lines)
