// Copies of many bytes by the copy engine, without a tensor map (sm_90 and up). The bytes arrive at an mbarrier.
#pragma once
#include "ptx/shared.cuh"

namespace rtk::ptx {

// Copies `bytes` from global to shared memory; both addresses and the size are multiples of 16.
RTK_DEVICE void bulk_load(SharedAddress to, const void* from, u32 bytes, SharedAddress barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

}  // namespace rtk::ptx
