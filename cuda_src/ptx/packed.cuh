// Arithmetic on two 16-bit floats in a word.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

// v * 0 + v: finite values stay, everything else becomes NaN.
RTK_DEVICE u32 finite_or_nan_bf16x2(u32 v) {
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %1;" : "=r"(out) : "r"(v), "r"(0));
    return out;
}
RTK_DEVICE u32 finite_or_nan_f16x2(u32 v) {
    u32 out;
    asm("fma.rn.f16x2 %0, %1, %2, %1;" : "=r"(out) : "r"(v), "r"(0));
    return out;
}

// The larger of a and |b|; a where b is NaN.
RTK_DEVICE u32 max_magnitude_bf16x2(u32 a, u32 b) {
    u32 out;
    asm("{\n .reg .b32 m;\n abs.bf16x2 m, %2;\n max.bf16x2 %0, %1, m;\n}" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
RTK_DEVICE u32 max_magnitude_f16x2(u32 a, u32 b) {
    u32 out;
    asm("{\n .reg .b32 m;\n abs.f16x2 m, %2;\n max.f16x2 %0, %1, m;\n}" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

// The larger magnitudes, with arbitrary signs; where one is NaN, the other (sm_86 and up).
RTK_DEVICE u32 max_magnitudes_bf16x2(u32 a, u32 b) {
    u32 out;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

// The larger ones; where one is NaN, the other.
RTK_DEVICE u32 max_bf16x2(u32 a, u32 b) {
    u32 out;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
RTK_DEVICE u32 max_f16x2(u32 a, u32 b) {
    u32 out;
    asm("max.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

// The larger ones; NaN where one is.
RTK_DEVICE u32 max_nan_bf16x2(u32 a, u32 b) {
    u32 out;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
RTK_DEVICE u32 max_nan_f16x2(u32 a, u32 b) {
    u32 out;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

// a * b + c, one rounding. Subnormals are kept.
RTK_DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}
RTK_DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

}  // namespace rtk::ptx
