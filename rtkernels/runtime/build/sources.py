"""Locate the device sources, and find the files that one unit consists of.

The include closure is both part of the cache key and the set of headers passed to NVRTC in memory, so the hashed text
is the compiled text. This works because the scanner accepts only two forms, ``#include "path/below/cuda_src"`` and
three toolkit headers in angle brackets, and rejects everything else.

A unit is named relative to ``cuda_src``. A unit outside this package is named by its absolute path. Its headers are
searched in its own folder and in ``cuda_src``, and all its files are named relative to these two, so the key does not
depend on its location. A unit generated in this process has a name below ``generated/`` and no file: its text stays in
memory, and its headers are those of ``cuda_src`` only.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rtkernels.errors import SourceError

TOOLKIT_HEADERS = ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h")

_MARKER = "common/abi.cuh"
_GENERATED = "generated/"
_CLOCK_TICK_NS = 50_000_000  # file times are coarse: two edits within one tick have the same time
_root_override: Path | None = None  # set by tests

_LITERAL_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL)
_DIRECTIVE = re.compile(
    r"^[ \t]*(?P<mark>#|%:)[ \t]*(?P<word>include\w*|import|embed)\b[ \t]*(?P<what>[^\n]*)$", re.MULTILINE
)
_QUOTED = re.compile(r'"(?P<name>[A-Za-z0-9_][A-Za-z0-9_./-]*)"')
_ANGLED = re.compile(r"<(?P<name>[^<>\n]+)>")


@dataclass(frozen=True)
class _File:
    """One source file at its last read."""

    stamp: tuple[int, int, int] | None
    content: bytes
    digest: str
    own: tuple[str, ...]
    toolkit: tuple[str, ...]


_files: dict[tuple[Path, str], _File] = {}
_generated: dict[str, bytes] = {}


def root() -> Path:
    """Return the directory with the device sources.

    It is found relative to this file, not by ``importlib.resources``, so that an editable install sees live edits.

    Raises:
        SourceError: The package is installed without its sources.
    """
    if _root_override is not None:
        return _root_override
    package = Path(__file__).resolve().parents[2]
    candidates = (package / "cuda_src", package.parent / "cuda_src")
    for candidate in candidates:
        if (candidate / _MARKER).is_file():
            return candidate
    raise SourceError(
        f"the CUDA sources of rtkernels are missing: no {_MARKER} in {candidates[0]} or {candidates[1]}; "
        "reinstall the package"
    )


def read(rel: str) -> bytes:
    """Return the content of one source file, named relative to ``root()``.

    Raises:
        SourceError: There is no such file.
    """
    return _load(root(), rel).content


def generate(stem: str, text: str) -> str:
    """Store the text of a unit in memory and return the name of the unit.

    The name contains a hash of the text, so it has the same meaning in every process.

    Args:
        stem: Readable part of the name.
        text: The CUDA source; headers as in other units.
    """
    content = text.encode()
    unit = f"{_GENERATED}{stem}-{hashlib.sha256(content).hexdigest()[:16]}.cu"
    _generated[unit] = content
    return unit


def generated(unit: str) -> bytes | None:
    """Return the text of a unit that ``generate`` named, None for a unit that is a file."""
    if not unit.startswith(_GENERATED):
        return None
    try:
        return _generated[unit]
    except KeyError:
        raise SourceError(f"the unit {unit!r} was not generated in this process") from None


def is_foreign(unit: str) -> bool:
    """Return whether a unit is outside ``root()``, that is, given by its absolute path."""
    return os.path.isabs(unit)


def name(unit: str) -> str:
    """Return the name of a unit in its closure, in keys and in compiler messages; it contains no directory."""
    return os.path.basename(unit) if is_foreign(unit) else unit


def places(unit: str) -> tuple[Path, ...]:
    """Return the directories that the unit's own headers are named relative to."""
    return (Path(unit).parent, root()) if is_foreign(unit) else (root(),)


def closure(unit: str) -> dict[str, bytes]:
    """Return all files of our own that a unit consists of: the unit first, then its headers in include order.

    A file is read again if its size, time or inode changed, so a long-running process sees edits.

    Raises:
        SourceError: A file is missing, or an include has a form that the rules do not allow.
    """
    return {rel: file.content for rel, file in _closure(unit).items()}


def digests(sources: Mapping[str, bytes]) -> dict[str, str]:
    """Return the sha256 of each file of a closure; unchanged files are not hashed again."""
    base = root()
    found = {}
    for rel, content in sources.items():
        known = _files.get((base, rel))
        # Identity, not equality: a closure shares its bytes with the table.
        same = known is not None and known.content is content
        found[rel] = known.digest if same else hashlib.sha256(content).hexdigest()
    return found


def toolkit_headers(unit: str) -> tuple[str, ...]:
    """Return the toolkit headers the closure of a unit includes, each once, in include order."""
    return tuple(dict.fromkeys(name for file in _closure(unit).values() for name in file.toolkit))


def units() -> list[str]:
    """Return the relative names of all units, sorted."""
    base = root()
    return sorted(path.relative_to(base).as_posix() for path in base.rglob("*.cu"))


def flatten(sources: Mapping[str, bytes]) -> str:
    """Return a closure as one readable text: each own header replaces its first include.

    It is stored beside the cubin for readers and disassemblers; NVRTC never sees it.
    """
    pending = dict(sources)
    unit = next(iter(pending))

    def expand(rel: str) -> str:
        content = pending.pop(rel).decode("utf-8")

        def replace(match: re.Match[str]) -> str:
            quoted = _QUOTED.match(match["what"])
            if quoted is None or quoted["name"] not in sources:
                return match[0]
            if quoted["name"] not in pending:
                return f"// (above) {match[0].strip()}"
            return f"// >>> {quoted['name']}\n{expand(quoted['name'])}\n// <<< {quoted['name']}"

        return _DIRECTIVE.sub(replace, content.replace("#pragma once", "").strip())

    return expand(unit) + "\n"


def _closure(unit: str) -> dict[str, _File]:
    bases = places(unit)
    found: dict[str, _File] = {}

    def visit(rel: str) -> None:
        file = found[rel] = _load(_base(rel, bases), rel, bases)
        for header in file.own:
            if header not in found:
                visit(header)

    visit(name(unit))
    return found


def having_one(rel: str, bases: Sequence[Path]) -> Path | None:
    """Return the directory that contains a file, None if none does.

    Raises:
        SourceError: Two directories contain it, so one of our headers could include a foreign one.
    """
    having = [base for base in bases if (base / rel).is_file()]
    if len(having) > 1:
        raise SourceError(f"{rel!r} is in {having[0]} and in {having[1]}; give the first another name")
    return having[0] if having else None


def _base(rel: str, bases: Sequence[Path]) -> Path:
    if len(bases) == 1 or rel in _generated:
        return bases[0]
    return having_one(rel, bases) or bases[0]


def _load(base: Path, rel: str, bases: Sequence[Path] = ()) -> _File:
    if (content := generated(rel)) is not None:
        return _File(None, content, hashlib.sha256(content).hexdigest(), *_scan(rel, content, bases or (base,)))
    path = os.path.join(base, rel)
    try:
        stamp = _stamp(path)
        known = _files.get((base, rel))
        if known is not None and stamp is not None and known.stamp == stamp:
            return known
        content = Path(path).read_bytes()
    except OSError as error:
        why = error.strerror or error
        raise SourceError(f"cannot read the CUDA source {rel!r} in {base}: {why}") from error
    own, toolkit = _scan(rel, content, bases or (base,))
    file = _File(stamp, content, hashlib.sha256(content).hexdigest(), own, toolkit)
    _files[base, rel] = file
    return file


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Return the identity of the current version of a file, or None if it is too recent to tell."""
    status = os.stat(path)
    if abs(time.time_ns() - status.st_mtime_ns) < _CLOCK_TICK_NS:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def _scan(rel: str, content: bytes, bases: Sequence[Path]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the own and toolkit headers that a file includes, in order."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{rel}: not valid UTF-8 at byte {error.start}") from error

    own: dict[str, None] = {}
    toolkit: dict[str, None] = {}
    code = _LITERAL_OR_COMMENT.sub(_blank_comment, text)
    for match in _DIRECTIVE.finditer(code):
        what = match["what"].strip()
        where = f"{rel}:{code.count(chr(10), 0, match.start('word')) + 1}: {match[0].strip()}"
        plain = match["mark"] == "#" and match["word"] == "include"
        if plain and (quoted := _QUOTED.fullmatch(what)):
            header = quoted["name"]
            if any(part in ("", ".", "..") for part in header.split("/")):
                raise SourceError(f"{where}: name own headers relative to cuda_src, without '.' or '..'")
            if not any((base / header).is_file() for base in bases):
                said = " or ".join(map(str, bases))
                raise SourceError(f"{where}: no such file; own headers are named relative to {said}")
            own[header] = None
        elif plain and (angled := _ANGLED.fullmatch(what)) and angled["name"] in TOOLKIT_HEADERS:
            toolkit[angled["name"]] = None
        else:
            allowed = ", ".join(f"<{name}>" for name in TOOLKIT_HEADERS)
            raise SourceError(f'{where}: only #include "path/below/cuda_src" and {allowed} are allowed')
    return tuple(own), tuple(toolkit)


def _blank_comment(match: re.Match[str]) -> str:
    """Blank a comment but keep its newlines (line numbers) and leave string literals alone."""
    text = match[0]
    return "\n" * text.count("\n") + " " if text.startswith("/") else text
