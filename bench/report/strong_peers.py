"""The section of docs/performance.md about peers that no run of all rows had: quack, FlashAttention 4, and others.

``bench/results/peers/<gpu>.json`` is one run of both with ours; ``bench/results/sweep/*.json`` are draws of random
shapes, some of them with both installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import meta
from bench.report import tables as report

_TITLES = {
    "quack": "quack", "fa4": "FlashAttention 4", "fa4_deterministic": "FlashAttention 4, deterministic",
    "torch": "torch", "torch_fast": "torch, fast accumulation", "torch_cudnn": "cuDNN",
    "torch_fused": "torch's fused op", "torch_flash": "torch's flash attention", "liger": "Liger",
}  # fmt: skip
_INTRODUCTION = """\
Ours and both in one run ({date}, commit {commit}, torch {torch}, quack {quack}, FlashAttention 4 {fa4}), µs, the
fastest of the others in bold. Ours sums fp8 products more exactly than fast accumulation; its attention gradients are
deterministic, as those of FlashAttention 4 are in its deterministic mode only."""
# Libraries without a row, and why, as of the runs above.
_ABSENT = """\
Not measured: DeepGEMM, of which the package index has no wheel and which was not built; SonicMoE, which needs quack and
its CUTLASS DSL and was not run with them."""


def recorded(name: str, folder: Path = meta.RESULTS) -> dict[str, Any] | None:
    """Return the run with quack and FlashAttention 4 on a GPU by its short name; None if there is none."""
    path = folder / "peers" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def lines(gpu: str, folder: Path = meta.RESULTS) -> list[str]:
    """Return the section; empty if nothing was recorded."""
    name = meta.short_name(gpu)
    run = recorded(name, folder)
    found = [] if run is None else _strongest(run)
    sweeps = [json.loads(p.read_text(encoding="utf-8")) for p in sorted((folder / "sweep").glob(f"{name}*.json"))]
    return found + _random([sweep for sweep in sweeps if any(_version(sweep, n) for n in ("quack", "fa4"))])


def _strongest(run: dict[str, Any]) -> list[str]:
    names = [name for name in _TITLES if any(name in row["peers"] for row in run["rows"])]
    body = []
    for row in (row for row in run["rows"] if row["peers"]):
        best = report.ranked(row)[0][0]
        cells = [f"{us:g}" if (us := row["peers"].get(name)) is not None else "-" for name in names]
        cells = [f"**{cell}**" if name == best else cell for name, cell in zip(names, cells, strict=True)]
        body.append([row["row"], row["shape"], f"{row['us']:g}", *cells, f"{row['peers'][best] / row['us']:.2f}"])
    text = _INTRODUCTION.format(date=run["date"], commit=run["commit"], torch=run["torch"], **run["peers"])
    head = ["row", "shape", "ours", *(_TITLES[name] for name in names), "fastest peer / ours"]
    return ["## Beside quack and FlashAttention 4", "", text, "", _ABSENT, "", *report.table(head, body), ""]


def _version(sweep: dict[str, Any], name: str) -> str | None:
    return sweep["environment"]["peers"].get(name)


def _random(sweeps: list[dict[str, Any]]) -> list[str]:
    out: list[str] = []
    for sweep in sweeps:
        run, body = sweep["environment"], []
        for family, numbers in sweep["families"].items():
            best = ", ".join(f"{_TITLES.get(name, name)} {count}" for name, count in numbers["best_peers"].items())
            shares = (f"{numbers[key]:.2f}" for key in ("geometric_mean", "p5", "minimum"))
            body.append([family, str(numbers["count"]), *shares, best])
        versions = ", ".join(f"{name} {version}" for name, version in run["peers"].items() if version)
        out += [
            f"Random shapes (`python -m bench sweep --seed {sweep['seed']}`, {run['date'][:10]}, commit "
            f"{run['commit'][:8]}; {versions}):",
            "",
            *report.table(
                ["family", "draws", "fastest peer / ours, mean", "p5", "minimum", "fastest peer, draws"], body
            ),
            "",
        ]
    return out
