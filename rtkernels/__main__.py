"""The command line: ``rtkernels ...`` or ``python -m rtkernels ...``.

Every command works without a GPU. Results go to stdout, progress and errors to stderr. The exit code is 0 for success,
1 for failure and 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NoReturn

from rtkernels import __version__
from rtkernels.errors import ArgumentError, RtkError
from rtkernels.runtime.suggest import did_you_mean

USAGE, FAILURE = 2, 1


class _Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        if match := re.search(r"invalid choice: '([^']*)' \(choose from ([^)]*)\)", message):
            message += did_you_mean(match[1], re.findall(r"[\w-]+", match[2]))
        self.exit(USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _names(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise argparse.ArgumentTypeError("expected at least one name")
    return names


def _count(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum} up")
        return int(text)

    return parse


def _parser() -> _Parser:
    parser = _Parser(prog="rtkernels", description="Fused CUDA kernels for torch, compiled at first use.")
    parser.add_argument("--version", action="version", version=f"rtkernels {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    def arch_option(to: argparse.ArgumentParser, text: str) -> None:
        to.add_argument("--arch", type=_names, metavar="LIST", help=text)

    def op_option(to: argparse.ArgumentParser) -> None:
        to.add_argument("--op", type=_names, metavar="LIST", help="only these ops, separated by commas")

    def tier_option(to: argparse.ArgumentParser) -> None:
        to.add_argument("--tier", type=_names, metavar="LIST", help="only kernels of these tiers: core, serve, aten")

    default = "targets such as sm_80,sm_90a (default: this machine's GPUs, or RTKERNELS_ARCH)"

    doctor = command("doctor", "Show versions, libraries, devices, cache, settings and test compiles.")
    doctor.add_argument("--json", action="store_true", help="print JSON")

    listing = command("list", "List ops, their kernels, and how many variants are in the cache.")
    arch_option(listing, "targets (default: this machine's GPUs, or RTKERNELS_ARCH, or all that CI compiles)")
    op_option(listing)
    tier_option(listing)
    listing.add_argument("--json", action="store_true", help="print JSON, one entry per variant")

    warm = command("warm", "Compile kernels ahead of time; needs no GPU.")
    arch_option(warm, default)
    op_option(warm)
    tier_option(warm)
    every = "pointwise kernels of enable() for every dtype and layout, too (docs/cache.md)"
    warm.add_argument("--every-variant", action="store_true", help=every)
    warm.add_argument("--out", metavar="DIR", help="fill this cache directory instead of the default one")
    warm.add_argument("--jobs", type=_count(1), metavar="N", help="threads (default: the CPUs it may use)")

    cache = command("cache", "Look at the kernel cache, or clean it.")
    actions = cache.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("path", help="print where it is")
    listed = actions.add_parser("ls", help="list its entries")
    listed.add_argument("--json", action="store_true", help="print JSON")
    verify = actions.add_parser("verify", help="check every entry; exit code 1 if one is damaged")
    verify.add_argument("--repair", action="store_true", help="move damaged entries away")
    prune = actions.add_parser("prune", help="remove the least recently used entries above the size cap")
    cap = "the cap, 0 for none (default: RTKERNELS_CACHE_MAX_MB)"
    prune.add_argument("--max-mb", type=_count(0), metavar="N", help=cap)
    clear = actions.add_parser("clear", help="remove entries, without asking")
    arch_option(clear, "only these targets")
    op_option(clear)

    show = command("show", "Show resources, PTX or source of the kernels of an op, or the generated code of its calls.")
    show.add_argument("op", metavar="OP")
    arch_option(show, default)
    what = show.add_mutually_exclusive_group()
    what.add_argument("--resources", action="store_true", help="registers, spills, shared memory (default)")
    what.add_argument("--ptx", action="store_true", help="PTX of one variant")
    what.add_argument("--source", action="store_true", help="the unit with its headers")
    what.add_argument("--call", action="store_true", help="the generated Python code of its operators' calls")
    show.add_argument("--kernel", metavar="NAME", help="only this kernel")
    show.add_argument("--variant", type=_count(0), metavar="N", help="only this number in --resources")

    tune = command("tune", "Measure the kernels for given matrix products on this GPU, and keep the fastest ones.")
    tune.add_argument("function", nargs="?", help="scaled_mm, gated_mm or grouped_mm")
    tune.add_argument("sizes", nargs="*", metavar="MxNxK", help="rows of a, columns of the result, summed dimension")
    tune.add_argument("--dtype", default="bf16", metavar="NAME", help="of operands: bf16 (default), fp16, fp8 or int8")
    tune.add_argument(
        "--recipe", metavar="NAME", help="scales of fp8 and int8 operands (default: row), as scaled_mm has"
    )
    tune.add_argument("--groups", type=_count(1), metavar="N", help="of grouped_mm, whose rows they share")
    script = "run this program with the arguments behind it, and tune the products it computes"
    tune.add_argument("--script", nargs=argparse.REMAINDER, metavar="FILE", help=script)
    tune.add_argument("--list", action="store_true", help="list the choices that are kept")
    tune.add_argument("--clear", action="store_true", help="remove the choices that this user keeps")

    command("demo", "Run the fused ops, forward and backward, on this machine; takes less than a minute.")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return _COMMANDS[arguments.command](arguments)
    except BrokenPipeError:
        # The reader (head, less) has exited: redirect stdout so that the flush at exit does not fail.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("rtkernels: interrupted", file=sys.stderr)
        return 130
    except ArgumentError as error:
        return _fail(error, USAGE)
    except (RtkError, OSError, ImportError) as error:
        return _fail(error, FAILURE)


def _fail(error: BaseException, code: int) -> int:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    print(f"rtkernels: {' | '.join(lines) or type(error).__name__}", file=sys.stderr)
    return code


def _doctor(arguments: argparse.Namespace) -> int:
    from rtkernels.cli import doctor

    report = doctor.collect()
    print(json.dumps(report, indent=2, default=str) if arguments.json else doctor.render(report))
    return FAILURE if report["problems"] else 0


def _list(arguments: argparse.Namespace) -> int:
    from rtkernels.cli import show

    rows = show.inventory(arguments.arch, arguments.op, arguments.tier)
    print(json.dumps(rows, indent=2) if arguments.json else show.render_inventory(rows))
    return 0


def _warm(arguments: argparse.Namespace) -> int:
    from rtkernels.runtime import warm as warming

    progress = warming.Progress(sys.stderr)
    report = warming.warm(
        arguments.arch, arguments.op, arguments.out, arguments.jobs, tiers=arguments.tier,
        every_variant=arguments.every_variant, progress=progress,
    )  # fmt: skip
    progress.close()
    print(report)
    return FAILURE if report.failures else 0


def _cache(arguments: argparse.Namespace) -> int:
    from rtkernels import cache

    return _CACHE_ACTIONS[arguments.action](arguments, cache)


def _cache_path(arguments: argparse.Namespace, cache: ModuleType) -> int:
    path = cache.path()
    if path is None:
        raise RtkError("there is no home directory to put a cache into; set RTKERNELS_CACHE_DIR")
    print(path)
    return 0


def _cache_ls(arguments: argparse.Namespace, cache: ModuleType) -> int:
    entries = cache.ls()
    if arguments.json:
        print(json.dumps([vars(entry) for entry in entries], indent=2, default=str))
        return 0
    from rtkernels.cli.show import table

    rows = []
    for entry in entries:
        used = time.strftime("%Y-%m-%d", time.localtime(entry.last_used))
        what = f"damaged: {entry.problem}" if entry.problem else "; ".join(entry.meta.get("expressions", ()))
        rows.append([entry.target, entry.op, entry.key[:12], entry.size, used, what])
    if rows:
        print(table(["target", "op", "key", "bytes", "last used", "kernel"], rows))
    print(f"{len(rows)} entries, {_size(sum(entry.size for entry in entries))}, in {cache.path()}")
    return 0


def _cache_verify(arguments: argparse.Namespace, cache: ModuleType) -> int:
    result = cache.verify(repair=arguments.repair)
    for entry in result.bad:
        print(f"{'moved away' if arguments.repair else 'damaged'}: {entry.path}: {entry.problem}")
    print(f"{result.checked} entries checked, {len(result.bad)} damaged, in {cache.path()}")
    return FAILURE if result.bad else 0


def _cache_prune(arguments: argparse.Namespace, cache: ModuleType) -> int:
    removed = cache.prune(arguments.max_mb)
    print(f"removed {removed.entries} entries, {_size(removed.size)}, from {cache.path()}")
    return 0


def _cache_clear(arguments: argparse.Namespace, cache: ModuleType) -> int:
    from rtkernels.runtime import warm as warming

    targets = [None] if arguments.arch is None else [target.name for target in warming.targets(arguments.arch)]
    ops = [None] if arguments.op is None else _cached_ops(arguments.op, {entry.op for entry in cache.ls()})
    results = [cache.clear(target, op) for target in targets for op in ops]
    entries, size = sum(result.entries for result in results), sum(result.size for result in results)
    print(f"removed {entries} entries, {_size(size)}, from {cache.path()}")
    return 0


def _cached_ops(names: Sequence[str], cached: set[str]) -> list[str]:
    """Return op names as stored in entries; also accepts ops of older versions that are still in the cache."""
    from rtkernels.runtime import warm as warming

    found = []
    for name in names:
        found += [name] if name in cached else [op.name for op in warming.select([name])]
    return list(dict.fromkeys(found))


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


_CACHE_ACTIONS = {
    "path": _cache_path,
    "ls": _cache_ls,
    "verify": _cache_verify,
    "prune": _cache_prune,
    "clear": _cache_clear,
}


def _show(arguments: argparse.Namespace) -> int:
    from rtkernels.cli import show
    from rtkernels.runtime import warm as warming

    chosen = (arguments.kernel, arguments.variant)
    if arguments.source:
        if arguments.variant is not None:
            raise ArgumentError("--variant has no meaning with --source: all variants share one source")
        print(show.source(arguments.op, arguments.kernel))
        return 0
    if arguments.call:
        if arguments.kernel is not None or arguments.variant is not None:
            raise ArgumentError("--kernel and --variant have no meaning with --call: a call chooses them")
        print(show.written_calls(arguments.op))
        return 0
    warming.select([arguments.op])  # report an unknown op before a missing target
    targets = warming.targets(arguments.arch)
    if arguments.ptx:
        print("\n\n".join(show.ptx(arguments.op, target, *chosen) for target in targets))
    else:
        rows = [row for target in targets for row in show.resources(arguments.op, target, *chosen)]
        print(show.render_resources(rows))
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    from rtkernels.cli import tune

    return tune.run(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    from rtkernels.cli import demo

    return demo.run()


_COMMANDS = {
    "doctor": _doctor,
    "list": _list,
    "warm": _warm,
    "cache": _cache,
    "show": _show,
    "tune": _tune,
    "demo": _demo,
}

if __name__ == "__main__":
    sys.exit(main())
