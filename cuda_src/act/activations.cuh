// Activation functions with their derivatives. Each is a type with `at<kFast>(x)`, which gives both; the compiler drops
// whichever the caller does not use. kFast is for 16-bit tensors (common/math.cuh).
//
// NaN stays NaN; at the infinities value and slope are those of torch, NaN where it computes 0 * inf.
#pragma once
#include "common/math.cuh"

namespace rtk {

struct ValueSlope {
    float value, slope;
};

// x * sigmoid(x)
struct Silu {
    template <bool kFast>
    RTK_DEVICE static ValueSlope at(float x) {
        const auto [s, y] = sigmoid_gate<kFast>(x, x);
        return {y, s + y * (1.0f - s)};
    }
};

// x * (1 + tanh(u)) / 2 with u = sqrt(2/pi) * (x + 0.044715 x^3). (1 + tanh(u)) / 2 is sigmoid(2u), which does not
// cancel where tanh(u) is near -1.
struct GeluTanh {
    template <bool kFast>
    RTK_DEVICE static ValueSlope at(float x) {
        constexpr float kLinear = 1.5957691216057308f, kCubic = kLinear * 0.044715f;  // of 2u
        const float square = x * x;
        const auto [s, y] = sigmoid_gate<kFast>(x, x * (kLinear + kCubic * square));
        return {y, s + y * (1.0f - s) * (kLinear + 3.0f * kCubic * square)};
    }
};

// x * Phi(x), Phi the normal distribution function
struct GeluErf {
    template <bool kFast>
    RTK_DEVICE static ValueSlope at(float x) {
        const Normal n = normal<kFast>(x);
        return {x * n.below, n.below + x * n.density};
    }
};

// The derivative at 0 is 0.
struct Relu {
    template <bool kFast>
    RTK_DEVICE static ValueSlope at(float x) {
        return {x <= 0.0f ? 0.0f : x, x <= 0.0f ? 0.0f : 1.0f};
    }
};

// relu(x)^2
struct Relu2 {
    template <bool kFast>
    RTK_DEVICE static ValueSlope at(float x) {
        const float r = x <= 0.0f ? 0.0f : x;
        return {r * r, 2.0f * r};
    }
};

struct Sigmoid {
    template <bool kFast>
    RTK_DEVICE static ValueSlope at(float x) {
        const float s = sigmoid<kFast>(x);
        return {s, s * sigmoid<kFast>(-x)};  // 1 - s would cancel where s is near 1
    }
};

struct Identity {
    template <bool kFast>
    RTK_DEVICE static ValueSlope at(float x) {
        return {x, 1.0f};
    }
};

// x * sigmoid(1.702 x)
struct QuickGelu {
    template <bool kFast>
    RTK_DEVICE static ValueSlope at(float x) {
        constexpr float kAlpha = 1.702f;
        const auto [s, y] = sigmoid_gate<kFast>(x, kAlpha * x);
        return {y, s + kAlpha * y * (1.0f - s)};
    }
};

// Act of a gate that is at most `limit` (slope 0 beyond). SHIFT is added to up, which is clamped at both sides.
template <typename Act, int SHIFT>
struct Clamped {
    static constexpr float kLimit = 7.0f, kShift = SHIFT;

    template <bool kFast>
    RTK_DEVICE static ValueSlope at(float x, float limit = kLimit) {
        const bool cut = x > limit;
        const ValueSlope y = Act::template at<kFast>(cut ? limit : x);
        return {y.value, y.slope * (cut ? 0.0f : 1.0f)};
    }
};

using SwigluOai = Clamped<QuickGelu, 1>;  // of GPT-OSS
using ClampedSilu = Clamped<Silu, 0>;     // of DeepSeek-V4

template <typename Act>
inline constexpr bool kClamps = is_same<Act, SwigluOai>::value || is_same<Act, ClampedSilu>::value;

// The activated gate; activations that do not clamp ignore the limit.
template <typename Act, bool kFast>
RTK_DEVICE ValueSlope gated(float gate, float limit) {
    if constexpr (kClamps<Act>) {
        return Act::template at<kFast>(gate, limit);
    } else {
        return Act::template at<kFast>(gate);
    }
}

// The factor of the activated gate, as a function of `up`: up itself, for most activations.
template <typename Act>
RTK_DEVICE ValueSlope partner(float up, float limit = SwigluOai::kLimit) {
    if constexpr (kClamps<Act>) {
        const bool cut = fabsf(up) > limit;
        return {(cut ? copysignf(limit, up) : up) + Act::kShift, cut ? 0.0f : 1.0f};
    } else {
        return {up, 1.0f};
    }
}

}  // namespace rtk
