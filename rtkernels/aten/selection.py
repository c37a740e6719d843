"""What a user asks ``enable`` for: names in a call, in ``RTKERNELS_ENABLE``, and in files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from rtkernels.errors import ArgumentError
from rtkernels.runtime import env

_VARIABLE = "RTKERNELS_ENABLE"
_HEADINGS = ("include", "exclude")


class Names:
    """Names to take and names to leave to torch, each with the words that say where it was written."""

    def __init__(self) -> None:
        self.include: dict[str, str] = {}
        self.exclude: dict[str, str] = {}

    def add(self, item: Any, source: str, excluded: bool = False) -> None:
        """Add one item: a name, ``-name``, ``@path``, or a path object."""
        if isinstance(item, os.PathLike):
            return self.add_file(os.fspath(item), source, excluded)
        if not isinstance(item, str):
            raise ArgumentError(
                f"{source} has a {type(item).__name__}; expected names of overloads, operators or families, or paths"
            )
        if item.startswith("@"):
            return self.add_file(item[1:], source, excluded)
        if item.startswith("-"):
            if excluded:
                raise ArgumentError(f"{source} has {item!r}; expected a name without '-', which excludes already")
            item, excluded = item[1:].strip(), True
        (self.exclude if excluded else self.include).setdefault(item, source)

    def add_file(self, path: str, source: str, excluded: bool = False) -> None:
        """Add what a file lists: see ``enable``."""
        try:
            with open(os.path.expanduser(path), encoding="utf-8") as file:
                lines = file.read().splitlines()
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise ArgumentError(f"{source} has the file {path!r}, which cannot be read: {error}") from None
        below, empty = excluded, True
        for number, line in enumerate(lines, 1):
            where = f"{path}, line {number},"
            text = line.partition("#")[0].strip()
            if text == "---":  # where a YAML document begins
                continue
            heading, colon, rest = text.partition(":")
            if colon and not rest.startswith(":"):  # not the colons of aten::sum
                if heading.strip() not in _HEADINGS:
                    raise ArgumentError(f"{where} has {text!r}; expected a name, or one of the headings {_HEADINGS}")
                below, text = excluded or heading.strip() == "exclude", rest.strip()
            text = text.removeprefix("- ").strip()
            for item in text.removeprefix("[").removesuffix("]").split(","):
                if item := item.strip().strip("'\""):
                    if item.startswith("@"):
                        raise ArgumentError(f"{where} has {item!r}; a file cannot name other files")
                    self.add(item, where, below)
                    empty = False
        if empty:
            raise ArgumentError(f"{source} has the file {path!r}, which lists no name")


def asked(include: Iterable[Any] | Any | None, exclude: Iterable[Any] | Any | None) -> tuple[Any, Any]:
    """Return the names to include and to exclude, by name where each was written; None for none.

    ``RTKERNELS_ENABLE`` counts where `include` is None.
    """
    names = Names()
    if include is None:
        for item in env.get("ENABLE"):
            names.add(item, _VARIABLE)
    else:
        for item in _items("include", include):
            names.add(item, "include")
        if not names.include and not names.exclude:  # an empty list takes nothing; it is not "not given"
            return {}, None
    if exclude is not None:
        for item in _items("exclude", exclude):
            names.add(item, "exclude", excluded=True)
    return names.include or None, names.exclude or None


def _items(argument: str, given: Any) -> list[Any]:
    if isinstance(given, (str, os.PathLike)):
        return [given]
    if not isinstance(given, Iterable):
        raise ArgumentError(f"{argument} is a {type(given).__name__}; expected names, a path, or None")
    return list(given)
