"""``python -m bench e2e record FILES...``: accept result files of ``e2e train``, ``infer``, ``parity``, ``post``.

Accepted results are in ``bench/results/e2e/<gpu>.json``: by what was run, whole result files. A new result replaces
that of the same command, model, number of layers and state of the cache. Several files of the same command are parts of
one run: their arms become one result. What failed is left out. Rows of ``e2e infer --rows`` replace those of the same
model, arm, prompt and batch; each has its date and commit. A row whose calls and replays differ by more than 15 % was
measured beside other work and is not taken.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.e2e import gates, infer, post

ROWS = "decode_rows"  # kind of the files of ``e2e infer --rows``
FOLDER = Path(__file__).parents[1] / "results" / "e2e"


def name_of(result: dict[str, Any]) -> str:
    """Return the label of a result: "train dense", "infer dense, 4 layers", "train dense, cold", "generate"."""
    if result["kind"] == ROWS:
        return "generate"
    more = [result["step"]] if "step" in result else []
    more += [f"{result['layers']} layers"] if result.get("layers") else []
    return ", ".join([f"{result['kind']} {result['model']}", *more, *(["cold"] if result.get("cold") else [])])


def _is_disturbed(row: dict[str, Any]) -> bool:
    return "replay_ms" in row and abs(row["ms_per_token"] - row["replay_ms"]) > 0.15 * row["replay_ms"]


def _rows(result: dict[str, Any], path: Path, before: dict[str, Any]) -> dict[str, Any] | None:
    """Return the rows of ``e2e infer --rows`` beside those that were accepted before; None if none is taken."""
    refused = [name for name, row in result["rows"].items() if "failed" in row or _is_disturbed(row)]
    if refused:
        print(f"bench e2e record: {path}: failed or disturbed: {', '.join(refused)}", file=sys.stderr)
    run = result["environment"]
    origin = {"date": run["date"][:10], "commit": run.get("commit")}
    taken = {name: row | origin for name, row in result["rows"].items() if name not in refused}
    return {**result, "rows": dict(sorted((before.get("rows", {}) | taken).items()))} if taken else None


def _source(result: dict[str, Any]) -> str | None:
    return result.get("environment", {}).get("source")


def _gates(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the gates of all arms of a result."""
    if result["kind"] == "infer":
        return infer.gates(result["arms"])
    if result["kind"] == "parity":
        return gates.parity_gates(result["arms"])
    if result["kind"] == "post":
        return post.gates(result["arms"], result["step"])
    starts = any("hf, s" in gate["gate"] for gate in result.get("gates", []))
    return gates.gates(result["model"], result["arms"], starts=starts, cold=bool(result.get("cold")))


def main(argv: list[str] | None = None) -> int:
    """Write the file of accepted results."""
    parser = argparse.ArgumentParser(prog="python -m bench e2e record", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, default=FOLDER / "h200.json", help="file of accepted results")
    args = parser.parse_args(argv)
    known: dict[str, Any] = json.loads(args.to.read_text()) if args.to.exists() else {}
    results = known.get("results", {})  # a file of the first schema is replaced as a whole
    new: dict[str, Any] = {}
    for path in args.files:
        result = json.loads(path.read_text())
        name = name_of(result)
        if result["kind"] == ROWS:
            rows = _rows(result, path, new.get(name, results.get(name, {})))
            if rows is None:
                return 2
            new[name] = rows
            continue
        failed = [arm for arm, record in result["arms"].items() if "failed" in record]
        if failed:
            print(f"bench e2e record: {path} is not taken as a whole: {', '.join(failed)} failed", file=sys.stderr)
        if len(failed) == len(result["arms"]):
            return 2
        arms = {arm: record for arm, record in result["arms"].items() if arm not in failed}
        if name in new and _source(new[name]) != _source(result):
            sources = f"measured of source {_source(result)}; expected {_source(new[name])}"
            print(f"bench e2e record: {path}: {sources}, that of the other parts of {name!r}", file=sys.stderr)
            return 2
        new[name] = {**result, "arms": {**new.get(name, {}).get("arms", {}), **arms}}
        new[name]["gates"] = _gates(new[name])
    results |= new
    args.to.write_text(json.dumps({"schema": 2, "results": dict(sorted(results.items()))}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
