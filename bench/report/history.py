"""Earlier measurements of rows: ``bench/results/history/<gpu>.json``, a line for each one that a newer one replaced.

``python -m bench record`` adds to it. A release is a dated heading of CHANGELOG.md; a measurement belongs to the first
release on its day or later, or to the unreleased version.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bench import meta
from bench.report.tables import ranked

SCHEMA = 1
FOLDER = meta.RESULTS / "history"
Record = dict[str, Any]


def path_of(gpu: str) -> Path:
    """Return the file of a GPU, given as torch names it."""
    return FOLDER / f"{meta.short_name(gpu)}.json"


def load(path: Path) -> list[Record]:
    """Return the records of a file, oldest first; none if there is no file."""
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if found.get("schema") != SCHEMA:
        raise meta.ResultError(f"{path}: schema {found.get('schema')!r}; expected {SCHEMA}, a history.")
    return found["records"]


def save(records: list[Record], path: Path) -> None:
    """Write records, one per line, oldest first; equal ones once."""
    unique = {(r["row"], r["shape"], r["date"]): r for r in records}
    ordered = sorted(unique.values(), key=lambda r: (r["date"], r["row"], r["shape"]))
    lines = ",\n".join(f"  {json.dumps(record, allow_nan=False)}" for record in ordered)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{\n "schema": {SCHEMA},\n "records": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def record_of(row: dict[str, Any], run: dict[str, Any]) -> Record:
    """Return what is kept of a row that was measured in a run."""
    peer, peer_us = next(iter(ranked(row)), (None, None))
    return {
        "row": row["row"], "shape": row["shape"], "us": round(row["us"], 2), "efficiency": round(row["efficiency"], 4),
        "peer": peer, "peer_us": None if peer_us is None else round(peer_us, 2),
        "commit": (run["commit"] or "unknown")[:12], "date": run["date"],
    }  # fmt: skip


def replaced(before: dict[str, Any], after: dict[str, Any]) -> list[Record]:
    """Return the records of accepted numbers that other accepted numbers measured again."""
    newer = {(row["row"], row["shape"]): after["runs"][row["run"]]["date"] for row in after["rows"]}
    found = [record_of(row, before["runs"][row["run"]]) for row in before["rows"]]
    return [record for record in found if newer.get((record["row"], record["shape"]), record["date"]) != record["date"]]


def releases(changelog: str) -> list[tuple[str, str | None]]:
    """Return versions and dates of a changelog's headings, oldest first; None for the date of an unreleased one."""
    found = re.findall(r"^## (\S+)(?: \((\d{4}-\d\d-\d\d)?[^)]*\))?$", changelog, re.MULTILINE)
    return [(version, date or None) for version, date in reversed(found)]


def release_of(date: str, known: list[tuple[str, str | None]]) -> str:
    """Return the release that a measurement of a day belongs to."""
    for version, released in known:
        if released is None or date[:10] <= released:
            return version if released else f"{version} (unreleased)"
    return "next"
