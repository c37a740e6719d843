// Clusters: blocks that run at the same time and reach each other's shared memory (sm_90 and up; elsewhere, and without
// the launch attribute, every block is a cluster of its own).
#pragma once
#include "ptx/shared.cuh"

namespace rtk::ptx {

// Rank of this block in its cluster.
RTK_DEVICE int cluster_rank() {
#if RTK_HAS_TMA
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
#else
    return 0;
#endif
}

// Waits for all threads of all blocks of the cluster; what they wrote before is visible after it.
RTK_DEVICE void cluster_barrier() {
#if RTK_HAS_TMA
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// Writes to `address` in the shared memory of block `rank` of the cluster.
RTK_DEVICE void st_cluster(SharedAddress address, int rank, float value) {
#if RTK_HAS_TMA
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
#else
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
#endif
}

// The same with 16 bytes.
RTK_DEVICE void st_cluster(SharedAddress address, int rank, const float (&value)[4]) {
#if RTK_HAS_TMA
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there), "f"(value[0]), "f"(value[1]),
                 "f"(value[2]), "f"(value[3])
                 : "memory");
#else
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(value[0]), "f"(value[1]), "f"(value[2]),
                 "f"(value[3])
                 : "memory");
#endif
}

}  // namespace rtk::ptx
