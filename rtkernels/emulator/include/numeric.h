// The small float formats, bit for bit as the conversion instructions produce them.
#pragma once

namespace emu {

inline unsigned bits_of(float x) { return __builtin_bit_cast(unsigned, x); }
inline float float_of(unsigned x) { return __builtin_bit_cast(float, x); }

// Nearest-even code of the fp32 magnitude `m` (sign cleared, finite) in a format with kMantissa fraction bits.
// Overflow carries on into codes past the largest finite one; the callers decide what those mean.
template <int kMantissa, int kBias>
inline unsigned round_magnitude(unsigned m) {
    int exponent = static_cast<int>(m >> 23);
    unsigned fraction = m & 0x7fffffu;
    if (exponent > 0) fraction |= 0x800000u;
    if (exponent == 0) exponent = 1;
    int target = exponent - 127 + kBias, shift = 23 - kMantissa;
    if (target < 1) shift += 1 - target, target = 1;
    if (shift > 25) return 0;
    unsigned code = (static_cast<unsigned>(target - 1) << kMantissa) + (fraction >> shift);
    const unsigned rest = fraction & ((1u << shift) - 1u), half = 1u << (shift - 1);
    if (rest > half || (rest == half && (code & 1u))) ++code;
    return code;
}

// kInfinity: the code of infinity, kSaturate: the largest finite code (0: overflow becomes infinity).
template <int kMantissa, int kBias, unsigned kInfinity, unsigned kSaturate, unsigned kNan, int kSignShift>
inline unsigned encode(float x) {
    const unsigned m = bits_of(x) & 0x7fffffffu, sign = (bits_of(x) >> 31) << kSignShift;
    if (m > 0x7f800000u) return kNan;  // the instructions give one NaN, without sign
    unsigned code = m == 0x7f800000u ? 0xffffu : round_magnitude<kMantissa, kBias>(m);
    if (kSaturate != 0 && code > kSaturate) code = kSaturate;
    if (kSaturate == 0 && code > kInfinity) code = kInfinity;
    return sign | code;
}

inline unsigned f32_to_bf16(float x) { return encode<7, 127, 0x7f80u, 0u, 0x7fffu, 15>(x); }
inline unsigned f32_to_f16(float x) { return encode<10, 15, 0x7c00u, 0u, 0x7fffu, 15>(x); }
inline unsigned f32_to_e4m3(float x) { return encode<3, 7, 0u, 0x7eu, 0x7fu, 7>(x); }
inline unsigned f32_to_e5m2(float x) { return encode<2, 15, 0u, 0x7bu, 0x7fu, 7>(x); }

inline float bf16_to_f32(unsigned code) { return float_of(code << 16); }

inline float f16_to_f32(unsigned code) {
    const unsigned sign = (code & 0x8000u) << 16, exponent = (code >> 10) & 31u, fraction = code & 0x3ffu;
    if (exponent == 31) return float_of(fraction ? 0x7fffffffu : sign | 0x7f800000u);
    if (exponent == 0) {
        const float value = static_cast<float>(fraction) * 0x1p-24f;
        return sign ? -value : value;
    }
    return float_of(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

inline float e5m2_to_f32(unsigned code) { return f16_to_f32(code << 8); }

inline float e4m3_to_f32(unsigned code) {
    const unsigned exponent = (code >> 3) & 15u, fraction = code & 7u;
    if ((code & 0x7fu) == 0x7fu) return float_of(0x7fffffffu);
    const float value = exponent ? float_of(((exponent + 120u) << 23) | (fraction << 20))
                                 : static_cast<float>(fraction) * 0x1p-9f;
    return (code & 0x80u) ? -value : value;
}

// tf32 operands of mma.sync: the instruction ignores the low 13 bits.
inline float tf32_to_f32(unsigned bits) { return float_of(bits & 0xffffe000u); }

inline float flush(float x) {  // .ftz
    return (bits_of(x) & 0x7f800000u) ? x : float_of(bits_of(x) & 0x80000000u);
}

}  // namespace emu
