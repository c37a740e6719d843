"""Results of the zoo, counted by kind, and the tables in the guide."""

from __future__ import annotations

from collections import Counter
from typing import Any

from bench.zoo.steps import SEEN, SEEN_HALF

MARK = "<!-- zoo -->"
KINDS = (
    "decoder", "encoder", "encoder-decoder", "vision", "audio", "multimodal", "time series", "diffusion", "other",
)  # fmt: skip
COLUMNS = ("kept", "nothing", "changed", "crashed")
NOT_BUILT, NOT_REPEATABLE, TOO_SLOW = NOT_COMPARED = ("not built", "not repeatable", "too slow")


def status_of(result: dict[str, Any]) -> str:
    """Return what counts for a class: the worst of its sets of options; of those that kept it, kept wins."""
    if "options" not in result:
        return result.get("outcome", NOT_BUILT)
    found = {option["status"] for option in result["options"].values()}
    return next(status for status in ("crashed", "changed", "kept", "nothing") if status in found)


def counts(results: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    """Return how many classes of each kind have each status."""
    found: dict[str, Counter[str]] = {}
    for result in results:
        found.setdefault(result["kind"], Counter())[status_of(result)] += 1
    return found


def by_option(results: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    """Return how many classes have each status with each set of options."""
    found: dict[str, Counter[str]] = {}
    for result in results:
        for name, option in result.get("options", {}).items():
            found.setdefault(name, Counter())[option["status"]] += 1
    return found


def lines_of(
    results: list[dict[str, Any]], versions: dict[str, str | None], of: int = 0, note: str = ""
) -> list[str]:  # fmt: skip
    """Return the table by kind and by option, as lines of Markdown; `of` is how many classes there are.

    A note says where and how they were chosen.
    """
    head = ("kind", "classes", "compared", "kept", "nothing to replace", "changed", "crashed", *NOT_COMPARED)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    by_kind, total = counts(results), Counter()

    def row(name: str, count: Counter[str]) -> str:
        cells = " | ".join(str(count[c]) for c in (*COLUMNS, *NOT_COMPARED))
        return f"| {name} | {count.total()} | {sum(count[c] for c in COLUMNS)} | {cells} |"

    for kind in sorted(by_kind, key=lambda k: KINDS.index(k) if k in KINDS else len(KINDS)):
        lines.append(row(kind, by_kind[kind]))
        total += by_kind[kind]
    lines += [row("all", total), "", "| options | kept | nothing to replace | changed | crashed |", "|---" * 5 + "|"]
    for name, count in by_option(results).items():
        lines.append(f"| {name} | {' | '.join(str(count[c]) for c in COLUMNS)} |")
    lines += ["", *_power(results)]
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    sample = f" A sample: {len(results)} of {of} classes." if len(results) < of else ""
    return [*lines, f"{known}.{sample}{' ' + note if note else ''}"]


def _power(results: list[dict[str, Any]]) -> list[str]:
    """Return what share of the compared tensors shows a change that is to be seen; nothing if no result says it."""
    totals = []
    for option, field in (("default", "seen"), ("attention", "seen half")):
        pairs = [r["options"][option][field] for r in results if field in r.get("options", {}).get(option, {})]
        totals.append([sum(column) for column in zip(*pairs, strict=True)] or [0, 0])
    (seen, tensors), (seen_half, tensors_half) = totals
    if not tensors or not tensors_half:
        return []
    share, share_half = 100 * seen / tensors, 100 * seen_half / tensors_half
    return [
        f"A change of {SEEN:.0%} of its norm would be seen in {share:.2f} % of {tensors} results and "
        f"gradients in fp32, one of {SEEN_HALF:.0%} in {share_half:.2f} % of {tensors_half} in bf16.",
        "",
    ]


def written(document: str, lines: list[str]) -> str:
    """Return a page of the guide with other tables."""
    before, _, rest = document.partition(MARK)
    _, _, after = rest.partition(MARK)
    return f"{before}{MARK}\n" + "\n".join(lines) + f"\n{MARK}{after}"
