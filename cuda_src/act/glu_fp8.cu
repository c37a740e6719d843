// SwiGLU of 16-bit tensors as fp8 codes: y = silu(gate) * up * weight in fp32, quantised without another rounding.
// Recipe: common/fp8_scale.cuh. Layouts: act/glu_tile.cuh. For few tiles, and for the gradient: act/glu_fp8_double_buffered.cu.
// Everything else a gated linear unit can be is in act/glu_fp8_generic.cu.
//
// Without `up`, it is what follows gate in each row. Rows of the inputs are 16-byte aligned, and cols is a multiple of
// 8. Two blocks per multiprocessor, so that one loads while the other computes. A block works on tiles blockIdx.x,
// blockIdx.x + gridDim.x, ..., numbered along the columns first.
#include "act/activations.cuh"
#include "act/glu_fp8_tile.cuh"

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
        quantize_square(y, place, out.cols, out, scratch);
    }
    clear_scales(places, row_blocks, cols, scale_t);
}

}  // namespace rtk
