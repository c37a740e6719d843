// TMA copies of boxes of a tensor (sm_90 and up). One thread issues them; the bytes arrive at an mbarrier.
#pragma once
#include "ptx/bulk.cuh"

namespace rtk::ptx {

// What cuTensorMapEncodeTiled writes. Kernels take it as `const __grid_constant__`, by its address.
struct alignas(64) TensorMap {
    u64 words[16];
};

RTK_DEVICE void tma_prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the map's box at (column, row), in elements, to shared memory. Elements outside of the tensor become 0; the
// bytes of the whole box are counted.
RTK_DEVICE void tma_load_2d(SharedAddress to, const TensorMap& map, SharedAddress barrier, i32 column, i32 row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// The same with an L2 policy (ptx/ldst.cuh).
RTK_DEVICE void tma_load_2d(SharedAddress to, const TensorMap& map, SharedAddress barrier, i32 column, i32 row,
                            u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
        : "memory");
}

RTK_DEVICE void tma_load_3d(SharedAddress to, const TensorMap& map, SharedAddress barrier, i32 first, i32 second,
                            i32 third) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(&map), "r"(first), "r"(second), "r"(third), "r"(barrier)
        : "memory");
}

RTK_DEVICE void tma_load_3d(SharedAddress to, const TensorMap& map, SharedAddress barrier, i32 first, i32 second, i32 third,
                            u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(&map), "r"(first), "r"(second), "r"(third), "r"(barrier), "l"(policy)
        : "memory");
}

// Stores from shared memory to the map's box at (column, row); elements outside of the tensor are skipped.
RTK_DEVICE void tma_store_2d(const TensorMap& map, SharedAddress from, i32 column, i32 row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
                 "r"(column), "r"(row), "r"(from)
                 : "memory");
}

RTK_DEVICE void tma_store_3d(const TensorMap& map, SharedAddress from, i32 first, i32 second, i32 third) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
                 "r"(first), "r"(second), "r"(third), "r"(from)
                 : "memory");
}

RTK_DEVICE void tma_store_4d(const TensorMap& map, SharedAddress from, i32 first, i32 second, i32 third, i32 fourth) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
                 "r"(first), "r"(second), "r"(third), "r"(fourth), "r"(from)
                 : "memory");
}

// Adds to the previous contents, in the map's type.
RTK_DEVICE void tma_add_3d(const TensorMap& map, SharedAddress from, i32 first, i32 second, i32 third) {
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
                 "r"(first), "r"(second), "r"(third), "r"(from)
                 : "memory");
}

RTK_DEVICE void tma_load_4d(SharedAddress to, const TensorMap& map, SharedAddress barrier, i32 first, i32 second, i32 third,
                            i32 fourth) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(&map), "r"(first), "r"(second), "r"(third), "r"(fourth), "r"(barrier)
        : "memory");
}

RTK_DEVICE void tma_load_5d(SharedAddress to, const TensorMap& map, SharedAddress barrier, i32 first, i32 second, i32 third,
                            i32 fourth, i32 fifth) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
        "l"(&map), "r"(first), "r"(second), "r"(third), "r"(fourth), "r"(fifth), "r"(barrier)
        : "memory");
}

// Makes this thread's ordinary writes to shared memory visible to TMA and to wgmma; to be followed by a barrier.
RTK_DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace rtk::ptx
