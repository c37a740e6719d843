// Scalar functions on fp32. `Fast` versions (relative error about 2^-20, far under a 16-bit rounding) serve the
// 16-bit types; fp32 tensors get the library versions.
#pragma once
#include "common/abi.cuh"
#include "common/types.cuh"
#include "ptx/math.cuh"

namespace rtk {

template <bool kFast>
RTK_DEVICE float exponential(float x) {
    if constexpr (kFast) return ptx::ex2(x * 1.4426950408889634f);
    return expf(x);
}

template <bool kFast>
RTK_DEVICE float divide(float a, float b) {
    if constexpr (kFast) return a * ptx::rcp(b);
    return a / b;
}

// a / (1 + e^-x); a * 0 and a * 1 where x is infinite.
template <bool kFast>
RTK_DEVICE float times_sigmoid(float a, float x) {
    return divide<kFast>(a, 1.0f + exponential<kFast>(-x));
}

template <bool kFast>
RTK_DEVICE float sigmoid(float x) {
    return times_sigmoid<kFast>(1.0f, x);
}

// The normal distribution at x: its density, and the probability of a value below x.
struct Normal {
    float below, density;
};

template <bool kFast>
RTK_DEVICE Normal normal(float x) {
    constexpr float kPeak = 0.3989422804014327f;  // 1 / sqrt(2 pi)
    if constexpr (kFast) {
        // The tail beyond |x| is e^(-x^2/2) * t * P(t), t = 1 / (1 + 0.36 |x|): minimax in relative error (2^-20) over
        // 0..14, after which it is below the smallest number.
        const float bell = ptx::ex2(x * x * -0.7213475204444817f);
        const float t = ptx::rcp(1.0f + 0.36f * fabsf(x));
        float p = 0.0470580388f;
        p = p * t + -0.179770712f;
        p = p * t + 0.18096226f;
        p = p * t + 0.0265435972f;
        p = p * t + 0.139721378f;
        p = p * t + 0.141772064f;
        p = p * t + 0.143713073f;
        const float tail = bell * (t * p);
        return {x < 0.0f ? tail : 1.0f - tail, kPeak * bell};
    }
    return {0.5f * erfcf(x * -0.7071067811865476f), kPeak * expf(x * x * -0.5f)};
}

}  // namespace rtk
