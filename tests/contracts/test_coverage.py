"""docs/coverage.md is what its script writes now: every call in it is executed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "docs"))
import make_coverage


@pytest.mark.every_op
@pytest.mark.one_in(1000)
def test_the_page_is_current() -> None:
    assert make_coverage.PAGE.read_text(encoding="utf-8") == make_coverage.page(), "run: python docs/make_coverage.py"


@pytest.mark.parametrize("system", ["FlagGems", "linghe"])
def test_the_page_cannot_be_written_if_a_call_breaks(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the error is, and also if no line has a call for an entry."""
    entry = {"FlagGems": "moe_align_block_size", "linghe": "fused_topk"}[system]
    calls = dict(make_coverage._calls_by_name(system))
    for broken, message in (("rtk.topk(1)", "the call of"), ("1 / 0", None), ("", "has neither a call nor a line")):
        monkeypatch.setattr(make_coverage, "_calls_by_name", lambda _, broken=broken: calls | {entry: broken})
        with pytest.raises(ZeroDivisionError if message is None else SystemExit, match=message):
            make_coverage.row(system, entry)
    monkeypatch.setattr(make_coverage, "_calls_by_name", lambda _: calls)
    assert make_coverage.row(system, entry)[1] == "covered"


def test_a_call_that_is_refused_does_not_work() -> None:
    assert not make_coverage.works("rtk.scaled_mm(a16)")
    assert not make_coverage.works("rtk.no_such_function")
    assert make_coverage.works("rtk.softmax(x)")
