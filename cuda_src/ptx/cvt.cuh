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

#if RTK_HAS_FP4_CVT
// Eight fp32 to e2m1, nearest even, saturating to +-6; NaN becomes 6.
RTK_DEVICE u32 cvt_e2m1x8(const float (&v)[8]) {
    u32 out;
    asm("{\n"
        ".reg .b8 b0, b1, b2, b3;\n"
        "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
        "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
        "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
        "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
        "mov.b32 %0, {b0, b1, b2, b3};\n"
        "}\n"
        : "=r"(out)
        : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
    return out;
}
#endif

}  // namespace rtk::ptx
