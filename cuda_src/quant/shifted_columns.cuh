// Staged codes of a tile's columns to columns of memory that may begin at any byte, where neighbouring tiles write the
// bytes before and after. Staged, a column has 128 bytes, and the code of row r is byte r ^ turn(column) of them; turns are
// multiples of 8 that spread columns over the banks.
//
// Memory gets aligned pieces of 16 bytes, each put together from two staged ones. Of a column that begins `past` bytes
// after a multiple of 16, there are 16 - past bytes before the first whole piece and `past` bytes behind the last one. A
// lane writes each of these 16, so that an end is one request, whatever its length: what counts is requests, for a
// byte takes L2 as long as 32 do.
#pragma once
#include "common/vec.cuh"

namespace rtk {

inline constexpr int kColumnBytes = 128;

template <int WORDS>
struct WordShift {
    static constexpr int kWords = WORDS;
};

// The 16 bytes that begin 4 * WORDS + `bytes` bytes before those of `own`, which follow those of the lane before.
template <int WORDS>
RTK_DEVICE Raw<16> shifted_together(const Raw<16>& own, int bytes) {
    u32 words[5];  // the last ones of the other lane's piece, and the first ones of this one
#pragma unroll
    for (int i = 0; i < 5; ++i)
        words[i] = i <= WORDS ? __shfl_up_sync(0xffffffffu, own.w[3 - WORDS + i], 1) : own.w[i - WORDS - 1];
    Raw<16> result;
#pragma unroll
    for (int i = 0; i < 4; ++i) result.w[i] = __funnelshift_l(words[i], words[i + 1], bytes * 8);
    return result;
}

// The whole pieces. `q`: the code of the tile's first element; columns are `pitch` apart. THREADS call, whole warps. A
// warp has every 16th column at a time: those begin equally far behind a multiple of 16, so that all lanes shift alike.
template <int THREADS, typename F8, typename Pitch, typename Turn>
RTK_DEVICE void store_shifted_pieces(const u8* codes, const Turn& turn, F8* q, Pitch pitch, int rows, int columns,
                                     int thread) {
    constexpr int kPieces = kColumnBytes / 16, kWarpColumns = kWarp / kPieces, kHalf = 16 * kWarpColumns;
    static_assert(2 * kHalf == kColumnBytes, "a warp has two times four of the columns that begin alike");
    const int lane = thread % kWarp, p = lane % kPieces;
    int column = lane / kPieces * 16 + thread / kWarp;
    F8* to = q + static_cast<u64>(pitch) * static_cast<u32>(column) + p * 16;
    const u64 step = static_cast<u64>(pitch) * (THREADS / kWarp), half = static_cast<u64>(pitch) * kHalf;
#pragma unroll 1
    for (int k = thread / kWarp; k < 16; k += THREADS / kWarp, column += THREADS / kWarp, to += step) {
        const int past = static_cast<int>(reinterpret_cast<u64>(to) % 16);
        Raw<16> own[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int c = column + h * kHalf, turned = turn(c);
            const Raw<16> raw = *reinterpret_cast<const Raw<16>*>(codes + c * kColumnBytes + ((p * 16) ^ (turned & ~15)));
            const bool swap = turned % 16 != 0;
            own[h] = {swap ? raw.w[2] : raw.w[0], swap ? raw.w[3] : raw.w[1], swap ? raw.w[0] : raw.w[2],
                      swap ? raw.w[1] : raw.w[3]};
        }
        auto store = [&](auto shift) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const Raw<16> piece = shifted_together<decltype(shift)::kWords>(own[h], past % 4);
                if (column + h * kHalf < columns && p > 0 && p * 16 - past + 16 <= rows)
                    ptx::st<16>(to + h * half - past, piece);
            }
        };
        if (past < 8) {
            past < 4 ? store(WordShift<0>{}) : store(WordShift<1>{});
        } else {
            past < 12 ? store(WordShift<2>{}) : store(WordShift<3>{});
        }
    }
}

// What store_shifted_pieces leaves out.
template <int THREADS, typename F8, typename Pitch, typename Turn>
RTK_DEVICE void store_ends(const u8* codes, const Turn& turn, F8* q, Pitch pitch, int rows, int columns, int thread) {
    constexpr int kEnd = 16, kStep = THREADS / kEnd, kBatch = 4;
    const int lane = thread % kEnd;
    int column = thread / kEnd;
    F8* to = q + static_cast<u64>(pitch) * static_cast<u32>(column);
    const u64 step = static_cast<u64>(pitch) * kStep;
#pragma unroll 1
    for (; column < columns; column += kBatch * kStep, to += kBatch * step) {
        int row[kBatch];
        u32 code[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int c = column + i * kStep, past = static_cast<int>(reinterpret_cast<u64>(to + i * step) % kEnd);
            row[i] = (lane - past) & (kColumnBytes - 1);
            code[i] = codes[c * kColumnBytes + (row[i] ^ turn(c))];
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (column + i * kStep < columns && row[i] < rows) ptx::st<1>(to + i * step + row[i], Raw<1>{code[i]});
    }
    if (rows == kColumnBytes) return;
    // The columns end in the middle.
    column = thread / kEnd, to = q + static_cast<u64>(pitch) * static_cast<u32>(column);
#pragma unroll 1
    for (; column < columns; column += kStep, to += step) {
        const int past = static_cast<int>(reinterpret_cast<u64>(to) % kEnd), end = past + rows;
        const int byte = end / kEnd * kEnd + lane, row = byte - past;
        if (byte >= kEnd && byte < kColumnBytes && byte < end)
            ptx::st<1>(to + row, Raw<1>{codes[column * kColumnBytes + (row ^ turn(column))]});
    }
}

template <int THREADS, typename F8, typename Pitch, typename Turn>
RTK_DEVICE void store_shifted_columns(const u8* codes, const Turn& turn, F8* q, Pitch pitch, int rows, int columns,
                                      int thread) {
    store_shifted_pieces<THREADS>(codes, turn, q, pitch, rows, columns, thread);
    store_ends<THREADS>(codes, turn, q, pitch, rows, columns, thread);
}

}  // namespace rtk
