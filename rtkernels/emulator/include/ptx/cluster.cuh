// Host version of cuda_src/ptx/cluster.cuh: every block is a cluster of its own.
#pragma once
#include "ptx/shared.cuh"

namespace rtk::ptx {

RTK_DEVICE int cluster_rank() { return 0; }
RTK_DEVICE void cluster_barrier() { __syncthreads(); }
RTK_DEVICE void st_cluster(SharedAddress address, int, float value) { *reinterpret_cast<float*>(address) = value; }

}  // namespace rtk::ptx
