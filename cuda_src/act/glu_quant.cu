// SwiGLU of 16-bit tensors and its gradient as fp8 codes: y = silu(gate) * up * weight in fp32, quantised without
// another rounding. Recipe: common/fp8_scale.cuh. Layouts: act/glu_tile.cuh. Everything else a gated linear unit can be
// is in act/glu_quant_any.cu.
//
// Without `up`, it is what follows gate in each row. Rows of the inputs are 16-byte aligned, and cols is a multiple of
// 8. Two blocks per multiprocessor, so that one loads while the other computes. A block works on tiles blockIdx.x,
// blockIdx.x + gridDim.x, ..., numbered along the columns first.
#include "act/activations.cuh"
#include "act/glu_quant_tile.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

template <typename T>
__global__ void __launch_bounds__(kBlock, 2)
    glu_fp8_fwd(const T* gate, const T* up, const float* weight, const void* counts, e4m3* q, float* scale, e4m3* q_t,
                float* scale_t, i64 rows, i64 cols, i64 gate_stride, i64 up_stride, i64 experts,
                i64 count_width, i64 row_blocks, i64 by_group, i64 pow2, i64 check) {
    __shared__ TileScratch<8> scratch;
    __shared__ TilePlace places_kept[TileWalk::kKept];
    extern __shared__ __align__(16) u8 memory[];
    const Quantized out = {q, scale, q_t, scale_t, static_cast<u32>(cols), by_group != 0, pow2 != 0};
    const TilePlaces places(memory, counts, count_width, experts, rows, cols);
    if (check && counts != nullptr && !adds_up(counts, count_width, experts, rows)) __trap();
    const TileWalk walk(places, places_kept);
#pragma unroll 1
    for (u32 turn = 0; walk.has(turn); ++turn) {
        walk.keep_up(turn);
        const TilePlace& place = walk[turn];
        Square y;
        {
            const T* const in[2] = {gate, settled(up != nullptr ? up : gate + cols)};
            const u32 stride[2] = {static_cast<u32>(gate_stride), static_cast<u32>(up_stride)};
            const float weights = weight != nullptr ? lane_weights(place, weight) : 1.0f;
            Raw<16> raw[2][kTileRows];
            load_squares(tile_of(place, out.cols), place, in, stride, raw);
#pragma unroll
            for (int r = 0; r < kTileRows; ++r) {
                float u[8];
                ptx::forget(raw[0][r]), ptx::forget(raw[1][r]);
                unpack<T, 8>(raw[0][r], y[r]);
                unpack<T, 8>(raw[1][r], u);
#pragma unroll
                for (int i = 0; i < 8; ++i) y[r][i] = Silu::at<true>(y[r][i]).value * u[i];
            }
            if (weight != nullptr) {
#pragma unroll
                for (int r = 0; r < kTileRows; ++r) {
                    const float w = row_weight(weights, r);
#pragma unroll
                    for (int i = 0; i < 8; ++i) y[r][i] *= w;
                }
            }
        }
        quantize_square(y, place, out.cols, false, out, scratch);
    }
    clear_scales(places, row_blocks, cols, scale_t);
}

// Columns of a row's gradients. dup goes to memory that only this thread uses; dgate stays.
template <typename T, bool WEIGHTED>
RTK_DEVICE void gradients(Raw<16> (&raw)[3][kTileRows], float weights, Square& dgate,
                          float (&sums)[kTileRows], Raw<16>* kept) {
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
        float d[8], u[8], w = 1.0f;
        if constexpr (WEIGHTED) w = row_weight(weights, r);
        ptx::forget(raw[0][r]), ptx::forget(raw[1][r]), ptx::forget(raw[2][r]);
        unpack<T, 8>(raw[0][r], dgate[r]);
        unpack<T, 8>(raw[1][r], d);
        unpack<T, 8>(raw[2][r], u);
        sums[r] = 0.0f;
        float dup[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const ValueSlope value = Silu::at<true>(dgate[r][i]);
            const float along = d[i] * value.value, weighted = d[i] * w;
            if constexpr (WEIGHTED) sums[r] += along * u[i];
            dgate[r][i] = weighted * u[i] * value.slope;
            dup[i] = along * w;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float* f = dup + 4 * half;
            kept[(2 * r + half) * kBlock] = {__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]),
                                             __float_as_uint(f[3])};
        }
    }
}

// The gradient of [gate | up], [rows, 2 * cols], from that of y: its codes, the gradient itself (dx, of T), or both;
// and what each 128 columns add to the gradient of the weight (partial [ceil(cols/128), rows]). Any of them may be
// null. For codes by rows cols must be a multiple of 128, or groups would reach from gate into up.
template <typename T>
__global__ void __launch_bounds__(kBlock, 2)
    glu_fp8_bwd(const T* dy, const T* gate, const T* up, const float* weight, const void* counts, e4m3* q, float* scale,
                e4m3* q_t, float* scale_t, T* dx, float* partial, i64 rows, i64 cols, i64 dy_stride, i64 gate_stride,
                i64 up_stride, i64 experts, i64 count_width, i64 row_blocks, i64 by_group, i64 pow2,
                i64 check) {
    __shared__ TileScratch<8> scratch;
    __shared__ TilePlace places_kept[TileWalk::kKept];
    extern __shared__ __align__(16) u8 memory[];
    ptx::launch_dependents();
    const Quantized out = {q, scale, q_t, scale_t, static_cast<u32>(2 * cols), by_group != 0, pow2 != 0};
    const u32 width = static_cast<u32>(cols);
    Raw<16>* const kept = reinterpret_cast<Raw<16>*>(memory);  // the gradient of up, while that of gate is quantised
    const TilePlaces places(memory + sizeof(float) * kTileSide * kTileSide, counts, count_width, experts, rows, cols);
    if (check && counts != nullptr && !adds_up(counts, count_width, experts, rows)) __trap();
    const TileWalk walk(places, places_kept);
#pragma unroll 1
    for (u32 turn = 0; walk.has(turn); ++turn) {
        walk.keep_up(turn);
        const TilePlace& place = walk[turn];
        Square v;  // first the gradient of the gate, then that of up
        {
            const T* const in[3] = {gate, dy, settled(up != nullptr ? up : gate + cols)};
            const u32 stride[3] = {static_cast<u32>(gate_stride), static_cast<u32>(dy_stride),
                                   static_cast<u32>(up_stride)};
            const float weights = weight != nullptr ? lane_weights(place, weight) : 1.0f;
            Raw<16> raw[3][kTileRows];
            load_squares(tile_of(place, width), place, in, stride, raw);
            float sums[kTileRows];
            if (weight != nullptr) {
                gradients<T, true>(raw, weights, v, sums, kept + this_thread());
                if (partial != nullptr) {
                    const Tile<8> tile = tile_of(place, width);
                    const int lane = tile.thread % 16;
                    const float sum = scattered_sum(sums, lane);
                    if (lane < kTileRows && lane < tile.rows_here)
                        partial[product(place.column / kTileSide, places.rows) + place.row + tile.row + lane] = sum;
                }
            } else {
                gradients<T, false>(raw, weights, v, sums, kept + this_thread());
            }
        }
#pragma unroll 1
        for (bool right = false;; right = true) {
            if (dx != nullptr) {
                const Tile<8> tile = tile_of(place, width);
                const u64 first = product(place.row + tile.row, out.cols);
                T* to = settled(dx + first + (place.column + tile.column + (right ? width : 0u)));
                const int rows_here = tile.columns_here > 0 ? tile.rows_here : 0;
#pragma unroll
                for (int r = 0; r < kTileRows; ++r, to += out.cols)
                    if (r < rows_here) store<T, 8>(to, v[r]);
            }
            quantize_square(v, place, width, right, out, scratch);
            if (right) break;
            const Raw<16>* from = kept + this_thread();
#pragma unroll
            for (int r = 0; r < kTileRows; ++r) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const Raw<16> four = from[(2 * r + half) * kBlock];
#pragma unroll
                    for (int i = 0; i < 4; ++i) v[r][4 * half + i] = __uint_as_float(four.w[i]);
                }
            }
        }
    }
    clear_scales(places, row_blocks, 2 * cols, scale_t);
}

}  // namespace rtk
