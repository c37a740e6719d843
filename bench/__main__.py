"""``python -m bench``: run, check, peak, sweep, campaign, neighbours, aten, host, report, record, readme, zoo, e2e."""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import re
import sys
import time
from functools import partial
from pathlib import Path

from bench import meta, peers
from bench.campaign import command as campaign_command
from bench.measure import host_stand_in
from bench.report import accepted, history, records
from bench.report import tables as report
from bench.sweep import command as sweep_command
from rtkernels.runtime.progress import Bar

NO_GPU = "bench: no CUDA device here, so nothing is measured. `python -m bench report` works without one."
LEVELS = ("core", "comprehensive")
E2E = ("train", "families", "infer", "parity", "post", "plot", "record")
# Default peers of `check`: without inductor, which would compile every row for minutes.
CHECKED = ["torch", "liger", "quack", "fa4", "linghe", "flaggems", "deepgemm", "fla"]


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from error
    return text


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure on this machine's GPU")
    run.add_argument("--rows", type=_regex, help="regular expression on 'name shape'; the host rows are called 'host'")
    run.add_argument("--peers", type=peers.families, help="comma-separated families, or none; all when left out")
    run.add_argument("--out", type=Path, help="result file (default <gpu>-<date>.json)")
    run.add_argument("--quick", action="store_true", help="30 samples a measurement instead of 100")
    run.add_argument("--samples", type=int, help="of a measurement; rows of 50 ms and more need few")
    run.add_argument("--record", action="store_true", help="take the rows over into bench/results/<gpu>.json")
    run.add_argument("--resume", action="store_true", help="keep the rows of --out, measure the others")
    run.add_argument("--missing", action="store_true", help="only rows that bench/results does not have")
    run.add_argument("--without-peak", action="store_true", help="only products whose record has no peak of its run")
    run.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after this time")
    run.add_argument("--jobs", type=int, help="processes that compile everything before (default: 6 with --record)")
    run.add_argument("--trial", action="append", help=argparse.SUPPRESS)  # rows with and without a switch; no others
    run.add_argument("--compile", action="store_true", help="compile in --jobs processes, measure nothing")
    run.add_argument("--part", help=argparse.SUPPRESS)
    check = commands.add_parser("check", help="call ours and every peer once, untimed, and say how they differ")
    check.add_argument("--rows", type=_regex, help="regular expression on 'name shape'")
    check.add_argument("--peers", type=peers.families, default=CHECKED, help="as for run; default: all but inductor")
    check.add_argument("--missing", action="store_true", help="call nothing; list the rows that have no record")
    commands.add_parser("peak", help="rate of the tensor cores of this machine's GPU, TFLOP/s")
    sweep_command.add_arguments(commands.add_parser("sweep", help="ours beside the best peer at random shapes"))
    campaign_command.add_arguments(commands.add_parser("campaign", help="what has never run on a GPU, in a short time"))
    near = commands.add_parser("neighbours", help="ours and a copy beside powers of two, with the memory a call takes")
    near.add_argument("--rows", type=_regex, default="", help="regular expression on the op's row name")
    near.add_argument("--out", type=Path, help="result file (default <gpu>-<date>.json)")
    near.add_argument("--quick", action="store_true", help="30 samples a measurement instead of 100")
    aten = commands.add_parser("aten", help="torch's operators on our kernels, over FlagGems' shapes")
    aten.add_argument("--rows", type=_regex, default="", help="regular expression on 'family overload'")
    aten.add_argument("--ways", default="torch,rtkernels,flaggems,inductor", help="comma-separated")
    aten.add_argument("--level", choices=LEVELS, default="core", help="FlagGems' core shapes, or all of its shapes")
    aten.add_argument("--limit", type=int, help="leave out shapes with more elements")
    aten.add_argument("--out", type=Path, default=Path("aten.json"), help="result file")
    aten.add_argument("--quick", action="store_true", help="a minute: fewer shapes, dtypes and calls")
    aten.add_argument("--record", type=Path, metavar="FILE", help="measure nothing; take the default set from a result")
    aten.add_argument("--seconds", type=float, help="begin no case after this time")
    aten.add_argument("--resume", action="store_true", help="keep the cases of the result file, measure the others")
    host = commands.add_parser("host", help="host time per call on a stand-in device, of one tree or of two")
    host_stand_in.add_arguments(host)
    show = commands.add_parser("report", help="print result files as markdown")
    show.add_argument("files", nargs="+", type=Path)
    show.add_argument("--plot", type=Path, metavar="PNG", help="also draw copy / time per row")
    record = commands.add_parser("record", help="take result files over into bench/results/<gpu>.json")
    record.add_argument("files", nargs="+", type=Path, help="or folders of `bench campaign`")
    record.add_argument("--layers", action="store_true", help="the files hold measurements of whole layers")
    commands.add_parser("zoo", help="patch every model of transformers and diffusers that can be built small")
    commands.add_parser("e2e", help=f"e2e {', '.join(E2E)}: whole models; `e2e train --help`")
    tables = commands.add_parser("readme", help="write the README's table, pages and pictures of docs/, expected gains")
    tables.add_argument("--check", action="store_true", help="write nothing; exit with 1 if they are not up to date")
    tables.add_argument("--plot", type=Path, metavar="PNG", help="also draw these rows")
    return top


def _run(args: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    if missing := peers.not_installed(args.peers):
        print(f"bench run: not installed: {', '.join(missing)}; leave them out of --peers, or --peers", file=sys.stderr)
        return 2
    from bench.campaign import trials
    from bench.e2e import processes
    from bench.measure import host, run, warm
    from bench.measure.timing import CudaDevice, Timer
    from bench.rows import all_rows

    pool = list(all_rows())
    rows = run.select(pool, args.rows)
    if args.missing:
        wanted = {row.label for row in records.missing(pool, meta.RESULTS)}
        rows = [row for row in rows if row.label in wanted]
    if args.without_peak:
        wanted = {row.label for row in records.without_peak(pool, meta.RESULTS)}
        rows = [row for row in rows if row.label in wanted]
    if args.trial:
        rows = list(trials.rows(rows, args.trial))
    with_host = not (args.missing or args.without_peak or args.trial) and (
        args.rows is None or re.search(args.rows, "host") is not None
    )
    if not rows and not with_host:
        labels = "\n  ".join(row.label for row in pool)
        print(f"bench run: no row matches {args.rows!r}; rows:\n  host\n  {labels}", file=sys.stderr)
        return 2
    started = time.monotonic()
    if args.part:
        bench = run.Bench(Timer(CudaDevice()), "cuda", args.peers)
        return warm.part(rows, args.part, bench, pool, args.seconds, shares_device=args.compile)
    path = args.out or meta.default_path(meta.environment())
    try:
        earlier = records.interrupted(path) if args.resume else None
    except meta.ResultError as error:
        print(f"bench run: {error}", file=sys.stderr)
        return 2
    jobs = args.jobs if args.jobs is not None else 6 * args.record
    if jobs or args.compile:
        warm.all_parts(warm.options(args), max(jobs, 1), args.seconds if args.compile else min(300.0, args.seconds / 2))
    if args.compile:
        return 0
    timer, bar = Timer(CudaDevice(), iterations=args.samples or (30 if args.quick else 100)), Bar(0, "rows")
    with processes.alone():  # among commands that share a lock: others compile meanwhile
        result = run.run(
            rows,
            run.Bench(timer, "cuda", args.peers, log=partial(bar.tell, stream=sys.stdout), bar=bar),
            pool=pool,
            path=path,
            host=(lambda: host.measure(args.quick)) if with_host else None,
            earlier=earlier,
            ends=started + args.seconds,
        )
    print(report.markdown(result))
    print(f"written: {path}")
    if args.record:
        _record(argparse.Namespace(files=[path], layers=False))
    failed = [row for row in result["rows"] if "failed" in row]
    return 0 if result["complete"] and not failed else 1


def _peak(args: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    from bench.measure import peak
    from bench.measure.timing import CudaDevice, Timer

    print(json.dumps(peak.measure(Timer(CudaDevice()))))
    return 0


def _check(args: argparse.Namespace) -> int:
    import torch

    if args.missing:
        from bench.rows import all_rows

        found = records.missing(list(all_rows()), meta.RESULTS)
        labels = [row.label for row in found if args.rows is None or re.search(args.rows, row.label)]
        print("\n".join([*labels, f"{len(labels)} rows have no record with a commit"]))
        return 0
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    from bench.measure import run
    from bench.measure.timing import CudaDevice, Timer
    from bench.rows import all_rows

    pool = list(all_rows())
    rows = run.select(pool, args.rows)
    if not rows:
        print(f"bench check: no row matches {args.rows!r}", file=sys.stderr)
        return 2
    bar = Bar(0, "rows")
    bench = run.Bench(Timer(CudaDevice()), "cuda", args.peers, log=partial(bar.tell, stream=sys.stdout), bar=bar)
    return 0 if run.check(rows, bench, pool) else 1


def _neighbours(args: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    from bench.measure import neighbours as measured
    from bench.measure.timing import CudaDevice, Timer
    from bench.report import neighbours

    env = meta.environment()
    timer = Timer(CudaDevice(), iterations=30 if args.quick else 100)
    with Bar(0, "points") as bar:
        log = partial(bar.tell, stream=sys.stdout)
        rows = measured.measure(timer, "cuda", log, lambda name: re.search(args.rows, name) is not None, bar)
    result = {
        "schema": meta.SCHEMA, "environment": env, "copy_peak_gbps": None, "rows": rows, "host": None, "complete": True,
    }  # fmt: skip
    meta.save(result, args.out or meta.default_path(env))
    print("\n".join(neighbours.text(rows)))
    return 0


def _aten(args: argparse.Namespace) -> int:
    import importlib.util

    import torch

    if args.record is not None:
        from bench.report import aten as chosen

        if (level := chosen.load(args.record).get("level", "core")) != "core":
            print(f"bench aten: {args.record} has level {level}; the default set follows from core", file=sys.stderr)
            return 2
        chosen.record(args.record)
        return 0
    from bench.measure import aten, aten_run

    ways = tuple(way for way in args.ways.split(",") if way)
    if unknown := set(ways) - set(aten.WAYS):
        print(f"bench aten: unknown ways {', '.join(sorted(unknown))}; known: {', '.join(aten.WAYS)}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    if importlib.util.find_spec("flag_gems") is None:
        ways = tuple(way for way in ways if way != "flaggems")
    aten_run.run(
        args.rows, args.out, ways=ways, limit=args.limit, quick=args.quick, seconds=args.seconds, resume=args.resume,
        level=args.level,
    )  # fmt: skip
    return 0


def _report(args: argparse.Namespace) -> int:
    try:
        results = [meta.load(path) for path in args.files]
        print("\n".join(report.markdown(result) for result in results))
        if args.plot:
            report.plot(results, args.plot)
    except (ImportError, ValueError) as error:
        print(f"bench report: {error}", file=sys.stderr)
        return 2
    return 0


def _record(args: argparse.Namespace) -> int:
    for file in args.files:
        try:
            if args.layers:
                result = json.loads(file.read_text(encoding="utf-8"))
            else:
                result = records.of_campaign(file) if file.is_dir() else meta.load(file)
        except (OSError, ValueError) as error:
            print(f"bench record: {error}", file=sys.stderr)
            return 2
        path = accepted.path_of(result["environment"]["gpu"])
        numbers = accepted.load(path) if path.exists() else accepted.empty()
        before = copy.deepcopy(numbers)
        for label in accepted.record(numbers, result):
            print(f"not recorded: {label} (failed, not compared, or without the peer that was fastest before)")
        if replaced := history.replaced(before, numbers):
            file = history.path_of(result["environment"]["gpu"])
            history.save([*history.load(file), *replaced], file)
        accepted.save(numbers, path)
    return 0


def _readme(args: argparse.Namespace) -> int:
    from bench.report import expected, headline, html, models_page, pictures, readme, strong_peers
    from bench.rows import all_rows

    (file,) = meta.RESULTS.glob("*.json")
    numbers, rows = accepted.load(file), list(all_rows())
    measured = {(row["row"], row["shape"]): row for row in numbers["rows"]}
    top, docs = meta.ROOT / "README.md", meta.ROOT / "docs"
    e2e, policy = headline.recorded()
    released = history.releases((meta.ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    owners = html.owners()
    drawn = pictures.all_pictures(numbers, owners, e2e, policy)
    fresh = {
        top: readme.rewritten(
            top.read_text(encoding="utf-8"),
            headline.headline(numbers, e2e, policy, strong_peers.recorded(file.stem)),
        ),
        docs / "performance.md": readme.page(numbers, rows, sorted(drawn)),
        docs / "performance.html": html.page(html.entries([numbers], owners, released)),
        docs / "measured_models.md": models_page.page(e2e, policy, headline.recorded_parts()),
        expected.FILE: expected.module(numbers, e2e),
        **{pictures.FOLDER / name: text for name, text in drawn.items()},
    }
    gone = [path for path in pictures.FOLDER.glob("*.svg") if path not in fresh]
    if args.check:
        stale = [p for p, text in fresh.items() if not p.exists() or p.read_text(encoding="utf-8") != text] + gone
        print("\n".join(f"not up to date: {path.relative_to(meta.ROOT)}" for path in stale), end="\n" * bool(stale))
        return int(bool(stale))
    pictures.FOLDER.mkdir(exist_ok=True)
    for path in gone:
        path.unlink()
    for path, text in fresh.items():
        path.write_text(text, encoding="utf-8")
    if args.plot:
        shown = [measured[key] for key in ((row.name, row.shape) for row in rows) if key in measured]
        report.plot([{"rows": shown, "environment": numbers["runs"][0]}], args.plot)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["e2e"] and words[1:2] and words[1] in E2E:
        return importlib.import_module(f"bench.e2e.{words[1]}").main(words[2:])
    if words[:1] == ["zoo"]:
        from bench import zoo

        return zoo.main(words[1:])
    args = parser().parse_args(words)
    commands = {
        "run": _run, "check": _check, "peak": _peak, "sweep": sweep_command.run, "campaign": campaign_command.run,
        "neighbours": _neighbours, "aten": _aten, "report": _report, "record": _record, "host": host_stand_in.run,
        "readme": _readme, "e2e": lambda _: parser().error(f"expected e2e {', e2e '.join(E2E)}"),
    }  # fmt: skip
    return commands[args.command](args)


if __name__ == "__main__":
    sys.exit(main())
