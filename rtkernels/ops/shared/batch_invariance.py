"""What every public function promises inside of ``rtkernels.batch_invariant``: the one list, which tests fuzz.

``tests/contracts/test_batch_invariance.py`` compares rows of a batch with the same rows alone, and the table in
``docs/how_to/batch_invariance.md`` with this one.
"""

from __future__ import annotations

from typing import NamedTuple

ROW, SEQUENCE, BATCH, WEIGHTS, REFUSED = "row", "sequence", "batch", "weights", "refused"
MEANING = {
    ROW: "a row of the result depends on its own row of the inputs and on the weights",
    SEQUENCE: "a sequence of the result depends on its own sequence of the inputs",
    BATCH: "one result of all rows, by definition; the same call gives the same bits at any level",
    WEIGHTS: "computes with weights, gradients or tables; there are no rows of a batch",
    REFUSED: "raises an ArgumentError at every level",
}


class Promise(NamedTuple):
    """``kind``: a key of ``MEANING``. ``choice``: what is chosen under a level, or refused, where that says more."""

    kind: str
    choice: str = ""


_BY_COLUMNS = "kernel and threads by columns; no kernel for few rows"
_PRODUCT = "one backend per types of operands, k is not split; refused: backends by name that split k"
_ROW_SCALES = "refused: a scale that covers several rows"
_SCALES_OF_TOKENS = "scales cover several tokens"
_IN_ORDER = "level 3: adds 128 rows at a time to a float32 sum, in order"
_OVER_PAGES = (
    "refused over pages on sm_90: heads wider than 128, ALiBi, a number of query heads per key head that is no power "
    "of two up to 64"
)
_OF_WEIGHT = "refused at level 3: gradients of weights"
PROMISES: dict[str, Promise] = {
    **dict.fromkeys(
        ("act", "add_", "add_bias", "add_residual", "append_kv_cache", "causal_conv1d_step", "cfg_combine",
         "channel_mul", "dequantize_fp8", "dequantize_fp8_hadamard", "dequantize_fp8_smooth", "dequantize_mxfp4",
         "dequantize_mxfp8", "dequantize_nvfp4", "embedding", "euler_step", "gated_delta_rule_step", "glu", "glu_fp8",
         "glu_fp8_backward", "glu_smooth_fp8", "glu_smooth_fp8_backward", "hadamard",
         "index_select", "indexer_logits", "indexer_topk", "jsd", "kl_div", "lightning_attention_step",
         "merge_attention", "mla_rope", "moe_permute",
         "moe_permute_fp8", "moe_permute_smooth", "moe_unpermute", "patchify", "qkv_split", "quantize_fp8_experts",
         "quantize_fp8_hadamard", "quantize_fp8_smooth", "quantize_mxfp4", "quantize_mxfp8", "repeat_heads", "rope",
         "row_dot", "rwkv_key", "scale_", "sort_chunks", "ssd_step", "topk", "topk_router", "transpose",
         "transpose_experts"),
        Promise(ROW),
    ),
    "rms_norm": Promise(ROW, "kernel and threads by columns; refused: a Quant of the tensor without a scale"),
    "group_rms_norm_gate": Promise(ROW, _OF_WEIGHT),
    "qk_norm_rope": Promise(ROW, _OF_WEIGHT),
    "layer_norm": Promise(ROW, _BY_COLUMNS),
    "rms_norm_fp8": Promise(ROW, "statistics by columns, in a pass of their own for transposed codes"),
    "layer_norm_fp8": Promise(ROW, "statistics by columns, in a pass of their own for transposed codes"),
    "softmax": Promise(ROW, _BY_COLUMNS),
    "log_softmax": Promise(ROW, _BY_COLUMNS),
    "cross_entropy": Promise(ROW, "losses by the kernel of calls without gradients; threads by columns"),
    "linear_cross_entropy": Promise(ROW, "chunks of rows, never slabs of the vocabulary; products as scaled_mm"),
    "linear_logprob": Promise(ROW, "slabs of 16384 columns, whatever chunk_bytes is; products as scaled_mm"),
    "linear_divergence": Promise(
        ROW, "gradients from logits that are computed again, in slabs of 16384 columns; products as scaled_mm"
    ),
    "scaled_mm": Promise(ROW, f"{_PRODUCT}; {_IN_ORDER}, with accumulate"),
    "gated_mm": Promise(ROW, _PRODUCT),
    "grouped_mm": Promise(ROW, _PRODUCT),
    "grouped_mm_masked": Promise(ROW, _PRODUCT),
    "fp8_linear": Promise(ROW, "products as scaled_mm; refused: recipe 'tensor'"),
    "router_gemm": Promise(ROW, "tile and splits of k by experts and depth"),
    "rms_norm_router": Promise(ROW, "norm and product in two launches"),
    "quantize_fp8": Promise(ROW, f"{_ROW_SCALES}; weights: quantise them before"),
    "quantize_int8": Promise(ROW, _ROW_SCALES),
    "quantize_nvfp4": Promise(ROW, "refused: without global_scale"),
    "attention": Promise(SEQUENCE, "the kernel of prompts for any number of queries; keys are not split"),
    "attention_varlen": Promise(SEQUENCE, f"as attention; {_OVER_PAGES}"),
    "attention_decode": Promise(
        SEQUENCE, f"as attention; an 8-bit cache: the decoding kernel, keys are not split; {_OVER_PAGES}"
    ),
    "mla_attention": Promise(SEQUENCE, "as attention"),
    "sdpa": Promise(SEQUENCE, "as attention"),
    "mla_decode": Promise(SEQUENCE, "keys are not split"),
    "sparse_mla": Promise(ROW, "keys are not split"),
    "lightning_attention": Promise(SEQUENCE, "one segment, the kernel that takes packed sequences, too"),
    "gated_delta_rule": Promise(
        SEQUENCE,
        f"sequences are not split into segments; prompts in chunks: at multiples of 64 tokens; {_OF_WEIGHT}",
    ),
    "ssd": Promise(SEQUENCE, f"prompts in chunks: at multiples of 64 tokens; {_OF_WEIGHT}"),
    "causal_conv1d": Promise(SEQUENCE, _OF_WEIGHT),
    "conv": Promise(SEQUENCE, "depthwise kernels, products as scaled_mm; refused: torch's, and gradients that are"),
    **dict.fromkeys(
        ("check_labels", "column_absmax", "id_bounds", "load_balancing_loss", "moe_index", "moe_row_id_map", "moe_rows",
         "moe_permute_smooth_t", "router_z_loss", "scatter_add", "smooth_factors"),
        Promise(BATCH),
    ),
    **dict.fromkeys(
        ("fp8_weight", "multi_clip_", "multi_clip_norm_", "multi_copy_", "multi_count_zeros", "multi_norm",
         "multi_scale_", "nonzero_mv", "nvfp4_scale_bytes", "nvfp4_swizzle", "nvfp4_unswizzle",
         "quantize_fp8_shard_", "rope_table", "tensor_list"),
        Promise(WEIGHTS),
    ),
    "embedding_grad_": Promise(WEIGHTS, "level 3: adds token by token to a float32 sum, in order"),
    "grouped_wgrad": Promise(WEIGHTS, f"{_IN_ORDER}; of each group, if micro-batches cut it there"),
    **dict.fromkeys(
        ("attention_quantized", "quantize_qk", "quantize_v", "sage_attention"), Promise(REFUSED, _SCALES_OF_TOKENS)
    ),
    "group_norm": Promise(REFUSED, "the number of groups in a batch decides how their statistics are added"),
    "decode_linear": Promise(REFUSED, "k is split by the number of rows: call scaled_mm"),
    "chunk_attention": Promise(REFUSED, "the kernel is for as many sequences as run at once: call attention"),
}  # fmt: skip


def table() -> str:
    """Return the promises as a table in Markdown, functions with the same promise in one row."""
    rows: dict[Promise, list[str]] = {}
    for name, promise in sorted(PROMISES.items()):
        rows.setdefault(promise, []).append(f"`{name}`")
    order = [*MEANING]
    lines = ["| functions | promise | what is chosen, or refused |", "|---|---|---|"]
    for promise, names in sorted(rows.items(), key=lambda row: (order.index(row[0].kind), row[0].choice)):
        lines.append(f"| {', '.join(names)} | {promise.kind} | {promise.choice} |")
    return "\n".join(lines) + "\n"
