"""What the arms of ``bench e2e train`` have to reach, relative to one another."""

from __future__ import annotations

import statistics
from typing import Any

from bench.e2e.arms import FAMILIES

# Arm, the arm it is compared with, the quantity, and the limit for dense and for MoE models.
SPEED = (
    ("ours_fused", "hf", 1.50, 1.60),
    ("ours_fused", "liger", 1.03, 1.10),
    ("ours_fused", "compile", 0.97, 1.10),
    ("ours_compile", "compile", 1.00, 1.10),
    ("fp8", "ours_fused", 1.10, 1.05),
)
MEMORY = (("ours_fused", "hf", 0.50, 0.65), ("ours_fused", "liger", 1.03, 1.03), ("fp8", "ours_fused", 0.97, 1.00))
# Limits of the time of a step and of peak memory in `bench e2e families`.
FAMILY_TIME = (
    ("ours", "compile", 1.0), ("ours_fused", "compile", 1.0), ("ours", "liger", 1.0), ("ours_fused", "ours", 1.0),
    ("fp8", "ours_fused", 1.0),
)  # fmt: skip
FAMILY_MEMORY = (("ours", "liger", 1.03), ("ours_fused", "liger", 1.03), ("fp8", "liger", 1.03))
# Share of hf's loss in the first step, with equal weights and batch. `bench e2e parity` compares later losses.
LOSS = {"ours": 1e-3, "ours_fused": 1e-3, "ours_compile": 1e-3, "fp8": 5e-3}
BF16_LOSS, HELD_OUT, SPREAD, COSINE, NORM = 1e-3, 5e-3, 1e-2, 0.97, 0.03
WARM_START_S = 3.0
FIRST_STEP_S = {False: 2.0, True: 15.0}  # of ours_fused, by whether the cache of kernels was empty


def gates(model: str, arms: dict[str, dict[str, Any]], starts: bool = True, cold: bool = False) -> list[dict[str, Any]]:
    """Return every gate with its value, limit and whether it is passed; those without data are left out.

    Without `starts`, the time to the first step says nothing: processes were started at the same time. With `cold`,
    the cache of our kernels was empty.
    """
    if model in FAMILIES:
        return family_gates(arms)
    at, result = (2 if model == "dense" else 3), []

    def add(name: str, value: float, must: float, passed: bool) -> None:
        result.append({"gate": name, "value": round(value, 4), "must": must, "passed": passed})

    def pairs(table: Any, key: str) -> Any:
        for row in table:
            first, second = (arms.get(arm, {}).get(key) for arm in row[:2])
            if first and second:
                yield f"{row[0]} : {row[1]}", first / second, row[at]

    for name, value, must in pairs(SPEED, "tokens_per_s"):
        add(f"tokens/s, {name}", value, must, value >= must)
    for name, value, must in pairs(MEMORY, "peak_mib"):
        add(f"peak memory, {name}", value, must, value <= must)
    wanted = arms.get("hf", {}).get("losses")
    for arm, must in LOSS.items():
        if wanted and (found := arms.get(arm, {}).get("losses")):
            value = abs(found[0] / wanted[0] - 1)
            add(f"first loss, {arm} : hf", value, must, value <= must)
    first, other = (arms.get(arm, {}).get("first_step_s") for arm in ("ours_fused", "hf"))
    if (value := arms.get("ours_fused", {}).get("first_step_itself_s")) is not None:
        must = FIRST_STEP_S[cold]
        add(f"first step, ours_fused, {'cold' if cold else 'warm'}, s", value, must, value <= must)
    if starts and not cold and first and other:
        add("first step, ours_fused - hf, s", first - other, WARM_START_S, first - other <= WARM_START_S)
    return result


def family_gates(arms: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the gates of ``bench e2e families`` with their values; those without data are left out."""
    result = []
    tables = (("time", "step_ms", FAMILY_TIME), ("peak memory", "peak_mib", FAMILY_MEMORY))
    found = [
        (f"{what}, {first} : {second}", arms[first][key] / arms[second][key], must)
        for what, key, table in tables
        for first, second, must in table
        if arms.get(first, {}).get(key) and arms.get(second, {}).get(key)
    ]
    wanted = arms.get("hf", {}).get("losses")
    for arm, must in LOSS.items():
        if wanted and (losses := arms.get(arm, {}).get("losses")):
            found.append((f"first loss, {arm} : hf", abs(losses[0] / wanted[0] - 1), must))
    for name, value, must in found:
        result.append({"gate": name, "value": round(value, 4), "must": must, "passed": value <= must})
    return result


def parity_gates(arms: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the gates of ``bench e2e parity`` with their values; those without data are left out.

    16-bit arms: the mean loss of the last fifth of the steps is within 0.1 % of hf's, or within twice the difference of
    two runs of hf with weights that differ by 1e-3. fp8, for several orders of the data: the mean held-out loss is
    within 0.5 % of our 16-bit arm's, runs differ by at most 1 %, or as much as those of the 16-bit arm, and the
    gradient has a cosine of 0.97 with bf16's and a norm within 3 % of it, in the first and the last step. The arm with
    a planted mistake fails one of these.
    """
    results: list[dict[str, Any]] = []
    runs = {arm: record["runs"] for arm, record in arms.items() if record.get("runs")}

    def add(name: str, value: float, must: float, passed: bool, **more: str) -> None:
        results.append({"gate": name, "value": round(value, 5), "must": round(must, 5), "passed": passed, **more})

    def held_out(arm: str, count: int | None = None) -> list[float]:
        return [run["held_out"] for run in runs[arm]][:count]

    if "hf" in runs:
        wanted, first = _last(runs["hf"][0]), runs["hf"][0]["losses"][0]
        add("loss, hf, last : first", wanted / first, 0.5, wanted / first <= 0.5)
        noise = abs(_last(runs["hf_perturbed"][0]) / wanted - 1) if "hf_perturbed" in runs else 0.0
        if "ours_fused" in runs:
            value, must = abs(_last(runs["ours_fused"][0]) / wanted - 1), max(BF16_LOSS, 2 * noise)
            add("loss, ours_fused : hf", value, must, value <= must)

    def fp8_gates(arm: str) -> list[dict[str, Any]]:
        ours, theirs = held_out(arm), held_out("ours_fused", len(runs[arm]))
        off = abs(statistics.mean(ours) / statistics.mean(theirs) - 1)
        apart, own = ((max(runs) - min(runs)) / statistics.mean(runs) for runs in (ours, theirs))
        gradients = [g for run in runs[arm] for g in run["gradients"]]
        cosine, norm = min(g["cosine"] for g in gradients), max(abs(g["norm"] - 1) for g in gradients)

        def gate(name: str, value: float, must: float, passed: bool, **more: str) -> dict[str, Any]:
            return {"name": name, "value": value, "must": must, "passed": passed, **more}

        limit, why = max(SPREAD, own), f"{SPREAD}, or the {own:.5f} of ours_fused where that is more"
        return [
            gate(f"held-out loss, {arm} : ours_fused", off, HELD_OUT, off <= HELD_OUT),
            gate(f"spread of held-out losses, {arm}", apart, limit, apart <= limit, why=why),
            gate(f"gradient, {arm}, cosine", cosine, COSINE, cosine >= COSINE),
            gate(f"gradient, {arm}, norm", norm, NORM, norm <= NORM),
        ]

    if "ours_fused" in runs and "fp8" in runs:
        for gate in fp8_gates("fp8"):
            add(**gate)
    if "ours_fused" in runs and "fp8_saturated" in runs:
        missed = sum(not gate["passed"] for gate in fp8_gates("fp8_saturated"))
        add("gates missed by fp8_saturated", missed, 1, missed >= 1)
    return results


def _last(run: dict[str, Any]) -> float:
    """Return the mean loss of the last fifth of the steps."""
    return statistics.mean(run["losses"][-max(1, len(run["losses"]) // 5) :])


def text(found: list[dict[str, Any]]) -> str:
    """Return gates as lines."""
    lines = []
    for g in found:
        why = f": {g['why']}" if "why" in g else ""
        lines.append(f"{'passed' if g['passed'] else 'MISSED'}: {g['gate']}: {g['value']} (must {g['must']}{why})")
    return "\n".join(lines)
