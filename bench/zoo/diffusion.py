"""Transformers and UNets of diffusers, built small with inputs that they accept."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bench.zoo.build import LARGEST_PARAMETERS, Built, NotBuilt, _line, _try, seed
from bench.zoo.diffusion_forms import FORMS

BATCH, SIDE, FRAMES, TEXT, WIDTH, HEADS, HEAD, CHANNELS = 2, 8, 3, 8, 64, 4, 16, 4
_SIZES: tuple[tuple[str, Any], ...] = (
    (r"^(num_|n_|n)?(attention_|key_value_|kv_|attention_kv_|text_encoder_)?heads$", HEADS),
    (r"^(attention_head_dim|head_dim|dim_head|num_kv_attention_head_dim)$", HEAD),
    (r"num_(\w+_)*layers$|^n_layers$|^num_blocks$|^depth$|_depth$|^num_mmdit_layers$|_layers$", 2),
    (r"^layers_per_block$", 1),
    (r"^(in_channels|out_channels|latent_channels|in_dim|out_dim)$", CHANNELS),
    (r"^sample_size$|^sample_(width|height)$|^input_size$", SIDE),
    (r"^sample_frames$|^num_frames$|^max_frames$", FRAMES),
    (r"axes_dims?(_rope)?$|rope_axes_dim$|^rope_dim_list$|^axes_dims$", (4, 6, 6)),
    (r"axes_lens?$", (64, 64, 64)),
    (r"^(max_)?(text_)?seq(uence)?_len(gth)?$|^max_position", 64),
    (r"(hidden_size|(hidden|inner|embed|model|attention|text|projection|cap_feat|norm|encoder_hid)_dim)$", WIDTH),
    (r"(^dim|context_dim|caption_channels|text_states_dim|text_states_dim_2)$", WIDTH),
    (r"(ffn_dim|intermediate_size|mlp_dim|ffn_hidden_size|ff_dim|ff_inner_dim|intermediate_dim)$", 96),
    (r"^(num_embeds_ada_norm|num_classes|vocab_size)$", 16),
    (r"^norm_num_groups$|^num_groups$", 8),
    (r"^block_out_channels$", (16, 32)),
    (r"^num_experts$|^num_routed_experts$", 4),
    (r"dropout", 0.0),
)  # fmt: skip
# What names do not tell.
CHANGES: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": {
        "block_out_channels": (16, 32), "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "attention_head_dim": 8,
    },
    "UNet2DModel": {
        "block_out_channels": (16, 32), "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 8,
    },
    "UNet3DConditionModel": {
        "block_out_channels": (16, 32), "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "attention_head_dim": 8,
    },
}  # fmt: skip


def classes() -> list[str]:
    """Return the names of diffusers' transformers and UNets; none where diffusers is not installed."""
    try:
        from diffusers import ModelMixin
        from diffusers.models import transformers, unets
    except ImportError:
        return []
    found = set()
    for module in (transformers, unets):
        for name, value in vars(module).items():
            if inspect.isclass(value) and issubclass(value, ModelMixin):
                found.add(name)
    return sorted(found)


def class_of(name: str) -> type:
    """Return a class of diffusers."""
    from diffusers.models import transformers, unets

    return getattr(transformers, name, None) or getattr(unets, name)


def arguments(cls: type, level: int) -> dict[str, Any]:
    """Return small values for the constructor arguments whose names say what they are."""
    results: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        default = parameter.default
        if name == "self" or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        for pattern, value in _SIZES:
            if not re.search(pattern, name):
                continue
            if isinstance(default, (tuple, list)):
                if isinstance(value, int):
                    value = [value] * len(default) if level == 0 else value
                value = type(default)(value[: len(default)]) if isinstance(value, (tuple, list)) else value
            elif isinstance(default, bool) or isinstance(default, str):
                break
            elif default is None and (
                level == 1 or re.search("out_channels|out_dim|num_classes|num_embeds|num_groups", name)
            ):
                break
            elif isinstance(value, tuple) and not isinstance(default, (tuple, list)):
                break
            results[name] = value
            break
    return {**results, **CHANGES.get(cls.__name__, {})}


class Maker:
    """Builds inputs from the names of arguments."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.config = model, getattr(model, "config", {})
        self.signature = inspect.signature(type(model).forward).parameters
        self.generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator) * 0.5

    def get(self, *names: str) -> int:
        for name in names:
            value = self.config.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return WIDTH

    def samples(self) -> Iterator[Tensor]:
        channels = self.get("in_channels", "in_dim", "latent_channels", "input_dim", "audio_in_channels")
        plane = BATCH, channels, SIDE, SIDE
        video, tokens = (BATCH, channels, FRAMES, SIDE, SIDE), (BATCH, SIDE * SIDE // 4, channels)
        frames = BATCH, FRAMES, channels, SIDE, SIDE
        order = [plane, tokens, video, frames]
        if {"img_ids", "img_shapes", "image_rotary_emb"} & set(self.signature):
            order = [tokens, plane, video, frames]
        if re.search("3D|Video|Wan|Animate", type(self.model).__name__):
            order = [video, frames, plane, tokens]
        order.append((BATCH, channels, 16))
        for shape in order:
            yield self.random(*shape)

    def forms(self) -> Iterator[dict[str, Any]]:
        """Yield inputs, those most likely to work first."""
        text = self.get(
            "joint_attention_dim", "cross_attention_dim", "caption_channels", "text_embed_dim", "text_dim",
            "cap_feat_dim", "context_in_dim", "text_states_dim", "llm_dim", "caption_dim", "encoder_hidden_size",
        )  # fmt: skip
        pooled = self.get("pooled_projection_dim", "pooled_dim", "projection_dim")
        names = self.signature
        first = next((n for n in ("hidden_states", "sample", "latents", "x", "latent_model_input") if n in names), None)
        tables: dict[str, Any] = {
            "encoder_hidden_states": lambda: self.random(BATCH, TEXT, text),
            "encoder_attention_mask": lambda: torch.ones(BATCH, TEXT, dtype=torch.bool),
            "encoder_hidden_states_mask": lambda: torch.ones(BATCH, TEXT, dtype=torch.long),
            "pooled_projections": lambda: self.random(BATCH, pooled),
            "guidance": lambda: torch.full((BATCH,), 3.5),
            "img_ids": lambda: _grid_ids(),
            "txt_ids": lambda: torch.zeros(TEXT, 3),
            "class_labels": lambda: torch.tensor([1, 2]),
            "image_rotary_emb": lambda: (torch.ones(SIDE * SIDE // 4, HEAD), torch.zeros(SIDE * SIDE // 4, HEAD)),
            "img_shapes": lambda: [[(1, SIDE // 2, SIDE // 2)]] * BATCH,
            "txt_seq_lens": lambda: [TEXT] * BATCH,
            "num_frames": lambda: FRAMES,
            "height": lambda: SIDE, "width": lambda: SIDE,
            "fps": lambda: torch.tensor([8, 8]),
            "added_time_ids": lambda: self.random(BATCH, 3).abs(),
            "added_cond_kwargs": lambda: {
                "resolution": torch.full((BATCH, 2), 8.0), "aspect_ratio": torch.ones(BATCH, 1)
            },
            "image_latents": lambda: self.random(BATCH, CHANNELS, FRAMES, SIDE, SIDE),
            "original_size": lambda: torch.full((BATCH, 2), 64.0),
            "target_size": lambda: torch.full((BATCH, 2), 64.0),
            "crop_coords": lambda: torch.zeros(BATCH, 2),
            "attention_mask": lambda: None,
            "proj_embedding": lambda: self.random(BATCH, WIDTH),
            "clip_text_pooled": lambda: self.random(BATCH, 1, 64),
        }  # fmt: skip
        optional = {
            "encoder_hidden_states", "pooled_projections", "img_ids", "txt_ids", "class_labels", "img_shapes",
            "added_cond_kwargs", "guidance", "encoder_hidden_states_mask", "fps",
        }  # fmt: skip
        results: dict[str, Any] = {}
        for name, parameter in names.items():
            needed = parameter.default is inspect.Parameter.empty
            if name in tables and (needed or name in optional):
                value = tables[name]()
                if value is not None:
                    results[name] = value
        clock = next((n for n in ("timestep", "timesteps", "t", "timestep_ratio", "timestep_r") if n in names), None)
        clocks = [torch.tensor([3, 7]), torch.tensor([0.3, 0.7])] if clock else [None]
        for sample, time in itertools.product(self.samples(), clocks):
            given = dict(results)
            if first is not None:
                given[first] = sample
            if clock is not None:
                given[clock] = time
            yield given
            for left_out in ({"guidance"}, {"class_labels", "added_cond_kwargs"}, set(results) - _required(names)):
                if left_out & set(given):
                    yield {name: value for name, value in given.items() if name not in left_out}


def _required(names: Any) -> set[str]:
    return {n for n, p in names.items() if p.default is inspect.Parameter.empty} | {"encoder_hidden_states"}


def _grid_ids() -> Tensor:
    ids = torch.zeros(SIDE // 2, SIDE // 2, 3)
    ids[..., 1] += torch.arange(SIDE // 2)[:, None]
    ids[..., 2] += torch.arange(SIDE // 2)
    return ids.view(-1, 3)


def build(name: str) -> Built:
    """Return a class of diffusers, built small, with inputs.

    Raises:
        NotBuilt: None of the attempts gave a model that accepts inputs.
    """
    cls, reasons = class_of(name), []
    for level in (-1, 0, 1, 2) if name in FORMS else (0, 1, 2):
        given = FORMS[name][0] if level == -1 else {} if level == 2 else arguments(cls, level)
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in cls(**given).parameters())
            if size > LARGEST_PARAMETERS:
                raise NotBuilt(f"has {size / 1e6:.0f} M parameters")
            seed()
            model = cls(**given).float().train()
        except Exception as error:  # of a library that we do not own
            reasons.append(_line(error))
            continue
        _randomize(model)
        for inputs in [_given(FORMS[name][1])] if level == -1 else itertools.islice(Maker(model).forms(), 24):
            try:
                _try(model, inputs)
            except Exception as error:
                reasons.append(_line(error))
                continue
            return Built(model, inputs, False)
    raise NotBuilt(" | ".join(dict.fromkeys(reasons)) if reasons else "has no inputs that we know")


def _given(inputs: dict[str, Any]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(value, generator=generator) * 0.5 if isinstance(value, tuple) else value()
        for name, value in inputs.items()
    }


def _randomize(model: nn.Module) -> None:
    """Randomise parameters that are zero or one, because they hide mistakes."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.numel():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2 or float(parameter.detach().abs().max()) == 0:
                parameter.data += 0.1 * noise
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
