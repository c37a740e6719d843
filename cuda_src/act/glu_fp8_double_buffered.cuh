// Tile handling of act/glu_fp8_double_buffered.cu, with the tiles of act/glu_tile.cuh: 8 x 8 numbers per thread
// (quant/tile_square.cuh), and inputs of the next tile are copied to shared memory meanwhile
// (quant/tile_square_slots.cuh).
#pragma once
#include "act/glu_tile.cuh"
#include "quant/tile_square_slots.cuh"

namespace rtk {

inline constexpr int kBlock = kSquareThreads;

RTK_DEVICE SquareSpot spot_of(const TilePlace& place, u32 cols) {
    const u32 columns = min(cols - place.column, static_cast<u32>(kSide));
    return SquareSpot(static_cast<int>(place.rows), static_cast<int>(columns));
}

// The thread's first element of a tile.
template <typename T>
RTK_DEVICE const T* first_of(const T* x, u32 stride, const TilePlace& place, const SquareSpot& spot) {
    return settled(x + product(place.row + spot.row, stride) + (place.column + spot.column));
}

// Starts copying the first ROWS rows of the thread's part of a tile of x [.., cols].
template <int ROWS, typename T>
RTK_DEVICE void fetch(const SquareSlots& slots, const TilePlace& place, u32 cols, const T* x, u32 stride) {
    const SquareSpot spot = spot_of(place, cols);
    slots.fetch<ROWS>(spot, first_of(x, stride, place, spot), stride);
}

// Requests the thread's rows FIRST, ... FIRST + ROWS - 1.
template <int FIRST, int ROWS, typename T>
RTK_DEVICE void request(Raw<16> (&raw)[ROWS], const TilePlace& place, u32 cols, const T* x, u32 stride) {
    const SquareSpot spot = spot_of(place, cols);
    const T* p = first_of(x, stride, place, spot) + product(FIRST, stride);
    const int rows = spot.columns > 0 ? spot.rows : 0;
    if (place.rows == kSide && cols - place.column >= static_cast<u32>(kSide)) {  // the same for the whole block
#pragma unroll
        for (int r = 0; r < ROWS; ++r, p += stride) raw[r] = load_raw<T, 8>(p);
    } else {
#pragma unroll
        for (int r = 0; r < ROWS; ++r, p += stride) {
            clear(raw[r]);
            if (FIRST + r < rows) raw[r] = load_raw<T, 8>(p);
        }
    }
}

// Weights of the warp's 16 rows, one per lane; those of rows that do not exist are arbitrary.
RTK_DEVICE float lane_weights(const TilePlace& place, const float* weight) {
    const u32 thread = this_thread(), own = thread / kWarp * 16 + thread % 16;
    return __uint_as_float(ptx::ld_keep<4>(weight + place.row + min(own, place.rows - 1)).w[0]);
}

// The weight of the thread's row r.
RTK_DEVICE float row_weight(float weights, int r) {
    return __shfl_sync(0xffffffffu, weights, static_cast<int>(threadIdx.x) / 16 % 2 * kSquare + r);
}

// Destination of the codes of a tile, or (`right`) of the tile `cols` columns to its right.
struct GluSquareOutput {
    const Quantized& all;
    const TilePlace& place;  // in shared memory
    u32 cols;
    bool right;

    RTK_DEVICE bool by_rows() const { return all.q != nullptr; }
    RTK_DEVICE bool by_columns() const { return all.q_t != nullptr; }
    RTK_DEVICE bool pow2() const { return all.pow2; }
    RTK_DEVICE int rows() const { return static_cast<int>(place.rows); }
    RTK_DEVICE int columns() const { return static_cast<int>(min(cols - place.column, static_cast<u32>(kSide))); }
    RTK_DEVICE u32 column() const { return place.column + (right ? cols : 0u); }
    RTK_DEVICE float* scale(int row) const {
        const u32 groups = (all.cols + (kSide - 1)) / kSide, group = column() / kSide, m = place.row + row;
        const u64 by_group = product(place.start, groups - 1) + product(group, place.count) + m;
        return all.scale + (all.by_group ? by_group : product(m, groups) + group);
    }
    RTK_DEVICE float* scale_t(int c) const { return all.scale_t + product(place.down, all.cols) + (column() + c); }
    RTK_DEVICE e4m3* q(int row, int c) const { return all.q + product(place.row + row, all.cols) + (column() + c); }
    RTK_DEVICE u32 stride() const { return all.cols; }
    RTK_DEVICE e4m3* q_t() const {
        return all.q_t + product(place.start, all.cols) + product(column(), place.count) + (place.row - place.start);
    }
    RTK_DEVICE u32 pitch() const { return place.count; }
};

}  // namespace rtk
