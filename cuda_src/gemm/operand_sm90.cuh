// Tiles of both operands in a stage of shared memory, and their products, for all types that wgmma supports: `rows` of
// a, then `cols` rows of b, 128 bytes each with the 128-byte swizzle. Transposed operands have 64 columns of m or n in
// such a row and 64 of k in as many rows, followed by the next 64 columns.
#pragma once
#include "gemm/operand.cuh"
#include "gemm/schedule_sm90.cuh"
#include "ptx/barrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/wgmma_types.cuh"

namespace rtk {

template <typename T>
struct SumsOf {
    using Type = float;
};
template <>
struct SumsOf<s8> {
    using Type = i32;
};
template <>
struct SumsOf<u8> {
    using Type = i32;
};

template <typename A, typename B, bool ACROSS_A, bool ACROSS_B, int CONSUMERS, int WAVES, int COLS>
struct TypedOperands {
    using Sum = typename SumsOf<A>::Type;
    static constexpr int kRows = 64 * CONSUMERS * WAVES, kDepth = static_cast<int>(kTileRow / sizeof(A));
    static constexpr u32 kABytes = kRows * kTileRow, kBBytes = COLS * kTileRow, kStageBytes = kABytes + kBBytes;
    static constexpr u32 kAtom = 64 * kTileRow;

    // Called by one thread: loads depth k of a tile. `apart`: b's second half begins this many rows after its first one
    // (0: adjacent).
    RTK_DEVICE static void fetch(const ptx::TensorMap& a, const ptx::TensorMap& b, ptx::SharedAddress stage,
                                 ptx::SharedAddress full, i32 k, i32 row, i32 group_a, i32 n, i32 group_b, i32 apart) {
        if constexpr (ACROSS_A) {
#pragma unroll
            for (int i = 0; i < kRows / 64; ++i)
                ptx::tma_load_3d(stage + i * kAtom, a, full, row + 64 * i, k, group_a);
        } else {
            ptx::tma_load_3d(stage, a, full, k, row, group_a);
        }
        const ptx::SharedAddress to = stage + kABytes;
        if constexpr (ACROSS_B) {
#pragma unroll
            for (int i = 0; i < COLS / 64; ++i)
                ptx::tma_load_3d(to + i * kAtom, b, full, n + 64 * i, k, group_b);
        } else if (apart != 0) {  // boxes have half as many rows
            ptx::tma_load_3d(to, b, full, k, n, group_b);
            ptx::tma_load_3d(to + kBBytes / 2, b, full, k, n + apart, group_b);
        } else {
            ptx::tma_load_3d(to, b, full, k, n, group_b);
        }
    }

    // Called by a warpgroup: issues the products of a stage with the 64 rows `part` of a and the columns from `column`
    // on, two per accumulator of a thread. Accumulators are overwritten, not added to, unless `add`.
    template <int SUMS>
    RTK_DEVICE static void multiply(Sum (&sums)[SUMS], ptx::SharedAddress stage, u32 part, u32 column, bool add) {
        const ptx::SharedAddress own = stage + part * kAtom, other = stage + kABytes + column * kTileRow;
        const u64 left = ACROSS_A ? column_major_descriptor(own) : k_major_descriptor(own);
        const u64 right = ACROSS_B ? column_major_descriptor(other) : k_major_descriptor(other);
        constexpr u64 kNextA = ACROSS_A ? kNextColumnMajor : kNextKMajor, kNextB = ACROSS_B ? kNextColumnMajor : kNextKMajor;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            ptx::wgmma_typed<A, B, ACROSS_A, ACROSS_B>(sums, left + i * kNextA, right + i * kNextB, add || i != 0);
    }

    // The 64 rows `part` of a, all of a stage's k, in registers as wgmma takes them: read once for several products.
    RTK_DEVICE static void load_left(u32 (&left)[4][4], const u8* stage, u32 part) {
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        const int row = static_cast<int>(threadIdx.x) / kWarp % 4 * 16 + lane % 16;
        const u8* own = stage + part * kAtom + row * kTileRow;
#pragma unroll
        for (int i = 0; i < 4; ++i) ptx::ldmatrix_x4(left[i], own + ((2 * i + lane / 16 ^ (row & 7)) << 4));
    }

    RTK_DEVICE static void multiply_left(float (&sums)[64], const u32 (&left)[4][4], ptx::SharedAddress stage, u32 column) {
        const u64 right = k_major_descriptor(stage + kABytes + column * kTileRow);
#pragma unroll
        for (int i = 0; i < 4; ++i) ptx::wgmma_left<A, B>(sums, left[i], right + i * kNextKMajor, i != 0);
    }

    // Called by all consumers before they multiply: zeroes everything past the first `valid` of k. It belongs to the
    // next group, and may be infinite. Ends with a barrier.
    RTK_DEVICE static void cut(u8* stage, int valid, int barrier) {
        for (int i = static_cast<int>(threadIdx.x); i < (kRows + COLS) * 8; i += 128 * CONSUMERS) {
            const int row = i / 8, vector = i % 8;
            const bool across = row < kRows ? ACROSS_A : ACROSS_B;
            u8* p = stage + row * kTileRow + ((vector ^ (row & 7)) << 4);
            const int keep = across ? (row % 64 < valid ? 16 : 0) : valid * static_cast<int>(sizeof(A)) - 16 * vector;
            if (keep <= 0) {
                ptx::st_shared_16(ptx::shared_address(p), Raw<16>{});
            } else {
                for (int b = keep; b < 16; ++b) p[b] = 0;
            }
        }
        ptx::fence_async_shared();
        ptx::named_barrier_sync(barrier, 128 * CONSUMERS);
    }
};

}  // namespace rtk
