// The first warp writes numbers and goes on; the second waits for them at a named barrier, and doubles them. `fault`: the
// first warp writes again without waiting for anybody.
#include "ptx/barrier.cuh"

namespace rtk {

__global__ void told_by_a_barrier(float* y, i64 fault) {
    __shared__ float numbers[kWarp];
    const int lane = threadIdx.x % kWarp;
    if (threadIdx.x < kWarp) {
        numbers[lane] = static_cast<float>(lane);
        ptx::named_barrier_arrive(1, 2 * kWarp);
        if (fault) numbers[lane] = 0.0f;
    } else {
        ptx::named_barrier_sync(1, 2 * kWarp);
        y[lane] = 2.0f * numbers[kWarp - 1 - lane];
    }
}

}  // namespace rtk
