// Codes of one byte for values that share a scale: fp8 as in common/fp8_scale.cuh, or int8 from -127 to 127, rounded to
// nearest even; NaN becomes 0 and an infinity +-127.
#pragma once
#include "common/fp8_scale.cuh"

namespace rtk {

struct int8 {  // a type of codes only
    u8 bits;
};
template <>
struct fp8_traits<int8> {
    enum { kMax = 127 };
};

// The codes of v * inverse.
template <typename Code>
struct ByteCodes {
    template <int N>
    RTK_DEVICE static Raw<N> of(const float (&v)[N], float inverse) {
        return quantized<Code>(v, inverse);
    }
};

template <>
struct ByteCodes<int8> {
    // 1.5 * 2^23 plus a number is rounded to an integer, whose last byte is the code; conversions to integers have an
    // eighth of the throughput. Products and sums are rounded separately: a fused one would decide ties differently.
    // Finite products are at most 127 and a rounding, so only infinities and NaN give sums with kNotFinite, a bit of
    // their exponent.
    template <int N>
    RTK_DEVICE static Raw<N> of(const float (&v)[N], float inverse) {
        constexpr u32 kNotFinite = 0x20000000u, kFraction = 0x7fffffu;
        u32 sums[N], all = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            sums[i] = __float_as_uint(__fadd_rn(__fmul_rn(v[i], inverse), 12582912.0f));
            all |= sums[i];
        }
        if (all & kNotFinite) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const u32 largest = sums[i] >> 31 ? 0x81u : 0x7fu;
                if (sums[i] & kNotFinite) sums[i] = sums[i] & kFraction ? 0 : largest;
            }
        }
        Raw<N> raw;
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const u32 low = __byte_perm(sums[i], sums[i + 1], 0x0040), high = __byte_perm(sums[i + 2], sums[i + 3], 0x0040);
            raw.w[i / 4] = __byte_perm(low, high, 0x5410);
        }
        return raw;
    }
};

}  // namespace rtk
