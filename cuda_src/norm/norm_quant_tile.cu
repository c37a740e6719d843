// RMS normalisation with given 1/rms to e4m3 codes by tiles of 128 x 128: one scale per 128 columns of a row, one per 128
// rows of a column with transposed codes, or both.  v = x * rstd * (offset + weight), quantised from fp32 (recipe:
// common/fp8_scale.cuh). x [rows, cols] has any row stride; y, q [rows, cols] and q_t [cols, rows] are dense.
#include "norm/common.cuh"
#include "norm/norm_quant_tile.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// (offset + weight) of the thread's columns; ones without a weight and where there is no column.
template <typename T, bool WIDE, int N>
RTK_DEVICE void load_tile_gain(const Tile<N>& tile, const void* weight, bool wide, i64 column, float offset,
                               float (&gain)[N]) {
    const T* own = static_cast<const T*>(weight);
    const float* fp32 = static_cast<const float*>(weight);
#pragma unroll
    for (int i = 0; i < N; ++i) gain[i] = 1.0f;
    if (weight == nullptr || tile.columns_here <= 0) return;
    if constexpr (WIDE) {
        if (wide) {
            load_gain<float, N>(fp32, column + tile.column, offset, gain);
        } else {
            load_gain<T, N>(own, column + tile.column, offset, gain);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (i < tile.columns_here) {
                float one[1];
                if (wide) {
                    load_keep<float, 1>(fp32 + column + tile.column + i, one);
                } else {
                    load_keep<T, 1>(own + column + tile.column + i, one);
                }
                gain[i] = one[0] + offset;
            }
        }
    }
}

// One block per tile, numbered along the columns first, from the last row down to the first: whoever worked out rstd read
// the last rows last, so they may still be in L2. ROWS writes q, scale and y (may be null), COLUMNS q_t and scale_t.
// The scale of row m, group j goes to scale[m * scale_row + j * scale_group]; scale_t is [ceil(rows/128), cols].
// `early`: x was there before the previous kernel of the stream, which wrote rstd.
template <typename T, bool WIDE, bool ROWS, bool COLUMNS>
__global__ void __launch_bounds__(Tile<16 / sizeof(T)>::kThreads, sizeof(T) == 4 ? 1 : 2)
    rms_norm_fp8_tile(const T* x, const void* weight, const float* rstd, e4m3* q, float* scale, e4m3* q_t,
                      float* scale_t, T* y, i64 rows, i64 cols, i64 x_stride, i64 scale_row, i64 scale_group,
                      i64 column_tiles, i64 weight_wide, i64 early, i64 pow2, double offset) {
    constexpr int N = 16 / sizeof(T);
    __shared__ TileScratch<N> scratch;
    const u32 across_tiles = static_cast<u32>(column_tiles);
    const u32 below = blockIdx.x / across_tiles, across = blockIdx.x - below * across_tiles;
    const u32 down = static_cast<u32>(ceil_div(rows, static_cast<i64>(kTileSide))) - 1 - below;
    const NormTileOutput<T> out = {q, scale, q_t, scale_t, y, rows, cols, scale_row, scale_group, down, across};
    const i64 row = out.row(), column = out.column();
    const Tile<N> tile(rows - row, cols - column);

    Raw<16> raw[kTileRows];
    float gain[N];
    if (early == 0) ptx::wait_for_previous();
    load_tile<T, WIDE>(tile, x + row * x_stride + column, x_stride, raw);
    load_tile_gain<T, WIDE>(tile, weight, weight_wide != 0, column, static_cast<float>(offset), gain);
    if (early != 0) ptx::wait_for_previous();
    // Not through ld.global.nc: another kernel may have written it a moment ago.
    const int own_row = static_cast<int>(threadIdx.x) % kTileRows;
    const float own = own_row < tile.rows_here ? rstd[row + tile.row + own_row] : 0.0f;
    quantize_normalised<T, WIDE, ROWS, COLUMNS>(tile, raw, gain, own, out, scratch, pow2 != 0);
}

}  // namespace rtk
