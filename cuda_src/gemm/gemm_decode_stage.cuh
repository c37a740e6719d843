// Rows of weights as warps of decoding products load them (gemm_decode_lanes.cuh, gemm_decode_ring.cuh).
#pragma once
#include "common/abi.cuh"

namespace rtk {

inline constexpr int kDecodeWarps = 8;

// The weights as a warp loads them.
struct DecodeWeights {
    const u8* data;
    const float* scale;  // null unless scales vary along k
    i64 pitch, row_bytes;
    i64 scale_row, scale_group;  // elements from one scale to the next
    int scale_shift;             // 2^scale_shift rows share one
    int n, groups;
    bool gated;

    // Missing rows read the last one, and their results are dropped.
    RTK_DEVICE i64 row(int octet, int r) const {
        if (!gated) return min(8 * octet + r, n - 1);
        return static_cast<i64>(min(4 * octet + (r & 3), n - 1)) + (r & 4 ? n : 0);
    }
};

}  // namespace rtk
