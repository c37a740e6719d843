// Activations of products for decoding steps of a few tokens (gemm_stream.cu): rows in shared memory, normalised.
#pragma once
#include "gemm/gemm_decode_rows.cuh"

namespace rtk {

// Activations of the block's part of k, in shared memory, in the order in which lanes read them (gemm_stream_lanes.cuh).
// Where codes make fp16 of bf16 activations, a row is multiplied by the power of two that moves its largest magnitude to
// [2^13, 2^14): what becomes subnormal is 2^-27 of that, or less, and everything else is exact.
template <typename T, typename Lanes>
struct StreamRows {
    static constexpr int kParts = Lanes::kParts, kOdd = kParts == 1 ? 8 : 16;
    static constexpr bool kMoved = !is_same<T, typename Lanes::Operand>::value;
    const u8* x;
    i64 pitch;  // bytes
    int m, k;
    int first, vectors;  // of the block's part: eight elements each, those past k are zeros
    ptx::SharedAddress to;
    int to_pitch;
    const u8* gain;  // in shared memory, for the block's part; null without a norm
    float offset, eps;

    // Place of the even words of vector v of a token; the odd ones are kOdd bytes behind them.
    RTK_DEVICE static int place(int v) {
        if constexpr (kParts == 1) return v * 16;
        const int inside = v % (4 * kParts), j = inside % kParts;
        return v / (4 * kParts) * (64 * kParts) + j / 2 * 128 + inside / kParts * 32 + j % 2 * 8;
    }
    // Offset of the words that lane 4g + t of a step reads.
    RTK_DEVICE static int lane_place(int g, int t) { return t * (2 * kOdd) + g % 2 * kOdd; }

    RTK_DEVICE static void put(ptx::SharedAddress at, const Raw<16>& raw) {
        ptx::st_shared_8(at, {{raw.w[0], raw.w[2]}});
        ptx::st_shared_8(at + kOdd, {{raw.w[1], raw.w[3]}});
    }
    RTK_DEVICE static Raw<16> get(ptx::SharedAddress at) {
        const Raw<8> first_words = ptx::ld_shared_8(at), second_words = ptx::ld_shared_8(at + kOdd);
        return {{first_words.w[0], second_words.w[0], first_words.w[1], second_words.w[1]}};
    }

    // Copies the block's part. For a norm, reads whole rows and stores sums of their squares; stores the largest
    // magnitudes of rows that will be moved.
    RTK_DEVICE void copy(const DecodeShare& share, float* squares, float* peaks) const {
        constexpr int kInFlight = 4;
        const int all = k / 8, stride = share.elements();
        const int begin = gain != nullptr ? 0 : first;
        const int end = gain != nullptr ? max(all, first + vectors) : first + vectors;
#pragma unroll 1
        for (int token = share.token; token < m; token += share.tokens()) {
            float square = 0.0f, peak = 0.0f;
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
                    const int v = at + i * stride - first;
                    const bool own = v >= 0 && v < vectors;
                    float value[8];
                    unpack<T, 8>(raw[i], value);
#pragma unroll
                    for (int e = 0; e < 8; ++e) square = fmaf(value[e], value[e], square);
                    if (own) put(to + (token * to_pitch + place(v)), raw[i]);
                    if constexpr (kMoved) {
                        if (own) {
                            if (gain != nullptr) weigh(v, value);
#pragma unroll
                            for (int e = 0; e < 8; ++e) peak = fmaxf(peak, fabsf(value[e]));
                        }
                    }
                }
            }
            const int at = (token << share.shift) + share.element / 32;
            if (gain != nullptr) {
                square = warp_reduce<Sum>(square);
                if (threadIdx.x % 32 == 0) squares[at] = square;
            }
            if constexpr (kMoved) {
                peak = warp_reduce<MaxMagnitude>(peak);
                if (threadIdx.x % 32 == 0) peaks[at] = peak;
            }
        }
    }

    // Normalises and moves what was copied. `units[token]` becomes what sums of a moved row are to be multiplied by.
    RTK_DEVICE void finish(const DecodeShare& share, const float* squares, const float* peaks, float* units) const {
#pragma unroll 1
        for (int token = share.token; token < m; token += share.tokens()) {
            float square = 0.0f, peak = 0.0f, rstd = 1.0f, move = 1.0f;
#pragma unroll
            for (int s = 0; s < kDecodeWarps; ++s)
                if (s < 1 << share.shift) {
                    if (gain != nullptr) square += squares[(token << share.shift) + s];
                    if constexpr (kMoved) peak = fmaxf(peak, peaks[(token << share.shift) + s]);
                }
            if (gain != nullptr) rstd = rsqrtf(square / static_cast<float>(k) + eps);
            if constexpr (kMoved) {
                const u32 exponent = __float_as_uint(peak * rstd) >> 23 & 255u;
                const u32 moved = min(267u - exponent, 253u);  // 140 - exponent, as an exponent
                move = __uint_as_float(moved << 23);
                if (share.element == 0) units[token] = __uint_as_float(254u - moved << 23);
            }
#pragma unroll 1
            for (int v = share.element; v < vectors && 8 * (first + v) < k; v += share.elements()) {
                const ptx::SharedAddress own = to + (token * to_pitch + place(v));
                Raw<16> raw = get(own);
                float value[8];
                unpack<T, 8>(raw, value);
                if (gain != nullptr) {
#pragma unroll
                    for (int e = 0; e < 8; ++e) value[e] *= rstd;
                    weigh(v, value);
                    raw = pack<T, 8>(value);
                }
                if constexpr (kMoved) {
                    unpack<T, 8>(raw, value);
#pragma unroll
                    for (int e = 0; e < 8; ++e) value[e] *= move;
                    raw = pack<fp16, 8>(value);
                }
                put(own, raw);
            }
        }
    }

    RTK_DEVICE void weigh(int v, float (&value)[8]) const {
        float weight[8];
        unpack<T, 8>(ptx::ld_shared_16(ptx::shared_address(gain) + v * 16), weight);
#pragma unroll
        for (int e = 0; e < 8; ++e) value[e] *= offset + weight[e];
    }
};

}  // namespace rtk
