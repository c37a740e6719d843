// TMA bulk copies without a tensor map (sm_90 and up). Loads arrive at an mbarrier; stores, including those with tensor
// maps, belong to groups of the thread that issued them.
#pragma once
#include "ptx/shared.cuh"

namespace rtk::ptx {

// Copies `bytes` from global to shared memory; both addresses and the size are multiples of 16.
RTK_DEVICE void bulk_load(SharedAddress to, const void* from, u32 bytes, SharedAddress barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// The same with an L2 policy (ptx/ldst.cuh).
RTK_DEVICE void bulk_load(SharedAddress to, const void* from, u32 bytes, SharedAddress barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// Copies in the other direction.
RTK_DEVICE void bulk_store(void* to, SharedAddress from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

// Closes this thread's current group of stores.
RTK_DEVICE void bulk_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until this thread's stores have read shared memory. The end of the kernel waits for the writes.
RTK_DEVICE void bulk_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// The same for all but the newest kPending groups.
template <int kPending>
RTK_DEVICE void bulk_store_wait_read_but() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Adds `bytes` of floats in shared memory to those in global memory, atomically with respect to other additions; a
// store as above.
RTK_DEVICE void bulk_add(void* to, SharedAddress from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

// Waits until this thread's stores have been written.
RTK_DEVICE void bulk_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders this thread's accesses to global memory before those that TMA makes on its behalf.
RTK_DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace rtk::ptx
