// Codes of weights as wgmma's left operand in registers, and the order of k that follows from it.
//
// Lane 4g + t gets word t of 16 bytes of rows g and g + 8 (ldmatrix): eight 4-bit codes k = 8t ... 8t + 7 of 32, or four
// 8-bit ones, k = 4t ... 4t + 3 of 16. wgmma takes k = 2t, 2t + 1 and 8 + 2t, 9 + 2t of 16 from it. A sum may be taken in
// any order, so codes stay where they are, and each 64 bytes (32 of k) of a token are moved instead, once for all weights
// of the tile: pair(i) of a lane, i = 2 * product + half, multiplies word t of vector i of these 64 bytes. To move codes
// between lanes or to read them four times would take about as many instructions as their conversion.
#pragma once
#include "gemm/gemm_skinny_weights.cuh"

namespace rtk {

template <typename Codes>
struct SwappedCodes {  // of 8 bits: bytes 0, 1 and 2, 3 of a word are pairs, and 32 of k are two words
    using Weights = WeightCodes<Codes, bf16>;
    static constexpr int kBits = 8, kWords = 2;
    static constexpr bool kScaled = false;
    static constexpr float kFactor = Weights::kFactor;
    static_assert(!Weights::kFlagged, "NaN codes become NaN");

    RTK_DEVICE static void pairs(const u32 (&words)[kWords], u32 scale, CodeOptions options, u32 (&pair)[4]) {
        Weights::pairs(Raw<8>{{words[0], words[1]}}, scale, options, pair);
    }

    // 32 of k of a token: vector 2i + h gets words h, 2 + h of vectors 2i and 2i + 1.
    RTK_DEVICE static void reorder(Raw<16> (&v)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const Raw<16> first = v[i], second = v[i + 1];
            v[i] = {{first.w[0], first.w[2], second.w[0], second.w[2]}};
            v[i + 1] = {{first.w[1], first.w[3], second.w[1], second.w[3]}};
        }
    }
};

// Nibbles i and i + 4 of a word are a pair: they are 16 bits apart, as bf16 numbers are.
struct SwappedNibbles {
    static constexpr int kBits = 4, kWords = 1;

    // Vector i gets elements i and i + 4 of all vectors.
    RTK_DEVICE static void reorder(Raw<16> (&v)[4]) {
        Raw<16> out[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int t = 0; t < 4; ++t)
                out[i].w[t] = __byte_perm(v[t].w[i / 2], v[t].w[i / 2 + 2], i % 2 == 0 ? 0x5410u : 0x7632u);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = out[i];
    }
};

// A nibble is the low end of 128 + nibble in bf16; signed ones have their upper bit flipped, which adds 8.
template <>
struct SwappedCodes<int4_codes> : SwappedNibbles {
    static constexpr bool kScaled = false;
    static constexpr float kFactor = 1.0f;

    RTK_DEVICE static void pairs(const u32 (&words)[1], u32, CodeOptions options, u32 (&pair)[4]) {
        const u32 base = options.is_signed ? 0x43084308u : 0x43004300u, minus = base | kNegativeZeros;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            pair[i] = fma_pair<bf16>((words[0] >> (4 * i) & 0x000f000fu) ^ base, 0x3f803f80u, minus);
    }
};

// As in WeightCodes: 2^126 too small, times a scale that is 2^119 times too large. All products are exact.
template <>
struct SwappedCodes<e2m1_codes> : SwappedNibbles {
    static constexpr bool kScaled = true;
    static constexpr float kFactor = WeightCodes<e2m1_codes, bf16>::kFactor;

    RTK_DEVICE static void pairs(const u32 (&words)[1], u32 scale, CodeOptions, u32 (&pair)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 top = words[0] << (12 - 4 * i);
            const u32 magnitude = i < 2 ? words[0] << (6 - 4 * i) : words[0] >> (4 * i - 6);
            pair[i] = fma_pair<bf16>((magnitude & 0x01c001c0u) | (top & kNegativeZeros), scale, kNegativeZeros);
        }
    }

    // Two neighbouring ue4m3 scales as pairs, by the conversion of e4m3 to fp16. Their sign bits are ignored.
    RTK_DEVICE static void scale_pairs(u32 both, u32 (&pair)[2]) {
        const u32 halves = ptx::cvt_e4m3x2_to_f16x2(static_cast<u16>(both & 0x7f7fu));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float scale = ptx::cvt_f16_to_f32(static_cast<u16>(halves >> (16 * i))) * 0x1p119f;
            pair[i] = __byte_perm(__float_as_uint(scale), 0u, 0x3232u);
        }
    }
};

}  // namespace rtk
