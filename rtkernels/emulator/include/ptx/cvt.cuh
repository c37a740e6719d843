// Host version of cuda_src/ptx/cvt.cuh.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

RTK_DEVICE u32 cvt_bf16x2(float lo, float hi) { return emu::f32_to_bf16(lo) | (emu::f32_to_bf16(hi) << 16); }
RTK_DEVICE u32 cvt_f16x2(float lo, float hi) { return emu::f32_to_f16(lo) | (emu::f32_to_f16(hi) << 16); }
RTK_DEVICE float cvt_f16_to_f32(u16 bits) { return emu::f16_to_f32(bits); }

#if RTK_HAS_FP8_CVT
RTK_DEVICE u16 cvt_e4m3x2(float lo, float hi) {
    return static_cast<u16>(emu::f32_to_e4m3(lo) | (emu::f32_to_e4m3(hi) << 8));
}
RTK_DEVICE u16 cvt_e5m2x2(float lo, float hi) {
    return static_cast<u16>(emu::f32_to_e5m2(lo) | (emu::f32_to_e5m2(hi) << 8));
}
RTK_DEVICE u32 cvt_e4m3x2_to_f16x2(u16 pair) {
    return cvt_f16x2(emu::e4m3_to_f32(pair & 0xffu), emu::e4m3_to_f32(pair >> 8));
}
#endif

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
