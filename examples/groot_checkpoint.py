"""Published checkpoints of GR00T N1.5 as weights of the policy in ``groot_policy.py``.

    weights = groot_weights(read("GR00T-N1.5-3B"), GrootSizes(), "cuda", embodiment=31)
    policy = Groot(sizes, Fused(weights))

The names are those of ``nvidia/GR00T-N1.5-3B``, below ``action_head.``. The loader takes the encoders and the decoder
of one embodiment, joins q, k and v of layers that attend to their own tokens, joins k and v of all other layers, and
computes for every step what follows from its time. One ``CheckpointError`` names all tensors that do not fit.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from groot_policy import GrootSizes, with_steps
from vla_checkpoints import Take, checked, stored

NOT_READ = re.compile(r"backbone\.")
Pair = tuple[Tensor, Tensor]


def sinusoids(times: Tensor, half: int, last: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return sines and cosines ``[times, half]``, with frequencies from 1 to 10000 ** (-(half - 1) / last)."""
    angles = times[:, None] * 10000.0 ** -(torch.arange(half, dtype=torch.float64) / last)
    return angles.sin().float().to(device), angles.cos().float().to(device)


class Builder:
    """Fills the weights of ``Groot`` from tensors that ``take(name, *shape)`` gives."""

    def __init__(self, take: Take, sizes: GrootSizes, embodiment: int) -> None:
        self.take, self.sizes, self.embodiment = take, sizes, embodiment
        self.weights: dict[str, Any] = {}

    def given(self, name: str, *shape: int) -> Pair:
        """Return a weight and its bias."""
        return self.take(f"action_head.{name}.weight", *shape), self.take(f"action_head.{name}.bias", shape[0])

    def own(self, name: str, columns: int, rows: int) -> Pair:
        """Return those of the embodiment; files store ``[embodiment, in, out]``."""
        matrix = self.take(f"action_head.{name}.W", self.sizes.embodiments, columns, rows)[self.embodiment].t()
        return matrix, self.take(f"action_head.{name}.b", self.sizes.embodiments, rows)[self.embodiment]

    def add(self, to: str, *parts: Pair) -> None:
        """Store weights and biases that are joined."""
        self.weights[to] = torch.cat([weight for weight, _ in parts])
        self.weights[f"{to}_bias"] = torch.cat([bias for _, bias in parts])

    def block(self, at: str, to: str, width: int) -> None:
        """Store all of a block but its norms, queries, keys and values."""
        self.add(f"{to}.out", self.given(f"{at}.attn1.to_out.0", width, width))
        self.add(f"{to}.up", self.given(f"{at}.ff.net.0.proj", 4 * width, width))
        self.add(f"{to}.down", self.given(f"{at}.ff.net.2", width, 4 * width))

    def context(self) -> None:
        """Store what reads the backbone's tokens."""
        vl = self.sizes.vl_width
        self.add("vl_norm", self.given("vlln", vl))
        for i in range(self.sizes.vl_layers):
            at = f"vl_self_attention.transformer_blocks.{i}"
            self.add(f"vl.{i}.norm1", self.given(f"{at}.norm1", vl))
            self.add(f"vl.{i}.norm2", self.given(f"{at}.norm3", vl))
            self.add(f"vl.{i}.qkv", *(self.given(f"{at}.attn1.to_{name}", vl, vl) for name in "qkv"))
            self.block(at, f"vl.{i}", vl)

    def transformer(self, times: Tensor) -> None:
        """Store the DiT."""
        sizes, width = self.sizes, self.sizes.width
        sin, cos = sinusoids(times, 128, 127, self.weights["vl_norm"].device)
        embedder = "model.timestep_encoder.timestep_embedder"
        time = F.silu(F.linear(torch.cat([cos, sin], 1), *self.given(f"{embedder}.linear_1", width, 256)))
        time = F.silu(F.linear(time, *self.given(f"{embedder}.linear_2", width, width)))
        crossed, modulation = [], []
        for i in range(sizes.layers):
            at = f"model.transformer_blocks.{i}"
            columns = {"q": width, "k": width if i % 2 else sizes.vl_width, "v": width if i % 2 else sizes.vl_width}
            q, k, v = (self.given(f"{at}.attn1.to_{name}", width, n) for name, n in columns.items())
            if i % 2:
                self.add(f"{i}.qkv", q, k, v)
            else:
                self.add(f"{i}.q", q)
                crossed += [k, v]
            self.block(at, str(i), width)
            modulation.append(F.linear(time, *self.given(f"{at}.norm1.linear", 2 * width, width)).view(-1, 2, width))
        self.add("cross", *crossed)
        self.weights["modulation"] = torch.stack(modulation, 1)
        last = F.linear(time, *self.given("model.proj_out_1", 2 * width, width)).view(-1, 2, width)
        self.weights["last_modulation"] = last.flip(1)  # files have shift before scale here, and only here
        self.add("project", self.given("model.proj_out_2", sizes.hidden, width))

    def ends(self, times: Tensor) -> None:
        """Store encoders, decoder and learned tokens."""
        sizes, width, hidden, weights = self.sizes, self.sizes.width, self.sizes.hidden, self.weights
        self.add("state1", self.own("state_encoder.layer1", sizes.state, hidden))
        self.add("state2", self.own("state_encoder.layer2", hidden, width))
        self.add("action", self.own("action_encoder.W1", sizes.action, width))
        mix, bias = self.own("action_encoder.W2", 2 * width, width)
        time = torch.cat(sinusoids(times, width // 2, width // 2, mix.device), 1)
        # The product of [actions, time] with a matrix is one with each half, and that of the time is known.
        weights["mix"], weights["mix_biases"] = mix[:, :width], F.linear(time, mix[:, width:], bias)
        self.add("mixed", self.own("action_encoder.W3", width, width))
        self.add("decode1", self.own("action_decoder.layer1", hidden, hidden))
        self.add("decode2", self.own("action_decoder.layer2", hidden, sizes.action))
        weights["future"] = self.take("action_head.future_tokens.weight", sizes.future, width)
        position = self.take("action_head.position_embedding.weight", sizes.positions, width)
        weights["position"] = position[: sizes.horizon]


def groot_weights(
    tensors: Mapping[str, Tensor], sizes: GrootSizes, device: str = "cpu", embodiment: int = 0
) -> dict[str, Any]:
    """Return the weights of ``Groot`` from a checkpoint of GR00T N1.5; those of its backbone are not read.

    Args:
        tensors: What ``vla_checkpoints.read`` gave.
        sizes: Of the model.
        device: Where weights are stored.
        embodiment: Which encoders of states and actions, and which decoder.
    """
    if not 0 <= embodiment < sizes.embodiments:
        raise ValueError(f"embodiment is {embodiment}; expected 0 to {sizes.embodiments - 1}")

    def build(take: Take) -> dict[str, Any]:
        builder = Builder(take, sizes, embodiment)
        times = torch.tensor([int(step / sizes.steps * 1000) for step in range(sizes.steps)], dtype=torch.float64)
        builder.context()
        builder.transformer(times)
        builder.ends(times)
        return builder.weights

    return with_steps(stored(checked(build, tensors, NOT_READ), device), sizes)
