// Scales that the main loop of gemm_sm90.cu applies: which of them there are, where they lie, and copies of those that
// TMA cannot load.
#pragma once
#include "gemm/schedule_sm90.cuh"
#include "ptx/cp_async.cuh"

namespace rtk {

inline constexpr int kNoScales = 0, kRowScales = 1, kColumnScales = 2;

// With scales in the loop, totals are fp32 whatever type the tensor cores accumulate.
template <typename Sum, int SCALES>
struct Totals {
    using Type = float;
};
template <typename Sum>
struct Totals<Sum, kNoScales> {
    using Type = Sum;
};

template <typename Sum, int WAVES, int SUMS>
RTK_DEVICE void clear(Sum (&sums)[WAVES][SUMS]) {
#pragma unroll
    for (int w = 0; w < WAVES; ++w)
#pragma unroll
        for (Sum& sum : sums[w]) sum = 0;
}

// Adds `part`, a thread's sums of a stage, to its totals, times the factors of its two rows, and, with COLUMNS, those of
// its columns, of which there are two in every eight.
template <bool COLUMNS, typename Sum, int SUMS>
RTK_DEVICE void promote(float* totals, const Sum (&part)[SUMS], const float (&of_rows)[2], const float* of_columns) {
#pragma unroll
    for (int j = 0; j < SUMS / 4; ++j) {
        float2 of_column = make_float2(1.0f, 1.0f);
        if constexpr (COLUMNS) of_column = *reinterpret_cast<const float2*>(of_columns + 8 * j);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float x = of_rows[r] * of_column.x, y = of_rows[r] * of_column.y;
            totals[4 * j + 2 * r] += x * static_cast<float>(part[4 * j + 2 * r]);
            totals[4 * j + 2 * r + 1] += y * static_cast<float>(part[4 * j + 2 * r + 1]);
        }
    }
}

// Scale (i, j) of an operand covers `rows` rows (0: all) and 64 << depth_shift of k.
struct ScalePlace {
    const float* scale;
    i64 row_pitch, depth_pitch, group_pitch;
    u32 rows, depth_shift;

    // For scales in the loop; those of the epilogue cover one row, or all with a pitch of 0.
    RTK_DEVICE i64 of_row(u32 row, u32 group) const { return of_single_row(row / max(rows, 1u), group); }
    RTK_DEVICE i64 of_single_row(u32 row, u32 group) const {
        return static_cast<i64>(group) * group_pitch + static_cast<i64>(row) * row_pitch;
    }
    RTK_DEVICE i64 of_depth(u32 block) const { return static_cast<i64>(block >> depth_shift) * depth_pitch; }
};

// Scales of a stage that threads of one or two warps copy, in any layout: the ROWS rows of a, then columns of b. Fewer
// than 2^32 scales.
template <int ROWS, int COUNT, int THREADS>
struct ScaleCopies {
    static constexpr int kThreads = THREADS, kEach = (COUNT + kThreads - 1) / kThreads;
    static_assert(ROWS % kThreads == 0, "no thread has to ask whose scale it copies");
    u32 at[kEach], exist = 0;

    // `rows` of a's rows exist (0: copied elsewhere), and b's columns, `apart` from each other, up to `columns`.
    RTK_DEVICE void place(const ScalePlace& a, const ScalePlace& b, const ProductTile& tile, int thread, int rows, i64 columns,
                          int apart) {
        exist = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int item = thread + kThreads * i;
            const bool of_a = kThreads * i < ROWS;
            const i64 n = tile.n + static_cast<i64>(item - ROWS) * apart;
            const bool exists = of_a ? item < rows : item < COUNT && n < columns;
            at[i] = 0;
            if (exists) at[i] = static_cast<u32>(of_a ? a.of_row(tile.row + item, tile.group) : b.of_row(n, tile.group));
            exist |= static_cast<u32>(exists) << i;
        }
    }

    // Start of the scales of this depth.
    RTK_DEVICE void copy(ptx::SharedAddress to, const float* of_a, const float* of_b, int thread, bool rows_too,
                         bool columns_too) const {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const bool is_a = kThreads * i < ROWS;
            if ((is_a ? rows_too : columns_too) && thread + kThreads * i < COUNT)
                ptx::cp_async_4_or_zero(to + 4 * (thread + kThreads * i), (is_a ? of_a : of_b) + at[i], exist >> i & 1u);
        }
    }
};

}  // namespace rtk
