"""Results of the zoo, counted by kind, and the table in docs/models.md."""

from __future__ import annotations

from collections import Counter
from typing import Any

MARK = "<!-- zoo -->"
KINDS = (
    "decoder", "encoder", "encoder-decoder", "vision", "audio", "multimodal", "time series", "diffusion", "other",
)  # fmt: skip
COLUMNS = ("kept", "nothing", "changed", "crashed")


def status_of(result: dict[str, Any]) -> str:
    """Return what counts for a class: the worst of its sets of options; of those that kept it, kept wins."""
    if "options" not in result:
        return "not built"
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
    lines = ["| kind | classes | built | kept | nothing to replace | changed | crashed | not built |", "|---" * 8 + "|"]
    by_kind, total = counts(results), Counter()

    def row(name: str, count: Counter[str]) -> str:
        cells = " | ".join(str(count[c]) for c in COLUMNS)
        return f"| {name} | {count.total()} | {count.total() - count['not built']} | {cells} | {count['not built']} |"

    for kind in sorted(by_kind, key=lambda k: KINDS.index(k) if k in KINDS else len(KINDS)):
        lines.append(row(kind, by_kind[kind]))
        total += by_kind[kind]
    lines += [row("all", total), "", "| options | kept | nothing to replace | changed | crashed |", "|---" * 5 + "|"]
    for name, count in by_option(results).items():
        lines.append(f"| {name} | {' | '.join(str(count[c]) for c in COLUMNS)} |")
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    sample = f" A sample: {len(results)} of {of} classes." if len(results) < of else ""
    return [*lines, "", f"{known}.{sample}{' ' + note if note else ''}"]


def written(document: str, lines: list[str]) -> str:
    """Return docs/models.md with another table."""
    before, _, rest = document.partition(MARK)
    _, _, after = rest.partition(MARK)
    return f"{before}{MARK}\n" + "\n".join(lines) + f"\n{MARK}{after}"
