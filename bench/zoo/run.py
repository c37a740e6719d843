"""The command line of the zoo: classes shared among processes, each with a limit of time; results kept in a file."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from bench import meta
from bench.zoo import table

RECORD = meta.RESULTS / "zoo" / "cpu.json"
MEMORY = 12 << 30  # of a process; a class that needs more is not small
COMPARING = "comparing"
CLASSES_PER_PROCESS = 60  # imported models stay in memory


def names() -> dict[str, str]:
    """Return all classes and the library that each is of."""
    from bench.zoo import build, diffusion

    return dict.fromkeys(build.classes(), "transformers") | dict.fromkeys(diffusion.classes(), "diffusers")


def result_of(
    name: str, library: str, kinds: list[str] | None = None, options: list[str] | None = None,
    tell: Callable[[str], None] = lambda stage: None,
) -> dict[str, Any] | None:  # fmt: skip
    """Return what became of a class, None if it is of another kind."""
    from bench.zoo import build, compare, diffusion, steps

    begin = time.perf_counter()
    found: dict[str, Any] = {"class": name, "library": library, "kind": "other"}
    try:
        if library == "diffusers":
            found["kind"] = "diffusion"
        else:
            model_type = build.classes()[name][0]
            found |= {"type": model_type, "kind": build.kind_of(build.class_of(name), model_type)}
        if kinds and found["kind"] not in kinds:
            return None
        built = diffusion.build(name) if library == "diffusers" else build.build(name)
        tell(COMPARING)
        made = compare.compare(built, options)
        if without := made.pop("generate", None):
            found["generate"] = without["why"]
        found |= {"options": made, "loss": built.has_loss}
    except build.NotBuilt as error:
        if kinds and found["kind"] not in kinds:
            return None
        found["reason"] = str(error)[:400]
    except steps.NotRepeatable as error:
        found |= {"outcome": table.NOT_REPEATABLE, "reason": str(error)[:400]}
    except Exception as error:  # of a model that is not patched yet
        found["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    found["seconds"] = round(time.perf_counter() - begin, 1)
    return found


def work(pipe: Connection, kinds: list[str] | None, options: list[str] | None) -> None:
    """Answer names by results until there are no more."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    import resource

    import torch

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    import transformers

    transformers.logging.set_verbosity_error()
    while (task := pipe.recv()) is not None:
        pipe.send(result_of(*task, kinds, options, pipe.send))


class Worker:
    """A process that answers one class at a time, replaced when it is late or has had many."""

    def __init__(self, kinds: list[str] | None, options: list[str] | None) -> None:
        self._arguments = kinds, options
        self._process: Any = None
        self.task: tuple[str, str] | None = None

    def give(self, task: tuple[str, str]) -> None:
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, inner = context.Pipe()
            self._process = context.Process(target=work, args=(inner, *self._arguments), daemon=True)
            self._process.start()
            inner.close()
            self._had = 0
        self.task, self.begin, self.stage = task, time.monotonic(), "building"
        self._had += 1
        self.pipe.send(task)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self.pipe.close()
        self._process = None

    def take(self, seconds: float) -> dict[str, Any] | None:
        """Return the result of the task, which may be that it took too long or ended the process; None if not yet."""
        name, library = self.task or ("", "")
        found: Any = None
        try:
            while self.pipe.poll():
                message = self.pipe.recv()
                if isinstance(message, str):
                    self.stage = message
                    continue
                self.task = None
                if self._had >= CLASSES_PER_PROCESS:
                    self.end()
                return message
            if time.monotonic() - self.begin <= seconds:
                return None
            found = {"reason": f"took more than {seconds:.0f} s {self.stage}"}
            if self.stage == COMPARING:
                found["outcome"] = table.TOO_SLOW
        except EOFError:  # of a patched model, that is a crash
            found = {"reason": "the process ended"}
            if self.stage == COMPARING:
                found = {"options": {"default": {"status": "crashed", "why": "the process ended"}}}
        self.end()
        self.task = None
        return {"class": name, "library": library, "kind": _kind(name, library), **found}


def _kind(name: str, library: str) -> str:
    from bench.zoo import build

    if library == "diffusers":
        return "diffusion"
    try:
        return build.kind_of(build.class_of(name), build.classes()[name][0])
    except Exception:
        return "other"


def results(
    tasks: list[tuple[str, str]], jobs: int, seconds: float, kinds: list[str] | None, options: list[str] | None
) -> Iterator[dict[str, Any]]:
    """Yield results as they come."""
    workers, left = [Worker(kinds, options) for _ in range(jobs)], iter(tasks)
    try:
        while True:
            for worker in workers:
                if worker.task is None and (task := next(left, None)) is not None:
                    worker.give(task)
            busy = [worker for worker in workers if worker.task is not None]
            if not busy:
                return
            wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in busy:
                found = worker.take(seconds)
                if found is not None:
                    yield found
    finally:
        for worker in workers:
            worker.end()


def load(path: Path | None) -> dict[str, dict[str, Any]]:
    """Return the results of an earlier run by class: of lines that are added to, or of a record."""
    if path is None or not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    found = json.loads(text)["results"] if text.startswith('{"schema"') else map(json.loads, text.splitlines())
    return {result["class"]: result for result in found}


def versions() -> dict[str, str | None]:
    """Return the versions of what was compared."""
    return {name: meta._version(name) for name in ("transformers", "diffusers", "torch")}


def versions_of(found: list[dict[str, Any]]) -> dict[str, str | None]:
    """Return the versions that results were made with; several, where a run was continued with others."""
    made: dict[str, list[str]] = {name: [] for name in versions()}
    for result in found:
        for name, version in result.get("versions", dict.fromkeys(made, "not recorded")).items():
            if version and version not in made[name]:
                made[name].append(version)
    return {name: " and ".join(sorted(known)) or None for name, known in made.items()}


def record(path: Path, found: list[dict[str, Any]], of: int, note: str = "") -> None:
    """Write the results of a run with their counts: one line for a class. `of` is how many classes there are."""
    found = sorted(found, key=lambda r: (r["kind"], r["class"]))
    head: dict[str, Any] = {"schema": 1, "versions": versions_of(found), "classes": of, "note": note}
    head["counts"] = {kind: dict(count) for kind, count in sorted(table.counts(found).items())}
    head["options"] = {name: dict(count) for name, count in table.by_option(found).items()}
    if " and " not in str(head["versions"]):  # those of every result
        found = [{name: value for name, value in result.items() if name != "versions"} for result in found]
    lines = ",\n".join(json.dumps(_short(result), sort_keys=True, separators=(",", ":")) for result in found)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{json.dumps(head)[:-1]}, "results": [\n{lines}\n]}}\n', encoding="utf-8")


def _short(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result without what every set of options repeats: what the default ones replace and leave."""
    if "options" not in result:
        return result
    default = result["options"].get("default", {})
    options = {"default": default} if default else {}
    for name, found in result["options"].items():
        if name != "default":
            left = [site for site in found.get("left", ()) if site not in default.get("left", ())]
            replaced = {k: n for k, n in found.get("replaced", {}).items() if n != default.get("replaced", {}).get(k)}
            options[name] = {**found, "left": left, "replaced": replaced}
            options[name] = {key: value for key, value in options[name].items() if value not in ([], {})}
    return {**result, "options": options}


def page() -> Path:
    """Return the page of the guide that has the tables."""
    (found,) = (p for p in sorted((meta.ROOT / "docs").rglob("*.md")) if table.MARK in p.read_text(encoding="utf-8"))
    return found


def write(path: Path) -> None:
    """Put the tables of a record into the guide."""
    made = json.loads(path.read_text(encoding="utf-8"))
    lines = table.lines_of(made["results"], made["versions"], made["classes"], made.get("note", ""))
    document = page()
    document.write_text(table.written(document.read_text(encoding="utf-8"), lines), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Compare classes and print the table; return 1 if one changed or crashed."""
    import bench.zoo
    from bench.zoo import compare

    parser = argparse.ArgumentParser(prog="python -m bench zoo", description=bench.zoo.__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="names of classes")
    parser.add_argument("--kind", nargs="*", choices=table.KINDS, help="kinds of classes")
    parser.add_argument("--options", nargs="*", choices=list(compare.OPTIONS), help="sets of options of patch")
    parser.add_argument("--every", type=int, default=1, help="only every N-th class")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=300, help="limit for one class")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add results to this file, and skip those it has")
    parser.add_argument(
        "--retry", action="store_true", help="with --json: try again what was not built, changed or crashed"
    )
    parser.add_argument("--record", nargs="?", const=RECORD, type=Path, help="write counts and results there")
    parser.add_argument("--note", default="", help="with --record: a sentence for the record: the date, the choice")
    parser.add_argument("--write", action="store_true", help="run nothing: put the tables of a record into the guide")
    chosen = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    if chosen.write:
        write(chosen.record or RECORD)
        return 0
    known = load(chosen.json)
    if chosen.retry:
        known = {name: r for name, r in known.items() if table.status_of(r) in ("kept", "nothing")}
    everything = names()
    wanted = chosen.only or list(everything)[:: chosen.every]
    if unknown := [name for name in wanted if name not in everything]:
        parser.error(f"--only: {', '.join(unknown)}: not in transformers' auto mappings, nor a model of diffusers")
    tasks = [(name, everything[name]) for name in wanted if name not in known]
    stream = chosen.json.open("a", encoding="utf-8") if chosen.json else None
    found = [r for name, r in known.items() if name in wanted]
    for result in results(tasks, chosen.jobs, chosen.seconds, chosen.kind, chosen.options):
        found.append(result | {"versions": versions()})
        status = table.status_of(result)
        if stream is not None:
            print(json.dumps(found[-1], sort_keys=True), file=stream, flush=True)
        why = [
            f"{name}: {o['status']}: {o['why']}"
            for name, o in result.get("options", {}).items()
            if o["status"] in ("changed", "crashed")
        ]
        more = "; ".join(why) or result.get("reason", "")
        print(f"{len(found):5} {result['kind']:15} {result['class']}: {status} {more}", flush=True)
    if chosen.record:
        record(chosen.record, found, len(everything), chosen.note)
    print("\n".join(table.lines_of(found, versions_of(found), len(everything), chosen.note)))
    return int(any(table.status_of(r) in ("changed", "crashed") for r in found))


if __name__ == "__main__":
    sys.exit(main())
