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

}  // namespace rtk::ptx
