// Conversions to e2m1 (sm_100a and up), two values per byte, low element first.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

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
