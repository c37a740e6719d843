// Each block of a cluster gives its number to all others, which add them up. `fault` plants a bug.
#include "ptx/cluster.cuh"

namespace rtk {

inline constexpr int kNoFault = 0, kNotStarted = 1, kNoWait = 2, kTwoWriters = 3, kNoSuchBlock = 4, kTooFar = 5,
                     kNotAll = 6;

__global__ void sum_of_cluster(const float* x, float* y, i64 blocks, i64 fault) {
    __shared__ float numbers[8];
    const int rank = ptx::cluster_rank(), thread = static_cast<int>(threadIdx.x);
    if (fault != kNotStarted) ptx::cluster_barrier();
    if (fault == kNoWait && thread == 0) numbers[(rank + 1) % 2] = 0.0f;
    if (thread < blocks + (fault == kNoSuchBlock)) {
        const int place = fault == kTwoWriters ? 0 : fault == kTooFar ? 8 + rank : rank;
        ptx::st_cluster(ptx::shared_address(numbers + place), thread, x[blockIdx.x]);
    }
    if (fault == kNotAll && rank == 1 && thread < kWarp) __syncthreads();
    ptx::cluster_barrier();
    if (thread != 0) return;
    float sum = 0.0f;
    for (int i = 0; i < blocks; ++i) sum += numbers[i];
    y[blockIdx.x] = sum;
}

}  // namespace rtk
