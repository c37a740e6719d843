"""Mutants of the device sources: one small edit each, derived from the text.

A mutant replaces one expression (or drops one statement) and is known by the code that it edits, so that it stays the
same mutant while comments and other lines of its file change. All mutants of a file can be compiled at once: in
``schemata`` each edit is chosen at run time by ``rtk_mutant(number)``.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mutation import code
from mutation.equivalent import EQUIVALENT
from mutation.written import WRITTEN
from rtkernels.runtime.build import sources

PER_KERNEL_FILE, PER_HEADER = 5, 3
RECORD = Path(__file__).with_name("recorded.json")

SWITCH = 'extern "C" __attribute__((const)) int rtk_mutant(int); '

_BARRIER = re.compile(
    r"\b(?:__syncthreads|__syncwarp|ptx::(?:mbarrier_wait|named_barrier_sync|wgmma_wait|cp_async_wait|cluster_barrier"
    r"|fence_async_shared|fence_async_global|bulk_store_wait_read|bulk_store_wait|wait_for_previous))\w*\("
)
_GUARD = re.compile(r"\bif \(")
_LEAVES = re.compile(r"\s*(?:\{\s*)?(?:return|continue|break)\b")
_PHASE = re.compile(r"(?<=[(,] )[\w.]*(?:phase|parity)\w*(?=[,)])|(?<=\()[\w.]*(?:phase|parity)\w*(?=[,)])")
_INDEXED = re.compile(r"\b([A-Za-z_]\w*)\[")
_LIMIT = re.compile(r"(?<![\w:.])(min|max|fminf|fmaxf)\(")
_INITIAL = re.compile(r"\b(?:float|int|u32|i32|i64) \w+ = (0\.0f|0u|0|negative_infinity\(\))(?=[;,])")
_VARIABLE = re.compile(r"(?<![\w.])(?!k[A-Z]|sizeof|static_cast)[a-z_]\w*")
_NEXT = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_OPPOSITE = {"+": "-", "-": "+", "==": "!=", "!=": "=="}


@dataclass(frozen=True)
class Mutant:
    """One edit.

    Attributes:
        file: Relative to ``cuda_src``.
        kind: What is wrong: barrier, bound, stride, ...
        start: Where the edited text begins.
        end: Where it ends.
        new: What replaces it; of a statement, "" if it is dropped.
        name: Unique; the same after edits elsewhere in the file.
        is_statement: Whether the text is a statement, not an expression.
        reason: What the author of a hand-written one meant.
    """

    file: str
    kind: str
    start: int
    end: int
    new: str
    name: str
    is_statement: bool = False
    reason: str = ""

    @property
    def number(self) -> int:
        """What ``rtk_mutant`` is asked."""
        return zlib.crc32(self.name.partition("#")[0].encode()) >> 1 | 1 << 30

    def switched(self, text: str) -> str:
        """Return the edited part, with the edit or without as ``rtk_mutant`` says."""
        old = text[self.start : self.end]
        if self.is_statement:
            return f"{{ if (rtk_mutant({self.number})) {{ {self.new} }} else {{ {old} }} }}"
        return f"(rtk_mutant({self.number}) ? ({self.new}) : ({old}))"

    def line(self, text: str) -> int:
        """Return the number of its line."""
        return text.count("\n", 0, self.start) + 1

    def __str__(self) -> str:
        old = " ".join(sources.read(self.file).decode()[self.start : self.end].split())
        return f"{self.name}: {old}  ->  {' '.join(self.new.split()) or 'nothing'}"


@dataclass(frozen=True)
class _Edit:
    kind: str
    start: int
    end: int
    new: str
    is_statement: bool = False


def _binary(text: str, plain: str) -> Iterator[_Edit]:
    """Bounds, signs, factors, comparisons and conjuncts."""
    for at, operator in code.spaced_operators(plain).items():
        lowest = code.level(operator)
        if operator in ("=", "?", ":", "|", "^", "&") or (operator.endswith("=") and operator not in _NEXT | _OPPOSITE):
            continue
        start, end = code.expression(plain, at, lowest)
        left, right = text[start:at].rstrip(), text[at + len(operator) : end].lstrip()
        if not left or not right or not _VARIABLE.search(plain[start:end]):
            continue
        after = at + len(operator)
        operand = code.expression(plain, after + 1, lowest + 1)
        own = text[operand[0] : operand[1]]
        if operator in _NEXT:
            if not _VARIABLE.search(plain[operand[0] : end]) or zlib.crc32(text[start:end].encode()) & 1:
                step = "- 1" if operator in ("<", "<=") else "+ 1"
                yield _Edit("bound", start, end, f"{left} {operator} {right} {step}")
            else:
                yield _Edit("bound", start, end, f"{left} {_NEXT[operator]} {right}")
        elif operator in _OPPOSITE:
            kind = "sign" if operator in "+-" else "condition"
            yield _Edit(kind, start, end, f"{text[start:at]}{_OPPOSITE[operator]}{text[after:end]}")
        elif operator in ("*", "/", "%"):
            kind = "factor" if re.search(r"\d\.\d*f|scale|rstd|inverse|gain|weight", text[start:end]) else "stride"
            yield _Edit(kind, start, end, f"{left}{text[operand[1] : end]}")
        elif operator in ("&&", "||"):
            yield _Edit("tail", *operand, "true" if operator == "&&" else "false")
        elif operator in ("<<", ">>"):
            yield _Edit("shift", start, end, f"{text[start:at]}{operator} ({own} + 1){text[operand[1] : end]}")


def _others(text: str, plain: str) -> Iterator[_Edit]:
    for match in _BARRIER.finditer(plain):
        end = plain.find(";", match.start()) + 1
        begins = re.search(r"[;{})]\s*$|\belse\s*$", plain[max(0, match.start() - 200) : match.start()])
        if begins and "(" not in plain[code.closing(plain, match.end() - 1) : end]:
            yield _Edit("barrier", match.start(), end, "", is_statement=True)
    for match in _GUARD.finditer(plain):
        end = code.closing(plain, match.end() - 1)
        leaves = _LEAVES.match(plain, end + 1)
        if ";" not in plain[match.end() : end] and (leaves or re.search(r" [<>]=? ", plain[match.end() : end])):
            yield _Edit("tail", match.end(), end, "false" if leaves else "true")
    for match in _PHASE.finditer(plain):
        waits = "mbarrier" in plain[slice(*code.statement(plain, match.start()))]
        # Scratch memory alternates: which half comes first does not matter, but no alternation is a race.
        yield _Edit("phase", match.start(), match.end(), f"{match[0]} ^ 1" if waits else "0")
    for match in _INDEXED.finditer(plain):
        end = code.closing(plain, match.end() - 1)
        before = plain[max(0, match.start() - 80) : match.start()]
        declared = re.search(r"[\w>*&]\s+$", before) and not re.search(r"\b(return|else)\s+$", before)
        if not declared and _VARIABLE.search(plain[match.end() : end]):
            kind = "scale index" if re.search("scale|amax", match[1]) else "index"
            yield _Edit(kind, match.end(), end, "0")
    for match in _LIMIT.finditer(plain):
        end = code.closing(plain, match.end() - 1)
        depth, comma = 0, 0
        for i in range(match.end(), end):
            depth += (plain[i] in "([{") - (plain[i] in ")]}")
            if plain[i] == "," and not depth:
                comma = comma or i
        if comma:
            both = (text[match.end() : comma], text[comma + 1 : end].lstrip())
            keeps_first = _VARIABLE.search(both[0])
            yield _Edit("clamp", match.start(), end + 1, both[0] if keeps_first else both[1])
    for match in _INITIAL.finditer(plain):
        if not plain[: match.start()].endswith("for ("):
            new = {"0.0f": "1.0f", "0u": "1u", "0": "1"}.get(match[1], "0.0f")
            yield _Edit("initial", match.start(1), match.end(1), new)


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:8]


@cache
def sites(file: str) -> tuple[Mutant, ...]:
    """Return every edit of a file that the operators know, in the order in which they are chosen."""
    text = sources.read(file).decode()
    plain = code.plain(text)
    bare = code.without_template_arguments(plain)
    bodies = code.bodies(plain)
    seen: Counter[str] = Counter()
    kinds: dict[str, list[Mutant]] = {}
    for edit in sorted((*_binary(text, bare), *_others(text, bare)), key=lambda e: (e.start, e.end, e.kind)):
        if not any(a <= edit.start and edit.end <= b for a, b in bodies) or not code.runs(plain, edit.start):
            continue
        if "\n#" in text[edit.start : edit.end] or "//" in text[edit.start : edit.end]:
            continue
        start, end = code.statement(plain, edit.start)
        around = code.uncommented(text[start:end]), code.uncommented(text[edit.start : edit.end])
        key = _digest(file, edit.kind, *around, edit.new)
        seen[key] += 1
        name = f"{file}:{edit.kind.replace(' ', '_')}:{key}" + (f".{seen[key]}" if seen[key] > 1 else "")
        kinds.setdefault(edit.kind, []).append(
            Mutant(file, edit.kind, edit.start, edit.end, edit.new, name, edit.is_statement)
        )
    for found in kinds.values():
        found.sort(key=lambda m: _digest(m.name))
    order = sorted(kinds, key=lambda kind: _digest(file, kind))
    # One of each kind, then the second of each, ...
    most = max(map(len, kinds.values()), default=0)
    return tuple(kinds[kind][i] for i in range(most) for kind in order if i < len(kinds[kind]))


def written(file: str) -> list[Mutant]:
    """Return the hand-written mutants of a file.

    Raises:
        LookupError: The text that one of them replaces is not there exactly once.
    """
    text = sources.read(file).decode()
    found = []
    for bug in WRITTEN:
        if bug.file != file:
            continue
        if text.count(bug.around) != 1 or bug.around.count(bug.old) != 1:
            raise LookupError(f"{file} has {bug.around!r} {text.count(bug.around)} times, expected once ({bug.name})")
        start = text.index(bug.around) + bug.around.index(bug.old)
        name = f"{file}:written:{bug.name.replace(' ', '_')}"
        if any(other.name == name for other in found):
            name += "#2"
        found.append(Mutant(file, "written", start, start + len(bug.old), bug.new, name, bug.is_statement, bug.name))
    return found


@cache
def _judged() -> frozenset[str]:
    """Return the mutants about which something is known: what tests did with them, or that no test can kill them."""
    record = json.loads(RECORD.read_text())
    return frozenset((*record["command"], *record["family"], *record["survived"], *EQUIVALENT))


@cache
def mutants(file: str) -> tuple[Mutant, ...]:
    """Return the mutants of a file: the hand-written ones, then as many others as its kind of file gets.

    Judged ones come first, so that an edit of a file does not replace them by others.
    One that changes no result keeps its place in the order, so that the others stay; a kernel file gets the next one
    for it.
    """
    chosen, skipped = written(file), []
    is_kernel = file.endswith(".cu")
    wanted = len(chosen) + (PER_KERNEL_FILE if is_kernel else PER_HEADER)
    for site in sorted(sites(file), key=lambda site: site.name not in _judged()):
        if len(chosen) + (0 if is_kernel else len(skipped)) == wanted:
            break
        if all(site.end <= other.start or other.end <= site.start for other in (*chosen, *skipped)):
            (skipped if site.name in EQUIVALENT else chosen).append(site)
    return tuple(chosen)


def planted(mutant: Mutant) -> str:
    """Return a file with a mutant in it, and nothing else changed."""
    text = sources.read(mutant.file).decode()
    places = [other for other in mutants(mutant.file) if other.number == mutant.number]
    for place in sorted(places, key=lambda m: -m.start):
        new = "{" + place.new + "}" if place.is_statement else f"({place.new})"
        text = text[: place.start] + new + text[place.end :]
    return text


def files() -> list[str]:
    """Return the kernel files and headers that have mutants; PTX wrappers have none, the emulator has its own."""
    root = sources.root()
    found = (path.relative_to(root).as_posix() for path in root.rglob("*.cu*"))
    return sorted(file for file in found if not file.startswith(("ptx/", "probe/")))


@cache
def all_mutants() -> dict[str, Mutant]:
    """Return all mutants by name.

    Raises:
        LookupError: Two have the same number.
    """
    found = {mutant.name: mutant for file in files() for mutant in mutants(file) if "#" not in mutant.name}
    if len({mutant.number for mutant in found.values()}) < len(found):
        raise LookupError("two mutants have the same number (31 bits)")
    return found


def schemata(file: str) -> str:
    """Return a file with all of its mutants, each switched on by ``rtk_mutant``; lines keep their numbers."""
    text = sources.read(file).decode()
    for mutant in sorted(mutants(file), key=lambda m: -m.start):
        text = text[: mutant.start] + mutant.switched(text) + text[mutant.end :]
    return SWITCH + text
