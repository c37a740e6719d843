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

// 1 / (1 + e^-x); 0 and 1 at the infinities.
template <bool kFast>
RTK_DEVICE float sigmoid(float x) {
    if constexpr (kFast) return ptx::rcp(1.0f + exponential<true>(-x));
    return 1.0f / (1.0f + expf(-x));
}

}  // namespace rtk
