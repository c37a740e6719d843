"""Arguments and inputs of diffusers models that names do not explain.

An input is a shape of random numbers, or a function that returns what is passed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_WAN = {
    "patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
    "text_dim": 64, "freq_dim": 32, "ffn_dim": 96, "num_layers": 2, "rope_max_seq_len": 32,
}  # fmt: skip
_COG = {
    "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "time_embed_dim": 32,
    "text_embed_dim": 64, "num_layers": 2, "sample_width": 8, "sample_height": 8, "sample_frames": 9, "patch_size": 2,
    "temporal_compression_ratio": 4, "max_text_seq_length": 8,
}  # fmt: skip
_BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 64}


def _integers(*shape: int, high: int = 16) -> Callable[[], Any]:
    return lambda: torch.randint(0, high, shape, generator=torch.Generator().manual_seed(0))


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
    return lambda: torch.ones(shape, dtype=dtype)


def _time() -> Any:
    return torch.tensor([30, 700])


def _fraction() -> Any:
    return torch.tensor([0.3, 0.7])


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "AceStepTransformer1DModel": (
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "in_channels": 24, "audio_acoustic_hidden_dim": 8, "patch_size": 2,
         "sliding_window": 16},
        {"hidden_states": (2, 8, 8), "timestep": _fraction, "timestep_r": _fraction,
         "encoder_hidden_states": (2, 10, 64), "context_latents": (2, 8, 16)},
    ),
    "AnyFlowTransformer3DModel": (
        {**_WAN, "gate_value": 0.25, "deltatime_type": "r"},
        {"hidden_states": (2, 2, 4, 8, 8), "timestep": _ones(2, 2), "r_timestep": _ones(2, 2),
         "encoder_hidden_states": (2, 8, 64)},
    ),
    "AnyFlowFARTransformer3DModel": (
        {**_WAN, "compressed_patch_size": (1, 4, 4), "full_chunk_limit": 3, "gate_value": 0.25, "deltatime_type": "r"},
        {"hidden_states": (1, 4, 4, 16, 16), "timestep": _ones(1, 4), "r_timestep": _ones(1, 4),
         "encoder_hidden_states": (1, 12, 64), "chunk_partition": lambda: [2, 2]},
    ),
    "BriaFiboTransformer2DModel": (
        {"patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
         "num_attention_heads": 4, "joint_attention_dim": 64, "text_encoder_dim": 32, "pooled_projection_dim": None,
         "axes_dims_rope": [0, 8, 8]},
        {"hidden_states": (2, 16, 16), "encoder_hidden_states": (2, 8, 64), "img_ids": _ones(16, 3),
         "txt_ids": _ones(8, 3), "timestep": _fraction,
         "text_encoder_layers": lambda: [torch.ones(2, 8, 32), torch.ones(2, 8, 32)]},
    ),
    "CogVideoXTransformer3DModel": (
        _COG, {"hidden_states": (2, 3, 4, 8, 8), "encoder_hidden_states": (2, 8, 64), "timestep": _time}
    ),
    "ConsisIDTransformer3DModel": (
        {**_COG, "cross_attn_interval": 1, "is_kps": False, "is_train_face": True, "cross_attn_dim_head": 16,
         "cross_attn_num_heads": 2, "LFE_id_dim": 2, "LFE_vit_dim": 2, "LFE_depth": 5, "LFE_dim_head": 16,
         "LFE_num_heads": 2, "LFE_num_id_token": 1, "LFE_num_querie": 1, "LFE_output_dim": 42, "LFE_ff_mult": 1,
         "LFE_num_scale": 1},
        {"hidden_states": (2, 1, 4, 8, 8), "encoder_hidden_states": (2, 8, 64), "timestep": _time,
         "id_vit_hidden": lambda: [torch.ones(2, 2, 2)], "id_cond": _ones(2, 2)},
    ),
    "EasyAnimateTransformer3DModel": (
        {"attention_head_dim": 16, "num_attention_heads": 4, "in_channels": 4, "mmdit_layers": 2, "num_layers": 2,
         "out_channels": 4, "patch_size": 2, "sample_height": 16, "sample_width": 16, "text_embed_dim": 64,
         "time_embed_dim": 32},
        {"hidden_states": (2, 4, 2, 16, 16), "timestep": _time, "encoder_hidden_states": (2, 8, 64)},
    ),
    "ErnieImageTransformer2DModel": (
        {"hidden_size": 64, "num_attention_heads": 4, "num_layers": 2, "ffn_hidden_size": 96, "in_channels": 16,
         "out_channels": 16, "patch_size": 1, "text_in_dim": 64, "rope_axes_dim": (8, 4, 4)},
        {"hidden_states": (2, 16, 4, 4), "timestep": _fraction, "text_bth": (2, 8, 64),
         "text_lens": lambda: torch.tensor([8, 8])},
    ),
    "GlmImageTransformer2DModel": (
        {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
         "num_attention_heads": 4, "text_embed_dim": 64, "time_embed_dim": 32, "condition_dim": 16,
         "prior_vq_quantizer_codebook_size": 64},
        {"hidden_states": (2, 4, 8, 8), "encoder_hidden_states": (2, 12, 64), "prior_token_id": _integers(2, 16),
         "prior_token_drop": lambda: torch.zeros(2, dtype=torch.bool), "timestep": _time,
         "target_size": _ones(2, 2), "crop_coords": _ones(2, 2)},
    ),
    "HiDreamImageTransformer2DModel": (
        {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1,
         "attention_head_dim": 16, "num_attention_heads": 4, "caption_channels": [64, 32], "text_emb_dim": 64,
         "num_routed_experts": 4, "num_activated_experts": 2, "axes_dims_rope": (8, 4, 4), "max_resolution": (16, 16),
         "llama_layers": (0, 1), "force_inference_output": True},
        {"hidden_states": (2, 4, 16, 16), "encoder_hidden_states_t5": (2, 8, 64),
         "encoder_hidden_states_llama3": (2, 2, 8, 32), "pooled_embeds": (2, 64), "timesteps": _time},
    ),
    "HunyuanDiT2DModel": (
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 16,
         "num_attention_heads": 4, "cross_attention_dim": 64, "cross_attention_dim_t5": 64, "pooled_projection_dim": 64,
         "hidden_size": 64, "text_len": 4, "text_len_t5": 4, "activation_fn": "gelu-approximate"},
        {"hidden_states": (2, 4, 8, 8), "encoder_hidden_states": (2, 4, 64), "text_embedding_mask": _ones(2, 4),
         "encoder_hidden_states_t5": (2, 4, 64), "text_embedding_mask_t5": _ones(2, 4), "timestep": _fraction,
         "image_meta_size": _ones(2, 6), "style": _integers(2, high=1),
         "image_rotary_emb": lambda: [torch.ones(16, 16), torch.zeros(16, 16)]},
    ),
    "HunyuanVideo15Transformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2,
         "num_refiner_layers": 1, "mlp_ratio": 2.0, "patch_size": 1, "patch_size_t": 1, "text_embed_dim": 64,
         "text_embed_2_dim": 32, "image_embed_dim": 32, "rope_axes_dim": (4, 4, 8), "target_size": 16,
         "task_type": "t2v"},
        {"hidden_states": (2, 4, 1, 8, 8), "timestep": _fraction, "encoder_hidden_states": (2, 6, 64),
         "encoder_hidden_states_2": (2, 4, 32), "encoder_attention_mask": _ones(2, 6),
         "encoder_attention_mask_2": _ones(2, 4), "image_embeds": lambda: torch.zeros(2, 3, 32)},
    ),
    "HunyuanVideoFramepackTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 1,
         "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 2, "patch_size_t": 1, "guidance_embeds": True,
         "text_embed_dim": 64, "pooled_projection_dim": 64, "rope_axes_dim": (4, 4, 8), "image_condition_type": None,
         "has_image_proj": True, "image_proj_dim": 16, "has_clean_x_embedder": True},
        {"hidden_states": (2, 4, 3, 4, 4), "timestep": _time, "encoder_hidden_states": (2, 12, 64),
         "pooled_projections": (2, 64), "encoder_attention_mask": _ones(2, 12), "guidance": _time,
         "image_embeds": (2, 12, 16), "indices_latents": _ones(3), "latents_clean": (2, 4, 2, 4, 4),
         "indices_latents_clean": _ones(2), "latents_history_2x": (2, 4, 2, 4, 4),
         "indices_latents_history_2x": _ones(2),
         "latents_history_4x": (2, 4, 8, 4, 4), "indices_latents_history_4x": _ones(8)},
    ),
    "JoyImageEditPlusTransformer3DModel": (
        {"patch_size": [1, 2, 2], "in_channels": 16, "hidden_size": 64, "num_attention_heads": 4, "text_dim": 64,
         "num_layers": 2, "rope_dim_list": [4, 6, 6], "theta": 256},
        {"hidden_states": (1, 2, 16, 1, 2, 2), "encoder_hidden_states": (1, 12, 64),
         "timestep": lambda: torch.tensor([1.0]), "shape_list": lambda: [[(1, 1, 1), (1, 1, 1)]]},
    ),
    "Krea2Transformer2DModel": (
        {"in_channels": 16, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 96, "timestep_embed_dim": 32, "text_hidden_dim": 64,
         "num_text_layers": 2, "text_num_attention_heads": 4, "text_num_key_value_heads": 2,
         "text_intermediate_size": 96, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1,
         "axes_dims_rope": (8, 4, 4)},
        {"hidden_states": (1, 16, 16), "encoder_hidden_states": (1, 6, 2, 64), "timestep": lambda: torch.tensor([0.5]),
         "position_ids": _ones(22, 3), "encoder_attention_mask": _ones(1, 6, dtype=torch.bool)},
    ),
    "LatteTransformer3DModel": (
        {"sample_size": 8, "num_layers": 2, "patch_size": 2, "attention_head_dim": 16, "num_attention_heads": 4,
         "caption_channels": 64, "in_channels": 4, "cross_attention_dim": 64, "out_channels": 8, "attention_bias": True,
         "activation_fn": "gelu-approximate", "num_embeds_ada_norm": 1000, "norm_type": "ada_norm_single",
         "video_length": 3,
         "norm_elementwise_affine": False, "norm_eps": 1e-6},
        {"hidden_states": (2, 4, 3, 8, 8), "encoder_hidden_states": (2, 8, 64), "timestep": _time,
         "enable_temporal_attentions": lambda: True},
    ),
    "LongCatAudioDiTTransformer": (
        {"dit_dim": 64, "dit_depth": 2, "dit_heads": 4, "dit_text_dim": 32, "latent_dim": 8, "text_conv": False},
        {"hidden_states": (2, 16, 8), "encoder_hidden_states": (2, 10, 32),
         "encoder_attention_mask": _ones(2, 10, dtype=torch.bool), "attention_mask": _ones(2, 16, dtype=torch.bool),
         "timestep": _fraction},
    ),
    "LTXVideoTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 16,
         "cross_attention_dim": 64, "num_layers": 2, "caption_channels": 64},
        {"hidden_states": (2, 32, 4), "encoder_hidden_states": (2, 8, 64), "timestep": _time,
         "encoder_attention_mask": _ones(2, 8, dtype=torch.bool), "num_frames": lambda: 2, "height": lambda: 4,
         "width": lambda: 4},
    ),
    "LTX2VideoTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "patch_size": 1, "patch_size_t": 1, "num_attention_heads": 4,
         "attention_head_dim": 16, "cross_attention_dim": 64, "audio_in_channels": 4, "audio_out_channels": 4,
         "audio_num_attention_heads": 2, "audio_attention_head_dim": 16, "audio_cross_attention_dim": 32,
         "num_layers": 2, "caption_channels": 64, "rope_double_precision": False},
        {"hidden_states": (2, 32, 4), "audio_hidden_states": (2, 9, 4), "encoder_hidden_states": (2, 8, 64),
         "audio_encoder_hidden_states": (2, 8, 64), "timestep": _fraction,
         "encoder_attention_mask": _ones(2, 8, dtype=torch.bool), "num_frames": lambda: 2, "height": lambda: 4,
         "width": lambda: 4, "audio_num_frames": lambda: 9, "fps": lambda: 25.0},
    ),
    "LuminaNextDiT2DModel": (
        {"sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 64, "num_layers": 2,
         "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 16, "learn_sigma": False, "qk_norm": True,
         "cross_attention_dim": 64, "scaling_factor": 1.0},
        {"hidden_states": (2, 4, 16, 16), "encoder_hidden_states": (2, 8, 64), "timestep": _fraction,
         "encoder_mask": _ones(2, 8), "image_rotary_emb": (384, 384, 8), "cross_attention_kwargs": dict},
    ),
    "MiniMaxMusic3Transformer1DModel": (
        {"in_channels": 8, "condition_dim": 64, "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16,
         "ff_inner_dim": 96, "rotary_dim": 8, "fourier_embedding_dim": 8},
        {"hidden_states": (2, 8, 24), "encoder_hidden_states": (2, 24, 64), "timestep": _fraction},
    ),
    "OmniGenTransformer2DModel": (
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96,
         "num_layers": 2, "pad_token_id": 0, "vocab_size": 100, "in_channels": 4, "time_step_dim": 4,
         "rope_scaling": {"long_factor": list(range(1, 9)), "short_factor": list(range(1, 9))}},
        {"hidden_states": (2, 4, 8, 8), "timestep": _fraction, "input_ids": _integers(2, 24),
         "input_img_latents": lambda: [torch.ones(1, 4, 8, 8)], "input_image_sizes": lambda: {0: [[0, 16]]},
         "attention_mask": _ones(2, 41, 41), "position_ids": lambda: torch.arange(41).repeat(2, 1)},
    ),
    "PriorTransformer": (
        {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "embedding_dim": 64, "num_embeddings": 7,
         "additional_embeddings": 4},
        {"hidden_states": (2, 64), "timestep": lambda: 2, "proj_embedding": (2, 64),
         "encoder_hidden_states": (2, 7, 64)},
    ),
    "PRXTransformer2DModel": (
        {"in_channels": 4, "patch_size": 2, "context_in_dim": 64, "hidden_size": 64, "mlp_ratio": 2.0, "num_heads": 4,
         "depth": 2, "axes_dim": [8, 8]},
        {"hidden_states": (2, 4, 8, 8), "encoder_hidden_states": (2, 8, 64), "timestep": _fraction},
    ),
    "StableAudioDiTModel": (
        {"sample_size": 4, "in_channels": 4, "num_layers": 2, "attention_head_dim": 16,
         "num_key_value_attention_heads": 2,
         "out_channels": 4, "cross_attention_dim": 64, "time_proj_dim": 16, "global_states_input_dim": 64,
         "cross_attention_input_dim": 64, "num_attention_heads": 4},
        {"hidden_states": (2, 4, 8), "timestep": _fraction, "encoder_hidden_states": (2, 6, 64),
         "global_hidden_states": (2, 1, 64),
         "rotary_embedding": lambda: (torch.ones(9, 8), torch.zeros(9, 8))},
    ),
    "Transformer2DModel": (
        {"in_channels": 32, "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "norm_num_groups": 8,
         "cross_attention_dim": 64},
        {"hidden_states": (2, 32, 8, 8), "encoder_hidden_states": (2, 8, 64)},
    ),
    "DreamLiteTransformer2DModel": (
        {"in_channels": 32, "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "norm_num_groups": 8,
         "cross_attention_dim": 64},
        {"hidden_states": (2, 32, 8, 8), "encoder_hidden_states": (2, 8, 64)},
    ),
    "TransformerTemporalModel": (
        {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 16, "num_layers": 1, "norm_num_groups": 4},
        {"hidden_states": (2, 16, 8, 8)},
    ),
    "UNet1DModel": (
        {"block_out_channels": (8, 8, 16, 16), "in_channels": 14, "out_channels": 14,
         "time_embedding_type": "positional", "use_timestep_embedding": True, "flip_sin_to_cos": False,
         "freq_shift": 1.0, "out_block_type": "OutConv1DBlock", "mid_block_type": "MidResTemporalBlock1D",
         "down_block_types": ("DownResnetBlock1D",) * 4, "up_block_types": ("UpResnetBlock1D",) * 3, "act_fn": "swish"},
        {"sample": (2, 14, 16), "timestep": _time},
    ),
    "UNetMotionModel": (
        {**_BLOCKS, "norm_num_groups": 16, "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
         "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"), "num_attention_heads": 2, "out_channels": 4,
         "in_channels": 4, "sample_size": 16},
        {"sample": (2, 4, 3, 8, 8), "timestep": lambda: torch.tensor([10]), "encoder_hidden_states": (6, 4, 64)},
    ),
    "UNetSpatioTemporalConditionModel": (
        {**_BLOCKS, "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
         "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), "num_attention_heads": (4, 4),
         "out_channels": 4, "in_channels": 4, "sample_size": 8, "projection_class_embeddings_input_dim": 96,
         "addition_time_embed_dim": 32},
        {"sample": (2, 2, 4, 8, 8), "timestep": lambda: torch.tensor([10]), "encoder_hidden_states": (2, 1, 64),
         "added_time_ids": _ones(2, 3)},
    ),
    "I2VGenXLUNet": (
        {**_BLOCKS, "norm_num_groups": 8, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
         "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "num_attention_heads": 2, "in_channels": 4,
         "out_channels": 4, "sample_size": 8},
        {"sample": (2, 4, 2, 8, 8), "timestep": _time, "fps": lambda: torch.tensor([8, 8]),
         "image_latents": (2, 4, 2, 8, 8), "image_embeddings": (2, 64), "encoder_hidden_states": (2, 8, 64)},
    ),
    "Kandinsky3UNet": (
        {"in_channels": 4, "time_embedding_dim": 64, "groups": 8, "attention_head_dim": 16, "layers_per_block": 1,
         "block_out_channels": (32, 32, 64, 64), "cross_attention_dim": 64, "encoder_hid_dim": 64},
        {"sample": (2, 4, 16, 16), "timestep": _time, "encoder_hidden_states": (2, 8, 64),
         "encoder_attention_mask": _ones(2, 8)},
    ),
    "UVit2DModel": (
        {"hidden_size": 64, "cond_embed_dim": 64, "encoder_hidden_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "intermediate_size": 96, "codebook_size": 64, "vocab_size": 72,
         "block_out_channels": 32,
         "micro_cond_encode_dim": 16, "micro_cond_embed_dim": 144, "sample_size": 8, "block_num_heads": 4,
         "hidden_dropout": 0.0, "attention_dropout": 0.0},
        {"input_ids": _integers(2, 8, 8), "encoder_hidden_states": (2, 8, 64), "pooled_text_emb": (2, 64),
         "micro_conds": _ones(2, 5)},
    ),
    "WanVACETransformer3DModel": (
        {**_WAN, "vace_layers": [0], "vace_in_channels": 12},
        {"hidden_states": (2, 4, 2, 8, 8), "encoder_hidden_states": (2, 8, 64),
         "control_hidden_states": (2, 12, 2, 8, 8), "timestep": _time},
    ),
    "WanAnimateTransformer3DModel": (
        {**_WAN, "in_channels": 12, "latent_channels": 4, "image_dim": 16,
         "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16}, "motion_encoder_size": 16, "motion_style_dim": 8,
         "motion_dim": 4, "motion_encoder_dim": 16, "face_encoder_hidden_dim": 16, "face_encoder_num_heads": 2,
         "inject_face_latents_blocks": 2},
        {"hidden_states": (1, 12, 21, 16, 16), "timestep": lambda: torch.tensor([30]),
         "encoder_hidden_states": (1, 12, 64), "encoder_hidden_states_image": (1, 12, 16),
         "pose_hidden_states": (1, 4, 20, 16, 16), "face_pixel_values": (1, 3, 77, 16, 16)},
    ),
    "ZImageTransformer2DModel": (
        {"all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 16, "dim": 64, "n_layers": 2,
         "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4, "qk_norm": True, "cap_feat_dim": 64,
         "axes_dims": [8, 4, 4], "axes_lens": [256, 32, 32]},
        {"x": lambda: [torch.ones(16, 1, 8, 8)], "cap_feats": lambda: [torch.ones(8, 64)],
         "t": lambda: torch.tensor([0.3])},
    ),
    "HeliosTransformer3DModel": (
        {**{k: v for k, v in _WAN.items() if k != "rope_max_seq_len"}, "rope_dim": (4, 6, 6),
         "has_multi_term_memory_patch": False, "guidance_cross_attn": False,
         "zero_history_timestep": False, "is_amplify_history": False},
        {"hidden_states": (2, 4, 2, 8, 8), "timestep": _time, "encoder_hidden_states": (2, 12, 64)},
    ),
    "StableCascadeUNet": (
        {"in_channels": 4, "out_channels": 4, "timestep_ratio_embedding_dim": 16, "patch_size": 1,
         "conditioning_dim": 64, "block_out_channels": (32, 64), "num_attention_heads": (0, 4),
         "down_num_layers_per_block": (1, 1), "up_num_layers_per_block": (1, 1),
         "down_blocks_repeat_mappers": (1, 1), "up_blocks_repeat_mappers": (1, 1),
         "block_types_per_layer": (("SDCascadeResBlock", "SDCascadeTimestepBlock"),
                                   ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock")),
         "clip_text_in_channels": 64, "clip_text_pooled_in_channels": 64, "clip_image_in_channels": 64, "clip_seq": 2,
         "switch_level": (False,)},
        {"sample": (2, 4, 8, 8), "timestep_ratio": _fraction, "clip_text_pooled": (2, 1, 64), "clip_text": (2, 6, 64),
         "clip_img": (2, 1, 64)},
    ),
    "T5FilmDecoder": (
        {"input_dims": 16, "targets_length": 12, "max_decoder_noise_time": 2000.0, "d_model": 64, "num_layers": 2,
         "num_heads": 4, "d_kv": 16, "d_ff": 96, "dropout_rate": 0.0},
        {"encodings_and_masks": lambda: [(torch.ones(2, 6, 64) * 0.3, torch.ones(2, 6))],
         "decoder_input_tokens": (2, 12, 16), "decoder_noise_time": _fraction},
    ),
    "Kandinsky5Transformer3DModel": (
        {"in_visual_dim": 4, "in_text_dim": 64, "in_text_dim2": 64, "time_dim": 32, "out_visual_dim": 4,
         "patch_size": (1, 2, 2), "model_dim": 64, "ff_dim": 96, "num_text_blocks": 1, "num_visual_blocks": 2,
         "axes_dims": (4, 6, 6)},
        {"hidden_states": (1, 2, 8, 8, 4), "encoder_hidden_states": (1, 8, 64),
         "timestep": lambda: torch.tensor([30.0]),
         "pooled_projections": (1, 64), "visual_rope_pos": lambda: [torch.arange(2), torch.arange(4), torch.arange(4)],
         "text_rope_pos": lambda: torch.arange(8)},
    ),
}  # fmt: skip
