// Shared by the kernels of the gated delta rule (attention/gated_delta_rule_rows.cuh has the formulas) with mma.sync: tiles,
// the state of a scan, copies and products.
#pragma once
#include "attention/gated_delta_rule_rows.cuh"
#include "attention/mma_tile.cuh"
#include "ptx/barrier.cuh"

namespace rtk {

// Two neighbours of a 16-bit tile, column 8n + 2 (lane % 4).
template <typename T, typename Tile>
RTK_DEVICE void read_pair(const u8* tile, int row, int n, int lane, float (&f)[2]) {
    unpack<T, 2>(Raw<4>{{*reinterpret_cast<const u32*>(tile + Tile::offset(row, n) + lane % 4 * 4)}}, f);
}
template <typename T, typename Tile>
RTK_DEVICE void write_pair(u8* tile, int row, int n, int lane, float lo, float hi) {
    *reinterpret_cast<u32*>(tile + Tile::offset(row, n) + lane % 4 * 4) = packed_pair<T>(lo, hi);
}
// The same in two parts, the rounded remainder in a tile of its own.
template <typename T, typename Tile>
RTK_DEVICE void write_parts(u8* tile, u8* remainder, int row, int n, int lane, float lo, float hi) {
    const u32 pair = packed_pair<T>(lo, hi), at = Tile::offset(row, n) + lane % 4 * 4;
    float rounded[2];
    unpack<T, 2>(Raw<4>{{pair}}, rounded);
    *reinterpret_cast<u32*>(tile + at) = pair;
    *reinterpret_cast<u32*>(remainder + at) = packed_pair<T>(lo - rounded[0], hi - rounded[1]);
}

// The state of a head in a scan, or its gradient: [d_k][d_v] fp32 in memory, of which a block has the columns of a tile
// from `column0` on and a warp 16 rows in registers. As T in shared memory it is an operand of products.
template <typename T, typename Tile, int DK>
struct ScannedState {
    static constexpr int kTiles = Tile::kVectors;
    float sums[kTiles][4];
    i64 d_k, d_v;
    int row, column0, columns, lane;
    bool keeps;  // this warp has rows

    RTK_DEVICE ScannedState(i64 d_k, i64 d_v, int column0, int columns, int warp, int lane)
        : d_k(d_k), d_v(d_v), row(16 * warp + lane / 4), column0(column0), columns(columns), lane(lane), keeps(16 * warp < DK) {}

    RTK_DEVICE bool has(int n, int r) const { return keeps && row + 8 * r < d_k && 8 * n + lane % 4 * 2 < columns; }
    RTK_DEVICE i64 at(i64 head, int n, int r) const {
        return (head * d_k + row + 8 * r) * d_v + column0 + 8 * n + lane % 4 * 2;
    }
    // From the state of a sequence's head, or zeros if there is none.
    RTK_DEVICE void load(const float* from, i64 head) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float pair[2] = {0.0f, 0.0f};
                if (from != nullptr && has(n, r)) load_keep<float, 2>(from + at(head, n, r), pair);
                sums[n][2 * r] = pair[0], sums[n][2 * r + 1] = pair[1];
            }
    }
    // The identity: d_v is d_k.
    RTK_DEVICE void load_identity() {
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[n][i] = has(n, i / 2) && column0 + 8 * n + lane % 4 * 2 + i % 2 == row + i / 2 * 8 ? 1.0f : 0.0f;
    }
    RTK_DEVICE void store_to(float* to, i64 head) const {
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float pair[2] = {sums[n][2 * r], sums[n][2 * r + 1]};
                if (has(n, r)) store<float, 2>(to + at(head, n, r), pair);
            }
    }
    // By channels, from the numbers of a chunk's rows.
    RTK_DEVICE void decay(const float* numbers) {
        const float* const wholes = numbers + kWholes * kDelta;
        const float by[2] = {ptx::ex2(wholes[row]), ptx::ex2(wholes[row + 8])};
        scale_rows(sums, by);
    }
    RTK_DEVICE void show(u8* tile) const {
        if (!keeps) return;
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) write_pair<T, Tile>(tile, row + 8 * r, n, lane, sums[n][2 * r], sums[n][2 * r + 1]);
    }
};

// MmaTile::fetch by 128 threads, of which this is `thread`.
template <typename Tile, int ROWS, typename T>
RTK_DEVICE void fetch_by(int thread, u8* tile, const T* source, i64 row_stride, int rows, int vectors) {
    constexpr int kStep = 128 / Tile::kVectors;
    static_assert(ROWS % kStep == 0, "all threads copy alike");
    const ptx::SharedAddress base = ptx::shared_address(tile);
    const int row = thread / Tile::kVectors, vector = thread % Tile::kVectors, last = vector < vectors ? rows : 0;
    const T* from = source + row * row_stride + vector * 8;
#pragma unroll
    for (int i = 0; i < ROWS / kStep; ++i) {
        ptx::cp_async_16_or_zero(base + Tile::offset(row + i * kStep, vector), from, row + i * kStep < last);
        from += kStep * row_stride;
    }
}

// Stores a tile to dense rows of `width` elements by 128 threads, vector by vector.
template <typename Tile, int ROWS, typename T>
RTK_DEVICE void store_by(int thread, T* to, i64 width, const u8* tile, int rows, int vectors) {
#pragma unroll
    for (int i = thread; i < ROWS * Tile::kVectors; i += 128) {
        const int row = i / Tile::kVectors, vector = i % Tile::kVectors;
        if (row < rows && vector < vectors)
            ptx::st<16>(to + row * width + vector * 8, *reinterpret_cast<const Raw<16>*>(tile + Tile::offset(row, vector)));
    }
}

// Where 16 x 16 blocks of the remainder of T are: above the diagonals of T and of P, the 64 rows behind it in the tile, where
// both are 0 and nobody reads.
struct RemainderBlock {
    int row, column;  // the first row; columns in units of 16

    RTK_DEVICE RemainderBlock(int i, int j) : row(i == j ? kDelta + i / 2 * 16 : 16 * j), column(i == j ? 2 + i % 2 : i) {}
};

// Starts the copy of T in two parts, or of P if !kParts, by 128 threads: vectors on and below the diagonal. Others of blocks
// that have such are zero-filled.
template <typename Tile, bool kParts, typename T>
RTK_DEVICE void fetch_lower(int thread, u8* tile, const T* source) {
    const ptx::SharedAddress base = ptx::shared_address(tile);
    const int row = thread / 8, vector = thread % 8, j = vector / 2;
    const T* from = source + row * kDelta + vector * 8;
#pragma unroll
    for (int i = 0; i < kDelta / 16; ++i) {
        if (j > i) continue;
        const bool exists = 8 * vector <= 16 * i + row;
        ptx::cp_async_16_or_zero(base + Tile::offset(16 * i + row, vector), from + 16 * i * kDelta, exists);
        if constexpr (kParts) {
            const RemainderBlock at(i, j);
            ptx::cp_async_16_or_zero(base + Tile::offset(at.row + row, 2 * at.column + vector % 2),
                                     from + (kDelta + 16 * i) * kDelta, exists);
        }
    }
}

// rows_by_rows, two steps at a time: fewer registers.
template <typename T, typename Tile, int STEPS, int N>
RTK_DEVICE void rows_by_rows_rolled(float (&d)[N][4], const u8* left, int row, const u8* right, int column, int lane) {
#pragma unroll 2
    for (int step = 0; step < STEPS; ++step) {
        u32 a[4];
        Tile::left(a, left, row, step, lane);
#pragma unroll
        for (int n = 0; n < N / 2; ++n) {
            u32 b[4];
            Tile::right(b, right, column + 16 * n, step, lane);
            mma_step<T>(d[2 * n], a, b[0], b[1]);
            mma_step<T>(d[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// d += rows row.. + 15 of one tile by the columns of another, summed over STEPS steps of 16 of its rows.
template <typename T, typename Left, typename Right, int STEPS, int N>
RTK_DEVICE void rows_by_columns(float (&d)[N][4], const u8* left, int row, const u8* right, int lane) {
    constexpr int kUnroll = N > 4 ? 2 : 4;
#pragma unroll kUnroll
    for (int step = 0; step < STEPS; ++step) {
        u32 a[4];
        Left::left(a, left, row, step, lane);
        by_columns<T, Right>(d, a, right, 16 * step, lane);
    }
}

// The same with columns column.. + 15 of the left tile as rows; steps from..end - 1 of its rows.
template <typename T, typename Left, typename Right, int N>
RTK_DEVICE void columns_by_columns(float (&d)[N][4], const u8* left, int column, const u8* right, int from, int end, int lane) {
#pragma unroll
    for (int step = 0; step < kDelta / 16; ++step) {
        if (step < from || step >= end) continue;
        u32 a[4];
        Left::left_transposed(a, left, 16 * step, column / 16, lane);
        by_columns<T, Right>(d, a, right, 16 * step, lane);
    }
}

// The same over all rows, with the right operand in two parts.
template <typename T, typename Left, typename Right, int N>
RTK_DEVICE void columns_by_parts(float (&d)[N][4], const u8* left, int column, const u8* right, const u8* remainder, int lane) {
#pragma unroll
    for (int step = 0; step < kDelta / 16; ++step) {
        u32 a[4];
        Left::left_transposed(a, left, 16 * step, column / 16, lane);
        by_columns<T, Right>(d, a, right, 16 * step, lane);
        by_columns<T, Right>(d, a, remainder, 16 * step, lane);
    }
}

// d += a by columns 8 first.. of rows row.. + 15 of a tile, summed over these rows.
template <typename T, typename Tile, int N>
RTK_DEVICE void by_some_columns(float (&d)[N][4], const u32 (&a)[4], const u8* tile, int row, int first, int lane) {
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
        u32 b[4];
        Tile::right_transposed(b, tile, row, first / 2 + n, lane);
        mma_step<T>(d[2 * n], a, b[0], b[1]);
        mma_step<T>(d[2 * n + 1], a, b[2], b[3]);
    }
}

}  // namespace rtk
