"""The accepted numbers of one GPU: ``bench/results/<gpu>.json``, one measurement of every row at every shape.

A run replaces the measurement of a row or layer unless it leaves out the peer that was fastest before (it may have been
asked for some peers only); then a row without a share of the peak gets that of the time it keeps, by the peak of the
later run. Runs are listed once, with everything needed to take them again; rows refer to theirs by its index in that
list.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import meta
from bench.report import tables

SCHEMA = 2
LAYER_PEERS = ("eager", "transformers", "liger", "compile", "torch", "plain_torch", "bf16")  # ways that are not ours
_STEPS = ("forward_and_backward_ms", "with_backward_ms")
Accepted = dict[str, Any]


def empty() -> Accepted:
    """Return a file without measurements."""
    return {"schema": SCHEMA, "runs": [], "rows": [], "host": None, "sweep": None, "layers": {}}


def path_of(gpu: str) -> Path:
    """Return the file of a GPU, given as torch names it."""
    return meta.RESULTS / f"{meta.short_name(gpu)}.json"


def load(path: Path) -> Accepted:
    """Read a file of accepted numbers.

    Raises:
        ResultError: It is of another kind.
    """
    accepted = json.loads(path.read_text(encoding="utf-8"))
    if accepted.get("schema") != SCHEMA:
        raise meta.ResultError(f"{path}: schema {accepted.get('schema')!r}; expected {SCHEMA}, accepted rows.")
    return accepted


def save(accepted: Accepted, path: Path) -> None:
    """Write a file of accepted numbers, one row per line, without runs that no row refers to any more."""
    used = sorted({entry["run"] for entry in _entries(accepted)})
    place = {run: i for i, run in enumerate(used)}
    for entry in _entries(accepted):
        entry["run"] = place[entry["run"]]
    accepted["runs"] = [accepted["runs"][run] for run in used]

    def lines(items: list[Any]) -> str:
        return "[\n" + ",\n".join(f"  {json.dumps(item, allow_nan=False)}" for item in items) + "\n ]"

    parts = {key: json.dumps(value, allow_nan=False) for key, value in accepted.items()}
    parts["runs"], parts["rows"] = lines(accepted["runs"]), lines(accepted["rows"])
    if accepted["sweep"]:
        sweep = accepted["sweep"]
        parts["sweep"] = f'{{"run": {sweep["run"]}, "rows": {lines(sweep["rows"])}}}'
    text = "{\n" + ",\n".join(f' "{key}": {value}' for key, value in parts.items()) + "\n}\n"
    path.write_text(text, encoding="utf-8")


def record(accepted: Accepted, result: dict[str, Any]) -> list[str]:
    """Accept the valid rows of a run, a sweep or a layer measurement, and return the labels of the others."""
    peak = {"peak_tflops": result["peak_tflops"]} if result.get("peak_tflops") else {}
    accepted["runs"].append({**result["environment"], "copy_peak_gbps": result.get("copy_peak_gbps"), **peak})
    run, refused = len(accepted["runs"]) - 1, []
    if layers := result.get("layers"):
        for name, measured in layers.items():
            before = accepted["layers"].get(name)
            if before is not None and not _as_strict_layer(measured, before["measured"]):
                refused.append(name)
            else:
                accepted["layers"][name] = {"run": run, "measured": measured}
        return refused
    if any("peak_extra_bytes" in row for row in result["rows"]):
        accepted["sweep"] = {"run": run, "rows": [_short(row) for row in result["rows"]]}
        return refused
    at = {(row["row"], row["shape"]): i for i, row in enumerate(accepted["rows"])}
    for row in result["rows"]:
        key = row["row"], row["shape"]
        before = accepted["rows"][at[key]] if key in at else None
        if "failed" in row or not _compared(row):
            refused.append(" ".join(key))
        elif not _as_strict(row, before):
            if not _add_peak(before, row, result["environment"]):
                refused.append(" ".join(key))
        elif before is None:
            at[key] = len(accepted["rows"])
            accepted["rows"].append({"run": run, **_short(row)})
        else:
            accepted["rows"][at[key]] = {"run": run, **_short(row)}
    if result["host"] and "failed" not in result["host"]:
        accepted["host"] = {**(accepted["host"] or {}), "run": run, **result["host"]}  # a quick run has no first use
    return refused


def _entries(accepted: Accepted) -> list[dict[str, Any]]:
    others = [entry for entry in (accepted["host"], accepted["sweep"]) if entry]
    return [*accepted["rows"], *others, *accepted["layers"].values()]


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with times to a hundredth of a microsecond, and without what can be computed."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.3g}") if abs(value) < 0.01 else round(value, 2 if abs(value) > 2 else 4)
        if isinstance(value, dict):
            return {k: rounded(v) for k, v in value.items()}
        return [rounded(v) for v in value] if isinstance(value, list) else value

    return {key: rounded(value) for key, value in row.items() if key not in ("copies_us",)}


def _compared(row: dict[str, Any]) -> bool:
    """Return False for a row whose result has no error against the reference, such as one of another shape."""
    return not isinstance(row.get("error_ours"), dict)


def _add_peak(before: dict[str, Any], row: dict[str, Any], environment: dict[str, Any]) -> bool:
    """Give a record that has none its share of the peak that a run with fewer peers measured; False if it has none."""
    if "of_peak" in before or "of_peak" not in row:
        return False
    share = row["of_peak"] * row["us"] / before["us"]  # that of the time which is kept
    before |= _short({"of_peak": share, "peak_from": {"us": row["us"], "commit": environment.get("commit")}})
    return True


def _as_strict_layer(measured: dict[str, Any], before: dict[str, Any]) -> bool:
    """Return False for a layer without the peer that was fastest before, unless one that it has is as fast."""
    rows = [[_peers_of(row) for row in found["rows"]] for found in (measured, before)]
    return len(rows[0]) == len(rows[1]) and all(map(_as_strict, *rows))


def _peers_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the peers of a layer as a row of an op has them."""
    ways = {way: row[way] for way in LAYER_PEERS if isinstance(row.get(way), dict)}
    times = {way: next((found[key] for key in _STEPS if key in found), None) for way, found in ways.items()}
    return {"peers": times}


def _as_strict(row: dict[str, Any], before: dict[str, Any] | None) -> bool:
    fastest = tables.ranked(before)[:1] if before else []
    peers = tables.ranked(row)
    return all(name in dict(peers) or (peers and peers[0][1] <= us) for name, us in fastest)
