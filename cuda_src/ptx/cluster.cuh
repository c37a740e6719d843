// Blocks that run together and reach each other's shared memory (sm_90 and up).
#pragma once
#include "ptx/tma.cuh"

namespace rtk::ptx {

// Which block of its cluster this is.
RTK_DEVICE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Waits for all threads of all blocks of the cluster, and orders their memory accesses.
RTK_DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

// mbarrier_arrive at the barrier that block `rank` has at the address `barrier` is here.
RTK_DEVICE void mbarrier_arrive_at(SharedAddress barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// tma_load_2d into every block of the cluster whose bit is set in `blocks`, at the same address and barrier.
RTK_DEVICE void tma_load_2d_to(SharedAddress to, const TensorMap& map, SharedAddress barrier, i32 column, i32 row,
                               u16 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
        : "memory");
}

}  // namespace rtk::ptx
