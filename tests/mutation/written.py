"""Hand-written mutants, and those of the mutator that change no result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Written:
    """One edit.

    Attributes:
        name: Unique in its file, says what is wrong.
        file: Relative to ``cuda_src``.
        around: Text that is in the file once.
        old: Expression or statement in it that is replaced; once in it.
        new: What it becomes.
        is_statement: Whether it is a statement.
    """

    name: str
    file: str
    around: str
    old: str
    new: str
    is_statement: bool = False


WRITTEN: tuple[Written, ...] = ()

# Name of a mutant -> why no test can kill it.
EQUIVALENT: dict[str, str] = {}
