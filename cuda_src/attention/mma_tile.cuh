// Attention tiles for mma.sync: rows of heads in shared memory, fragments, and a softmax that seldom rescales.
//
// A tile has COLS 16-bit columns. Where a row is a multiple of 128 bytes, its 16-byte vector c is stored at c ^ (row &
// 7) of its 128 bytes; otherwise rows are padded by 16 bytes. Either way 8 rows of one column of vectors fall into
// different banks, for ldmatrix as for the copies.
#pragma once
#include "attention/softmax_state.cuh"
#include "common/convert.cuh"
#include "common/pressure.cuh"
#include "common/types.cuh"
#include "common/vec.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"

namespace rtk {

template <int COLS>
struct MmaTile {
    static_assert(COLS % 16 == 0, "whole steps of the product");
    static constexpr bool kSwizzled = COLS % 64 == 0;
    static constexpr u32 kPitch = COLS * 2 + (kSwizzled ? 0 : 16);
    static constexpr int kVectors = COLS / 8;

    // In bytes.
    RTK_DEVICE static u32 offset(int row, int vector) {
        if constexpr (kSwizzled) {
            return static_cast<u32>(row) * kPitch + ((static_cast<u32>(vector) ^ (static_cast<u32>(row) & 7u)) << 4);
        } else {
            return static_cast<u32>(row) * kPitch + (static_cast<u32>(vector) << 4);
        }
    }

    // Starts the copy of ROWS rows by THREADS threads. Rows from `rows` on, and vectors from `vectors` on, are
    // zero-filled.
    template <int ROWS, int THREADS, typename T>
    RTK_DEVICE static void fetch(u8* tile, const T* source, i64 row_stride, int rows, int vectors) {
        const ptx::SharedAddress base = ptx::shared_address(tile);
        if constexpr (THREADS % kVectors == 0) {
            constexpr int kStep = THREADS / kVectors;
            static_assert(ROWS % kStep == 0, "all threads copy alike");
            const int thread = static_cast<int>(this_thread()), row = thread / kVectors, vector = thread % kVectors;
            const T* from = source + row * row_stride + vector * 8;
            const i64 step = kStep * row_stride;
            const int last = vector < vectors ? rows : 0;
#pragma unroll
            for (int i = 0; i < ROWS / kStep; ++i) {
                ptx::cp_async_16_or_zero(base + offset(row + i * kStep, vector), from, row + i * kStep < last);
                from = settled(from + step);
            }
        } else {
#pragma unroll
            for (int i = 0; i < ROWS * kVectors; i += THREADS) {
                const int place = i + static_cast<int>(this_thread()), row = place / kVectors, vector = place % kVectors;
                if (ROWS * kVectors % THREADS == 0 || place < ROWS * kVectors)
                    ptx::cp_async_16_or_zero(base + offset(row, vector), source + row * row_stride + vector * 8,
                                             vector < vectors && row < rows);
            }
        }
    }

    // Fragment of a left operand, 16 rows from `row`, step k of 16 columns.
    RTK_DEVICE static void left(u32 (&a)[4], const u8* tile, int row, int k, int lane) {
        ptx::ldmatrix_x4(a, tile + offset(row + lane % 16, 2 * k + lane / 16));
    }
    // Fragments of a right operand with the tile's rows as columns: rows `row`.. + 15, step k. b[0..1]: the first 8
    // rows.
    RTK_DEVICE static void right(u32 (&b)[4], const u8* tile, int row, int k, int lane) {
        ptx::ldmatrix_x4(b, tile + offset(row + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
    }
    // Fragments of a right operand with the tile's own columns: rows `row`.. + 15 are summed over, columns 16n.. + 15.
    RTK_DEVICE static void right_transposed(u32 (&b)[4], const u8* tile, int row, int n, int lane) {
        ptx::ldmatrix_x4_trans(b, tile + offset(row + lane % 16, 2 * n + lane / 16));
    }
    // Fragment of a left operand, transposed: its rows are the tile's columns 16n.. + 15, rows `row`.. + 15 are summed over.
    RTK_DEVICE static void left_transposed(u32 (&a)[4], const u8* tile, int row, int n, int lane) {
        ptx::ldmatrix_x4_trans(a, tile + offset(row + lane / 16 * 8 + lane % 8, 2 * n + lane / 8 % 2));
    }
};

// Which tile of which head and sequence a block owns. `section` of all `pairs` (sequences and heads) finish before the
// next ones begin, because their keys and values fit into L2 together; tile 0 of all of these comes first.
struct HeadTile {
    int number, head, batch;

    RTK_DEVICE HeadTile(i64 tiles, i64 section, i64 pairs, i64 heads) {
        const i64 first_pair = blockIdx.x / (section * tiles) * section, inside = blockIdx.x % (section * tiles);
        const i64 here = min(section, pairs - first_pair), pair = first_pair + inside % here;
        number = static_cast<int>(inside / here);
        head = static_cast<int>(pair % heads), batch = static_cast<int>(pair / heads);
    }
};

// This thread's lane and the first row of its warp, recomputed on purpose: addresses derived from them then occupy
// registers only where they are used.
struct WarpRows {
    int lane, row;

    RTK_DEVICE explicit WarpRows(int rows_of_a_warp) {
        const u32 thread = this_thread();
        lane = static_cast<int>(thread % kWarp), row = static_cast<int>(thread / kWarp) * rows_of_a_warp;
    }
};

template <typename Sum, int N>
RTK_DEVICE void clear_sums(Sum (&sums)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[n][e] = 0;
}

// d *= by[r], row by row.
template <int N>
RTK_DEVICE void scale_rows(float (&d)[N][4], const float (&by)[2]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[n][e] *= by[e / 2];
}

// Kinds of 8-bit operands of mma_step, besides e4m3.
struct CodesS8 {};
struct CodesU8S8 {};  // left unsigned, right signed

template <typename T, typename Sum>
RTK_DEVICE void mma_step(Sum (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
    if constexpr (is_same<T, bf16>::value) {
        ptx::mma_m16n8k16_bf16(d, a, b);
    } else if constexpr (is_same<T, fp16>::value) {
        ptx::mma_m16n8k16_f16(d, a, b);
    } else if constexpr (is_same<T, CodesS8>::value) {
        ptx::mma_m16n8k32_s8(d, a, b);
    } else if constexpr (is_same<T, CodesU8S8>::value) {
        ptx::mma_m16n8k32_u8_s8(d, a, b);
    } else {
        static_assert(is_same<T, e4m3>::value, "a type that products have");
#if RTK_HAS_FP8_CVT
        ptx::mma_m16n8k32_e4m3(d, a, b);
#endif
    }
}

// d[m] += rows row + 16m.. + 15 of one tile by rows column.. + 8N - 1 of another, summed over STEPS steps of 32 bytes.
template <typename T, typename Tile, int STEPS, typename Sum, int M, int N>
RTK_DEVICE void rows_by_rows(Sum (&d)[M][N][4], const u8* left, int row, const u8* right, int column, int lane) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 a[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m) Tile::left(a[m], left, row + 16 * m, step, lane);
#pragma unroll
        for (int n = 0; n < N / 2; ++n) {
            u32 b[4];
            Tile::right(b, right, column + 16 * n, step, lane);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                mma_step<T>(d[m][2 * n], a[m], b[0], b[1]);
                mma_step<T>(d[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// The same for one block of 16 rows.
template <typename T, typename Tile, int STEPS, int N>
RTK_DEVICE void rows_by_rows(float (&d)[N][4], const u8* left, int row, const u8* right, int column, int lane) {
    rows_by_rows<T, Tile, STEPS>(reinterpret_cast<float(&)[1][N][4]>(d), left, row, right, column, lane);
}

// d[m] += a[m] by all columns of rows row.. + 15 of a tile, summed over these rows.
template <typename T, typename Tile, int M, int N>
RTK_DEVICE void by_columns(float (&d)[M][N][4], const u32 (&a)[M][4], const u8* tile, int row, int lane) {
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
        u32 b[4];
        Tile::right_transposed(b, tile, row, n, lane);
#pragma unroll
        for (int m = 0; m < M; ++m) {
            mma_step<T>(d[m][2 * n], a[m], b[0], b[1]);
            mma_step<T>(d[m][2 * n + 1], a[m], b[2], b[3]);
        }
    }
}

template <typename T, typename Tile, int N>
RTK_DEVICE void by_columns(float (&d)[N][4], const u32 (&a)[4], const u8* tile, int row, int lane) {
    by_columns<T, Tile>(reinterpret_cast<float(&)[1][N][4]>(d), reinterpret_cast<const u32(&)[1][4]>(a), tile, row, lane);
}

// The same two products with sums in fp16, which start from zero: d = ... and d += ... in fp32. Consumer GPUs compute
// these twice as fast.
RTK_DEVICE void unpack_sums(float (&d)[4], const u32 (&halves)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        d[2 * r] = ptx::cvt_f16_to_f32(static_cast<u16>(halves[r]));
        d[2 * r + 1] = ptx::cvt_f16_to_f32(static_cast<u16>(halves[r] >> 16));
    }
}

template <typename Tile, int STEPS, int M, int N>
RTK_DEVICE void rows_by_rows_f16(float (&d)[M][N][4], const u8* left, int row, const u8* right, int lane) {
    u32 sums[M][N][2] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 a[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m) Tile::left(a[m], left, row + 16 * m, step, lane);
#pragma unroll
        for (int n = 0; n < N / 2; ++n) {
            u32 b[4];
            Tile::right(b, right, 16 * n, step, lane);
            const u32 first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
#pragma unroll
            for (int m = 0; m < M; ++m) {
                ptx::mma_m16n8k16_f16_sums(sums[m][2 * n], a[m], first);
                ptx::mma_m16n8k16_f16_sums(sums[m][2 * n + 1], a[m], second);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n) unpack_sums(d[m][n], sums[m][n]);
}

template <typename Tile, int STEPS, int M, int N>
RTK_DEVICE void by_columns_f16(float (&d)[M][N][4], const u32 (&a)[STEPS][M][4], const u8* tile, int lane) {
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
        u32 sums[M][2][2] = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 b[4];
            Tile::right_transposed(b, tile, 16 * step, n, lane);
            const u32 first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
#pragma unroll
            for (int m = 0; m < M; ++m) {
                ptx::mma_m16n8k16_f16_sums(sums[m][0], a[step][m], first);
                ptx::mma_m16n8k16_f16_sums(sums[m][1], a[step][m], second);
            }
        }
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float part[4];
                unpack_sums(part, sums[m][h]);
#pragma unroll
                for (int e = 0; e < 4; ++e) d[m][2 * n + h][e] += part[e];
            }
    }
}

// Stores rows row.. + 15 of a result tile with `rows` rows; times[r] multiplies the sums.
template <typename T, int N>
RTK_DEVICE void store_rows(T* to, i64 stride, const float (&sums)[N][4], const float (&times)[2], int row, int rows, int width,
                           int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int here = row + lane / 4 + 8 * r;
        if (here >= rows) continue;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int column = 8 * n + lane % 4 * 2;
            const float values[2] = {sums[n][2 * r] * times[r], sums[n][2 * r + 1] * times[r]};
            if (column < width) store<T, 2>(to + here * stride + column, values);
        }
    }
}

template <typename T, int N>
RTK_DEVICE void store_rows(T* to, i64 stride, const float (&sums)[N][4], float times, int row, int rows, int width, int lane) {
    const float both[2] = {times, times};
    store_rows<T>(to, stride, sums, both, row, rows, width, lane);
}

// The same for one number per row.
RTK_DEVICE void store_logs(float* to, const float (&logs)[2], int row, int rows, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int here = row + lane / 4 + 8 * r;
        if (lane % 4 == 0 && here < rows) to[here] = logs[r];
    }
}

template <typename T>
RTK_DEVICE u32 packed_pair(float lo, float hi) {
    return is_same<T, bf16>::value ? ptx::cvt_bf16x2(lo, hi) : ptx::cvt_f16x2(lo, hi);
}

// Packs accumulators of two tiles of 8 columns as the left operand of a product over these 16 columns.
template <typename T>
RTK_DEVICE void as_left(u32 (&a)[4], const float (&first)[4], const float (&second)[4]) {
    a[0] = packed_pair<T>(first[0], first[1]), a[1] = packed_pair<T>(first[2], first[3]);
    a[2] = packed_pair<T>(second[0], second[1]), a[3] = packed_pair<T>(second[2], second[3]);
}

// Two rows of a softmax over s[n][2r + c]. Probabilities are relative to a maximum that may lag the true one by up to 8
// (in log2), so sums and outputs are rescaled at the beginning and hardly ever later. Each row decides for itself, so
// that its bits do not depend on the other rows of a warp.
struct LazySoftmax : SoftmaxState {
    static constexpr float kMaxLag = 8.0f;

    // Returns true if what was accumulated before must be multiplied by correction[r]. The answer is uniform across a
    // warp. Without LAGS no probability is above 1: fp16 holds the sum of a tile.
    template <bool LAGS = true, int N>
    RTK_DEVICE bool add_lazily(float (&s)[N][4], float factor, float (&correction)[2]) {
        constexpr float kLag = LAGS ? kMaxLag : 0.0f;
        float now[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
            for (int n = 1; n < N; ++n) largest = fmaxf(largest, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            now[r] = fmaxf(top[r], quad_max(largest));
        }
        const bool behind[2] = {(now[0] - top[0]) * factor > kLag, (now[1] - top[1]) * factor > kLag};
        const bool rescale = __any_sync(0xffffffffu, behind[0] || behind[1]);
        if (rescale) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                correction[r] = behind[r] ? ptx::ex2((top[r] - now[r]) * factor) : 1.0f;
                sum[r] *= correction[r];
                top[r] = behind[r] ? now[r] : top[r];
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float from = top[r] == negative_infinity() ? 0.0f : top[r] * factor;
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& value = s[n][2 * r + c];
                    value = ptx::ex2(value * factor - from);
                    sum[r] += value;
                }
        }
        return rescale;
    }
};

}  // namespace rtk
