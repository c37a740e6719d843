"""Which rows have a record, and what an interrupted run leaves to do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import meta
from bench.report import accepted
from bench.rows.row import Row


def recorded(folder: Path) -> set[tuple[str, str]]:
    """Return name and shape of the rows that some GPU's accepted numbers have, with the commit that was measured."""
    found = set()
    for file in sorted(folder.glob("*.json")):
        numbers = accepted.load(file)
        found |= {(r["row"], r["shape"]) for r in numbers["rows"] if numbers["runs"][r["run"]].get("commit")}
    return found


def missing(rows: Iterable[Row], folder: Path) -> list[Row]:
    """Return the rows without a record."""
    known = recorded(folder)
    return [row for row in rows if (row.name, row.shape) not in known]


def without_peak(rows: Iterable[Row], folder: Path) -> list[Row]:
    """Return the rows of products and attention that were recorded without the peak of the tensor cores."""
    known = {
        (r["row"], r["shape"]): "of_peak" in r
        for file in sorted(folder.glob("*.json"))
        for r in accepted.load(file)["rows"]
    }
    return [row for row in rows if row.flops and known.get((row.name, row.shape)) is False]


def interrupted(path: Path) -> dict[str, Any] | None:
    """Return the result that a run continues; None if there is no file.

    Raises:
        ResultError: The file is no result, or was measured of other sources.
    """
    if not path.exists():
        return None
    earlier = meta.load(path)
    meta.check_source(earlier["environment"], path)
    return earlier


def of_campaign(folder: Path) -> dict[str, Any]:
    """Return the rows that a campaign measured, with their commit: this one, if it was measured without git.

    Raises:
        ResultError: There are none; or they have no commit, and were measured of other sources than this commit's.
    """
    path = folder / "rows.json"
    result = meta.load(path)
    environment = result["environment"]
    if environment.get("commit") is None:
        meta.check_source(environment, path)
        here = meta.environment()
        changed = meta._output("git", "status", "--porcelain", "rtkernels", "cuda_src")
        if here["commit"] is None or changed:
            raise meta.ResultError(f"{path}: has no commit, nor have these sources. Set BENCH_COMMIT when measuring.")
        environment["commit"] = here["commit"]
    return result
