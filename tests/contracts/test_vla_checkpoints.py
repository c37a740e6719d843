"""Checkpoints with the published names of pi0 and pi0.5 give the actions that plain torch computes from them.

The reference reads tensors by their published names: a convolution over patches, separate q, k and v, one attention
with a mask over all tokens, and the time of a step computed in the step.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rtkernels

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import vla_checkpoints as front
from vla_parts import OurMath, Policy, TorchMath
from vla_weights import TINY, Sizes

PI05 = TINY
PI0 = dataclasses.replace(TINY, state=8)
VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model"
TEXT = "paligemma_with_expert.paligemma.model.language_model"
EXPERT = "paligemma_with_expert.gemma_expert.model"
PROJECTOR = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear"


def published(sizes: Sizes, adaptive: bool) -> dict[str, Tensor]:
    """Return random tensors with the names and dimensions of a file of openpi."""
    generator = torch.Generator().manual_seed(3)
    found: dict[str, Tensor] = {}

    def add(name: str, *shape: int, bias: bool = True, gain: float = 1.0) -> None:
        fan = math.prod(shape[1:])
        found[f"{name}.weight"] = torch.randn(shape, generator=generator) * gain / math.sqrt(fan)
        if bias:
            found[f"{name}.bias"] = 0.1 * torch.randn(shape[0], generator=generator)

    def gemma(at: str, width: int, inner: int) -> None:
        q, kv = sizes.heads * sizes.head_dim, sizes.head_dim
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            add(f"{at}.self_attn.{name}_proj", rows, width, bias=False)
        add(f"{at}.self_attn.o_proj", width, q, bias=False)
        add(f"{at}.mlp.gate_proj", inner, width, bias=False)
        add(f"{at}.mlp.up_proj", inner, width, bias=False)
        add(f"{at}.mlp.down_proj", width, inner, bias=False)

    def norm(name: str, width: int, adapts: bool) -> None:
        if adapts:
            add(f"{name}.dense", 3 * width, width, gain=0.5)
        else:
            add(name, width, bias=False, gain=0.1)

    v, inner, width = sizes.vision_width, sizes.vision_inner, sizes.expert_width
    add(f"{VISION}.embeddings.patch_embedding", v, 3, sizes.patch, sizes.patch)
    add(f"{VISION}.embeddings.position_embedding", sizes.patches, v, bias=False)
    for i in range(sizes.vision_layers):
        at = f"{VISION}.encoder.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            add(f"{at}.self_attn.{name}", v, v)
        add(f"{at}.mlp.fc1", inner, v)
        add(f"{at}.mlp.fc2", v, inner)
        add(f"{at}.layer_norm1", v)
        add(f"{at}.layer_norm2", v)
    add(f"{VISION}.post_layernorm", v)
    add(PROJECTOR, sizes.width, v)
    add(f"{TEXT}.embed_tokens", sizes.vocabulary, sizes.width, bias=False)
    norm(f"{TEXT}.norm", sizes.width, False)
    for i in range(sizes.layers):
        for at, w, n in ((TEXT, sizes.width, sizes.inner), (EXPERT, width, sizes.expert_inner)):
            gemma(f"{at}.layers.{i}", w, n)
            for name in ("input_layernorm", "post_attention_layernorm"):
                norm(f"{at}.layers.{i}.{name}", w, adaptive and at == EXPERT)
    norm(f"{EXPERT}.norm", width, adaptive)
    add("action_in_proj", width, sizes.action)
    add("action_out_proj", sizes.action, width)
    if adaptive:
        add("time_mlp_in", width, width)
        add("time_mlp_out", width, width)
    else:
        add("state_proj", width, sizes.state)
        add("action_time_mlp_in", width, 2 * width)
        add("action_time_mlp_out", width, width)
    return found


class Reference:
    """pi0 and pi0.5 in plain torch and float32."""

    def __init__(self, tensors: dict[str, Tensor], sizes: Sizes) -> None:
        self.w, self.sizes = tensors, sizes

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def layer_norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"], 1e-6)

    def see(self, images: Tensor) -> Tensor:
        sizes, base = self.sizes, f"{VISION}.embeddings"
        weight, bias = self.w[f"{base}.patch_embedding.weight"], self.w[f"{base}.patch_embedding.bias"]
        x = F.conv2d(images.permute(0, 3, 1, 2), weight, bias, stride=sizes.patch).flatten(2).transpose(1, 2)
        x = x + self.w[f"{base}.position_embedding.weight"]
        for i in range(sizes.vision_layers):
            at = f"{VISION}.encoder.layers.{i}"
            y = self.layer_norm(x, f"{at}.layer_norm1")
            q, k, v = (
                self.linear(y, f"{at}.self_attn.{n}_proj").unflatten(-1, (sizes.vision_heads, -1)).transpose(1, 2)
                for n in "qkv"
            )
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + self.linear(y, f"{at}.self_attn.out_proj")
            y = F.gelu(self.linear(self.layer_norm(x, f"{at}.layer_norm2"), f"{at}.mlp.fc1"), approximate="tanh")
            x = x + self.linear(y, f"{at}.mlp.fc2")
        return self.linear(self.layer_norm(x, f"{VISION}.post_layernorm"), PROJECTOR).flatten(0, 1)

    def norm(self, x: Tensor, name: str, condition: Tensor | None) -> tuple[Tensor, Any]:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        if f"{name}.dense.weight" not in self.w:
            return y * (1 + self.w[f"{name}.weight"]), 1.0
        scale, shift, gate = self.linear(condition, f"{name}.dense").chunk(3, -1)
        return y * (1 + scale) + shift, gate

    def rotated(self, x: Tensor) -> Tensor:  # [tokens, heads, head_dim]
        half = x.shape[-1] // 2
        angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        low, high = x.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def together(self, prefix: Tensor, suffix: Tensor, mask: Tensor, condition: Tensor | None) -> Tensor:
        """Return the suffix after all layers, in which both streams share one attention."""
        streams, split = {TEXT: prefix, EXPERT: suffix}, [len(prefix), len(suffix)]
        for i in range(self.sizes.layers):
            gates, parts = {}, []
            for at, x in streams.items():
                y, gates[at] = self.norm(x, f"{at}.layers.{i}.input_layernorm", condition)
                parts.append(
                    [
                        self.linear(y, f"{at}.layers.{i}.self_attn.{n}_proj").unflatten(-1, (-1, self.sizes.head_dim))
                        for n in "qkv"
                    ]
                )
            q, k, v = (torch.cat(pair) for pair in zip(*parts, strict=True))
            q, k, v = (t.transpose(0, 1)[None] for t in (self.rotated(q), self.rotated(k), v))
            y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)[0].transpose(0, 1).flatten(1)
            for (at, x), y_part in zip(streams.items(), y.split(split), strict=True):
                x = x + gates[at] * self.linear(y_part, f"{at}.layers.{i}.self_attn.o_proj")
                z, gate = self.norm(x, f"{at}.layers.{i}.post_attention_layernorm", condition)
                mlp = f"{at}.layers.{i}.mlp"
                z = F.gelu(self.linear(z, f"{mlp}.gate_proj"), approximate="tanh") * self.linear(z, f"{mlp}.up_proj")
                streams[at] = x + gate * self.linear(z, f"{mlp}.down_proj")
        return self.norm(streams[EXPERT], f"{EXPERT}.norm", condition)[0]

    def __call__(self, images: Tensor, prompt: Tensor, noise: Tensor, state: Tensor | None = None) -> Tensor:
        sizes = self.sizes
        words = F.embedding(prompt, self.w[f"{TEXT}.embed_tokens.weight"]) * math.sqrt(sizes.width)
        prefix = torch.cat([self.see(images.float()), words])
        block = torch.tensor([0] * len(prefix) + [1] * (state is not None) + [2] * sizes.horizon)
        mask, actions = block[None] <= block[:, None], noise
        for step in range(sizes.steps):
            time = 1 - step / sizes.steps
            period = 4e-3 * 1000.0 ** torch.linspace(0, 1, sizes.expert_width // 2)
            angle = 2 * math.pi * time / period
            embedded, condition = torch.cat([angle.sin(), angle.cos()]), None
            x = self.linear(actions, "action_in_proj")
            if state is None:
                condition = F.silu(self.linear(F.silu(self.linear(embedded, "time_mlp_in")), "time_mlp_out"))
            else:
                x = torch.cat([x, embedded.expand_as(x)], -1)
                x = self.linear(F.silu(self.linear(x, "action_time_mlp_in")), "action_time_mlp_out")
                x = torch.cat([self.linear(state[None], "state_proj"), x])
            y = self.together(prefix, x, mask, condition)[-sizes.horizon :]
            actions = actions - self.linear(y, "action_out_proj") / sizes.steps
        return actions


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.cosine_similarity(a.flatten().double().cpu(), b.flatten().double().cpu(), dim=0).item()


def inputs(sizes: Sizes, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = (torch.rand(sizes.views, sizes.image, sizes.image, 3, generator=generator) * 2 - 1).bfloat16()
    prompt = torch.randint(sizes.vocabulary, (sizes.prompt,), generator=generator)
    given = [images, prompt, torch.randn(sizes.horizon, sizes.action, generator=generator)]
    if sizes.state:
        given.append(torch.randn(sizes.state, generator=generator))
    return [tensor.to(device) for tensor in given]


def written(tensors: dict[str, Tensor], folder: Path, prefix: str) -> Path:
    """Write the tensors with LeRobot's or openpi's names, as safetensors where it is installed."""
    named = {prefix + name: tensor for name, tensor in tensors.items()}
    try:
        from safetensors.torch import save_file
    except ImportError:
        torch.save(named, folder / "model.pt")
        return folder / "model.pt"
    save_file(named, folder / "model.safetensors")
    return folder


KINDS = {
    "pi0": (PI0, False, front.pi0_weights, front.Pi0Policy),
    "pi05": (PI05, True, front.pi05_weights, Policy),
}


@pytest.mark.parametrize("place", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
@pytest.mark.parametrize("prefix", ("", "model."), ids=("openpi", "lerobot"))
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_actions_are_those_of_plain_torch(kind: str, prefix: str, place: str, tmp_path: Path) -> None:
    sizes, adaptive, load, policy = KINDS[kind]
    tensors = {name: tensor.bfloat16().float() for name, tensor in published(sizes, adaptive).items()}
    weights = load(front.read(written(tensors, tmp_path, prefix)), sizes, place)
    expected = Reference(tensors, sizes)(*inputs(sizes, "cpu"))
    given = inputs(sizes, place)
    plain, ours = (policy(sizes, weights, ops(sizes, place))(*given) for ops in (TorchMath, OurMath))
    moved = expected - inputs(sizes, "cpu")[2]
    assert cosine(plain - given[2], moved) > 0.999
    assert cosine(ours - given[2], moved) > 0.999
    assert cosine(ours - given[2], plain - given[2]) > 0.999
    assert (ours - given[2]).norm().item() == pytest.approx(moved.norm().item(), rel=0.02)  # a cosine sees no factor


@pytest.mark.parametrize("place", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_fp8_with_static_scales(kind: str, place: str) -> None:
    sizes, adaptive, load, policy = KINDS[kind]
    tensors, given = published(sizes, adaptive), inputs(sizes, place)
    weights, calibration = load(tensors, sizes, place), rtkernels.Calibration()
    policy(sizes, weights, OurMath(sizes, place, calibration=calibration))(*given)
    calibration.freeze()
    actions = policy(sizes, weights, OurMath(sizes, place, True, calibration))(*given)
    expected = Reference(tensors, sizes)(*inputs(sizes, "cpu"))
    assert cosine(actions.cpu() - given[2].cpu(), expected - given[2].cpu()) > 0.99


@pytest.mark.parametrize("kind", KINDS)
def test_one_error_names_every_tensor_that_does_not_fit(kind: str) -> None:
    sizes, adaptive, load, _ = KINDS[kind]
    tensors = published(sizes, adaptive)
    del tensors["action_in_proj.bias"], tensors[f"{TEXT}.layers.1.mlp.up_proj.weight"]
    tensors["action_out_proj.weight"] = tensors["action_out_proj.weight"].t()
    tensors[f"{EXPERT}.layers.2.mlp.up_proj.weight"] = torch.zeros(2, 3)
    with pytest.raises(front.CheckpointError) as caught:
        load(tensors, sizes)
    assert str(caught.value).splitlines()[1:] == [
        f"  missing: {TEXT}.layers.1.mlp.up_proj.weight [{sizes.inner}, {sizes.width}]",
        f"  missing: action_in_proj.bias [{sizes.expert_width}]",
        f"  unexpected: {EXPERT}.layers.2.mlp.up_proj.weight [2, 3]",
        "  shape: action_out_proj.weight is "
        f"[{sizes.expert_width}, {sizes.action}], expected [{sizes.action}, {sizes.expert_width}]",
    ]


def test_a_checkpoint_of_the_other_kind_is_refused() -> None:
    with pytest.raises(front.CheckpointError, match=r"missing: time_mlp_in\.weight"):
        front.pi05_weights(published(PI0, False), PI05)
    with pytest.raises(front.CheckpointError, match=r"missing: state_proj\.weight"):
        front.pi0_weights(published(PI05, True), PI0)


def test_tied_old_and_unread_names(tmp_path: Path) -> None:
    tensors = published(PI05, True)
    expected = front.pi05_weights(tensors, PI05)
    tensors["paligemma_with_expert.paligemma.lm_head.weight"] = tensors.pop(f"{TEXT}.embed_tokens.weight")
    tensors["paligemma_with_expert.gemma_expert.lm_head.weight"] = torch.zeros(1)
    tensors["normalize_inputs.buffer_observation_state.mean"] = torch.zeros(1)
    old = {name.replace(TEXT, "paligemma_with_expert.paligemma.language_model.model"): t for name, t in tensors.items()}
    old = {name.replace(".paligemma.model.v", ".paligemma.v"): tensor for name, tensor in old.items()}
    assert not set(old) & {name for name in tensors if ".paligemma.model.v" in name}
    found = front.pi05_weights(old, PI05)
    assert torch.equal(found["table"], expected["table"])
    assert torch.equal(found["prefix"][1]["qkv"], expected["prefix"][1]["qkv"])
    assert torch.equal(found["vision"][1]["up"], expected["vision"][1]["up"])


def test_an_index_of_several_files_is_one_checkpoint(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    parts = {"a.safetensors": {"x": torch.ones(2)}, "b.safetensors": {"y": torch.zeros(3)}}
    for name, tensors in parts.items():
        safetensors.save_file(tensors, tmp_path / name)
    index = front.json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert {name: len(tensor) for name, tensor in front.read(tmp_path).items()} == {"x": 2, "y": 3}
    (tmp_path / "empty").mkdir()
    with pytest.raises(front.CheckpointError, match="has neither"):
        front.read(tmp_path / "empty")


def test_names_of_the_prefix_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    s = PI05
    vision = {
        "hidden_size": s.vision_width, "intermediate_size": s.vision_inner, "num_hidden_layers": s.vision_layers,
        "num_attention_heads": s.vision_heads, "image_size": s.image, "patch_size": s.patch, "vision_use_head": False,
        "projection_dim": s.width, "model_type": "siglip_vision_model",
    }  # fmt: skip
    text = {
        "hidden_size": s.width, "intermediate_size": s.inner, "num_hidden_layers": s.layers, "model_type": "gemma",
        "num_attention_heads": s.heads, "num_key_value_heads": 1, "head_dim": s.head_dim, "vocab_size": s.vocabulary,
    }  # fmt: skip
    config = transformers.PaliGemmaConfig(vision_config=vision, text_config=text, projection_dim=s.width)
    model = transformers.PaliGemmaForConditionalGeneration(config)
    found = front.renamed({f"paligemma_with_expert.paligemma.{n}": t for n, t in model.state_dict().items()})
    wanted = {name: tuple(t.shape) for name, t in found.items()}
    wanted.pop("paligemma_with_expert.paligemma.lm_head.weight")
    mine = {name: tuple(t.shape) for name, t in published(PI05, True).items() if ".paligemma." in name}
    assert mine == wanted
