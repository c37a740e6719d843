"""One word, one meaning: identifiers with a word that docs/words.md retired may become fewer, never more.

``retired_words.json`` holds how often each is written today. After a change that removes some, write it anew:
``python tests/contracts/test_words.py``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = Path(__file__).with_name("retired_words.json")
RETIRED = frozenset(
    "wide ahead turn turns piece pieces runs team teams held few once even filled most least beside early late passing "
    "again recall remember recent".split()
)
# What the glossary puts in the place of a retired word, as parts of longer names too.
KEPT_PAIRS = frozenset((("few", "rows"), ("lane", "team"), ("lane", "teams")))
# Names that are not ours, or that everybody has.
KEPT = frozenset(("once_differentiable", "call_once", "warn_once", "mad_wide", "most_common", "kTiesEven"))
# What the benchmark measures, and a part of the data that nobody trains on.
KEPT_IN_BENCH = frozenset(("runs", "held_out", "_held_out", "HELD_OUT", "_HELD_OUT", "HELD_OUT_SEQUENCES"))

_STRING = r'"""(?:.|\n)*?"""|"(?:\\.|[^"\\\n])*"'
_PYTHON_TEXT = re.compile(rf"{_STRING}|#[^\n]*")
_DEVICE_TEXT = re.compile(rf"{_STRING}|//[^\n]*|/\*(?:.|\n)*?\*/")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def words_of(identifier: str) -> list[str]:
    """Return the words of an identifier, ``RowTeam`` and ``row_team`` alike, in lower case."""
    return [part.lower() for part in _PART.findall(identifier)]


def retired(identifier: str) -> bool:
    """Return whether a word of an identifier is retired, and not one that the glossary keeps next to its neighbour."""
    words = words_of(identifier)
    kept = {place + i for place, pair in enumerate(pairwise(words)) if pair in KEPT_PAIRS for i in (0, 1)}
    return identifier not in KEPT and any(word in RETIRED for place, word in enumerate(words) if place not in kept)


def count(path: Path) -> Counter[str]:
    """Return how often each identifier with a retired word is written in a file, outside of comments and strings."""
    text = _PYTHON_TEXT if path.suffix == ".py" else _DEVICE_TEXT
    code = text.sub("", path.read_text(encoding="utf-8")).replace("#pragma once", "")
    found = Counter(_IDENTIFIER.findall(code))
    return Counter({name: n for name, n in found.items() if retired(name)})


def counts() -> dict[str, int]:
    """Return how often each such identifier is written in the package, in the device code and in the benchmark."""
    total: Counter[str] = Counter()
    for folder, ending in (
        ("rtkernels", "*.py"),
        ("cuda_src", "*.cu*"),
        ("rtkernels/emulator", "*.h"),
        ("bench", "*.py"),
    ):
        for path in (ROOT / folder).rglob(ending):
            found = count(path)
            total += Counter({n: found[n] for n in found if folder != "bench" or n not in KEPT_IN_BENCH})
    return dict(sorted(total.items()))


@pytest.mark.every_op
def test_retired_words_become_fewer() -> None:
    allowed = json.loads(ALLOWED.read_text(encoding="utf-8"))
    now = counts()
    more = [f"{name} ({n}, not {allowed.get(name, 0)})" for name, n in now.items() if n > allowed.get(name, 0)]
    assert not more, f"docs/words.md retired a word of {', '.join(more)}; it names what to write instead"


def test_the_glossary_names_every_retired_word() -> None:
    text = (ROOT / "docs" / "words.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", text.partition("## Retired")[2], re.MULTILINE)
    named = {word for row in rows for word in re.findall(r"`(\w+)`", row)}
    assert named == RETIRED


def test_words_of_identifiers() -> None:
    assert words_of("RowTeam_wide8") == ["row", "team", "wide"]
    assert words_of("BYTES_AHEAD") == ["bytes", "ahead"]
    assert not retired("returned_evenly")
    assert not retired("kLaneTeams") and not retired("few_rows_step")
    assert retired("few_lanes") and retired("lane_team_turn")


if __name__ == "__main__":
    ALLOWED.write_text(json.dumps(counts(), indent=0) + "\n", encoding="utf-8")
