// Host version of cuda_src/ptx/bulk.cuh.
#pragma once
#include "ptx/shared.cuh"

namespace rtk::ptx {

RTK_DEVICE void bulk_load(SharedAddress to, const void* from, u32 bytes, SharedAddress barrier) {
    emu::bulk_load(to, from, bytes, barrier);
}
RTK_DEVICE void bulk_load(SharedAddress to, const void* from, u32 bytes, SharedAddress barrier, u64) {
    emu::bulk_load(to, from, bytes, barrier);
}

RTK_DEVICE void bulk_store(void* to, SharedAddress from, u32 bytes) { emu::bulk_store(to, from, bytes); }
RTK_DEVICE void bulk_store_commit() { emu::bulk_store_commit(); }
RTK_DEVICE void bulk_store_wait_read() { emu::bulk_store_wait_read(); }
template <int kPending>
RTK_DEVICE void bulk_store_wait_read_but() {
    emu::bulk_store_wait_read(kPending);
}
RTK_DEVICE void bulk_add(void* to, SharedAddress from, u32 bytes) { emu::bulk_store(to, from, bytes, true); }
RTK_DEVICE void bulk_store_wait() { emu::bulk_store_wait(); }
RTK_DEVICE void fence_async_global() {}

}  // namespace rtk::ptx
