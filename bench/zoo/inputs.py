"""Inputs for the forward of a small model, from the names of its arguments; sets are tried until one works.

Where a name does not tell the form (audio as samples or as features, pictures as pixels or as patches), there are
several forms, tried in turn. The number of tokens per picture is learnt from the model's error message.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.zoo.small import FIRST_TOKEN, VOCABULARY, WIDTH

BATCH, TOKENS, DECODED, SAMPLES, FRAMES, CHOICES, GRID = 2, 16, 12, 2048, 64, 3, 4
MAX_TRIES = 28


def find(config: Any, *names: str, prefer: tuple[str, ...] = ()) -> Any:
    """Return the first of these fields in a configuration or in a nested one; preferred ones first."""
    inner = [getattr(config, name) for name in prefer if getattr(config, name, None) is not None]
    below = [v for v in vars(config).values() if hasattr(v, "to_dict") and hasattr(v, "model_type")]
    for one in (*inner, config, *below):
        for name in names:
            value = getattr(one, name, None)
            if value is not None and not isinstance(value, dict):
                return value
    for one in below:
        value = find(one, *names)
        if value is not None:
            return value
    return None


class Maker:
    """Builds inputs for one class and configuration. `tokens` is the number of placeholders per picture or audio."""

    def __init__(self, cls: type, config: Any) -> None:
        self.cls, self.config = cls, config
        self.signature = inspect.signature(cls.forward).parameters
        self.tokens = {"image": 0, "audio": 0, "video": 0}
        self.wanted: set[str] = set()  # optional arguments that an error has named
        self.generator = torch.Generator().manual_seed(0)

    # ---- numbers ----

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator) * 0.5

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator)

    def has(self, name: str) -> bool:
        return name in self.signature

    def required(self, name: str) -> bool:
        return self.has(name) and self.signature[name].default is inspect.Parameter.empty

    # ---- pictures ----

    @property
    def side(self) -> int:
        size = find(self.config, "image_size", "img_size", prefer=("vision_config", "backbone_config", "encoder"))
        size = max(size) if isinstance(size, (list, tuple)) else size
        return size if isinstance(size, int) and size > 1 else 64

    @property
    def channels(self) -> int:
        value = find(
            self.config, "num_channels", "in_channels", "in_chans", prefer=("vision_config", "backbone_config")
        )
        return value if isinstance(value, int) and value in (1, 2, 3, 4, 9) else 3

    @property
    def patch(self) -> int:
        value = find(self.config, "patch_size", "spatial_patch_size", prefer=("vision_config",))
        value = value[-1] if isinstance(value, (list, tuple)) else value
        return value if isinstance(value, int) else 8

    def pictures(self) -> Iterator[dict[str, Any]]:
        side, channels, patch = self.side, self.channels, self.patch
        frames = find(self.config, "num_frames", "frames_per_clip") or 2
        depth = find(self.config, "temporal_patch_size", "patch_temporal", prefer=("vision_config",)) or 1
        depth = depth if isinstance(depth, int) else 1
        grid_names = [n for n in ("image_grid_thw", "grid_thw", "image_grid_hw") if self.has(n)]
        name = "pixel_values" if self.has("pixel_values") else "hidden_states"
        if grid_names:
            grid = torch.tensor([[1, GRID, GRID]] * BATCH)
            rows = BATCH * GRID * GRID
            for width in (channels * depth * patch * patch, channels * patch * patch):
                for count in (rows, rows * depth):
                    inputs = {name: self.random(count, width)}
                    for grid_name in grid_names:
                        inputs[grid_name] = grid[:, 1:] if grid_name.endswith("hw") and "thw" not in grid_name else grid
                    if self.has("image_merge_sizes"):
                        inputs["image_merge_sizes"] = torch.full((BATCH,), 1)
                    if self.has("merge_sizes"):
                        inputs["merge_sizes"] = torch.full((BATCH,), 1)
                    yield inputs
            yield {name: self.random(rows, channels, patch, patch), **dict.fromkeys(grid_names, grid)}
            yield {name: self.random(BATCH, channels, side, side), **dict.fromkeys(grid_names, grid)}
        if self.has("spatial_shapes"):
            inputs = {
                name: self.random(BATCH, GRID * GRID, channels * patch * patch),
                "spatial_shapes": torch.tensor([[GRID, GRID]] * BATCH),
            }
            if self.has("pixel_attention_mask"):
                inputs["pixel_attention_mask"] = torch.ones(BATCH, GRID * GRID, dtype=torch.long)
            yield inputs
        if self.has("pixel_position_ids") or self.has("image_position_ids"):
            where = "pixel_position_ids" if self.has("pixel_position_ids") else "image_position_ids"
            rows = torch.stack(torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="xy"), -1).view(1, -1, 2)
            yield {name: self.random(BATCH, GRID * GRID, channels * patch * patch), where: rows.repeat(BATCH, 1, 1)}
        extra: dict[str, Any] = {}
        if self.has("image_sizes"):
            extra["image_sizes"] = torch.tensor([[side, side]] * BATCH)
        if self.has("target_sizes"):
            extra["target_sizes"] = torch.tensor([[GRID, GRID]] * BATCH)
        if self.has("high_res_pixel_values"):
            high = find(self.config, "image_size", prefer=("high_res_vision_config",)) or side
            extra["high_res_pixel_values"] = self.random(BATCH, channels, high, high)
        if self.has("prompt_pixel_values"):
            extra |= {n: self.random(BATCH, channels, side, side) for n in ("prompt_pixel_values", "prompt_masks")}
        if self.has("task_inputs"):
            extra["task_inputs"] = self.integers(FIRST_TOKEN, VOCABULARY, BATCH, 8)
        if self.has("aspect_ratio_ids"):
            tiles = find(self.config, "max_num_tiles") or 4
            extra["aspect_ratio_ids"] = torch.ones(BATCH, 1, dtype=torch.long)
            extra["aspect_ratio_mask"] = torch.ones(BATCH, 1, tiles, dtype=torch.long)
            yield {name: self.random(BATCH, 1, tiles, channels, side, side), **extra}
        if name == "hidden_states":
            yield {name: self.random(BATCH, TOKENS, WIDTH)}
            return
        video = self.has("pixel_values_videos") and not self.has("input_ids")
        if re.search("Video|Timesformer|Vivit|VJEPA", self.cls.__name__):
            yield {name: self.random(BATCH, frames, channels, side, side), **extra}
        if not (video and not self.has("pixel_values")):
            yield {name: self.random(BATCH, channels, side, side), **extra}
        yield {name: self.random(BATCH, 1, channels, side, side), **extra}
        yield {name: self.random(BATCH, frames, channels, side, side), **extra}
        yield {name: self.random(BATCH, 3, channels, side, side), **extra}
        yield {name: self.random(BATCH, channels, 2 * side, 2 * side), **extra}
        yield {name: self.random(BATCH, channels, 224, 224), **extra}

    def videos(self) -> Iterator[dict[str, Any]]:
        frames = find(self.config, "num_frames", "frames_per_clip") or 4
        yield {"pixel_values_videos": self.random(BATCH, frames, self.channels, self.side, self.side)}
        yield {"pixel_values_videos": self.random(BATCH, self.channels, frames, self.side, self.side)}

    # ---- audio ----

    def features(self, name: str) -> Iterator[dict[str, Any]]:
        names = (
            "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "feature_size", "input_dim",
            "input_feat_size", "n_mels", "mel_dim", "audio_channels",
        )  # fmt: skip
        mel = find(self.config, *names, prefer=("audio_config", "encoder_config", "speech_encoder_config"))
        mel = mel if isinstance(mel, int) else 80
        positions = find(self.config, "max_source_positions", prefer=("audio_config", "encoder_config"))
        for frames in dict.fromkeys((2 * positions if positions else FRAMES, FRAMES, 200)):
            for shape in ((BATCH, mel, frames), (BATCH, frames, mel), (BATCH, 1, frames, mel)):
                for masked in (True, False):
                    inputs = {name: self.random(*shape)}
                    for mask in ("input_features_mask", "feature_attention_mask"):
                        if self.has(mask) and masked:
                            inputs[mask] = torch.ones(BATCH, frames, dtype=torch.long)
                    if self.has("is_longer"):
                        inputs["is_longer"] = torch.zeros(BATCH, 1, dtype=torch.bool)
                    if masked and len(inputs) == 1:
                        continue
                    yield inputs

    def values(self) -> Iterator[dict[str, Any]]:
        mel = find(self.config, "num_mel_bins") or 16
        length = find(self.config, "max_length") or 32
        speakers = {}
        if self.has("speaker_embeddings"):
            speakers["speaker_embeddings"] = self.random(BATCH, find(self.config, "speaker_embedding_dim") or WIDTH)
        if self.has("decoder_input_values"):
            speakers["decoder_input_values"] = self.random(BATCH, 8, mel)
        if re.search("TextToSpeech", self.cls.__name__):
            ids = self.integers(FIRST_TOKEN, 80, BATCH, TOKENS)
            yield {"input_ids": ids, **speakers}
        yield {"input_values": self.random(BATCH, SAMPLES), **speakers}
        yield {"input_values": self.random(BATCH, 1, SAMPLES), **speakers}
        yield {"input_values": self.random(BATCH, length if isinstance(length, int) else 32, mel), **speakers}
        yield {"input_values": self.random(BATCH, 16000), **speakers}
        yield {"input_values": self.random(BATCH, 1, 16000), **speakers}

    # ---- text ----

    def text(self) -> dict[str, Any]:
        vocabulary = find(self.config, "vocab_size", prefer=("text_config", "decoder_config")) or VOCABULARY
        vocabulary = vocabulary if isinstance(vocabulary, int) else VOCABULARY
        if re.search("MultipleChoice", self.cls.__name__):
            ids = self.integers(FIRST_TOKEN, min(vocabulary, VOCABULARY), BATCH, CHOICES, TOKENS)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        ids = self.integers(min(FIRST_TOKEN, vocabulary - 8), min(vocabulary, VOCABULARY), BATCH, TOKENS)
        kinds = torch.zeros_like(ids)
        before = 1
        for number, kind in enumerate(("image", "audio", "video")):
            count = self.tokens[kind]
            token = find(self.config, f"{kind}_token_id", f"{kind}_token_index", f"{kind}_token_idx")
            if count and isinstance(token, int):
                inserted = torch.full((BATCH, count), token)
                ids = torch.cat([ids[:, :before], inserted, ids[:, before:]], 1)
                kinds = torch.cat([kinds[:, :before], torch.full_like(inserted, number + 1), kinds[:, before:]], 1)
                before += count
        inputs: dict[str, Any] = {"input_ids": ids}
        if self.has("attention_mask"):
            inputs["attention_mask"] = torch.ones_like(ids)
        for name in ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids"):
            if self.has(name) and any(self.tokens.values()):
                inputs[name] = kinds
        if self.has("bbox"):
            inputs["bbox"] = torch.tensor([2, 4, 30, 40]).repeat(*ids.shape, 1)
        if self.has("entity_ids") and re.search("Entity", self.cls.__name__):
            entities = 2 if "Pair" in self.cls.__name__ or "Span" in self.cls.__name__ else 1
            inputs["entity_ids"] = torch.ones(BATCH, entities, dtype=torch.long)
            inputs["entity_attention_mask"] = torch.ones(BATCH, entities, dtype=torch.long)
            inputs["entity_position_ids"] = torch.arange(4).repeat(BATCH, entities, 1)
            inputs["entity_start_positions"] = torch.zeros(BATCH, entities, dtype=torch.long)
            inputs["entity_end_positions"] = torch.ones(BATCH, entities, dtype=torch.long)
        return inputs

    def others(self) -> dict[str, Any]:
        """Return arguments whose names determine their form."""
        inputs: dict[str, Any] = {}
        length = TOKENS
        if self.has("decoder_input_ids"):
            inputs["decoder_input_ids"] = self.integers(FIRST_TOKEN, 96, BATCH, DECODED)
        simple = {
            "visual_feats": lambda: self.random(BATCH, 6, find(self.config, "visual_feat_dim") or 2048),
            "visual_pos": lambda: self.random(BATCH, 6, 4).abs(),
            "visual_embeds": lambda: self.random(BATCH, 6, find(self.config, "visual_embedding_dim") or 512),
            "query_embeds": lambda: self.random(BATCH, 6, WIDTH),
            "encoder_hidden_states": lambda: self.random(BATCH, 6, WIDTH),
            "past_values": lambda: self._past(),
            "image_attention_mask": lambda: torch.ones(BATCH, length, 1, dtype=torch.long),
            "qformer_input_ids": lambda: self.integers(FIRST_TOKEN, VOCABULARY, BATCH, 6),
            "states": lambda: self.random(BATCH, 6, find(self.config, "state_dim") or 17),
            "actions": lambda: self.random(BATCH, 6, find(self.config, "act_dim") or 4),
            "rewards": lambda: self.random(BATCH, 6, 1),
            "returns_to_go": lambda: self.random(BATCH, 6, 1),
            "timesteps": lambda: torch.arange(6).repeat(BATCH, 1),
            "hidden_states": lambda: self.random(BATCH, length, WIDTH),
            "latents": lambda: self.random(BATCH, WIDTH, 8),
            "spectrogram": lambda: self.random(BATCH, 20, find(self.config, "model_in_dim", "num_mel_bins") or 80),
            "protein_input_ids": lambda: self.integers(4, 20, BATCH, 10),
            "protein_attention_mask": lambda: torch.ones(BATCH, 10, dtype=torch.long),
            "flattened_patches": lambda: self._flattened(),
            "input_boxes": lambda: None,
            "classes_input_ids": lambda: self.integers(FIRST_TOKEN, VOCABULARY, 4, 6),
            "classes_attention_mask": lambda: torch.ones(4, 6, dtype=torch.long),
            "tasks_input_ids": lambda: self.integers(FIRST_TOKEN, VOCABULARY, BATCH, 6),
            "tasks_attention_mask": lambda: torch.ones(BATCH, 6, dtype=torch.long),
            "classes_structure": lambda: torch.tensor([2, 2]),
            "question_positions": lambda: torch.tensor([[3], [4]]),
            "inputs": lambda: self._inputs(),
            "noise_embeds": lambda: self.random(BATCH, length, WIDTH),
            "context_hidden_states": lambda: self.random(BATCH, length, WIDTH),
            "target_mapping": lambda: None,
        }
        optional = {
            "visual_feats", "visual_pos", "visual_embeds", "past_values", "image_attention_mask", "states", "actions",
            "rewards", "returns_to_go", "timesteps", "question_positions", "flattened_patches", "protein_input_ids",
            "protein_attention_mask",
        }  # fmt: skip
        for name, make in simple.items():
            if self.required(name) or (self.has(name) and (name in optional or name in self.wanted)):
                value = make()
                if value is not None:
                    inputs[name] = value
        if "past_values" in inputs:
            inputs |= self._time(inputs["past_values"])
        return inputs

    def _flattened(self) -> Tensor:
        patches = self.random(BATCH, 16, self.patch * self.patch * self.channels + 2)
        patches[..., 0] = torch.arange(16) // 4 + 1
        patches[..., 1] = torch.arange(16) % 4 + 1
        return patches

    def _inputs(self) -> Tensor:
        if re.search("MaskedLM|SequenceClassification", self.cls.__name__):
            return self.integers(FIRST_TOKEN, VOCABULARY, BATCH, TOKENS)
        if re.search("ImageClassification", self.cls.__name__):
            return self.random(BATCH, 3, 224, 224)
        return self.random(BATCH, TOKENS, find(self.config, "d_model") or WIDTH)

    def _past(self) -> Tensor:
        lags = find(self.config, "lags_sequence")
        length = find(self.config, "context_length") or 32
        if lags:
            return self.random(BATCH, length + max(lags)).abs()
        channels = find(self.config, "num_input_channels")
        return self.random(BATCH, length, channels) if channels else self.random(BATCH, length)

    def _time(self, past: Tensor) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        horizon = find(self.config, "prediction_length") or 8
        features = find(self.config, "num_time_features") or 0
        if self.has("past_time_features"):
            inputs["past_time_features"] = self.random(*past.shape[:2], features)
            inputs["future_time_features"] = self.random(BATCH, horizon, features)
        if self.has("past_observed_mask"):
            inputs["past_observed_mask"] = torch.ones_like(past)
        if self.has("future_values"):
            shape = (BATCH, horizon, *past.shape[2:]) if past.dim() > 2 else (BATCH, horizon)
            inputs["future_values"] = self.random(*shape).abs()
        if self.has("freq"):
            inputs["freq"] = torch.zeros(BATCH, 1, dtype=torch.long)
        if self.has("past_values_padding"):
            inputs["past_values_padding"] = torch.zeros(past.shape[0], past.shape[1], dtype=torch.long)
        return inputs

    # ---- all of them ----

    def forms(self) -> Iterator[dict[str, Any]]:
        """Yield inputs without labels, those most likely to work first."""
        parts: list[list[dict[str, Any]]] = []
        if self.has("pixel_values") or self.has("grid_thw"):
            parts.append(list(self.pictures()))
        elif self.has("pixel_values_videos"):
            parts.append(list(self.videos()))
        for name in ("input_features", "audio_input_features", "audio_features", "input_mel"):
            if self.has(name):
                parts.append(list(self.features(name)))
                break
        if self.has("input_values"):
            parts.append(list(self.values()))
        others = self.others()
        text = self.has("input_ids")
        needed = [p for p in parts if any(self.required(n) for n in p[0])] if text else parts
        if not text:
            needed = parts
        combinations = [needed] if needed and text and needed != parts else []
        combinations.append(parts)
        if text and parts:
            combinations += [[p] for p in parts if len(parts) > 1] + [[]]
        for chosen in combinations:
            for combination in itertools.islice(itertools.product(*chosen), 20 if len(chosen) < 2 else 7):
                inputs: dict[str, Any] = {}
                for part in combination:
                    inputs |= part
                if text and "input_ids" not in inputs:
                    inputs = {**self.text(), **inputs}
                yield {**others, **inputs}

    def labels(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield labels of the forms that a class of this name may take."""
        name, classes = self.cls.__name__, getattr(self.config, "num_labels", 2) or 2
        one = self.integers(0, min(classes, 2), BATCH)
        if self.has("start_positions"):
            yield {"start_positions": torch.tensor([2, 3]), "end_positions": torch.tensor([4, 5])}
        if not self.has("labels"):
            for flag in ("return_loss",):
                if self.has(flag):
                    yield {flag: True}
            return
        ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        many = {"labels": ids} if ids is not None else {"labels": self.integers(FIRST_TOKEN, 96, BATCH, DECODED)}
        extra = {}
        if self.has("next_sentence_label"):
            extra["next_sentence_label"] = one
        side = inputs["pixel_values"].shape[-1] if "pixel_values" in inputs else 8
        boxes = [
            {"class_labels": torch.tensor([1, 0]), "boxes": torch.tensor([[0.4, 0.4, 0.2, 0.3], [0.6, 0.5, 0.3, 0.2]])}
        ] * BATCH
        if re.search("SemanticSegmentation", name):
            yield {"labels": self.integers(0, classes, BATCH, side, side)}
        elif re.search("Detection|Segmentation", name):
            yield {"labels": boxes}
        elif re.search("CTC|RNNT|TDT", name):
            yield {"labels": self.integers(3, 20, BATCH, 4)}
        elif re.search("TokenClassification|FrameClassification", name) and ids is not None:
            yield {"labels": self.integers(0, min(classes, 2), *ids.shape)}
        elif re.search("Classification|MultipleChoice|XVector|NextSentence", name):
            yield {"labels": one}
        yield {**many, **extra}
        yield {"labels": one}
        if "input_features" in inputs or "input_values" in inputs:
            yield {"labels": self.integers(3, 20, BATCH, 4)}


_MISMATCH = re.compile(
    r"(image|video|audio|multimodal|placeholder)?[^.]*tokens?[^\d]*(\d+)[^\d]+features?[^\d]*(\d+)", re.I
)


def learn(maker: Maker, error: Exception) -> bool:
    """Adapt the inputs to an error message; False if it is not understood.

    It may ask for as many picture or audio tokens as there are features, or for a missing argument.
    """
    found = _MISMATCH.search(str(error))
    if not found:
        named = {name for name in maker.signature if name in str(error)} - maker.wanted
        maker.wanted |= named
        return bool(named)
    kind = (found[1] or "image").lower()
    kind = kind if kind in maker.tokens else "image"
    wanted = int(found[3])
    if wanted == 0:
        return False
    count = wanted // BATCH if wanted % BATCH == 0 else wanted
    if count > 200 or maker.tokens[kind] == count:
        return False
    maker.tokens[kind] = count
    return True
