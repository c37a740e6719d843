// The tile of the dequantisation of transposed codes. One warp owns 128 rows of 4 * N columns; a lane owns 16 rows (its
// strip) of N columns: it reads or writes N columns of a row of the matrix in one access, and 16 rows of a column of
// the transposed codes in one. So the transposition happens within lanes, without shared memory.
#pragma once
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace rtk {

constexpr int kStripRows = 16, kStrips = 8, kTileRows = kStripRows * kStrips;

template <int N>
struct TransposedTile {
    int strip;         // of this lane
    i64 tile_row;      // in units of 128 rows
    i64 row, column;   // first of this lane
    int rows_here;     // rows of the strip that exist, 0 to 16
    int columns_here;  // columns of this lane that exist, 0 to N

    RTK_DEVICE TransposedTile(i64 rows, i64 cols, i64 column_tiles) {
        const u32 across = static_cast<u32>(column_tiles), down = blockIdx.x / across;
        const int warps = static_cast<int>(blockDim.x) / kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        strip = lane % kStrips;
        tile_row = down;
        row = tile_row * kTileRows + strip * kStripRows;
        column = (static_cast<i64>(blockIdx.x - down * across) * warps + warp) * (4 * N) + lane / kStrips * N;
        rows_here = static_cast<int>(max(0ll, min(rows - row, static_cast<i64>(kStripRows))));
        columns_here = static_cast<int>(max(0ll, min(cols - column, static_cast<i64>(N))));
    }
};

// N elements; `count` of them exist. `whole`: all or none do, and the address allows one access.
template <typename T, int N>
RTK_DEVICE Raw<sizeof(T) * N> load_part(const T* p, int count, bool whole) {
    Raw<sizeof(T) * N> raw;
    clear(raw);
    if (whole) {
        if (count > 0) raw = load_raw<T, N>(p);
    } else {
        constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (i < count)
                raw.w[i / kPerWord] |= ptx::ld_keep<sizeof(T)>(p + i).w[0] << (i % kPerWord * 8 * (4 / kPerWord));
    }
    return raw;
}

template <typename T, int N>
RTK_DEVICE void store_part(T* p, const float (&v)[N], int count, bool whole) {
    if (whole) {
        if (count > 0) store<T, N>(p, v);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float one[1] = {v[i]};
            if (i < count) store<T, 1>(p + i, one);
        }
    }
}

}  // namespace rtk
