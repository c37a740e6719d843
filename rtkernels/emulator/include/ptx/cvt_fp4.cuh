// Host version of cuda_src/ptx/cvt_fp4.cuh.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

#if RTK_HAS_FP4_CVT
RTK_DEVICE u32 cvt_e2m1x8(const float (&v)[8]) {
    constexpr float kHalfway[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    u32 out = 0;
    for (int i = 0; i < 8; ++i) {
        const bool nan = v[i] != v[i];
        const float magnitude = fabsf(v[i]);
        u32 code = nan ? 7u : 0u;
        for (u32 k = 0; k < 7; ++k) code += magnitude > kHalfway[k] || (magnitude == kHalfway[k] && k % 2 == 1) ? 1u : 0u;
        out |= (code | (!nan && __float_as_uint(v[i]) >> 31 ? 8u : 0u)) << (4 * i);
    }
    return out;
}
#endif

}  // namespace rtk::ptx
