// Conversions between fp32 and the storage types: nearest even, one rounding. fp8 saturates to the largest finite value
// and keeps NaN (0x7f); targets without the conversion instructions (below sm_89) use the integer versions here, which
// give the same bits for every input.
#pragma once
#include "common/abi.cuh"
#include "common/types.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldst.cuh"

namespace rtk {

// ---- one fp8 code in integer arithmetic -------------------------------------------------------------------------

// kMantissa bits of fraction, exponent bias kBias, largest finite code kMaxCode.
template <int kMantissa, int kBias, u32 kMaxCode>
RTK_DEVICE u32 encode_fp8(float value, float largest) {
    const u32 bits = __float_as_uint(value);
    const u32 sign = (bits >> 24) & 0x80u;
    const u32 magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fu;
    if (magnitude >= __float_as_uint(largest)) return sign | kMaxCode;
    constexpr int kShift = 23 - kMantissa;
    constexpr u32 kSmallestNormal = static_cast<u32>(127 - kBias + 1) << 23;
    if (magnitude < kSmallestNormal) {
        // Adding 2^23 subnormal steps leaves the nearest-even multiple of that step in the low bits of the sum.
        constexpr u32 kMagic = static_cast<u32>(127 + 23 + 1 - kBias - kMantissa) << 23;
        return sign | (__float_as_uint(__uint_as_float(magnitude) + __uint_as_float(kMagic)) - kMagic);
    }
    const u32 odd = (magnitude >> kShift) & 1u;
    const u32 rounded = magnitude + ((1u << (kShift - 1)) - 1u) + odd;
    return sign | ((rounded >> kShift) - (static_cast<u32>(127 - kBias) << kMantissa));
}

RTK_DEVICE u32 encode_e4m3(float v) { return encode_fp8<3, 7, 0x7eu>(v, 448.0f); }
RTK_DEVICE u32 encode_e5m2(float v) { return encode_fp8<2, 15, 0x7bu>(v, 57344.0f); }

RTK_DEVICE float decode_e4m3(u32 code) {
    const float magnitude = (code & 0x7fu) == 0x7fu ? __uint_as_float(0x7fffffffu)
                                                    : __uint_as_float((code & 0x7fu) << 20) * 0x1p120f;
    return (code & 0x80u) ? -magnitude : magnitude;
}

// ---- two at a time, the fastest way on each target --------------------------------------------------------------

template <typename F8>
RTK_DEVICE u32 to_fp8x2(float lo, float hi) {
#if RTK_HAS_FP8_CVT
    if constexpr (is_same<F8, e4m3>::value) return ptx::cvt_e4m3x2(lo, hi);
    return ptx::cvt_e5m2x2(lo, hi);
#else
    if constexpr (is_same<F8, e4m3>::value) return encode_e4m3(lo) | (encode_e4m3(hi) << 8);
    return encode_e5m2(lo) | (encode_e5m2(hi) << 8);
#endif
}

template <typename F8>
RTK_DEVICE void from_fp8x2(u32 pair, float& lo, float& hi) {
    if constexpr (is_same<F8, e5m2>::value) {  // e5m2 is the upper byte of fp16
        lo = ptx::cvt_f16_to_f32(static_cast<u16>(pair << 8));
        hi = ptx::cvt_f16_to_f32(static_cast<u16>(pair & 0xff00u));
    } else {
#if RTK_HAS_FP8_CVT
        const u32 halves = ptx::cvt_e4m3x2_to_f16x2(static_cast<u16>(pair));
        lo = ptx::cvt_f16_to_f32(static_cast<u16>(halves));
        hi = ptx::cvt_f16_to_f32(static_cast<u16>(halves >> 16));
#else
        lo = decode_e4m3(pair & 0xffu);
        hi = decode_e4m3((pair >> 8) & 0xffu);
#endif
    }
}

// ---- N elements between an access-sized Raw and fp32 registers --------------------------------------------------

template <typename T, int N>
RTK_DEVICE void unpack(const Raw<sizeof(T) * N>& raw, float (&f)[N]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < N; ++i) f[i] = __uint_as_float(raw.w[i]);
    } else if constexpr (is_same<T, bf16>::value) {
#pragma unroll
        for (int i = 0; i < N; ++i)
            f[i] = __uint_as_float((i & 1) ? raw.w[i / 2] & 0xffff0000u : raw.w[i / 2] << 16);
    } else if constexpr (is_same<T, fp16>::value) {
#pragma unroll
        for (int i = 0; i < N; ++i) f[i] = ptx::cvt_f16_to_f32(static_cast<u16>(raw.w[i / 2] >> ((i & 1) * 16)));
    } else if constexpr (N == 1) {
        float ignored;
        from_fp8x2<T>(raw.w[0] & 0xffu, f[0], ignored);
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 2) from_fp8x2<T>((raw.w[i / 4] >> ((i & 2) * 8)) & 0xffffu, f[i], f[i + 1]);
    }
}

template <typename T, int N>
RTK_DEVICE Raw<sizeof(T) * N> pack(const float (&f)[N]) {
    Raw<sizeof(T) * N> raw;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < N; ++i) raw.w[i] = __float_as_uint(f[i]);
    } else if constexpr (sizeof(T) == 2) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const float hi = N == 1 ? 0.0f : f[(i + 1) % N];
            raw.w[i / 2] = is_same<T, bf16>::value ? ptx::cvt_bf16x2(f[i], hi) : ptx::cvt_f16x2(f[i], hi);
        }
    } else if constexpr (N == 1) {
        raw.w[0] = to_fp8x2<T>(f[0], 0.0f) & 0xffu;
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            raw.w[i / 4] = to_fp8x2<T>(f[i], f[(i + 1) % N]);
            if constexpr (N >= 4) raw.w[i / 4] |= to_fp8x2<T>(f[(i + 2) % N], f[(i + 3) % N]) << 16;
        }
    }
    return raw;
}

// The value a store of T would hold, in fp32.
template <typename T>
RTK_DEVICE float round_to(float v) {
    const float in[1] = {v};
    float out[1];
    unpack<T, 1>(pack<T, 1>(in), out);
    return out[0];
}

}  // namespace rtk
