"""Every environment variable that rtkernels reads, in one table.

Values are read from ``os.environ`` at each call, so a change takes effect immediately; only slow paths read them. An
empty value means "not set".
"""

from __future__ import annotations

import logging
import os
import pwd
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtkernels.errors import ArgumentError
from rtkernels.runtime import targets

PREFIX = "RTKERNELS_"

# For replays that ask for a variable in every call: without the encoding that ``os.environ`` does each time.
ENVIRON, ENCODED = getattr(os.environ, "_data", os.environ), getattr(os.environ, "encodekey", str)
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: Full name, with the ``RTKERNELS_`` prefix.
        default: The value if it is not set.
        help: One line for ``doctor`` and the documentation.
        parse: Converts text to a value; raises a ValueError whose text names the accepted values.
    """

    name: str
    default: Any
    help: str
    parse: Callable[[str], Any]


def _boolean(text: str) -> bool:
    lowered = text.lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(f"one of {', '.join(_TRUE + _FALSE)}")


def _choice(*accepted: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() in accepted:
            return text.lower()
        raise ValueError(f"one of {', '.join(accepted)}")

    return parse


def _path(text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # "~" or "~user" that has no home directory
        raise ValueError("a directory that exists for this user") from None
    if text.startswith("~") and not path.is_absolute():  # a relative HOME: that would be the current directory
        raise ValueError("a directory that exists for this user")
    return Path(os.path.abspath(path))


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(_path(part) for part in text.split(os.pathsep) if part)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, text.split(","))))


def _users(text: str) -> tuple[int, ...]:
    """Return user ids from names or numbers, separated by commas."""
    found = []
    for name in _names(text):
        try:
            found.append(int(name) if name.isascii() and name.isdigit() else pwd.getpwnam(name).pw_uid)
        except KeyError:
            raise ValueError("names or numbers of users of this machine, separated by commas") from None
    return tuple(found)


def _megabytes(text: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)
    raise ValueError("a whole number of megabytes, 0 for no limit")


def _target(text: str) -> str:
    try:
        return targets.parse(text).name
    except ArgumentError:
        raise ValueError(f"a target such as {', '.join(targets.CI_TARGETS)}, 9.0 or compute_90") from None


def _emulate(text: str) -> str | bool:
    """Return False, True, or the name of the target whose feature macros are set."""
    try:
        return _boolean(text)
    except ValueError:
        pass
    try:
        return _target(text)
    except ValueError:
        raise ValueError("0, 1, or a target such as sm_80 or sm_90") from None


def _level(text: str) -> int:
    if text in ("0", "1", "2", "3"):
        return int(text)
    raise ValueError("0, 1, 2 or 3")


VARIABLES: tuple[Variable, ...] = (
    Variable("RTKERNELS_CACHE_DIR", None, "directory of the kernel cache", _path),
    Variable("RTKERNELS_CACHE_EXTRA", (), f"read-only caches, separated by '{os.pathsep}'", _paths),
    Variable("RTKERNELS_CACHE_OWNERS", (), "users besides you and root whose extra caches are used", _users),
    Variable("RTKERNELS_CACHE", "rw", "rw, ro (never written) or off (none)", _choice("rw", "ro", "off")),
    Variable("RTKERNELS_CACHE_MAX_MB", 512, "size cap of the cache in MB, 0 for none", _megabytes),
    Variable("RTKERNELS_NO_COMPILE", False, "1: a kernel missing from the cache is an error", _boolean),
    Variable("RTKERNELS_ARCH", None, "target to use instead of the device's own", _target),
    Variable("RTKERNELS_CUDA_INCLUDE", None, "directory of the CUDA headers", _path),
    Variable("RTKERNELS_FALLBACK", "off", "torch: use torch where no kernel can run", _choice("off", "torch")),
    Variable("RTKERNELS_ENABLE", (), "names that rtkernels.enable() takes, -name leaves, @path lists", _names),
    Variable("RTKERNELS_LINEINFO", False, "1: compile with -lineinfo, for profilers", _boolean),
    Variable("RTKERNELS_DEBUG", False, "1: check positions that only the device knows, and wait for it", _boolean),
    Variable("RTKERNELS_LOG", "warning", "warning, info or debug", _choice("warning", "info", "debug")),
    Variable("RTKERNELS_BATCH_INVARIANT", 0, "level of rtkernels.batch_invariant: 0, 1, 2 or 3", _level),
    Variable("RTKERNELS_EMULATE", False, "1 or a target: run kernels on the host", _emulate),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}


questions: list[Callable[[str], None]] = []  # called with every variable that is read


def get(name: str) -> Any:
    """Return the parsed value of ``RTKERNELS_<name>``, or its default.

    Args:
        name: Name without the prefix, for example ``"CACHE_DIR"``.

    Raises:
        ArgumentError: The value is not one of the accepted ones.
    """
    variable = _BY_NAME[PREFIX + name]
    for listener in tuple(questions):  # other threads add and remove theirs
        listener(variable.name)
    text = os.environ.get(variable.name, "").strip()
    if not text:
        return variable.default
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ArgumentError(f"{variable.name}={text!r} is not accepted: it must be {error}") from None


class _StderrHandler(logging.StreamHandler):
    """A handler that looks ``sys.stderr`` up at each record, so redirection keeps working."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("rtkernels: %(message)s"))

    @property
    def stream(self) -> Any:
        return sys.stderr


def logger() -> logging.Logger:
    """Return the ``rtkernels`` logger, at the level of ``RTKERNELS_LOG``.

    Our own handler is added only if that level is below warning and the application has none.
    """
    log = logging.getLogger("rtkernels")
    level = getattr(logging, get("LOG").upper())
    if log.level != level:
        log.setLevel(level)
    if level < logging.WARNING and not log.hasHandlers():
        log.addHandler(_StderrHandler())
    return log
