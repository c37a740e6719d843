// Approximate math instructions.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

// 2^x, relative error 2^-22, subnormals flushed.
RTK_DEVICE float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1/x, 1 ulp, subnormals flushed.
RTK_DEVICE float rcp(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The square root, 1 ulp, subnormals flushed.
RTK_DEVICE float sqrt_fast(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x with one bit pattern for every zero (+0) and for every NaN (0x7fffffff, the result of arithmetic with any NaN).
RTK_DEVICE float canonical(float x) {
    float y;
    asm("add.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

// The larger one; NaN (0x7fffffff) if either is.
RTK_DEVICE float max_nan(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

}  // namespace rtk::ptx
