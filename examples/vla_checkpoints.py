"""Published checkpoints of pi0 and pi0.5 as weights of the policy in ``vla_parts.py``.

    weights = pi05_weights(read("model.safetensors"), Sizes(horizon=50), "cuda")
    policy = Policy(sizes, weights, OurMath(sizes, "cuda"))

``read`` takes the files of LeRobot (``lerobot/pi0``, ``lerobot/pi05_base``) and those openpi converts from JAX; the
names differ by ``model.`` in front. ``pi0_weights`` belongs to ``Pi0Policy``, ``pi05_weights`` to ``Policy``. One
``CheckpointError`` names all tensors that are missing, unexpected or of another shape, before anything is converted.

The loaders join q, k and v, and gate and up; they add 1 to Gemma's norm weights, multiply the embedding table by the
root of its width, turn the convolution over patches into a matrix, and compute for every step what follows from its
time: modulations in pi0.5, a bias in pi0. Prompts have no padding: ``sizes.prompt`` is the number of their tokens.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from vla_parts import Policy
from vla_weights import Layer, Sizes

OLD_NAMES = {  # names of transformers before 4.52
    "paligemma.language_model.lm_head.": "paligemma.lm_head.",
    "paligemma.language_model.model.": "paligemma.model.language_model.",
    "paligemma.vision_tower.": "paligemma.model.vision_tower.",
    "paligemma.multi_modal_projector.": "paligemma.model.multi_modal_projector.",
}
# Heads that predict tokens, the norm before them, and statistics of a dataset: nothing here reads these.
NOT_READ = re.compile(
    r"paligemma_with_expert\.(paligemma\.lm_head|gemma_expert\.lm_head|gemma_expert\.model\.embed_tokens"
    r"|paligemma\.model\.language_model\.norm)\.|(un)?normalize_(inputs|outputs|targets)\."
)
TABLE = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
Take = Callable[..., Tensor]


class CheckpointError(ValueError):
    """Tensors of a checkpoint are not those of the policy."""


# ---- files ----------------------------------------------------------------------------------------------------------


def read(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name.

    Args:
        path: A file of safetensors or of ``torch.save``, an index of several (``….index.json``), or the folder of one.
    """
    path = Path(path)
    if path.is_dir():
        found = [
            path / name for name in ("model.safetensors.index.json", "model.safetensors") if (path / name).exists()
        ]
        if not found:
            raise CheckpointError(f"{path} has neither model.safetensors nor model.safetensors.index.json")
        path = found[0]
    if path.name.endswith(".index.json"):
        files = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        return {name: tensor for file in files for name, tensor in read(path.parent / file).items()}
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def checked(
    build: Callable[[Take], dict[str, Any]], tensors: Mapping[str, Tensor], not_read: re.Pattern[str]
) -> dict[str, Any]:
    """Return what ``build`` makes of the tensors it takes, after all names and shapes have been compared.

    Args:
        build: Calls ``take(name, *shape)`` for every tensor it needs. It is first called with tensors on "meta".
        tensors: By name.
        not_read: Matches the start of names that may be there and are not needed.
    """
    shapes: dict[str, tuple[int, ...]] = {}

    def record(name: str, *shape: int) -> Tensor:
        shapes[name] = shape
        return torch.empty(shape, device="meta")

    build(record)
    missing = [f"missing: {name} {list(shape)}" for name, shape in shapes.items() if name not in tensors]
    unknown = [
        f"unexpected: {name} {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if name not in shapes and not not_read.match(name)
    ]
    wrong = [
        f"shape: {name} is {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if missing or unknown or wrong:
        raise CheckpointError("the checkpoint does not fit the policy\n  " + "\n  ".join(missing + unknown + wrong))
    return build(lambda name, *shape: tensors[name].float())


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of pi0 or pi0.5 under the names that openpi gives them."""
    found = {}
    for full, tensor in tensors.items():
        name = full.removeprefix("model.")
        for old, new in OLD_NAMES.items():
            name = name.replace(f"paligemma_with_expert.{old}", f"paligemma_with_expert.{new}")
        found[re.sub(r"\.vision_tower\.(?!vision_model\.)", ".vision_tower.vision_model.", name)] = tensor  # since 5.x
    head = found.get("paligemma_with_expert.paligemma.lm_head.weight")
    if head is not None:  # one tensor under two names, of which files keep one
        found.setdefault(TABLE, head)
    return found


# ---- parts of pi0 and pi0.5 -----------------------------------------------------------------------------------------


def _vision(take: Take, sizes: Sizes) -> tuple[list[Layer], Layer]:
    base = "paligemma_with_expert.paligemma.model.vision_tower.vision_model"
    w, inner, patch = sizes.vision_width, sizes.vision_inner, sizes.patch

    def pair(name: str, to: str, *shape: int) -> Layer:
        return {to: take(f"{name}.weight", *shape), f"{to}_bias": take(f"{name}.bias", shape[0])}

    layers = []
    for i in range(sizes.vision_layers):
        at = f"{base}.encoder.layers.{i}"
        parts = [pair(f"{at}.self_attn.{name}_proj", "x", w, w) for name in "qkv"]
        layers.append(
            {
                **pair(f"{at}.layer_norm1", "norm1", w), **pair(f"{at}.layer_norm2", "norm2", w),
                "qkv": torch.cat([part["x"] for part in parts]), "qkv_bias": torch.cat([p["x_bias"] for p in parts]),
                **pair(f"{at}.self_attn.out_proj", "out", w, w),
                **pair(f"{at}.mlp.fc1", "up", inner, w), **pair(f"{at}.mlp.fc2", "down", w, inner),
            }
        )  # fmt: skip
    ends = pair(f"{base}.embeddings.patch_embedding", "patch", w, 3, patch, patch)
    ends["patch"] = ends["patch"].permute(0, 2, 3, 1).reshape(w, -1)  # patches hold rows of pixels
    ends["position"] = take(f"{base}.embeddings.position_embedding.weight", sizes.patches, w)
    ends |= pair(f"{base}.post_layernorm", "norm", w)
    ends |= pair("paligemma_with_expert.paligemma.model.multi_modal_projector.linear", "image", sizes.width, w)
    return layers, ends


def _gemma(take: Take, at: str, sizes: Sizes, width: int, inner: int) -> Layer:
    q, kv = sizes.heads * sizes.head_dim, sizes.head_dim
    sections = ("q", q), ("k", kv), ("v", kv)
    return {
        "qkv": torch.cat([take(f"{at}.self_attn.{n}_proj.weight", m, width) for n, m in sections]),
        "out": take(f"{at}.self_attn.o_proj.weight", width, q),
        "gate_up": torch.cat([take(f"{at}.mlp.{name}_proj.weight", inner, width) for name in ("gate", "up")]),
        "down": take(f"{at}.mlp.down_proj.weight", width, inner),
    }


def _norms(take: Take, at: str, width: int) -> Layer:
    names = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    return {to: 1 + take(f"{at}.{name}.weight", width) for to, name in names.items()}


def _common(take: Take, sizes: Sizes) -> dict[str, Any]:
    """Return vision, prefix, and what surrounds the expert."""
    vision, ends = _vision(take, sizes)
    text, expert = "paligemma_with_expert.paligemma.model.language_model", sizes.expert_width
    prefix = []
    for i in range(sizes.layers):
        at = f"{text}.layers.{i}"
        prefix.append(_gemma(take, at, sizes, sizes.width, sizes.inner) | _norms(take, at, sizes.width))
    for to, name, rows, columns in (
        ("action_in", "action_in_proj", expert, sizes.action),
        ("action_out", "action_out_proj", sizes.action, expert),
    ):
        ends[to], ends[f"{to}_bias"] = take(f"{name}.weight", rows, columns), take(f"{name}.bias", rows)
    table = take(TABLE, sizes.vocabulary, sizes.width) * math.sqrt(sizes.width)
    return {"vision": vision, "prefix": prefix, "ends": ends, "table": table}


def time_embedding(sizes: Sizes, device: Any, periods: tuple[float, float] = (4e-3, 4.0)) -> Tensor:
    """Return sines and cosines ``[steps, expert_width]`` of the time at each step, from 1 down to 1 / steps."""
    times = 1 - torch.arange(sizes.steps, dtype=torch.float64) / sizes.steps
    fraction = torch.linspace(0, 1, sizes.expert_width // 2, dtype=torch.float64)
    angles = times[:, None] * 2 * math.pi / (periods[0] * (periods[1] / periods[0]) ** fraction)
    return torch.cat([angles.sin(), angles.cos()], 1).float().to(device)


def stored(part: Any, device: str, name: str = "") -> Any:
    """Return bfloat16 on a device; norms without a bias (Gemma's) stay in float32, where 1 + w is not rounded."""
    if isinstance(part, dict):
        norms = {key for key in part if "norm" in key and f"{key}_bias" not in part and not key.endswith("_bias")}
        return {key: stored(value, device, "norm" if key in norms else "") for key, value in part.items()}
    if isinstance(part, (list, tuple)):
        return type(part)(stored(value, device) for value in part)
    if part is None:
        return None
    return part.to(device, torch.float32 if name == "norm" else torch.bfloat16).contiguous()


# ---- pi0.5 ----------------------------------------------------------------------------------------------------------


def pi05_weights(tensors: Mapping[str, Tensor], sizes: Sizes, device: str = "cpu") -> dict[str, Any]:
    """Return the weights of ``Policy`` from a checkpoint of pi0.5."""

    def build(take: Take) -> dict[str, Any]:
        weights, width = _common(take, sizes), sizes.expert_width
        model = "paligemma_with_expert.gemma_expert.model"

        def linear(x: Tensor, name: str, rows: int) -> Tensor:
            return F.linear(x, take(f"{name}.weight", rows, width), take(f"{name}.bias", rows))

        time = time_embedding(sizes, weights["table"].device)
        condition = F.silu(linear(F.silu(linear(time, "time_mlp_in", width)), "time_mlp_out", width))
        weights["expert"] = [
            _gemma(take, f"{model}.layers.{i}", sizes, width, sizes.expert_inner) for i in range(sizes.layers)
        ]
        by_layer = [
            [
                linear(condition, f"{model}.layers.{i}.{norm}.dense", 3 * width)
                for norm in ("input_layernorm", "post_attention_layernorm")
            ]
            for i in range(sizes.layers)
        ]
        weights["styles"] = [[(a[step], b[step]) for a, b in by_layer] for step in range(sizes.steps)]
        weights["last_styles"] = list(linear(condition, f"{model}.norm.dense", 3 * width))
        return weights

    return stored(checked(build, renamed(tensors), NOT_READ), device)


# ---- pi0 ------------------------------------------------------------------------------------------------------------


def pi0_weights(tensors: Mapping[str, Tensor], sizes: Sizes, device: str = "cpu") -> dict[str, Any]:
    """Return the weights of ``Pi0Policy`` from a checkpoint of pi0; ``sizes.state`` is the width of the state."""

    def build(take: Take) -> dict[str, Any]:
        weights, width = _common(take, sizes), sizes.expert_width
        model, ends = "paligemma_with_expert.gemma_expert.model", weights["ends"]
        weights["expert"] = [
            _gemma(take, at, sizes, width, sizes.expert_inner) | _norms(take, at, width)
            for at in (f"{model}.layers.{i}" for i in range(sizes.layers))
        ]
        ends["action_norm"] = 1 + take(f"{model}.norm.weight", width)
        for to, name, columns in (("state", "state_proj", sizes.state), ("mixed", "action_time_mlp_out", width)):
            ends[to], ends[f"{to}_bias"] = take(f"{name}.weight", width, columns), take(f"{name}.bias", width)
        # The product of [actions, time] with a matrix is one with each half, and that of the time is known.
        actions, time = take("action_time_mlp_in.weight", width, 2 * width).chunk(2, 1)
        biases = F.linear(time_embedding(sizes, time.device), time, take("action_time_mlp_in.bias", width))
        weights["mix"], weights["mix_bias"] = actions, biases
        weights["styles"] = [[(None, None)] * sizes.layers] * sizes.steps
        weights["last_styles"] = [None] * sizes.steps
        return weights

    return stored(checked(build, renamed(tensors), NOT_READ), device)


class Pi0Policy(Policy):
    """pi0: plain norms in the expert, the time of a step mixed into the actions, and a token for the robot's state.

    The state sees the prefix and itself, and no action. Its keys and values are the same in all steps, so they are
    computed once and join the cache; no attention needs a mask.
    """

    def __init__(self, sizes: Sizes, weights: dict[str, Any], ops: Any) -> None:
        super().__init__(sizes, weights, ops)
        given = [{"mix": weights["mix"], "mix_bias": bias} for bias in weights["mix_bias"]]
        self.mix = [ops.prepare("mix", layer) for layer in given]  # one for each step

    def __call__(self, images: Tensor, prompt: Tensor, noise: Tensor, state: Tensor | None = None) -> Tensor:
        """Return actions ``[horizon, action]``, float32; ``state`` is ``[sizes.state]``."""
        if state is None:
            raise ValueError("state is None; pi0 needs the state of the robot")
        return self.denoise(noise, self.add_state(state, self.read(self.see(images), prompt)))

    def add_state(self, state: Tensor, cache: Any) -> Any:
        """Return the cache with keys and values of the state."""
        x, h, gate = self.ops.linear(state[None].bfloat16(), self.ends, "state"), None, None
        for i, layer in enumerate(self.layers["expert"]):
            x, h, gate, cache[i] = self._expert_at(self.sizes.prefix, x, h, gate, layer, None, None, cache[i])
        return cache

    def embed_actions(self, actions: Tensor, step: int) -> Tensor:
        """Return the expert's tokens, which know the time of the step."""
        x = self.ops.linear(self.ops.linear(actions, self.ends, "action_in"), self.mix[step], "mix", act="silu")
        return self.ops.linear(x, self.ends, "mixed")
