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

// 1 / (1 + e^-x)
template <bool kFast>
RTK_DEVICE float sigmoid(float x) {
    if constexpr (kFast) return ptx::rcp(1.0f + exponential<true>(-x));
    return 1.0f / (1.0f + expf(-x));
}

// sigmoid(x), and its product with `a`, which has the sign of x.
struct SigmoidGate {
    float sigmoid, product;
};

template <bool kFast>
RTK_DEVICE SigmoidGate sigmoid_gate(float a, float x) {
    if constexpr (kFast) {
        const float s = sigmoid<true>(x);
        return {s, a * s};
    }
    const float e = expf(-fabsf(x)), rest = e / (1.0f + e);
    if (x < 0.0f) return {rest, a * rest};
    // a * (1 - rest) without rounding the difference: fp32 results then have the accuracy of torch's formulas.
    return {1.0f - rest, rest == 0.0f ? a : fmaf(-a, rest, a)};
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
        // 0..14; beyond that it underflows.
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
