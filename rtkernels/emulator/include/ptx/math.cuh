// Host version of cuda_src/ptx/math.cuh: the exact value rounded, where the instruction is within 1 or 2 ulp of it.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

RTK_DEVICE float ex2(float x) { return emu::flush(__builtin_exp2f(emu::flush(x))); }
RTK_DEVICE float rcp(float x) { return emu::flush(1.0f / emu::flush(x)); }
RTK_DEVICE float sqrt_fast(float x) { return emu::flush(__builtin_sqrtf(emu::flush(x))); }
RTK_DEVICE float canonical(float x) { return x != x ? emu::float_of(0x7fffffffu) : x + 0.0f; }
RTK_DEVICE float max_nan(float x, float y) {
    return x != x || y != y ? emu::float_of(0x7fffffffu) : x > y || (x == y && !__builtin_signbit(x)) ? x : y;
}

}  // namespace rtk::ptx
