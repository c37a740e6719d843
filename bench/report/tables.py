"""Result files as markdown tables and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.measure import host_calls
from bench.peers.base import NO_ADAPTER

MAX_LINE = 300


def ranked(row: dict[str, Any]) -> list[tuple[str, float]]:
    """Measured peers of a row, fastest first."""
    times = [(name, us) for name, us in row["peers"].items() if isinstance(us, (int, float))]
    return sorted(times, key=lambda item: item[1])


def _error(value: Any) -> str:
    return f"{value:.1e}" if isinstance(value, float) else value["error"] if isinstance(value, dict) else "-"


def _share(row: dict[str, Any]) -> str:
    return f"{row['of_peak']:.2f}" if "of_peak" in row else "-"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(head: list[str], body: list[list[str]]) -> list[str]:
    """A markdown table, line by line."""
    return [_line(head), "|" + "---|" * len(head), *(_line(cells) for cells in body)]


def heading(result: dict[str, Any]) -> str:
    """One sentence that says where and with what the numbers were taken."""
    env = result["environment"]
    commit = (env["commit"] or "unknown")[:12] + (" with local changes" if env["dirty"] else "")
    peers = ", ".join(f"{name} {version}" for name, version in env["peers"].items() if version)
    peak = f" Largest copy: {result['copy_peak_gbps']:.0f} GB/s." if result["copy_peak_gbps"] else ""
    rates = {k: v for k, v in (result.get("peak_tflops") or {}).items() if isinstance(v, float)}
    if rates:
        peak += f" Tensor cores: {', '.join(f'{kind} {rate:.0f} TFLOP/s' for kind, rate in rates.items())}."
    partial = "" if result["complete"] else " **The run did not finish.**"
    return (
        f"{env['gpu']}, driver {env['driver']}, torch {env['torch']}, CuPy {env['cupy']}, "
        f"NVRTC {env['nvrtc']}, Triton {env['triton']}{', ' + peers if peers else ''}; {env['date']}, "
        f"commit {commit}, source {env['source']}.{peak}{partial}"
    )


def row_table(result: dict[str, Any]) -> list[str]:
    """The device rows; times in µs. Rows of matrix products have an extra column."""
    products = any("tflops" in row for row in result["rows"])
    head = ["row", "shape", "dtype", "MB", "ours", "p20-p80", "copy", "floor", "efficiency"]
    compared = any("of_peak" in row for row in result["rows"])
    head += ["TFLOP/s"] * products + ["of the peak"] * compared
    head += ["error", "torch's error", "best peer / ours", "peers"]
    body = []
    for row in result["rows"]:
        if "failed" in row:
            body.append([row["row"], row["shape"], row["failed"]] + ["-"] * (len(head) - 3))
            continue
        peers, waiting = ranked(row), row.get("peers_waiting", ())
        body.append(
            [
                row["row"],
                row["shape"],
                row["dtype"],
                f"{row['bytes'] / 1e6:.1f}",
                f"{row['us']:.1f}",
                f"{row['p20']:.1f}-{row['p80']:.1f}",
                f"{row['copy_us']:.1f}",
                f"{row['floor_us']:.1f}",
                f"{row['efficiency']:.2f}",
                *([f"{row['tflops']:.0f}" if "tflops" in row else "-"] * products),
                *([_share(row)] * compared),
                _error(row["error_ours"]),
                _error(row["error_torch"]),
                f"{peers[0][1] / row['us']:.2f}" if peers else "-",
                ", ".join(f"{name} {us:.1f}{'*' * (name in waiting)}" for name, us in peers) or "-",
            ]
        )
    return table(head, body)


def missing(result: dict[str, Any]) -> list[str]:
    """One line per peer and reason for what was not measured, with its rows, and one per peer without adapters."""
    reasons: dict[tuple[str, str], list[str]] = {}
    without: dict[str, dict[str, None]] = {}
    for row in result["rows"]:
        for name, value in row.get("peers", {}).items():
            if isinstance(value, dict):
                kind, text = next(iter(value.items()))
                if text.startswith(NO_ADAPTER):
                    without.setdefault(name, {})[row["row"]] = None
                    continue
                reasons.setdefault((name, f"{kind}: {text}"), []).append(f"{row['row']} {row['shape']}")
    lines = [f"- {name}, {text} ({', '.join(rows)})" for (name, text), rows in sorted(reasons.items())]
    short = (f"- {name}, {NO_ADAPTER} {', '.join(rows)}" for name, rows in sorted(without.items()))
    return lines + [line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 4]} ..." for line in short]


def host_table(host: dict[str, Any]) -> list[str]:
    """Host rows: µs per call beside ``x*2`` and what that may be, then first use and import."""
    if "failed" in host:
        return [host["failed"]]
    base, limits = host["us_per_call"].get("torch x*2"), host_calls.limits()
    body = []
    for name, us in host["us_per_call"].items():
        limit = limits.get(name)
        said = "-" if limit is None else f"{limit}"
        if isinstance(us, dict):
            body.append([name, us["error"], "-", said])
        elif not isinstance(base, float):
            body.append([name, f"{us:.2f}", "-", said])
        else:
            over = limit is not None and us / base > limit
            body.append([name, f"{us:.2f}", f"{us / base:.2f}", f"{said}, over" if over else said])
    lines = table(["call", "host µs", "/ x*2", "limit"], body)
    if "first_use" not in host:  # of a quick run
        return lines
    lines += ["", *_first_use_table(host["first_use"]), ""]
    added = host["import_ms"]
    text = f"{added:.1f} ms" if isinstance(added, float) else added["error"]
    return [*lines, f"`import rtkernels` beyond `import torch`: {text}."]


def _first_use_table(first_use: dict[str, Any]) -> list[str]:
    body = []
    for op, kinds in first_use.items():
        for kind, found in kinds.items():
            if "error" in found:
                body.append([op, kind, found["error"], "-", "-"])
            else:
                times = [f"{found[key]:.1f}" for key in ("first_call_ms", "second_call_ms", "import_cupy_ms")]
                body.append([op, kind, *times])
    return table(["op", "cache", "first call ms", "second call ms", "import cupy ms"], body)


def markdown(result: dict[str, Any]) -> str:
    """The whole result as markdown."""
    lines = [heading(result), ""]
    if any("peak_extra_bytes" in row for row in result["rows"]):  # of a sweep, which has no peers
        from bench.report import neighbours

        return "\n".join([*lines, *neighbours.text(result["rows"]), ""])
    if result["rows"]:
        lines += [*row_table(result), ""]
        if any(row.get("peers_waiting") for row in result["rows"]):
            lines += ["\\* This peer synchronises: its time holds the gaps in which the device waits.", ""]
        absent = missing(result)
        lines += ["Not measured:", "", *absent, ""] if absent else []
    if result["host"]:
        lines += ["Host rows", "", *host_table(result["host"]), ""]
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draw ``copy / time`` of every row: ours as a bar, each peer as a dot.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'rtkernels[bench]'.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for result in results for row in result["rows"] if "failed" not in row]
    if not rows:
        raise ValueError("nothing to plot: no measured rows in these files.")
    names = sorted({name for row in rows for name, _ in ranked(row)})
    figure, axes = pyplot.subplots(figsize=(11, 1.5 + 0.16 * len(rows)))
    axes.barh(range(len(rows)), [row["copy_us"] / row["us"] for row in rows], 0.7, color="lightgrey", label="ours")
    colours = pyplot.get_cmap("tab20")
    for i, name in enumerate(names):
        found = [(row["copy_us"] / row["peers"][name], at) for at, row in enumerate(rows) if name in dict(ranked(row))]
        axes.scatter(*zip(*found, strict=True), 16, [colours(i % 20)], marker="o^sD"[i // 5 % 4], label=name)
    axes.set_yticks(range(len(rows)), [f"{r['row']} {r['shape']}" for r in rows], fontsize=7)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel("time of a copy of the same bytes / time (longer is faster)")
    axes.set_title(results[0]["environment"]["gpu"] or "")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
