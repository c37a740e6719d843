// RMS normalisation of each group of channels, times a sigmoid gate:
//     y = n * w * s,  n = x * rstd,  rstd = 1/sqrt(mean over the group of x^2 + eps),  s = sigmoid(gate),
// w the weight of the channel (null: ones). All kernels also take gate * sigmoid(gate) as s, and s before the norm. Arithmetic is fp32, rounded once at each store.
//
// A token has `groups` groups of `cols` channels. A row is one group of one token; a group of threads (RowGroup) works
// on a row. Tokens are indexed in two levels, token = o * inner_size + i, and every tensor has a token stride for each:
// so x may be [batch, sequence, ...] while gate, y and their gradients are [sequence, batch, ...], and inputs need not
// be dense. The weight of group g starts at g * weight_group: 0 if all groups share it.
#pragma once
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "norm/common.cuh"

namespace rtk {

// sigmoid(x) and 1 - sigmoid(x), both without cancellation.
struct Gate {
    float open, closed;
};

template <typename T>
RTK_DEVICE Gate gate_at(float x) {
    constexpr bool kFast = sizeof(T) == 2;
    const float e = exponential<kFast>(-fabsf(x));
    float larger, smaller;
    if constexpr (kFast) {
        larger = ptx::rcp(1.0f + e);
        smaller = e * larger;
    } else {
        smaller = e / (1.0f + e);
        larger = 1.0f - smaller;
    }
    return {x < 0.0f ? smaller : larger, x < 0.0f ? larger : smaller};
}

// How a gate acts: bits of the argument `form` of the kernels that have one.
inline constexpr i64 kSiluGate = 1;   // x * sigmoid(x) instead of sigmoid(x)
inline constexpr i64 kGateFirst = 2;  // multiplies x before the norm: n = h * rstd, h = x * s

// A gate and its derivative.
struct GateSlope {
    float value, slope;
};

RTK_DEVICE GateSlope slope_at(float x, Gate s, i64 form) {
    if (form & kSiluGate) return {x * s.open, s.open * (1.0f + x * s.closed)};
    return {s.open, s.open * s.closed};
}

template <typename T>
RTK_DEVICE GateSlope gate_slope(float x, i64 form) {
    return slope_at(x, gate_at<T>(x), form);
}

// 1 / sqrt(sum / count + eps). An infinite sum gives 0.
RTK_DEVICE float inverse_rms(float square, i64 count, double eps) {
    return rsqrtf(square * ptx::rcp(static_cast<float>(count)) + static_cast<float>(eps));
}

}  // namespace rtk
