"""Planted bugs of order: fences, waits for earlier kernels and for TMA, barriers of a warp, launch bounds.

A host orders all of this by itself; the emulator has to know what a GPU guarantees.
"""

from __future__ import annotations

from planted.bugs import Bug

_WAIT, _FENCE, _ASYNC = "ptx::wait_for_previous();", "__threadfence();", "ptx::fence_async_shared();"
_STORED = "ptx::bulk_store_wait_read();"


def _without_wait(file: str, check: str, nth: int = 0, what: str = "", fast: bool = False) -> Bug:
    return Bug(f"no wait in {what or file}", file, _WAIT, "", check, "before_wait", nth, fast)


WAITS = [
    _without_wait("index/embedding_sum.cu", "embedding_backward"),
    _without_wait("index/embedding_order.cu", "embedding_many_ids"),
    _without_wait("index/index_select.cu", "sort_row_chunks"),
    _without_wait("loss/cross_entropy.cu", "cross_entropy_mean"),
    _without_wait("loss/divergence.cu", "divergence_mean"),
    _without_wait("shared/column_sum.cu", "rms_norm_backward_bulk"),
    _without_wait("quant/column_absmax.cu", "column_maxima"),
    _without_wait("quant/quantize_fp8.cu", "quantize_tensor"),
    _without_wait("multi/multi_reduce.cu", "norms_of_small_tensors"),
    _without_wait("multi/multi_scale.cu", "clip_small_norm"),
    _without_wait("multi/multi_adamw.cu", "adamw_step", 1),
    _without_wait("common/rank.cuh", "index_of_lists", fast=True),
    _without_wait("moe/index.cu", "index_of_maps", what="the list built from a map"),
    _without_wait("moe/row_id.cu", "row_ids"),
    _without_wait("router/router_gemm_fwd.cu", "router_gemm_forward", 0, "the terms of the weight"),
    _without_wait("router/router_gemm_dx.cu", "router_gemm_many_tiles"),
]

FENCES = [
    Bug("no fence before the ticket of a loss", "router/losses.cu", _FENCE, "", "router_losses", "missing_fence", 0,
        fast=True),
    Bug("no fence after the last ticket of a loss", "router/losses.cu", _FENCE, "", "router_losses",
        "missing_fence", 1),
    Bug("no fence before arriving with a piece", "index/embedding_sum.cu", _FENCE, "", "embedding_long_run",
        "missing_fence", 0),
    Bug("no fence after arriving last", "index/embedding_sum.cu", _FENCE, "", "embedding_long_run",
        "missing_fence", 1),
    Bug("no fence before the ticket of a long row", "loss/cross_entropy_few_rows.cu", _FENCE, "",
        "cross_entropy_few_rows", "missing_fence", 0),
    Bug("no proxy fence before wgmma", "router/router_gemm_dx.cu", _ASYNC, "", "router_gemm_many_tiles",
        "missing_fence", 0, fast=True),
    Bug("no proxy fence before a tensor store", "router/router_gemm_dx.cu", _ASYNC, "", "router_gemm_many_tiles",
        "missing_fence", 1),
    Bug("no proxy fence before logits are stored", "router/router_gemm_fwd.cu", _ASYNC, "", "router_gemm_forward",
        "missing_fence", 0),
    Bug("no proxy fence before normalised rows are stored", "router/rms_norm_router.cu", _ASYNC, "",
        "rms_norm_router", "missing_fence", 0),
    Bug("no proxy fence before a slot is filled again", "norm/bulk_rows.cuh", _ASYNC, "", "rms_norm_backward_bulk",
        "missing_fence", 0),
    Bug("mbarrier used by TMA before its fence", "moe/permute_bulk.cu", "ptx::mbarrier_fence_init();", "",
        "permute_bulk", "missing_fence"),
]  # fmt: skip

STORES = [
    Bug("tile written over while it is stored", "router/router_gemm_dx.cu",
        f"if (threadIdx.x % 128 == 0) {_STORED}", "", "router_gemm_many_tiles", "race", 0, fast=True),
    Bug("kernel ends before its rows are stored", "moe/permute_bulk.cu", _STORED, "", "permute_bulk", "race"),
    Bug("kernel ends before its logits are stored", "router/router_gemm_fwd.cu", _STORED, "", "router_gemm_forward",
        "race"),
]  # fmt: skip

WARPS = [
    Bug("digit counted before all lanes read it", "index/embedding_sort.cu",
        "__syncwarp();\n            if (active &&", "if (active &&", "embedding_backward", "race"),
    Bug("digit read before it is counted", "index/embedding_sort.cu",
        "before + __popc(same);\n            __syncwarp();", "before + __popc(same);", "embedding_two_rounds", "race"),
    Bug("block larger than its bounds", "norm/rms_norm.cu",
        "__launch_bounds__(512, 1)", "__launch_bounds__(64, 1)", "rms_norm_long_rows", "launch_limit"),
]  # fmt: skip

ORDERING = [*WAITS, *FENCES, *STORES, *WARPS]
