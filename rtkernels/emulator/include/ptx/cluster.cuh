// Host version of cuda_src/ptx/cluster.cuh.
#pragma once
#include "ptx/shared.cuh"

namespace rtk::ptx {

RTK_DEVICE int cluster_rank() { return static_cast<int>(emu::cluster_rank()); }
RTK_DEVICE void cluster_barrier(RTK_EMU_CALLER) { emu::cluster_barrier(RTK_EMU_SITE("cluster_barrier")); }
RTK_DEVICE void st_cluster(SharedAddress address, int rank, float value) {
    if (rank == cluster_rank()) {
        *reinterpret_cast<float*>(address) = value;
    } else {
        emu::cluster_store(reinterpret_cast<void*>(address), static_cast<u32>(rank), __float_as_uint(value));
    }
}
RTK_DEVICE void st_cluster(SharedAddress address, int rank, const float (&value)[4]) {
    for (int i = 0; i < 4; ++i) st_cluster(address + 4 * i, rank, value[i]);
}

}  // namespace rtk::ptx
