// Rows of b that are odd multiples of 16 bytes apart: every second one begins inside of a sector of L2, and takes TMA about
// twice as long to load. So even and odd rows of b have tensor maps of their own, and boxes of odd rows begin 16 bytes of k
// before those of even rows, at a sector: where k begins, TMA fills these 16 bytes with zeros.
//
// A stage holds the even rows of b, then the odd ones (for a gated product, those of the gate, then those of the other half).
// So accumulators have the even columns of a tile before its odd ones. a is loaded as it lies. Products with odd rows read it
// from 16 bytes earlier on, the first ones from registers: these are the last 16 bytes of the stage before, and the first 16.
#pragma once
#include "gemm/operand.cuh"
#include "gemm/schedule_sm90.cuh"
#include "ptx/ldst.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma_types.cuh"

namespace rtk {

inline constexpr int kSectorOffset = 16;  // bytes by which odd rows begin before even ones

// The column of a tile of COLS columns that accumulators have at `place`.
template <int COLS>
RTK_DEVICE constexpr int split_column(int place) {
    return place < COLS / 2 ? 2 * place : 2 * place - COLS + 1;
}

template <typename A, typename B, int ROWS, int COLS, bool GATED>
struct SplitRows {
    static constexpr int kHalf = GATED ? COLS / 4 : COLS / 2;  // rows of b in a box
    static constexpr int kBoxes = COLS / kHalf;
    static constexpr u32 kABytes = ROWS * kTileRow, kBoxBytes = kHalf * kTileRow;

    // Of a: 4 of the 16 bytes before the next stage, of rows g and g + 8 of lane 4g + t; and of the first products with odd rows.
    u32 before[2] = {0, 0}, left[4];

    // Called by one thread: loads depth k of a tile. `apart`: from the gate to the other half, an even number of rows of b.
    RTK_DEVICE static void fetch(const ptx::TensorMap& a, const ptx::TensorMap& evens, const ptx::TensorMap& odds,
                                 ptx::SharedAddress stage, ptx::SharedAddress full, i32 k, i32 row, i32 n, i32 apart) {
        ptx::tma_load_3d(stage, a, full, k, row, 0);
        ptx::SharedAddress to = stage + kABytes;
#pragma unroll
        for (int i = 0; i < (GATED ? 2 : 1); ++i, n += apart, to += 2 * kBoxBytes) {
            ptx::tma_load_3d(to, evens, full, k, n / 2, 0);
            ptx::tma_load_3d(to + kBoxBytes, odds, full, k - kSectorOffset / static_cast<int>(sizeof(B)), n / 2, 0);
        }
    }

    // Called by a warpgroup before the first stage of a tile, or of its part of k: `row` of the tile is this lane's first one.
    RTK_DEVICE void begin(const void* a, i64 pitch_bytes, const ProductTile& tile, int row) {
        const u8* const from = static_cast<const u8*>(a) + (tile.row + row) * pitch_bytes +
                               static_cast<i64>(tile.k) * static_cast<int>(sizeof(A)) - kSectorOffset + threadIdx.x % 4 * 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            before[r] = 0;
            ptx::ld_keep_if<4>(tile.k != 0 && row + 8 * r < tile.rows, before[r], from + 8 * r * pitch_bytes);
        }
    }

    // Called by a warpgroup when a stage has arrived and earlier products no longer read `left`: the 64 rows `part` of a.
    RTK_DEVICE void begin_stage(const u8* stage, u32 part) {
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        const int row = static_cast<int>(threadIdx.x) / kWarp % 4 * 16 + lane % 16;
        u32 ends[4];
        ptx::ldmatrix_x4(ends, stage + (part * 64 + row) * kTileRow + ((lane / 16 * 7 ^ (row & 7)) << 4));
        left[0] = before[0], left[1] = before[1], left[2] = ends[0], left[3] = ends[1];
        before[0] = ends[2], before[1] = ends[3];
    }

    // Issues the products of a stage with the 64 rows `part` of a, and boxes of b from FIRST on.
    template <int FIRST, int BOXES>
    RTK_DEVICE void multiply(float (&sums)[BOXES][kHalf / 2], ptx::SharedAddress stage, u32 part, bool add) const {
        const u64 of_a = k_major_descriptor(stage + part * 64 * kTileRow);
#pragma unroll
        for (int box = 0; box < BOXES; ++box) {
            const u64 of_b = k_major_descriptor(stage + kABytes + (FIRST + box) * kBoxBytes);
            const bool odd = (FIRST + box) % 2 != 0;
            if (odd) ptx::wgmma_left<A, B>(sums[box], left, of_b, add);
#pragma unroll
            for (int i = odd ? 1 : 0; i < 4; ++i)
                ptx::wgmma_typed<A, B, false, false>(sums[box], of_a + i * kNextKMajor - (odd ? kSectorOffset >> 4 : 0),
                                                     of_b + i * kNextKMajor, add || i != 0);
        }
    }
};

// Stores of accumulators of a tile of COLS columns, even ones first, to boxes of gemm/epilogue_sm90.cuh: a thread has four
// neighbours in every 16 columns of rows `row` and `row + 8`. `sixteens` counts those from the tile's first column on.
template <int COLS, typename Sum>
struct SplitSums {
    const Sum (&sums)[COLS / 2];

    RTK_DEVICE float at(int sixteen, int r, int c) const {
        const Sum sum = sums[c % 2 * (COLS / 4) + 4 * sixteen + 2 * r + c / 2];
        if constexpr (is_same<Sum, i32>::value) {
            return __uint_as_float(static_cast<u32>(sum));
        } else {
            return sum;
        }
    }

    template <int COUNT>
    RTK_DEVICE void two_bytes(ptx::SharedAddress box, int row, int t, int first, bool is_bf16) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float v[4] = {at(first + i, r, 0), at(first + i, r, 1), at(first + i, r, 2), at(first + i, r, 3)};
                const int own = row + 8 * r;
                const Raw<8> four = {{is_bf16 ? ptx::cvt_bf16x2(v[0], v[1]) : ptx::cvt_f16x2(v[0], v[1]),
                                      is_bf16 ? ptx::cvt_bf16x2(v[2], v[3]) : ptx::cvt_f16x2(v[2], v[3])}};
                ptx::st_shared_8(box + own * 128 + (((2 * i + t / 2) ^ (own & 7)) << 4) + 8 * (t % 2), four);
            }
    }

    RTK_DEVICE void four_bytes(ptx::SharedAddress box, int row, int t, int first) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int own = row + 8 * r;
                Raw<16> four;
#pragma unroll
                for (int c = 0; c < 4; ++c) four.w[c] = __float_as_uint(at(first + i, r, c));
                ptx::st_shared_16(box + own * 128 + (((4 * i + t) ^ (own & 7)) << 4), four);
            }
    }
};

}  // namespace rtk
