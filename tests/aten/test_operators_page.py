"""docs/operators.md: every one of the 184 operators is taken, or the page says why not."""

from __future__ import annotations

import runpy
from pathlib import Path

from rtkernels.aten import table

PAGE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_operators.py"))


def test_184_operators_are_listed() -> None:
    assert sum(count for _, _, count, _ in PAGE["listed"]()) + len(PAGE["FUNCTIONS"]) == 184
    assert len({name for *_, names in PAGE["listed"]() for name in names}) == 290


def test_every_operator_is_taken_or_has_a_reason() -> None:
    rows = table.table()
    missing = [
        name
        for family, _, _, names in PAGE["listed"]()
        for name in names
        if name not in rows and not PAGE["reason"](name, family)
    ]
    assert not missing


def test_the_page_names_every_overload() -> None:
    text = PAGE["page"]()
    assert not [name for name in table.table() if name not in text]


def test_every_difference_has_a_test() -> None:
    root = Path(__file__).parents[2]
    for *what, test in PAGE["operator_differences"].DIFFERENCES:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (root / path).read_text(encoding="utf-8"), test
        assert all(what)


def test_the_page_is_up_to_date() -> None:
    path = Path(__file__).parents[2] / "docs" / "operators.md"
    assert path.read_text(encoding="utf-8") == PAGE["page"](), "python docs/make_operators.py"
