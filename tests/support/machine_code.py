"""Hashes of the machine code of every variant, for changes that should change no kernel (renames, moved files).

``python -m tests.support.machine_code FILE`` compiles what the cache lacks and writes a hash of each variant's code on
the targets of CI; ``--compare FILE`` prints the variants that differ from such a file, and exits with 1 if there are
any.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rtkernels.runtime import cpus, targets, warm
from rtkernels.runtime.build import cache

_SYMBOLS = (2, 3, 0x70000085)  # types of sections: a table of symbols, one of strings, a second one of symbols
_NO_BYTES = 8


def code_of(image: bytes) -> bytes:
    """Return a cubin without its symbols: names of static variables have a hash of the source with its comments."""
    if not image.startswith(b"\x7fELF"):
        return image
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count = struct.unpack_from("<HH", image, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, table + i * size) for i in range(count)]
    kept = [(kind, start, length) for _, kind, _, _, start, length, *_ in sections if kind not in _SYMBOLS]
    return b"".join(image[start : start + length] for kind, start, length in kept if kind != _NO_BYTES)


def hashes(ops: list[str] | None, archs: list[str]) -> dict[str, str]:
    """Return the hash of each variant of these ops (None: all) on these targets, by op, expression and target."""

    def of(job: warm.Job) -> tuple[str, str]:
        image = code_of(cache.load(*job.entry, op=job.op.name).image)
        return str(job), hashlib.sha256(image).hexdigest()[:16]

    with ThreadPoolExecutor(cpus.usable()) as pool:
        return dict(pool.map(of, warm.plan(warm.with_parts(ops), warm.targets(archs))))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.machine_code", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--compare", action="store_true", help="with the file, instead of writing it")
    parser.add_argument("--ops", type=lambda text: text.split(","), help="comma-separated; all when left out")
    parser.add_argument("--targets", type=lambda text: text.split(","), default=list(targets.CI_TARGETS))
    args = parser.parse_args(argv)
    found = hashes(args.ops, args.targets)
    if not args.compare:
        args.file.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
        return 0
    before = json.loads(args.file.read_text())
    differing = sorted(name for name in before.keys() | found.keys() if before.get(name) != found.get(name))
    for name in differing:
        print("new" if name not in before else "gone" if name not in found else "differs", name)
    print(f"{len(found)} variants, {len(differing)} differ from {args.file}")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
