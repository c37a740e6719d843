// Normalisation to e4m3 codes by tiles of 128 x 128: one scale per 128 columns of a row, one per 128 rows of a column
// with transposed codes, or both.  v = x * rstd * gain, or if CENTRED v = (x - mean) * rstd * gain + bias, with gain =
// offset + weight, quantised from fp32 (recipe: common/fp8_scale.cuh). x [rows, cols] has any row stride; y, q [rows,
// cols] and q_t [cols, rows] are dense.
//
// A tile needs the statistics of whole rows. The previous kernel (norm_fp8_stats) computes those of the first
// `stats_distance` blocks of 128 rows; the others are computed here, by blocks that run a fixed distance ahead of the
// tiles that wait for them, so that x is read once from memory and once from L2, which may evict it afterwards.
#include "common/reduce.cuh"
#include "norm/norm_fp8_stats.cuh"
#include "norm/norm_fp8_tile.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// One vector of the thread's columns, plus `add`; `absent` without one and for columns that do not exist.
template <typename T, bool ALIGNED16, int N>
RTK_DEVICE void load_tile_vector(const Tile<N>& tile, const void* vector, bool weight_fp32, i64 column, float add,
                                 float absent, float (&v)[N]) {
    const T* own = static_cast<const T*>(vector);
    const float* fp32 = static_cast<const float*>(vector);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = absent;
    if (vector == nullptr || tile.columns_here <= 0) return;
    if constexpr (ALIGNED16) {
        if (weight_fp32) {
            load_keep<float, N>(fp32 + column + tile.column, v);
        } else {
            load_keep<T, N>(own + column + tile.column, v);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] += add;
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (i < tile.columns_here) {
                float one[1];
                if (weight_fp32) {
                    load_keep<float, 1>(fp32 + column + tile.column + i, one);
                } else {
                    load_keep<T, 1>(own + column + tile.column + i, one);
                }
                v[i] = one[0] + add;
            }
        }
    }
}

// Statistics of rows [row, row + count), one row per warp at a time, or two if every warp has two, there is no mean and
// they fit into the registers that tiles need. rstd is written last: it signals that both are ready.
template <typename T, bool CENTRED>
RTK_DEVICE void make_statistics(const T* x, i64 x_stride, float* rstd, float* mean, i64 row, int count, i64 rows,
                                i64 cols, float eps) {
    constexpr int N = 16 / sizeof(T), kWarps = Tile<N>::kWarps;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const float size = static_cast<float>(static_cast<int>(cols));
    auto reduce = [](float v, int) { return warp_reduce<Sum>(v); };
    if (!CENTRED && sizeof(T) == 2 && count >= 2 * kWarps) {
        for (int i = warp * 2; i < count && row + i < rows; i += 2 * kWarps) {
            const bool two = row + i + 1 < rows;
            const T* upper = x + (row + i) * x_stride;
            float square[2];
            squares_of_two<T, N, 8>(upper, two ? upper + x_stride : upper, cols, lane, square);
            const float first = rstd_of(reduce(square[0], 0), size, eps);
            const float second = rstd_of(reduce(square[1], 0), size, eps);
            ptx::wait_for_previous();  // which set rstd to "not computed yet"
            volatile float* to = rstd + row + i;
            if (lane == 0) {
                to[0] = first;
                if (two) to[1] = second;
            }
        }
        return;
    }
    for (int i = warp; i < count && row + i < rows; i += kWarps) {
        const RowStatistics found = row_statistics<T, N, CENTRED, 8>(
            x + (row + i) * x_stride, nullptr, nullptr, cols, size, eps, true, lane, kWarp, reduce);
        ptx::wait_for_previous();
        if (lane == 0) {
            if constexpr (CENTRED) {
                *static_cast<volatile float*>(mean + row + i) = found.mean;
                __threadfence();
            }
            *static_cast<volatile float*>(rstd + row + i) = found.rstd;
        }
    }
}

// ROWS writes q, scale and y, COLUMNS q_t and scale_t; null outputs are skipped. The scale of row m, group j goes to
// scale[m * scale_row + j * scale_group]; scale_t is [ceil(rows/128), cols].
//
// Blocks of the grid, in order: for each block of 128 rows `stats_blocks` blocks that compute the statistics of the row
// block `stats_distance` later (if it exists), `stats_rows` rows each, then one block per tile. Without statistics to
// compute, tiles go from the last row to the first: the previous kernel read the last rows last, so they may still be
// in L2.
//
// Why this cannot deadlock:
// 1. A tile waits for statistics from blocks with smaller numbers only; a block that computes statistics waits for
//    nobody.
// 2. Numbers are claimed from `ticket`, so blocks with smaller ones have begun. Without a ticket they are blockIdx;
//    GPUs start blocks in that order, although CUDA does not guarantee it.
// 3. So whatever a tile waits for is in progress, or done.
//
// `x_is_older`: x was written before the previous kernel of the stream. CENTRED with null for mean and bias is not
// centred.
template <typename T, bool ALIGNED16, bool ROWS, bool COLUMNS, bool CENTRED>
__global__ void __launch_bounds__(Tile<16 / sizeof(T)>::kThreads, sizeof(T) == 4 ? 1 : 2)
    norm_fp8_tile(const T* x, const void* weight, const void* bias, float* rstd, float* mean, e4m3* q, float* scale,
                  e4m3* q_t, float* scale_t, T* y, u32* ticket, i64 rows, i64 cols, i64 x_stride, i64 scale_row,
                  i64 scale_group, i64 column_tiles, i64 weight_fp32, i64 x_is_older, i64 pow2, i64 stats_distance, i64 stats_blocks,
                  i64 stats_rows, double eps, double offset) {
    constexpr int N = 16 / sizeof(T);
    __shared__ TileScratch<N> scratch;
    const u32 across_tiles = static_cast<u32>(column_tiles);
    const u32 row_tiles = static_cast<u32>(ceil_div(rows, static_cast<i64>(kTileSide)));
    u32 below = blockIdx.x / across_tiles, across = blockIdx.x - below * across_tiles;
    bool awaited = false;
    if constexpr (ALIGNED16) {
        const u32 before = static_cast<u32>(stats_distance), strips_with_statistics = row_tiles - before;
        if (strips_with_statistics != 0) {
            u32 index = blockIdx.x;
            if (ticket != nullptr) {
                __shared__ u32 drawn;
                ptx::wait_for_previous();
                if (threadIdx.x == 0) drawn = atomicAdd(ticket, 1u);
                __syncthreads();
                index = drawn;
            }
            const u32 makers = static_cast<u32>(stats_blocks), period = across_tiles + makers;
            if (index < strips_with_statistics * period) {
                below = index / period, across = index - below * period;
                if (across < makers) {
                    make_statistics<T, CENTRED>(x, x_stride, rstd, mean,
                                                static_cast<i64>(before + below) * kTileSide + across * stats_rows,
                                                static_cast<int>(stats_rows), rows, cols, static_cast<float>(eps));
                    return;
                }
                across -= makers;
            } else {
                index -= strips_with_statistics * period;
                below = index / across_tiles, across = index - below * across_tiles;
                below += strips_with_statistics;
            }
            awaited = below >= before;
        } else {
            below = row_tiles - 1 - below;
        }
    } else {
        below = row_tiles - 1 - below;
    }
    const NormTileOutput<T> out = {q, scale, q_t, scale_t, y, rows, cols, scale_row, scale_group, below, across};
    const i64 row = out.row(), column = out.column();
    const Tile<N> tile(rows - row, cols - column);

    Raw<16> raw[kTileRows];
    float gain[N], shift[N];
    if (x_is_older == 0) ptx::wait_for_previous();
    load_tile<T, ALIGNED16>(tile, x + row * x_stride + column, x_stride, raw, ptx::l2_policy(stats_blocks != 0));
    load_tile_vector<T, ALIGNED16>(tile, weight, weight_fp32 != 0, column, static_cast<float>(offset), 1.0f, gain);
    // With 0 for the mean and -0 for the bias a CENTRED kernel gives the bits of the other one.
    if constexpr (CENTRED) load_tile_vector<T, ALIGNED16>(tile, bias, weight_fp32 != 0, column, 0.0f, -0.0f, shift);
    if (x_is_older != 0) ptx::wait_for_previous();
    // Volatile: other blocks or another kernel may just have written them.
    const int own_row = static_cast<int>(threadIdx.x) % kTileRows;
    float own = 0.0f, own_mean = 0.0f;
    if (own_row < tile.rows_here) {
        const volatile float* place = rstd + row + tile.row + own_row;
        own = *place;
        if (awaited) {
            while (own < 0.0f) own = *place;
            if (CENTRED) __threadfence();
        }
        if (CENTRED && mean != nullptr) {
            const volatile float* mean_place = mean + row + tile.row + own_row;
            own_mean = *mean_place;
        }
    }
    quantize_normalised<T, ALIGNED16, ROWS, COLUMNS, CENTRED>(tile, raw, gain, shift, own, own_mean, out, scratch, pow2 != 0);
}

}  // namespace rtk
