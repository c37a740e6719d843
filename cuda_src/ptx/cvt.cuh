// Conversion instructions, one function each. Pairs are packed low element first.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

// Two fp32 to bf16, nearest even; NaN becomes 0x7fff.
RTK_DEVICE u32 cvt_bf16x2(float lo, float hi) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
    return out;
}

// Two fp32 to fp16, nearest even; overflow becomes infinity.
RTK_DEVICE u32 cvt_f16x2(float lo, float hi) {
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
    return out;
}

RTK_DEVICE float cvt_f16_to_f32(u16 bits) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
    return out;
}

#if RTK_HAS_FP8_CVT
// Two fp32 to e4m3, nearest even, saturating to +-448.
RTK_DEVICE u16 cvt_e4m3x2(float lo, float hi) {
    u16 out;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(hi), "f"(lo));
    return out;
}

// Two fp32 to e5m2, nearest even, saturating to +-57344.
RTK_DEVICE u16 cvt_e5m2x2(float lo, float hi) {
    u16 out;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(out) : "f"(hi), "f"(lo));
    return out;
}

// Two e4m3 to fp16, exact.
RTK_DEVICE u32 cvt_e4m3x2_to_f16x2(u16 pair) {
    u32 out;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(pair));
    return out;
}
#endif

}  // namespace rtk::ptx
