"""Which tests and rows a campaign begins with: what has changed, or was added, since the newest record."""

from __future__ import annotations

import re
from pathlib import Path

from bench import meta, peers
from bench.report import accepted, records
from bench.rows.row import Row

_FOR_A_GPU = re.compile(r"pytest\.mark\.gpu|\bat\((\)|[^)]*\"cuda\")")


def newest_commit(folder: Path) -> str | None:
    """Return the commit of the newest run among the accepted numbers."""
    runs = [run for file in sorted(folder.glob("*.json")) for run in accepted.load(file)["runs"] if run.get("commit")]
    return max(runs, key=lambda run: run["date"])["commit"] if runs else None


def changed_since(commit: str | None) -> list[str] | None:
    """Return the files that differ from a commit, new ones as well; None where git does not know it."""
    differing = meta._output("git", "diff", "--name-only", commit) if commit else None
    added = meta._output("git", "ls-files", "--others", "--exclude-standard")
    return None if differing is None or added is None else [*differing.splitlines(), *added.splitlines()]


def tests_of(files: list[str], root: Path = meta.ROOT) -> list[str]:
    """Return tests to run for changed files, in this order: changed tests, changed kernels, changed launch code.

    Kernels have changed, too, with a header that they include; the tests are those of their families.
    """
    from rtkernels.runtime.build import sources

    device = {file.removeprefix("cuda_src/") for file in files if file.startswith("cuda_src/")}
    units = [unit for unit in sources.units() if device & set(sources.closure(unit))]
    families = [unit.split("/")[0] for unit in sorted(units)]
    families += [file.split("/")[2] for file in sorted(files) if re.match(r"rtkernels/ops/\w+/\w+\.py", file)]
    tests = [
        file for file in sorted(files) if re.match(r"tests/.*/test_\w+\.py$", file)
        and (root / file).exists() and _FOR_A_GPU.search((root / file).read_text(encoding="utf-8"))
    ]  # fmt: skip
    folders = [f"tests/ops/{name}" for name in families]
    return list(dict.fromkeys([*tests, *(folder for folder in folders if (root / folder).exists())]))


def rows(pool: list[Row], wanted: list[str] | None) -> tuple[list[Row], list[str], list[Row]]:
    """Return rows without a record, peers to measure, and rows that are left out because their peer is not installed.

    Torch is the peer of all rows, and fla that of linear attention, without which a record would compare nothing.
    """
    missing = records.missing(pool, meta.RESULTS)
    if wanted is not None:
        return missing, wanted, []
    if not peers.not_installed(["fla"]):
        return missing, ["torch", "fla"], []
    need = [row for row in missing if any(peers.selected(name, ["fla"]) for name in peers.adapters_of(row))]
    return [row for row in missing if row not in need], ["torch"], need
