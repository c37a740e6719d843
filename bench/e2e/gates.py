"""What the arms of ``bench e2e train`` have to reach, beside one another."""

from __future__ import annotations

import statistics
from typing import Any

# Arm, the arm it is compared with, what of them, and the limit for dense and for MoE models.
SPEED = (
    ("ours_fused", "hf", 1.50, 1.60),
    ("ours_fused", "liger", 1.03, 1.10),
    ("ours_fused", "compile", 0.97, 1.10),
    ("ours_compile", "compile", 1.00, 1.10),
    ("fp8", "ours_fused", 1.10, 1.05),
)
MEMORY = (("ours_fused", "hf", 0.50, 0.65), ("ours_fused", "liger", 1.03, 1.03), ("fp8", "ours_fused", 0.97, 1.00))
LOSS = {"ours": 1e-3, "ours_fused": 1e-3, "ours_compile": 1e-3, "fp8": 5e-3}  # of hf's, over the last fifth of steps
WARM_START_S = 3.0


def gates(model: str, arms: dict[str, dict[str, Any]], starts: bool = True) -> list[dict[str, Any]]:
    """Return every gate with its value, limit and whether it is passed; those without data are left out.

    Without `starts`, the time of a first step says nothing: processes were started at the same time.
    """
    at, made = (2 if model == "dense" else 3), []

    def add(name: str, value: float, must: float, passed: bool) -> None:
        made.append({"gate": name, "value": round(value, 4), "must": must, "passed": passed})

    def pairs(table: Any, key: str) -> Any:
        for row in table:
            first, second = (arms.get(arm, {}).get(key) for arm in row[:2])
            if first and second:
                yield f"{row[0]} : {row[1]}", first / second, row[at]

    for name, value, must in pairs(SPEED, "tokens_per_s"):
        add(f"tokens/s, {name}", value, must, value >= must)
    for name, value, must in pairs(MEMORY, "peak_mib"):
        add(f"peak memory, {name}", value, must, value <= must)
    wanted = _last(arms.get("hf", {}))
    for arm, must in LOSS.items():
        if wanted and (found := _last(arms.get(arm, {}))):
            value = abs(found / wanted - 1)
            add(f"loss, {arm} : hf", value, must, value <= must)
    first, other = (arms.get(arm, {}).get("first_step_s") for arm in ("ours_fused", "hf"))
    if starts and first and other:
        add("first step, ours_fused - hf, s", first - other, WARM_START_S, first - other <= WARM_START_S)
    return made


def _last(record: dict[str, Any]) -> float | None:
    """Return the mean loss of the last fifth of the steps."""
    losses = record.get("losses")
    return statistics.mean(losses[-max(1, len(losses) // 5) :]) if losses else None


def text(found: list[dict[str, Any]]) -> str:
    """Return gates as lines."""
    lines = (f"{'passed' if g['passed'] else 'MISSED'}: {g['gate']}: {g['value']} (must {g['must']})" for g in found)
    return "\n".join(lines)
