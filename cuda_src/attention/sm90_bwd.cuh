// What the kernels of the backward on sm_90a share: rows of statistics and sums of dq, in padded order.
//
// Per head, the rows of sequences follow each other, each sequence beginning at a multiple of kRowPad; a tile of queries is then
// never that of two sequences. `rows` below is how many there are in all, of each head.
#pragma once
#include "attention/sm90_tile.cuh"

namespace rtk {

inline constexpr int kRowPad = 128;
inline constexpr int kBackwardKeys = 128;  // in a tile

// Where the rows of a sequence begin.
RTK_DEVICE i64 padded_row(int batch, const Sequence& sequence, i64 lq, bool packed) {
    if (packed) return (static_cast<i64>(sequence.q_row) + static_cast<i64>(batch) * kRowPad) / kRowPad * kRowPad;
    return batch * ((lq + kRowPad - 1) / kRowPad * kRowPad);
}

// Queries in a tile: registers are for 64 x 64 or 64 x 128 scores of a warpgroup.
template <int D>
struct BackwardTile {
    static constexpr int kQueries = D == 64 ? 128 : 64;
    // Sums of dq of a tile lie as the threads of two warpgroups have them, each 32; of a warpgroup: four neighbours of a
    // thread, then the next thread, then the next four. Warpgroup w has columns from kColumn w and rows from kRow w.
    static constexpr int kColumn = D == 64 ? 0 : 64, kRow = D == 64 ? 64 : 0;
    static constexpr u32 kSumBytes = kQueries * D * 4;
};

}  // namespace rtk
