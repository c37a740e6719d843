// Weights of the skinny product: converts codes in shared memory to the 16-bit operands of mma.sync. Every value is
// exact; factors that a format leaves behind (kFactor) multiply the finished sums.
//
// A step is 32 of k. Lane 4g + t has eight codes of row g, those of k = 8t ... 8t + 7, and turns them into four pairs
// of neighbours: two for each of the step's two products.
#pragma once
#include "common/convert.cuh"
#include "ptx/mma.cuh"
#include "ptx/packed.cuh"

namespace rtk {

struct int8_codes {};
struct int4_codes {};  // signed or unsigned
struct e2m1_codes {};  // two in a byte, the first one in its low half

template <typename Math>
RTK_DEVICE u32 fma_pair(u32 a, u32 b, u32 c) {
    if constexpr (is_same<Math, bf16>::value) {
        return ptx::fma_bf16x2(a, b, c);
    } else {
        return ptx::fma_f16x2(a, b, c);
    }
}

template <typename Math>
RTK_DEVICE void mma_pair(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    if constexpr (is_same<Math, bf16>::value) {
        ptx::mma_m16n8k16_bf16(d, a, b);
    } else {
        ptx::mma_m16n8k16_f16(d, a, b);
    }
}

// Two fp32 that are bf16 numbers.
RTK_DEVICE u32 upper_halves(float lo, float hi) { return __byte_perm(__float_as_uint(lo), __float_as_uint(hi), 0x7632u); }

inline constexpr u32 kNegativeZeros = 0x80008000u;  // x + -0 is x, also where x is a zero

// Options that are the same for all codes of a launch.
struct CodeOptions {
    bool is_signed;
};

// kBits of a code; pairs(raw, scale, options, pair): `scale` is a pair that multiplies (kScaled formats only).
template <typename Codes, typename Math>
struct WeightCodes {  // 16-bit floats
    static constexpr int kBits = 16;
    static constexpr bool kScaled = false, kFlagged = false;
    static constexpr float kFactor = 1.0f;

    RTK_DEVICE static void pairs(const Raw<16>& raw, u32, CodeOptions, u32 (&pair)[4]) {
#pragma unroll
        for (int p = 0; p < 4; ++p) pair[p] = raw.w[p];
    }
};

// Converts via fp16, and fp32 for bf16. Before sm_89, sign, exponent and fraction move to their places in fp16 or bf16,
// which makes the number 2^8 or 2^120 times too small, subnormals included; the NaN codes come out as 480: `flag`
// collects them.
template <typename Math>
struct WeightCodes<e4m3, Math> {
    static constexpr int kBits = 8;
    static constexpr bool kScaled = false, kFlagged = !RTK_HAS_FP8_CVT;
    static constexpr bool kBf16 = is_same<Math, bf16>::value;
    static constexpr float kFactor = kBf16 || !kFlagged ? 1.0f : 256.0f;

    RTK_DEVICE static void pairs(const Raw<8>& raw, u32, CodeOptions, u32 (&pair)[4]) {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
#if RTK_HAS_FP8_CVT
            pair[p] = ptx::cvt_e4m3x2_to_f16x2(static_cast<u16>(raw.w[p / 2] >> (16 * (p % 2))));
            if constexpr (kBf16)
                pair[p] = upper_halves(ptx::cvt_f16_to_f32(static_cast<u16>(pair[p])),
                                       ptx::cvt_f16_to_f32(static_cast<u16>(pair[p] >> 16)));
#else
            constexpr int kShift = kBf16 ? 4 : 1;
            constexpr u32 kMagnitude = 0x7f007f00u >> kShift;
            const u32 upper_bytes = __byte_perm(raw.w[p / 2], 0u, p % 2 == 0 ? 0x1404u : 0x3424u);
            pair[p] = (upper_bytes & 0x80008000u) | (upper_bytes >> kShift & kMagnitude);
            if constexpr (kBf16) pair[p] = fma_pair<bf16>(pair[p], 0x7b807b80u, kNegativeZeros);  // 2^120
#endif
        }
    }

    // Bit 7 of a byte: this code or an earlier one is NaN.
    RTK_DEVICE static u32 flag(u32 flags, const Raw<8>& raw) {
        return flags | ((raw.w[0] & 0x7f7f7f7fu) + 0x01010101u) | ((raw.w[1] & 0x7f7f7f7fu) + 0x01010101u);
    }
};

// The upper byte of fp16. The conversion to bf16 goes via fp32.
template <typename Math>
struct WeightCodes<e5m2, Math> {
    static constexpr int kBits = 8;
    static constexpr bool kScaled = false, kFlagged = false;
    static constexpr float kFactor = 1.0f;

    RTK_DEVICE static void pairs(const Raw<8>& raw, u32, CodeOptions, u32 (&pair)[4]) {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            pair[p] = __byte_perm(raw.w[p / 2], 0u, p % 2 == 0 ? 0x1404u : 0x3424u);
            if constexpr (is_same<Math, bf16>::value)
                pair[p] = upper_halves(ptx::cvt_f16_to_f32(static_cast<u16>(pair[p])),
                                       ptx::cvt_f16_to_f32(static_cast<u16>(pair[p] >> 16)));
        }
    }
};

// code + 128 is the low byte of 1024 + (code + 128) in fp16, and of 2^23 + (code + 128) in fp32; the upper half of the
// latter is bf16.
template <typename Math>
struct WeightCodes<int8_codes, Math> {
    static constexpr int kBits = 8;
    static constexpr bool kScaled = false, kFlagged = false;
    static constexpr float kFactor = 1.0f;

    RTK_DEVICE static void pairs(const Raw<8>& raw, u32, CodeOptions, u32 (&pair)[4]) {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const u32 word = raw.w[p / 2] ^ 0x80808080u;
            if constexpr (is_same<Math, bf16>::value) {
                const u32 selector = 0x7540u + 2u * (p % 2);
                const float first = __uint_as_float(__byte_perm(word, 0x4b000000u, selector)) - 8388736.0f;
                const float second = __uint_as_float(__byte_perm(word, 0x4b000000u, selector + 1u)) - 8388736.0f;
                pair[p] = upper_halves(first, second);
            } else {
                const u32 biased = __byte_perm(word, 0x64646464u, p % 2 == 0 ? 0x4140u : 0x4342u);
                pair[p] = fma_pair<fp16>(biased, 0x3c003c00u, 0xe480e480u);  // - 1152
            }
        }
    }
};

// A nibble is the low end of 1024 + nibble in fp16, and of 128 + nibble in bf16. The second one of a byte stays four
// (fp16) or three bits (bf16) higher, where it counts 16 or 8 times. Signed ones have their upper bit flipped, which
// adds 8.
template <typename Math>
struct WeightCodes<int4_codes, Math> {
    static constexpr int kBits = 4;
    static constexpr bool kScaled = false, kFlagged = false;
    static constexpr float kFactor = 1.0f;

    RTK_DEVICE static void pairs(const Raw<4>& raw, u32, CodeOptions options, u32 (&pair)[4]) {
        if constexpr (is_same<Math, bf16>::value) {
            const u32 base = options.is_signed ? 0x43404308u : 0x43004300u;
            const u32 offset = options.is_signed ? 0xc1c0c308u : 0xc180c300u;  // - 24 and - 136, - 16 and - 128
            const u32 second = raw.w[0] >> 1;
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                const u32 both = __byte_perm(raw.w[0], second, 0x0400u + 0x0101u * p);
                pair[p] = fma_pair<bf16>((both & 0x0078000fu) ^ base, 0x3e003f80u, offset);  // 1/8 and 1
            }
        } else {
            const u32 base = options.is_signed ? 0x64806408u : 0x64006400u;
            const u32 offset = options.is_signed ? 0xd480e408u : 0xd400e400u;  // - 72 and - 1032, - 64 and - 1024
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                const u32 both = __byte_perm(raw.w[0], 0u, 0x0101u * p);
                pair[p] = fma_pair<fp16>((both & 0x00f0000fu) ^ base, 0x2c003c00u, offset);  // 1/16 and 1
            }
        }
    }
};

// As e4m3: 2^14 or 2^126 too small. A scale that is 2^7 or 2^119 times too large (skinny_scale_pair) leaves 2^-7; in
// that range all products of e2m1 and ue4m3 are exact.
template <typename Math>
struct WeightCodes<e2m1_codes, Math> {
    static constexpr int kBits = 4;
    static constexpr bool kScaled = true, kFlagged = false;
    static constexpr float kFactor = 128.0f;

    RTK_DEVICE static void pairs(const Raw<4>& raw, u32 scale, CodeOptions, u32 (&pair)[4]) {
        constexpr bool kBf16 = is_same<Math, bf16>::value;
        constexpr int kShift = kBf16 ? 6 : 3;
        constexpr u32 kMagnitude = 0x70007000u >> kShift;
        const u32 first = raw.w[0] << 4;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const u32 up = __byte_perm(first, raw.w[0], 0x4000u + 0x1010u * p);  // both in the upper halves of upper bytes
            pair[p] = fma_pair<Math>((up & 0x80008000u) | (up >> kShift & kMagnitude), scale, kNegativeZeros);
        }
    }
};

// A ue4m3 scale, twice, times 2^7 (fp16) or 2^119 (bf16). The sign bit is ignored.
template <typename Math>
RTK_DEVICE u32 skinny_scale_pair(u32 byte) {
    const u32 code = byte & 0x7fu;
    if constexpr (is_same<Math, bf16>::value) {
        const float scale = code == 0x7fu ? __uint_as_float(0x7fffffffu) : __uint_as_float(code << 20) * 0x1p120f * 0x1p119f;
        return __byte_perm(__float_as_uint(scale), 0u, 0x3232u);
    } else {
        const u32 small = code == 0x7fu ? 0x7fffu : code << 7;  // 2^8 too small
        return ptx::fma_f16x2(small | small << 16, 0x78007800u, kNegativeZeros);  // 2^15
    }
}

}  // namespace rtk
