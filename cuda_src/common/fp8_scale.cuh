// The fp8 recipe: computes the scale of values that share one. A stored scale is the factor that restores the values, v
// ~ q * scale:
//
//     amax  = largest |v| that is finite                (0 if there is none)
//     scale = max(amax / largest fp8 value, 1e-30)      (rounded up to a power of two if asked for)
//     q     = fp8(v * (1 / scale))                      (both fp32 operations rounded to nearest)
//
// NaN and infinities do not affect the scale: NaN becomes the code 0x7f, an infinity the largest finite code.
#pragma once
#include "common/abi.cuh"
#include "common/convert.cuh"
#include "common/types.cuh"
#include "ptx/math.cuh"

namespace rtk {

constexpr float kScaleFloor = 1e-30f;

// Maximum that ignores NaN, for magnitudes.
struct MaxNumber {
    static constexpr float kIdentity = 0.0f;
    RTK_DEVICE static float apply(float a, float b) { return fmaxf(a, b); }
};

// The larger of `max_abs` and |v|, if v is finite. v * 0 + v is v for finite values and NaN for all others, which fmaxf
// ignores.
RTK_DEVICE float max_finite(float max_abs, float v) { return fmaxf(max_abs, fabsf(fmaf(v, 0.0f, v))); }

// Largest finite magnitude of N values, 0 if there is none.
template <int N>
RTK_DEVICE float finite_amax(const float (&v)[N]) {
    float max_abs = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) max_abs = max_finite(max_abs, v[i]);
    return max_abs;
}

// The scale of values with this amax (finite, not negative). Its reciprocal is a normal number.
template <typename F8>
RTK_DEVICE float fp8_scale(float amax, bool pow2) {
    constexpr float kMax = fp8_traits<F8>::kMax, kInverse = 1.0f / kMax;
    // amax / kMax correctly rounded: one corrected step, without the range checks of a division. Exact for every
    // amax whose quotient is above the floor.
    const float near = amax * kInverse;
    const float quotient = fmaf(fmaf(-near, kMax, amax), kInverse, near);
    const u32 bits = __float_as_uint(fmaxf(quotient, kScaleFloor));
    return __uint_as_float(pow2 ? (bits + 0x7fffffu) & 0xff800000u : bits);
}

// The reciprocal of a scale, correctly rounded: scales are far from the range where __frcp_rn takes its slow path.
RTK_DEVICE float inverse_scale(float scale) {
    const float near = ptx::rcp(scale);
    return fmaf(near, fmaf(-scale, near, 1.0f), near);
}

template <typename F8, int N>
RTK_DEVICE Raw<N> quantized(const float (&v)[N], float inverse_scale) {
    float scaled[N];
#pragma unroll
    for (int i = 0; i < N; ++i) scaled[i] = v[i] * inverse_scale;
    return pack<F8, N>(scaled);
}

}  // namespace rtk
