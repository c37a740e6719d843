"""Conclusions from a recorded run of ``python -m bench aten``: the default set of ``rtkernels.enable()``, and sizes
below which calls go to torch. ``python -m bench aten --record FILE`` keeps a result as ``bench/results/aten/h200.json``
and writes ``rtkernels/aten/measured.py`` from it.

A call that is passed on to torch costs the host time of an override. The threshold of each overload is the size with
the fewest cases below 0.98 of torch's speed and, among those, the best geometric mean over all cases. No case is taken
at half of torch's speed or below, nor one below 0.9 that would reach 0.98 if it were passed on. The overload belongs to
the default set if that mean is 1.05 or more.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from bench.measure import aten_file
from bench.measure.aten import is_candidate_of
from rtkernels.aten import table
from rtkernels.aten.measured import DEFAULT

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "bench" / "results" / "aten" / "h200.json"
MEASURED = ROOT / "rtkernels" / "aten" / "measured.py"
WANTED = 1.05  # torch's time over ours, geometric mean
SLOWER = 0.98  # the same, for one case: counted below this
WORST = 0.9  # the same, for one case that would be faster if passed on
HALF = 0.5  # the same, for one case: never taken below this
NEVER = 1 << 62
# Faster on core shapes, but not in the default set: models call them so often on so little data that the host time of
# an override exceeds what the device saves (T5 in bfloat16: 195 of the 249 calls taken per step are `clone`, which
# saves the device 0.8 ms; with all of them the host time of the step rose by 25 ms, that of T5 in float32 by 2.6 ms).
SLOWER_IN_MODELS = frozenset({"clone"})


def load(path: Path = RESULT) -> dict[str, Any]:
    """Read a result."""
    return json.loads(path.read_text(encoding="utf-8"))


def given_back_us(result: dict[str, Any]) -> float:
    """Return what an override adds to the host time of a call that it passes on to torch."""
    host = result["host"]
    extra = [host[f"given back {name[6:]}"] - us for name, us in host.items() if name.startswith("torch ")]
    return max(sum(extra) / len(extra), 0.0)


def cases_of(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the cases of each overload that torch and our kernel both did, with `elements` of the shape."""
    found: dict[str, list[dict[str, Any]]] = {}
    for case in result["cases"]:
        ours, torchs = case.get("rtkernels", {}), case.get("torch", {})
        if "operator" in ours and "operator" in torchs and not ours.get("why"):
            found.setdefault(case["overload"], []).append({**case, "elements": math.prod(case["shape"])})
    return found


def ratios(cases: list[dict[str, Any]], threshold: int, given_back: float) -> list[float]:
    """Return torch's time over ours of each case, where cases below the threshold are passed on to torch."""
    return [
        case["torch"]["operator"] / case["rtkernels"]["operator"]
        if case["elements"] >= threshold
        else _ratio_given_back(case, given_back)
        for case in cases
    ]


def _ratio_given_back(case: dict[str, Any], given_back: float) -> float:
    torchs = case["torch"]["operator"]
    return torchs / max(torchs, case["torch"]["submit"] + given_back)


def mean_ratio(cases: list[dict[str, Any]], threshold: int, given_back: float) -> float:
    """Return the geometric mean of ``ratios``."""
    found = ratios(cases, threshold, given_back)
    return math.exp(sum(map(math.log, found)) / len(found))


def slower(cases: list[dict[str, Any]], threshold: int, given_back: float) -> int:
    """Return how many cases are slower than torch's."""
    return sum(ratio < SLOWER for ratio in ratios(cases, threshold, given_back))


def _is_allowed(cases: list[dict[str, Any]], threshold: int, given_back: float) -> bool:
    """Return False if a case is taken at half of torch's speed, or would be much faster if passed on."""
    taken, back = ratios(cases, 0, given_back), ratios(cases, NEVER, given_back)
    return not any(
        ours <= HALF or (ours < WORST and other >= SLOWER)
        for case, ours, other in zip(cases, taken, back, strict=True)
        if case["elements"] >= threshold
    )


def choice(result: dict[str, Any]) -> dict[str, tuple[float, float, int]]:
    """Return, for each overload, the mean ratio of our kernel alone, that with the best threshold, and this."""
    extra = given_back_us(result)
    chosen = {}
    for name, cases in cases_of(result).items():
        sizes = [*sorted({case["elements"] for case in cases}), NEVER]
        allowed = [size for size in sizes if _is_allowed(cases, size, extra)]
        best = min(allowed, key=lambda size: (slower(cases, size, extra), -mean_ratio(cases, size, extra), size))
        chosen[name] = mean_ratio(cases, 0, extra), mean_ratio(cases, best, extra), best
    return chosen


def default_set(result: dict[str, Any]) -> dict[str, int]:
    """Return the default set, with thresholds; 0 where the smallest size that was measured is faster already.

    Overloads that are no candidates were not measured on all core shapes.
    """
    cases = cases_of(result)
    return {
        name: 0 if size == min(case["elements"] for case in cases[name]) else size
        for name, (_, mean, size) in choice(result).items()
        if mean >= WANTED
        and size != NEVER
        and name not in SLOWER_IN_MODELS
        and is_candidate_of(cases[name][0]["family"], name)
    }


def measured_module(result: dict[str, Any]) -> str:
    """Return the text of ``rtkernels/aten/measured.py``."""
    chosen = sorted(default_set(result).items())
    module_of = {row.name: module for module in table.MODULES for row in table.rows_of(module)}
    module_of |= dict.fromkeys(table.ONLY_ON_CUDA, "row")
    lines = "".join(f'    "{name}": ("{module_of[name]}", {size}),\n' for name, size in chosen)
    gpu = result["environment"].get("gpu", "?")
    return (
        '"""The default set of ``rtkernels.enable()``: overloads that were faster than torch\'s over FlagGems\' core\n'
        "shapes, with the elements of the largest tensor from which on they are taken.\n\n"
        f"Written by ``python -m bench aten --record`` from ``bench/results/aten/h200.json``, measured on a {gpu}.\n"
        '"""\n\n'
        f"# Module of ``rtkernels.aten`` that has the handler, and these elements.\nDEFAULT = {{\n{lines}}}\n"
    )


def record(path: Path) -> None:
    """Keep a result, write the default set from it, and print how fast that is."""
    RESULT.parent.mkdir(exist_ok=True)
    aten_file.save(aten_file.load(path), RESULT)
    result = load()
    MEASURED.write_text(measured_module(result), encoding="utf-8")
    means = {name: choice(result)[name][1] for name in default_set(result)}
    if means:
        slowest = min(means, key=means.__getitem__)
        print(
            f"default set: {len(means)} overloads, torch's time over ours {aten_file.mean(list(means.values())):.2f}, "
            f"the slowest {slowest} {means[slowest]:.2f}"
        )
    if missing := sorted(set(DEFAULT) - set(cases_of(result))):
        print(f"not measured, so not in the set any more: {', '.join(missing)}")
