// Stores staged codes of a tile's columns (quant/tile_square.cuh) to columns of memory that may begin at any byte,
// where other tiles write the bytes before and after.
//
// Memory gets aligned 16-byte vectors, each assembled from two staged ones. A column that begins `past` bytes after a
// multiple of 16 has 16 - past bytes before the first whole vector and `past` bytes after the last one. Each of these
// 16 bytes is written by its own lane, so that an end is one request, whatever its length.
#pragma once
#include "quant/tile_square.cuh"

namespace rtk {

// The 16 bytes that begin `back` bytes before those of `own`, which follow those of `before`.
RTK_DEVICE Raw<16> shifted_together(const Raw<16>& before, const Raw<16>& own, int back) {
    const u32 words[8] = {before.w[0], before.w[1], before.w[2], before.w[3], own.w[0], own.w[1], own.w[2], own.w[3]};
    u32 near[6], five[5];
#pragma unroll
    for (int i = 0; i < 6; ++i) near[i] = (back & 8) != 0 ? words[i] : words[i + 2];
#pragma unroll
    for (int i = 0; i < 5; ++i) five[i] = (back & 4) != 0 ? near[i] : near[i + 1];
    Raw<16> result;
#pragma unroll
    for (int i = 0; i < 4; ++i) result.w[i] = __funnelshift_l(five[i], five[i + 1], back % 4 * 8);
    return result;
}

// The whole vectors. `q`: the code of the tile's first element; columns are `pitch` apart. THREADS call, whole warps.
template <int THREADS>
RTK_DEVICE void store_shifted_vectors(const u8* codes, e4m3* q, u32 pitch, int rows, int columns, int thread) {
    constexpr int kVectors = kTileSide / 16, kStep = THREADS / kVectors;
    const int p = thread % kVectors;
    int column = thread / kVectors;
    e4m3* to = q + static_cast<u64>(pitch) * static_cast<u32>(column);
    const u64 step = static_cast<u64>(pitch) * kStep;
#pragma unroll 4
    for (int first = 0; first < columns; first += kStep, column += kStep, to += step) {
        const int past = static_cast<int>(reinterpret_cast<u64>(to) % 16), swizzled = square_swizzle(column);
        const u8* from = codes + column * kTileSide + ((p * 16) ^ (swizzled & ~15));
        const Raw<16> raw = *reinterpret_cast<const Raw<16>*>(from);
        const bool swap = swizzled % 16 != 0;
        const Raw<16> own = {swap ? raw.w[2] : raw.w[0], swap ? raw.w[3] : raw.w[1], swap ? raw.w[0] : raw.w[2],
                             swap ? raw.w[1] : raw.w[3]};
        Raw<16> before;
#pragma unroll
        for (int i = 0; i < 4; ++i) before.w[i] = __shfl_up_sync(0xffffffffu, own.w[i], 1);
        const int row = p * 16 - past;
        if (column < columns && p > 0 && row + 16 <= rows)
            ptx::st<16>(to + row, shifted_together(before, own, past));
    }
}

// The bytes that store_shifted_vectors does not write.
template <int THREADS>
RTK_DEVICE void store_ends(const u8* codes, e4m3* q, u32 pitch, int rows, int columns, int thread) {
    constexpr int kEnd = 16, kStep = THREADS / kEnd;
    const int lane = thread % kEnd;
    int column = thread / kEnd;
    e4m3* to = q + static_cast<u64>(pitch) * static_cast<u32>(column);
    const u64 step = static_cast<u64>(pitch) * kStep;
#pragma unroll 4
    for (; column < columns; column += kStep, to += step) {
        const int past = static_cast<int>(reinterpret_cast<u64>(to) % kEnd);
        auto put = [&](int row) {
            ptx::st<1>(to + row, Raw<1>{codes[column * kTileSide + (row ^ square_swizzle(column))]});
        };
        const int row = (lane - past) & (kTileSide - 1);
        if (row < rows) put(row);
        if (rows < kTileSide) {
            // The column ends in the middle.
            const int place = (past + rows) / kEnd * kEnd + lane;
            if (place >= kEnd && place < kTileSide && place < past + rows) put(place - past);
        }
    }
}

}  // namespace rtk
