"""A template for a new policy; ``docs/how_to/new_model.md`` explains its parts.

Copy this file, or import ``Plain``, ``Fused``, ``calibrated``, ``compared`` and ``captured`` from it, and replace
``make_weights`` and ``Model``. ``Model`` calls only functions of ``ops``, so the same lines run in plain torch and in
rtkernels, and every tensor it passes to ``ops.stage`` is compared between the two.

    python examples/policy_template.py --device cpu
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import rtkernels as rk

ACTS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x, "relu": F.relu, "silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip


# ---- the functions of a model, in plain torch and in rtkernels ------------------------------------------------------


class Plain:
    """Plain torch: what results are compared with.

    Args:
        weights: By name: matrices ``[out, in]`` with an optional ``<name>_bias``, norms as vectors.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self.stages: dict[str, Tensor] | None = None

    def stage(self, name: str, x: Tensor) -> Tensor:
        """Return x, and keep it for `compared` while that runs the model."""
        if self.stages is not None:
            self.stages[name] = x.clone()
        return x

    def norm(
        self, x: Tensor, name: str | None = None, *, kind: str = "rms", feeds: str | None = None,
        residual: Tensor | None = None, gate: Tensor | None = None, scale: Tensor | None = None,
        shift: Tensor | None = None, eps: float = 1e-6,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the normalised rows of ``h = residual + gate * x``, and h.

        Args:
            x: ``[rows, width]``.
            name: Of the weight, or None.
            kind: "rms" or "layer".
            feeds: Name of the product that reads the result, which may want it quantised.
            residual: Added before normalisation.
            gate: Factor of x.
            scale: The result is multiplied by ``1 + scale``.
            shift: And this is added.
            eps: Added to the variance or mean square.
        """
        h = x.float() if gate is None else x.float() * gate.float()
        h = (h if residual is None else residual.float() + h).to(x.dtype)
        y = h.float() - (h.float().mean(-1, keepdim=True) if kind == "layer" else 0)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        y = y * self.weights[name].float() if name else y
        y = y + self.weights[f"{name}_bias"].float() if f"{name}_bias" in self.weights else y
        y = y if scale is None else y * (1 + scale.float())
        return (y if shift is None else y + shift.float()).to(x.dtype), h

    def linear(self, x: Tensor, name: str, act: str | None = None, add: Tensor | None = None) -> Tensor:
        """Return ``act(x @ weight.T + bias + add)``."""
        y = F.linear(x, self.weights[name], self.weights.get(f"{name}_bias"))
        return ACTS[act](y if add is None else y + add)

    def gated(self, x: Tensor, name: str, act: str) -> Tensor:
        """Return ``act(gate) * up``; the rows of the gate come first in the weight."""
        gate, up = self.linear(x, name).chunk(2, -1)
        return ACTS[act](gate) * up

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return ``[tokens, heads * width]`` for q, k and v of ``[tokens, heads, width]``."""
        q, k, v = (t[None].transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1).flatten(1)

    def euler_step(self, x: Tensor, v: Tensor, dt: float) -> Tensor:
        """Return ``x + dt * v``."""
        return x + dt * v.float()


class Fused(Plain):
    """The same in rtkernels.

    Args:
        weights: As for `Plain`.
        calibration: Records the inputs of products (without fp8), or knows their scales (with fp8).
        fp8: Names of products with fp8 operands: those whose input a norm writes, so that quantising needs no launch.
    """

    def __init__(
        self, weights: dict[str, Tensor], calibration: rk.Calibration | None = None, fp8: Iterable[str] = ()
    ) -> None:
        super().__init__(dict(weights))
        self.calibration, self.quants, self.scales = calibration, {}, {}
        for name in fp8:
            self.quants[name] = calibration.quant(name, weights[name].device)
            self.weights[name], self.scales[name] = rk.quantize_fp8(weights[name])

    def norm(
        self, x: Tensor, name: str | None = None, *, kind: str = "rms", feeds: str | None = None,
        residual: Tensor | None = None, **options: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        options = {"eps": 1e-6, "quant": self.quants.get(feeds), "residual": residual, **options}
        weight = self.weights[name] if name else None
        if kind == "layer":
            result = rk.layer_norm(x, weight, self.weights.get(f"{name}_bias"), **options)
        else:
            result = rk.rms_norm(x, weight, **options)
        y, h = (result, x) if isinstance(result, Tensor) else (result[0], x if residual is None else result[1])
        if self.calibration is not None and not self.quants and feeds is not None:
            self.calibration.observe(feeds, y)
        return y, h

    def _operands(self, x: Tensor, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bias = {"bias": self.weights.get(f"{name}_bias")}
        if name not in self.quants:
            return (x, self.weights[name]), bias
        scales = self.quants[name].scale, self.scales[name]
        return (x, self.weights[name], *scales), {**bias, "out_dtype": torch.bfloat16}

    def linear(self, x: Tensor, name: str, act: str | None = None, add: Tensor | None = None) -> Tensor:
        operands, options = self._operands(x, name)
        return rk.scaled_mm(*operands, act=act, add=add, **options)

    def gated(self, x: Tensor, name: str, act: str) -> Tensor:
        operands, options = self._operands(x, name)
        return rk.gated_mm(*operands, act=act, **options)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rk.attention(q[None], k[None], v[None])[0].flatten(1)

    def euler_step(self, x: Tensor, v: Tensor, dt: float) -> Tensor:
        return rk.euler_step(x, v, dt)


# ---- calibration, checks, one graph ---------------------------------------------------------------------------------


@torch.no_grad()
def calibrated(make: Callable[[Any], Any], weights: dict[str, Tensor], samples: Iterable[tuple]) -> rk.Calibration:
    """Return static scales for the inputs of products.

    Args:
        make: Builds the model from its functions: ``make(Fused(...))``.
        weights: Of the model.
        samples: Inputs that are typical; all steps of one call are one sample.
    """
    calibration = rk.Calibration()
    model = make(Fused(weights, calibration))
    for inputs in samples:
        model(*inputs)
        calibration.next_sample()
    calibration.freeze()
    return calibration


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of the angle between two tensors."""
    return torch.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0).item()


@torch.no_grad()
def compared(make: Callable[[Any], Any], plain: Plain, fused: Plain, inputs: tuple[Tensor, ...]) -> dict[str, float]:
    """Return the cosine of each stage with that of plain torch, in the order in which the model computes them."""
    plain.stages, fused.stages = {}, {}
    try:
        make(plain)(*inputs)
        make(fused)(*inputs)
        return {name: cosine(x, fused.stages[name]) for name, x in plain.stages.items()}
    finally:
        plain.stages = fused.stages = None


@torch.no_grad()
def captured(model: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    """Return a function that copies new inputs over `inputs` and replays the model as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles and loads every kernel
            model(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = model(*inputs)

    def replay(*given: Tensor) -> Tensor:
        for old, new in zip(inputs, given, strict=True):
            old.copy_(new)
        graph.replay()
        return result.clone()

    return replay


def report(make: Callable[[Any], Any], weights: dict[str, Tensor], inputs: tuple, fp8: list[str]) -> dict[str, Any]:
    """Print and return the cosines of all stages in bf16 and in fp8; on a GPU also run the model as one graph."""
    calibration = calibrated(make, weights, [inputs])
    ways = {"bf16": Fused(weights), "fp8": Fused(weights, calibration, fp8)}
    found = {way: compared(make, Plain(weights), ops, inputs) for way, ops in ways.items()}
    print(f"{'stage':20}" + "".join(f"{way:>10}" for way in found))
    for stage in found["bf16"]:
        print(f"{stage:20}" + "".join(f"{cosines[stage]:10.5f}" for cosines in found.values()))
    if inputs[0].is_cuda:
        model = make(ways["fp8"])
        run = captured(model, tuple(t.clone() for t in inputs))
        assert torch.equal(run(*inputs), model(*inputs))
    return found


# ---- replace from here ----------------------------------------------------------------------------------------------

WIDTH, HEADS, INNER, LAYERS, TOKENS, HORIZON, ACTION, STEPS = 64, 2, 128, 2, 10, 4, 8, 3
FP8 = [f"{i}.{name}" for i in range(LAYERS) for name in ("qkv", "gate_up")]


def make_weights(device: str) -> dict[str, Tensor]:
    """Return random weights; a front end for a checkpoint would fill the same names."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) / math.sqrt(columns)).to(device, torch.bfloat16)

    weights = {"context": matrix(2 * WIDTH, WIDTH), "in": matrix(WIDTH, ACTION), "out": matrix(ACTION, WIDTH)}
    for i in range(LAYERS):
        sizes = {"qkv": (3 * WIDTH, WIDTH), "merge": (WIDTH, WIDTH), "gate_up": (2 * INNER, WIDTH)}
        weights |= {f"{i}.{name}": matrix(*size) for name, size in sizes.items()}
        weights[f"{i}.down"] = matrix(WIDTH, INNER)
    weights["modulation"] = 0.3 * matrix(STEPS * LAYERS, 2 * WIDTH)  # scale and shift of each step and layer
    return weights


class Model:
    """Tokens of an observation and noise to actions."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        modulation = ops.weights["modulation"].view(STEPS, LAYERS, 2, WIDTH)
        self.scale, self.shift = modulation[:, :, 0], modulation[:, :, 1]

    def __call__(self, seen: Tensor, noise: Tensor) -> Tensor:
        """Return actions ``[HORIZON, ACTION]``."""
        ops = self.ops
        # Once per call: what does not depend on the step.
        context = ops.stage("context", ops.linear(seen, "context")).view(TOKENS, 2, HEADS, -1)
        actions = noise
        for step in range(STEPS):
            actions = self.step(actions, context, step)
        return ops.stage("moved", actions - noise) + noise

    def step(self, actions: Tensor, context: Tensor, step: int) -> Tensor:
        """Return the actions of the next step."""
        ops = self.ops
        x, h = ops.linear(actions.bfloat16(), "in"), None
        for i in range(LAYERS):
            modulation = {"scale": self.scale[step, i], "shift": self.shift[step, i]}
            y, h = ops.norm(x, feeds=f"{i}.qkv", residual=h, **modulation)
            q, k, v = ops.linear(y, f"{i}.qkv").view(HORIZON, 3, HEADS, -1).unbind(1)
            y = ops.attention(q, torch.cat([context[:, 0], k]), torch.cat([context[:, 1], v]))
            y, h = ops.norm(ops.linear(y, f"{i}.merge"), feeds=f"{i}.gate_up", residual=h, **modulation)
            x = ops.linear(ops.gated(y, f"{i}.gate_up", "silu"), f"{i}.down")
        y, h = ops.norm(x, residual=h)
        velocity = ops.stage(f"velocity {step}", ops.linear(y, "out"))
        return ops.euler_step(actions, velocity, -1 / STEPS)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Compare the model in rtkernels with plain torch and return the cosines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args(argv).device
    generator = torch.Generator().manual_seed(1)
    seen = torch.randn(TOKENS, WIDTH, generator=generator).to(device, torch.bfloat16)
    noise = torch.randn(HORIZON, ACTION, generator=generator).to(device)
    return report(Model, make_weights(device), (seen, noise), FP8)


if __name__ == "__main__":
    main()
