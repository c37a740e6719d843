"""Pages that render: tables of docstrings become tables of Markdown, and the site's settings name what exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_api = load()

TEXT = """
Before.
=====  =======  ======
name   shape    of
=====  =======  ======
``a``  [n | m]  x
``b``  text that
       crosses  it
``c``           y
                and z
=====  =======  ======
After."""


def test_tables_of_docstrings() -> None:
    assert make_api._markdown(TEXT).splitlines() == [
        "Before.", "", "| name | shape | of |", "| --- | --- | --- |", "| `a` | [n \\| m] | x |",
        "| `b` | text that crosses  it |  |", "| `c` |  | y and z |", "", "After.",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no last ruler"):
        make_api._markdown("==  ==\na   b\n")


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "api").glob("*.md")), ids=lambda path: path.stem)
def test_api_pages_have_no_other_tables(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"^=+ +=", text, re.MULTILINE) and path.name != "index.md"
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(columns) == 1, table


def test_links_stay_inside_of_docs() -> None:
    for path in (ROOT / "docs").rglob("*.md"):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
            target = (path.parent / link).resolve()
            assert target.is_relative_to(ROOT / "docs") and target.is_file(), f"{path.name}: {link}"
