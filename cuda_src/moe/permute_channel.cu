// e4m3 codes of permuted rows, transposed, with one scale per expert and column: z[r] = x[t] * smooth * (scale[t] *
// row_factor[r]) for row r of token t, every product rounded. Recipe: common/fp8_scale.cuh. Tiles: quant/tile.cuh.
//
// Two launches of a persistent grid: without CODES, `max_abs` [experts, cols] (zeros before) collects the largest
// finite |z|; with CODES, an expert with rows s .. s + c - 1 gets its matrix [cols, c] from element s * cols of q_t on.
// Its rows include padding rows, which are zeros; everything after the last expert is zeros too.
#include "moe/rows.cuh"
#include "quant/experts.cuh"

namespace rtk {

struct ChannelTile {
    i64 first, height, above;  // rows
    i64 column;
    int expert;
};

// x [tokens, x_cols] can be read 16 bytes at a time; only the first `cols` columns are used. scale, smooth, row_factor
// may be null.
template <typename T, bool CODES>
__global__ void __launch_bounds__(Tile<16 / sizeof(T)>::kThreads, 512 / Tile<16 / sizeof(T)>::kThreads)
    moe_permute_channel(const T* x, const i32* slots, const i32* offsets, const float* scale, const float* smooth,
                        const float* row_factor, float* max_abs, e4m3* q_t, float* scale_out, i64 choices, i64 divisor,
                        i64 rows, i64 cols, i64 x_cols, i64 x_stride, i64 expert_count, i64 column_tiles, i64 pow2) {
    constexpr int N = 16 / sizeof(T);
    extern __shared__ __align__(16) u8 memory[];
    __shared__ TileScratch<N> scratch;
    __shared__ ChannelTile job;
    const ExpertTable table(memory, offsets, 0, expert_count, rows);
    const u32 tiles = table.blocks() * static_cast<u32>(column_tiles);
    for (u32 index = blockIdx.x; index < tiles; index += gridDim.x) {
        __syncthreads();
        if (threadIdx.x == 0) {
            const u32 block = index / static_cast<u32>(column_tiles);
            const ExpertRows found = table.find(block);
            int low = 0, high = table.experts;
            while (high - low > 1) {
                const int middle = (low + high) / 2;
                (table.entry[middle].block <= block ? low : high) = middle;
            }
            job = {found.first_row, found.rows, found.above,
                   static_cast<i64>(index - block * static_cast<u32>(column_tiles)) * kTileSide, low};
        }
        __syncthreads();
        const Tile<N> tile(job.height - job.above, cols - job.column);
        const i64 column = job.column + tile.column;
        Raw<16> raw[kTileRows];
        float times[kTileRows];
        u32 rows_with_token = 0;  // bit r: row r has a token; the others are zeros, whatever the factors are
#pragma unroll
        for (int r = 0; r < kTileRows; ++r) {
            const i64 row = job.first + job.above + tile.row + r;
            clear(raw[r]);
            times[r] = 0.0f;
            if (r >= tile.rows_here) continue;
            const u32 slot = ptx::ld_keep<4>(slots + row).w[0];
            if (slot >= static_cast<u32>(choices)) continue;
            rows_with_token |= 1u << r;
            const i64 token = divided(slot, divisor);
            if (column < x_cols) raw[r] = load_raw<T, N>(x + token * x_stride + column);
            times[r] = scale == nullptr ? 1.0f : scale[token];
            if (row_factor != nullptr) times[r] *= row_factor[row];
        }
        float factor[N];
#pragma unroll
        for (int i = 0; i < N; ++i)
            factor[i] = smooth != nullptr && i < tile.columns_here ? smooth[column + i] : 1.0f;
        auto value = [&](int r, int i) {
            return (rows_with_token >> r & 1u) != 0 ? element<T>(raw[r], i) * factor[i] * times[r] : 0.0f;
        };
        float* line = max_abs + job.expert * cols + job.column;
        if constexpr (CODES) {
            float inverse[N];
#pragma unroll
            for (int i = 0; i < N; ++i)
                inverse[i] = i < tile.columns_here ? __frcp_rn(fp8_scale<e4m3>(line[tile.column + i], pow2 != 0)) : 0.0f;
            stage_columns<e4m3>(tile, scratch, inverse, value);
            __syncthreads();
            store_columns(tile, scratch, q_t + job.first * cols + job.column * job.height + job.above, job.height);
        } else {
            float columns[N];
#pragma unroll
            for (int i = 0; i < N; ++i) columns[i] = 0.0f;
#pragma unroll
            for (int r = 0; r < kTileRows; ++r)
#pragma unroll
                for (int i = 0; i < N; ++i) columns[i] = max_finite(columns[i], value(r, i));
            share_columns(tile, columns, scratch);
            __syncthreads();
            if (static_cast<int>(threadIdx.x) < tile.columns) {
                const int place = scratch.place(static_cast<int>(threadIdx.x));
                float own = 0.0f;
#pragma unroll
                for (int w = 0; w < Tile<N>::kWarps; ++w) own = fmaxf(own, scratch.max_abs[w][place]);
                atomicMax(reinterpret_cast<u32*>(line + threadIdx.x), __float_as_uint(own));
            }
        }
    }
    if constexpr (CODES) {
        const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
        const i64 own = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
        for (i64 i = own; i < expert_count * cols; i += step) scale_out[i] = fp8_scale<e4m3>(max_abs[i], pow2 != 0);
        for (i64 i = table.entry[expert_count].row * cols + own; i < rows * cols; i += step) q_t[i].bits = 0;
    }
}

}  // namespace rtk
