"""What ``make_coverage.py`` adds to the calls of docs/how_to/migrate.md: calls of other entries, and gaps.

A gap is (system, entry, call, what is missing). The call is what would have to work; while it is refused, the entry is
partly covered, and once it works, the gap is closed by itself. None stands for what no call on a CPU can show.
"""

# Entries beside those of tests/support/catalogues.py.
ENTRIES = {
    "FlagGems": [
        "moe_align_block_size_triton", "conv1d", "conv2d", "conv3d", "conv_depthwise2d", "apply_gems_patches_to_vllm",
        "enable", "only_enable", "use_gems", "all_ops",
    ],
}  # fmt: skip

CALLS = {
    "gn_kernels": {
        "quantize_mx": "(rtk.quantize_mxfp8(x), rtk.quantize_mxfp4(x))",
        "dequantize_mx": "(rtk.dequantize_mxfp8(*rtk.quantize_mxfp8(x)), rtk.dequantize_mxfp4(*rtk.quantize_mxfp4(x)))",
        "quantize_nvfp4": "rtk.quantize_nvfp4(x)",
        "quantize_nvfp4_triton": "rtk.quantize_nvfp4(x, swizzled=True)",
        "pack_block_scales_nv": "rtk.nvfp4_swizzle(sa_16)",
        "permute_nv_sf": "rtk.nvfp4_swizzle(sa_16)",
        "unpermute_nv_sf": "rtk.nvfp4_unswizzle(sa_16_t, 9, 256)",
    },
    "FlagGems": {
        "weight_norm": 'rtk.aten.table.select("_weight_norm_interface", None)',
        "outer": 'rtk.aten.table.select("mul", None)',
        "all_ops": "rtk.aten.overloads()",
    },
}

NOT_APPLICABLE = {
    ("FlashRT", "load_fmha_library"): "nothing to load",
    ("FlashRT", "load_fmha_strided_library"): "nothing to load",
    ("FlagGems", "get_scheduler_metadata"): "our kernels need no schedule",
    ("gn_kernels", "sm100_gemm_rs"): "a product with a reduce-scatter over NVLink",
}

GAPS = [
    ("linghe", "triton_lightning_attention_forward",
     "rtk.lightning_attention(q.float(), k.float(), v.float(), decay)", "float32 operands"),
    ("linghe", "triton_lightning_attention_backward",
     "rtk.lightning_attention(q.float(), k.float(), v.float(), decay)", "float32 operands"),
    ("FlashRT", "GemmRunner", "rtk.tune", "a tuner for the caller's shapes"),
    ("gn_kernels", "triton_attn", 'rtk.attention(q.half(), k.half(), v.half(), acc="fp16")', "sums in float16"),
    *(("gn_kernels", entry, None, "tcgen05 by backend=\"tcgen05\" only: it was never run on a GPU")
      for entry in ("sm100_mm_bf16", "sm100_mm_mxfp8", "sm100_mm_nvfp4")),
    ("FlagGems", "concat_and_cache_mla",
     "rtk.append_kv_cache(torch.zeros(1, 9, 1, 512).half(), torch.zeros(1, 9, 1, 64).half(), "
     "*torch.zeros(2, 16, 1, 576).half().split((512, 64), -1), slots=torch.arange(9, dtype=torch.int32)[None])",
     "512 + 64 columns"),
    ("FlagGems", "reshape_and_cache_flash",
     "rtk.append_kv_cache(k.float(), v.float(), k_cache.float(), k_cache.float(), lengths, page_table=table)",
     "float32"),
]  # fmt: skip
