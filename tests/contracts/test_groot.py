"""The action head of GR00T N1.5 agrees with plain torch, and loads checkpoints by their published names."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import groot_policy
import vla_checkpoints as front
from groot_checkpoint import groot_weights
from groot_policy import TINY, Groot, GrootSizes, inputs_of
from policy_template import Fused, Plain, cosine

PLACES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def published(s: GrootSizes) -> dict[str, Tensor]:
    """Return random tensors with the names and dimensions of a file of GR00T N1.5."""
    generator = torch.Generator().manual_seed(3)
    found: dict[str, Tensor] = {"backbone.eagle_model.mlp1.0.weight": torch.zeros(1)}

    def add(name: str, *shape: int, around: float = 0.0) -> None:
        fan = shape[1] if len(shape) > 1 else 100
        found[f"action_head.{name}.weight"] = around + torch.randn(shape, generator=generator) / math.sqrt(fan)
        found[f"action_head.{name}.bias"] = 0.1 * torch.randn(shape[0], generator=generator)

    def own(name: str, columns: int, rows: int) -> None:
        weight = torch.randn(s.embodiments, columns, rows, generator=generator) / math.sqrt(columns)
        found[f"action_head.{name}.W"] = weight
        found[f"action_head.{name}.b"] = 0.1 * torch.randn(s.embodiments, rows, generator=generator)

    def block(at: str, w: int, from_width: int) -> None:
        add(f"{at}.attn1.to_q", w, w)
        add(f"{at}.attn1.to_k", w, from_width)
        add(f"{at}.attn1.to_v", w, from_width)
        add(f"{at}.attn1.to_out.0", w, w)
        add(f"{at}.ff.net.0.proj", 4 * w, w)
        add(f"{at}.ff.net.2", w, 4 * w)

    add("vlln", s.vl_width, around=1.0)
    for i in range(s.vl_layers):
        at = f"vl_self_attention.transformer_blocks.{i}"
        add(f"{at}.norm1", s.vl_width, around=1.0)
        add(f"{at}.norm3", s.vl_width, around=1.0)
        block(at, s.vl_width, s.vl_width)
    for i in range(s.layers):
        at = f"model.transformer_blocks.{i}"
        add(f"{at}.norm1.linear", 2 * s.width, s.width)
        block(at, s.width, s.width if i % 2 else s.vl_width)
    add("model.timestep_encoder.timestep_embedder.linear_1", s.width, 256)
    add("model.timestep_encoder.timestep_embedder.linear_2", s.width, s.width)
    add("model.proj_out_1", 2 * s.width, s.width)
    add("model.proj_out_2", s.hidden, s.width)
    own("state_encoder.layer1", s.state, s.hidden)
    own("state_encoder.layer2", s.hidden, s.width)
    own("action_encoder.W1", s.action, s.width)
    own("action_encoder.W2", 2 * s.width, s.width)
    own("action_encoder.W3", s.width, s.width)
    own("action_decoder.layer1", s.hidden, s.hidden)
    own("action_decoder.layer2", s.hidden, s.action)
    found["action_head.future_tokens.weight"] = torch.randn(s.future, s.width, generator=generator)
    found["action_head.position_embedding.weight"] = torch.randn(s.positions, s.width, generator=generator)
    return found


class Reference:
    """The same in plain torch and float32, from tensors by their published names."""

    def __init__(self, tensors: dict[str, Tensor], sizes: GrootSizes, embodiment: int) -> None:
        self.w, self.sizes, self.embodiment = tensors, sizes, embodiment

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"action_head.{name}.weight"], self.w[f"action_head.{name}.bias"])

    def own(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"action_head.{name}.W"][self.embodiment] + self.w[f"action_head.{name}.b"][self.embodiment]

    def norm(self, x: Tensor, name: str | None = None, eps: float = 1e-5) -> Tensor:
        affine = [self.w[f"action_head.{name}.{part}"] for part in ("weight", "bias")] if name else [None, None]
        return F.layer_norm(x, x.shape[-1:], *affine, eps)

    def attend(self, x: Tensor, other: Tensor, at: str, heads: int) -> Tensor:
        given = {"q": x, "k": other, "v": other}
        q, k, v = (self.linear(given[n], f"{at}.to_{n}").unflatten(-1, (heads, -1)).transpose(0, 1) for n in "qkv")
        return self.linear(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1), f"{at}.to_out.0")

    def feed(self, x: Tensor, at: str) -> Tensor:
        return self.linear(F.gelu(self.linear(x, f"{at}.net.0.proj"), approximate="tanh"), f"{at}.net.2")

    def __call__(self, seen: Tensor, state: Tensor, noise: Tensor) -> Tensor:
        s = self.sizes
        vl = self.norm(seen.float(), "vlln")
        for i in range(s.vl_layers):
            at = f"vl_self_attention.transformer_blocks.{i}"
            y = self.norm(vl, f"{at}.norm1")
            vl = vl + self.attend(y, y, f"{at}.attn1", s.vl_heads)
            vl = vl + self.feed(self.norm(vl, f"{at}.norm3"), f"{at}.ff")
        robot = self.own(F.relu(self.own(state[None], "state_encoder.layer1")), "state_encoder.layer2")
        actions = noise
        for step in range(s.steps):
            time = int(step / s.steps * 1000)
            angles = time * torch.exp(-math.log(10000) * torch.arange(128) / 127)
            embedder = "model.timestep_encoder.timestep_embedder"
            embedded = F.silu(self.linear(torch.cat([angles.cos(), angles.sin()]), f"{embedder}.linear_1"))
            condition = F.silu(self.linear(embedded, f"{embedder}.linear_2"))
            half = s.width // 2
            angles = time * torch.exp(-math.log(10000) * torch.arange(half) / half)
            x = self.own(actions, "action_encoder.W1")
            x = torch.cat([x, torch.cat([angles.sin(), angles.cos()]).expand_as(x)], -1)
            x = self.own(F.silu(self.own(x, "action_encoder.W2")), "action_encoder.W3")
            x = x + self.w["action_head.position_embedding.weight"][: s.horizon]
            x = torch.cat([robot, self.w["action_head.future_tokens.weight"], x])
            for i in range(s.layers):
                at = f"model.transformer_blocks.{i}"
                scale, shift = self.linear(condition, f"{at}.norm1.linear").chunk(2)
                y = self.norm(x) * (1 + scale) + shift
                x = x + self.attend(y, y if i % 2 else vl, f"{at}.attn1", s.heads)
                x = x + self.feed(self.norm(x), f"{at}.ff")
            shift, scale = self.linear(condition, "model.proj_out_1").chunk(2)
            x = self.linear(self.norm(x, eps=1e-6) * (1 + scale) + shift, "model.proj_out_2")
            velocity = self.own(F.relu(self.own(x, "action_decoder.layer1")), "action_decoder.layer2")
            actions = actions + velocity[-s.horizon :] / s.steps
        return actions


@pytest.mark.parametrize("place", PLACES)
def test_every_stage_agrees_with_plain_torch(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = groot_policy.main(["--tiny", "--device", place])
    assert list(found["bf16"]) == ["context", "state", "velocity 0", "velocity 1", "velocity 2", "moved"]
    assert min(found["bf16"].values()) > 0.999 and min(found["fp8"].values()) > 0.99, found
    assert "velocity 2" in capsys.readouterr().out


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("embodiment", (0, 1))
@torch.no_grad()
def test_a_checkpoint_gives_the_actions_of_plain_torch(embodiment: int, place: str, tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16().float() for name, tensor in published(TINY).items()}
    torch.save(tensors, tmp_path / "model.pt")
    weights = groot_weights(front.read(tmp_path / "model.pt"), TINY, place, embodiment)
    seen, state, noise = inputs_of(TINY, "cpu")
    expected = Reference(tensors, TINY, embodiment)(seen, state, noise) - noise
    for ops in (Plain, Fused):
        moved = Groot(TINY, ops(weights))(*inputs_of(TINY, place)).cpu() - noise
        assert cosine(moved, expected) > 0.999
        assert moved.norm() / expected.norm() == pytest.approx(1, rel=0.02)


def test_one_error_names_every_tensor_that_does_not_fit() -> None:
    tensors = published(TINY)
    del tensors["action_head.vlln.bias"]
    tensors["action_head.mask_token"] = torch.zeros(1, 1, 4)
    tensors["action_head.action_encoder.W1.b"] = torch.zeros(3)
    with pytest.raises(front.CheckpointError) as caught:
        groot_weights(tensors, TINY)
    assert str(caught.value).splitlines()[1:] == [
        "  missing: action_head.vlln.bias [32]",
        "  unexpected: action_head.mask_token [1, 1, 4]",
        "  shape: action_head.action_encoder.W1.b is [3], expected [2, 48]",
    ]
    with pytest.raises(ValueError, match="embodiment is 2; expected 0 to 1"):
        groot_weights(published(TINY), TINY, embodiment=2)


def test_a_cpu_wants_the_small_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        groot_policy.main(["--device", "cpu"])
    assert "add --tiny" in capsys.readouterr().err
