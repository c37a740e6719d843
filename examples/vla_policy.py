"""A vision-language-action policy of the shape of pi0.5 with random weights, as one CUDA graph.

SigLIP on three views, PaliGemma 2B on images and prompt, and an action expert of 300M with adaptive norms that denoises
a chunk of actions in ten steps, at batch 1. The same policy in plain torch (eager, and each layer compiled with
max-autotune), in rtkernels with bf16, and in rtkernels with fp8 products and static scales from a calibration run. All
of them are captured as one CUDA graph each.

    python examples/vla_policy.py                   # a GPU: the whole model, about 13 GB
    python examples/vla_policy.py --tiny            # a small one, on the CPU if there is no GPU
    python examples/vla_policy.py --compare none    # leaves out torch.compile, which takes minutes
    python examples/vla_policy.py --autotune expert # max-autotune for the layers of the expert only: less of that

Prints latency, memory, kernels of a denoising step, and how well the actions agree with those of plain torch (cosine of
what was added to the noise). Then latency of vision, prefix and expert apart, each captured alone, beside their floors:
the arithmetic of vision and prefix at the speed of an H200's tensor cores (780 TFLOP/s, 1400 in fp8), and the weights
and keys that the expert reads in every step at the rate of a copy in the same run. Products and attention are
``scaled_mm``, ``gated_mm`` and ``attention`` of rtkernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rtkernels as rk

sys.path.insert(0, str(Path(__file__).parent))
from vla_parts import OurMath, Policy, TorchMath
from vla_weights import TINY, Sizes, make_weights

WANTED = {"rtkernels bf16": 0.999, "rtkernels fp8": 0.99}


class Measured(NamedTuple):
    """Printed results of one way to run the policy; None where there is no GPU."""

    actions: Tensor
    milliseconds: float
    gigabytes: float | None
    kernels_per_step: int | None
    parts: dict[str, float]  # milliseconds of vision, prefix and expert


def inputs_of(sizes: Sizes, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, a prompt and noise."""
    generator = torch.Generator(device).manual_seed(1)
    images = torch.rand(sizes.views, sizes.image, sizes.image, 3, generator=generator, device=device) * 2 - 1
    prompt = torch.randint(sizes.vocabulary, (sizes.prompt,), generator=generator, device=device)
    noise = torch.randn(sizes.horizon, sizes.action, generator=generator, device=device)
    return images.bfloat16(), prompt, noise


def calibrated(sizes: Sizes, weights: dict[str, Any], device: str, inputs: tuple[Tensor, ...]) -> rk.Calibration:
    """Return static scales from one run in bf16; those of the expert are maxima over all steps."""
    calibration = rk.Calibration()
    Policy(sizes, weights, OurMath(sizes, device, calibration=calibration))(*inputs)
    calibration.freeze()
    with tempfile.TemporaryDirectory() as folder:  # as one would store them next to a checkpoint
        calibration.save(Path(folder) / "scales.json")
        loaded = rk.Calibration()
        loaded.load(Path(folder) / "scales.json", device=device)
    return loaded


def captured(policy: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """Return a function that replays a policy, or a part of it, on the memory of `inputs`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            policy(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actions = policy(*inputs)

    def replay() -> Any:
        graph.replay()
        return actions

    return replay


def kernels_of(function: Callable[[], Any]) -> int:
    """Return how many kernels a call launches."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    return sum(event.count for event in profiler.key_averages() if event.device_type == DeviceType.CUDA)


def median_milliseconds(function: Callable[[], Any], repeats: int, device: str) -> float:
    """Return the median time of a call, one at a time, as a robot calls it."""
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[len(times) // 2]


@torch.no_grad()
def parts_of(policy: Policy, inputs: tuple[Tensor, ...], repeats: int, device: str) -> dict[str, float]:
    """Return the milliseconds of vision, prefix and expert, on a GPU as a CUDA graph each."""
    images, prompt, noise = inputs
    found, seen, cache = {}, policy.see(images), None
    calls: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
        "vision": (policy.see, lambda: (images,)),
        "prefix": (policy.read, lambda: (seen, prompt)),
        "expert": (policy.denoise, lambda: (noise, cache)),
    }
    for name, (part, given) in calls.items():
        cache = policy.read(seen, prompt) if name == "expert" else None
        run = captured(part, given()) if device == "cuda" else lambda part=part, given=given: part(*given())
        run()
        found[name] = median_milliseconds(run, repeats, device)
    return found


def floors_of(policy: Policy, fp8: bool, rate: float) -> dict[str, float]:
    """Return the milliseconds that the parts need at least; `rate`: bytes per second of a copy."""
    sizes = policy.sizes
    speed = 1400e12 if fp8 else 780e12

    def matrices(part: str) -> list[Tensor]:
        layers = policy.layers[part]
        return [t for layer in layers for t in layer.values() if isinstance(t, Tensor) and t.dim() == 2]

    def attention(layers: int, heads: int, width: int, tokens: int, batch: int) -> int:
        return 4 * layers * batch * heads * width * tokens**2

    vision, prefix = (2 * sum(t.numel() for t in matrices(part)) for part in ("vision", "prefix"))
    last = policy.layers["prefix"][-1]
    prefix -= 2 * sum(last[name].numel() for name in ("out", "gate_up", "down"))  # nothing reads their results
    seen = vision * sizes.views * sizes.patches
    seen += attention(sizes.vision_layers, 1, sizes.vision_width, sizes.patches, sizes.views)
    read = prefix * sizes.prefix + attention(sizes.layers - 1, sizes.heads, sizes.head_dim, sizes.prefix, 1)
    step = sum(t.nbytes for t in matrices("expert")) + sizes.layers * sizes.tokens * 2 * 2 * sizes.head_dim
    return {"vision": seen / speed * 1e3, "prefix": read / speed * 1e3, "expert": sizes.steps * step / rate * 1e3}


def copy_rate(device: str) -> float:
    """Return the bytes that a copy reads and writes in a second."""
    a = torch.zeros(1 << (30 if device == "cuda" else 24), dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * a.nbytes / median_milliseconds(lambda: b.copy_(a), 5, device) * 1e3


@torch.no_grad()
def measured(policy: Policy, inputs: tuple[Tensor, ...], repeats: int, device: str) -> Measured:
    """Run a policy: on a GPU as one CUDA graph."""
    if device == "cpu":
        parts = parts_of(policy, inputs, repeats, device)
        taken = median_milliseconds(lambda: policy(*inputs), repeats, device)
        return Measured(policy(*inputs), taken, None, None, parts)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run = captured(policy, inputs)
    actions = run().clone()
    taken = median_milliseconds(run, repeats, device)
    gigabytes = (policy.nbytes() + torch.cuda.max_memory_allocated() - before) / 2**30
    images, prompt, noise = inputs
    cache = policy.read(policy.see(images), prompt)
    kernels = kernels_of(lambda: policy.step(noise, cache, 0))
    return Measured(actions, taken, gigabytes, kernels, parts_of(policy, inputs, repeats, device))


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of the angle between two tensors."""
    return torch.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0).item()


@torch.no_grad()
def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run all of them and return the cosines by name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU; without one, --tiny on the CPU")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--compare", choices=("torch.compile", "none"), default="torch.compile")
    parser.add_argument("--skip-compile", action="store_true", help="the same as --compare none")
    parser.add_argument("--autotune", default="vision,gemma,expert", help="layers that torch.compile tunes")
    parser.add_argument("--out", type=Path, help="also write what is printed to this file, as JSON")
    options = parser.parse_args(argv)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu" and not (options.tiny or options.device):
        parser.error("there is no GPU here, and a CPU would take very long: add --tiny, or --device cpu to wait for it")
    sizes = TINY if options.tiny else Sizes()
    weights, inputs = make_weights(sizes, device), inputs_of(sizes, device)
    calibration = calibrated(sizes, weights, device, inputs)

    ways: dict[str, Callable[[], Policy]] = {
        "torch eager": lambda: Policy(sizes, weights, TorchMath(sizes, device)),
        "rtkernels bf16": lambda: Policy(sizes, weights, OurMath(sizes, device)),
        "rtkernels fp8": lambda: Policy(sizes, weights, OurMath(sizes, device, True, calibration)),
        "torch.compile": lambda: Policy(sizes, weights, TorchMath(sizes, device), options.autotune.split(",")),
    }
    if options.skip_compile or options.compare == "none" or device == "cpu":
        del ways["torch.compile"]
    print(f"{sizes.prefix} tokens of prefix, {sizes.horizon} actions, {sizes.steps} steps, on {device}")
    print(f"{'':16}{'ms':>10}{'GB':>8}{'kernels/step':>14}{'cosine':>10}{'ready, s':>9}")
    found: dict[str, float] = {}
    rows: dict[str, dict[str, Any]] = {}
    wanted: Tensor | None = None
    rate, lines = copy_rate(device), [f"{'':16}{'vision':>18}{'prefix':>18}{'expert':>18}   ms (floor)"]
    for name, make in ways.items():
        start, policy = time.perf_counter(), make()
        result = measured(policy, inputs, options.repeats, device)
        floors = floors_of(policy, name == "rtkernels fp8", rate)
        cells = (f"{result.parts[part]:.2f} ({floors[part]:.2f})" for part in floors)
        lines.append(f"{name:16}" + "".join(f"{cell:>18}" for cell in cells))
        del policy
        seconds = time.perf_counter() - start
        moved = result.actions - inputs[-1]  # what the policy has added to the noise: the noise itself agrees
        wanted = moved if wanted is None else wanted
        found[name] = cosine(moved, wanted)
        memory = "-" if result.gigabytes is None else f"{result.gigabytes:.2f}"
        kernels = "-" if result.kernels_per_step is None else result.kernels_per_step
        print(
            f"{name:16}{result.milliseconds:10.2f}{memory:>8}{kernels:>14}{found[name]:10.5f}{seconds:9.0f}", flush=True
        )
        rows[name] = {
            "ms": result.milliseconds,
            "GB": result.gigabytes,
            "kernels": result.kernels_per_step,
            "cosine": found[name],
            "parts": result.parts,
            "floors": floors,
            "seconds": seconds,  # with compiling, tuning and measuring
        }
        if options.out:  # after each: compiling the last one takes minutes
            gpu = torch.cuda.get_device_name() if device == "cuda" else None
            about = {
                "gpu": gpu,
                "torch": torch.__version__,
                "autotune": options.autotune,
                "sizes": dataclasses.asdict(sizes),
            }
            options.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    print("\n".join(lines))
    for name, least in WANTED.items():
        if not found[name] >= least:
            print(f"{name}: cosine {found[name]:.5f} is below {least}", file=sys.stderr)
    return found


if __name__ == "__main__":
    main()
