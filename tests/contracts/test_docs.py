"""The documents say what the code does: pages from docstrings, environment variables, links, the README's length."""

from __future__ import annotations

import functools
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

from rtkernels.runtime import env

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.every_op
def test_the_api_pages_are_those_of_the_docstrings() -> None:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    make_api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_api)
    written = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md")}
    expected = make_api.pages()
    stale = [name for name in {**written, **expected} if written.get(name) != expected.get(name)]
    assert not stale, f"docs/api/{', '.join(stale)} is out of date. It is generated: run python docs/make.py"


def test_troubleshooting_lists_every_environment_variable() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(RTKERNELS_\w+)` \|", text, re.MULTILINE)
    assert rows == [variable.name for variable in env.VARIABLES]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, heading = link.partition("#")
        if target.startswith("http"):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name} links to {link}"
        if heading and path.suffix == ".md":
            titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, f"{page.name} links to {link}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "decisions").glob("[!R]*.md")), ids=lambda path: path.stem)
def test_decisions_begin_with_what_holds_now(page: Path) -> None:
    titles = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert titles[:2] == ["What holds now", "History"]


def test_the_index_of_decisions_names_every_page() -> None:
    folder = ROOT / "docs" / "decisions"
    linked = re.findall(r"\]\((\w+\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert sorted(linked) == sorted(path.name for path in folder.glob("[!R]*.md"))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


# Of operators, of examples that a reader writes, and of what needs a package that may not be installed.
OTHER_NAMES = (
    *("rtkernels.rms_norm_fwd", "rtkernels.squared_relu", "rtkernels.ops.act.squared_relu", "rtkernels.my_softsign"),
    "rtkernels.jax",
)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_and_files_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for found in {f"rtkernels.{rest}" for rest in re.findall(r"\b(?:rtkernels|rtk)\.([a-zA-Z_][\w.]*\w)", text)}:
        if not found.startswith(OTHER_NAMES):
            pkgutil.resolve_name(found)
    for path in re.findall(r"`((?:tests|cuda_src|bench|rtkernels|docs|examples)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m ((?:rtkernels|bench)[\w.]*)", text):
        assert importlib.util.find_spec(module) is not None, module
    for test in re.findall(r"`(test_\w+)`", text):
        assert any(test in code for code in _tests()), test


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lines_that_are_quoted_are_those_of_the_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path, number, line in re.findall(r" at (cuda_src/[\w/.]+):(\d+)\n\2\t(.+)", text):
        assert (ROOT / path).read_text(encoding="utf-8").splitlines()[int(number) - 1] == line


@functools.cache
def _tests() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
