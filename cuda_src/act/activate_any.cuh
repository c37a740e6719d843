// Activations that are chosen at run time: a switch for N values, so that one variant of a kernel serves all of them.
#pragma once
#include "act/activations.cuh"

namespace rtk {

inline constexpr int kIdentity = 6, kSwigluOai = 7;  // of the switch below; ACT_TYPES in ops/act/glu.py has the same order

template <typename Act, bool kFast, bool SLOPE, int N>
RTK_DEVICE void activate(bool slope, float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const ValueSlope at = Act::template at<kFast>(v[i]);
        v[i] = SLOPE && slope ? at.slope : at.value;
    }
}

template <bool kFast, bool SLOPE, int N>
RTK_DEVICE void activate_any(int act, bool slope, float (&v)[N]) {
    switch (act) {
        case 0: activate<Silu, kFast, SLOPE>(slope, v); break;
        case 1: activate<GeluTanh, kFast, SLOPE>(slope, v); break;
        case 2: activate<GeluErf, kFast, SLOPE>(slope, v); break;
        case 3: activate<Relu, kFast, SLOPE>(slope, v); break;
        case 4: activate<Relu2, kFast, SLOPE>(slope, v); break;
        case 5: activate<Sigmoid, kFast, SLOPE>(slope, v); break;
        case kIdentity: break;
        default: activate<SwigluOai, kFast, SLOPE>(slope, v); break;
    }
}

}  // namespace rtk
