"""Pages that render: tables of docstrings become tables of Markdown, and the site's settings name what exists."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_api, check_site = load("docs/make_api.py"), load(".ci/check_site.py")

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


@pytest.mark.one_in(1000)
def test_what_a_built_site_must_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ops = sorted(load("docs/op_pages.py").ops())
    (tmp_path / "search").mkdir()
    for name in ops:
        (tmp_path / "ops" / name).mkdir(parents=True)
        (tmp_path / "ops" / name / "index.html").write_text("<table></table>\n<pre>\n| a | b |\n</pre>")
    index = {"docs": [{"location": f"ops/{name}/"} for name in ops]}
    (tmp_path / "search" / "search_index.json").write_text(json.dumps(index))
    (tmp_path / "performance.html").write_text("")
    assert check_site.main([str(tmp_path)]) == 0 and check_site.main([]) == 2

    (tmp_path / "performance.html").unlink()
    (tmp_path / "ops" / ops[0] / "index.html").unlink()
    (tmp_path / "ops" / ops[1] / "index.html").write_text("<p>| a | b |\n|---|---|</p>")
    index["docs"] = [entry for entry in index["docs"] if entry["location"] != f"ops/{ops[2]}/"]
    (tmp_path / "search" / "search_index.json").write_text(json.dumps(index))
    assert check_site.check(tmp_path) == [
        f"ops/{ops[0]} has no page",
        f"ops/{ops[2]} is not in the index of the search",
        f"ops/{ops[1]}/index.html: a table that was not rendered: <p>| a | b |",
        "performance.html, the page of benchmarks, is missing",
    ]
    assert check_site.main([str(tmp_path)]) == 1 and "not rendered" in capsys.readouterr().out
