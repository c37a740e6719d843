"""Layers of fp8 products, forward and backward: step time and peak memory, compared with the same layer in bf16.

    python -m bench.measure.fp8_layer linear              # 8192 tokens, 4096 x 14336
    python -m bench.measure.fp8_layer moe                 # 8192 tokens, hidden 2048, 128 experts of 768, top 8

Ways of the linear layer: "fp8" (the weight quantised in every step), "fixed" (quantised in an earlier one, inside of
``fixed_weights``), "row" and "tensor" (other recipes), "main_grad" (the weight's gradient added in fp32), "bf16"
(torch.nn.Linear). Of the experts: "fp8", "fixed", "bf16" (torch._grouped_mm with the other functions of this library).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rtkernels
from bench import meta
from bench.measure.layer import peak_mib, step
from bench.measure.timing import CudaDevice, Timer
from rtkernels.nn import Fp8Linear, Fp8MoE, fixed_weights

Run = Callable[[Any, Tensor], Tensor]


def experts_in_bf16(layer: Fp8MoE, x: Tensor) -> Tensor:
    """Return the same layer with bf16 products."""
    routing = layer.route(x)
    rows = rtkernels.moe_rows(len(x) * layer.top_k, 1, layer.experts, 16)
    index = rtkernels.moe_index(routing.indices, layer.experts, multiple_of=16, rows=rows)
    ends = index.offsets[1:]
    hidden = torch._grouped_mm(rtkernels.moe_permute(x, index), layer.gate_up_weight.transpose(1, 2), offs=ends)
    y = torch._grouped_mm(rtkernels.glu(hidden), layer.down_weight.transpose(1, 2), offs=ends)
    return rtkernels.moe_unpermute(y, index, probs=routing.probs)


def linear_ways(sizes: dict[str, int], device: str) -> tuple[dict[str, nn.Module], dict[str, Run]]:
    """Return the layers and how each is run, by the name of the way."""
    bf16 = nn.Linear(sizes["hidden"], sizes["ffn"], bias=False, device=device, dtype=torch.bfloat16)
    recipes = {"fp8": "block", "fixed": "block", "row": "row", "tensor": "tensor", "main_grad": "block"}
    layers = {name: Fp8Linear.from_linear(bf16, recipe=recipe) for name, recipe in recipes.items()}
    other = layers["main_grad"]
    other.weight = nn.Parameter(bf16.weight.detach())
    other.weight.main_grad = torch.zeros_like(bf16.weight, dtype=torch.float32)
    layers["bf16"] = bf16
    return layers, dict.fromkeys(layers, lambda layer, x: layer(x))


def moe_ways(sizes: dict[str, int], device: str) -> tuple[dict[str, nn.Module], dict[str, Run]]:
    """Return the layer, the same for all ways, and how it is run."""
    names = ("hidden", "ffn", "experts", "top_k")
    layer = Fp8MoE(*(sizes[name] for name in names), device=device, dtype=torch.bfloat16)
    ways: dict[str, Run] = {"fp8": lambda m, x: m(x), "fixed": lambda m, x: m(x), "bf16": experts_in_bf16}
    return dict.fromkeys(ways, layer), ways


LAYERS = {
    "linear": (linear_ways, {"tokens": 8192, "hidden": 4096, "ffn": 14336}),
    "moe": (moe_ways, {"tokens": 8192, "hidden": 2048, "ffn": 768, "experts": 128, "top_k": 8}),
}


def measured(
    kind: str, sizes: dict[str, int], repeats: int, device: str = "cuda"
) -> Iterator[tuple[str, float, float]]:
    """Yield name, step time in ms and peak memory in MiB of each way."""
    torch.manual_seed(0)
    layers, ways = LAYERS[kind][0](sizes, device)
    leaf = torch.randn(sizes["tokens"], sizes["hidden"], device=device).bfloat16().requires_grad_()
    columns = sizes["ffn"] if kind == "linear" else sizes["hidden"]
    dy = torch.randn(sizes["tokens"], columns, device=device).bfloat16()
    timer = Timer(CudaDevice(), iterations=repeats, batch=5)
    for name, run in ways.items():
        with fixed_weights(layers[name]) if name == "fixed" else nullcontext():
            call = partial(step, run, layers[name], leaf, dy)
            for _ in range(2):
                call()
            peak = peak_mib(call)
            yield name, timer.measure([call]).us / 1000, peak


def main(arguments: list[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layer", choices=LAYERS)
    for name in ("tokens", "hidden", "ffn", "experts", "top_k"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="also write a file that `python -m bench record --layers` takes")
    args = vars(parser.parse_args(arguments))
    kind, repeats, out = args.pop("layer"), args.pop("repeats"), args.pop("out")
    sizes = {name: args[name] or default for name, default in LAYERS[kind][1].items()}
    row: dict[str, Any] = dict(sizes)
    print(f"{'':12}{'step':>12}{'peak memory':>16}")
    for name, ms, memory in measured(kind, sizes, repeats):
        print(f"{name:12}{ms:9.2f} ms{memory:12.0f} MiB", flush=True)
        row[name] = {"forward_and_backward_ms": round(ms, 2), "peak_mib": round(memory)}
    if out:
        layer = {f"fp8_{kind}": {"command": f"python -m bench.measure.fp8_layer {kind}", "rows": [row]}}
        out.write_text(json.dumps({"environment": meta.environment(), "layers": layer}))


if __name__ == "__main__":
    main()
