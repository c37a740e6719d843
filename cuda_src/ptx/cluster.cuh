// Thread block clusters (sm_90 and up): blocks that run together and reach each other's shared memory.
#pragma once
#include "ptx/shared.cuh"

namespace rtk::ptx {

// This block's number in its cluster.
RTK_DEVICE int cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
}

// A barrier over all threads of the cluster in two halves. What was written, anywhere, before arriving is seen by all
// after waiting. Blocks may reach each other's shared memory only after one such barrier: until then some may not run.
RTK_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
RTK_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Stores to the place that `address` is in the shared memory of block `rank`.
RTK_DEVICE void st_cluster(SharedAddress address, int rank, float value) {
    asm volatile(
        "{\n"
        ".reg .u32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "st.shared::cluster.f32 [there], %2;\n"
        "}" ::"r"(address),
        "r"(rank), "f"(value)
        : "memory");
}

}  // namespace rtk::ptx
