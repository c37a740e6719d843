"""What every file of adapters needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NO_ADAPTER = "no adapter for"  # how a result says that a peer has nothing like a row's op
Call = Callable[[], Any]
Prepare = Callable[..., Call]
Table = dict[str, dict[str, Prepare]]


class Absent(Exception):
    """This peer does not support this row; the text says why."""


@dataclass(frozen=True)
class Compared:
    """A call with a result that ``compare``, which is not timed, makes comparable with the row's."""

    call: Call
    compare: Callable[[Any], Any]

    def __call__(self) -> Any:
        return self.call()


def silu_only(act: str, library: str) -> None:
    """Skip a row if the library lacks its activation."""
    if act != "silu":
        raise Absent(f"{library} has no merged-input GLU for act={act!r}")


def absent(reason: str) -> Prepare:
    """An adapter for a row the library cannot do, which says why."""

    def prepare(**_: Any) -> Call:
        raise Absent(reason)

    return prepare
