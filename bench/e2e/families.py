"""Train a few layers in the shape of six model families, all arms back to back in one process per family.

``python -m bench e2e families --out folder`` writes a result file per family, arm by arm, that ``bench e2e record``
takes. ``--warm`` measures nothing: it compiles what the arms need, in processes of their own, for the caches on disk.
Processes of several families overlap, but a measurement has the device to itself; each arm is measured several times,
with the device given to others in between, and the fastest of these runs counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from bench import meta
from bench.e2e import gates, processes
from bench.e2e.arms import FAMILIES
from bench.e2e.train import LEARNING_RATE

# Liger last: it patches functions of transformers' modules for everything behind it.
ARMS = ("compile", "hf", "ours", "ours_fused", "fp8", "liger")
_CHARACTERS = 3_000_000  # of the text
_UPDATED = "llama_like"  # with --warm, the only one with an optimizer, whose state would not fit for all at a time
_PROCESSES = 3  # of a family: each arm that hangs ends one
_RETRIES = 6  # of a warm-up without memory: other processes end


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m bench e2e families", description=__doc__.splitlines()[0])
    options.add_argument("--models", default=",".join(FAMILIES), help="comma-separated")
    options.add_argument("--arms", default=",".join(ARMS), help="comma-separated, measured in this order")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--vocab", type=int, default=65536)
    options.add_argument("--tokens", type=int, default=8192, help="of a step")
    options.add_argument("--seq", type=int, default=2048)
    options.add_argument("--runs", type=int, default=3, help="of each arm but hf, which has one")
    options.add_argument("--steps", type=int, default=4, help="of a run, the first not measured")
    options.add_argument("--jobs", type=int, default=3, help="families at a time")
    options.add_argument("--limit", type=float, default=45, help="seconds for the first step of an arm")
    options.add_argument("--warm", action="store_true", help="compile only")
    options.add_argument("--tiny", action="store_true", help="small, on the CPU where there is no GPU")
    options.add_argument("--out", type=Path, required=True, help="folder of result files")
    options.add_argument("--continue", dest="goes_on", action="store_true", help="keep the arms that result files have")
    options.add_argument("--one", help=argparse.SUPPRESS)
    return options


class Arm:
    """A model as one arm trains it, with its optimizer and batches."""

    def __init__(self, arm: str, family: str, args: argparse.Namespace) -> None:
        import torch

        from bench.e2e import arms
        from bench.e2e.text import Corpus

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        with processes.limited(processes.sharing(), args.limit):
            model = arms.build(
                family, args.vocab, args.seq, tiny=args.tiny, device=self.device, dtype=dtype, layers=args.layers
            )
            backend = "aot_eager" if args.tiny and self.device == "cpu" else "inductor"
            self.prepared, self.note = arms.prepare(arm, model, backend=backend)
            self.loss, self.optimizer = arms.loss_of(self.prepared), None
            if not args.warm or family == _UPDATED:
                self.optimizer = arms.optimizer(arm, model, LEARNING_RATE)
            corpus = Corpus(args.vocab, limit=_CHARACTERS // (50 if args.tiny else 1))
            self.batches = [corpus.batch(i, args.tokens, args.seq).to(self.device) for i in range(4)]
        self.losses: list[Any] = []

    def step(self) -> list[Any]:
        """Run a step; return timestamps before it, behind its backward pass and behind the update, and host seconds."""
        began, marks = time.perf_counter(), [processes.mark(self.device)]
        loss = self.loss(self.batches[len(self.losses) % len(self.batches)])
        loss.backward()
        marks.append(processes.mark(self.device))
        if self.optimizer is not None:
            self.optimizer.step()
        self.losses.append(loss.detach())
        return [*marks, processes.mark(self.device), time.perf_counter() - began]

    def run(self, steps: int) -> list[list[Any]]:
        """Return the timestamps of the steps of a run behind the first."""
        found = [self.step() for _ in range(steps)][1:]
        processes.wait(self.device)
        return found


def measure(arm: str, family: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the record of an arm."""
    import torch

    trained = Arm(arm, family, args)
    cuda, began = trained.device == "cuda", time.perf_counter()
    place = nullcontext() if arm == "compile" else processes.sharing()  # compiling is host work
    with processes.limited(place, args.limit):
        trained.step()
        processes.wait(trained.device)
    first = time.perf_counter() - began
    runs, memory = [], {}
    for number in range(1 if arm == "hf" else args.runs):
        with processes.limited(processes.alone(), args.limit / 2):
            if cuda and number == 0:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            runs.append(trained.run(args.steps))
            if cuda and number == 0:
                memory["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)

    def of(run: list[list[Any]], end: int) -> float:
        return statistics.median(processes.between(marks[0], marks[end]) for marks in run)

    best = min(runs, key=lambda run: of(run, 2))
    return {
        "step_ms": round(of(best, 2), 2),
        "forward_backward_ms": round(of(best, 1), 2),
        "runs_ms": [round(of(run, 2), 2) for run in runs],
        "host_ms": round(statistics.median(marks[3] for marks in best) * 1000, 2),
        "tokens_per_s": round(args.tokens / of(best, 2) * 1000),
        "peak_mib": None,
        **memory,
        "first_step_itself_s": round(first, 2),
        "losses": [round(float(loss), 5) for loss in trained.losses],
        "note": trained.note,
    }


def warm(arm: str, family: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run two steps."""
    args.limit = 600
    trained = Arm(arm, family, args)
    for _ in range(2):
        trained.step()
    processes.wait(trained.device)
    return {}


def _free() -> None:
    """Release what an arm leaves."""
    import torch

    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch._C._cuda_clearCublasWorkspaces()


def _tried(arm: str, family: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the record of an arm: what it measured, or why it could not."""
    import torch

    for left in reversed(range(_RETRIES if args.warm else 1)):
        try:
            return (warm if args.warm else measure)(arm, family, args)
        except ImportError as error:
            return {"absent": str(error)}
        except torch.OutOfMemoryError as error:
            failed = {"failed": str(error)}
        except Exception as error:  # the other arms are measured
            return {"failed": f"{type(error).__name__}: {error}"[-2000:]}
        _free()
        time.sleep(5 if left else 0)
    return failed


def one(args: argparse.Namespace) -> int:
    """Measure, or warm up, the arms of one family in this process."""
    began, family = time.perf_counter(), args.one
    processes.PATIENCE = args.limit
    from bench.e2e import arms

    arms.quiet()
    head = {
        "kind": "train", "model": family, "layers": args.layers, "tokens": args.tokens, "seq": args.seq, "cold": False,
    }  # fmt: skip
    path = args.out / f"train-{family}.json"
    result: dict[str, Any] = {**head, "environment": meta.environment(), "arms": {}}
    if args.goes_on and path.exists():
        earlier = json.loads(path.read_text())
        processes.check_source(earlier, path)
        result["arms"] = earlier["arms"]
    for arm in (arm for arm in args.arms.split(",") if arm not in result["arms"]):
        if not args.warm:  # for the process behind this one, should this one hang
            processes.write(path, {**result, "arms": {**result["arms"], arm: {"failed": "did not end"}}})
        result["arms"][arm] = _tried(arm, family, args)
        _free()
        print(f"{_line(family, arm, result['arms'][arm])}{time.perf_counter() - began:7.0f} s", flush=True)
        if not args.warm:
            result["gates"] = gates.gates(family, result["arms"])
            processes.write(path, result)
    return 0


def _line(family: str, arm: str, r: dict[str, Any]) -> str:
    if "step_ms" not in r:
        why = f"absent: {r['absent']}" if "absent" in r else f"failed: {r['failed'][-300:]}" if "failed" in r else "ran"
        return f"{family:17}{arm:11} {why}"
    runs = " ".join(f"{ms:.1f}" for ms in r["runs_ms"])
    return (
        f"{family:17}{arm:11}{r['step_ms']:8.1f} ms{r['peak_mib'] or 0:8} MiB  host {r['host_ms']:6.1f} ms  "
        f"first {r['first_step_itself_s']:5.1f} s  loss {r['losses'][0]:.4f}  runs {runs}"
    )


def _commands(args: argparse.Namespace) -> list[list[str]]:
    """Return the options of the processes, those that take longest first."""
    wanted = args.arms.split(",")
    groups = [wanted]
    if args.warm:
        ours = [arm for arm in wanted if arm not in ("compile", "hf", "liger")]
        groups = [[arm for arm in group if arm in wanted] for group in (["compile"], ours, ["liger"])]
    return [
        [f"--one={family}", f"--arms={','.join(group)}"] for group in groups for family in args.models.split(",")
        if group
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Start a process per family, or with ``--warm`` several; print lines as arms end, and the gates."""
    args = parser().parse_args(argv)
    if unknown := set(args.models.split(",")) - set(FAMILIES):
        parser().error(f"unknown model {', '.join(sorted(unknown))}; expected {', '.join(FAMILIES)}")
    if args.one:
        return one(args)
    args.out.mkdir(parents=True, exist_ok=True)
    passed = [word for word in (sys.argv[1:] if argv is None else argv) if word != "families"]
    with tempfile.TemporaryDirectory() as folder:
        lock = {} if args.warm else {processes.LOCK: str(Path(folder) / "lock")}
        waiting, running = _commands(args), []
        while waiting or running:
            while waiting and len(running) < args.jobs:
                more = waiting.pop(0)
                command = [sys.executable, "-m", "bench.e2e.families", *passed, *more]
                running.append((subprocess.Popen(command, env={**os.environ, **lock}), more))
            time.sleep(0.1)
            for process, more in [pair for pair in running if pair[0].poll() is not None]:
                running.remove((process, more))
                if process.returncode and not args.warm and len(more) < _PROCESSES + 2:  # the arms behind one that hung
                    waiting.append([*more, "--continue"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
