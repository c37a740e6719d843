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

}  // namespace rtk::ptx
