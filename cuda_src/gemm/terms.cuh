// Splits an fp32 number into a sum of 16-bit ones that tensor cores can multiply: each term is the rounded remainder
// after the terms before it. Two bf16 terms keep 16 bits, three keep 24; two fp16 terms keep 22, of numbers scaled into
// fp16's range.
//
// For NaN and infinities the first term carries the value and the others are 0, so always finite; unless kSafe is
// false, which turns an infinity into NaN.
#pragma once
#include "common/vec.cuh"

namespace rtk {

template <typename T>
RTK_DEVICE u32 packed_pair(float lo, float hi) {
    return is_same<T, bf16>::value ? ptx::cvt_bf16x2(lo, hi) : ptx::cvt_f16x2(lo, hi);
}

// The remainder of a number after its rounded part; 0 if that is not finite.
RTK_DEVICE float rest_of(float value, float part) {
    const float rest = value - part;
    return rest == rest ? rest : 0.0f;
}

// Splits two numbers into kTerms terms each. Magnitudes that round to infinity in T stay infinite.
template <typename T, int kTerms, bool kSafe = true>
RTK_DEVICE void split_pair(float lo, float hi, u32 (&terms)[kTerms]) {
#pragma unroll
    for (int i = 0; i < kTerms; ++i) {
        terms[i] = packed_pair<T>(lo, hi);
        if (i + 1 < kTerms) {
            float parts[2];
            unpack<T, 2>(Raw<4>{{terms[i]}}, parts);
            lo = kSafe ? rest_of(lo, parts[0]) : lo - parts[0];
            hi = kSafe ? rest_of(hi, parts[1]) : hi - parts[1];
        }
    }
}

// The power of two that brings magnitudes up to `largest` below 2^15; 1 if `largest` says nothing (0, or not finite).
RTK_DEVICE float fp16_factor(float largest) {
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
    if (largest == 0.0f || exponent == 255) return 1.0f;
    return __uint_as_float(static_cast<u32>(min(127 + 127 + 14 - exponent, 254)) << 23);
}

}  // namespace rtk
