"""Layers of real models in every way we know: a decoder layer, a head with its loss, a layer of experts.

    python -m bench.layers --out layers.json            # everything, at the sizes of the README, on a GPU
    python -m bench.layers dense --ways transformers,ours,ours_fused
    python -m bench.layers --tiny                       # small, on the CPU: only the errors mean something

A layer has a process of its own, in which all its ways are measured back to back, with the same weights and tokens.
Liger comes last: it patches the model's module for everything after it, and torch.compile would then compile Liger's
kernels. Each way is printed and written as soon as it is measured; one that takes longer than ``--limit`` ends the
process, and another one measures the ways behind it.

A row has the time of a step (forward and backward, the fastest of ``--runs``), the host's share of it, peak memory, and
the largest relative errors (Frobenius) of the output and of the gradients against the same layer in fp32. Ways: "eager"
(plain torch), "transformers" (the model's own code), "liger", "compile" (torch.compile of transformers' code), "ours"
(patched), "ours_fused" (with fused_layers, our attention and router), "fp8" and "fp8_fused" (the same with fp8
products), "fp8_saving" (with less memory), "fp8_fixed" (a later micro-batch: weights are already quantised). The
reference chooses experts by 16-bit logits, like the ways.
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
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rtkernels
from bench import meta
from bench.e2e import processes
from bench.layer_kinds import KINDS, Layer, Sizes
from bench.measure.layer import peak_mib, relative
from bench.measure.timing import CudaDevice, Timer

_MICROBATCHES = {"fp8_fixed"}  # weights are quantised one time for several steps, as between two of an optimizer
_WAITING = {("moe", "eager"), ("head", "liger")}  # they wait for the device
_PROCESSES = 4  # of a layer: each way that hangs ends one


def step(layer: Layer, leaf: Tensor, dy: Tensor | None) -> Tensor:
    """Run forward and backward, as between two other layers: x is the result of an operation. Return y."""
    leaf.grad = None
    layer.module.zero_grad(set_to_none=True)
    y = layer.call(leaf.clone())
    y.backward(dy if y.dim() else None)
    return y.detach()


def results(layer: Layer, leaf: Tensor, dy: Tensor | None) -> dict[str, Tensor]:
    """Return the output and all gradients."""
    y = step(layer, leaf, dy)
    return {"y": y, "x": leaf.grad} | {n: p.grad for n, p in layer.module.named_parameters() if p.grad is not None}


def inputs(sizes: Sizes, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return tokens and a gradient of the output, values of 16 bits."""
    generator = torch.Generator().manual_seed(1)
    shape = sizes["batch"], sizes["length"], sizes["hidden"]
    x, dy = (torch.randn(shape, generator=generator).bfloat16().to(device, dtype) for _ in range(2))
    return x.requires_grad_(), dy


class Bench:
    """The layers of one kind in this process, beside the same layer in fp32."""

    def __init__(self, kind: str, sizes: Sizes, args: argparse.Namespace) -> None:
        self.kind, self.sizes, self.args = kind, sizes, args
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        with processes.limited(processes.sharing(), args.limit):
            layer = KINDS[kind].build(sizes, self.device, torch.float32, "reference")
            self.wanted = {
                name: t.detach() for name, t in results(layer, *inputs(sizes, self.device, torch.float32)).items()
            }
            del layer
            _free(self.device)

    def measure(self, way: str) -> dict[str, Any]:
        """Return the row of one way."""
        cuda, args = self.device == "cuda", self.args
        before = torch.cuda.memory_allocated() if cuda else 0  # of which the reference is most
        leaf, dy = inputs(self.sizes, self.device, torch.bfloat16)
        with ExitStack() as stack:
            place = nullcontext() if way == "compile" else processes.sharing()  # compiling is host work
            with processes.limited(place, args.limit):
                layer = KINDS[self.kind].build(self.sizes, self.device, torch.bfloat16, way)
                if way in _MICROBATCHES:
                    stack.enter_context(rtkernels.nn.fixed_weights(layer.module))
                got = results(layer, leaf, dy)
                errors = {name: relative(got[name], t) for name, t in self.wanted.items()}
                del got
            row: dict[str, Any] = {
                "error_output": errors.pop("y"),
                "error_gradients": max(errors.values()),
                "worst": max(errors, key=errors.get),
            }
            call = partial(step, layer, leaf, dy)
            if cuda:
                row |= self._memory(call, before)
            return row | self._times(way, call)

    def _memory(self, call: Callable[[], Tensor], before: int) -> dict[str, Any]:
        with processes.limited(processes.alone(), self.args.limit):
            torch._C._cuda_clearCublasWorkspaces()  # of earlier layers: a layer that needs one allocates it again
            call()
            return {"peak_mib": round(peak_mib(call) - before / 2**20), "host_ms": round(_host_ms(call), 3)}

    def _times(self, way: str, call: Callable[[], Tensor]) -> dict[str, Any]:
        """Return the times of all runs; others may have the device in between."""
        runs, repeats = [], self.args.repeats
        for _ in range(self.args.runs):
            with processes.limited(processes.alone(), self.args.limit):
                if self.device == "cpu":
                    started = time.perf_counter()
                    call()
                    runs.append((time.perf_counter() - started) * 1000)
                    continue
                timer = Timer(CudaDevice(), iterations=repeats, batch=3)
                if (self.kind, way) in _WAITING:
                    timing = timer.measure_waiting([call], min(repeats, 3))
                else:
                    timing = timer.measure([call])
                runs.append(timing.us / 1000)
        return {"forward_and_backward_ms": round(min(runs), 3), "runs_ms": [round(ms, 3) for ms in runs]}


def _host_ms(call: Callable[[], Any]) -> float:
    """Return the host time of a step whose launches all fit into the queue."""
    samples = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        samples.append((time.perf_counter() - started) * 1000)
    torch.cuda.synchronize()
    return statistics.median(samples)


def _free(device: str) -> None:
    """Release what a way leaves, also memory of modules with reference cycles."""
    gc.collect()
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()


# ---- one process, one layer ----------------------------------------------------------------------------------------


def ways_of(kind: str, wanted: str | None) -> list[str]:
    """Return the ways of a layer in the order in which they are measured."""
    ways = [way for way in KINDS[kind].ways if wanted is None or way in wanted.split(",")]
    return sorted(ways, key=lambda way: way == "liger")


def one(kind: str, args: argparse.Namespace) -> None:
    """Measure the ways of a layer in this process; print and write each at once."""
    sizes = KINDS[kind].tiny if args.tiny else KINDS[kind].sizes
    rows: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    ways = [way for way in ways_of(kind, args.ways) if way not in rows]
    processes.PATIENCE = args.limit
    bench = Bench(kind, sizes, args) if ways else None
    for way in ways:
        processes.write(args.out, {**rows, way: {"failed": f"did not end within {args.limit:g} s"}})
        try:
            rows[way] = bench.measure(way)
        except ImportError as error:
            rows[way] = {"absent": str(error)}
        except Exception as error:  # the other ways are measured
            rows[way] = {"failed": f"{type(error).__name__}: {error}"[-2000:]}
        print(f"{kind:7}{_line(way, rows[way])}", flush=True)
        processes.write(args.out, rows)
        _free(bench.device)


def _line(way: str, row: dict[str, Any]) -> str:
    if "forward_and_backward_ms" not in row:
        return f"{way:14}{'absent: ' + row['absent'] if 'absent' in row else 'failed: ' + row['failed'][-300:]}"
    host = f"{row['host_ms']:.2f} ms" if "host_ms" in row else "-"
    peak = f"{row['peak_mib']} MiB" if "peak_mib" in row else "-"
    return (
        f"{way:14}{row['forward_and_backward_ms']:9.2f} ms{host:>11}{peak:>12}{row['error_output']:10.1e}"
        f"{row['error_gradients']:11.1e}  {row['worst']}"
    )


# ---- the command ---------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m bench.layers", description=__doc__.splitlines()[0])
    options.add_argument("kinds", nargs="*", metavar="layer", help="dense, head, moe; all when left out")
    options.add_argument("--ways", help="comma-separated; all of a layer when left out")
    options.add_argument("--repeats", type=int, default=20, help="samples of a run")
    options.add_argument("--runs", type=int, default=3, help="of each way; the fastest counts")
    options.add_argument("--limit", type=float, default=60, help="seconds for the first step, or a run, of a way")
    processes.add_options(options, "also write a file that `python -m bench record --layers` takes")
    return options


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run every layer in a process of its own; return and write what was measured."""
    args = parser().parse_args(arguments)
    if unknown := set(args.kinds) - set(KINDS):
        parser().error(f"unknown layer {', '.join(unknown)}; expected {', '.join(KINDS)}")
    if not torch.cuda.is_available() and not args.tiny:
        parser().error("no CUDA device here; --tiny runs on the CPU")
    if args.one:
        one(args.one, args)
        return {}
    kinds, layers = args.kinds or list(KINDS), _begun(args)
    print(f"{'layer':7}{'way':14}{'step':>12}{'host':>11}{'peak':>12}{'output':>10}{'gradients':>11}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: Path(folder) / f"{kind}.json" for kind in kinds}
        for kind, file in files.items():
            rows = layers.get(f"layer_{kind}", {}).get("rows", [{}])[0]
            known = {way: row for way, row in rows.items() if isinstance(row, dict) and "failed" not in row}
            file.write_text(json.dumps(known))
        for group in [kinds] if args.together else [[kind] for kind in kinds]:
            _run(group, files, args, partial(_gather, layers, files, args))
    return layers


def _run(kinds: list[str], files: dict[str, Path], args: argparse.Namespace, gather: Callable[[], None]) -> None:
    """Start a process for each layer, and another one if it ends early; gather results all the time."""
    lock = {processes.LOCK: str(files[kinds[0]].with_name("lock"))} if args.together else {}
    options = [f"--ways={args.ways}"] * bool(args.ways) + ["--tiny"] * args.tiny
    options += [f"--repeats={args.repeats}", f"--runs={args.runs}", f"--limit={args.limit:g}"]

    def start(kind: str) -> Any:
        command = [sys.executable, "-m", "bench.layers", *options, "--one", kind, "--out", str(files[kind])]
        return subprocess.Popen(command, env={**lock, **os.environ})

    running, left = {kind: start(kind) for kind in kinds}, dict.fromkeys(kinds, _PROCESSES)
    while running:
        time.sleep(0.05)
        gather()
        for kind, process in [pair for pair in running.items() if pair[1].poll() is not None]:
            del running[kind]
            left[kind] -= 1
            rows = json.loads(files[kind].read_text())
            if process.returncode and left[kind] and set(ways_of(kind, args.ways)) - set(rows):
                running[kind] = start(kind)
    gather()


def _gather(layers: dict[str, Any], files: dict[str, Path], args: argparse.Namespace) -> None:
    """Take over what processes have measured, and write it if it is more than before."""
    before = json.dumps(layers)
    for kind, file in files.items():
        sizes = KINDS[kind].tiny if args.tiny else KINDS[kind].sizes
        if rows := json.loads(file.read_text()):
            layers[f"layer_{kind}"] = {"command": f"python -m bench.layers {kind}", "rows": [{**sizes, **rows}]}
    if args.out and json.dumps(layers) != before:
        processes.write(args.out, {"environment": meta.environment(), "layers": layers})


def _begun(args: argparse.Namespace) -> dict[str, Any]:
    """Return the existing results of the file, if they are to be kept."""
    if not args.goes_on or args.out is None or not args.out.exists():
        return {}
    found = json.loads(args.out.read_text())
    processes.check_source(found, args.out)
    return found["layers"]


if __name__ == "__main__":
    main()
