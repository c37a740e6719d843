"""Draw result files of ``bench e2e``: ``python -m bench e2e plot DIR`` writes DIR/plot.png.

For training: tokens per second, peak memory, and losses with their difference from hf's below. For inference: tokens
per second of prefill and decode.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def main(argv: list[str] | None = None) -> int:
    """Read every result file of a folder and draw them."""
    parser = argparse.ArgumentParser(prog="python -m bench e2e plot", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="PNG file; plot.png in the folder when left out")
    args = parser.parse_args(argv)
    results = [json.loads(path.read_text()) for path in sorted(args.folder.glob("*.json"))]
    results = [result for result in results if "arms" in result]
    if not results:
        print(f"bench e2e plot: no result files in {args.folder}", file=sys.stderr)
        return 2
    try:
        draw(results, args.out or args.folder / "plot.png")
    except ImportError as error:
        print(f"bench e2e plot: needs matplotlib: {error}", file=sys.stderr)
        return 2
    return 0


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draw a row of charts for each result.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(results), 4, figsize=(18, 4 * len(results)), squeeze=False)
    for row, result in zip(axes, results, strict=True):
        {"infer": _infer, "parity": _parity}.get(result.get("kind"), _train)(row, result)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(axis: Any, title: str, values: dict[str, float]) -> None:
    axis.barh(list(values), list(values.values()))
    axis.invert_yaxis()
    axis.set_title(title)
    for i, value in enumerate(values.values()):
        axis.text(value, i, f" {value:,.0f}", va="center")


def _train(axes: Any, result: dict[str, Any]) -> None:
    arms = {arm: r for arm, r in result["arms"].items() if "step_ms" in r}
    _bars(axes[0], f"{result['model']}: training, tokens/s", {arm: r["tokens_per_s"] for arm, r in arms.items()})
    _bars(axes[1], "peak memory, MiB", {arm: r["peak_mib"] or 0 for arm, r in arms.items()})
    wanted = arms.get("hf", {}).get("losses")
    for arm, record in arms.items():
        axes[2].plot(record["losses"], label=arm)
        if wanted and arm != "hf":
            axes[3].plot([a - b for a, b in zip(record["losses"], wanted, strict=False)], label=arm)
    axes[2].set_title("loss")
    axes[2].legend()
    axes[3].set_title("loss, difference from hf")
    axes[3].axhline(0, color="grey", linewidth=0.5)


def _parity(axes: Any, result: dict[str, Any]) -> None:
    arms = {arm: r["runs"] for arm, r in result["arms"].items() if "runs" in r}
    wanted = arms.get("hf", [{}])[0].get("losses")
    for arm, runs in arms.items():
        axes[0].plot(runs[0]["losses"], label=arm)
        if wanted and arm != "hf":
            axes[1].plot([a - b for a, b in zip(runs[0]["losses"], wanted, strict=False)], label=arm)
        axes[2].plot([arm] * len(runs), [run["held_out"] for run in runs], "o")
        cosines = [gradient["cosine"] for run in runs for gradient in run["gradients"]]
        axes[3].plot([arm] * len(cosines), cosines, "o")
    titles = f"{result['model']}: loss", "loss, difference from hf", "held-out loss", "gradient, cosine with bf16's"
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title)
    axes[0].legend()


def _infer(axes: Any, result: dict[str, Any]) -> None:
    arms = {arm: r for arm, r in result["arms"].items() if "prefill" in r}
    charts = [(kind, batch) for kind in ("prefill", "decode") for batch in next(iter(arms.values()), {}).get(kind, {})]
    for axis, (kind, batch) in zip(axes, charts, strict=False):
        values = {arm: r[kind][batch]["tokens_per_s"] for arm, r in arms.items() if batch in r[kind]}
        _bars(axis, f"{result['model']}: {kind} at batch {batch}, tokens/s", values)
    for axis in axes[len(charts) :]:
        axis.set_axis_off()


if __name__ == "__main__":
    sys.exit(main())
