"""Suggestions for a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'rms_norm'?"`` for similar known names, "" if there is none."""
    by_spelling = {_plain(other): other for other in known}
    close = difflib.get_close_matches(_plain(name), by_spelling, n=3, cutoff=0.6)
    if not close:
        return ""
    return f"; did you mean {' or '.join(repr(by_spelling[spelling]) for spelling in close)}?"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
