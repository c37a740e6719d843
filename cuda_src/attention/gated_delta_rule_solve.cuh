// Shared by the kernels that prepare chunks, with a decay per head or per channel: norms of rows, stores of matrices, and the
// inverse of a unit lower triangular matrix of a chunk, 64 x 64 in fp32 in shared memory: blocks of 16 x 16 by
// substitution, one warp each, then pairs of blocks, then pairs of those, by -B^-1 C A^-1.
#pragma once
#include "attention/gated_delta_rule.cuh"

namespace rtk {

inline constexpr int kSolvePitch = 68;

// The sum of squares of part `part` of PARTS of a tile's row.
template <typename T, typename Tile, int PARTS>
RTK_DEVICE float row_square(const u8* tile, int row, int part) {
    float square = 0.0f;
#pragma unroll
    for (int v = 0; v < Tile::kVectors / PARTS; ++v) {
        float f[8];
        unpack<T, 8>(*reinterpret_cast<const Raw<16>*>(tile + Tile::offset(row, part * (Tile::kVectors / PARTS) + v)), f);
#pragma unroll
        for (int i = 0; i < 8; ++i) square += f[i] * f[i];
    }
    return square;
}

RTK_DEVICE float inverse_norm(float square) { return rsqrtf(square + 1e-6f); }

// Stores a matrix of a chunk, 64 x 64 in fp32 in shared memory, rounded and dense, by 128 threads.
template <typename T>
RTK_DEVICE void store_square(T* to, const float* from, int thread) {
#pragma unroll
    for (int at = thread * 8; at < kDelta * kDelta; at += 128 * 8) {
        float f[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) f[i] = from[at / kDelta * kSolvePitch + at % kDelta + i];
        store<T, 8>(to + at, f);
    }
}

// out = -+ left by right for SIZE x SIZE blocks, by 4 SIZE threads.
template <int SIZE, bool kNegative>
RTK_DEVICE void block_product(float* out, const float* left, const float* right, int thread) {
    constexpr int kColumns = SIZE / 4;
    const int row = thread / 4, column = thread % 4 * kColumns;
    float sum[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sum[c] = 0.0f;
#pragma unroll 2
    for (int first = 0; first < SIZE; first += 4) {
        const float4 lefts = *reinterpret_cast<const float4*>(left + row * kSolvePitch + first);
        const float by[4] = {lefts.x, lefts.y, lefts.z, lefts.w};
#pragma unroll
        for (int l = 0; l < 4; ++l)
#pragma unroll
            for (int c = 0; c < kColumns; c += 4) {
                const float4 four = *reinterpret_cast<const float4*>(right + (first + l) * kSolvePitch + column + c);
                sum[c] += by[l] * four.x, sum[c + 1] += by[l] * four.y, sum[c + 2] += by[l] * four.z, sum[c + 3] += by[l] * four.w;
            }
    }
#pragma unroll
    for (int c = 0; c < kColumns; c += 4)
        *reinterpret_cast<float4*>(out + row * kSolvePitch + column + c) =
            kNegative ? make_float4(-sum[c], -sum[c + 1], -sum[c + 2], -sum[c + 3])
                      : make_float4(sum[c], sum[c + 1], sum[c + 2], sum[c + 3]);
}

// x = (I + m)^-1, m strictly lower, by 128 threads that share a barrier. The part of m above its diagonal is clobbered.
RTK_DEVICE void invert_unit_lower(float* x, float* m, int thread, int barrier) {
    constexpr int kPitch = kSolvePitch;
    const int lane = thread % kWarp, warp = thread / kWarp;
#pragma unroll 4
    for (int at = thread * 4; at < kDelta * kPitch; at += 512)
        *reinterpret_cast<float4*>(x + at) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    ptx::named_barrier_sync(barrier, 128);
    {
        const float* const block = m + 16 * warp * (kPitch + 1);
        const int column = lane % 16;
        float own[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
            for (int first = 0; first < i; first += 4) {
                const float4 four = *reinterpret_cast<const float4*>(block + i * kPitch + first);
                const float by[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int l = 0; l < 4; ++l)
                    if (first + l < i) sum -= by[l] * own[first + l];
            }
            own[i] = sum;
        }
        if (lane < 16) {
#pragma unroll
            for (int i = 0; i < 16; ++i) x[(16 * warp + i) * kPitch + 16 * warp + column] = own[i];
        }
    }
    ptx::named_barrier_sync(barrier, 128);
    const int corner = thread / 64 * 32 * (kPitch + 1), part = thread % 64;
    float* const upper = m + corner + 16;  // unused places
    block_product<16, false>(upper, m + corner + 16 * kPitch, x + corner, part);
    ptx::named_barrier_sync(barrier, 128);
    block_product<16, true>(x + corner + 16 * kPitch, x + corner + 16 * (kPitch + 1), upper, part);
    ptx::named_barrier_sync(barrier, 128);
    block_product<32, false>(m + 32, m + 32 * kPitch, x, thread);
    ptx::named_barrier_sync(barrier, 128);
    block_product<32, true>(x + 32 * kPitch, x + 32 * (kPitch + 1), m + 32, thread);
    ptx::named_barrier_sync(barrier, 128);
}

}  // namespace rtk
