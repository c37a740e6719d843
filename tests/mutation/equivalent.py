"""Mutants of the mutator that change no result: each with the reason why no test can kill it."""

from __future__ import annotations

_REASONS: dict[str, tuple[str, ...]] = {
    "steps are so wide that the next multiple is as far from either bound": (
        "act/glu_fp8_stream.cu:bound:945c0227", "act/glu_tile.cuh:bound:d93ea518",
        "attention/append_kv_cache.cu:bound:388cccf0", "common/scan.cuh:bound:7b7276e7",
        "gemm/gemm_mma.cu:bound:ec272d76", "moe/permute_smooth.cu:bound:ff652383",
        "norm/group_rms_norm_gate_rows.cuh:bound:9dec1b12", "quant/hadamard.cuh:bound:ba82bbef",
        "quant/tile_square_slots.cuh:bound:2e90821f", "rope/qk_norm_rope_fwd.cu:bound:0d4da948",
        "router/topk.cu:bound:7f62e3ba",
        "attention/decode_heads.cu:bound:eae01b0c",
    ),
    "all threads that now write have the same number for the same place": (
        "attention/attention_sm90_bwd_rows.cu:tail:a3445be4", "attention/mma_tile.cuh:condition:a14576f7",
        "index/id_bounds.cu:condition:37b027e1", "loss/cross_entropy_few_rows.cu:tail:59c74b25",
        "loss/row_cluster.cuh:condition:c14abdc1", "loss/row_in_registers.cuh:tail:058509d1",
        "multi/multi_reduce.cu:condition:9f70bddf", "quant/quantize_fp8_generic.cu:tail:583c9472",
        "reduce/group_norm.cu:tail:375f48d0", "rope/mla_rope.cu:condition:a8af3f2a",
        "router/rms_norm_router.cu:condition:f558f843", "attention/attention_quantize.cu:condition:f3dfa9c2",
        "attention/lightning_sm90.cu:condition:6918fafe",
        "attention/indexer_logits.cu:condition:a93aab05",
    ),
    "the way around vectors, or for infinities, gives the same numbers for the others": (
        "multi/lane_moments.cuh:tail:b4e55d68", "multi/multi_moments.cu:clamp:0dcf5345",
    ),
    "the other side of the condition holds where the bound was": (
        "norm/norm_fp8_single_read.cu:bound:7e132ef4",
    ),
    "its only caller has one load, whose offset is 0": (
        "common/row_elements.cuh:sign:498feaba",
    ),
    "the value is replaced before it is read, or multiplied by 0": (
        "act/glu_nvfp4.cu:initial:55187507", "loss/cross_entropy.cu:initial:cd7a73b3",
        "loss/cross_entropy_grad.cu:initial:5e97963f", "norm/norm_fp8_single_read.cu:initial:f979dd12",
        "quant/column_absmax.cu:index:5eaf97c4", "quant/nvfp4.cu:initial:ed99619c",
        "router/rms_norm_router.cu:initial:4ca58eb5", "router/topk_router.cu:initial:788b70d2",
        "router/topk_router_bwd.cu:initial:2e492920", "router/topk_router_small.cu:initial:58adce54",
        "reduce/softmax_bwd.cu:shift:706eeaa9",
        "attention/indexer_logits.cu:initial:56af1a3b",
    ),
    "which half of a scratch is used first decides nothing": (
        "norm/group_rms_norm_gate_bwd.cu:initial:3fe56b01.2", "quant/smooth.cu:initial:aa821001",
        "reduce/softmax.cu:initial:36dbbdc5",
    ),
    "a largest magnitude this small gives the smallest scale all the same": (
        "quant/quantize_fp8.cu:initial:bc380e9f.3", "quant/quantize_fp8_tile.cu:initial:a026a6cd",
    ),
    "only time: work that is masked, unused or as good in another way is done": (
        "attention/attention_mma_fwd.cu:bound:429c98ac", "attention/attention_mma_fwd.cu:tail:5e64fb44",
        "attention/attention_sm90_bwd.cu:tail:bd3f6330", "attention/lightning_segment.cuh:sign:a697090b",
        "attention/lightning_segment.cuh:stride:87ae70db", "attention/masks.cuh:bound:3529ee02",
        "attention/masks.cuh:tail:6bece484", "attention/mma_walk.cuh:bound:ad0eb8c9",
        "common/rank.cuh:tail:60a0aabf", "gemm/gemm_cluster.cu:tail:9b63f150",
        "gemm/gemm_mma_codes.cuh:initial:e4e47531", "layout/strided_copy.cu:tail:9f115a37",
        "norm/group_rms_norm_gate_bwd.cu:tail:405bb1c8", "norm/norm_fp8_single_read.cuh:tail:47c00bea",
        "quant/quantize_fp8_experts.cu:tail:d5607e39", "quant/quantize_fp8_transposed.cu:condition:d02911bd",
        "quant/tile_stream.cuh:bound:731672a4", "reduce/reduce_rows.cu:bound:cb4fdbed",
        "reduce/softmax_bwd.cu:tail:49740bf3", "router/top8.cuh:shift:83c8ae6b", "router/top8.cuh:tail:7a419e26",
        "sort/block_sort.cu:tail:85418fe1", "sort/radix.cu:tail:ab0afdb1", "window/places.cuh:condition:0efc5271",
    ),
    "the guard is there for numbers that this cannot meet, or another one stands behind it": (
        "attention/append_kv_cache.cu:tail:462e359f", "attention/mla_decode.cu:clamp:b0757441",
        "attention/qkv_split.cu:clamp:babf7a96", "common/tile_scheduler.cuh:clamp:369233d3",
        "moe/row_id.cu:tail:3a3ae6be", "norm/norm_modulated.cuh:tail:c9efdaa0",
        "pointwise/concat.cu:tail:c96c00ed", "pointwise/triangle.cu:bound:6f34df7a",
        "pointwise/triangle.cu:tail:c956367b", "quant/channel.cu:clamp:59432f74",
        "reduce/nll_loss.cu:bound:43d2dbe6", "router/router_gemm_terms.cu:clamp:92371400",
        "window/upsample.cu:clamp:524401b4",
        "attention/gated_delta_rule_reverse.cu:clamp:eec1c319",
        "attention/ssd_scan.cu:clamp:039b62a9",
    ),
    "bits that are added belong to other lanes' numbers or are the same in all that are compared": (
        "act/glu_fp8_stream.cu:stride:50aee6ca", "index/embedding_sort.cu:shift:51dd8247",
        "quant/hadamard.cuh:stride:37676276", "scan/compact.cu:shift:cb06e14f",
    ),
    "what is computed or looked up without the guard is never read": (
        "attention/kda_chunk.cu:clamp:a8bd0e2b", "attention/sparse_mla.cu:tail:42c7798b",
    ),
    "what would be left out is masked or swapped as a whole": (
        "pointwise/concat.cu:condition:c83ef454", "pointwise/triangle.cu:index:fda1fd54",
    ),
    "no kernel calls it with anything else, or at all": (
        "common/pipeline.cuh:phase:e280334f", "norm/rms_norm.cu:sign:7bcfa691",
    ),
    "another barrier of the walk stands between two uses": (
        "norm/group_rms_norm_gate_bwd.cu:phase:1e47b26f", "norm/rms_norm.cu:phase:625e3e56",
    ),
    "no data passes between the lanes that meet here": ("attention/attention_sm90_bwd_pass.cu:barrier:f45ceb08.3",),
    "a host shifts by the last five bits as the mutant wants it; a sanitized build sees it": (
        "router/rows.cuh:stride:3ba9a0ed",
    ),
    "says no more than that a later launch may begin, which the emulator has in order": (
        "router/router_gemm_dw.cu:barrier:9c4ec60d.2",
    ),
}  # fmt: skip

EQUIVALENT: dict[str, str] = {name: reason for reason, names in _REASONS.items() for name in names}
