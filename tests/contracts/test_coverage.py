"""docs/coverage.md is what its script writes now: every call in it is executed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "docs"))
import make_coverage


@pytest.mark.every_op
def test_the_page_is_current() -> None:
    assert make_coverage.PAGE.read_text(encoding="utf-8") == make_coverage.page(), "run: python docs/make_coverage.py"


def test_a_call_that_is_refused_does_not_work() -> None:
    assert not make_coverage.works("rtk.scaled_mm(a16)")
    assert not make_coverage.works("rtk.no_such_function")
    assert make_coverage.works("rtk.softmax(x)")
