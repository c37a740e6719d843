"""Text that every machine has, as token ids: the source files of Python's standard library, or another file."""

from __future__ import annotations

import argparse
import hashlib
import re
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

_TOKEN = re.compile(r"[A-Za-z]+|\d|\n[ \t]*|[ \t]+|[^\sA-Za-z\d]")
_HELD_OUT = 0.02  # of the tokens
BYTES = 256


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the training text."""
    parser.add_argument("--text", type=Path, help="a file; the standard library's source files when left out")
    parser.add_argument("--bytes", action="store_true", help=f"tokens are bytes, and --vocab is {BYTES}")


def corpus_of(args: argparse.Namespace) -> Corpus:
    """Return the text that a command line asks for; with `--bytes`, set its vocabulary."""
    if args.bytes:
        args.vocab = BYTES
    return Corpus(args.vocab, limit=200_000 if args.tiny else None, path=args.text, by_bytes=args.bytes)


def _standard_library(limit: int | None) -> str:
    root = Path(sysconfig.get_paths()["stdlib"])
    parts, size = [], 0
    for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        size += len(parts[-1])
        if limit is not None and size >= limit:
            break
    return "".join(parts)[:limit]


class Corpus:
    """Token ids of the text, `train` and `held_out`, and what identifies it."""

    def __init__(
        self, vocabulary: int, limit: int | None = None, path: Path | None = None, by_bytes: bool = False
    ) -> None:
        """Read the text.

        Args:
            vocabulary: Ids are below it; rarer words of a text with more kinds share ids.
            limit: Characters to read, for tests.
            path: A file with another text.
            by_bytes: Ids are bytes, and not words.
        """
        text = _standard_library(limit) if path is None else path.read_text(encoding="utf-8", errors="replace")[:limit]
        known: dict[str, int] = {}
        if by_bytes:
            ids = list(text.encode())
        else:
            ids = [known.setdefault(word, len(known)) % vocabulary for word in _TOKEN.findall(text)]
        cut = int(len(ids) * (1 - _HELD_OUT))
        self.train, self.held_out = torch.tensor(ids[:cut]), torch.tensor(ids[cut:])
        self.sha256, self.kinds = hashlib.sha256(text.encode()).hexdigest(), len(known) or BYTES

    def batch(self, step: int, tokens: int, length: int, seed: int = 0) -> Tensor:
        """Return ``[tokens / length, length]`` ids for a step, the same for every arm."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(0, len(self.train) - length - 1, (tokens // length,), generator=generator)
        return torch.stack([self.train[s : s + length] for s in starts.tolist()])
