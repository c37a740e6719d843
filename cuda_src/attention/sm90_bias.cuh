// The bias of the scores of a consumer warpgroup of the wgmma forward kernel, in the layout of softmax_state.cuh.
//
// A bias is [sequences, heads, queries, keys] of any strides, 0 where it is broadcast. Where keys are contiguous, rows are
// whole aligned vectors and elements are of q's type, a thread loads vectors of both of its rows before it waits for the
// product of the tile, and the lanes of a quad exchange them afterwards. Otherwise elements are loaded one by one, several
// before the first one is used.
//
// Rows and vectors past the last one are read from the last one. Neither counts: no such query is stored, and scores of
// such keys are masked later.
#pragma once
#include "attention/sm90_tile.cuh"

namespace rtk {

// Elements of bias kinds (bias_at) have 2 bytes but for fp32.
RTK_DEVICE int bias_bytes(i64 kind) { return kind == 3 ? 4 : 2; }

// Whether a bias can be loaded in vectors of T.
template <typename T>
RTK_DEVICE bool bias_in_vectors(const void* bias, i64 kind, i64 batch, i64 head, i64 row, i64 column, i64 keys) {
    const u64 offsets = static_cast<u64>(batch | head | row | keys) * sizeof(T) | reinterpret_cast<u64>(bias);
    return kind == (is_same<T, bf16>::value ? 1 : 2) && column == 1 && offsets % 16 == 0;
}

// Vectors of a tile of BN keys in both rows of a thread, as they were loaded.
template <int BN>
struct BiasVectors {
    static_assert(BN % 32 == 0, "a vector for each lane of a quad");
    Raw<16> of[2][BN / 32];

    // `rows`: both rows of this thread, at key 0; `first`: first key of the tile; `keys`: the number of keys.
    RTK_DEVICE void load(const u8* const (&rows)[2], int first, int keys) {
        const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
        for (int m = 0; m < BN / 32; ++m) {
            const int bytes = 2 * min(first + 32 * m + 8 * t, keys - 8);
#pragma unroll
            for (int r = 0; r < 2; ++r) of[r][m] = ptx::ld_keep<16>(rows[r] + bytes);
        }
    }

    // All lanes of a warp must call this.
    template <typename T, int N>
    RTK_DEVICE void add_to(float (&s)[N]) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int m = 0; m < BN / 32; ++m) {
                exchange_in_quad(of[r][m].w);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float values[2];
                    unpack<T, 2>(Raw<4>{{of[r][m].w[i]}}, values);
#pragma unroll
                    for (int c = 0; c < 2; ++c) s[16 * m + 4 * i + 2 * r + c] += kLog2e * values[c];
                }
            }
    }
};

// Adds elements of B to scores in units of log2. `rows`: this thread's first element of both of its rows; `step`: bytes
// from column to column, of which `columns` exist.
template <typename B, int N>
RTK_DEVICE void add_bias_elements(float (&s)[N], const u8* const (&rows)[2], i64 step, int columns) {
    constexpr int kPairs = 4;  // loaded before the first one is used
    static_assert(N / 4 % kPairs == 0, "whole batches");
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u8* from = rows[r];
#pragma unroll
        for (int j = 0; j < N / 4; j += kPairs) {
            float values[kPairs][2][1];
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    values[i][c][0] = 0.0f;
                    if (8 * (j + i) + c < columns) load_keep<B, 1>(reinterpret_cast<const B*>(from + c * step), values[i][c]);
                }
                from += 8 * step;
                ptx::forget(from);  // one address, not one for each load: registers are short
            }
#pragma unroll
            for (int i = 0; i < kPairs; ++i)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& score = s[4 * (j + i) + 2 * r + c];
                    score += kLog2e * values[i][c][0];
                    ptx::keep(score);
                }
        }
    }
}

// The same for a bias whose kind is known at run time.
template <int N>
RTK_DEVICE void add_bias_elements(float (&s)[N], i64 kind, const u8* const (&rows)[2], i64 step, int columns) {
    if (kind == 1) {
        add_bias_elements<bf16>(s, rows, step, columns);
    } else if (kind == 2) {
        add_bias_elements<fp16>(s, rows, step, columns);
    } else {
        add_bias_elements<float>(s, rows, step, columns);
    }
}

}  // namespace rtk
