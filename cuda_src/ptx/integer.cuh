// Integer instructions that the compiler does not find where a factor is the lower half of a 64-bit argument.
#pragma once
#include "common/abi.cuh"

namespace rtk::ptx {

// a * b + c.
RTK_DEVICE u64 mad_wide(u32 a, u32 b, u64 c) {
    u64 r;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(r) : "r"(a), "r"(b), "l"(c));
    return r;
}

// The upper half of a * b.
RTK_DEVICE u32 mul_hi(u32 a, u32 b) {
    u32 r;
    asm("mul.hi.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

}  // namespace rtk::ptx
