"""Write ``docs/coverage.md`` from calls: ``python docs/make_coverage.py``.

Entries are the names of four libraries (``tests/support/catalogues.py``). The call of an entry is that of
docs/how_to/migrate.md, or of ``coverage_rows.py``; every call is executed on small CPU tensors.
``tests/contracts/test_coverage.py`` compares the page with a new one.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "docs")]

import coverage_rows  # noqa: E402
import make_operators  # noqa: E402
from support.catalogues import FLAGGEMS, FLASHRT, GN_KERNELS, LINGHE  # noqa: E402
from support.migrating import DOCUMENT, calls, names  # noqa: E402

from rtkernels.aten import table  # noqa: E402
from rtkernels.errors import RtkError  # noqa: E402

PAGE = ROOT / "docs" / "coverage.md"
SYSTEMS = {
    system: [*names_, *coverage_rows.ENTRIES.get(system, ())]
    for system, names_ in (
        ("linghe", LINGHE), ("FlashRT", FLASHRT), ("gn_kernels", GN_KERNELS), ("FlagGems", FLAGGEMS),
    )
}  # fmt: skip
STATES = ("covered", "partly", "missing", "not applicable")
INTRODUCTION = """
<!-- Written by docs/make_coverage.py from calls. -->
# Coverage of four libraries

For each function of linghe 0.3.0, FlashRT's catalogue, gn_kernels and FlagGems 3.0: the call here that gives the same
result. All calls are executed on the CPU when this page is written, and again by a test. The tensors in them are
explained in [migrate.md](how_to/migrate.md).

**covered**: the call works, under other names and argument orders, by views, or by autograd in the place of a separate
backward function. **partly**: something is missing, which the last column says. **missing**: there is no call.
"""


@cache
def works(call: str) -> bool:
    """Return whether a call succeeds on new tensors; only the errors of a call that is refused are expected."""
    try:
        eval(call, names())
    except (RtkError, TypeError, AttributeError, NotImplementedError):
        return False
    return True


@cache
def _calls_by_name(system: str) -> dict[str, str]:
    """Return the first call for each name, those under a heading with the library's name first."""
    own, others = {}, {}
    for section in re.split(r"^(?=##)", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE):
        found = own if system in section.partition("\n")[0] else others
        for there, here in calls(section):
            for word in [*re.findall(r"\w+(?:::\w+)?", there), *re.findall(r"\w+\.\w+", there)]:
                found.setdefault(word, here)
    return others | own


def row(system: str, entry: str) -> tuple[str, str, str]:
    """Return the call of an entry, "" for none, its state, and what is missing."""
    call = coverage_rows.CALLS.get(system, {}).get(entry) or _calls_by_name(system).get(entry, "")
    if (reason := coverage_rows.NOT_APPLICABLE.get((system, entry))) is not None:
        return "", "not applicable", reason
    gaps = [
        (probe, what) for library, name, probe, what in coverage_rows.GAPS if (library, name) == (system, entry)
    ]  # fmt: skip
    missing = "; ".join(what for probe, what in gaps if probe is None or not works(probe))
    if not call:
        if not missing:
            raise SystemExit(f"{system}: {entry} has neither a call nor a line in docs/coverage_rows.py")
        return "", "missing", missing
    if not works(call):
        raise SystemExit(f"{system}: the call of {entry} fails: {call}")
    return call, "partly" if missing else "covered", missing


def _operators() -> list[str]:
    """Return the lines on torch's operators that FlagGems overrides."""
    taken = set(table.table()) | set(table.ONLY_ON_CUDA)
    listed = [name for *_, names_ in make_operators.listed() for name in names_]
    here = sum(name in taken for name in listed)
    return [
        "## FlagGems' operators of torch", "",
        f"Of the {len(listed)} overloads that FlagGems registers, {here} are taken by `rtkernels.enable(\"all\")`;"
        " [operators.md](operators.md) lists", "them all and says why torch keeps the others.", "",
    ]  # fmt: skip


def page() -> str:
    """Return the text of the page."""
    unknown = {gap[:2] for gap in coverage_rows.GAPS} | set(coverage_rows.NOT_APPLICABLE)
    unknown -= {(system, entry) for system, entries in SYSTEMS.items() for entry in entries}
    if unknown:
        raise SystemExit(f"docs/coverage_rows.py names entries that no catalogue has: {sorted(unknown)}")
    found = {system: {entry: row(system, entry) for entry in entries} for system, entries in SYSTEMS.items()}
    lines = [*INTRODUCTION.strip().splitlines(), "", f"| library | entries | {' | '.join(STATES)} |"]
    lines.append("|---|---" + "|---" * len(STATES) + "|")
    for system, rows in found.items():
        counts = [sum(state == wanted for _, state, _ in rows.values()) for wanted in STATES]
        lines.append(f"| {system} | {len(rows)} | {' | '.join(map(str, counts))} |")
    lines.append("")
    for system, rows in found.items():
        lines += [f"## {system}", "", "| entry | call | state | missing |", "|---|---|---|---|"]
        for entry, (call, state, missing) in rows.items():
            shown = f"`{call}`".replace("|", "\\|") if call else "-"
            lines.append(f"| `{entry}` | {shown} | {state} | {missing} |")
        lines.append("")
    return "\n".join(lines + _operators())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
