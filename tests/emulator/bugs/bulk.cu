// Rows of 128 numbers pass through a ring of two stages: lane 0 of the first warp has them copied, the second warp
// doubles them. `fault` plants a bug; kFencesWrites is none.
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace rtk {

inline constexpr int kNoFault = 0, kNoWait = 1, kOverwrites = 2, kKeepsStages = 3, kArrivesTwice = 4,
                     kNoInitFence = 5, kNoBarrierAfterInit = 6, kWritesStages = 7, kFencesWrites = 8;

__global__ void ring_of_rows(const float* x, float* y, i64 rows, i64 fault) {
    __shared__ __align__(16) float stages[2][128];
    __shared__ __align__(8) u64 barriers[4];
    const ptx::SharedAddress full = ptx::shared_address(barriers), empty = ptx::shared_address(barriers + 2);
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; ++s) {
            ptx::mbarrier_init(full + 8 * s, 1);
            ptx::mbarrier_init(empty + 8 * s, 1);
        }
        if (fault != kNoInitFence) ptx::mbarrier_fence_init();
    }
    if (fault != kNoBarrierAfterInit) __syncthreads();
    if (threadIdx.x == 0) {
        for (int row = 0; row < rows; ++row) {
            const int s = row % 2;
            if (fault != kOverwrites) ptx::mbarrier_wait(empty + 8 * s, (row / 2 + 1) % 2);
            ptx::mbarrier_arrive_expect(full + 8 * s, 512);
            ptx::bulk_load(ptx::shared_address(stages[s]), x + 128 * row, 256, full + 8 * s);
            ptx::bulk_load(ptx::shared_address(stages[s] + 64), x + 128 * row + 64, 256, full + 8 * s);
        }
    } else if (threadIdx.x >= kWarp) {
        for (int row = 0; row < rows; ++row) {
            const int s = row % 2, lane = threadIdx.x % kWarp;
            if (fault != kNoWait) ptx::mbarrier_wait(full + 8 * s, row / 2 % 2);
            for (int i = lane; i < 128; i += kWarp) y[128 * row + i] = 2.0f * stages[s][i];
            if (fault >= kWritesStages)  // and TMA writes there next
                for (int i = lane; i < 128; i += kWarp) stages[s][i] = 0.0f;
            if (fault == kFencesWrites) ptx::fence_async_shared();
            __syncwarp();
            if (lane == 0 && fault != kKeepsStages) ptx::mbarrier_arrive(empty + 8 * s);
            if (lane == 0 && fault == kArrivesTwice) ptx::mbarrier_arrive(empty + 8 * s);
        }
    }
}

}  // namespace rtk
