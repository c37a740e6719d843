// Products of rows loaded straight from memory: lane 4g + t has the 16 bytes t of 64 of row g. This permutes k relative
// to mma.sync, but in the same way for both operands.
#pragma once
#include "common/convert.cuh"
#include "common/vec.cuh"
#include "ptx/mma.cuh"

namespace rtk {

template <typename T>
RTK_DEVICE void mma_16_bytes_half(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    if constexpr (is_same<T, bf16>::value) {
        ptx::mma_m16n8k16_bf16(d, a, b);
    } else if constexpr (is_same<T, fp16>::value) {
        ptx::mma_m16n8k16_f16(d, a, b);
    } else {
        ptx::mma_m16n8k32_e4m3(d, a, b);
    }
}

RTK_DEVICE Raw<16> plain_load(const u8* p) {
    const uint4 words = *reinterpret_cast<const uint4*>(p);
    return {{words.x, words.y, words.z, words.w}};
}

// d += the 64 bytes of a step: both halves of the lanes' data of rows g (`low`) and g + 8 (`high`) of a, and of row g
// of b.
template <typename T>
RTK_DEVICE void mma_64_bytes(float (&d)[4], const Raw<16>& low, const Raw<16>& high, const Raw<16>& b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u32 left[4] = {low.w[2 * half], high.w[2 * half], low.w[2 * half + 1], high.w[2 * half + 1]};
        const u32 right[2] = {b.w[2 * half], b.w[2 * half + 1]};
        mma_16_bytes_half<T>(d, left, right);
    }
}

}  // namespace rtk
