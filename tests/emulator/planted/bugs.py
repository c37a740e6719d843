"""Bugs planted in the device sources, one edit each, and what must catch them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """One edit of a device source.

    Attributes:
        name: Unique, says what is wrong.
        file: Relative to ``cuda_src``.
        old: Text in it.
        new: What it becomes.
        check: Name of a function in ``checks.py`` or ``checks_routing.py``.
        kind: The kind that the emulator must report (``EmulatorError.kind``); "" if results are wrong, or any report
            will do.
        nth: Which occurrence of the text, from 0; None where it is the only one.
        fast: Runs with every test run, the others with those marked slow.
    """

    name: str
    file: str
    old: str
    new: str
    check: str
    kind: str = ""
    nth: int | None = None
    fast: bool = False


NORM = [
    Bug("offset of the gain left out", "norm/rms_norm.cu",
        "rstd * (gain[i] + static_cast<float>(offset))", "rstd * gain[i]", "rms_norm_offset", fast=True),
    Bug("sum with the residual not stored", "norm/rms_norm.cu",
        "ptx::st<sizeof(T) * VEC>(sum + row * cols + column + c * pitch, raw[c]);", "", "rms_norm_sum"),
    Bug("one factor of rstd too few", "norm/rms_norm.cu",
        "product * inverse * rstd * rstd * rstd;", "product * inverse * rstd * rstd;", "rms_norm_backward"),
    Bug("slots of missing rows not cleared", "norm/rms_norm.cu",
        "if (unused_stages || column + c * pitch >= end) ring.zero(memory, c);",
        "if (column + c * pitch >= end) ring.zero(memory, c);", "rms_norm_backward", "uninitialised_shared"),
    Bug("rows through the same scratch", "norm/rms_norm.cu",
        "group_reduce_pair<Sum, true>(square, product, group, scratch, phase);",
        "group_reduce_pair<Sum, true>(square, product, group, scratch, 0);", "rms_norm_backward_groups", "race"),
    Bug("bias of odd rows left out", "norm/layer_norm.cu",
        "if (bias != nullptr) load_any_gain<T, VEC>(bias, weight_fp32, column, 0.0f, shift);", "",
        "layer_norm_odd_rows"),
    Bug("scale of a missing row", "norm/norm_fp8.cu",
        "own_group * kGroup < static_cast<u32>(width) && row_exists)",
        "own_group * kGroup < static_cast<u32>(width))", "norm_fp8_rows", "out_of_bounds"),
    Bug("weights of the first group for all", "norm/group_rms_norm_gate.cu",
        "weight + g * weight_group + column + c * pitch", "weight + column + c * pitch", "gated_groups"),
]  # fmt: skip

ACT = [
    Bug("row times stride in 32 bits", "act/glu.cu",
        "load_raw<T, VEC>(gate + row * gate_stride + tile.column)",
        "load_raw<T, VEC>(gate + static_cast<int>(row * gate_stride) + tile.column)", "glu_far_rows", nth=0, fast=True),
    Bug("blocks in z do as those in front", "act/glu.cu",
        "(static_cast<i64>(blockIdx.z) * gridDim.y + blockIdx.y)", "static_cast<i64>(blockIdx.y)", "glu_blocks_in_z"),
    Bug("columns past the end", "act/glu.cu", "if (tile.column >= cols) return;", "", "glu_odd_columns",
        "out_of_bounds", nth=0),
    Bug("weight left out of the gradient", "act/glu.cu",
        "const float weighted = g[i] * w;", "const float weighted = g[i];", "glu_weighted_backward"),
    Bug("gate taken for up", "act/glu_fp8_generic.cu",
        "convert_four<FP32>(next[1],", "convert_four<FP32>(next[0],", "glu_fp8_both"),
    Bug("scales of columns read before they are there", "act/glu_tile.cuh",
        "if (out.q_t == nullptr) return;\n    __syncthreads();", "if (out.q_t == nullptr) return;", "glu_fp8_both",
        "race"),
    Bug("slope of gelu without its density", "act/activations.cuh",
        "n.below + x * n.density", "n.below", "glu_weighted_backward"),
]  # fmt: skip

QUANT = [
    Bug("scale of zeros is 0", "common/fp8_scale.cuh",
        "__float_as_uint(fmaxf(quotient, kScaleFloor))", "__float_as_uint(quotient)", "quantize_rows"),
    Bug("powers of two rounded down", "common/fp8_scale.cuh",
        "(bits + 0x7fffffu) & 0xff800000u", "bits & 0xff800000u", "quantize_powers_of_two"),
    Bug("ties of software codes not to even", "common/convert.cuh",
        "((1u << (kShift - 1)) - 1u) + odd", "0u", "quantize_in_software"),
    Bug("maximum of the first block for all", "quant/quantize_fp8.cu",
        "amax = fmaxf(amax, partial[i]);", "amax = partial[0];", "quantize_tensor"),
    Bug("scales of groups past the end", "quant/quantize_fp8_tile.cu",
        "own_row < rows_here && own_group * kGroup", "own_group * kGroup", "quantize_groups", "out_of_bounds"),
    Bug("scale of the first block of columns for all", "quant/dequantize_fp8.cu",
        "load_keep<float, 1>(row_scale + (column >> 7) * scale_column, one)",
        "load_keep<float, 1>(row_scale, one)", "dequantize_blocks"),
    Bug("rows past the end of a split", "quant/column_absmax.cu",
        "min(first + rows_per_block, rows)", "first + rows_per_block", "column_maxima", "out_of_bounds"),
    Bug("transform not normalised", "quant/hadamard.cu",
        "for (int i = 0; i < N; ++i) v[i] *= times;", "", "hadamard_blocks"),
    Bug("last exchange of the transform missing", "quant/hadamard.cuh",
        "if (offset < lanes) {", "if (2 * offset < lanes) {", "hadamard_blocks"),
    Bug("factors of expert 0 for all", "quant/smooth.cu",
        "expert[row] * x_cols", "expert[0] * x_cols", "smooth_experts"),
]  # fmt: skip

MOE = [
    Bug("pads of an expert not written", "moe/index.cu",
        "slots[row] = -1;", "(void)row;", "index_of_lists", nth=0, fast=True),
    Bug("pads after the last expert not written", "moe/index.cu",
        "slots[row] = -1;", "(void)row;", "index_of_lists", nth=1, fast=True),
    Bug("tail of the list of a token not written", "moe/index.cu",
        "list[token * top_k + j] = -1;", "(void)token;", "index_of_maps_in_zeros", fast=True),
    Bug("one choice more than there is room for", "moe/index.cu",
        "if (choice < max_choices) {", "if (choice <= max_choices) {", "index_of_maps"),
    Bug("dropped choices added up without a barrier", "moe/index.cu",
        "add_from_warp(&lost, own);\n    __syncthreads();", "add_from_warp(&lost, own);", "index_of_many_experts"),
    Bug("own chunk counted among earlier ones", "common/chunks.cuh",
        "before[i] += chunk + k * groups < mine ? count : 0u;",
        "before[i] += chunk + k * groups <= mine ? count : 0u;", "index_of_many_chunks"),
    Bug("scan of the first lane reads itself", "common/scan.cuh",
        "(lane == 0 ? 0u : left)", "left", "index_of_lists"),
    Bug("count written before all lanes read it", "common/rank.cuh",
        "__syncwarp();\n                if (exists &&", "if (exists &&", "index_of_many_chunks", "race"),
    Bug("second __syncwarp of a round missing", "common/rank.cuh",
        "before + __popc(same));\n                __syncwarp();", "before + __popc(same));",
        "index_of_many_rounds", "race", fast=True),
    Bug("rows of dropped choices written", "moe/permute.cu",
        "if (row < 0) continue;", "", "permute_dropped", "out_of_bounds", nth=0),
    Bug("probability left out", "moe/unpermute.cu",
        "fmaf(weight, v[i], sum[u][i])", "fmaf(1.0f, v[i], sum[u][i])", "unpermute_weighted"),
    Bug("dot products through the same scratch", "moe/unpermute.cu",
        "first += kChoices, phase ^= 1", "first += kChoices", "unpermute_backward", "race"),
    Bug("dot product of the last warp missing", "moe/unpermute.cu",
        "for (int w = 0; w < warps; ++w) total", "for (int w = 0; w + 1 < warps; ++w) total", "unpermute_backward"),
]  # fmt: skip

ROUTER = [
    Bug("partial sums not cleared after promotion", "router/router_gemm_mma.cu",
        "+= (&part[0][0][0])[i], (&part[0][0][0])[i] = 0.0f;", "+= (&part[0][0][0])[i];", "router_gemm_deep"),
    Bug("stage read before it arrived", "router/router_gemm_mma.cu",
        "ptx::cp_async_wait<kMmaStages - 2>();", "ptx::cp_async_wait<kMmaStages - 1>();", "router_gemm_deep"),
    Bug("candidate floor from one warp too few", "router/topk.cu",
        "lane < full ? floors[lane]", "lane < full - 1 ? floors[lane]", "topk_second_warp_lower", fast=True),
    Bug("floors read before they are there", "router/topk.cu",
        "if (threadIdx.x == 0) found = 0u;\n    __syncthreads();", "if (threadIdx.x == 0) found = 0u;",
        "topk_long_rows"),
    Bug("zeros over gradients", "router/topk.cu",
        "__syncwarp();  // zeros first, then the gradients among them", "", "topk_backward"),
    Bug("dense row of the token before", "router/topk_router.cu",
        "if (lane + j * kWarp < k) row_probs[expert[j]] = 0.0f, row_map[expert[j]] = 0;", ";", "topk_router_dense"),
    Bug("sums of lanes with different maxima", "router/losses.cu",
        "running_max == kMinusInfinity ? 1.0f : expf(running_max - all.top)", "1.0f", "router_loss_bf16"),
    Bug("parts of the block read before they are there", "router/losses.cu",
        "parts[threadIdx.x / kWarp] = v;\n    __syncthreads();", "parts[threadIdx.x / kWarp] = v;", "router_losses"),
]  # fmt: skip

LOSS = [
    Bug("mean over no rows", "loss/cross_entropy.cu",
        "count == 0.0f ? 0.0f : whole / count", "whole / count", "cross_entropy_all_ignored"),
    Bug("label not subtracted from the gradient", "loss/cross_entropy.cu",
        "gradient.store_one(dx + label, z, cap, gradient.target);", "gradient.store_one(dx + label, z, cap, 0.0f);",
        "cross_entropy_backward"),
    Bug("ignored rows counted", "loss/divergence.cu",
        "count += counts(labels, labels_int64, ignore, row);", "count += 1;", "divergence_mean"),
    Bug("sums of the total added without a barrier", "loss/divergence.cu",
        "__syncthreads();", "", "divergence_mean", nth=0),
]  # fmt: skip

REDUCE = [
    Bug("columns past the length not masked", "reduce/softmax.cu",
        "            if (c * pitch + VEC > valid) mask_tail<T, VEC, LOG>(out, valid - c * pitch);", "",
        "softmax_lengths"),
    Bug("length past the end of the row", "reduce/softmax_rows.cuh",
        "length < 0 ? 0 : length < cols ? length : cols;", "length < 0 ? 0 : length;", "softmax_lengths",
        "out_of_bounds"),
    Bug("row of nothing but -inf", "reduce/softmax.cu",
        "top(row.top == -kInfinity ? 0.0f : row.top)", "top(row.top)", "softmax_lengths"),
    Bug("result of a missing row", "reduce/row_dot.cu",
        "if (row < rows && group.thread == 0) store<T, 1>(out + row, total);",
        "if (group.thread == 0) store<T, 1>(out + row, total);", "row_dot_odd_rows", "out_of_bounds"),
    Bug("one exchange too many in small groups", "common/reduce.cuh",
        "if (offset < lanes) v = Op::apply", "if (offset <= lanes) v = Op::apply", "row_dot_odd_rows"),
    Bug("warps of a group not waited for", "common/reduce.cuh",
        "group_barrier<kManyGroups>(group);", "", "rms_norm_long_rows", nth=0),
    Bug("last row of partial sums missing", "shared/column_sum.cu",
        "(rows + kColumnSumWarps - 1 - warp) / kColumnSumWarps", "(rows - 1) / kColumnSumWarps", "rms_norm_backward"),
]  # fmt: skip

OTHERS = [
    Bug("elements before the rotary part not copied", "rope/rope.cu",
        "const int at = i < args.first ? i : i + angles.rotary;", "const int at = i + angles.rotary;",
        "rope_odd_heads"),
    Bug("table row not checked", "rope/angles.cuh",
        "return row >= 0 && row < limit ? row + stream * stream_rows : -1;", "return 0;", "rope_heads"),
    Bug("sums over the lanes of two heads", "rope/qk_norm_rope.cuh",
        "if (distance < lanes) {", "if (distance <= lanes) {", "qk_norm_rope_backward", nth=0),
    Bug("ids outside of the table", "index/embedding_lookup.cu",
        "if (at < units && row >= 0)", "if (at < units)", "embedding_outside", "out_of_bounds"),
    Bug("end of the list not written", "index/embedding_sort.cu",
        "list[i] = list_entry(-1, 0);", "(void)i;", "embedding_backward"),
    Bug("rows that do not exist", "index/index_select.cu",
        "if (k * group.threads < left && row >= 0)", "if (k * group.threads < left)", "select_rows", "out_of_bounds"),
    Bug("chunk that is named twice counts twice", "index/sort_chunks.cu",
        " && entry[c] == static_cast<u32>(i);", ";", "sort_row_chunks"),
    Bug("rest of the result not zeros", "layout/transpose_experts.cu",
        "ptx::st<kAccess>(y + at, zeros);", "(void)at;", "transpose_experts"),
    Bug("next tile written while the last is read", "layout/transpose_experts.cu",
        "memory);\n        __syncthreads();", "memory);", "transpose_experts", "race"),
    Bug("rows added by padding not zeros", "layout/transpose_tile.cuh",
        "if (column < cols_here && u * N < rows_here)", "if (column < cols_here && u * N < rows)",
        "transpose_matrices"),
    Bug("factor on the device left out", "pointwise/inplace.cu",
        "if (factor != nullptr) times *= *factor;", "", "scale_in_place"),
    Bug("beta left out", "pointwise/inplace.cu",
        "const float scaled = beta * a[k];", "const float scaled = a[k];", "add_in_place", fast=True),
    Bug("no barrier between tensors of a block", "multi/multi_reduce.cu",
        "raw != 0);\n        __syncthreads();", "raw != 0);", "norms_of_large_tensors", "race", fast=True),
    Bug("head longer than the tensor", "multi/multi_reduce.cu",
        "head = head < count ? head : count;", "", "norms_of_small_tensors", "out_of_bounds"),
    Bug("clipping that makes gradients larger", "multi/multi_scale.cu",
        "if (factor >= 1.0f) return;", "", "clip_small_norm"),
    Bug("weight decay of another size", "multi/multi_adamw.cu",
        "1.0 - rate * decay", "1.0 - decay", "adamw_step"),
]  # fmt: skip

PTX = [
    Bug("bf16 rounded to zero", "ptx/cvt.cuh", "cvt.rn.bf16x2.f32", "cvt.rz.bf16x2.f32", "instructions", fast=True),
    Bug("fp16 rounded to zero", "ptx/cvt.cuh", "cvt.rn.f16x2.f32", "cvt.rz.f16x2.f32", "instructions"),
    Bug("halves of a pair the wrong way round", "ptx/cvt.cuh",
        '"f"(hi), "f"(lo)', '"f"(lo), "f"(hi)', "instructions", nth=2),
    Bug("e5m2 where e4m3 is meant", "ptx/cvt.cuh", "satfinite.e4m3x2", "satfinite.e5m2x2", "instructions"),
    Bug("maximum that keeps NaN", "ptx/packed.cuh", '"max.bf16x2', '"max.NaN.bf16x2', "instructions"),
    Bug("product of fp16 for bf16", "ptx/mma.cuh",
        "m16n8k16.row.col.f32.bf16.bf16.f32", "m16n8k16.row.col.f32.f16.f16.f32", "instructions"),
]  # fmt: skip

BUGS = [*NORM, *ACT, *QUANT, *MOE, *ROUTER, *LOSS, *REDUCE, *OTHERS, *PTX]
