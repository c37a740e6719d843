"""Layers of real models in every way we know: a decoder layer, a head with its loss, a layer of experts.

    python -m bench.layers --out layers.json            # everything, at the sizes of the README, on a GPU
    python -m bench.layers dense --ways transformers,ours,ours_fused
    python -m bench.layers --tiny                       # small, on the CPU: only the errors mean something

Every way gets the same weights and tokens, and a process of its own: Liger patches the model's module for everything
after it, and torch.compile would then compile Liger's kernels. A row has the time of a step (forward and backward), the
host's share of it, peak memory, and the largest relative errors (Frobenius) of the output and of the gradients against
the same layer in fp32. Ways: "eager" (plain torch), "transformers" (the model's own code), "liger", "compile"
(torch.compile of transformers' code), "ours" (patched), "ours_fused" (with fused_layers, our attention and router),
"fp8" and "fp8_fused" (the same with fp8 products), "fp8_saving" (with less memory), "fp8_fixed" (a later micro-batch:
weights are already quantised). The reference chooses experts by 16-bit logits, like the ways.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
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
_REFERENCES = "RTKERNELS_BENCH_REFERENCES"  # a folder, for processes of the same command


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


def measure(kind: str, way: str, sizes: Sizes, device: str, wanted: dict[str, Tensor], repeats: int) -> dict[str, Any]:
    """Return the row of one way."""
    compiled = way == "compile"
    leaf, dy = inputs(sizes, device, torch.bfloat16)
    with ExitStack() as stack:
        if not compiled:  # compiling is long work on the host alone
            stack.enter_context(processes.alone())
        layer = KINDS[kind].build(sizes, device, torch.bfloat16, way)
        if way in _MICROBATCHES:
            stack.enter_context(rtkernels.nn.fixed_weights(layer.module))
        got = results(layer, leaf, dy)
        errors = {name: relative(got[name], t.to(device)) for name, t in wanted.items()}
        del got
        row: dict[str, Any] = {
            "error_output": errors.pop("y"),
            "error_gradients": max(errors.values()),
            "worst": max(errors, key=errors.get),
        }
        with processes.alone() if compiled else nullcontext():
            row |= _timed(kind, way, partial(step, layer, leaf, dy), device, repeats)
        del layer, leaf, dy
        _free(device)
    return row


def _timed(kind: str, way: str, call: Callable[[], Tensor], device: str, repeats: int) -> dict[str, Any]:
    """Return peak memory, host time and time of a step."""
    if device == "cpu":
        started = time.perf_counter()
        call()
        return {"forward_and_backward_ms": round((time.perf_counter() - started) * 1000, 3)}
    torch._C._cuda_clearCublasWorkspaces()  # of earlier layers: a layer that needs one allocates it again
    call()
    row: dict[str, Any] = {"peak_mib": round(peak_mib(call)), "host_ms": round(_host_ms(call), 3)}
    timer = Timer(CudaDevice(), iterations=repeats, batch=3)  # its buffer is not the layer's memory
    if (kind, way) in (("moe", "eager"), ("head", "liger")):  # they wait for the device
        timing = timer.measure_waiting([call], min(repeats, 3))
    else:
        timing = timer.measure([call])
    return row | {"forward_and_backward_ms": round(timing.us / 1000, 3)}


def _free(device: str) -> None:
    """Release memory, also that of modules with reference cycles: several processes share the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def reference(kind: str, sizes: Sizes, device: str) -> dict[str, Tensor]:
    """Return output and gradients of the layer in fp32, on the host, computed by the first process that needs them."""
    folder = os.environ.get(_REFERENCES)
    path = Path(folder) / f"{kind}.pt" if folder else None
    with processes.alone():
        if path is not None and path.exists():
            return torch.load(path, mmap=True)
        layer = KINDS[kind].build(sizes, device, torch.float32, "reference")
        leaf, dy = inputs(sizes, device, torch.float32)
        outputs = {name: t.cpu() for name, t in results(layer, leaf, dy).items()}
        del layer, leaf, dy
        _free(device)
        if path is not None:
            torch.save(outputs, path)
        return outputs


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m bench.layers", description=__doc__.splitlines()[0])
    options.add_argument("kinds", nargs="*", metavar="layer", help="dense, head, moe; all when left out")
    options.add_argument("--ways", help="comma-separated; all of a layer when left out")
    options.add_argument("--repeats", type=int, default=20)
    processes.add_options(options, "also write a file that `python -m bench record --layers` takes")
    return options


def run_way(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the layers of one way in this process; return the row of each."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {}
    for kind in args.kinds or KINDS:
        if way not in KINDS[kind].ways:
            continue
        sizes = KINDS[kind].tiny if args.tiny else KINDS[kind].sizes
        try:
            found[kind] = measure(kind, way, sizes, device, reference(kind, sizes, device), args.repeats)
        except ImportError as error:
            found[kind] = {"absent": str(error)}
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run every way in a process of its own; print tables, and return and write what was measured."""
    args = parser().parse_args(arguments)
    if unknown := set(args.kinds) - set(KINDS):
        parser().error(f"unknown layer {', '.join(unknown)}; expected {', '.join(KINDS)}")
    if not torch.cuda.is_available() and not args.tiny:
        parser().error("no CUDA device here; --tiny runs on the CPU")
    if args.one:
        processes.one(lambda: run_way(args.one, args), args.out)
        return {}
    kinds = args.kinds or list(KINDS)
    ways = args.ways.split(",") if args.ways else list(dict.fromkeys(way for kind in kinds for way in KINDS[kind].ways))
    layers = _begun(args)
    ways = [way for way in ways if not all(_has(layers, kind, way) for kind in kinds if way in KINDS[kind].ways)]
    print(f"{'layer':7}{'way':14}{'step':>12}{'host':>11}{'peak':>12}{'output':>10}{'gradients':>11}")
    passed = sys.argv[1:] if arguments is None else arguments
    with _references() as environment:
        _collect(layers, kinds, args, processes.records("bench.layers", ways, passed, args.together, environment))
    return layers


def _begun(args: argparse.Namespace) -> dict[str, Any]:
    """Return the existing results of the file, if they are to be kept."""
    if not args.goes_on or args.out is None or not args.out.exists():
        return {}
    return json.loads(args.out.read_text())["layers"]


def _has(layers: dict[str, Any], kind: str, way: str) -> bool:
    """Return True if a way of a layer was measured."""
    rows = layers.get(f"layer_{kind}", {}).get("rows", [{}])
    return way in rows[0] and "failed" not in rows[0][way]


@contextmanager
def _references() -> Iterator[dict[str, str]]:
    """Return the environment that tells processes where one of them stores the references."""
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        yield {_REFERENCES: folder}


def _collect(layers: dict[str, Any], kinds: list[str], args: argparse.Namespace, records: Iterable[Any]) -> None:
    """Print what processes measured, add it to `layers`, and write that."""
    for way, record in records:
        for kind in (kind for kind in kinds if way in KINDS[kind].ways):
            sizes = KINDS[kind].tiny if args.tiny else KINDS[kind].sizes
            entry = {"command": f"python -m bench.layers {kind}", "rows": [dict(sizes)]}
            entry = layers.setdefault(f"layer_{kind}", entry)
            entry["rows"][0][way] = record.get(kind, record)  # for all layers: failed, or absent
            print(f"{kind:7}{_line(way, entry['rows'][0][way])}", flush=True)
        if args.out:  # way by way: what was measured stays if a later one fails
            processes.write(args.out, {"environment": meta.environment(), "layers": layers})


def _line(way: str, row: dict[str, Any]) -> str:
    if "forward_and_backward_ms" not in row:
        return f"{way:14}{'absent: ' + row['absent'] if 'absent' in row else 'failed: ' + row['failed'][-300:]}"
    host = f"{row['host_ms']:.2f} ms" if "host_ms" in row else "-"
    peak = f"{row['peak_mib']} MiB" if "peak_mib" in row else "-"
    return (
        f"{way:14}{row['forward_and_backward_ms']:9.2f} ms{host:>11}{peak:>12}{row['error_output']:10.1e}"
        f"{row['error_gradients']:11.1e}  {row['worst']}"
    )


if __name__ == "__main__":
    main()
