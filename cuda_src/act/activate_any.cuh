// Activations chosen at run time: a switch for N values, so that one variant of a kernel serves all of them.
#pragma once
#include "act/activations.cuh"

namespace rtk {

inline constexpr int kIdentity = 6, kSwigluOai = 7, kQuickGelu = 8;  // ACT_TYPES in ops/act/glu_plan.py has this order

template <typename Act, bool kFast, bool SLOPE, int N>
RTK_DEVICE void activate(bool slope, float (&v)[N]) {
    if (SLOPE && slope) {  // uniform across the launch, so outside of the loop
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = Act::template at<kFast>(v[i]).slope;
        return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = Act::template at<kFast>(v[i]).value;
}

// Comparisons, not a switch: a jump table would be loaded from memory.
template <bool kFast, bool SLOPE, int N>
RTK_DEVICE void activate_any(int act, bool slope, float (&v)[N]) {
    if (act >= kIdentity) {
        if (act == kSwigluOai) activate<SwigluOai, kFast, SLOPE>(slope, v);
        if (act == kQuickGelu) activate<QuickGelu, kFast, SLOPE>(slope, v);
    } else if (act < 2) {
        if (act == 0) {
            activate<Silu, kFast, SLOPE>(slope, v);
        } else {
            activate<GeluTanh, kFast, SLOPE>(slope, v);
        }
    } else if (act < 4) {
        if (act == 2) {
            activate<GeluErf, kFast, SLOPE>(slope, v);
        } else {
            activate<Relu, kFast, SLOPE>(slope, v);
        }
    } else if (act == 4) {
        activate<Relu2, kFast, SLOPE>(slope, v);
    } else {
        activate<Sigmoid, kFast, SLOPE>(slope, v);
    }
}

}  // namespace rtk
