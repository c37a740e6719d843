"""``python -m bench e2e record FILES...``: take result files of ``e2e train``, ``infer`` and ``parity`` over.

Accepted results are in ``bench/results/e2e/<gpu>.json``: by what was run, whole result files. One that is recorded
takes the place of the one of the same command, model, number of layers and state of the cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "results" / "e2e"


def name_of(result: dict[str, Any]) -> str:
    """Return what a result is of: "train dense", "infer dense, 4 layers", "train dense, cold"."""
    more = [f"{result['layers']} layers"] if result.get("layers") else []
    return ", ".join([f"{result['kind']} {result['model']}", *more, *(["cold"] if result.get("cold") else [])])


def main(argv: list[str] | None = None) -> int:
    """Write the file of accepted results."""
    parser = argparse.ArgumentParser(prog="python -m bench e2e record", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, default=FOLDER / "h200.json", help="file of accepted results")
    args = parser.parse_args(argv)
    known: dict[str, Any] = json.loads(args.to.read_text()) if args.to.exists() else {}
    results = known.get("results", {})  # a file of the first schema is replaced as a whole
    for path in args.files:
        result = json.loads(path.read_text())
        failed = [arm for arm, record in result["arms"].items() if "failed" in record]
        if failed:
            print(f"bench e2e record: {path} is not taken: {', '.join(failed)} failed", file=sys.stderr)
            return 2
        results[name_of(result)] = result
    args.to.write_text(json.dumps({"schema": 2, "results": dict(sorted(results.items()))}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
