"""The names that loaders of pi0, pi0.5 and GR00T N1.5 read are those of the published code.

Written down from openpi at 15a9616a (``examples/convert_jax_model_to_pytorch.py`` writes them,
``src/openpi/models_pytorch/pi0_pytorch.py`` and ``gemma_pytorch.py`` read them), from LeRobot at 7427f318
(``policies/pi0``, ``policies/pi05`` and ``policies/pi_gemma.py``: the same behind ``model.``), and from Isaac-GR00T at
``n1.5-release`` (``gr00t/model/action_head``). No file of weights was read.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from contracts.test_groot import published as published_groot
from contracts.test_vla_checkpoints import PI0, PI05, published

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import vla_checkpoints as front
from groot_checkpoint import groot_weights
from groot_policy import TINY

BOTH = ("weight", "bias")
PALIGEMMA, EXPERT = "paligemma_with_expert.paligemma.model", "paligemma_with_expert.gemma_expert.model"
TOWER = f"{PALIGEMMA}.vision_tower.vision_model"
GEMMA = [
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
]
NORMS = ("input_layernorm", "post_attention_layernorm")
PREFIX = {
    *(f"{TOWER}.embeddings.patch_embedding.{part}" for part in BOTH),
    f"{TOWER}.embeddings.position_embedding.weight",
    *(
        f"{TOWER}.encoder.layers.#.{name}.{part}"
        for name in ("layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2", *(f"self_attn.{n}_proj" for n in "qkv"))
        for part in BOTH
    ),
    *(f"{TOWER}.encoder.layers.#.self_attn.out_proj.{part}" for part in BOTH),
    *(f"{TOWER}.post_layernorm.{part}" for part in BOTH),
    *(f"{PALIGEMMA}.multi_modal_projector.linear.{part}" for part in BOTH),
    f"{PALIGEMMA}.language_model.embed_tokens.weight",
    f"{PALIGEMMA}.language_model.norm.weight",
    *(f"{PALIGEMMA}.language_model.layers.#.{name}" for name in GEMMA),
    *(f"{PALIGEMMA}.language_model.layers.#.{name}.weight" for name in NORMS),
    *(f"{EXPERT}.layers.#.{name}" for name in GEMMA),
    *(f"action_{way}_proj.{part}" for way in ("in", "out") for part in BOTH),
}
NAMES = {
    "pi0": {
        *PREFIX,
        *(f"{EXPERT}.{name}.weight" for name in ("norm", *(f"layers.#.{norm}" for norm in NORMS))),
        *(f"{name}.{part}" for name in ("state_proj", "action_time_mlp_in", "action_time_mlp_out") for part in BOTH),
    },
    "pi05": {
        *PREFIX,
        *(f"{EXPERT}.{name}.dense.{part}" for name in ("norm", *(f"layers.#.{n}" for n in NORMS)) for part in BOTH),
        *(f"time_mlp_{way}.{part}" for way in ("in", "out") for part in BOTH),
    },
}
# Attention and FeedForward of diffusers inside of each block; norms of the DiT's blocks have no weights of their own.
BLOCK = (*(f"attn1.to_{name}" for name in "qkv"), "attn1.to_out.0", "ff.net.0.proj", "ff.net.2")
GROOT = {
    *(f"vlln.{part}" for part in BOTH),
    *(f"vl_self_attention.transformer_blocks.#.{n}.{part}" for n in (*BLOCK, "norm1", "norm3") for part in BOTH),
    *(f"model.transformer_blocks.#.{name}.{part}" for name in (*BLOCK, "norm1.linear") for part in BOTH),
    *(f"model.timestep_encoder.timestep_embedder.linear_{i}.{part}" for i in (1, 2) for part in BOTH),
    *(f"model.proj_out_{i}.{part}" for i in (1, 2) for part in BOTH),
    *(f"{name}.layer{i}.{part}" for name in ("state_encoder", "action_decoder") for i in (1, 2) for part in "Wb"),
    *(f"action_encoder.W{i}.{part}" for i in (1, 2, 3) for part in "Wb"),
    "future_tokens.weight",
    "position_embedding.weight",
}


def general(names: set[str]) -> set[str]:
    """Return names with # for the number of a layer."""
    return {re.sub(r"\b(layers|transformer_blocks)\.\d+\.", r"\1.#.", name) for name in names}


@pytest.mark.parametrize("prefix", ("", "model."), ids=("openpi", "lerobot"))
@pytest.mark.parametrize("kind", NAMES)
def test_names_of_pi0_and_pi05(kind: str, prefix: str) -> None:
    sizes, adaptive, load = (PI05, True, front.pi05_weights) if kind == "pi05" else (PI0, False, front.pi0_weights)
    tensors = published(sizes, adaptive)
    assert general(set(tensors)) == NAMES[kind]
    load({prefix + name: tensor for name, tensor in tensors.items()}, sizes)  # takes these, and nothing is left over
    read: set[str] = set()

    class Watched(dict):
        def __getitem__(self, name: str) -> torch.Tensor:
            read.add(name)
            return super().__getitem__(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front, "renamed", lambda given: Watched(given))
        load(tensors, sizes)
    unused = {f"{PALIGEMMA}.language_model.norm.weight"}  # actions read keys and values of the prefix only
    assert general(read) == NAMES[kind] - unused


@pytest.mark.one_in(1000)
def test_names_of_groot() -> None:
    tensors = published_groot(TINY)
    found = {name.removeprefix("action_head.") for name in tensors if name.startswith("action_head.")}
    assert general(found) == GROOT
    groot_weights(tensors, TINY)
    for name in sorted(found):
        with pytest.raises(front.CheckpointError, match="missing"):
            groot_weights({n: t for n, t in tensors.items() if n != f"action_head.{name}"}, TINY)
