"""Small configurations of transformers: sizes chosen by field names, in nested configurations too.

The only table of models is :data:`CHANGES`, for what names cannot tell. Sizes are chosen so that mistakes
show: widths differ from one another, groups of heads share keys, every kind of layer that a configuration has is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

WIDTH, INNER, LAYERS, HEADS, GROUPS, HEAD, VOCABULARY, POSITIONS, EXPERTS = 64, 96, 2, 4, 2, 16, 128, 256, 8
FIRST_TOKEN = 48  # tokens below have a meaning: padding, beginning, end, images
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_SIZES: dict[str, Any] = {
    "num_key_value_heads": GROUPS, "num_kv_heads": GROUPS, "n_head_kv": GROUPS, "encoder_num_key_value_heads": GROUPS,
    "decoder_num_key_value_heads": GROUPS, "swa_num_key_value_heads": GROUPS, "num_experts_per_tok": 2, "moe_topk": 2,
    "num_experts": EXPERTS,
    "num_experts_per_token": 2, "moe_k": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "qk_head_dim": 24, "d_kv": HEAD, "mamba_d_state": 16, "ssm_state_size": 16, "state_size": 16, "mamba_d_head": 16,
    "mamba_head_dim": 16, "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_expand": 2, "mamba_n_groups": 1,
    "n_groups": 2, "time_step_rank": 8, "mamba_dt_rank": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 16,
    "index_head_dim": 16, "index_n_heads": 4, "index_topk": 8, "max_source_positions": 32, "max_target_positions": 64,
    "max_position_embeddings": POSITIONS, "n_positions": POSITIONS, "n_ctx": POSITIONS, "max_seq_len": POSITIONS,
    "max_sequence_length": POSITIONS, "max_seq_length": POSITIONS, "context_length": 64,
    "num_mel_bins": 16, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "relative_attention_num_buckets": 8, "num_queries": 6, "num_query_tokens": 4, "resampler_n_latents": 4,
    "num_nextn_predict_layers": 0, "n_shared_experts": 1, "num_frames": 4, "tubelet_size": 2, "sliding_window": 8,
    "local_attention": 8, "attention_window": 8, "block_size": 16, "chunk_size": 16, "chunk_length": 16,
    "num_codevectors_per_group": 8, "codevector_dim": 16, "proj_codevector_dim": 16, "xvector_output_dim": 32,
    "classifier_proj_size": 32, "num_labels": 5, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "query_pre_attn_scalar": 16, "word_embed_proj_dim": WIDTH, "rotary_dim": 8, "num_denoising": 4,
    "train_num_points": 16, "num_negatives": 4, "num_parallel_samples": 2, "coordinate_size": 12, "shape_size": 8,
    "max_window_layers": 1, "num_kv_shared_layers": 0, "num_image_tokens": 4, "mm_tokens_per_image": 4,
    "upsample_initial_channel": 32, "num_filters": 8, "base_channels": 32, "hidden_size_global": WIDTH,
    "num_position_embeddings": 64, "attention_chunk_size": 16, "rope_theta": 10000.0, "encoder_stride": 8,
    "max_2d_position_embeddings": 128, "initializer_range": 0.05, "init_std": 0.05, "sliding_window_size": 8,
    "image_seq_length": 4, "image_seq_len": 4, "num_patches": 16, "initializer_factor": 1.0,
}  # fmt: skip
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")
_STAGES = ("stage_names", "_out_indices", "_out_features", "out_features")
_WHERE_NONE = {
    "head_dim": HEAD, "num_key_value_heads": GROUPS, "pad_token_id": 0, "n_shared_experts": 1, "mamba_dt_rank": 8,
    "decoder_start_token_id": 1, "vocab_size": VOCABULARY, "num_experts_per_tok": 2, "n_routed_experts": EXPERTS,
    "num_local_experts": EXPERTS, "num_experts": EXPERTS, "n_group": 2, "topk_group": 1, "prediction_length": 8,
    "context_length": 16, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "moe_intermediate_size": 32, "image_token_id": 45, "image_token_index": 45,
}  # fmt: skip
# What a name says about a size: the first pattern that is found anywhere in it.
_PATTERNS: tuple[tuple[str, Any], ...] = (
    (r"^(moe_)?(num|n)_.*experts$|^num_experts$", EXPERTS),
    (r"moe.*(intermediate|ffn).*(size|dim)|expert.*(intermediate|ffn).*size|expert_ffn|moe_(ffn_)?hidden", 32),
    (r"(intermediate|inner|ffn|feed_?forward).*(size|dim|width)|mlp_(hidden_)?(dim|size)", INNER),
    (r"^(n_inner|ffn_dim|d_ff|mlp_dim|dim_ff|dim_feedforward|d_inner)$", INNER),
    (r"(^|_)head_dim$|^dim_head$|^d_head$|^dim_per_head$|^attention_head_size$", HEAD),
    (r"(^|_)(num|n)_(.*_)?heads?$|^(attention_|cross_attention_)?heads$|attention_heads$", HEADS),
    (r"(num|n)_.*layers?$|^(n_)?layers?$|_layers$|(^|_)depth$|^(num|n)_blocks$", LAYERS),
    (r"(^|_)vocab_size$|^vocabulary_size$|^num_embeddings$|^codebook_size$|^n_vocab$", VOCABULARY),
    (r"hidden_size|^(n_embd|dim|width|d_model|d_embed|encoder_dim|decoder_dim|output_dim|out_dim|input_dim)$", WIDTH),
    (r"^(embed|emb|embedding|model|hidden|latent|proj|projection|projector|fusion|codebook)_?(dim|size|dims)$", WIDTH),
    (r"_(embed|emb|embedding|hidden|model|proj|projection|feature|latent)_(dim|size)$", WIDTH),
)
_KEEP = re.compile(
    r"token_id|token_index|type_vocab|drop|kernel|stride|ratio|factor|mult|eps|version|num_stages|ignore|group_size|freq"
    r"|num_local_patches|sampling|window"
)


def _channels(config: Any) -> list[int]:
    """Return the widths of the last stages of a detector's backbone."""
    return list(config.backbone_config.hidden_sizes)[-len(config.encoder_in_channels) :]


_DETECTOR = {"encoder_in_channels": _channels, "decoder_in_channels": lambda c: [WIDTH] * len(c.decoder_in_channels)}
# What names do not tell, by model type. Dots reach into nested configurations.
CHANGES: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8},
    "falcon_h1": {"mamba_d_ssm": 128},
    "moonshine": {"encoder_num_key_value_heads": HEADS, "decoder_num_key_value_heads": HEADS},
    "mistral_large4": {"text_config.kv_source_layers": None},
    "esmc": {"d_model": WIDTH, "n_heads": HEADS},
    "xmod": {"default_language": "en_XX"},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "mistral4": {"head_dim": HEAD},
    "musicgen": {"num_codebooks": 1, "decoder.num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1, "decoder.num_codebooks": 1},
    "dia": {"decoder_config.num_channels": 1},
    "rt_detr": _DETECTOR,
    "rt_detr_v2": _DETECTOR,
}


def nested(config: Any, base: type) -> Iterator[Any]:
    """Yield a configuration and those inside of it, the innermost first."""
    for value in list(vars(config).values()):
        if isinstance(value, base):
            yield from nested(value, base)
    yield config


def _is_computed(config: Any, name: str) -> bool:
    found = getattr(type(config), name, None)
    return isinstance(found, property) and found.fset is None


def _size(name: str, value: int) -> int:
    """Return the size of a field that is a number."""
    if name in _SIZES:
        return _SIZES[name] if value > 0 else value
    if value <= 1 or _KEEP.search(name):
        return value
    for pattern, small in _PATTERNS:
        if re.search(pattern, name):
            return small
    return value


def _list(name: str, value: list[int], layers: int) -> list[Any]:
    """Return a list of numbers: sizes and counts of stages, or numbers of layers."""
    count = len(value)
    if re.search(
        r"^depths?$|_depths$|blocks_per_stage|layers_per_stage|^num_layers|layer_depths|block_repeats|stage_num_blocks|stage_numb_of_layers",
        name,
    ):
        return [1] * count
    if (
        re.search(r"(hidden_sizes|embed_dims?|embed_dim_per_stage|channel_list|conv_dim|tdnn_dim)$", name)
        and min(value) >= 16
    ):
        ordered = sorted(set(value))
        sizes = {v: 16 << min(i, 3) for i, v in enumerate(ordered)}
        return [sizes[v] for v in value]
    if re.search(r"heads", name):
        ordered = sorted(set(value))
        return [1 << min(ordered.index(v), 3) for v in value]
    if re.search(r"indic|indexes|_idx|_ids$|_layers?$|layer_ids", name) and not name.endswith("token_ids"):
        return [v if v < 0 else min(v, layers - 1) for v in value]
    return value


def shrink(config: Any, base: type, level: int = 0, tokens: dict[int, int] | None = None) -> None:
    """Make a configuration small in place.

    Args:
        config: Of transformers.
        base: The class that nested configurations have.
        level: 0: every size; 1: lists of sizes stay; 2: only layers, vocabularies, positions and dropout.
        tokens: New ids of special tokens by their old ones, shared by nested configurations.
    """
    tokens = {} if tokens is None else tokens
    for inner in nested(config, base):
        _transformers_backbone(inner)
    for inner in nested(config, base):
        _shrink_one(inner, base, level, tokens)


def _set(config: Any, name: str, value: Any) -> None:
    if not _is_computed(config, name):
        try:
            setattr(config, name, value)
        except (ValueError, TypeError, AttributeError, NotImplementedError):  # one that validates, or is an alias
            config.__dict__[name] = value


def _shrink_one(config: Any, base: type, level: int, tokens: dict[int, int]) -> None:
    names = dict(getattr(type(config), "attribute_map", {}) or {})
    old = dict(vars(config))
    types = old.get("layer_types")
    layers = LAYERS
    if isinstance(types, (list, tuple)) and types:
        kinds = list(dict.fromkeys(types))
        layers = max(LAYERS, len(kinds))
        types = (kinds * layers)[:layers]
    if isinstance(old.get("stage_names"), list):
        layers = max(layers, len(old.get("_out_indices") or []))
    lengths = {v for k, v in old.items() if isinstance(v, int) and re.search(r"layers?$|^depth$", k) and v > 4}
    for name, value in old.items():
        if isinstance(value, base) or name.startswith("__") or name in names or name in _STAGES:
            continue
        if name == "layer_types" and isinstance(types, list):
            _set(config, name, types)
        elif isinstance(value, bool):
            continue
        elif value is None:
            if name in _WHERE_NONE and level < 2:
                _set(config, name, _WHERE_NONE[name])
        elif name.endswith(("token_id", "token_index", "token_idx")) and isinstance(value, int):
            if value >= 0:
                _set(
                    config,
                    name,
                    _SPECIAL.get(name) if name in _SPECIAL else tokens.setdefault(value, 3 + len(tokens) % 40),
                )
        elif name in _SPECIAL and isinstance(value, (list, tuple)):
            _set(config, name, _SPECIAL[name])
        elif isinstance(value, float):
            if "drop" in name or name.endswith("noise") or name in ("mask_time_prob", "mask_feature_prob"):
                _set(config, name, 0.0)
            elif name in ("initializer_range", "init_std"):
                _set(config, name, 0.05)
        elif isinstance(value, int):
            small = _size(name, value)
            if level == 2 and small not in (LAYERS, VOCABULARY, POSITIONS):
                continue
            if small == LAYERS and re.search(r"num_hidden_layers|^n_layers?$|^num_layers$", name):
                small = layers if value > 1 else value
            _set(config, name, small)
        elif isinstance(value, (list, tuple)) and value:
            new = value
            if len(value) in lengths and not all(isinstance(v, str) and "stage" in v for v in value):
                new = value[:layers]
            elif all(type(v) is int for v in value) and level == 0:
                new = _list(name, list(value), layers)
            if len(new) != len(value) or list(new) != list(value):
                _set(config, name, type(value)(new))
        elif isinstance(value, dict):
            if name == "rope_parameters" and "rope_theta" in value:  # unused if there are no sections
                half = int((getattr(config, "head_dim", None) or HEAD) * value.get("partial_rotary_factor", 1.0)) // 2
                value["mrope_section"] = [half - 2 * (half // 4), half // 4, half // 4]
    _picture(config, old)
    if "swin" in str(getattr(config, "model_type", "")) and "window_size" in old:
        _set(config, "window_size", 2)  # not more than a side of the last stage
    _stages(config, old, layers)
    if "qk_rope_head_dim" in old:
        if "head_dim" in old:
            _set(config, "head_dim", _SIZES["qk_rope_head_dim"])
        _set(config, "num_key_value_heads", HEADS)
    for name in ("use_mask_token", "layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if name in old and "drop" in name:
            _set(config, name, 0.0)


def _stages(config: Any, old: dict[str, Any], layers: int) -> None:
    """Make a backbone return its last stages, as many as before."""
    names, outs = old.get("stage_names"), old.get("_out_indices") or [-1]
    if not isinstance(names, list):
        return
    if len(names) == 1 + max((v for k, v in old.items() if k in _LAYERS and isinstance(v, int)), default=-2):
        names = names[: layers + 1]
    count = min(len(outs), len(names))
    indices = list(range(len(names) - count, len(names)))
    config.__dict__ |= {"stage_names": names, "_out_indices": indices, "_out_features": [names[i] for i in indices]}


def _transformers_backbone(config: Any) -> None:
    """Replace a timm backbone by one of transformers."""
    for name, value in list(vars(config).items()):
        if getattr(value, "model_type", None) == "timm_backbone":
            from transformers import ResNetConfig

            count = len(getattr(value, "out_indices", None) or [4])
            sizes = [16, 16, 32, 64]
            stages = [f"stage{i}" for i in range(5 - min(count, 4), 5)]
            small_config = ResNetConfig(
                embedding_size=16, hidden_sizes=sizes, depths=[1] * 4, layer_type="basic", out_features=stages
            )
            _set(config, name, small_config)
            _set(config, "use_timm_backbone", False)


def _picture(config: Any, old: dict[str, Any]) -> None:
    """Make pictures small: 4 x 4 patches of 8 x 8 pixels; for smaller patches, 64 x 64 pixels."""
    patch = old.get("patch_size")
    if isinstance(patch, int) and not isinstance(patch, bool) and patch >= 8:
        _set(config, "patch_size", 8)
        side = 32
    else:
        side = 64
    if isinstance(old.get("image_embedding_size"), int):
        _set(config, "image_embedding_size", side // 8)
    for name in ("image_size", "img_size", "pretrain_image_size", "pos_emb_height", "pos_emb_width"):
        value = old.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > side:
            _set(config, name, side)
        elif isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
            _set(config, name, type(value)([side] * len(value)))


def apply_changes(config: Any, changes: dict[str, Any]) -> None:
    """Set fields by names with dots; a value that is a function gets the configuration."""
    for name, value in changes.items():
        *path, last = name.split(".")
        inner = config
        for part in path:
            inner = getattr(inner, part, None)
        if inner is None:
            continue
        if isinstance(value, Callable):  # type: ignore[arg-type]
            value = value(inner)
        _set(inner, last, value)
