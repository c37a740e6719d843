// How act/glu_fp8.cu quantises a tile: one of act/glu_tile.cuh in the registers of 256 threads, 8 x 8 numbers each
// (quant/tile.cuh). That takes fewer instructions per number than other shapes, and issuing them is what limits.
#pragma once
#include "act/glu_tile.cuh"
#include "quant/tile.cuh"

namespace rtk {

inline constexpr int kBlock = Tile<8>::kThreads;

static_assert(sizeof(TileScratch<8>) + TileWalk::kKept * sizeof(TilePlace) == 23104, "the host knows this number too");

using Square = float[kTileRows][8];

RTK_DEVICE Tile<8> tile_of(const TilePlace& place, u32 cols) {
    return Tile<8>(place.rows, cols - place.column, static_cast<int>(this_thread()));
}

// Requests the thread's elements of INPUTS matrices; those that do not exist are 0.
template <typename T, int INPUTS>
RTK_DEVICE void load_squares(const Tile<8>& tile, const TilePlace& place, const T* const (&x)[INPUTS],
                             const u32 (&stride)[INPUTS], Raw<16> (&raw)[INPUTS][kTileRows]) {
    const bool whole = tile.rows == kTileSide && tile.columns == kTileSide;
#pragma unroll
    for (int k = 0; k < INPUTS; ++k) {
        const T* p = settled(x[k] + product(place.row + tile.row, stride[k]) + (place.column + tile.column));
        if (whole) {
#pragma unroll
            for (int r = 0; r < kTileRows; ++r, p += stride[k]) raw[k][r] = load_raw<T, 8>(p);
        } else {
#pragma unroll
            for (int r = 0; r < kTileRows; ++r, p += stride[k]) {
                clear(raw[k][r]);
                if (r < tile.rows_here && tile.columns_here > 0) raw[k][r] = load_raw<T, 8>(p);
            }
        }
    }
}

// Weights of the warp's 16 rows, one per lane; those of rows that do not exist do not matter.
RTK_DEVICE float lane_weights(const TilePlace& place, const float* weight) {
    const u32 thread = this_thread(), own = thread / kWarp * 16 + thread % 16;
    return __uint_as_float(ptx::ld_keep<4>(weight + place.row + min(own, place.rows - 1)).w[0]);
}

// That of the thread's row r: the upper half of a warp has the first eight of its rows.
RTK_DEVICE float row_weight(float weights, int r) {
    return __shfl_sync(0xffffffffu, weights, static_cast<int>(threadIdx.x) / 16 % 2 * kTileRows + r);
}

template <typename Larger>
RTK_DEVICE void find_maxima(const Square& v, float (&rows)[kTileRows], float (&columns)[8], const Larger& larger) {
#pragma unroll
    for (int i = 0; i < 8; ++i) columns[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
        rows[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            rows[r] = larger(rows[r], v[r][i]);
            columns[i] = larger(columns[i], v[r][i]);
        }
    }
}

// Writes the staged columns of a tile whose columns begin at multiples of 16 bytes, each `pitch` after the one before.
RTK_DEVICE void store_aligned(const TileScratch<8>& scratch, const Tile<8>& tile, e4m3* q, u32 pitch) {
    constexpr int kPieces = kTileSide / 16, kStep = kBlock / kPieces;
    const int piece = tile.thread % kPieces, first = tile.thread / kPieces;
    e4m3* to = settled(q + product(first, pitch) + piece * 16);
    const u32 step = kStep * pitch;
    const int columns = piece * 16 < tile.rows ? tile.columns - first : 0;
    // 32 columns on, the order of the units is the same but for one bit of the piece's number.
    const int turn = first / 8 % 16;
    const u8* from = scratch.codes + first * kTileSide;
    const bool swap = turn % 2 != 0;
#pragma unroll
    for (int k = 0; k < kTileSide / kStep; ++k, to += step) {
        const int other = (turn + k * (kStep / 8)) / 2;
        const Raw<16> raw = *reinterpret_cast<const Raw<16>*>(from + k * kStep * kTileSide + ((piece ^ other) * 16));
        const Raw<16> codes = {swap ? raw.w[2] : raw.w[0], swap ? raw.w[3] : raw.w[1],
                               swap ? raw.w[0] : raw.w[2], swap ? raw.w[1] : raw.w[3]};
        if (k * kStep < columns) ptx::st<16>(to, codes);
    }
}

// Quantises v, the thread's part of the tile at `place`.
// Every thread of the block calls; there is at least one barrier, and the scratch may be used again.
RTK_DEVICE void quantize_square(const Square& v, const TilePlace& place, u32 cols, const Quantized& out,
                                TileScratch<8>& scratch) {
    const u32 column = place.column;
    float rows[kTileRows], most[8];
    find_maxima(v, rows, most, [](float a, float b) { return fmaxf(a, fabsf(b)); });
    constexpr float kLargest = 3.40282347e38f;
    float largest = most[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) largest = fmaxf(largest, most[i]);
    if (largest > kLargest) find_maxima(v, rows, most, max_finite);
    if (out.q_t != nullptr) {
        const Tile<8> tile = tile_of(place, cols);
        share_columns(tile, most, scratch);
        __syncthreads();
        // Half of the warps work out the scales of the columns while the others are ahead with the rows.
        if (tile.thread < kTileSide) {
            const int at = scratch.place(tile.thread);
            float m = scratch.most[0][at];
#pragma unroll
            for (int w = 1; w < Tile<8>::kWarps; ++w) m = fmaxf(m, scratch.most[w][at]);
            const float own = fp8_scale<e4m3>(m, out.pow2);
            scratch.inverse[at] = inverse_scale(own);
            if (tile.thread < tile.columns) out.scale_t[product(place.down, out.cols) + column + tile.thread] = own;
        }
    }
    if (out.q != nullptr) {
        const Tile<8> tile = tile_of(place, cols);
        const int lane = tile.thread % 16;
        const float own = fp8_scale<e4m3>(scattered_max<kTileRows, 16>(rows, tile.thread), out.pow2);
        const u32 first = place.row + tile.row;
        if (lane < kTileRows && lane < tile.rows_here) {
            const u32 groups = (out.cols + (kTileSide - 1)) / kTileSide, group = column / kTileSide, m = first + lane;
            const u64 by_group = product(place.start, groups - 1) + product(group, place.count) + m;
            out.scale[out.by_group ? by_group : product(m, groups) + group] = own;
        }
        const float inverses = inverse_scale(own);
        const int rows_here = tile.columns_here > 0 ? tile.rows_here : 0;
        e4m3* q = settled(out.q + product(first, out.cols) + (column + tile.column));
#pragma unroll
        for (int r = 0; r < kTileRows; ++r, q += out.cols) {
            const float inverse = __shfl_sync(0xffffffffu, inverses, r, 16);
            const Raw<8> codes = quantized<e4m3>(v[r], inverse);
            if (r < rows_here) ptx::st<8>(q, codes);
        }
    }
    __syncthreads();
    if (out.q_t == nullptr) return;
    {
        const Tile<8> tile = tile_of(place, cols);
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const Raw<16> part = *reinterpret_cast<const Raw<16>*>(&scratch.inverse[scratch.place(tile.column + i)]);
#pragma unroll
            for (int k = 0; k < 4; ++k) most[i + k] = __uint_as_float(part.w[k]);
        }
        stage_columns<e4m3>(tile, scratch, most, [&](int r, int i) { return v[r][i]; });
    }
    __syncthreads();
    const u32 pitch = place.count;
    e4m3* q_t = out.q_t + product(place.start, out.cols) + product(column, pitch) + (place.row - place.start);
    const Tile<8> tile = tile_of(place, cols);
    if (((reinterpret_cast<u64>(q_t) | pitch | place.rows) & 15) == 0) {
        store_aligned(scratch, tile, q_t, pitch);
    } else {
        store_columns(tile, scratch, q_t, static_cast<i64>(pitch));
    }
}

}  // namespace rtk
