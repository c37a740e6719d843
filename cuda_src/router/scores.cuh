// Router scores in fp32.
#pragma once
#include "common/math.cuh"
#include "common/reduce.cuh"

namespace rtk {

inline constexpr float kMinusInfinity = -__builtin_bit_cast(float, 0x7f800000u);

// Options of a call, as bits of one argument.
enum RouterMode : int { kSoftmax = 1, kScoreFirst = 2, kRenormalize = 4 };

struct Largest {
    static constexpr float kIdentity = kMinusInfinity;
    RTK_DEVICE static float apply(float a, float b) { return fmaxf(a, b); }
};

// Differences from it are not NaN in a row of only -inf; such a row has scores 0.
RTK_DEVICE float anchor_of(float top) { return top == kMinusInfinity ? 0.0f : top; }

RTK_DEVICE float inverse_or_zero(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

RTK_DEVICE float sigmoid_score(float x) { return ptx::rcp(1.0f + expf(-x)); }

}  // namespace rtk
