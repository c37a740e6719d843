"""One word, one meaning: words and phrases that docs/words.md retired may become fewer, never more.

``retired_words.json`` holds how often each is written today, per directory: identifiers of the package, the device code
and the benchmark, and text (comments, docstrings, messages, pages). A failure names the places. After a change that
removes some, write the file again: ``python -m tests.contracts.test_words``.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = Path(__file__).with_name("retired_words.json")
# Retired in all identifiers, and in those of the package, the device code and the benchmark only.
RETIRED_EVERYWHERE = frozenset(("made", "powers", "noting", "notes", "multiprocessors", "a_number"))
RETIRED_IN_CODE = frozenset(
    "wide ahead turn turns piece pieces runs team teams held few once even filled most least beside early late passing "
    "again recall remember".split()
)
# What the glossary puts in the place of a retired word, as parts of longer names too.
KEPT_PAIRS = frozenset((("few", "rows"), ("lane", "team"), ("lane", "teams"), ("powers", "of"), ("rounded", "once")))
# Names that are not ours, or that everybody has.
KEPT = frozenset(("once_differentiable", "call_once", "warn_once", "mad_wide", "most_common", "kTiesEven", "__notes__"))
# What the benchmark measures, a part of the data that nobody trains on, powers of two, and remarks of a table.
KEPT_IN_BENCH = frozenset(
    ("runs", "held_out", "_held_out", "HELD_OUT", "_HELD_OUT", "HELD_OUT_SEQUENCES", "powers", "notes", "_NOTES")
)
# Arguments of registered operators: functions of a declaration are called by these names.
KEPT_IN_FILE = {"rtkernels/ops/router/topk.py": frozenset(("wide",))}

# Retired in text, by the words of the glossary; spaces stand for line breaks, too.
_WHICH = r"(?:\b(?:by|for|from|in|of|on|to|with) which\b|\bwhose\b)"
PHRASES = {
    "copy engine": r"\bcopy engines?\b",
    "multiprocessor": r"\bmultiprocessors?\b",
    "powers of a softmax": r"\bpowers\b(?! of )|\bpowers of (?:scores|(?:an?|the) softmax)\b",
    "place that calls": r"\bplaces? that calls?\b|\bplaces? (?:that )?nobody has called\b",
    "notes, noting": r"\bnoting\b|\b(?:of|from|in|into|by|its|their) (?:the |its |their )?notes\b",
    "be where another is": r"\bwhere (?:others?|another|these|those)(?: one)? (?:is|are|lies?)(?=[,.;:|])",
    "have its lines among their own": r"\blines among (?:its|their) own\b",
    "what is made": r"\bwhat (?:is|was|are|were|has been|it|they) made\b|\bwhat (?:\w+ ){1,3}ma(?:kes?|de) of\b",
    "holds nothing at first": r"\bhold(?:s|ing)? nothing\b|\bholds? anything at first\b",
    "under way": r"\bunder ?way\b",
    "on its way": r"\bon (?:its|their) way\b",
    "at hand": r"\bat hand\b",
    "anew": r"\banew\b",
    "Mended:": r"\bmended\b",
    'two of "of which", "for which", "whose" in one sentence': rf"{_WHICH}[^.;:|]{{0,250}}?{_WHICH}",
}
# These two name what they retire.
NOT_READ = frozenset(("docs/words.md", "tests/contracts/test_words.py"))

_STRING = r'"""(?:.|\n)*?"""|"(?:\\.|[^"\\\n])*"'
_PYTHON_TEXT = re.compile(rf"{_STRING}|#[^\n]*")
_DEVICE_TEXT = re.compile(rf"{_STRING}|//[^\n]*|/\*(?:.|\n)*?\*/")
_MARKDOWN_CODE = re.compile(r"^```(?:.|\n)*?^```|`[^`\n]*`", re.MULTILINE)
_MARKS = re.compile(r"^(#+|//+|/\*+)|^[ \t]*(#+|//+|\*+)(?= )", re.MULTILINE)
_NEITHER = re.compile(r"\S[^\n]*")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_PATTERNS = {phrase: re.compile(p.replace(" ", r"\s+")) for phrase, p in PHRASES.items()}  # of lower-case text


class Hit(NamedTuple):
    """A retired word, and where it is."""

    directory: str
    word: str
    place: str


def words_of(identifier: str) -> list[str]:
    """Return the words of an identifier, ``RowTeam`` and ``row_team`` alike, in lower case."""
    return [part.lower() for part in _PART.findall(identifier)]


@cache
def retired(identifier: str, words: frozenset[str] = RETIRED_EVERYWHERE | RETIRED_IN_CODE) -> str:
    """Return the word of an identifier that is retired, unless the glossary keeps it next to its neighbour; or ""."""
    parts = words_of(identifier)
    kept = {place + i for place, pair in enumerate(pairwise(parts)) if pair in KEPT_PAIRS for i in (0, 1)}
    if identifier in KEPT:
        return ""
    if identifier in words:
        return identifier
    return next((word for place, word in enumerate(parts) if word in words and place not in kept), "")


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def prose(path: Path, text: str) -> str:
    """Return a file with everything that is not text replaced by bars; every line keeps its number."""
    if path.suffix == ".md":
        return _MARKDOWN_CODE.sub(lambda m: "|" + "\n" * m[0].count("\n"), text)
    parts, end = [], 0
    for found in (_PYTHON_TEXT if path.suffix == ".py" else _DEVICE_TEXT).finditer(text):
        parts += [_NEITHER.sub("|", text[end : found.start()]), _MARKS.sub(" ", found[0])]
        end = found.end()
    return "".join(parts)


def identifiers(path: Path, text: str) -> Iterator[tuple[str, int]]:
    """Yield the identifiers of a file outside of comments and strings, and their lines."""
    comments = _PYTHON_TEXT if path.suffix == ".py" else _DEVICE_TEXT
    code = comments.sub(lambda m: "\n" * m[0].count("\n"), text).replace("#pragma once", "")
    for number, line in enumerate(code.split("\n"), 1):
        for name in _IDENTIFIER.findall(line):
            yield name, number


def directory_of(path: Path) -> str:
    """Return the directory that a file is counted for: two levels of the package, else the first one."""
    *folders, _ = path.relative_to(ROOT).parts
    return "/".join(folders[: 2 if folders[:1] == ["rtkernels"] else 1]) or "."


def files() -> Iterator[Path]:
    """Yield the files that are read."""
    yield from sorted(ROOT.glob("*.md"))
    for folder, endings in (
        ("rtkernels", (".py", ".h", ".cpp", ".cuh")),
        ("cuda_src", (".cu", ".cuh")),
        ("bench", (".py", ".md")),
        ("examples", (".py", ".md")),
        ("tests", (".py", ".cu", ".cpp", ".md")),
        ("docs", (".py", ".md")),
    ):
        yield from sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in endings)


def hits_of(path: Path) -> Iterator[Hit]:
    """Yield what is retired in a file."""
    name, directory = path.relative_to(ROOT).as_posix(), directory_of(path)
    if name in NOT_READ:
        return
    text = path.read_text(encoding="utf-8")
    words = prose(path, text)
    lower = "".join(c.lower() if c.isascii() else c for c in words) if not words.isascii() else words.lower()
    for phrase, pattern in _PATTERNS.items():
        for match in pattern.finditer(lower):
            found = " ".join(words[match.start() : match.end()].split())
            yield Hit(directory, phrase, f"{name}:{_line(words, match.start())}: {found}")
    if path.suffix == ".md":
        return
    in_code = name.startswith(("rtkernels/", "cuda_src/", "bench/"))
    searched = RETIRED_EVERYWHERE | RETIRED_IN_CODE if in_code else RETIRED_EVERYWHERE
    for identifier, line in identifiers(path, text):
        if identifier.startswith("test_") or identifier in KEPT_IN_FILE.get(name, ()):  # a test's name is a sentence
            continue
        if (word := retired(identifier, searched)) and (directory != "bench" or identifier not in KEPT_IN_BENCH):
            yield Hit(directory, f"`{word}`", f"{name}:{line}: {identifier}")


@cache
def hits() -> tuple[Hit, ...]:
    """Return everything retired that is left."""
    return tuple(hit for path in files() for hit in hits_of(path))


def counts() -> dict[str, dict[str, int]]:
    """Return how often each retired word is written, per directory."""
    total: dict[str, dict[str, int]] = defaultdict(dict)
    for (directory, word), n in sorted(Counter((hit.directory, hit.word) for hit in hits()).items()):
        total[directory][word] = n
    return dict(sorted(total.items()))


@pytest.mark.every_op
@pytest.mark.one_in(1000)
def test_retired_words_become_fewer() -> None:
    allowed = json.loads(ALLOWED.read_text(encoding="utf-8"))
    now = counts()
    more = []
    for directory, found in now.items():
        for word, n in found.items():
            if n > (limit := allowed.get(directory, {}).get(word, 0)):
                places = [hit.place for hit in hits() if (hit.directory, hit.word) == (directory, word)]
                more.append(f"{directory}: {word} {n} times, not {limit}:\n    " + "\n    ".join(places))
    assert not more, "docs/words.md retired these words, and names what to write instead:\n" + "\n".join(more)


def _table(heading: str) -> list[list[str]]:
    page = (ROOT / "docs" / "words.md").read_text(encoding="utf-8")
    text = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return rows[1:]


def test_the_glossary_names_every_retired_word() -> None:
    named = {word for row in _table("Retired in identifiers") for word in re.findall(r"`(\w+)`", row[0])}
    assert named == RETIRED_EVERYWHERE | RETIRED_IN_CODE
    assert {row[1] for row in _table("Retired in text")} == set(PHRASES)


def test_what_replaces_a_retired_word_is_in_use() -> None:
    in_use = {term for row in _table("In use") for term in row[0].split(", ")}
    wanted = {term for row in _table("Retired in text") for term in re.findall(r"\*\*(.*?)\*\*", row[0])}
    assert wanted <= in_use and len(wanted) > 10


def test_words_of_identifiers() -> None:
    assert words_of("RowTeam_wide8") == ["row", "team", "wide"]
    assert words_of("BYTES_AHEAD") == ["bytes", "ahead"]
    assert not retired("returned_evenly") and not retired("homemade") and not retired("number")
    assert not retired("kLaneTeams") and not retired("few_rows_step")
    assert retired("few_lanes") and retired("lane_team_turn") and retired("a_number") and retired("made_by") == "made"


def test_phrases_are_found_in_text_alone() -> None:
    code = 'x = 1  # the copy\n# engine\nat_hand = "at hand, under way"\ny = 2  # powers of two, made of steel\n'
    words = prose(Path("a.py"), code)
    found = {phrase: [_line(words, m.start()) for m in p.finditer(words)] for phrase, p in _PATTERNS.items()}
    assert {phrase: lines for phrase, lines in found.items() if lines} == {
        "copy engine": [1], "at hand": [3], "under way": [3],
    }  # fmt: skip
    device = "// A tile whose rows, of which there are 8,\n// are zero.\nint made = 0;  // its powers\n"
    words = prose(Path("a.cu"), device)
    assert [phrase for phrase, p in _PATTERNS.items() if p.search(words)] == [
        "powers of a softmax", 'two of "of which", "for which", "whose" in one sentence',
    ]  # fmt: skip
    assert list(identifiers(Path("a.cu"), device)) == [("int", 3), ("made", 3)]
    assert "engine" not in prose(Path("a.md"), "`copy engine`\n```\ncopy engine\n```\n")


if __name__ == "__main__":
    ALLOWED.write_text(json.dumps(counts(), indent=1) + "\n", encoding="utf-8")
