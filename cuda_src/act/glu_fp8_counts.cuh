// Counts of rows per expert, beyond quant/experts.cuh.
#pragma once
#include "quant/experts.cuh"

namespace rtk {

// True if no expert's count is negative and they add up to the number of rows: for debugging.
RTK_DEVICE bool adds_up(const void* counts, i64 width, i64 experts, i64 rows) {
    i64 sum = 0;
    bool negative = false;
#pragma unroll 1
    for (i64 e = 0; e < experts; ++e) {
        const i64 count = width == 8 ? static_cast<const i64*>(counts)[e] : static_cast<const i32*>(counts)[e];
        sum += count, negative |= count < 0;
    }
    return !negative && sum == rows;
}

// The expert that owns a row; some expert must.
RTK_DEVICE int expert_of(const ExpertTable& table, u32 row) {
    int low = 0, high = table.experts;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (table.entry[middle].row <= row) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// Where an expert's rows begin if the rows of each are padded to a multiple of `pad`. All lanes of a warp call this.
RTK_DEVICE u32 padded_start(const ExpertTable& table, int expert, u32 pad) {
    u32 sum = 0;
    for (int e = static_cast<int>(threadIdx.x % kWarp); e < expert; e += kWarp)
        sum += (table.entry[e + 1].row - table.entry[e].row + pad - 1) / pad * pad;
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    return sum;
}

}  // namespace rtk
