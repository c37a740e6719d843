// The computation of act/glu_fp8_double_buffered.cu with transposed codes among the results, for sm_90: TMA loads the
// inputs of the next tile, and warps do not wait for each other at barriers (quant/tile_patch.cuh). Recipe:
// common/fp8_scale.cuh. Layouts: quant/expert_tiles.cuh.
//
// Tensor maps have boxes of 16 rows by 128 columns. cols is a multiple of 8.
#include "act/activations.cuh"
#include "act/glu_fp8_counts.cuh"
#include "ptx/pdl.cuh"
#include "quant/tile_stream.cuh"

namespace rtk {

// One weight per row of the warp, in its lanes; those of rows that do not exist are arbitrary.
RTK_DEVICE float warp_weights(const PatchOutput& place, const float* weight) {
    const u32 own = static_cast<u32>(patch_warp() * kPatchWarpRows + patch_lane() % kPatchWarpRows);
    return __uint_as_float(ptx::ld_keep<4>(weight + place.row + min(own, place.rows - 1)).w[0]);
}

// The weight of the thread's row r.
RTK_DEVICE float own_weight(float weights, int r) {
    return __shfl_sync(0xffffffffu, weights, static_cast<int>(threadIdx.x) / 16 % 2 * kPatchRows + r);
}

template <typename T, bool EXPERTS>
__global__ void __launch_bounds__(kPatchThreads, 1)
    glu_fp8_fwd_stream(const __grid_constant__ ptx::TensorMap gate, const __grid_constant__ ptx::TensorMap up,
                       const float* weight, const void* counts, e4m3* q, float* scale, e4m3* q_t, float* scale_t,
                       u32* counter, i64 rows, i64 cols, i64 experts, i64 count_width, i64 row_blocks, i64 by_group,
                       i64 pow2, i64 check) {
    using Stream = PatchStream<1, 2>;
    __shared__ PatchShared<1> shared;
    __shared__ PatchOutput kept[StreamWalk::kKept];
    __shared__ u64 known[StreamWalk::kKept];
    __shared__ u64 barriers[Stream::kBarriers];
    extern __shared__ __align__(128) u8 memory[];
    const Quantized out = {q, scale, q_t, scale_t, static_cast<u32>(cols), by_group != 0, pow2 != 0};
    const Stream stream(memory, barriers);
    if (threadIdx.x == kPatchFetcher) {
        stream.init_first();
        if constexpr (!EXPERTS) stream.fetch(first_place(rows, cols), 0, gate, up);
        stream.init_rest();
    }
    shared.init();
    StreamWalk::init(known);
    if (EXPERTS && check && !adds_up(counts, count_width, experts, rows)) __trap();
    const TilePlaces places = stream_places<EXPERTS>(memory + Stream::kBytes, counts, count_width, experts, rows, cols);
    const StreamWalk walk(places, out, static_cast<u32>(cols), kept, known, counter);
    if (threadIdx.x >= kPatchWorkers) {
        help(shared, walk, out.pow2, [&](const PatchOutput& place, u32 nth) {
            if (nth > 0 || EXPERTS) stream.fetch(place, nth, gate, up);
        });
    } else {
        float weights = 1.0f;
        if (weight != nullptr && walk[0].rows != 0) weights = warp_weights(walk[0], weight);
#pragma unroll 1
        for (u32 nth = 0; walk[nth].rows != 0; ++nth) {
            const PatchOutput& place = walk.at(nth);
            Patch y[1];
            const ptx::SharedAddress own = stream.wait(nth);
#pragma unroll
            for (int r = 0; r < kPatchRows; ++r) {
                float u[8];
                unpack<T, 8>(stream.read(own, r), y[0][r]);
                unpack<T, 8>(stream.read(own + Stream::kBoxBytes, r), u);
#pragma unroll
                for (int i = 0; i < 8; ++i) y[0][r][i] = Silu::at<true>(y[0][r][i]).value * u[i];
            }
            stream.release(nth);
            if (weight != nullptr) {
#pragma unroll
                for (int r = 0; r < kPatchRows; ++r) {
                    const float w = own_weight(weights, r);
#pragma unroll
                    for (int i = 0; i < 8; ++i) y[0][r][i] *= w;
                }
                if (walk[nth + 1].rows != 0) weights = warp_weights(walk.at(nth + 1), weight);
            }
            if (place.rows < static_cast<u32>(kTileSide)) cut_rows(y[0], place.rows);
            float row_maxima[kPatchRows];
            shared.add_maxima(y, row_maxima);
            if (q != nullptr) shared.quantize_rows(y, row_maxima, place, out.cols, walk.scale_step(), out.pow2);
            shared.stage_columns(y, nth);
            shared.store_column_ends(place, nth);
        }
    }
    clear_scales(places, row_blocks, cols, scale_t);
}

// The thread's gradients, and the contribution of its columns to those of the weights.
template <typename T, bool WEIGHTED>
RTK_DEVICE void patch_gradients(ptx::SharedAddress gate, ptx::SharedAddress dy, ptx::SharedAddress up, float weights,
                                Patch (&v)[2], float (&sums)[kPatchRows]) {
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
        float g[8], d[8], u[8], w = 1.0f;
        if constexpr (WEIGHTED) w = own_weight(weights, r);
        unpack<T, 8>(PatchStream<1, 1>::read(gate, r), g);
        unpack<T, 8>(PatchStream<1, 1>::read(dy, r), d);
        unpack<T, 8>(PatchStream<1, 1>::read(up, r), u);
        sums[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const ValueSlope value = Silu::at<true>(g[i]);
            const float along = d[i] * value.value, weighted = d[i] * w;
            if constexpr (WEIGHTED) sums[r] += along * u[i];
            v[0][r][i] = weighted * u[i] * value.slope;
            v[1][r][i] = along * w;
        }
    }
}

// Sums of the thread's rows over their 16 lanes, scattered: each lane gets that of row lane % 4. The order of additions
// is that of act/glu_fp8_double_buffered.cu, so the results have the same bits.
RTK_DEVICE float sum_of_rows(float (&sums)[kPatchRows], int lane) {
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], 4);
    const float sum = scattered<kPatchRows, 4>(sums, lane, [](float a, float b) { return a + b; });
    return sum + __shfl_xor_sync(0xffffffffu, sum, 8);
}

// The gradient of [gate | up], as glu_fp8_bwd in act/glu_fp8_double_buffered.cu. One tile of up and two of gate and dy
// are in flight, but only one of these for experts whose tiles are claimed dynamically, which is faster
// (docs/decisions/act.md).
template <typename T, bool EXPERTS>
__global__ void __launch_bounds__(kPatchThreads, 1)
    glu_fp8_bwd_stream(const __grid_constant__ ptx::TensorMap dy, const __grid_constant__ ptx::TensorMap gate,
                       const __grid_constant__ ptx::TensorMap up, const float* weight, const void* counts, e4m3* q,
                       float* scale, e4m3* q_t, float* scale_t, T* dx, float* partial, u32* counter, i64 rows, i64 cols,
                       i64 experts, i64 count_width, i64 row_blocks, i64 by_group, i64 pow2, i64 check) {
    using Gates = PatchStream<2, 2>;
    using Ups = PatchStream<1, 1>;
    __shared__ PatchShared<2> shared;
    __shared__ PatchOutput kept[StreamWalk::kKept];
    __shared__ u64 known[StreamWalk::kKept];
    __shared__ u64 barriers[Gates::kBarriers + Ups::kBarriers];
    extern __shared__ __align__(128) u8 memory[];
    ptx::launch_dependents();
    const Quantized out = {q, scale, q_t, scale_t, static_cast<u32>(2 * cols), by_group != 0, pow2 != 0};
    const Gates gates(memory, barriers);
    const Ups ups(memory + Gates::kBytes, barriers + Gates::kBarriers);
    // If all uses have even numbers, the first slot is the only one.
    const bool two = !EXPERTS || counter == nullptr;
    auto gate_use = [&](u32 nth) { return two ? nth : 2 * nth; };
    if (threadIdx.x == kPatchFetcher) {
        gates.init_first(), ups.init_first();
        if constexpr (!EXPERTS) {
            const PatchOutput place = first_place(rows, cols);
            gates.fetch(place, 0, gate, dy), ups.fetch(place, 0, up);
        }
        gates.init_rest(), ups.init_rest();
    }
    shared.init();
    StreamWalk::init(known);
    if (EXPERTS && check && !adds_up(counts, count_width, experts, rows)) __trap();
    u8* table = memory + Gates::kBytes + Ups::kBytes;
    const TilePlaces places = stream_places<EXPERTS>(table, counts, count_width, experts, rows, cols);
    const StreamWalk walk(places, out, static_cast<u32>(cols), kept, known, counter);
    if (threadIdx.x >= kPatchWorkers) {
        help(shared, walk, out.pow2, [&](const PatchOutput& place, u32 nth) {
            if (nth > 0 || EXPERTS) gates.fetch(place, gate_use(nth), gate, dy), ups.fetch(place, nth, up);
        });
    } else {
        float weights = 1.0f;
        if (weight != nullptr && walk[0].rows != 0) weights = warp_weights(walk[0], weight);
#pragma unroll 1
        for (u32 nth = 0; walk[nth].rows != 0; ++nth) {
            const PatchOutput& place = walk.at(nth);
            const ptx::SharedAddress own_gate = gates.wait(gate_use(nth)), own_dy = own_gate + Gates::kBoxBytes;
            const ptx::SharedAddress own_up = ups.wait(nth);
            Patch v[2];  // the gradients of the gate and of up
            float sums[kPatchRows];
            if (weight != nullptr) {
                patch_gradients<T, true>(own_gate, own_dy, own_up, weights, v, sums);
            } else {
                patch_gradients<T, false>(own_gate, own_dy, own_up, weights, v, sums);
            }
            gates.release(gate_use(nth)), ups.release(nth);
            if (weight != nullptr) {
                if (partial != nullptr) {
                    const int lane = patch_lane(), row = patch_row() + lane % 16;
                    const float sum = sum_of_rows(sums, lane);
                    if (lane % 16 < kPatchRows && row < static_cast<int>(place.rows))
                        partial[product(place.column / kTileSide, places.rows) + place.row + row] = sum;
                }
                if (walk[nth + 1].rows != 0) weights = warp_weights(walk.at(nth + 1), weight);
            }
            if (place.rows < static_cast<u32>(kTileSide)) cut_rows(v[0], place.rows), cut_rows(v[1], place.rows);
            if (dx != nullptr) {
                const int column = patch_column();
                const int rows_here = column < static_cast<int>(place.columns) ? place.rows - patch_row() : 0;
                T* p = settled(dx + product(place.row + patch_row(), out.cols) + (place.column + column));
#pragma unroll
                for (int r = 0; r < kPatchRows; ++r, p += out.cols)
                    if (r < rows_here) store<T, 8>(p, v[0][r]), store<T, 8>(p + cols, v[1][r]);
            }
            float row_maxima[2 * kPatchRows];
            shared.add_maxima(v, row_maxima);
            if (q != nullptr) shared.quantize_rows(v, row_maxima, place, out.cols, walk.scale_step(), out.pow2);
            shared.stage_columns(v, nth);
            shared.store_column_ends(place, nth);
        }
    }
    clear_scales(places, row_blocks, 2 * cols, scale_t);
}

}  // namespace rtk
