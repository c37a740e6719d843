// Shared by the kernels that prepare chunks, with a decay per head or per channel: norms of rows, stores of matrices, and the
// inverse of a unit lower triangular matrix of a chunk, 64 x 64 in fp32 in shared memory: blocks of 16 x 16 by
// substitution, one warp each, then pairs of blocks, then pairs of those, by -B^-1 C A^-1. These products are by tensor cores,
// with operands in two parts of tf32 each, so that they have about the precision of fp32.
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

// Stores such a matrix, with nothing above its diagonal, in two parts: rounded, and the rounded remainder behind it. Of each row
// only vectors up to the diagonal are written (fetch_lower, fetch_boxes). By the first 128 threads, or the second.
template <typename T>
RTK_DEVICE void store_lower_parts(T* to, const float* from) {
#pragma unroll 1
    for (int at = static_cast<int>(this_thread()) % 128 * 8; at < kDelta * kDelta; at += 128 * 8) {
        const int row = at / kDelta, column = at % kDelta;
        if (column > row) continue;
        float f[8], rounded[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) f[i] = from[row * kSolvePitch + column + i];
        const Raw<16> raw = pack<T, 8>(f);
        unpack<T, 8>(raw, rounded);
#pragma unroll
        for (int i = 0; i < 8; ++i) f[i] -= rounded[i];
        ptx::st<16>(to + at, raw);
        store<T, 8>(to + kDelta * kDelta + at, f);
    }
}

// The parts of an operand in tf32, of which the tensor cores ignore the low 13 bits.
RTK_DEVICE void split_tf32(u32& high, u32& low, float x) {
    high = __float_as_uint(x) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
}

// out = -+ left by right for SIZE x SIZE blocks, by 4 SIZE threads: 16 rows and SIZE / 2 columns per warp.
template <int SIZE, bool kNegative>
RTK_DEVICE void block_product(float* out, const float* left, const float* right, int thread) {
    constexpr int kTiles = SIZE / 16, kPitch = kSolvePitch;
    const int lane = thread % kWarp, warp = thread / kWarp, g = lane / 4, t = lane % 4;
    const int row = warp / 2 * 16 + g, column = warp % 2 * (SIZE / 2);
    float sums[kTiles][4];
    clear_sums(sums);
#pragma unroll 1
    for (int first = 0; first < SIZE; first += 8) {
        u32 a[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) split_tf32(a[0][i], a[1][i], left[(row + i % 2 * 8) * kPitch + first + i / 2 * 4 + t]);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            u32 b[2][2];
#pragma unroll
            for (int h = 0; h < 2; ++h) split_tf32(b[0][h], b[1][h], right[(first + 4 * h + t) * kPitch + column + 8 * n + g]);
            ptx::mma_m16n8k8_tf32(sums[n], a[1], b[0]);
            ptx::mma_m16n8k8_tf32(sums[n], a[0], b[1]);
            ptx::mma_m16n8k8_tf32(sums[n], a[0], b[0]);
        }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float lo = sums[n][2 * r], hi = sums[n][2 * r + 1];
            *reinterpret_cast<float2*>(out + (row + 8 * r) * kPitch + column + 8 * n + 2 * t) =
                kNegative ? make_float2(-lo, -hi) : make_float2(lo, hi);
        }
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
    thread = static_cast<int>(this_thread()) % 128;  // recomputed: registers
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
