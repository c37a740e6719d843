// Activations of products for decoding steps (gemm_decode.cu, gemm_step_experts.cu): rows in shared memory, normalised.
#pragma once
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "gemm/gemm_decode_stage.cuh"

namespace rtk {

RTK_DEVICE Raw<16> decode_load(const u8* p) {  // not read-only: the previous kernel may write it after this one started
    const uint4 words = *reinterpret_cast<const uint4*>(p);
    return {{words.x, words.y, words.z, words.w}};
}

// How threads share rows: a token belongs to 2^shift warps; this thread starts at its token and element.
struct DecodeShare {
    int shift, token, element;

    RTK_DEVICE explicit DecodeShare(int m) {
        const int warp = threadIdx.x / 32;
        shift = m == 1 ? 3 : m == 2 ? 2 : m <= 4 ? 1 : 0;
        token = warp >> shift;
        element = (warp & (1 << shift) - 1) * 32 + threadIdx.x % 32;
    }
    RTK_DEVICE int tokens() const { return kDecodeWarps >> shift; }  // at a time
    RTK_DEVICE int elements() const { return 32 << shift; }
};

// Activations of the block's part of k, in shared memory.
template <typename T, int PARTS>
struct DecodeRows {
    const u8* x;
    i64 pitch;  // bytes
    int m, k;
    int first, vectors;  // of the block's part: eight elements each, those past k are zeros
    ptx::SharedAddress to;
    int to_pitch;

    // Place of vector v of a token.
    RTK_DEVICE static int place(int v) {
        if constexpr (PARTS == 1) return v * 16;
        const int step = v / (4 * PARTS), inside = v % (4 * PARTS);
        return (step * 4 * PARTS + inside % PARTS * 4 + inside / PARTS) * 16;
    }

    // Copies the block's part. For a norm (`squares` not null), reads whole rows and stores sums of their squares.
    RTK_DEVICE void copy(const DecodeShare& share, float* squares) const {
        constexpr int kInFlight = 4;
        const int all = k / 8, stride = share.elements();
        const int begin = squares != nullptr ? 0 : first;
        const int end = squares != nullptr ? max(all, first + vectors) : first + vectors;
#pragma unroll 1
        for (int token = share.token; token < m; token += share.tokens()) {
            float square = 0.0f;
#pragma unroll 1
            for (int at = begin + share.element; at < end; at += kInFlight * stride) {
                Raw<16> raw[kInFlight];
#pragma unroll
                for (int i = 0; i < kInFlight; ++i) {
                    clear(raw[i]);
                    if (at + i * stride < all) raw[i] = decode_load(x + token * pitch + (at + i * stride) * 16);
                }
#pragma unroll
                for (int i = 0; i < kInFlight; ++i) {
                    float value[8];
                    unpack<T, 8>(raw[i], value);
#pragma unroll
                    for (int e = 0; e < 8; ++e) square = fmaf(value[e], value[e], square);
                    const int v = at + i * stride - first;
                    if (v >= 0 && v < vectors) ptx::st_shared_16(to + (token * to_pitch + place(v)), raw[i]);
                }
            }
            if (squares != nullptr) {
                square = warp_reduce<Sum>(square);
                if (threadIdx.x % 32 == 0) squares[(token << share.shift) + share.element / 32] = square;
            }
        }
    }

    // Multiplies what was copied; `weight`: in shared memory, for the block's part.
    RTK_DEVICE void normalize(const DecodeShare& share, const float* squares, ptx::SharedAddress weight, float offset,
                              float eps) const {
#pragma unroll 1
        for (int token = share.token; token < m; token += share.tokens()) {
            float square = 0.0f;
#pragma unroll
            for (int s = 0; s < kDecodeWarps; ++s)
                if (s < 1 << share.shift) square += squares[(token << share.shift) + s];
            const float rstd = rsqrtf(square / static_cast<float>(k) + eps);
#pragma unroll 1
            for (int v = share.element; v < vectors && 8 * (first + v) < k; v += share.elements()) {
                float value[8], gain[8];
                const ptx::SharedAddress own = to + (token * to_pitch + place(v));
                unpack<T, 8>(ptx::ld_shared_16(own), value);
                unpack<T, 8>(ptx::ld_shared_16(weight + v * 16), gain);
#pragma unroll
                for (int e = 0; e < 8; ++e) value[e] = value[e] * rstd * (offset + gain[e]);
                ptx::st_shared_16(own, pack<T, 8>(value));
            }
        }
    }
};

}  // namespace rtk
