// The Walsh-Hadamard transform of blocks of 32 to 256 neighbouring elements, in natural order: z = H x, H[i][j] =
// (-1)^(number of common set bits of i and j), before normalisation. A thread holds eight neighbouring elements, and 4
// to 32 neighbouring lanes a block: stages 1, 2, 4 are within threads, the others exchange between lanes. Each stage is
// one fp32 addition or subtraction per element, so every implementation with this order of stages gives the same bits.
#pragma once
#include "common/vec.cuh"

namespace rtk {

inline constexpr int kHadamardElements = 8;

// `lanes`: block / 8. The whole warp calls this.
RTK_DEVICE void hadamard_block(float (&v)[kHadamardElements], int lanes) {
#pragma unroll
    for (int half = 1; half < kHadamardElements; half *= 2)
#pragma unroll
        for (int i = 0; i < kHadamardElements; ++i)
            if ((i & half) == 0) {
                const float a = v[i], b = v[i + half];
                v[i] = a + b;
                v[i + half] = a - b;
            }
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2)
        if (offset < lanes) {
            const float sign = (lane & offset) != 0 ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < kHadamardElements; ++i)
                v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xffffffffu, v[i], offset));
        }
}

}  // namespace rtk
