"""The file of ``python -m bench aten``, and tables of its cases."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

WAYS = ("torch", "rtkernels", "flaggems", "inductor")


def _short_numbers(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return {k: _short_numbers(v) for k, v in value.items()} if isinstance(value, dict) else value


def save(result: dict[str, Any], out: Path) -> None:
    """Write a result, a case a line, times to four digits."""
    head = json.dumps({k: v for k, v in result.items() if k != "cases"}, default=str)
    lines = ",\n  ".join(json.dumps(_short_numbers(case), default=str) for case in result["cases"])
    out.write_text(f'{head[:-1]}, "cases": [\n  {lines}\n ]}}\n', encoding="utf-8")
    _journal(out).unlink(missing_ok=True)


def _journal(out: Path) -> Path:
    return out.with_suffix(".journal")


def append(case: dict[str, Any], out: Path) -> None:
    """Append a case, so that ``load`` finds it even if no ``save`` follows."""
    with _journal(out).open("a", encoding="utf-8") as file:
        file.write(json.dumps(_short_numbers(case), default=str) + "\n")


def load(out: Path) -> dict[str, Any] | None:
    """Return a result, with cases that were finished before it was saved; None where there is none."""
    if not out.exists():
        return None
    result = json.loads(out.read_text(encoding="utf-8"))
    if _journal(out).exists():
        later = [json.loads(line) for line in _journal(out).read_text(encoding="utf-8").splitlines()]
        found = {(c["overload"], tuple(c["shape"]), c["dtype"]): c for c in [*result["cases"], *later]}
        result["cases"] = list(found.values())
    return result


def line(case: dict[str, Any]) -> str:
    shape = "x".join(map(str, case["shape"]))
    times = []
    for way in WAYS:
        if way in case and "error" in case[way]:
            times.append(f"{way} {case[way]['error']}")
        elif way in case:
            kernel = f"{case[way]['kernel']:.1f}/" if "kernel" in case[way] else ""
            why = f" {case[way]['why']}" if case[way].get("why") else ""
            times.append(f"{way} {kernel}{case[way]['operator']:.1f}{why}")
    return f"{case['overload']:<24} {shape:<16} {case['dtype']:<9} {'  '.join(times)} µs (kernel/operator)"


def summary(found: list[dict[str, Any]], mode: str = "operator") -> str:
    """Return a table: geometric mean over shapes and dtypes of torch's time over ours and the others', per overload."""
    by_overload: dict[str, list[dict[str, Any]]] = {}
    for case in found:
        by_overload.setdefault(case["overload"], []).append(case)
    lines = [
        f"| overload | rtkernels | worst | flaggems | inductor | {mode}, torch eager = 1; each case |",
        "|---|---|---|---|---|---|",
    ]
    for name, listed in sorted(by_overload.items(), key=lambda item: (item[1][0]["family"], item[0])):
        cells, each = [], []
        for way in ("rtkernels", "flaggems", "inductor"):
            both = [case for case in listed if mode in torchs(case, way) and mode in case.get(way, {})]
            ratios = [torchs(case, way)[mode] / case[way][mode] for case in both]
            cells.append(f"{mean(ratios):.2f}" if ratios else "")
            if way == "rtkernels":
                cells.append(f"{min(ratios):.2f}" if ratios else "")
                each = [f"{_short(case)} {ratio:.2f}" for case, ratio in zip(both, ratios, strict=True)]
                each += [f"{_short(case)} {_failure(case)}" for case in listed if _failure(case)]
        lines.append(f"| {name} | {' | '.join(cells)} | {', '.join(each)} |")
    return "\n".join(lines)


def torchs(case: dict[str, Any], way: str) -> dict[str, float]:
    """Return torch's times in the process that measured a way."""
    return case.get(way, {}).get("torch") or case.get("torch", {})


def _short(case: dict[str, Any]) -> str:
    return f"{'x'.join(map(str, case['shape']))}{'b' if case['dtype'] == 'bfloat16' else case['dtype'][0]}"


def _failure(case: dict[str, Any]) -> str:
    """Return why a case has no time of ours, or that of torch's kernel."""
    found = case.get("rtkernels", {})
    return found["error"][:60] if "error" in found else f"torch: {', '.join(found['why'])}" if found.get("why") else ""


def mean(ratios: list[float]) -> float:
    """Return the geometric mean; of nothing NaN."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def flaggems_ratios(found: list[dict[str, Any]], mode: str = "operator") -> dict[str, dict[str, float]]:
    """Return FlagGems' time over ours, each in units of torch's in the same process, by overload and case."""
    ratios: dict[str, dict[str, float]] = {}
    for case in found:
        ours, peers = case.get("rtkernels", {}), case.get("flaggems", {})
        units = [torchs(case, way).get(mode, 0.0) for way in ("rtkernels", "flaggems")]
        if mode in ours and mode in peers and all(units) and not ours.get("why"):
            ratio = (peers[mode] / units[1]) / (ours[mode] / units[0])
            ratios.setdefault(case["overload"], {})[_short(case)] = ratio
    return ratios


def against_flaggems(found: list[dict[str, Any]]) -> str:
    """Return FlagGems' time over ours: the mean of all overloads that both have, and those where it is below 1."""
    lines = []
    for mode in ("operator", "kernel"):
        ratios = flaggems_ratios(found, mode)
        if not ratios:
            continue
        each = {name: mean(list(cases.values())) for name, cases in ratios.items()}
        slower = {name: cases for name, cases in ratios.items() if each[name] < 1.0}
        lines.append(
            f"{mode}, FlagGems = 1: {len(each)} overloads, mean {mean(list(each.values())):.2f}; {len(slower)} below 1"
        )
        lines += [f"  {n}: {', '.join(f'{s} {r:.2f}' for s, r in cases.items())}" for n, cases in slower.items()]
    return "\n".join(lines)
