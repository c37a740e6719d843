"""The action head of GR00T N1.5 with random weights: a policy written by following ``docs/how_to/new_model.md``.

Tokens of a vision-language backbone pass a layer norm and a few layers of self-attention, once per call. A diffusion
transformer (DiT) then denoises a chunk of actions in four steps: its layers attend in turn to the backbone's tokens and
to their own, with layer norms that are modulated by the time of the step. The backbone (Eagle: SigLIP 2 and Qwen3) is
not part of this example. Encoders and the decoder of actions are those of one embodiment.

    python examples/groot_policy.py                          # a GPU: the sizes of GR00T N1.5
    python examples/groot_policy.py --tiny --device cpu      # seconds

Prints the cosine of every stage with that of plain torch. ``groot_checkpoint.py`` loads a checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from policy_template import report


@dataclass(frozen=True)
class GrootSizes:
    """The sizes of GR00T N1.5."""

    vl_width: int = 2048
    vl_layers: int = 4
    vl_heads: int = 32
    width: int = 1536
    layers: int = 16  # even ones attend to the backbone's tokens, odd ones to their own
    heads: int = 32
    hidden: int = 1024  # of the encoder of the state and of the decoder
    state: int = 64
    action: int = 32
    horizon: int = 16
    future: int = 32  # learned tokens between the state and the actions
    positions: int = 1024
    embodiments: int = 32
    steps: int = 4
    vl_tokens: int = 300  # depends on images and prompt

    @property
    def tokens(self) -> int:
        """Tokens of the DiT."""
        return 1 + self.future + self.horizon

    @property
    def crossing(self) -> int:
        """Layers that attend to the backbone's tokens."""
        return (self.layers + 1) // 2


TINY = GrootSizes(32, 2, 2, 48, 4, 3, 40, 16, 8, 4, 3, 10, 2, 3, 9)


def fp8_products(sizes: GrootSizes) -> list[str]:
    """Return the products whose input a norm writes."""
    names = [f"vl.{i}.{name}" for i in range(sizes.vl_layers) for name in ("qkv", "up")]
    for i in range(sizes.layers):
        names += [f"{i}.{'qkv' if i % 2 else 'q'}", f"{i}.up"]
    return names


def with_steps(weights: dict[str, Tensor], sizes: GrootSizes) -> dict[str, Tensor]:
    """Return weights with a view for each step of what depends on its time: one matrix with a bias for each step."""
    for step in range(sizes.steps):
        weights[f"mix.{step}"], weights[f"mix.{step}_bias"] = weights["mix"], weights["mix_biases"][step]
    return weights


def make_weights(sizes: GrootSizes, device: str) -> dict[str, Tensor]:
    """Return random weights in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {}

    def random(*shape: int, gain: float = 1.0) -> Tensor:
        return (gain * torch.randn(shape, generator=generator)).to(device, torch.bfloat16)

    def product(name: str, rows: int, columns: int) -> None:
        weights[name], weights[f"{name}_bias"] = random(rows, columns, gain=columns**-0.5), random(rows, gain=0.1)

    def norm(name: str, width: int) -> None:
        weights[name], weights[f"{name}_bias"] = 1 + random(width, gain=0.1), random(width, gain=0.1)

    width, vl = sizes.width, sizes.vl_width
    norm("vl_norm", vl)
    for i in range(sizes.vl_layers):
        norm(f"vl.{i}.norm1", vl)
        norm(f"vl.{i}.norm2", vl)
        for name, rows, columns in (("qkv", 3 * vl, vl), ("out", vl, vl), ("up", 4 * vl, vl), ("down", vl, 4 * vl)):
            product(f"vl.{i}.{name}", rows, columns)
    product("cross", 2 * sizes.crossing * width, vl)
    for i in range(sizes.layers):
        product(f"{i}.qkv" if i % 2 else f"{i}.q", 3 * width if i % 2 else width, width)
        for name, rows, columns in (("out", width, width), ("up", 4 * width, width), ("down", width, 4 * width)):
            product(f"{i}.{name}", rows, columns)
    product("state1", sizes.hidden, sizes.state)
    product("state2", width, sizes.hidden)
    product("action", width, sizes.action)
    weights["mix"], weights["mix_biases"] = random(width, width, gain=width**-0.5), random(sizes.steps, width, gain=0.3)
    product("mixed", width, width)
    product("project", sizes.hidden, width)
    product("decode1", sizes.hidden, sizes.hidden)
    product("decode2", sizes.action, sizes.hidden)
    weights["future"], weights["position"] = random(sizes.future, width), random(sizes.horizon, width)
    weights["modulation"] = random(sizes.steps, sizes.layers, 2, width, gain=0.3)  # scale, shift
    weights["last_modulation"] = random(sizes.steps, 2, width, gain=0.3)
    return with_steps(weights, sizes)


class Groot:
    """Tokens of a backbone, the robot's state and noise to a chunk of actions.

    Args:
        sizes: Of the model.
        ops: ``Plain`` or ``Fused`` of the template.
    """

    def __init__(self, sizes: GrootSizes, ops: Any) -> None:
        self.sizes, self.ops = sizes, ops

    def __call__(self, seen: Tensor, state: Tensor, noise: Tensor) -> Tensor:
        """Return actions ``[horizon, action]``, float32.

        Args:
            seen: ``[vl_tokens, vl_width]``, bfloat16, what the backbone returned.
            state: ``[state]``, padded with zeros.
            noise: ``[horizon, action]``, float32.
        """
        ops, actions = self.ops, noise
        crossed = self.read(seen)
        known = ops.linear(ops.linear(state[None].bfloat16(), "state1", "relu"), "state2")
        known = ops.stage("state", torch.cat([known, ops.weights["future"]]))
        for step in range(self.sizes.steps):
            actions = self.step(actions, known, crossed, step)
        return ops.stage("moved", actions - noise) + noise

    def read(self, seen: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values of the backbone's tokens for all layers that attend to them, from one product."""
        sizes, ops = self.sizes, self.ops
        x, h = ops.norm(seen, "vl_norm", kind="layer", eps=1e-5)[0], None
        for i in range(sizes.vl_layers):
            at = f"vl.{i}"
            y, h = ops.norm(x, f"{at}.norm1", kind="layer", eps=1e-5, residual=h, feeds=f"{at}.qkv")
            qkv = ops.linear(y, f"{at}.qkv").view(len(x), 3, sizes.vl_heads, -1)
            x = ops.linear(ops.attention(*qkv.unbind(1)), f"{at}.out")
            y, h = ops.norm(x, f"{at}.norm2", kind="layer", eps=1e-5, residual=h, feeds=f"{at}.up")
            y = ops.linear(y, f"{at}.up", "gelu_tanh")
            last = i == sizes.vl_layers - 1  # no norm follows: the product adds the residual
            x = ops.linear(y, f"{at}.down", add=h if last else None)
        x = ops.stage("context", x)
        return ops.linear(x, "cross").view(len(x), 2 * sizes.crossing, sizes.heads, -1).unbind(1)

    def step(self, actions: Tensor, known: Tensor, crossed: tuple[Tensor, ...], step: int) -> Tensor:
        """Return the actions of the next step."""
        sizes, ops, weights = self.sizes, self.ops, self.ops.weights
        x = ops.linear(ops.linear(actions.bfloat16(), "action"), f"mix.{step}", "silu")
        x = ops.linear(x, "mixed", add=weights["position"])
        x, h = torch.cat([known, x]), None
        for i in range(sizes.layers):
            x, h = self.layer(x, h, i, weights["modulation"][step, i], crossed)
        x, h = x[-sizes.horizon :], h[-sizes.horizon :]
        scale, shift = weights["last_modulation"][step]
        y, _ = ops.norm(x, kind="layer", residual=h, scale=scale, shift=shift)
        velocity = ops.linear(ops.linear(ops.linear(y, "project"), "decode1", "relu"), "decode2")
        return ops.euler_step(actions, ops.stage(f"velocity {step}", velocity), 1 / sizes.steps)

    def layer(
        self, x: Tensor, h: Tensor | None, i: int, modulation: Tensor, crossed: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return what the layer adds, and the residual so far."""
        sizes, ops = self.sizes, self.ops
        name, (scale, shift) = f"{i}.qkv" if i % 2 else f"{i}.q", modulation
        y, h = ops.norm(x, kind="layer", eps=1e-5, residual=h, scale=scale, shift=shift, feeds=name)
        q, *kv = ops.linear(y, name).view(sizes.tokens, -1, sizes.heads, sizes.width // sizes.heads).unbind(1)
        k, v = kv or crossed[i : i + 2]  # layers 0, 2, 4, ... read pairs 0, 1, 2, ...
        x = ops.linear(ops.attention(q, k, v), f"{i}.out")
        y, h = ops.norm(x, kind="layer", eps=1e-5, residual=h, feeds=f"{i}.up")
        return ops.linear(ops.linear(y, f"{i}.up", "gelu_tanh"), f"{i}.down"), h


def inputs_of(sizes: GrootSizes, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens of a backbone, a state and noise."""
    generator = torch.Generator().manual_seed(1)
    seen = torch.randn(sizes.vl_tokens, sizes.vl_width, generator=generator).bfloat16()
    state, noise = (
        torch.randn(shape, generator=generator) for shape in ((sizes.state,), (sizes.horizon, sizes.action))
    )
    return seen.to(device), state.to(device), noise.to(device)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Compare the policy in rtkernels with plain torch and return the cosines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    if options.device == "cpu" and not options.tiny:
        parser.error("a CPU would take long for the whole model: add --tiny")
    sizes = TINY if options.tiny else GrootSizes()
    weights, inputs = make_weights(sizes, options.device), inputs_of(sizes, options.device)
    return report(partial(Groot, sizes), weights, inputs, fp8_products(sizes))


if __name__ == "__main__":
    main()
