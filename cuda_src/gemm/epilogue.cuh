// Epilogue of a matrix product: turns accumulators in registers into results in memory. Steps in fp32 (scales, bias, a
// matrix to add, an activation), one rounding, then an output. Steps and output are policies:
//
//   finish_tile(sums, part, steps(ColumnScale{scale}, Bias<bf16>{bias}, Activate<Silu, true>{}), DirectOutput<bf16>{...});
//
// Accumulators are laid out as wgmma m64nNk16 leaves them (ptx/wgmma.cuh), N / 2 per thread: sums[4j + 2r + c] is row
// 16w + g + 8r, column 8j + 2t + c of the warpgroup's 64 rows, for lane 4g + t of its warp w. A thread holds two rows
// and, in each, pairs of neighbours, so a step loads row operands once per row and column operands once per pair.
//
// A step is a type with
//     Row row(i64 m, bool exists)                  its operand for a row, and
//     Columns columns(i64 n, int exist)            for columns n and n + 1; `exist` (0 to 2) of them are valid
//     float2 apply(float2 v, Row, Columns, i64 m, i64 n, int exist)
// Steps of one operand take a null pointer for "nothing to do", the same for all threads of the launch.
//
// An output is a type with put(part, row, j, t, v, exist), called for every pair, valid or not.
#pragma once
#include "common/vec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"

namespace rtk {

// The 64 rows of a warpgroup and the columns of its accumulators, in the result. `rows` (of 64) and `columns` of them
// are valid; this may be more than there are accumulators, or less than one.
struct TilePart {
    i64 m, n;
    int rows, columns;
};

// ---- steps ----------------------------------------------------------------------------------------------------------

struct Nothing {};

// `count` (0 to 2) neighbours at p, in any alignment; `absent` for the others.
template <typename T>
RTK_DEVICE float2 load_pair(const T* p, int count, float absent) {
    float first[1] = {absent}, second[1] = {absent};
    if (count > 0) load_keep<T, 1>(p, first);
    if (count > 1) load_keep<T, 1>(p + 1, second);
    return make_float2(first[0], second[0]);
}

// Times one number for the whole matrix, or the product of two: those of both operands.
struct TensorScale {
    using Row = float;
    using Columns = Nothing;
    const float* a;
    const float* b;

    RTK_DEVICE Row row(i64, bool) const { return (a == nullptr ? 1.0f : *a) * (b == nullptr ? 1.0f : *b); }
    RTK_DEVICE Columns columns(i64, int) const { return {}; }
    RTK_DEVICE float2 apply(float2 v, Row scale, Columns, i64, i64, int) const {
        return make_float2(v.x * scale, v.y * scale);
    }
};

// Times scale[m].
struct RowScale {
    using Row = float;
    using Columns = Nothing;
    const float* scale;

    RTK_DEVICE Row row(i64 m, bool exists) const { return scale != nullptr && exists ? scale[m] : 1.0f; }
    RTK_DEVICE Columns columns(i64, int) const { return {}; }
    RTK_DEVICE float2 apply(float2 v, Row times, Columns, i64, i64, int) const {
        return make_float2(v.x * times, v.y * times);
    }
};

// Times scale[n].
struct ColumnScale {
    using Row = Nothing;
    using Columns = float2;
    const float* scale;

    RTK_DEVICE Row row(i64, bool) const { return {}; }
    RTK_DEVICE Columns columns(i64 n, int exist) const { return load_pair(scale + n, scale == nullptr ? 0 : exist, 1.0f); }
    RTK_DEVICE float2 apply(float2 v, Row, Columns times, i64, i64, int) const {
        return make_float2(v.x * times.x, v.y * times.y);
    }
};

// Plus bias[n].
template <typename T>
struct Bias {
    using Row = Nothing;
    using Columns = float2;
    const T* bias;

    RTK_DEVICE Row row(i64, bool) const { return {}; }
    RTK_DEVICE Columns columns(i64 n, int exist) const { return load_pair(bias + n, bias == nullptr ? 0 : exist, 0.0f); }
    RTK_DEVICE float2 apply(float2 v, Row, Columns plus, i64, i64, int) const {
        return make_float2(v.x + plus.x, v.y + plus.y);
    }
};

// Plus matrix[m, n], with rows `stride` elements apart: a residual, or the old result. If it is the result itself, the
// thread that reads an element also writes it, unless results are staged.
template <typename T>
struct AddMatrix {
    using Row = const T*;
    using Columns = Nothing;
    const T* matrix;
    i64 stride;

    RTK_DEVICE Row row(i64 m, bool) const { return matrix + m * stride; }
    RTK_DEVICE Columns columns(i64, int) const { return {}; }
    RTK_DEVICE float2 apply(float2 v, Row first, Columns, i64, i64 n, int exist) const {
        if (matrix == nullptr) return v;
        float plus[2] = {0.0f, 0.0f};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            if (c < exist) {  // plain loads: others may write elsewhere in this matrix
                const Raw<sizeof(T)> raw = plain_load(first + n + c);
                float one[1];
                unpack<T, 1>(raw, one);
                plus[c] = one[0];
            }
        }
        return make_float2(v.x + plus[0], v.y + plus[1]);
    }

   private:
    RTK_DEVICE static Raw<sizeof(T)> plain_load(const T* p) {
        if constexpr (sizeof(T) == 4) {
            return {{*reinterpret_cast<const u32*>(p)}};
        } else {
            return {{*reinterpret_cast<const u16*>(p)}};
        }
    }
};

// Act is one of act/activations.cuh, or a type like those.
template <typename Act, bool kFast>
struct Activate {
    using Row = Nothing;
    using Columns = Nothing;

    RTK_DEVICE Row row(i64, bool) const { return {}; }
    RTK_DEVICE Columns columns(i64, int) const { return {}; }
    RTK_DEVICE float2 apply(float2 v, Row, Columns, i64, i64, int) const {
        return make_float2(Act::template at<kFast>(v.x).value, Act::template at<kFast>(v.y).value);
    }
};

// Applies steps in order.
template <typename... Rest>
struct Steps {
    using Row = Nothing;
    using Columns = Nothing;

    RTK_DEVICE Row row(i64, bool) const { return {}; }
    RTK_DEVICE Columns columns(i64, int) const { return {}; }
    RTK_DEVICE float2 apply(float2 v, Row, Columns, i64, i64, int) const { return v; }
};

template <typename First, typename... Rest>
struct Steps<First, Rest...> {
    struct Row {
        typename First::Row first;
        typename Steps<Rest...>::Row rest;
    };
    struct Columns {
        typename First::Columns first;
        typename Steps<Rest...>::Columns rest;
    };
    First first;
    Steps<Rest...> rest;

    RTK_DEVICE Row row(i64 m, bool exists) const { return {first.row(m, exists), rest.row(m, exists)}; }
    RTK_DEVICE Columns columns(i64 n, int exist) const { return {first.columns(n, exist), rest.columns(n, exist)}; }
    RTK_DEVICE float2 apply(float2 v, const Row& row, const Columns& columns, i64 m, i64 n, int exist) const {
        return rest.apply(first.apply(v, row.first, columns.first, m, n, exist), row.rest, columns.rest, m, n, exist);
    }
};

RTK_DEVICE Steps<> steps() { return {}; }

template <typename First, typename... Rest>
RTK_DEVICE Steps<First, Rest...> steps(const First& first, const Rest&... rest) {
    return {first, steps(rest...)};
}

// ---- outputs --------------------------------------------------------------------------------------------------------

// Stores pairs straight to out[m, n]. `paired`: address and stride are multiples of two elements. Four lanes write 16
// to 32 neighbouring bytes, so this is for narrow results, and for layouts that no other output supports.
template <typename T>
struct DirectOutput {
    T* out;
    i64 stride;
    bool paired;

    RTK_DEVICE void put(const TilePart& part, int row, int j, int t, float2 v, int exist) const {
        T* p = out + (part.m + row) * stride + part.n + 8 * j + 2 * t;
        if (exist == 2 && paired) {
            const float both[2] = {v.x, v.y};
            store<T, 2>(p, both);
        } else if (exist > 0) {
            const float first[1] = {v.x}, second[1] = {v.y};
            store<T, 1>(p, first);
            if (exist == 2) store<T, 1>(p + 1, second);
        }
    }
};

// Stages results in shared memory, kBytes per warpgroup, 1024-byte aligned: boxes of 64 rows of 128 bytes with the
// 128-byte swizzle of gemm/operand.cuh, one after another along the columns. The eight rows of a store hit different
// banks. Around the finish_tile of a tile:
//     open()                   waits until the boxes of the previous tile are stored (call it for the first tile, too)
//     send(...) or copy(...)   after it
// All 128 threads of the warpgroup call these; `barrier` is a named barrier of its own.
template <typename T, int N>
struct StagedOutput {
    static constexpr int kRow = 128, kRows = 64, kBoxColumns = kRow / sizeof(T), kBoxBytes = kRows * kRow;
    static_assert(N % kBoxColumns == 0, "whole boxes");
    static constexpr int kBoxes = N / kBoxColumns, kBytes = kBoxes * kBoxBytes;
    static constexpr int kEach = 16 / sizeof(T);  // elements in 16 bytes

    u8* memory;
    int barrier;

    RTK_DEVICE void open() const {
#if RTK_HAS_TMA
        if (threadIdx.x % 128 == 0) ptx::bulk_store_wait_read();
#endif
        ptx::named_barrier_sync(barrier, 128);
    }

    RTK_DEVICE void put(const TilePart&, int row, int j, int t, float2 v, int) const {
        const float both[2] = {v.x, v.y};
        const Raw<2 * sizeof(T)> raw = pack<T, 2>(both);
        // Two of the 8 columns that start at 8j; these are in one 16-byte vector.
        const int vector = 8 * j % kBoxColumns / kEach + 2 * t / kEach;
        u8* p = memory + 8 * j / kBoxColumns * kBoxBytes + row * kRow + ((vector ^ (row & 7)) << 4) + 2 * t % kEach * sizeof(T);
        if constexpr (sizeof(T) == 4) {
            *reinterpret_cast<float2*>(p) = make_float2(__uint_as_float(raw.w[0]), __uint_as_float(raw.w[1]));
        } else {
            *reinterpret_cast<u32*>(p) = raw.w[0];
        }
    }

    // Stores with TMA, which skips everything outside of the map's matrix (boxes of 64 rows and 128 bytes) but does not
    // know about groups: use it for the last tile of a group only if groups begin at multiples of the tile. On an H200,
    // TMA clips rows of a matrix at 16 bytes, not at an element: for other widths use `copy`.
    RTK_DEVICE void send(const ptx::TensorMap& map, const TilePart& part) const {
        static_assert(RTK_HAS_TMA || sizeof(T) == 0, "bulk stores need sm_90; copy() does not");
        ptx::fence_async_shared();
        ptx::named_barrier_sync(barrier, 128);
        if (threadIdx.x % 128 == 0) {
#pragma unroll
            for (int i = 0; i < kBoxes; ++i)
                ptx::tma_store_2d(map, ptx::shared_address(memory) + i * kBoxBytes,
                                  static_cast<i32>(part.n) + i * kBoxColumns, static_cast<i32>(part.m));
            ptx::bulk_store_commit();
        }
    }

    // Call before the block returns, or before the memory is reused.
    RTK_DEVICE void close() const {
        if (threadIdx.x % 128 == 0) ptx::bulk_store_wait_read();
    }

    // Stores with threads, 16 bytes each: exactly part.rows and part.columns. `aligned`: rows of `out` are 16-byte
    // aligned.
    RTK_DEVICE void copy(T* out, i64 stride, bool aligned, const TilePart& part) const {
        constexpr int kVectors = N / kEach, kPerBox = kBoxColumns / kEach;
        ptx::named_barrier_sync(barrier, 128);
#pragma unroll 4
        for (int i = static_cast<int>(threadIdx.x) % 128; i < kRows * kVectors; i += 128) {
            const int row = i / kVectors, vector = i % kVectors, column = vector * kEach;
            if (row >= part.rows || column >= part.columns) continue;
            const Raw<16> raw = ptx::ld_shared_16(ptx::shared_address(memory) + vector / kPerBox * kBoxBytes + row * kRow +
                                                  ((vector % kPerBox ^ (row & 7)) << 4));
            T* p = out + (part.m + row) * stride + part.n + column;
            if (aligned && column + kEach <= part.columns) {
                ptx::st<16>(p, raw);
            } else {
                float values[kEach];
                unpack<T, kEach>(raw, values);
#pragma unroll
                for (int k = 0; k < kEach; ++k) {
                    const float one[1] = {values[k]};
                    if (column + k < part.columns) store<T, 1>(p + k, one);
                }
            }
        }
    }
};

// ---- both -----------------------------------------------------------------------------------------------------------

// Called by the 128 threads of a warpgroup, each with its accumulators (fp32, or int32 of integer products).
template <typename Sum, int COUNT, typename AllSteps, typename Output>
RTK_DEVICE void finish_tile(const Sum (&sums)[COUNT], const TilePart& part, const AllSteps& all_steps, const Output& output) {
    static_assert(COUNT % 4 == 0, "two rows of pairs");
    const int lane = static_cast<int>(threadIdx.x) % kWarp, t = lane % 4;
    const int row = static_cast<int>(threadIdx.x) / kWarp % 4 * 16 + lane / 4;
    const typename AllSteps::Row at_row[2] = {all_steps.row(part.m + row, row < part.rows),
                                              all_steps.row(part.m + row + 8, row + 8 < part.rows)};
#pragma unroll
    for (int j = 0; j < COUNT / 4; ++j) {
        const int column = 8 * j + 2 * t, exist = min(max(part.columns - column, 0), 2);
        const typename AllSteps::Columns at_columns = all_steps.columns(part.n + column, exist);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int here = row + 8 * r < part.rows ? exist : 0;
            const float2 v = make_float2(static_cast<float>(sums[4 * j + 2 * r]), static_cast<float>(sums[4 * j + 2 * r + 1]));
            output.put(part, row + 8 * r, j, t,
                       all_steps.apply(v, at_row[r], at_columns, part.m + row + 8 * r, part.n + column, here), here);
        }
    }
}

}  // namespace rtk
