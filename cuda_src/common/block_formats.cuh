// NVFP4 and MX: codes that share a small scale with their 15 or 31 neighbours.
//
//     nvfp4:  scale = e4m3(amax / max(6 g, 1e-12)) of 16 values,  code = e2m1(v / (g * scale)),  0 where the scale is 0
//     mx:     scale = a power of two, for 32 values,              code = e2m1 or fp8 of v / scale
//
// amax is over finite values; NaN and infinities become the largest e2m1 code of their sign. The quotient is correctly
// rounded, like a division's. ops/shared/block_formats.py computes the same bits in plain torch.
#pragma once
#include "common/convert.cuh"
#include "common/fp8_scale.cuh"
#include "ptx/cvt_fp4.cuh"
#include "ptx/forget.cuh"
#include "ptx/packed.cuh"

namespace rtk {

inline constexpr int kTiesNearest = 0, kTiesAway = 1, kTiesZero = 2;      // elem_rule
inline constexpr int kScaleNearest = 0, kScaleUp = 1, kScaleSearch = 2;  // scale_rule

// A code is a concave function of the magnitude q, composed of three straight lines: min(2 q, q + 2, q / 2 + 4), at
// most 7. Adding 1.5 * 2^23, whose neighbours are integers, rounds a line once, to nearest even, into the low bits of a
// float.
inline constexpr float kMagic = 12582912.0f;

// One code by any rule. The rounding error is exact, so it shows whether there was a tie.
RTK_DEVICE u32 e2m1_rounded(float v, float quotient, int ties) {
    const float q = fminf(fabsf(quotient), 6.0f);
    const float slope = q < 2.0f ? 2.0f : q < 4.0f ? 1.0f : 0.5f, offset = q < 2.0f ? 0.0f : q < 4.0f ? 2.0f : 4.0f;
    float code = fmaf(q, slope, kMagic + offset) - kMagic;
    const float off = fmaf(q, slope, offset - code);
    if (ties == kTiesAway && off == 0.5f) code += 1.0f;
    if (ties == kTiesZero && off == -0.5f) code -= 1.0f;
    return (__float_as_uint(code + kMagic) & 7u) | (__float_as_uint(v) >> 28 & 8u);
}

RTK_DEVICE float e2m1_value(u32 code) {
    const float magnitude = __uint_as_float((code & 7u) << 22) * 0x1p126f;
    return code & 8u ? -magnitude : magnitude;
}

// Eight codes of a word as numbers. Codes i and i + 4 are two subnormal fp16 numbers, 16384 times too small.
RTK_DEVICE void e2m1_values(u32 word, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 magnitudes = i < 3 ? word << (9 - 4 * i) : word >> 3, signs = word << (12 - 4 * i);
        const u32 both = (magnitudes & 0x0e000e00u) | (signs & 0x80008000u);
        const u32 exact = ptx::fma_f16x2(both, 0x74007400u, 0x80008000u);  // times 2^14, plus -0
        v[i] = ptx::cvt_f16_to_f32(static_cast<u16>(exact));
        v[i + 4] = ptx::cvt_f16_to_f32(static_cast<u16>(exact >> 16));
    }
}

RTK_DEVICE u32 e4m3_nearest(float magnitude) { return to_fp8x2<e4m3>(magnitude, 0.0f) & 0x7fu; }

RTK_DEVICE float e4m3_value(u32 code) {
    float value, ignored;
    from_fp8x2<e4m3>(code & 0x7fu, value, ignored);
    return value;
}

// Values divided by a step, correctly rounded, without the branches of a division: a product with the reciprocal and
// one correction step. Both are scaled by a power of two where the reciprocal would overflow or lose digits; a quotient
// that then overflows is beyond the largest code, one that underflows is 0.
struct Quotient {
    float factor, step, inverse;

    RTK_DEVICE explicit Quotient(float step_)
        : factor(step_ < 0x1p-60f ? 0x1p100f : step_ > 0x1p60f ? 0x1p-100f : 1.0f),
          step(step_ * factor),
          inverse(inverse_scale(step)) {}
    RTK_DEVICE float of(float v) const { return of_scaled(v * factor); }
    RTK_DEVICE float of_scaled(float scaled) const {
        const float near = scaled * inverse;
        return fmaf(fmaf(-near, step, scaled), inverse, near);
    }
};

#if !RTK_HAS_FP4_CVT
// Eight codes of magnitudes, rounded to nearest even, in a word: takes the smallest of the three lines and packs their
// low bits. NaN becomes 7. Without CAPPED all are below 7.
template <bool CAPPED>
RTK_DEVICE u32 e2m1_magnitudes(const float (&q)[8]) {
    u32 code[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float lines = fminf(fminf(fmaf(q[i], 2.0f, kMagic), q[i] + (kMagic + 2.0f)), fmaf(q[i], 0.5f, kMagic + 4.0f));
        code[i] = __float_as_uint(CAPPED ? fminf(lines, kMagic + 7.0f) : lines);
    }
    u32 halves[2];  // the magic number has no bits below the 22nd
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const u32* const of = code + 4 * h;
        halves[h] = ((of[3] * 16u + of[2]) * 256u) + (of[1] * 16u + of[0]);
    }
    return __byte_perm(halves[0], halves[1], 0x5410);
}

// The signs of the values, in the upper bits of the codes.
RTK_DEVICE u32 e2m1_signs(const float (&v)[8]) {
    u32 tops[2];  // upper bytes of values 0, 2, 4 and 6, and of the others
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        const u32 first = __byte_perm(__float_as_uint(v[odd]), __float_as_uint(v[odd + 2]), 0x0073);
        const u32 then = __byte_perm(__float_as_uint(v[odd + 4]), __float_as_uint(v[odd + 6]), 0x0073);
        tops[odd] = __byte_perm(first, then, 0x5410);
    }
    return (tops[1] & 0x80808080u) | (tops[0] >> 4 & 0x08080808u);
}
#endif

// Codes of values, two in a byte, the first in the lowest bits, rounded to nearest even. over(v): the quotient of v.
template <int N, typename Over>
RTK_DEVICE void e2m1_words(const float (&v)[N], Over over, u32 (&words)[N / 8]) {
#pragma unroll
    for (int w = 0; w < N / 8; ++w) {
        float q[8], own[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) own[i] = v[w * 8 + i], q[i] = over(fabsf(own[i]));
#if RTK_HAS_FP4_CVT
#pragma unroll
        for (int i = 0; i < 8; ++i) q[i] = copysignf(fminf(q[i], 6.0f), own[i]);  // the instruction ignores the sign of NaN
        words[w] = ptx::cvt_e2m1x8(q);
#else
        words[w] = e2m1_magnitudes<true>(q) | e2m1_signs(own);
#endif
    }
}

// The same for a step: zeros if it is 0.
template <int N>
RTK_DEVICE void e2m1_pack(const float (&v)[N], float step, int ties, u32 (&words)[N / 8]) {
    const Quotient over(step);
    if (ties != kTiesNearest) {
#pragma unroll
        for (int w = 0; w < N / 8; ++w) {
            words[w] = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) words[w] |= e2m1_rounded(v[w * 8 + i], over.of(v[w * 8 + i]), ties) << (4 * i);
        }
    } else {
        float scaled[N];
#pragma unroll
        for (int i = 0; i < N; ++i) scaled[i] = v[i];
        if (over.factor != 1.0f) {
#pragma unroll
            for (int i = 0; i < N; ++i) scaled[i] *= over.factor;
        }
        e2m1_words<N>(scaled, [&](float m) { return over.of_scaled(m); }, words);
    }
#pragma unroll
    for (int w = 0; w < N / 8; ++w) words[w] = step > 0.0f ? words[w] : 0u;
}

// The same for 16 packed numbers of a 16-bit T with magnitudes up to 6.5 steps; 2^-60 <= step <= 2^60. Splitting the
// reciprocal into two parts saves a step of the division: tests/ops/quant/test_nvfp4.py compares both for all steps and
// the numbers that are next to a tie. The smaller part is raised by its last bit for the one step that needs it.
template <typename T>
RTK_DEVICE void e2m1_pack_elements(const u32 (&raw)[8], float step, u32 (&words)[2]) {
    const float inverse = inverse_scale(step), rest = fmaf(-inverse, step, 1.0f) * inverse;
    const float low = fmaf(fabsf(rest), 0x1p-23f, rest);
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        const u32* const own = raw + 4 * w;
        float q[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float pair[2];
            unpack<T, 2>(Raw<4>{RTK_HAS_FP4_CVT ? own[i] : own[i] & 0x7fff7fffu}, pair);
            q[2 * i] = fmaf(pair[0], inverse, pair[0] * low);
            q[2 * i + 1] = fmaf(pair[1], inverse, pair[1] * low);
        }
#if RTK_HAS_FP4_CVT
        words[w] = ptx::cvt_e2m1x8(q);
#else
        // Signs of numbers at even positions, then of the others, in the upper bits of four bytes.
        const u32 first = __byte_perm(own[0], own[1], 0x7351), then = __byte_perm(own[2], own[3], 0x7351);
        const u32 low_signs = __byte_perm(first, then, 0x5410), high_signs = __byte_perm(first, then, 0x7632);
        words[w] = e2m1_magnitudes<false>(q) | (low_signs >> 4 & 0x08080808u) | (high_signs & 0x80808080u);
#endif
    }
}

// The squared error of finite values with a given scale.
RTK_DEVICE float nvfp4_error(const float (&v)[16], float step, int ties) {
    const Quotient over(step);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float value = step > 0.0f ? e2m1_value(e2m1_rounded(v[i], over.of(v[i]), ties)) : 0.0f;
        const float off = fmaf(-value, step, v[i]);
        sum = fabsf(v[i]) < __uint_as_float(0x7f800000u) ? fmaf(off, off, sum) : sum;
    }
    return sum;
}

// The scale of 16 values with this amax; with SEARCH the one of nine candidates with the smallest error, the first one
// in case of ties.
template <bool SEARCH>
RTK_DEVICE u32 nvfp4_scale_of(const float (&v)[16], float amax, float g, int rule, int ties) {
    const float sixth = Quotient(fmaxf(6.0f * g, 1e-12f)).of(amax);
    if (SEARCH && rule == kScaleSearch) {
        u32 best = 0;
        float smallest = 0.0f;
#pragma unroll 1
        for (int i = 0; i < 9; ++i) {  // 0.375 to 1.25 by eighths, 1.5
            const u32 scale = e4m3_nearest(sixth * (i < 8 ? 0.375f + 0.125f * static_cast<float>(i) : 1.5f));
            const float error = nvfp4_error(v, g * e4m3_value(scale), ties);
            if (i == 0 || error < smallest) best = scale, smallest = error;
        }
        return best;
    }
    const u32 scale = e4m3_nearest(sixth);
    return rule == kScaleUp && scale < 0x7eu && e4m3_value(scale) < sixth ? scale + 1u : scale;
}

// Position of the scale of a row and block in tiles of 128 x 4, 512 bytes each.
RTK_DEVICE i64 swizzled_place(i64 row, i64 block, i64 blocks) {
    const i64 tile = (row >> 7) * ((blocks + 3) >> 2) + (block >> 2);
    return tile * 512 + (row & 31) * 16 + ((row & 127) >> 5) * 4 + (block & 3);
}

// The scale byte of MX for values with this amax: `exponent` is that of the largest code. `up`: rounded up, so that no
// code is clipped.
RTK_DEVICE u32 mx_scale(float amax, int exponent, float largest, bool up) {
    int byte = static_cast<int>(__float_as_uint(amax) >> 23) - exponent;
    if (up) {
        const u32 bits = __float_as_uint(amax / largest);
        byte = static_cast<int>(bits >> 23);
        byte += byte > 0 ? (bits & 0x7fffffu) > 0u : (bits & 0x7fffffu) > 0x400000u;
    }
    return static_cast<u32>(min(max(byte, 0), 254));
}

// 2^(byte - 127), NaN for 255; and its reciprocal.
RTK_DEVICE float e8m0_value(u32 byte) {
    return __uint_as_float(byte == 0u ? 0x400000u : byte == 255u ? 0x7fc00000u : byte << 23);
}
RTK_DEVICE float e8m0_inverse(u32 byte) { return e8m0_value(254u - byte); }

}  // namespace rtk
