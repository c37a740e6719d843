// Quantises a 128 x 128 tile of fp32 numbers in the registers of 256 threads, 8 x 8 each, to e4m3 along rows (1 x 128),
// along columns (128 x 1, codes transposed), or both. A warp has 16 rows, half a warp eight: neighbouring lanes read
// and write whole cache lines, which matters more than any number of instructions (docs/decisions/common.md).
//
// Transposed codes pass through shared memory, 128 bytes per column. The 16 bytes of rows 16p .. 16p + 15 of column c
// are in vector p ^ (c / 8 % 8) of that column, in the second half of the columns with its eight bytes swapped. When
// writing, half a warp has the same rows of 16 times eight columns; when reading, eight lanes share a column: both
// touch every bank once.
#pragma once
#include "common/fp8_scale.cuh"
#include "common/pressure.cuh"
#include "common/vec.cuh"
#include "quant/tile.cuh"

namespace rtk {

inline constexpr int kSquare = 8;  // rows and columns of a thread
inline constexpr int kSquareThreads = 256;
inline constexpr int kSquareWarps = kSquareThreads / kWarp;

using Square = float[kSquare][kSquare];

// Position of this thread's numbers in the tile, and how many rows and columns from there on exist (0 or less: none).
struct SquareSpot {
    int lane, warp, row, column, rows, columns;

    RTK_DEVICE SquareSpot(int rows_of_tile, int columns_of_tile) {
        const int thread = static_cast<int>(this_thread());
        lane = thread % kWarp, warp = thread / kWarp;
        row = warp * (2 * kSquare) + lane / 16 * kSquare;
        column = lane % 16 * kSquare;
        rows = rows_of_tile - row;
        columns = columns_of_tile - column;
    }
};

// Address of the codes of rows 8u .. 8u + 7 of a column.
RTK_DEVICE int square_unit(int column, int u) {
    return column * kTileSide + ((u / 2) ^ (column / kSquare % 8)) * 16 + ((u ^ (column / 64)) % 2) * 8;
}

// The code of row r of a column is byte r ^ square_swizzle(column) of its 128.
RTK_DEVICE int square_swizzle(int column) { return column / kSquare % 8 * 16 + column / 64 * 8; }

struct SquareScratch {
    // Column operands are stored by fours, first those of columns 0..3 of every thread, then 4..7; the padding of 16 in
    // between puts them on different banks.
    static constexpr int kPlaces = kTileSide + 16;

    __align__(16) u8 codes[kTileSide * kTileSide];
    __align__(16) float max_abs[kSquareWarps][kPlaces];
    __align__(16) float inverse[kPlaces];

    RTK_DEVICE static int place(int column) {
        return column / 4 % 2 * (kTileSide / 2 + 16) + column / kSquare * 4 + column % 4;
    }
    RTK_DEVICE u8* unit(int column, int u) { return codes + square_unit(column, u); }
};

// Maxima or sums of eight numbers over the 16 lanes of a row, scattered: each lane gets that of number lane % 8.
template <typename Combine>
RTK_DEVICE float scattered_by_rows(float (&v)[kSquare], int lane, const Combine& combine) {
    return scattered<kSquare, 16>(v, lane, combine);
}

// Number r of the eight that lanes of this thread's rows hold as scattered_by_rows leaves them.
RTK_DEVICE float gathered_by_rows(float v, int r) { return __shfl_sync(0xffffffffu, v, r, 16); }

template <typename Larger>
RTK_DEVICE void find_maxima(const Square& v, float (&rows)[kSquare], float (&columns)[kSquare], const Larger& larger) {
#pragma unroll
    for (int i = 0; i < kSquare; ++i) columns[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < kSquare; ++r) {
        rows[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < kSquare; ++i) {
            rows[r] = larger(rows[r], v[r][i]);
            columns[i] = larger(columns[i], v[r][i]);
        }
    }
}

// Writes the staged columns, each `pitch` bytes after the previous one; `q`: the code of the tile's first element.
// THREADS of the block call this, after a barrier; the next barrier frees the codes. Here q, pitch and rows are
// multiples of 16.
template <int THREADS, typename Pitch>
RTK_DEVICE void store_whole_columns(const u8* codes, e4m3* q, Pitch pitch, int rows, int columns, int thread) {
    constexpr int kVectors = kTileSide / 16, kStep = THREADS / kVectors;
    const int p = thread % kVectors, first = thread / kVectors;
    e4m3* to = settled(q + static_cast<u64>(pitch) * static_cast<u32>(first) + p * 16);
    // kStep columns later, the order of the vectors is the same except for at most one bit.
    const u8* from = codes + first * kTileSide;
    const int vector = (p ^ (first / kSquare)) * 16;
    const u64 step = static_cast<u64>(pitch) * kStep;
    const int columns_here = p * 16 < rows ? columns - first : 0;
#pragma unroll
    for (int k = 0; k < kTileSide / kStep; ++k, to += step) {
        const int swizzled = vector ^ (k * kStep / kSquare % 8 * 16);
        const Raw<16> raw = *reinterpret_cast<const Raw<16>*>(from + k * kStep * kTileSide + swizzled);
        const int swap = k * kStep < kTileSide / 2 ? 0 : 2;
        const Raw<16> ordered = {raw.w[swap], raw.w[1 + swap], raw.w[2 - swap], raw.w[3 - swap]};
        if (k * kStep < columns_here) ptx::st<16>(to, ordered);
    }
}

// The same in general. A column may begin at any byte: lanes write its aligned words, each funnel-shifted from two
// words of codes, and the bytes at the ends.
template <int THREADS, typename Pitch>
RTK_DEVICE void store_shifted_columns(const u8* codes, e4m3* q, Pitch pitch, int rows, int columns, int thread) {
    auto word = [&](int column, int w) {
        if (w < 0 || w >= kTileSide / 4) return 0u;
        return *reinterpret_cast<const u32*>(codes + square_unit(column, w / 2) + w % 2 * 4);
    };
#pragma unroll 1
    for (int column = thread / kWarp; column < columns; column += THREADS / kWarp) {
        e4m3* to = q + static_cast<u64>(pitch) * static_cast<u32>(column);
        const int misaligned = static_cast<int>(reinterpret_cast<u64>(to) & 3);
#pragma unroll 1
        for (int w = thread % kWarp; w * 4 - misaligned < rows; w += kWarp) {
            const Raw<4> shifted = {__funnelshift_l(word(column, w - 1), word(column, w), misaligned * 8)};
            const int first = w * 4 - misaligned;
            if (first >= 0 && first + 4 <= rows) {
                ptx::st<4>(to + first, shifted);
            } else {
#pragma unroll
                for (int b = 0; b < 4; ++b)
                    if (first + b >= 0 && first + b < rows)
                        ptx::st<1>(to + first + b, Raw<1>{(shifted.w[0] >> (8 * b)) & 0xffu});
            }
        }
    }
}

template <int THREADS, typename Pitch>
RTK_DEVICE void store_columns(const u8* codes, e4m3* q, Pitch pitch, int rows, int columns, int thread) {
    if (((reinterpret_cast<u64>(q) | static_cast<u64>(pitch) | static_cast<u64>(rows)) & 15) == 0) {
        store_whole_columns<THREADS>(codes, q, pitch, rows, columns, thread);
    } else {
        store_shifted_columns<THREADS>(codes, q, pitch, rows, columns, thread);
    }
}

// Quantises v, 0 where there is no number. `Out` describes the destination: by_rows(), by_columns() and pow2(); rows()
// and columns() of the tile; scale(row), scale_t(column), q(row, column) with stride(), and q_t() with pitch(), all
// relative to the tile's first row and column. They are called where the answers are used, so that these take no
// registers before. q is 8-byte aligned. At least one barrier; the scratch may be reused.
template <typename Out>
RTK_DEVICE void quantize_square(const Square& v, const Out& out, SquareScratch& scratch) {
    float rows[kSquare], max_abs[kSquare];
    find_maxima(v, rows, max_abs, [](float a, float b) { return fmaxf(a, fabsf(b)); });
    // Ignores NaN but not infinities; the rare thread that met an infinity repeats this without infinities.
    constexpr float kLargest = 3.40282347e38f;
    float largest = max_abs[0];
#pragma unroll
    for (int i = 1; i < kSquare; ++i) largest = fmaxf(largest, max_abs[i]);
    if (largest > kLargest) find_maxima(v, rows, max_abs, max_finite);
    if (out.by_columns()) {
        const SquareSpot spot(0, 0);
        const bool lower = spot.lane >= 16;
        Raw<16> four;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float kept = lower ? max_abs[i + 4] : max_abs[i], given = lower ? max_abs[i] : max_abs[i + 4];
            four.w[i] = __float_as_uint(fmaxf(kept, __shfl_xor_sync(0xffffffffu, given, 16)));
        }
        *reinterpret_cast<Raw<16>*>(&scratch.max_abs[spot.warp][scratch.place(spot.column + (lower ? 4 : 0))]) = four;
        __syncthreads();
        // Half of the warps compute the scales of the columns while the others begin with the rows.
        const int c = static_cast<int>(this_thread());
        if (c < kTileSide) {
            const int place = scratch.place(c);
            float m = scratch.max_abs[0][place];
#pragma unroll
            for (int w = 1; w < kSquareWarps; ++w) m = fmaxf(m, scratch.max_abs[w][place]);
            const float own = fp8_scale<e4m3>(m, out.pow2());
            scratch.inverse[place] = inverse_scale(own);
            if (c < out.columns()) *out.scale_t(c) = own;
        }
    }
    if (out.by_rows()) {
        const SquareSpot spot(out.rows(), out.columns());
        const int own_row = spot.lane % 16;
        const float own = fp8_scale<e4m3>(scattered_by_rows(rows, spot.lane, fmaxf), out.pow2());
        if (own_row < kSquare && own_row < spot.rows) *out.scale(spot.row + own_row) = own;
        const float inverses = inverse_scale(own);
        const int rows_here = spot.columns > 0 ? spot.rows : 0;
        e4m3* to = settled(out.q(spot.row, spot.column));
#pragma unroll
        for (int r = 0; r < kSquare; ++r, to += out.stride()) {
            const Raw<8> codes = quantized<e4m3>(v[r], gathered_by_rows(inverses, r));
            if (r < rows_here) ptx::st<8>(to, codes);
        }
    }
    __syncthreads();
    if (!out.by_columns()) return;
    {
        const SquareSpot spot(0, 0);
        u8* to = scratch.unit(spot.column, spot.row / kSquare);
        Raw<16> four;
#pragma unroll
        for (int i = 0; i < kSquare; ++i) {
            if (i % 4 == 0) four = *reinterpret_cast<const Raw<16>*>(&scratch.inverse[scratch.place(spot.column + i)]);
            float down[kSquare];
#pragma unroll
            for (int r = 0; r < kSquare; ++r) down[r] = v[r][i];
            *reinterpret_cast<Raw<8>*>(to + i * kTileSide) = quantized<e4m3>(down, __uint_as_float(four.w[i % 4]));
        }
    }
    __syncthreads();
    store_columns<kSquareThreads>(scratch.codes, out.q_t(), out.pitch(), out.rows(), out.columns(),
                                  static_cast<int>(this_thread()));
}

}  // namespace rtk
