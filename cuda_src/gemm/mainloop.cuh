// What the wgmma kernels of the router share: a block of two consumer warpgroups, each with 64 of the 128 rows, and
// a third one of which a single thread works: it asks the copy engine for tiles. Sums are in registers.
#pragma once
#include "gemm/operand.cuh"
#include "gemm/terms.cuh"
#include "ptx/pdl.cuh"
#include "ptx/registers.cuh"
#include "ptx/wgmma.cuh"

namespace rtk {

inline constexpr int kRouterThreads = 384;  // 168 registers each at the start
inline constexpr int kProducerRegisters = 40;
inline constexpr int kConsumerRegisters = 232;
inline constexpr int kConsumerWarps = 8;
inline constexpr int kRouterTile = 128;
inline constexpr u32 kTileBytes = kRouterTile * kTileRow;  // 128 rows of 64 16-bit elements, or 64 rows of 128
inline constexpr int kDepthSteps = kBlockDepth / 16;

// Where this thread's sums are (ptx/wgmma.cuh): d[4j + 2r + c] is row + 8r, column + 8j + c of the tile.
struct Fragment {
    int warp, lane, row, column;

    RTK_DEVICE Fragment() {
        warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0);  // known to be uniform
        lane = threadIdx.x % kWarp;
        row = warp * 16 + lane / 4;
        column = lane % 4 * 2;
    }
};

template <int N>
RTK_DEVICE void add_to(float (&sums)[N], const float (&part)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] += part[i];
}

template <int N>
RTK_DEVICE void set_zero(float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] = 0.0f;
}

}  // namespace rtk
