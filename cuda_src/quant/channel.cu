// Quantises z = x * column_factor * row_factor to e4m3 with given scales per column, codes transposed: q_t [cols,
// rows_out], zeros past the last row. Either factor may be absent. Recipe: common/fp8_scale.cuh. Tiles: quant/tile.cuh.
#include "ptx/pdl.cuh"
#include "quant/tile.cuh"

namespace rtk {

// x [rows, x_cols] can be read 16 bytes at a time; only the first `cols` columns are used. One block per tile, numbered
// along the columns first. `scale` may be written by the previous kernel.
template <typename T>
__global__ void __launch_bounds__(Tile<16 / sizeof(T)>::kThreads)
    quantize_fp8_channel(const T* x, const float* row_factor, const float* column_factor, const float* scale, e4m3* q_t,
                         i64 rows, i64 rows_out, i64 cols, i64 x_cols, i64 x_stride, i64 tiles_across) {
    constexpr int N = 16 / sizeof(T);
    __shared__ TileScratch<N> scratch;
    const u32 line = blockIdx.x / static_cast<u32>(tiles_across);
    const i64 first_row = static_cast<i64>(line) * kTileSide;
    const i64 first_column = static_cast<i64>(blockIdx.x - line * static_cast<u32>(tiles_across)) * kTileSide;
    const Tile<N> input(max(rows - first_row, 0ll), x_cols - first_column);
    const Tile<N> output(rows_out - first_row, cols - first_column);
    Raw<16> raw[kTileRows];
    load_tile<T, true>(input, x + first_row * x_stride + first_column, x_stride, raw);
    float times[kTileRows];
#pragma unroll
    for (int r = 0; r < kTileRows; ++r)
        times[r] = row_factor != nullptr && r < input.rows_here ? row_factor[first_row + input.row + r] : 1.0f;
    ptx::wait_for_previous();
    float inverse[N], factor[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const i64 column = first_column + output.column + i;
        inverse[i] = i < output.columns_here ? __frcp_rn(scale[column]) : 0.0f;
        factor[i] = i < output.columns_here && column_factor != nullptr ? column_factor[column] : 1.0f;
    }
    stage_columns<e4m3>(output, scratch, inverse, [&](int r, int i) {
        return r < input.rows_here ? element<T>(raw[r], i) * factor[i] * times[r] : 0.0f;
    });
    __syncthreads();
    store_columns(output, scratch, q_t + first_column * rows_out + first_row, rows_out);
}

}  // namespace rtk
