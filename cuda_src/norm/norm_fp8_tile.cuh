// Quantises a 128 x 128 tile of a normalised matrix to e4m3, from packed x in registers and its row and column
// operands: v = x * rstd * gain, or v = (x - mean) * rstd * gain + shift, in fp32, in this order. Layout of the tile
// over the threads: quant/tile.cuh.
#pragma once
#include "quant/tile.cuh"

namespace rtk {

// Outputs, and position of the tile. Addresses are computed where they are used: kernel parameters stay in constant
// memory, computed pointers take registers.
template <typename T>
struct NormTileOutput {
    e4m3* q;         // [rows, cols]; may be null, and then scale is
    float* scale;    // of row m, group j at m * scale_row + j * scale_group
    e4m3* q_t;       // [cols, rows]; may be null, and then scale_t is
    float* scale_t;  // [ceil(rows/128), cols]
    T* y;            // [rows, cols]; may be null
    i64 rows, cols, scale_row, scale_group;
    u32 down, across;  // in tiles

    RTK_DEVICE i64 row() const { return static_cast<i64>(down) * kTileSide; }
    RTK_DEVICE i64 column() const { return static_cast<i64>(across) * kTileSide; }
};

// `rstd`, `mean`: of the thread's row lane % 8. ROWS: q, scale and y; COLUMNS: q_t and scale_t, with three barriers;
// afterwards the scratch may be reused for the next tile. The 8 x N values stay in registers from here to the last
// store: recomputing them for each layout would be half of the instructions, which are the bottleneck.
template <typename T, bool ALIGNED16, bool ROWS, bool COLUMNS, bool CENTRED>
RTK_DEVICE void quantize_normalised(const Tile<16 / sizeof(T)>& tile, const Raw<16> (&raw)[kTileRows],
                                    const float (&gain)[16 / sizeof(T)], const float (&shift)[16 / sizeof(T)],
                                    float rstd, float mean, const NormTileOutput<T>& out,
                                    TileScratch<16 / sizeof(T)>& scratch, bool pow2) {
    constexpr int N = 16 / sizeof(T), kLanes = Tile<N>::kLanes;
    float v[kTileRows][N];
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
        const float by = __shfl_sync(0xffffffffu, rstd, r, kLanes);
        unpack<T, N>(raw[r], v[r]);
        if constexpr (CENTRED) {
            const float from = __shfl_sync(0xffffffffu, mean, r, kLanes);
            // Elements that do not exist stay 0 for the maxima.
#pragma unroll
            for (int i = 0; i < N; ++i)
                v[r][i] = r < tile.rows_here && i < tile.columns_here ? (v[r][i] - from) * by * gain[i] + shift[i] : 0.0f;
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) v[r][i] = v[r][i] * by * gain[i];
        }
    }
    if (ROWS && out.y != nullptr) {
        T* place = out.y + (out.row() + tile.row) * out.cols + out.column() + tile.column;
#pragma unroll
        for (int r = 0; r < kTileRows; ++r, place += out.cols) {
            if (r < tile.rows_here && tile.columns_here > 0) {
                if constexpr (ALIGNED16) {
                    store<T, N>(place, v[r]);
                } else {
#pragma unroll
                    for (int i = 0; i < N; ++i) {
                        const float one[1] = {v[r][i]};
                        if (i < tile.columns_here) store<T, 1>(place + i, one);
                    }
                }
            }
        }
    }

    // Maxima that ignore NaN but not infinities; the rare thread that met an infinity repeats this without infinities.
    float columns[N], rows[kTileRows];
    float max_abs = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        columns[i] = 0.0f;
#pragma unroll
        for (int r = 0; r < kTileRows; ++r) columns[i] = fmaxf(columns[i], fabsf(v[r][i]));
        max_abs = fmaxf(max_abs, columns[i]);
    }
    if constexpr (ROWS) {
#pragma unroll
        for (int r = 0; r < kTileRows; ++r) {
            rows[r] = 0.0f;
#pragma unroll
            for (int i = 0; i < N; ++i) rows[r] = fmaxf(rows[r], fabsf(v[r][i]));
        }
    }
    if (max_abs == __uint_as_float(0x7f800000u)) {
#pragma unroll
        for (int i = 0; i < N; ++i) columns[i] = 0.0f;
#pragma unroll
        for (int r = 0; r < kTileRows; ++r) {
            rows[r] = finite_amax(v[r]);
#pragma unroll
            for (int i = 0; i < N; ++i) columns[i] = max_finite(columns[i], v[r][i]);
        }
    }
    if (COLUMNS && out.q_t != nullptr) share_columns(tile, columns, scratch);
    auto value = [&](int r, int i) { return v[r][i]; };
    if (ROWS && out.q != nullptr) {
        float* scales = out.scale + out.row() * out.scale_row + out.across * out.scale_group;
        const float inverse = row_scales<e4m3>(tile, rows, scales, out.scale_row, pow2);
        store_rows<ALIGNED16>(tile, out.q + out.row() * out.cols + out.column(), out.cols, inverse, value);
    }
    if (COLUMNS && out.q_t != nullptr) {
        column_scales<e4m3>(tile, columns, scratch, out.scale_t + out.down * out.cols + out.column(), pow2);
        stage_columns<e4m3>(tile, scratch, columns, value);
        __syncthreads();
        store_columns(tile, scratch, out.q_t + out.column() * out.rows + out.row(), out.rows);
    }
}

}  // namespace rtk
