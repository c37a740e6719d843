"""Pictures of the documentation: rates of every family over size, and bars of whole models, from bench/results.

``python -m bench readme`` writes them to ``docs/pictures``; its ``--check`` compares their text.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from bench import meta
from bench.report import svg
from bench.report.tables import ranked

FOLDER = meta.ROOT / "docs" / "pictures"
# Libraries by the beginning of a peer's name, the longest first: title, colour.
LIBRARIES = {
    "torch_cudnn": ("cuDNN", "#56b4e9"),
    "flaggems": ("FlagGems", "#cc79a7"),
    "deepgemm": ("DeepGEMM", "#6a3d9a"),
    "inductor": ("torch.compile", "#e69f00"),
    "torchao": ("TorchAO", "#a6761d"),
    "linghe": ("linghe", "#d55e00"),
    "torch": ("torch", "#8a8a8a"),
    "liger": ("Liger", "#009e73"),
    "quack": ("quack", "#b2a200"),
    "fa4": ("FlashAttention 4", "#8c564b"),
    "fla": ("fla", "#1b7837"),
}
BALANCE = 50  # operations per byte: rows with more, in the median, are drawn beside the tensor cores' limit
PANELS, COLUMNS, WIDTH, HEIGHT = 8, 3, 300, 178
FAR = 0.2  # of a copy's rate: rows below it are limited by something else, and a copy says nothing about them
SIZES = 3  # a row of so many sizes has a panel of its own


class Point(NamedTuple):
    """A measurement: the size in bytes or operations, our time and the peers' in µs, and the time of a copy."""

    row: str
    products: bool
    size: float
    us: float
    copy_us: float | None
    peers: dict[str, float]


def points(numbers: dict[str, Any], sweeps: Iterable[dict[str, Any]]) -> list[Point]:
    """Return the accepted rows, those of ``bench neighbours`` and the draws of sweeps."""
    rows = [row for row in numbers["rows"] if "failed" not in row] + (numbers["sweep"] or {"rows": []})["rows"]
    rows += [row for sweep in sweeps for row in _drawn(sweep)]
    shares: dict[str, list[float]] = {}
    for row in rows:
        shares.setdefault(row["row"], []).append(row.get("flops", 0) / row["bytes"])
    products = {name for name, found in shares.items() if statistics.median(found) > BALANCE}
    return [
        Point(
            row["row"], row["row"] in products, row["flops"] if row["row"] in products else row["bytes"], row["us"],
            row.get("copy_us"), dict(ranked(row)),
        )
        for row in rows if row["row"] not in products or row.get("flops")
    ]  # fmt: skip


def _drawn(sweep: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Yield the draws of a sweep with their sizes, which follow from its seed; not those that are others by now."""
    from bench.sweep import families

    for done in sweep["draws"]:
        if "us" in done and done["family"] in families.FAMILIES:
            row = families.draw(done["family"], sweep["seed"], done["index"]).row
            if (row.name, row.shape) == (done["row"], done["shape"]):
                yield {**done, "bytes": row.bytes, "flops": row.flops}


def _library(peer: str) -> str:
    return next((name for name in LIBRARIES if peer.startswith(name)), "torch")


def _rate(point: Point, us: float) -> tuple[float, float]:
    """Return x and y: MB and GB/s, or GFLOP and TFLOP/s."""
    return (point.size / 1e9, point.size / us / 1e6) if point.products else (point.size / 1e6, point.size / us / 1e3)


def _panel(title: str, found: list[Point], peaks: dict[str, float], copies: list[tuple[float, float]]) -> svg.Panel:
    """Return a panel of measurements that are all limited by products, or all by memory."""
    products = found[0].products
    dots = []
    for library, (_, colour) in LIBRARIES.items():
        places = []
        for point in found:
            times = [us for name, us in point.peers.items() if _library(name) == library]
            places += [_rate(point, min(times))] if times else []
        dots += [svg.Dots(colour, sorted(places))] if places else []
    ours = sorted({_rate(point, point.us) for point in found})
    dots.append(svg.Dots(svg.OURS, ours, 2.6, joined=len({point.row for point in found}) == 1 and not products))
    low, high = min(x for x, _ in ours), max(x for x, _ in ours)
    if products:
        top = max(y for group in dots for _, y in group.points)
        kinds = [peak for peak in sorted(peaks.values()) if peak <= 2.2 * top] or sorted(peaks.values())[:1]
        limits = [[(low, peak), (max(high, 1.01 * low), peak)] for peak in kinds]
    else:
        inside = [(x, y) for x, y in copies if low <= x <= high]
        before = [copy for copy in copies if copy[0] <= low][-1:]
        after = [copy for copy in copies if copy[0] >= high][:1]
        limit = sorted({*before, *inside, *after})
        reached = max(y for group in dots for _, y in group.points)
        limits = [limit] if limit and reached > FAR * max(y for _, y in limit) else []
    units = ("GFLOP", "TFLOP/s") if products else ("MB moved", "GB/s")
    return svg.Panel(title, *units, dots, limits)


def copy_curve(found: Iterable[Point]) -> list[tuple[float, float]]:
    """Return MB and GB/s of copies, the median over sizes that differ by less than a third."""
    bins: dict[int, list[tuple[float, float]]] = {}
    for point in found:
        if point.copy_us and not point.products:
            bins.setdefault(round(math.log(point.size) * 3), []).append(_rate(point, point.copy_us))
    return sorted(tuple(map(statistics.median, zip(*members, strict=True))) for members in bins.values())


def _panels(found: list[Point], peaks: dict[str, float], copies: list[tuple[float, float]]) -> list[svg.Panel]:
    """Return a panel for each of the rows with most sizes, and one or two for all others."""
    rows: dict[str, list[Point]] = {}
    for point in found:
        rows.setdefault(point.row, []).append(point)
    counts = {row: len({point.size for point in members}) for row, members in rows.items()}
    own = sorted((row for row in rows if counts[row] >= SIZES), key=lambda row: (-counts[row], row))[:PANELS]
    panels = [_panel(row, rows[row], peaks, copies) for row in sorted(own)]
    for products in (False, True):
        others = [point for point in found if point.row not in own and point.products == products]
        if others:
            kind = "products" if products else "rows"
            panels.append(_panel(f"other {kind}" if own else kind, others, peaks, copies))
    return panels


def family(
    name: str, found: list[Point], peaks: dict[str, float], copies: list[tuple[float, float]], about: str
) -> str:
    """Return the picture of a family."""
    panels = _panels(found, peaks, copies)
    used = {_library(peer) for point in found for peer in point.peers}
    entries = [("rtkernels", svg.OURS)] + [LIBRARIES[library] for library in LIBRARIES if library in used]
    entries.append(("limit: a copy, or the tensor cores", svg.LIMIT))
    columns = min(COLUMNS, len(panels))
    width = max(columns * WIDTH, 660)
    parts = [*svg.legend(entries, 12, 16), svg.text(width - 8, 30, about, "end", ' fill="#777"')]
    for i, content in enumerate(panels):
        parts += svg.panel(content, i % columns * WIDTH, 36 + i // columns * HEIGHT, WIDTH, HEIGHT)
    height = 36 + math.ceil(len(panels) / columns) * HEIGHT
    return svg.picture(width, height, parts, f"{name}: rates over size")


def families(numbers: dict[str, Any], owners: dict[str, tuple[str, str]]) -> dict[str, str]:
    """Return the pictures of all families by name."""
    gpu = numbers["runs"][0]["gpu"]
    paths = sorted((meta.RESULTS / "sweep").glob(f"{meta.short_name(gpu)}*.json"))
    sweeps = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    found, copies = points(numbers, sweeps), copy_curve(points(numbers, ()))
    peaks: dict[str, float] = {}
    for run in numbers["runs"]:
        for kind, rate in (run.get("peak_tflops") or {}).items():
            peaks[kind] = max(peaks.get(kind, 0.0), rate)
    dates = sorted(run["date"][:10] for run in numbers["runs"])
    about = f"{gpu}, {dates[0]} to {dates[-1]}"
    by_family: dict[str, list[Point]] = {}
    for point in found:
        if point.row in owners:
            by_family.setdefault(owners[point.row][0], []).append(point)
    return {name: family(name, members, peaks, copies, about) for name, members in sorted(by_family.items())}


# ---- whole models ---------------------------------------------------------------------------------------------------

_ARMS = {
    "hf": ("transformers", "#8a8a8a"), "liger": ("Liger", "#009e73"), "compile": ("torch.compile", "#e69f00"),
    "ours_fused": ("rtkernels", svg.OURS), "fp8": ("rtkernels, fp8", "#5b93ff"),
}  # fmt: skip
_TRAINING = {
    "train dense": "Training step, dense model of 0.89 B parameters",
    "train moe": "Training step, mixture of experts of 2.15 B parameters",
}
_POLICY = {
    "torch eager": ("torch", "#8a8a8a"), "torch.compile": ("torch.compile", "#e69f00"),
    "rtkernels bf16": ("rtkernels", svg.OURS), "rtkernels fp8": ("rtkernels, fp8", "#5b93ff"),
}  # fmt: skip


def models(e2e: dict[str, Any], policy: dict[str, Any]) -> str:
    """Return the picture of whole models: time and peak memory of training steps, and of a policy's inference."""
    parts, top = [], 10.0
    # Title, GPU and day, and for each bar its name, colour, ms and GiB.
    blocks: list[tuple[str, str, list[tuple[str, str, float, float]]]] = []
    for name, title in _TRAINING.items():
        if result := e2e["results"].get(name):
            arms = [(*_ARMS[arm], result["arms"][arm]) for arm in _ARMS if arm in result["arms"]]
            about = f"{result['environment']['gpu']}, {result['environment']['date'][:10]}"
            blocks.append((title, about, [(n, c, arm["step_ms"], arm["peak_mib"] / 1024) for n, c, arm in arms]))
    rows = [(*_POLICY[name], policy["rows"][name]) for name in _POLICY if name in policy["rows"]]
    bars = [(name, colour, row["ms"], row["GB"] * 1e9 / 2**30) for name, colour, row in rows]
    about = f"{policy['gpu']}, {policy['date']}"
    blocks.append(("Robot policy of pi0.5's shape, batch 1, as one CUDA graph", about, bars))
    for title, about, bars in blocks:
        parts.append(svg.text(12, top + 10, title, extra=' font-size="12" font-weight="600"'))
        parts.append(svg.text(788, top + 10, about, "end", ' fill="#777"'))
        times = [(name, ms, f"{ms:.1f} ms", colour) for name, colour, ms, _ in bars]
        memory = [(name, gib, f"{gib:.1f} GiB", colour) for name, colour, _, gib in bars]
        parts += svg.bars(times, 12, top + 18, 380, "time")
        parts += svg.bars(memory, 408, top + 18, 380, "peak memory")
        top += 48 + 17 * len(bars)
    return svg.picture(800, round(top), parts, "Whole models: time and peak memory, shorter is better")


def all_pictures(
    numbers: dict[str, Any], owners: dict[str, tuple[str, str]], e2e: dict[str, Any], policy: dict[str, Any]
) -> dict[str, str]:
    """Return all pictures by file name."""
    found = {f"{name}.svg": text for name, text in families(numbers, owners).items()}
    return {**found, "models.svg": models(e2e, policy)}
