"""``docs/performance.html``: the recorded rows of ops as one page that sorts and filters, without a server."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import rows as declared_rows
from bench.report import history
from bench.report.tables import ranked

TEMPLATE = Path(__file__).with_name("page.html")


def owners() -> dict[str, tuple[str, str]]:
    """Return family and op of every declared row, by the row's name."""
    found = {}
    for op, module in declared_rows.modules().items():
        found |= {row.name: (module.split(".")[2], op) for row in declared_rows.rows_of(op)}
    return found


def entries(
    results: Iterable[dict[str, Any]], owner_of: dict[str, tuple[str, str]], releases: list[tuple[str, str | None]]
) -> list[dict[str, Any]]:
    """Return the rows of accepted results, slowest against their best peer first; rows without peers last.

    Args:
        results: Contents of ``bench/results/<gpu>.json``.
        owner_of: Family and op of each row; "other" and None for rows that are not there.
        releases: Versions and dates, as ``history.releases`` returns them.
    """
    found = []
    for result in results:
        earlier: dict[tuple[str, str], list[list[Any]]] = {}
        for record in history.load(history.path_of(result["runs"][0]["gpu"])) if result["runs"] else ():
            line = [record[key] for key in ("us", "peer", "peer_us", "commit")]
            release = history.release_of(record["date"], releases)
            earlier.setdefault((record["row"], record["shape"]), []).append([record["date"][:10], release, *line])
        for row in result["rows"]:
            if "failed" in row:
                continue
            run, peers = result["runs"][row["run"]], dict(ranked(row))
            peer, peer_us = next(iter(peers.items()), (None, None))
            family, op = owner_of.get(row["row"], ("other", None))
            found.append({
                "row": row["row"],
                "shape": row["shape"],
                "dtype": row["dtype"],
                "family": family,
                "op": op,
                "gpu": run["gpu"],
                "us": row["us"],
                "peer": peer,
                "peer_us": peer_us,
                "ratio": None if peer_us is None else round(peer_us / row["us"], 4),
                "efficiency": row["efficiency"],
                "tflops": row.get("tflops"),
                "error": row["error_ours"],
                "error_torch": row["error_torch"],
                "peers": peers,
                "commit": (run["commit"] or "unknown")[:12],
                "date": run["date"][:10],
                "release": history.release_of(run["date"], releases),
                "earlier": earlier.get((row["row"], row["shape"]), []),
            })  # fmt: skip
    return sorted(found, key=lambda e: (e["ratio"] is None, e["ratio"] or 0.0, e["row"], e["shape"]))


def page(found: list[dict[str, Any]]) -> str:
    """Return the page with its rows as JSON in it."""
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False).replace("<", "\\u003c") for entry in found)
    return TEMPLATE.read_text(encoding="utf-8").replace("@DATA@", f"[\n{lines}\n]")
